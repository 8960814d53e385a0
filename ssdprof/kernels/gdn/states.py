"""Memory for final states."""

from __future__ import annotations

import torch

from ssdprof.kernels.gdn.inputs import GDNInputs


def empty_states(inputs: GDNInputs, device: torch.device | str, *, state_v_first: bool) -> torch.Tensor:
    """(sequences, HV, K, V) fp32, uninitialised.  state_v_first: with V before K in memory."""
    *outer, key_dim, value_dim = inputs.states_shape
    if state_v_first:
        return torch.empty(*outer, value_dim, key_dim, dtype=torch.float32, device=device).mT
    return torch.empty(*outer, key_dim, value_dim, dtype=torch.float32, device=device)
