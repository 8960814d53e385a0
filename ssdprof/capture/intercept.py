"""Intercept the operator's calls: every call that a mixer makes goes to our handler instead.

Nothing in transformers is edited.  The mixer looks its operator up among the globals of the modeling file at each call,
whatever was bound there at import (transformers' torch fallback, mamba_ssm, fla or a kernel of the hub), so replacing
that global catches them all.  A hook before each mixer says whose call it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ssdprof import operators
from ssdprof.capture.bind import bind
from ssdprof.capture.sites import Site
from ssdprof.errors import BadInputError

Result = tuple[torch.Tensor, torch.Tensor | None]  # output, final state


@dataclass(frozen=True)
class OperatorCall:
    site: Site
    inputs: Any  # views of the model's own tensors
    wants_final_state: bool
    remark: str  # of `BoundCall`
    original: Callable[[], Any]

    def stand_in(self) -> Result:
        """The operator, computed by ours and never by transformers' own."""
        result: Result = operators.get(self.site.operator).door.stand_in(self.inputs)
        return result

    def run_original(self) -> Result:
        """What the model would have computed itself."""
        result = self.original()
        return result if isinstance(result, tuple) else (result, None)


@dataclass
class CallCount:
    calls: int = 0  # of the operator
    steps: int = 0  # for one token with a cached state: the model computes them itself


@contextmanager
def intercept(
    sites: Sequence[Site],
    handler: Callable[[OperatorCall], Result],
    on_step: Callable[[OperatorCall], object] | None = None,
) -> Iterator[CallCount]:
    """While the context is open, `handler` computes every operator call of `sites`.

    on_step: sees the calls for one token with a cached state before the model computes them itself, which may overwrite
    the state.
    The model is as before when the context closes, whatever ended it.  The handler's exceptions pass through the
    model's forward unchanged.
    """
    count = CallCount()
    running: list[Site] = []  # the mixer that has started and has not yet called its operator

    def replacement(function: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call_handler(*args: Any, **kwargs: Any) -> Any:
            if not running:
                raise BadInputError(f"{function} was called outside the mixers that were found, or twice by one.")
            site = running.pop()
            bound = bind(site.operator, site.mixer, args, kwargs)
            count.calls += 1
            call = OperatorCall(
                site, bound.inputs, bound.wants_final_state, bound.remark, lambda: original(*args, **kwargs)
            )
            out, final_state = handler(call)
            if bound.wants_final_state:
                return out, final_state
            return (out, None) if operators.get(site.operator).door.always_a_pair else out

        return call_handler

    def counted(step: Callable[..., Any]) -> Callable[..., Any]:
        def call_step(*args: Any, **kwargs: Any) -> Any:
            site = running.pop() if running else None
            count.steps += 1
            if on_step is not None:
                if site is None:
                    raise BadInputError("A decode step was computed outside the mixers that were found.")
                bound = bind(site.operator, site.mixer, args, kwargs, step=True)
                on_step(
                    OperatorCall(
                        site, bound.inputs, bound.wants_final_state, bound.remark, lambda: step(*args, **kwargs)
                    )
                )
            return step(*args, **kwargs)

        return call_step

    with ExitStack() as restore:

        def replace(namespace: dict[str, Any], name: str, wrapped: Callable[..., Any]) -> None:
            restore.callback(namespace.__setitem__, name, namespace[name])
            namespace[name] = wrapped

        for site in sites:

            def enter(_module: torch.nn.Module, _args: Any, site: Site = site) -> None:
                running[:] = [site]

            restore.callback(site.mixer.register_forward_pre_hook(enter).remove)
        for site in {(id(site.namespace), site.function): site for site in sites}.values():
            namespace, step = site.namespace, operators.get(site.operator).door.step
            replace(namespace, site.function, replacement(site.function, namespace[site.function]))
            if step in namespace:
                replace(namespace, step, counted(namespace[step]))
        yield count
