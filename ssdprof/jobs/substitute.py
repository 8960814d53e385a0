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
from ssdprof.core.base import PartName, grouped
from ssdprof.environment import child
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.state_formats import StateFormat
from ssdprof.measure.trace import GpuWork, marked
from ssdprof.operators.decode_states import stepped_states
from ssdprof.operators.implementations import required, resolve

P = ParamSpec("P")
T = TypeVar("T")
_SHOWN = 3  # kernels of a part
_IN_A_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")
# out, and final states in fp32, or None if the call does not need them
Compute = Callable[[OperatorCall], Result]


def implemented(name: str, precision: Precision, sites: Sequence[Mixer]) -> Compute:
    """The implementation `name` at `precision`, for the operators that `sites` call.

    Raises what `resolve` and `required` raise.  The result raises UnsupportedError for calls that
    the implementation does not support.
    """
    runs = {
        operator: required(resolve(operators.get(operator), name)).run
        for operator in {site.operator for site in sites}
    }

    def compute(call: OperatorCall) -> Result:
        child.alive()
        result: Result = runs[call.mixer.operator](call.inputs, precision)
        return result

    return compute


def decoded(state_format: StateFormat) -> Compute:
    """Every operator token by token, with its states in a format of a pool.  The random numbers of
    a stochastic one differ from layer to layer; segments of a prompt have the same.
    """

    def compute(call: OperatorCall) -> Result:
        child.alive()
        marks = [call.inputs.length]  # the final states alone
        seed = call.mixer.layer_index
        out, (final_states,) = stepped_states(call.inputs, state_format, 1, marks, seed)
        return out.to(call.inputs.values.dtype), final_states

    return compute


def by_layer(
    sites: Sequence[Mixer],
    compute: Compute,
    *,
    layers: Collection[int] | None = None,
    elsewhere: Compute = OperatorCall.run_original,
) -> Compute:
    """A handler for `intercept` that calls `compute` in `layers`, and `elsewhere` in the others.

    sites: all that the model has, from `find_mixers`.
    layers: indices of decoder layers; None: all.  elsewhere: by default the model's own function.
    """
    chosen = {
        site.layer_index: compute if layers is None or site.layer_index in layers else elsewhere
        for site in sites
    }

    def compute_in_layer(call: OperatorCall) -> Result:
        return chosen[call.mixer.layer_index](call)

    return compute_in_layer


# --- parts of the model


def marking(part: str, function: Callable[P, T]) -> Callable[P, T]:
    """`function`, whose launches are marked as those of a part."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with marked(part):
            return function(*args, **kwargs)

    return call


@contextmanager
def parts_marked(model: nn.Module, sites: Sequence[Mixer]) -> Iterator[None]:
    """While the context is open, all parts of the model except the operator are marked.

    Open it inside of the context that replaces the convolution, so that the replacement is marked.
    """
    with ExitStack() as restore:
        for part, modules in _modules(model, sites).items():
            for module in modules:
                _mark(module, part, restore)
        for namespace in {id(site.namespace): site.namespace for site in sites}.values():
            if CONVOLUTION in namespace:
                restore.callback(namespace.__setitem__, CONVOLUTION, namespace[CONVOLUTION])
                namespace[CONVOLUTION] = marking("convolution", namespace[CONVOLUTION])
        yield


def part_times(work: Sequence[GpuWork]) -> dict[PartName, dict[str, float]]:
    """Microseconds of the kernels of every part: see `Prefill.parts`; the sum is the time of all
    work.
    """
    names: tuple[PartName, ...] = get_args(PartName)
    by_part = grouped(work, lambda kernel: kernel[0] if kernel[0] in names else "rest")
    return {name: _kernel_times(by_part[name]) for name in names if name in by_part}


def _kernel_times(work: Sequence[GpuWork]) -> dict[str, float]:
    """Microseconds of each kernel by name: the longest `_SHOWN`, and the sum of the others."""
    kernels = {
        name: sum(us for *_, us in launches)
        for name, launches in grouped(work, lambda kernel: kernel[1]).items()
    }
    longest_first = sorted(kernels.items(), key=lambda item: -item[1])
    times = dict(longest_first[:_SHOWN])
    if len(longest_first) > _SHOWN:
        times["others"] = sum(us for _, us in longest_first[_SHOWN:])
    return times


def _modules(model: nn.Module, sites: Sequence[Mixer]) -> dict[PartName, list[nn.Module]]:
    """The modules of each part of the model, each module once."""
    mixers = [site.module for site in sites]
    attention = [module for module in model.modules() if is_attention(module)]
    norms: dict[nn.Module, None] = {}
    for site in sites:
        norms |= dict.fromkeys(gated_norms(site))
    return {
        "mixer": list(dict.fromkeys(mixers)),
        "gated norm": list(norms),
        "attention": attention,
        "MLP": _mlps(model, {*mixers, *attention}),
    }


def _mlps(model: nn.Module, others: set[nn.Module]) -> list[nn.Module]:
    """The other modules with weight matrices in a decoder layer, outermost ones only, experts and
    routers included.
    """
    outermost: list[nn.Module] = []
    taken: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if module in others:
            taken = (*taken, f"{name}.")
        elif (
            _IN_A_LAYER.search(name)
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
    opened: list[AbstractContextManager[object]] = []

    def enter(*_: object) -> None:
        opened.append(marked(part))
        opened[-1].__enter__()

    def leave(*_: object) -> None:
        opened.pop().__exit__(None, None, None)

    restore.callback(module.register_forward_pre_hook(enter).remove)
    restore.callback(module.register_forward_hook(leave, always_call=True).remove)
