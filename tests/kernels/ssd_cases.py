"""SSD inputs for tests of kernels: distributed as in a trained layer, and views of one projection as in a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput

EXACT = Precision()
RELAXED = Precision(intermediates="relaxed", state_dtype=torch.float16)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PRECISIONS = tuple(
    Precision(intermediates=intermediates, state_dtype=dtype)  # type: ignore[arg-type]
    for intermediates in ("exact", "relaxed")
    for dtype in DTYPES
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes and options of one call.  `lengths`: packed sequences instead of a batch."""

    batch: int = 1
    seqlen: int = 75
    heads: int = 2
    headdim: int = 16
    dstate: int = 16
    groups: int = 1
    chunk_size: int = 32
    dtype: torch.dtype = torch.float32
    lengths: tuple[int, ...] = ()
    skip: str = "(h)"  # D: "", "(h)" or "(h, p)"
    gate: bool = False
    initial_states: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    device: str = "cpu"
    seed: int = 0

    def __str__(self) -> str:
        size = f"{list(self.lengths)}" if self.lengths else f"b{self.batch}-l{self.seqlen}"
        dims = f"h{self.heads}-p{self.headdim}-n{self.dstate}-g{self.groups}-q{self.chunk_size}"
        return f"{size}-{dims}-{str(self.dtype).removeprefix('torch.')}"

    def inputs(self, **overrides: Any) -> SSDInputs:
        generator = torch.Generator(self.device).manual_seed(self.seed)
        batch, seqlen = (1, sum(self.lengths)) if self.lengths else (self.batch, self.seqlen)
        h, p, g, n = self.heads, self.headdim, self.groups, self.dstate

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=self.device)

        # as in a model, nothing is contiguous: x, B and C are columns of the convolution's output, z and dt of the
        # projection before it
        x, B, C = normal(batch, seqlen, h * p + 2 * g * n).to(self.dtype).split([h * p, g * n, g * n], -1)
        z, dt = normal(batch, seqlen, h * p + h).to(self.dtype).split([h * p, h], -1)
        step = torch.exp(normal(h).abs() * -2 - 2)  # the layer's time step, before the token's part
        tensors = dict(
            x=x.unflatten(-1, (h, p)),
            dt=dt,
            A=-torch.linspace(1, 16, h, device=self.device),
            B=B.unflatten(-1, (g, n)),
            C=C.unflatten(-1, (g, n)),
            D={"": None, "(h)": normal(h), "(h, p)": normal(h, p)}[self.skip],
            z=z.unflatten(-1, (h, p)) if self.gate else None,
            dt_bias=step + torch.log(-torch.expm1(-step)),
            initial_states=normal(max(batch, len(self.lengths)), h, p, n) if self.initial_states else None,
            cu_seqlens=cu_seqlens(self.lengths, self.device) if self.lengths else None,
        )
        options = dict(chunk_size=self.chunk_size, dt_softplus=True, dt_limit=self.dt_limit)
        return SSDInputs(**(tensors | options | overrides))


def cu_seqlens(lengths: tuple[int, ...], device: str = "cpu") -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def in_fp64(inputs: SSDInputs, *names: str) -> SSDInputs:
    """The same numbers."""
    return replace(inputs, **{name: getattr(inputs, name).double() for name in names})


def cut(inputs: SSDInputs, start: int, stop: int, **overrides: Any) -> SSDInputs:
    """Positions start..stop of every row."""
    names = ("x", "dt", "B", "C", "z")
    tensors = {name: getattr(inputs, name) for name in names}
    pieces = {name: tensor[:, start:stop] for name, tensor in tensors.items() if tensor is not None}
    return replace(inputs, **(pieces | overrides))


def sequences(inputs: SSDInputs) -> list[SSDInputs]:
    """The packed sequences that are not empty, each as a separate call."""
    assert inputs.cu_seqlens is not None
    bounds = inputs.cu_seqlens.tolist()
    return [
        cut(
            inputs,
            bounds[i],
            bounds[i + 1],
            cu_seqlens=None,
            initial_states=None if inputs.initial_states is None else inputs.initial_states[i : i + 1],
        )
        for i in range(len(bounds) - 1)
        if bounds[i] < bounds[i + 1]
    ]


def assert_close(ours: SSDOutput, theirs: SSDOutput, tolerance: float) -> None:
    """The largest difference, as a fraction of the largest magnitude."""
    for name, a, b in zip(SSDOutput._fields, ours, theirs, strict=True):
        a, b = a.double(), b.double()
        assert torch.isfinite(a).all(), f"{name} is not finite"
        difference, magnitude = (a - b).abs().max(), b.abs().max()
        assert difference <= tolerance * magnitude, f"{name}: {difference:.3g} of {magnitude:.3g}"
