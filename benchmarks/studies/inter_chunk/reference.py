"""The oracle: the recurrence, chunk after chunk, in fp64."""

from __future__ import annotations

import torch

from inter_chunk.inputs import InterChunkInputs


def reference(inputs: InterChunkInputs, *, rounded: bool = False) -> torch.Tensor:
    """The state after each chunk (b, c, h, k, v), fp64.

    rounded: computed in fp32, and every state rounded to the dtype of the inputs before the next chunk uses it.
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


class Judge:
    """Measures the distance of an output from the recurrence on these inputs."""

    def __init__(self, inputs: InterChunkInputs) -> None:
        self._exact = reference(inputs)
        eps = torch.finfo(inputs.states.dtype).eps
        rounding = _largest(reference(inputs, rounded=True) - self._exact)
        self._allowed = 2 * (rounding + eps * _largest(self._exact))

    def excess(self, out: torch.Tensor) -> float:
        """The largest |out - exact| of any head, as a share of the allowed error: above 1 is wrong.

        Allowed, as in ssdprof's comparator: 2 * (max|rounded - exact| + eps * max|exact|), per head.
        """
        share = _largest(out.double() - self._exact) / self._allowed
        return float(torch.where(share.isnan(), torch.inf, share).max())

    def rms_error(self, out: torch.Tensor) -> float:
        """RMS of out - exact, divided by the RMS of exact."""
        return float((out.double() - self._exact).square().mean().sqrt() / self._exact.square().mean().sqrt())


def _largest(difference: torch.Tensor) -> torch.Tensor:
    """The largest magnitude per head, (h,)."""
    return difference.abs().amax(dim=(0, 1, 3, 4))
