"""The GPU that a command needs."""

from __future__ import annotations

import torch

from ssdprof.errors import MissingCapabilityError
from ssdprof.kernels._triton import INTERPRETED


def require_gpu(what: str, hint: str) -> torch.device:
    """The current GPU.  MissingCapabilityError without one, or where Triton is told to interpret.

    what: needs it, as a sentence begins: "A bench needs".
    """
    if not torch.cuda.is_available() or INTERPRETED:
        why = "Triton's interpreter is on" if torch.cuda.is_available() else "torch sees none"
        raise MissingCapabilityError(f"{what} an NVIDIA GPU, and {why}.", hint)
    return torch.device("cuda", torch.cuda.current_device())
