"""Inputs of every kernel of the study."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class ScanInputs:
    """h_t = decay_t h_{t-1} + B_t x_t, y_t = C_t . h_t, with h_{-1} = 0.

    x: (b, l, h); decay: (b, l, h) fp32; B, C: (b, l, h, n).  x, B and C have one dtype, which is that of y.  Raises
    ValueError for shapes that do not fit together.
    """

    x: torch.Tensor
    decay: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor

    def __post_init__(self) -> None:
        if self.x.ndim != 3 or self.decay.shape != self.x.shape:
            raise ValueError(f"decay must be {tuple(self.x.shape)}, not {tuple(self.decay.shape)}")
        for name, tensor in (("B", self.B), ("C", self.C)):
            if tensor.ndim != 4 or tensor.shape[:3] != self.x.shape or tensor.shape != self.B.shape:
                raise ValueError(f"{name} must be {tuple(self.x.shape)} and n, not {tuple(tensor.shape)}")

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.x, self.decay, self.B, self.C

    def least_bytes(self, *, keeps_states: bool) -> int:
        """Forward: every input is read once, y is written once, and so is every state, in the dtype of B, if kept."""
        written = (self.x, self.B) if keeps_states else (self.x,)
        return sum(t.numel() * t.element_size() for t in (*self.tensors, *written))


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The same scan in the form of a Mamba-2 layer with heads of one channel: decay = exp(dt A), and x times dt.

    x: (b, l, h); dt: (b, l, h) fp32; A: (h) fp32; B, C: (b, l, h, n).
    """

    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor

    def scan_inputs(self, dtype: torch.dtype | None = None) -> ScanInputs:
        """dtype: of x, B, C and decay; None: x, B and C as they are, decay in fp32."""
        x = (self.x.double() * self.dt.double()).to(dtype or self.x.dtype)
        decay = torch.exp(self.dt.double() * self.A.double()).to(dtype or torch.float32)
        return ScanInputs(x=x, decay=decay, B=self.B.to(x.dtype), C=self.C.to(x.dtype))


def draw_layer(
    *,
    batch: int,
    seqlen: int,
    heads: int,
    dstate: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Layer:
    """x, B and C ~ N(0, 1), dt log-uniform in 1e-3 .. 1e-1, A uniform in -16 .. -1."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, device=device, dtype=torch.float32)

    positions = (batch, seqlen, heads)
    return Layer(
        x=normal(*positions),
        dt=10 ** (-3 + 2 * uniform(*positions)),
        A=-1 - 15 * uniform(heads),
        B=normal(*positions, dstate),
        C=normal(*positions, dstate),
    )
