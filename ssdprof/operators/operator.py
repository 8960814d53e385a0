"""An operator's record, composed of small parts.  Each stage uses the part that it needs, and no operator's name.

    outline     name, title and stages
    binding     how models call the operator, and how a captured call is stored
    oracle      the oracle in pieces, and the roundings that a precision allows
    cost        dims and floating-point operations
    generator   shapes of models, and random inputs                  `generate.py`
    tuning      what `ssdprof tune` may vary                         `tuning.py`
    sharding    what one rank of a tensor-parallel server computes

Every operator's output is (out, final_states): out (b, l, h, ...) in the inputs' dtype, final_states
(sequences, h, ...) in fp32.  Reports call them by these names whatever the operator's own names are.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from ssdprof import kernels
from ssdprof.core.subject import Dims
from ssdprof.errors import BadInputError
from ssdprof.operators import tensors
from ssdprof.operators.lazy import LazyModule

if TYPE_CHECKING:
    import torch

    from ssdprof.kernels import precision, registry
    from ssdprof.kernels.precision import Precision
    from ssdprof.operators.generate import InputGenerator
    from ssdprof.operators.tuning import Tuning
else:
    torch = LazyModule("torch")
    precision = LazyModule("ssdprof.kernels.precision")
    registry = LazyModule("ssdprof.kernels.registry")

I = TypeVar("I")
P = TypeVar("P")
Output: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # out, final_states
Scalar = int | float | bool | str | None


# --- outline


@dataclass(frozen=True, kw_only=True)
class KnownSource:
    """One version of a file of another library's kernels whose stages are known.

    implementation: that launches its kernels; empty for helpers.  version, file: what it is, for people.
    sha256: of the file: another version has other lines, and another hash.
    stages: function -> its stage; "caller" for a helper that is inlined into others' stages.
    starts: line -> the stage that begins there, inside the function.
    """

    sha256: str
    version: str
    file: str
    implementation: str = ""
    stages: Mapping[str, str]
    starts: Mapping[int, str] = field(default_factory=dict)


def known_sources(operator: str) -> Mapping[str, KnownSource]:
    """The files of the operator's table, by their hash."""
    table = Path(__file__).parent / "known_sources" / f"{operator}.toml"
    found = [_source(**entry) for entry in tomllib.loads(table.read_text(encoding="utf-8"))["source"]]
    return {source.sha256: source for source in found}


def _source(*, starts: Mapping[str, str] | None = None, **values: object) -> KnownSource:
    lines = {int(line): stage for line, stage in (starts or {}).items()}
    return KnownSource(starts=lines, **values)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages of the algorithm, as its kernels name them in their STAGES.

    order: stages and their parts ("chunk_scan.previous") in the order of tables.
    words: a part's name in plain words.
    ahead: stages whose warps wait because they are ahead, which costs no time.
    kernels: function name of each bundled kernel -> the implementation that launches it.
    sources: files of other libraries' kernels whose stages are known, by their hash.
    """

    order: tuple[str, ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)
    ahead: frozenset[str] = frozenset()
    kernels: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, KnownSource] = field(default_factory=dict)

    @classmethod
    def together(cls, several: Sequence[Stages]) -> Stages:
        """The stages of several operators, concatenated."""
        return cls(
            order=tuple(name for stages in several for name in stages.order),
            words={part: words for stages in several for part, words in stages.words.items()},
            ahead=frozenset().union(*(stages.ahead for stages in several)),
            kernels={kernel: name for stages in several for kernel, name in stages.kernels.items()},
            sources={sha256: source for stages in several for sha256, source in stages.sources.items()},
        )


@dataclass(frozen=True, kw_only=True)
class Outline:
    """name: in stored records and on the command line.  title: for people.  layers: "Mamba-2", "a Mamba-2 layer".

    mixer_sizes: sizes of a checkpoint's layer, name -> attribute of its mixers in transformers.  words: of these sizes.
    largest: those sizes beyond which no bundled implementation runs.
    """

    name: str
    title: str
    layers: str
    mixer_sizes: Mapping[str, str] = field(default_factory=dict)
    words: str = ""
    largest: Mapping[str, int] = field(default_factory=dict)
    stages: Stages = field(default_factory=Stages)


# --- binding


@dataclass(frozen=True)
class BoundCall:
    """A mixer's call of its operator.

    remark: one sentence for the report if the inputs differ from the call or the config; else empty.
    """

    inputs: Any
    wants_final_state: bool
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class CallBinding(Generic[I]):
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
    replacement: what computes the operator in the model while its inputs are taken.
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
    replacement: Callable[[I], Output]
    scalars: Callable[[I], dict[str, Scalar]] = tensors.scalars
    arguments: Callable[[dict[str, Scalar]], dict[str, Any]] = dict


# --- oracle


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
class OracleSpec(Generic[I]):
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
    """load_inputs: the type that implementations take.  A part that is None is not implemented.

    baseline: the implementation that others are compared with.
    """

    outline: Outline
    load_inputs: Callable[[], type[I]]
    binding: CallBinding[I]
    cost: Cost[I] | None = None
    oracle: OracleSpec[I] | None = None
    generator: InputGenerator[I] | None = None
    load_tuning: Callable[[], Tuning[I]] | None = None
    sharding: Sharding[I] | None = None
    baseline: str = "unfused"

    @property
    def name(self) -> str:
        return self.outline.name

    @property
    def inputs(self) -> type[I]:
        return self.load_inputs()

    @property
    def judged(self) -> OracleSpec[I]:
        """The oracle.  BadInputError if there is none."""
        return self._present(self.oracle, "a rule by which its outputs are judged")

    @property
    def costed(self) -> Cost[I]:
        """The cost.  BadInputError if there is none."""
        return self._present(self.cost, "a count of its bytes and operations")

    @property
    def generated(self) -> InputGenerator[I]:
        """The interface of `bench`.  BadInputError if there is none."""
        return self._present(self.generator, "inputs that a bench could draw")

    @property
    def tunable(self) -> Tuning[I]:
        """The interface of `tune`.  BadInputError if there is none."""
        return self._present(self.load_tuning, "configurations that could be tuned")()

    def _present(self, part: P | None, words: str) -> P:
        if part is None:
            raise BadInputError(f"ssdprof does not have {words} for {self.outline.layers} layers ({self.name}) yet.")
        return part


# --- our kernels in a model

_PREFERRED = ("fused", "unfused")


def run_kernels(operator: str, inputs: Any, device: torch.device) -> Output:
    """Run the first of our implementations that supports `inputs`, with exact intermediates and fp32 states.

    Raises BadInputError with the reason of each refusal.
    """
    refusals = []
    with torch.cuda.device(device):
        for name in _PREFERRED:
            if name not in kernels.names(operator):
                refusals.append(f"{name}: there is none")
                continue
            try:
                out, final_states = kernels.get(operator, name).run(inputs, precision.Precision())
            except registry.UnsupportedError as error:
                refusals.append(f"{name}: {error}")
            else:
                return out, final_states
    raise BadInputError(f"No {operator.upper()} implementation runs this model's layers ({'; '.join(refusals)}).")
