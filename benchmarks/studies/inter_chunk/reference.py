"""The oracle: the recurrence, chunk after chunk, in fp64."""

from __future__ import annotations

import torch

from inter_chunk.inputs import InterChunkInputs


def reference(inputs: InterChunkInputs, *, rounded: bool = False) -> torch.Tensor:
    """The state after each chunk (b, c, h, k, v), fp64.

    rounded: computed in fp32, and every state rounded to the dtype of the inputs before the next chunk takes it.
    """
    working = torch.float32 if rounded else torch.float64
    states, decay = inputs.states.to(working), inputs.decay.to(working)
    state = torch.zeros_like(states[:, 0])
    out = []
    for c in range(states.shape[1]):
        if inputs.w is not None and inputs.y is not None:
            w, y = inputs.w[:, c].to(working), inputs.y[:, c].to(working)
            state = state - w @ (y.mT @ state)
        state = decay[:, c, ..., None] * state + states[:, c]
        if rounded:
            state = state.to(inputs.states.dtype).to(working)
        out.append(state.double())
    return torch.stack(out, dim=1)


def excess(out: torch.Tensor, inputs: InterChunkInputs) -> float:
    """The largest |out - exact| of any head, as a share of what its roundings allow: above 1 is wrong.

    Allowed, as by ssdprof's own comparator: 2 * (max|rounded - exact| + eps * max|exact|), per head.
    """
    exact, rounded = reference(inputs), reference(inputs, rounded=True)

    def largest(difference: torch.Tensor) -> torch.Tensor:
        return difference.abs().amax(dim=(0, 1, 3, 4))  # (h,)

    allowed = 2 * (largest(rounded - exact) + torch.finfo(out.dtype).eps * largest(exact))
    found = largest(out.double() - exact)
    return float(torch.where(found.isnan(), torch.inf, found / allowed).max())
