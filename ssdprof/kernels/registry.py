"""The registry of implementations, by operator and name, and of configurations that replace the
committed ones.  Imports no torch.
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
    """An implementation does not support the inputs or the precision.  The message says why."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How an implementation would run a call.  Reports show it next to the times.

    variant: which of its kernels runs: "portable", "hopper", "interpreter", ...
    launches: number of launches per call.
    config: name of a setting -> its value.
    workspace_bytes: bytes that a call allocates in addition to the outputs.
    reason: why this variant and configuration run.
    """

    variant: str
    launches: int
    config: Mapping[str, int | str | bool] = field(default_factory=dict)
    workspace_bytes: int = 0
    reason: str = ""


def keeps_every_state(inputs: Inputs) -> bool:
    """`Implementation.keeps` of an implementation that can return the state after each token, but
    not after every few tokens.
    """
    return inputs.state_every == 1


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """An implementation of an operator.

    operator, name: its key in the registry.
    run: (inputs, precision) -> the operator's output.  The inputs are those of the operator, for
        example `GDNInputs`.  Raises UnsupportedError for inputs that are not supported.
    plan: (inputs, precision) -> the plan.  Launches nothing.  Raises UnsupportedError, too.
    kind: "bundled" with ssdprof, of another "library", the user's "own", or "served": outputs that
        a server recorded.
    version: version of a library; "module:function" of a user's kernel.
    word: what a user types for it, with which another process finds it too; empty if none can.
    named: whether it is a library that the user asked for, which is judged as strictly as a user's
        kernel.
    absent: a sentence that says why it is unavailable, and `hint` what to do; empty if it is
        available.
    needs_gpu: whether it runs on an NVIDIA GPU only.
    cuts_operands: whether it declares that it cuts the operands of matrix products to tf32.
    neglects: largest share of a state that it may drop at a cut of a sequence; 0: it drops nothing.
    keeps: (inputs with `state_every`) -> whether it returns all these states; if not, `run`
        refuses.
    pools: whether it reads initial states by `state_indices`; if not, `run` refuses.
    in_place: (inputs with `state_indices`, precision) -> out, and the pool, to whose slots it wrote
        the new states.  It is the call of a server, which `Inputs` describes.  Raises
        UnsupportedError.  None: it has no such call.
    stepped: (inputs, state format, tokens of a step, marks, seed) -> out, in the shape of the
        values, and the states after the steps `marks` (marks, sequences, heads, K, V), both in
        fp32, with the state rounded to the format after each step: see `stored_states.stepped`.  It
        does not take a format that is a function (`operators/decode_states.py`).  None: it has no
        such call.
    turned_pools: whether the last two axes of its pools are exchanged in memory: V before K.
    batch_invariant: whether it promises that the bits of a sequence's results in place depend
        neither on other sequences nor on its place among them.
    precisions: (name of the inputs' dtype) -> its precisions; None: it runs at any precision.
    copies: (inputs) -> copies that it keeps of the tensors `Inputs.linear`, and reads instead of
        them.
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
        """Have `run` check the inputs by this implementation's properties."""
        run = self.run
        if isinstance(run, partial) and run.func is _checked:
            # `replace` copied it from another implementation, by whose properties it checks
            _, run = run.args
        object.__setattr__(self, "run", partial(_checked, self, run))

    @property
    def isolated(self) -> bool:
        """Whether its first call on inputs of each form is made in another process."""
        return self.kind == "own" or self.named


def _checked(
    implementation: Implementation, run: Callable[..., Output], inputs: Inputs, precision: Precision
) -> Output:
    """`run(inputs, precision)`.  Raises UnsupportedError for a call with `state_every` or with a
    pool, if the implementation does not declare that it supports that, and for every call with
    write_indices or accepted, which only `in_place` takes.
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
    in_place_only = (getattr(inputs, argument, None) for argument in ("write_indices", "accepted"))
    if any(indices is not None for indices in in_place_only):
        raise UnsupportedError(f"{name}: slots are written by calls in place only")
    return run(inputs, precision)


def unavailable(operator: str, name: str, *, absent: str, hint: str) -> Implementation:
    """The implementation that stands for a library that cannot be imported here.  absent: the
    reason.  hint: what to do.
    """

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
Reasons = Iterator[tuple[bool, str]]  # whether a reason holds, and the reason


def first_reason(reasons: Callable[P, Reasons]) -> Callable[P, str]:
    """Decorates a generator of reasons: the function returns the first one that holds; "" if none
    does.  Later reasons are not evaluated.
    """

    @wraps(reasons)
    def first(*args: P.args, **kwargs: P.kwargs) -> str:
        return next((reason for holds, reason in reasons(*args, **kwargs) if holds), "")

    return first


_implementations: dict[tuple[str, str], Implementation] = {}


def register(implementation: Implementation) -> Implementation:
    """Add an implementation, and return it.  Raises ValueError if the operator already has one of
    this name.
    """
    key = (implementation.operator, implementation.name)
    if key in _implementations:
        raise ValueError(f"{key[0]}/{key[1]} is registered already")
    _implementations[key] = implementation
    return implementation


def get(operator: str, name: str) -> Implementation:
    """The implementation registered as `name` so far.  Raises KeyError, whose message lists the
    names registered for the operator.
    """
    try:
        return _implementations[operator, name]
    except KeyError:
        raise KeyError(
            f"no implementation {name!r} of {operator}; there are: {', '.join(names(operator))}"
        ) from None


def names(operator: str) -> list[str]:
    """Names registered for `operator` so far, in order of registration."""
    return [name for op, name in _implementations if op == operator]


# Identifies the calls of one kernel that share a configuration: names and values of the GPU (gpu:
# its name in torch), the operator, the kernel, and the properties on which the configuration
# depends, in alphabetical order
CallKey = tuple[tuple[str, Any], ...]


def key_of_calls(**properties: Any) -> CallKey:
    """The key of calls with these properties, in alphabetical order of their names."""
    return tuple(sorted(properties.items()))


# Configurations that a search has found to be faster on a GPU than the committed ones.  There are
# none until a program calls `use_overrides`: the library reads no file.  `ssdprof` loads those that
# `ssdprof tune` has saved.
_overrides: dict[CallKey, Any] = {}
_listeners: list[Callable[[], None]] = []


def use_overrides(operator: str, configs: Mapping[CallKey, object]) -> None:
    """From now on, use these configurations for an operator in this process, each for the calls of
    its key, which names the operator; all other calls use the committed ones.  They replace those
    of an earlier call of this function for the operator.
    """
    for key in [key for key in _overrides if ("operator", operator) in key]:
        del _overrides[key]
    _overrides.update(configs)
    for listener in _listeners:
        listener()


def override(key: CallKey) -> Any | None:
    """The configuration that replaces the committed one for these calls; None if there is none."""
    return _overrides.get(key)


def when_overridden(listener: Callable[[], None]) -> None:
    """Call `listener` after every `use_overrides`, from now on, so that the caller can drop cached
    choices.
    """
    _listeners.append(listener)
