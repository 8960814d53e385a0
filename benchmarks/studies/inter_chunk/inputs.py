"""Inputs of every kernel of the study: the state that each chunk adds, and each chunk's decay."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class InterChunkInputs:
    """h_c = decay_c * (h_{c-1} - w_c (y_c^T h_{c-1})) + states_c, with h_{-1} = 0 and decay_c along the rows of h.

    states: (b, c, h, k, v), the state that each chunk adds; decay: (b, c, h, k), fp32; w, y: (b, c, h, k, r), or None
    for a diagonal transition.  The result has the dtype of states.
    Raises ValueError for shapes that do not fit together.
    """

    states: torch.Tensor
    decay: torch.Tensor
    w: torch.Tensor | None = None
    y: torch.Tensor | None = None

    def __post_init__(self) -> None:
        rows = self.states.shape[:4]
        if self.states.ndim != 5 or self.decay.shape != rows:
            raise ValueError(f"decay must be {tuple(rows)}, not {tuple(self.decay.shape)}")
        if (self.w is None) != (self.y is None):
            raise ValueError("w and y belong together")
        for name, factor in (("w", self.w), ("y", self.y)):
            if factor is not None and (factor.ndim != 5 or factor.shape[:4] != rows):
                raise ValueError(f"{name} must be {tuple(rows)} and a rank, not {tuple(factor.shape)}")

    @property
    def rank(self) -> int:
        """0 for a diagonal transition."""
        return 0 if self.w is None else int(self.w.shape[4])

    def least_bytes(self) -> int:
        """Bytes to read every input once, and to write every state after a chunk once."""
        read = (self.states, self.decay, self.w, self.y)
        return sum(t.numel() * t.element_size() for t in (*read, self.states) if t is not None)


def draw(
    *,
    batch: int,
    chunks: int,
    heads: int,
    dim: int,
    rank: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> InterChunkInputs:
    """Random inputs with k = v = dim.

    states ~ N(0, 1); decay uniform in 0.5 .. 1; y ~ N(0, 1) with unit columns, and w = y / rank.  The transition then
    reduces a state by at most the state's length.
    """
    generator = torch.Generator(device).manual_seed(seed)
    rows = (batch, chunks, heads, dim)
    states = torch.randn(*rows, dim, generator=generator, device=device, dtype=torch.float32)
    decay = 0.5 + 0.5 * torch.rand(*rows, generator=generator, device=device, dtype=torch.float32)
    y = w = None
    if rank:
        y = torch.randn(*rows, rank, generator=generator, device=device, dtype=torch.float32)
        y = torch.nn.functional.normalize(y, dim=3)
        y, w = y.to(dtype), (y / rank).to(dtype)
    return InterChunkInputs(states=states.to(dtype), decay=decay, w=w, y=y)
