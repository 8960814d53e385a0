"""The oracle: the scan, position after position, in fp64, and its gradients by torch's autograd.

For long sequences on a GPU, doubling gives the same in a number of steps that grows with the logarithm of the length.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from selective_scan.inputs import ScanInputs

GRADIENTS = ("dx", "ddecay", "dB", "dC")


def scan(x: torch.Tensor, decay: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> torch.Tensor:
    """y (b, l, h), in the dtype of the arguments, by a loop in Python over positions."""
    state = torch.zeros_like(B[:, 0])
    out = []
    for t in range(x.shape[1]):
        state = decay[:, t, :, None] * state + B[:, t] * x[:, t, :, None]
        out.append((C[:, t] * state).sum(-1))
    return torch.stack(out, dim=1)


def reference(inputs: ScanInputs, dy: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """y, and if a gradient of y is given also dx, ddecay, dB and dC; all in fp64."""
    leaves = [tensor.detach().double().requires_grad_(dy is not None) for tensor in inputs.tensors]
    y = scan(*leaves)
    found = {"y": y.detach()}
    if dy is not None:
        found |= zip(GRADIENTS, torch.autograd.grad(y, leaves, dy.double()), strict=True)
    return found


def by_doubling(
    inputs: ScanInputs, dy: torch.Tensor | None = None, *, rounded: bool = False
) -> dict[str, torch.Tensor]:
    """The results of `reference`, by formulas.

    rounded: computed in fp32; dC and ddecay from states in the dtype of the inputs, as kernels keep them; and every
        result in the dtype that a kernel stores.
    """
    working = torch.float32 if rounded else torch.float64
    x, decay, B, C = (tensor.to(working) for tensor in inputs.tensors)
    states = _states(decay, B * x[..., None])
    found = {"y": (C * states).sum(-1)}
    if dy is not None:
        dy = dy.to(working)
        if rounded:
            states = states.to(inputs.B.dtype).to(working)
        before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], dim=1)
        next_decay = torch.cat([decay[:, 1:], torch.ones_like(decay[:, :1])], dim=1)
        dstates = _states(next_decay.flip(1), (C * dy[..., None]).flip(1)).flip(1)
        found |= {
            "dx": (dstates * B).sum(-1),
            "ddecay": (dstates * before).sum(-1),
            "dB": dstates * x[..., None],
            "dC": states * dy[..., None],
        }
    if rounded:
        stored = {"ddecay": inputs.decay.dtype}
        found = {name: tensor.to(stored.get(name, inputs.x.dtype)) for name, tensor in found.items()}
    return found


class Judge:
    """Measures the distance of results from the exact ones on these inputs.

    exact: exact results; None computes them by doubling.
    """

    def __init__(
        self, inputs: ScanInputs, dy: torch.Tensor | None = None, exact: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        self._exact = exact or by_doubling(inputs, dy)
        eps = torch.finfo(inputs.x.dtype).eps
        self._allowed = {
            name: 2 * (_largest(tensor.double() - self._exact[name]) + eps * _largest(self._exact[name]))
            for name, tensor in by_doubling(inputs, dy, rounded=True).items()
        }

    def excess(self, found: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """For each tensor, the largest |found - exact| of any head, as a share of the allowed error.

        Above 1 is wrong.  Allowed, as in ssdprof's comparator: 2 * (max|rounded - exact| + eps * max|exact|).
        """
        result = {}
        for name, tensor in found.items():
            off = _largest(tensor.double() - self._exact[name])
            share = torch.where(off == 0, 0.0, off / self._allowed[name])  # the allowed error of a gradient of 0 is 0
            result[name] = float(torch.where(share.isnan(), torch.inf, share).max())
        return result

    def rms_errors(self, found: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """RMS of found - exact, divided by the RMS of exact."""
        return {
            name: float((tensor.double() - self._exact[name]).square().mean().sqrt()
                        / self._exact[name].square().mean().sqrt())
            for name, tensor in found.items()
        }  # fmt: skip


def _states(decay: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """h_t = decay_t h_{t-1} + added_t (b, l, h, n), all t at once: step s adds the value from 2^s positions before."""
    decay, added = decay.clone(), added.clone()
    distance = 1
    while distance < decay.shape[1]:
        added[:, distance:] += (
            decay[:, distance:, :, None] * added[:, :-distance]
        )  # a separate tensor, computed before the sum
        decay[:, distance:] *= decay[:, :-distance].clone()
        distance *= 2
    return added


def _largest(difference: torch.Tensor) -> torch.Tensor:
    """The largest magnitude per head, (h,)."""
    return difference.abs().transpose(0, 2).flatten(1).amax(1)
