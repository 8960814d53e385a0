"""Recordings in the operator's own names, as a server writes them."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from ssdprof.capture.recording import DESCRIPTION
from ssdprof.kernels import GDNInputs
from ssdprof.kernels.gdn.reference import gdn_recurrence

Tensors = dict[str, torch.Tensor]


def record(
    folder: Path,
    operator: str,
    calls: Sequence[Tensors],
    processes: Sequence[int] = (10, 9),
    **arguments,
) -> Path:
    """A folder in which each process has made the same calls."""
    folder.mkdir()
    description = {"operator": operator, "source": "mine", "arguments": arguments}
    (folder / DESCRIPTION).write_text(json.dumps(description))
    for process in processes:
        for number, tensors in enumerate(calls):
            contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(contiguous, folder / f"{process}_{number:06d}.safetensors")
    return folder


def gdn_call(
    length: int,
    bounds: Sequence[int] = (),
    initial_state: torch.Tensor | None = None,
    *,
    forgets: float = 1.0,
) -> Tensors:
    """Inputs on two heads, and what they compute.  bounds: of packed sequences; empty: a single
    one.  forgets: g is up to so far below 0.
    """
    inputs = {
        "q": torch.randn(1, length, 1, 16),
        "k": torch.nn.functional.normalize(torch.randn(1, length, 1, 16), dim=-1),
        "v": torch.randn(1, length, 2, 8),
        "g": -torch.rand(1, length, 2) * forgets,
        "beta": torch.rand(1, length, 2),
    }
    if bounds:
        inputs["cu_seqlens"] = torch.tensor(bounds)
    if initial_state is not None:
        inputs["initial_state"] = initial_state
    out, final_states = gdn_recurrence(GDNInputs(**inputs))
    return {**inputs, "out": out.float(), "final_states": final_states.float()}
