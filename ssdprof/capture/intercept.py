"""Intercepts operators: every call that a mixer makes for a prompt goes to our handler instead.
Calls for one token with a cached state are shown to another handler, and the model computes them.

Nothing in transformers is edited.  The mixer looks its operator up among the globals of the
modeling file at each call, whatever was bound there at import (transformers' torch fallback,
mamba_ssm, fla or a kernel of the hub), so replacing that global catches them all.  A hook before
each mixer identifies the caller.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from ssdprof import operators
from ssdprof.checkpoint.mixers import Mixer
from ssdprof.errors import BadInputError
from ssdprof.kernels.inputs import Inputs
from ssdprof.operators.operator import Operator

Result = tuple[torch.Tensor, torch.Tensor | None]  # output, final state


@dataclass(frozen=True)
class OperatorCall:
    """A call of an operator that a model makes.

    wants_final_state: whether the model asks for the final state.
    """

    mixer: Mixer
    operator: Operator
    inputs: Inputs  # the model's own tensors, or views of them
    wants_final_state: bool
    remark: str  # a sentence for the report, from `CallBinding.bind`; empty if there is none
    original: Callable[[], Any]  # () -> what the model's own function returns for this call

    def replacement(self) -> Result:
        """The result of the operator, computed by ssdprof and not by transformers."""
        return self.operator.binding.replacement(self.inputs)

    def run_original(self) -> Result:
        """The result of the model's own function; its final state is None if there is none."""
        result = self.original()
        return result if isinstance(result, tuple) else (result, None)


Handler = Callable[[OperatorCall], Result]
OnStep = Callable[[OperatorCall], object]
# how many calls of operators a handler computed ("calls"), and how many for one token with a cached
# state the model computed itself ("steps")
CallCount = Counter[Literal["calls", "steps"]]


@contextmanager
def intercept(
    mixers: Sequence[Mixer], handler: Handler, on_step: OnStep | None = None
) -> Iterator[CallCount]:
    """While the context is open, `handler` computes every operator call of `mixers` but those for
    one token with a cached state.  The value of the context counts the calls of both kinds.

    on_step: gets each call for one token with a cached state before the model computes it, which
        may overwrite the state.  None: these calls are only counted.

    The model is restored when the context closes.  Its forward raises what `handler`, `on_step` and
    `bind` raise, and BadInputError if a mixer calls its operator twice, or another module does.
    """
    count: CallCount = Counter()
    started: list[Mixer] = []  # the mixer that runs and has not yet called its operator, or none

    def entering(mixer: Mixer) -> Callable[..., None]:
        def enter(*_: object) -> None:
            started[:] = [mixer]

        return enter

    def call_handler(name: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Replaces `original`, a modeling file's global `name`, which computes the operator."""
        if not started:
            raise BadInputError(
                f"{name} was called outside the mixers that were found, or twice by one."
            )
        mixer = started.pop()
        count["calls"] += 1
        call = bind(mixer, original, args, kwargs)
        out, final_state = handler(call)
        if call.wants_final_state:
            return out, final_state
        return (out, None) if call.operator.binding.always_a_pair else out

    def call_step(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Replaces `original`, the function that computes one token with a cached state."""
        mixer = started.pop() if started else None
        count["steps"] += 1
        if on_step is not None:
            if mixer is None:
                raise BadInputError(
                    "A decode step was computed outside the mixers that were found."
                )
            on_step(bind(mixer, original, args, kwargs, step=True))
        return original(*args, **kwargs)

    with ExitStack() as restore:
        for mixer in mixers:
            restore.callback(mixer.module.register_forward_pre_hook(entering(mixer)).remove)
        by_global = {(id(mixer.namespace), mixer.function): mixer for mixer in mixers}
        for mixer in by_global.values():  # any one of the mixers that share a global
            namespace = mixer.namespace
            step = operators.get(mixer.operator).binding.step
            handled = partial(call_handler, mixer.function, namespace[mixer.function])
            restore.enter_context(replaced(namespace, mixer.function, handled))
            if step in namespace:
                handled_step = partial(call_step, namespace[step])
                restore.enter_context(replaced(namespace, step, handled_step))
        yield count


def namespaces(mixers: Sequence[Mixer]) -> list[dict[str, Any]]:
    """The globals of the mixers' modeling files, once for each file."""
    return list({id(mixer.namespace): mixer.namespace for mixer in mixers}.values())


@contextmanager
def replaced(namespace: dict[str, Any], name: str, function: Callable[..., Any]) -> Iterator[None]:
    """While the context is open, the global `name` of a modeling file is `function`.  The file must
    have this global.
    """
    before = namespace[name]
    namespace[name] = function
    try:
        yield
    finally:
        namespace[name] = before


@contextmanager
def forward_replaced(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """While the context is open, `module` computes `forward`."""
    # accelerate gives the object a `forward` of its own if the model's weights are on several
    # devices; other objects have only that of their class
    own_forward = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own_forward is None:
            del module.forward
        else:
            module.forward = own_forward


def bind(
    mixer: Mixer,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    step: bool = False,
) -> OperatorCall:
    """A mixer's call as an `OperatorCall`, whose inputs are the model's tensors, without a copy and
    with the model's strides.

    Models pass the keyword arguments of their forward through to the operator (`use_cache`,
    `output_router_logits`, ...).  These have no effect on the operator and are dropped.

    step: whether it is a call of `CallBinding.step`.

    Raises BadInputError for a call that the operator's inputs cannot express, and for a decode step
    of an operator whose steps cannot be captured.
    """
    operator = operators.get(mixer.operator)
    caller = type(mixer.module).__name__
    binding = operator.binding
    binder = binding.bind_step if step else binding.bind
    if binder is None:
        raise BadInputError(
            f"Decode steps of {mixer.operator} layers cannot be captured.", "Leave out --decode."
        )
    for name in binding.refused:
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise BadInputError(
                f"{caller} passes {name} to its operator, which a capture cannot hold."
            )
    run_original = partial(original, *args, **kwargs)
    try:
        inputs, wants_final_state, remark = binder(mixer.module, *args, **kwargs)
        return OperatorCall(mixer, operator, inputs, wants_final_state, remark, run_original)
    except (ValueError, TypeError) as error:
        raise BadInputError(
            f"{caller} calls its {mixer.operator} operator in an unknown way: {error}."
        ) from error
