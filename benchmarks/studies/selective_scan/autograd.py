"""Each pair of kernels as a function that torch differentiates."""

from __future__ import annotations

from typing import Any, Literal

import torch

from selective_scan.inputs import ScanInputs
from selective_scan.parallel import parallel
from selective_scan.parallel_backward import parallel_backward
from selective_scan.sequential import ScanConfig, sequential
from selective_scan.sequential_backward import sequential_backward

Form = Literal["sequential", "parallel"]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: Form, config: ScanConfig | None, *tensors: torch.Tensor) -> torch.Tensor:
        x, decay, B, C = tensors
        run = sequential if form == "sequential" else parallel
        y, kept = run(ScanInputs(x=x, decay=decay, B=B, C=C), config=config)
        ctx.form, ctx.config = form, config
        ctx.save_for_backward(*tensors, kept)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, decay, B, C, kept = ctx.saved_tensors
        run = sequential_backward if ctx.form == "sequential" else parallel_backward
        return None, None, *run(ScanInputs(x=x, decay=decay, B=B, C=C), dy, kept, config=ctx.config)


def scan(inputs: ScanInputs, form: Form, *, config: ScanConfig | None = None) -> torch.Tensor:
    """y (b, l, h), which torch can differentiate with respect to x, decay, B and C."""
    y: torch.Tensor = _Scan.apply(form, config, *inputs.tensors)  # type: ignore[no-untyped-call]
    return y
