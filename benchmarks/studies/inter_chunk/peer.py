"""The state pass of mamba_ssm, the third of its five kernels: a decay for each chunk and head, a state in registers."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import torch

from inter_chunk.inputs import InterChunkInputs
from ssdprof.kernels.adapters import Tunings

NAME = "mamba_ssm's state pass"
Passed = tuple[torch.Tensor, torch.Tensor]  # the states that enter chunks (b, c, h, k v), the last one (b, h, k v)


class MambaSsm:
    """Raises ImportError if the library, or a package that it needs, is missing."""

    def __init__(self) -> None:
        module = import_module("mamba_ssm.ops.triton.ssd_state_passing")
        self._forward = module._state_passing_fwd
        Tunings([module])  # compiles its configurations in parallel

    def run(self, states: torch.Tensor, log_decay: torch.Tensor) -> Passed:
        """states (b, c, h, k v); log_decay (b, h, c).  It tunes itself in the first call."""
        entering, last = self._forward(states, log_decay, out_dtype=states.dtype)
        return entering, last


def scalar(inputs: InterChunkInputs) -> InterChunkInputs:
    """The same states with one decay for each chunk and head, that of the first row."""
    return replace(inputs, decay=inputs.decay[..., :1].expand_as(inputs.decay))


def arguments(inputs: InterChunkInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The arguments of `MambaSsm.run`, for inputs of `scalar`."""
    return inputs.states.flatten(3), inputs.decay[..., 0].log().transpose(1, 2).contiguous()


def leaving(passed: Passed, inputs: InterChunkInputs) -> torch.Tensor:
    """The state after each chunk, in the form of the study's kernels."""
    entering, last = passed
    after = torch.cat([entering[:, 1:], last[:, None].to(entering.dtype)], dim=1)
    return after.view_as(inputs.states)
