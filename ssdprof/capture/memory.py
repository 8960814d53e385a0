"""Chooses the length of the prompt's segments on this machine, and explains when none fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ssdprof.capture.footprint import Footprint, decoder_layer_bytes, footprint
from ssdprof.capture.sites import find_sites
from ssdprof.core.words import size_words
from ssdprof.environment.machine import free_memory
from ssdprof.errors import MissingCapabilityError
from ssdprof.schema import LayerRef

SEGMENT_LENGTHS = (16384, 8192, 4096, 2048, 1024)


def choose_segment_length(
    model: Any, seqlen: int, layers: Sequence[LayerRef], *, batch: int = 1, free_bytes: int | None = None
) -> int:
    """Tokens per forward call: the whole prompt if it fits in the memory that the model leaves, else 16K, 8K, ... 1K.

    layers: those to capture.  free_bytes: memory on the model's device; None: read from the device.
    Raises MissingCapabilityError, with the bytes needed and with what would fit.
    """
    free = free_memory(model.device) if free_bytes is None else free_bytes
    need = footprint(model, {layer.index for layer in layers}, depth=max(layer.index for layer in layers))
    for length in (seqlen, *SEGMENT_LENGTHS):
        if length <= seqlen and batch * need.least(seqlen, (length,)) <= free:
            return length
    raise too_small(model, seqlen, need, batch=batch, free_bytes=free)


def too_small(model: Any, seqlen: int, need: Footprint, *, batch: int, free_bytes: int) -> MissingCapabilityError:
    """The error for a prompt that does not fit at any segment length."""
    fits = []
    if shorter := _longest_prompt(seqlen, need, batch, free_bytes):
        fits.append(f"--seq {shorter}")
    if layers := _most_layers(model, seqlen, batch, free_bytes):
        fits.append(f"--layers first:{layers}")
    needed = batch * need.least(seqlen, _lengths(seqlen))
    return MissingCapabilityError(
        f"A prompt of {seqlen:,} tokens needs {_in_words(needed)} besides the model's weights on {model.device}; "
        f"{_in_words(free_bytes)} are free.",
        f"What fits: {' or '.join(fits)}." if fits else "No --seq or --layers fits: take a smaller model.",
    )


def _lengths(seqlen: int) -> tuple[int, ...]:
    return (seqlen, *(length for length in SEGMENT_LENGTHS if length < seqlen))


def _longest_prompt(seqlen: int, need: Footprint, batch: int, free_bytes: int) -> int | None:
    """The largest power of two of at least 1024 below `seqlen` that fits."""
    shorter = 1 << (seqlen - 1).bit_length() - 1
    while shorter >= SEGMENT_LENGTHS[-1]:
        if batch * need.least(shorter, _lengths(shorter)) <= free_bytes:
            return shorter
        shorter //= 2
    return None


def _most_layers(model: Any, seqlen: int, batch: int, free_bytes: int) -> int | None:
    """The number of operator layers, from the first, that would fit without the weights of later decoder layers."""
    indices = [site.layer_index for site in find_sites(model)]
    weights = decoder_layer_bytes(model)
    for count in range(len(indices) - 1, 0, -1):
        wanted = set(indices[:count])
        saved = sum(size for index, size in weights.items() if index > max(wanted))
        need = footprint(model, wanted, depth=max(wanted))
        if batch * need.least(seqlen, _lengths(seqlen)) <= free_bytes + saved:
            return count
    return None


def _in_words(size: int) -> str:
    return f"{size_words(size)} ({size:,} bytes)"
