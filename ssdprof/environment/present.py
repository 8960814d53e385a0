"""Checks for the GPU that a command needs."""

from __future__ import annotations

import torch

from ssdprof.environment.toolchain import require_toolchain, unusable_gpu
from ssdprof.errors import MissingCapabilityError
from ssdprof.kernels.device import INTERPRETED


def require_gpu(what: str, hint: str) -> torch.device:
    """The current GPU.  Raises MissingCapabilityError without one, in interpreter mode, or if Triton cannot compile.

    what: the start of the sentence, such as "A bench needs".
    """
    if not torch.cuda.is_available() or INTERPRETED:
        why = "Triton's interpreter is on" if torch.cuda.is_available() else "torch sees none"
        raise MissingCapabilityError(f"{what} an NVIDIA GPU, and {why}.", unusable_gpu() or hint)
    require_toolchain()
    return torch.device("cuda", torch.cuda.current_device())
