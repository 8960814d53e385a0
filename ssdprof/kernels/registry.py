"""Implementations of each operator, by name, and configurations that replace the committed ones.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec

if TYPE_CHECKING:
    import torch

    from ssdprof.kernels.inputs import Inputs, Output
    from ssdprof.kernels.precision import Precision


class UnsupportedError(Exception):
    """An implementation does not support these inputs or this precision.  The message names the
    reason.
    """


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How an implementation would run given inputs.  Reports show it next to the times."""

    variant: str  # "portable", "hopper", "interpreter", ...
    launches: int  # kernels per call
    config: Mapping[str, int | str | bool] = field(default_factory=dict)
    workspace_bytes: int = 0  # memory allocated in addition to the outputs
    reason: str = ""  # reason for this variant and configuration


def keeps_every_state(inputs: Inputs) -> bool:
    """`Implementation.keeps` of one that returns the state after each token."""
    return inputs.state_every == 1


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """`run(inputs, precision)` returns the operator's output tuple; `plan(inputs, precision)`
    launches nothing.  inputs: those of the operator, for example `GDNInputs`.

    Both raise UnsupportedError for inputs that the implementation does not support.

    kind: bundled with ssdprof, of another library, the user's own, or what a server computed.
    version: of a library; module:function of a user's own kernel.
    word: what a user types for it, from which another process finds it too; empty: none can.
    named: a library that the user asked for, judged as strictly as a kernel of their own.
    absent: why it is unavailable, in a sentence, with `hint` as the remedy; empty if it is
    available.
    needs_gpu: whether it runs on an NVIDIA GPU only.
    cuts_operands: whether it declares that it cuts the operands of matrix products to tf32.
    neglects: the share of a state that it may drop where a sequence is cut; 0: none
    precisions: (name of the inputs' dtype) -> its own precisions; None: it runs at any precision.
    keeps: (inputs with `state_every`) -> whether it returns all these states; else `run` refuses.
    pools: whether it reads initial states by `state_indices`; else `run` refuses.
    in_place: (inputs with `state_indices`, precision) -> out, and the pool itself, into whose slots
        it wrote the new states: the call of a server, as `Inputs` describes it.  None: it has none.
    stepped: (inputs, state format, tokens of a step, marks, seed) -> out (the values' shape, fp32)
        and the states (marks, sequences, heads, K, V; fp32) that a pool holds after the steps
        `marks`, with the state rounded to the format after each step: `stored_states.stepped`.  A
        format that is a function is not for it (`operators/decode_states.py`).  None: it has none.
    turned_pools: whether the last two axes of its pools change places in memory: V before K.
    batch_invariant: whether it promises that the bits of a sequence's results in place do not
        depend on other sequences, nor on its place among them.
    copies: (inputs) -> copies that it keeps of the tensors in which the operator is linear, and
    reads instead of them.
    """

    operator: str
    name: str
    run: Callable[..., Output]
    plan: Callable[..., Plan]
    kind: Literal["bundled", "library", "own", "served"] = "bundled"
    version: str = ""
    word: str = ""
    named: bool = False
    absent: str = ""
    hint: str = ""
    needs_gpu: bool = False
    cuts_operands: bool = False
    neglects: float = 0.0
    keeps: Callable[..., bool] = lambda _inputs: False
    pools: bool = False
    in_place: Callable[..., Output] | None = None
    stepped: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
    turned_pools: bool = False
    batch_invariant: bool = False
    precisions: Callable[..., tuple[Precision, ...]] | None = None
    copies: Callable[..., Sequence[torch.Tensor]] = lambda _inputs: ()

    def __post_init__(self) -> None:
        run = self.run
        if isinstance(run, partial) and run.func is _checked:
            run = run.args[1]  # `replace` made this from another implementation
        object.__setattr__(self, "run", partial(_checked, self, run))

    @property
    def isolated(self) -> bool:
        """Whether its first call on inputs of a form is made in another process."""
        return self.kind == "own" or self.named


