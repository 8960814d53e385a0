"""Limits of this machine, checked before anything large is downloaded or loaded."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from ssdprof.environment.machine import free_memory
from ssdprof.environment.toolchain import require_toolchain, unusable_gpu
from ssdprof.errors import MissingCapabilityError
from ssdprof.kernels.device import INTERPRETED
from ssdprof.measure.first_run import first_line

DEFAULT_SEQLEN_GPU = 16384
DEFAULT_SEQLEN_CPU = 512
# tokens of one call, all sequences together: Triton's interpreter runs one program after the other,
# and longer calls would take too long
LONGEST_INTERPRETED = 2048


def device() -> torch.device:
    """The device of the model: the current GPU, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def free_bytes() -> int:
    """Bytes that can still be allocated on `device()`."""
    return free_memory(device())


def default_seqlens() -> tuple[int, ...]:
    """Prompt lengths in tokens, if the user gives none."""
    return (DEFAULT_SEQLEN_GPU if device().type == "cuda" else DEFAULT_SEQLEN_CPU,)


def check_replay(seqlens: Sequence[int], batch: int = 1) -> None:
    """Raises MissingCapabilityError if this machine cannot replay prompts of these lengths.

    Without a GPU, kernels need Triton's interpreter, and the prompts must be short.  With a GPU,
    Triton must be able to compile kernels for it, unless the interpreter runs them.

    seqlens: at least one.  batch: number of prompts side by side.
    """
    most_tokens = batch * max(seqlens)
    if not INTERPRETED:
        if device().type == "cpu":
            raise MissingCapabilityError(
                "Kernels are compiled for a GPU here, and torch cannot use one.",
                unusable_gpu() or "Set TRITON_INTERPRET=1 to run them on the CPU.",
            )
        require_toolchain()
    if device().type == "cpu" and most_tokens > LONGEST_INTERPRETED:
        raise MissingCapabilityError(
            f"{most_tokens:,} tokens need an NVIDIA GPU: without one, kernels run in Triton's "
            f"interpreter, which is slow, and the limit is {LONGEST_INTERPRETED:,} tokens.",
            unusable_gpu()
            or f"Use a shorter --seq, or fewer or shorter sequences: {LONGEST_INTERPRETED:,} "
            "tokens together.",
        )


def check_capture() -> None:
    """Raises MissingCapabilityError if a model would run on a GPU for which Triton cannot compile
    kernels.
    """
    if not INTERPRETED and device().type == "cuda":
        require_toolchain()


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn torch.OutOfMemoryError in the block into MissingCapabilityError with a hint.

    Also silences NumPy's warnings about NaN and overflow, which Triton's interpreter causes in
    masked lanes.  Outputs are checked for NaN elsewhere.
    """
    try:
        with np.errstate(invalid="ignore", over="ignore"):
            yield
    except torch.OutOfMemoryError as error:
        raise MissingCapabilityError(
            f"{device()} ran out of memory: {first_line(error)}",
            "Use a shorter --seq; with a model also a shorter --segment, or --layers first:N with "
            "fewer layers.",
        ) from error
