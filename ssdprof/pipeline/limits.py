"""Limits of this machine, checked before anything large is downloaded or loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ssdprof.checkpoint.families import siblings_that_fit
from ssdprof.core.words import size_words
from ssdprof.environment.machine import free_memory
from ssdprof.environment.toolchain import require_toolchain, unusable_gpu
from ssdprof.errors import MissingCapabilityError
from ssdprof.kernels._triton import INTERPRETED
from ssdprof.measure.faults import first_line

if TYPE_CHECKING:
    from ssdprof.pipeline.subject import Subject

DEFAULT_SEQLEN_GPU = 16384
DEFAULT_SEQLEN_CPU = 512
_WHOLE = "Take a smaller model.  Without --decode and --answers, a run loads no layer after the deepest wanted one."
LONGEST_INTERPRETED = 2048  # tokens; Triton's interpreter runs one program after the other, in NumPy


def device() -> torch.device:
    """The device of the model: the current GPU, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def free_bytes() -> int:
    """Memory that can still be allocated on `device()`."""
    return free_memory(device())


def default_seqlens() -> tuple[int, ...]:
    """Prompt lengths when the user names none."""
    return (DEFAULT_SEQLEN_GPU if device().type == "cuda" else DEFAULT_SEQLEN_CPU,)


def check_replay(seqlens: Sequence[int], batch: int = 1) -> None:
    """Raises MissingCapabilityError for prompts that are too long to be replayed without a GPU.

    Also if Triton cannot compile kernels for the GPU.  Called before anything is downloaded or loaded.
    """
    longest = batch * max(seqlens)
    if not INTERPRETED:
        if device().type == "cpu":
            raise MissingCapabilityError(
                "Kernels are compiled for a GPU here, and torch cannot use one.",
                unusable_gpu() or "Set TRITON_INTERPRET=1 to run them on the CPU.",
            )
        require_toolchain()
    if device().type == "cpu" and longest > LONGEST_INTERPRETED:
        raise MissingCapabilityError(
            f"{longest:,} tokens need an NVIDIA GPU: without one, kernels run in Triton's interpreter, which is slow, "
            f"and the limit is {LONGEST_INTERPRETED:,} tokens.",
            unusable_gpu()
            or f"Use a shorter --seq, or fewer or shorter sequences: {LONGEST_INTERPRETED:,} tokens together.",
        )


def check_capture() -> None:
    """Raises MissingCapabilityError if Triton cannot compile kernels for the GPU, which compute a model's operators."""
    if not INTERPRETED and device().type == "cuda":
        require_toolchain()


def check_weights(subject: Subject) -> None:
    """MissingCapabilityError unless the weights that are needed fit into the device's memory."""
    free, needed = free_bytes(), subject.weight_bytes
    if needed <= free:
        return
    raise MissingCapabilityError(
        f"The weights of {subject.ref.repo_id} need {size_words(needed)} ({needed:,} bytes) on {device()}; "
        f"{size_words(free)} are free.",
        what_fits(subject, free),
    )


def what_fits(subject: Subject, free: int) -> str:
    """A hint: how many layers, and which models of the family, have weights of at most `free` bytes."""
    whole = subject.whole
    counted = () if whole else enumerate(subject.ref.layers, start=1)
    fitting = [n for n, layer in counted if subject.located.weight_bytes(layer.index, dtype=subject.dtype) <= free]
    siblings = [known.repo for known in siblings_that_fit(subject.ref.repo_id, free)]
    advice = []
    if fitting:
        advice.append(f"--layers first:{fitting[-1]} fits.")
    if siblings:
        advice.append(f"Models of its family that fit: {', '.join(siblings)}.")
    return " ".join(advice) or (_WHOLE if whole else "Not one layer of it fits: take a smaller model.")


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn out-of-memory errors of the GPU into errors with a hint."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MissingCapabilityError(
            f"{device()} ran out of memory: {first_line(error)}",
            "Use a shorter --seq, a shorter --segment, or --layers first:N with fewer layers.",
        ) from error