def _checked(
    implementation: Implementation, run: Callable[..., Output], inputs: Inputs, precision: Precision
) -> Output:
    """`run(inputs, precision)`.  UnsupportedError for states on the way, pools and slots that the
    implementation does not declare to support.
    """
    name = implementation.name
    if getattr(inputs, "state_every", 0) and not implementation.keeps(inputs):
        raise UnsupportedError(
            f"{name}: it does not keep the state every {inputs.state_every} positions"
        )
    if getattr(inputs, "state_indices", None) is not None and not implementation.pools:
        raise UnsupportedError(
            f"{name}: one initial state for each sequence, no pool with state_indices"
        )
    serving = (getattr(inputs, field, None) for field in ("write_indices", "accepted"))
    if any(indices is not None for indices in serving):
        raise UnsupportedError(f"{name}: slots are written by calls in place only")
    return run(inputs, precision)


def unavailable(operator: str, name: str, *, absent: str, hint: str) -> Implementation:
    """A library that cannot be imported here."""

    def refuse(_inputs: Inputs, _precision: Precision) -> NoReturn:
        raise UnsupportedError(absent)

    return Implementation(
        operator=operator,
        name=name,
        run=refuse,
        plan=refuse,
        kind="library",
        absent=absent,
        hint=hint,
    )


P = ParamSpec("P")
Reasons = Iterator[tuple[bool, str]]  # whether each holds


def first_reason(reasons: Callable[P, Reasons]) -> Callable[P, str]:
    """The first reason that holds; "" if none does.  Later ones are not evaluated."""

    @wraps(reasons)
    def first(*args: P.args, **kwargs: P.kwargs) -> str:
        return next((reason for holds, reason in reasons(*args, **kwargs) if holds), "")

    return first


_implementations: dict[tuple[str, str], Implementation] = {}


def register(implementation: Implementation) -> Implementation:
    """Add an implementation.  Raises ValueError if the operator already has one of this name."""
    key = (implementation.operator, implementation.name)
    if key in _implementations:
        raise ValueError(f"{key[0]}/{key[1]} is registered already")
    _implementations[key] = implementation
    return implementation


def get(operator: str, name: str) -> Implementation:
    """The implementation registered as `name`.  Raises KeyError, whose message lists the registered
    names.
    """
    try:
        return _implementations[operator, name]
    except KeyError:
        raise KeyError(
            f"no implementation {name!r} of {operator}; there are: {', '.join(names(operator))}"
        ) from None


def names(operator: str) -> list[str]:
    """Names registered for `operator`, in order of registration."""
    return [name for op, name in _implementations if op == operator]


# The calls of one kernel that share a configuration: names and values of gpu (torch's name),
# operator, kernel, and the properties on which the configuration depends, in alphabetical order
CallKey = tuple[tuple[str, Any], ...]


def key_of_calls(**properties: Any) -> CallKey:
    return tuple(sorted(properties.items()))


# Configurations that a search has found to be faster on a GPU than the committed ones.  There are
# none until a program calls `use_overrides`: the library reads no file.  `ssdprof` loads those that
# `ssdprof tune` has saved.
_overrides: dict[CallKey, Any] = {}
_listeners: list[Callable[[], None]] = []


def use_overrides(operator: str, configs: Mapping[CallKey, object]) -> None:
    """Use exactly these configurations for an operator from now on, in this process; with none, the
    committed ones.
    """
    for key in [key for key in _overrides if ("operator", operator) in key]:
        del _overrides[key]
    _overrides.update(configs)
    for listener in _listeners:
        listener()


def override(key: CallKey) -> Any | None:
    """The configuration for these calls, or None."""
    return _overrides.get(key)


def when_overridden(listener: Callable[[], None]) -> None:
    """Call `listener` after every `use_overrides`, for a caller that caches choices."""
    _listeners.append(listener)
