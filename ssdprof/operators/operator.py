"""An operator's record, composed of small parts.  Each stage uses the part that it needs, and no operator's name.

    door        how models call the operator, and how a captured call is stored
    judgement   the oracle in pieces, and the roundings that a precision allows
    cost        dims and floating-point operations
    bench       shapes of models, and how inputs are drawn        `drawing.py`
    tuning      what `ssdprof tune` may vary                      `tuning.py`
    sharding    what one rank of a tensor-parallel server computes
    outline     name, title and stages                            `outline.py`, imports no torch

Every operator's output is (out, final_states): out (b, l, h, ...) in the inputs' dtype, final_states
(sequences, h, ...) in fp32.  Reports call them by these names whatever the operator's own names are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from ssdprof.errors import BadInputError
from ssdprof.kernels.precision import Precision
from ssdprof.operators import tensors
from ssdprof.operators.drawing import Drawing
from ssdprof.operators.outline import Outline
from ssdprof.operators.tuning import Tuning
from ssdprof.schema import Dims

I = TypeVar("I")
P = TypeVar("P")
Output = tuple[torch.Tensor, torch.Tensor]  # out, final_states
Scalar = int | float | bool | str | None


# --- door


@dataclass(frozen=True)
class BoundCall:
    """A mixer's call of its operator.

    remark: one sentence for the report if the inputs differ from the call or the config; else empty.
    """

    inputs: Any
    wants_final_state: bool
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class Door(Generic[I]):
    """How models call the operator, and how a captured call is stored.

    function: the global of a modeling file that a mixer calls for a prompt.
    step: the global that it calls instead for one token with a cached state; the model still computes it.
        Empty: there is none.
    bind: (mixer, *args, **kwargs) of a call of `function` -> BoundCall, without a copy.  Raises ValueError or TypeError
        for a call that the inputs cannot express.
    bind_step: the same of a call of `step`; None: steps cannot be captured.
    refused: arguments of production kernels that change the result and that the inputs cannot express.
    always_a_pair: whether the function returns (out, None), and not out alone, where no final state is wanted.
    views: tensors (b, l, heads, width) that a production model writes side by side, in this order.
    per_position: the other tensors (b, l, ...).  What is in neither belongs to the whole call.
    always_fp32: those that a model computes in fp32 whatever its own dtype.
    gate_bytes: of what is in `per_position`, for one head and position, by the bytes of a number of the model's dtype.
    stand_in: what computes the operator in the model while its inputs are taken.
    scalars, arguments: the arguments that are no tensors as JSON's types, and back.
    """

    function: str
    step: str = ""
    bind: Callable[..., BoundCall]
    bind_step: Callable[..., BoundCall] | None = None
    refused: tuple[str, ...] = ()
    always_a_pair: bool = False
    views: tuple[str, ...]
    per_position: tuple[str, ...]
    always_fp32: tuple[str, ...] = ()
    gate_bytes: Callable[[int], int]
    stand_in: Callable[[I], Output]
    scalars: Callable[[I], dict[str, Scalar]] = tensors.scalars
    arguments: Callable[[dict[str, Scalar]], dict[str, Any]] = dict


# --- judgement


class OracleBlock(Protocol):
    """A piece of the oracle: positions start..stop of row `batch`, which belong to `sequence`.

    out: (stop - start, h, ...).  state: (h, ...) after position stop - 1, the final one if `last` of its sequence.
    """

    @property
    def sequence(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def last(self) -> bool: ...
    @property
    def out(self) -> torch.Tensor: ...
    @property
    def state(self) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Span:
    """Positions start..stop of a sequence in row `batch`; `start` lies on one of its chunk borders."""

    sequence: int
    batch: int
    start: int
    stop: int


class Gate(Protocol):
    """The part of a span that all precisions share: the decays' exponents, in fp32."""

    def largest_exponent(self) -> torch.Tensor:
        """The largest magnitude of an exponent in each head, (h)."""


class Rounded(Protocol):
    """The operator in one precision, with every rounding that it allows.  Carries the state within a sequence."""

    def advance(self, span: Span, gate: Any, /) -> Output:
        """out (l, h, ...) of the span in the inputs' dtype, and the state (h, ...) after it in fp32."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """Required shape and dtype of an output tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Judgement(Generic[I]):
    """The oracle, and the roundings that a precision allows (docs/measuring.md).

    forms: of out and of final_states.
    blocks: (inputs, length) -> the fp64 oracle in blocks of at most `length` positions, a multiple of `chunk_size`;
        in order, sequence after sequence, at least one for each.
    gate: of a span.  rounded: the same operator with every rounding that the precision allows.
    bytes_per_position: of a block's working memory, oracle and rounded form together.
    chunk_size: of the rounded form: spans begin at multiples of it.
    """

    forms: Callable[[I], tuple[Form, Form]]
    blocks: Callable[[I, int], Iterable[OracleBlock]]
    gate: Callable[[I, Span], Gate]
    rounded: Callable[[I, Precision], Rounded]
    bytes_per_position: Callable[[I], int]
    chunk_size: Callable[[I], int]


# --- cost


@dataclass(frozen=True, kw_only=True)
class Cost(Generic[I]):
    """dims: a call's sizes.  bytes_moved: the least: every input read once, every output written once.
    flops: the least number of multiplications and additions.
    """

    dims: Callable[[I], Dims]
    bytes_moved: Callable[[I], int]
    flops: Callable[[Dims], int]


# --- sharding


@dataclass(frozen=True, kw_only=True)
class Sharding(Generic[I]):
    """The share of the first of several tensor-parallel ranks.

    refusal: (sizes by the names of `Dims`, ranks) -> why the heads cannot be divided, in a sentence; empty if they can.
    first_rank: (inputs, ranks) -> the rank's own, as views.
    """

    refusal: Callable[[Mapping[str, int], int], str]
    first_rank: Callable[[I, int], I]


# --- the record


@dataclass(frozen=True, kw_only=True)
class Operator(Generic[I]):
    """inputs: the type that implementations take.  A part that is None is not implemented.

    baseline: the implementation that others are compared with.
    """

    outline: Outline
    inputs: type[I]
    door: Door[I]
    cost: Cost[I] | None = None
    judgement: Judgement[I] | None = None
    bench: Drawing[I] | None = None
    tuning: Tuning[I] | None = None
    sharding: Sharding[I] | None = None
    baseline: str = "unfused"

    @property
    def name(self) -> str:
        return self.outline.name

    @property
    def judged(self) -> Judgement[I]:
        """The judgement.  BadInputError if there is none."""
        return self._present(self.judgement, "a rule by which its outputs are judged")

    @property
    def costed(self) -> Cost[I]:
        """The cost.  BadInputError if there is none."""
        return self._present(self.cost, "a count of its bytes and operations")

    @property
    def drawing(self) -> Drawing[I]:
        """The interface of `bench`.  BadInputError if there is none."""
        return self._present(self.bench, "inputs that a bench could draw")

    @property
    def tunable(self) -> Tuning[I]:
        """The interface of `tune`.  BadInputError if there is none."""
        return self._present(self.tuning, "configurations that could be tuned")

    def _present(self, part: P | None, words: str) -> P:
        if part is None:
            raise BadInputError(f"ssdprof does not have {words} for {self.outline.layers} layers ({self.name}) yet.")
        return part
