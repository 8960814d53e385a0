"""Replaces a model's operators while it runs, and marks its parts for a profile."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import ParamSpec, TypeVar, get_args

from torch import nn

from ssdprof import operators
from ssdprof.capture.conv_and_norm import CONVOLUTION, gated_norms
from ssdprof.capture.intercept import OperatorCall, Result
from ssdprof.checkpoint.mixers import Mixer, is_attention
from ssdprof.core.base import PartName, distinct, grouped
from ssdprof.environment import child
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.state_formats import StateFormat
from ssdprof.measure.trace import GpuWork, marked
from ssdprof.operators.decode_states import stepped_states
from ssdprof.operators.implementations import required, resolve

P = ParamSpec("P")
T = TypeVar("T")
_SHOWN = 3  # the number of kernels of a part whose times are listed one by one
_LAYER_PATH = re.compile(r"(?:^|\.)layers\.\d+\.")
# Computes a call of an operator in place of the model.  The result is `out`, and the final states.
# These may be None if the call does not want them.
Compute = Callable[[OperatorCall], Result]


def implemented(name: str, precision: Precision, mixers: Sequence[Mixer]) -> Compute:
    """A function that computes calls of the operators of `mixers` by the implementation `name` at
    `precision`.

    Raises what `resolve` and `required` raise.  The returned function raises UnsupportedError for
    calls that the implementation does not support.
    """
    runs = {
        operator: required(resolve(operators.get(operator), name)).run
        for operator in dict.fromkeys(mixer.operator for mixer in mixers)
    }

    def compute(call: OperatorCall) -> Result:
        child.alive()
        result: Result = runs[call.mixer.operator](call.inputs, precision)
        return result

    return compute


def decoded(state_format: StateFormat) -> Compute:
    """A function that computes calls token by token, with the states rounded after each token to a
    format of a server's pool.

    Random numbers of a stochastic format differ from layer to layer, but are the same in every
    segment of a prompt.
    """

    def compute(call: OperatorCall) -> Result:
        child.alive()
        marks = [call.inputs.length]  # only the final states are needed
        seed = call.mixer.layer_index
        out, (final_states,) = stepped_states(call.inputs, state_format, 1, marks, seed)
        return out.to(call.inputs.values.dtype), final_states

    return compute


def by_layer(
    mixers: Sequence[Mixer], compute: Compute, *, layers: Collection[int] | None, elsewhere: Compute
) -> Compute:
    """A handler for `intercept` that calls `compute` in `layers`, and `elsewhere` in the others.

    mixers: all mixers of the model, from `find_mixers`.
    layers: indices of decoder layers; None: all layers.
    """
    chosen: dict[int, Compute] = {}
    for mixer in mixers:
        is_replaced = layers is None or mixer.layer_index in layers
        chosen[mixer.layer_index] = compute if is_replaced else elsewhere

    def compute_in_layer(call: OperatorCall) -> Result:
        return chosen[call.mixer.layer_index](call)

    return compute_in_layer


# --- parts of the model


def marking(part: str, function: Callable[P, T]) -> Callable[P, T]:
    """A function that calls `function`, and marks its kernel launches as those of a part."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with marked(part):
            return function(*args, **kwargs)

    return call


@contextmanager
def parts_marked(model: nn.Module, mixers: Sequence[Mixer]) -> Iterator[None]:
    """While the context is open, the launches of these parts of the model are marked: mixers, gated
    norms, attention, MLPs and convolutions.

    Open it inside of the context that replaces the convolution, so that the replacement is marked.
    """
    with ExitStack() as restore:
        for part, modules in _modules(model, mixers).items():
            for module in modules:
                _mark(module, part, restore)
        # each modeling file once; dictionaries cannot be hashed
        namespaces = {id(mixer.namespace): mixer.namespace for mixer in mixers}
        for namespace in namespaces.values():
            if CONVOLUTION in namespace:
                restore.callback(namespace.__setitem__, CONVOLUTION, namespace[CONVOLUTION])
                namespace[CONVOLUTION] = marking("convolution", namespace[CONVOLUTION])
        yield


def part_times(work: Sequence[GpuWork]) -> dict[PartName, dict[str, float]]:
    """Microseconds of the kernels of every part that has one, as in `Prefill.parts`.

    Work outside of all parts is in the part "rest", so that the sum is the time of all work.
    """
    names: tuple[PartName, ...] = get_args(PartName)

    def part_of(launch: GpuWork) -> str:
        part, *_ = launch
        return part if part in names else "rest"

    by_part = grouped(work, part_of)
    return {name: _kernel_times(by_part[name]) for name in names if name in by_part}


def _kernel_times(work: Sequence[GpuWork]) -> dict[str, float]:
    """Microseconds by the name of the kernel: of the `_SHOWN` longest ones, and of all others
    together.
    """
    us_of_kernels: dict[str, float] = {}
    for _, kernel, us in work:
        us_of_kernels[kernel] = us_of_kernels.get(kernel, 0.0) + us
    longest_first = sorted(us_of_kernels.items(), key=lambda item: -item[1])
    times = dict(longest_first[:_SHOWN])
    if len(longest_first) > _SHOWN:
        times["others"] = sum(us for _, us in longest_first[_SHOWN:])
    return times


def _modules(model: nn.Module, mixers: Sequence[Mixer]) -> dict[PartName, list[nn.Module]]:
    """The modules of each part of the model that is made of modules, each module once."""
    mixer_modules = [mixer.module for mixer in mixers]
    attention = [module for module in model.modules() if is_attention(module)]
    return {
        "mixer": list(dict.fromkeys(mixer_modules)),
        "gated norm": distinct(map(gated_norms, mixers)),
        "attention": attention,
        "MLP": _mlps(model, {*mixer_modules, *attention}),
    }


def _mlps(model: nn.Module, others: set[nn.Module]) -> list[nn.Module]:
    """The modules of decoder layers that have weight matrices, and neither are one of `others`, nor
    contain one, nor are inside of one: such as MLPs, experts and routers.

    A module inside of a listed one is not listed.  A single linear layer is not listed either.
    """
    outermost: list[nn.Module] = []
    taken: tuple[str, ...] = ()  # beginnings of the names of modules that belong to a part already
    for name, module in model.named_modules():
        if module in others:
            taken = (*taken, f"{name}.")
        elif (
            _LAYER_PATH.search(name)
            and not name.startswith(taken)
            and not isinstance(module, nn.Linear)
            and not others.intersection(module.modules())
            and any(parameter.ndim > 1 for parameter in module.parameters())
        ):
            outermost.append(module)
            taken = (*taken, f"{name}.")
    return outermost


def _mark(module: nn.Module, part: PartName, restore: ExitStack) -> None:
    """Mark the launches of a module's forward as those of a part, until `restore` is closed."""
    opened: list[AbstractContextManager[object]] = []  # marks of the calls that have not returned

    def enter(*_: object) -> None:
        opened.append(marked(part))
        opened[-1].__enter__()

    def leave(*_: object) -> None:
        opened.pop().__exit__(None, None, None)

    restore.callback(module.register_forward_pre_hook(enter).remove)
    restore.callback(module.register_forward_hook(leave, always_call=True).remove)
