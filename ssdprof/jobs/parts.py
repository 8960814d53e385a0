"""Marks the parts of a model while it runs, for a profile of its prefill."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, get_args

from torch import nn

from ssdprof.capture.conv_and_norm import CONVOLUTION, gated_norms
from ssdprof.capture.intercept import OperatorCall, Result
from ssdprof.checkpoint.meta import Mixer, is_attention
from ssdprof.core.base import PartName
from ssdprof.core.case import KernelTime, PartTime
from ssdprof.jobs.substitute import Compute
from ssdprof.measure.trace import GpuWork, marked

_SHOWN = 3  # kernels of a part
_IN_A_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")


def marking(compute: Compute) -> Compute:
    """`compute`, marked as the operator."""

    def compute_marked(call: OperatorCall) -> Result:
        with marked("operator"):
            return compute(call)

    return compute_marked


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
                namespace[CONVOLUTION] = _marking_calls(namespace[CONVOLUTION])
        yield


def part_times(work: Sequence[GpuWork]) -> tuple[PartTime, ...]:
    """The time of every part; the sum is the time of all work."""
    names: tuple[PartName, ...] = get_args(PartName)
    by_part: dict[str, list[GpuWork]] = {name: [] for name in names}
    for one in work:
        by_part[one.part if one.part in by_part else "rest"].append(one)
    return tuple(_part(name, by_part[name]) for name in names if by_part[name])


def _part(name: PartName, work: Sequence[GpuWork]) -> PartTime:
    kernels: dict[str, list[float]] = {}
    for one in work:
        kernels.setdefault(one.name, []).append(one.us)
    longest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:_SHOWN]
    return PartTime(
        name=name,
        gpu_us=sum(one.us for one in work),
        launches=len(work),
        kernels=tuple(KernelTime(name=kernel, gpu_us=sum(us), launches=len(us)) for kernel, us in longest),
    )


def _modules(model: nn.Module, sites: Sequence[Mixer]) -> dict[PartName, list[nn.Module]]:
    mixers = [site.module for site in sites]
    attention = [module for module in model.modules() if is_attention(module)]
    return {
        "mixer": list(dict.fromkeys(mixers)),
        "gated norm": list(dict.fromkeys(norm for site in sites for norm in gated_norms(site))),
        "attention": attention,
        "MLP": _mlps(model, {*mixers, *attention}),
    }


def _mlps(model: nn.Module, others: set[nn.Module]) -> list[nn.Module]:
    """The other modules with weight matrices in a decoder layer, outermost ones only, experts and routers included."""
    found: list[nn.Module] = []
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
            found.append(module)
            taken = (*taken, f"{name}.")
    return found


def _mark(module: nn.Module, part: PartName, restore: ExitStack) -> None:
    opened: list[AbstractContextManager[Any]] = []

    def enter(*_: Any) -> None:
        opened.append(marked(part))
        opened[-1].__enter__()

    def leave(*_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    restore.callback(module.register_forward_pre_hook(enter).remove)
    restore.callback(module.register_forward_hook(leave, always_call=True).remove)


def _marking_calls(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with marked("convolution"):
            return function(*args, **kwargs)

    return call
