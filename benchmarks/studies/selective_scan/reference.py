"""The oracle: the scan, position after position, in fp64, and its gradients by torch's autograd."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from selective_scan.inputs import ScanInputs

GRADIENTS = ("dx", "ddecay", "dB", "dC")


def scan(x: torch.Tensor, decay: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> torch.Tensor:
    """y (b, l, h), computed in the dtype of the arguments: a loop in Python over positions."""
    state = torch.zeros_like(B[:, 0])
    out = []
    for t in range(x.shape[1]):
        state = decay[:, t, :, None] * state + B[:, t] * x[:, t, :, None]
        out.append((C[:, t] * state).sum(-1))
    return torch.stack(out, dim=1)


def reference(inputs: ScanInputs, dy: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """y, and for a gradient of y also dx, ddecay, dB and dC; all in fp64."""
    leaves = [tensor.detach().double().requires_grad_(dy is not None) for tensor in inputs.tensors]
    y = scan(*leaves)
    found = {"y": y.detach()}
    if dy is not None:
        found |= zip(GRADIENTS, torch.autograd.grad(y, leaves, dy.double()), strict=True)
    return found


def excess(found: Mapping[str, torch.Tensor], inputs: ScanInputs, dy: torch.Tensor | None = None) -> dict[str, float]:
    """Of each tensor, the largest |found - exact| as a share of what roundings allow, over heads: above 1 is wrong.

    Allowed, as by ssdprof's own comparator: 2 * (max|rounded - exact| + eps * max|exact|), per head.  `rounded` rounds
    the states that are kept for the gradients, and the result, to the dtype of the inputs.
    """
    exact = reference(inputs, dy)
    rounded = _rounded(inputs, dy)
    eps = torch.finfo(inputs.x.dtype).eps
    result = {}
    for name, tensor in found.items():
        allowed = 2 * (_largest(rounded[name] - exact[name]) + eps * _largest(exact[name]))
        off = _largest(tensor.double() - exact[name])
        share = torch.where(off == 0, 0.0, off / allowed)  # nothing is allowed for a gradient that is 0
        result[name] = float(torch.where(share.isnan(), torch.inf, share).max())
    return result


def _rounded(inputs: ScanInputs, dy: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The same, computed in fp32, where dC and ddecay are taken from states in the dtype of the inputs."""
    x, decay, B, C = (tensor.float() for tensor in inputs.tensors)
    states, state = [], torch.zeros_like(B[:, 0])
    for t in range(x.shape[1]):
        state = decay[:, t, :, None] * state + B[:, t] * x[:, t, :, None]
        states.append(state)
    found = {"y": torch.stack([(C[:, t] * h).sum(-1) for t, h in enumerate(states)], dim=1)}
    if dy is not None:
        kept = [h.to(inputs.B.dtype).float() for h in states]
        dstate = torch.zeros_like(state)
        of_position: list[tuple[torch.Tensor, ...]] = []
        for t in reversed(range(x.shape[1])):
            dstate = dstate + C[:, t] * dy[:, t, :, None]
            before = kept[t - 1] if t else torch.zeros_like(state)
            of_position.append(
                ((dstate * B[:, t]).sum(-1), (dstate * before).sum(-1), dstate * x[:, t, :, None],
                 kept[t] * dy[:, t, :, None])
            )  # fmt: skip
            dstate = decay[:, t, :, None] * dstate
        found |= zip(GRADIENTS, (torch.stack(g[::-1], 1) for g in zip(*of_position, strict=True)), strict=True)
    wide = {"ddecay"}  # of the dtype of decay, fp32
    return {name: (t if name in wide else t.to(inputs.x.dtype)).double() for name, t in found.items()}


def _largest(difference: torch.Tensor) -> torch.Tensor:
    """Per head, (h,)."""
    return difference.abs().transpose(0, 2).flatten(1).amax(1)
