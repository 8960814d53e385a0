"""Copies operator inputs into the layout that production kernels get.

transformers' torch path hands the operator transposed views, with neighbouring positions next to each other.  A
production model's causal convolution writes one token-major buffer, (b, l, conv_dim), and passes views of it
(`Door.views`).  Captures are brought into that layout; the model's own strides are recorded too.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from ssdprof import operators
from ssdprof.core.words import size_words
from ssdprof.errors import BadInputError, MissingCapabilityError
from ssdprof.operators.tensors import device, tensors


def strides(inputs: Any) -> dict[str, tuple[int, ...]]:
    """Strides of each tensor, in elements."""
    return {name: tensor.stride() for name, tensor in tensors(inputs).items()}


def token_major(inputs: Any, to: torch.device | None = None) -> Any:
    """A copy of `inputs` in token-major layout, on its own device or on another."""
    tensor = next(iter(tensors(inputs).values()))
    buffer = PromptBuffer(inputs, tensor.shape[1], tensor.device)
    buffer.write(inputs, 0)
    return buffer.inputs(to or tensor.device)


class PromptBuffer:
    """A token-major buffer on `device` for the inputs of a prompt of `seqlen` positions, filled piece by piece.

    `first` is the first piece: it gives widths and dtypes, and everything that has no position (A, D, dt_bias and the
    state before the prompt).  on_disk: the room is in the temporary folder, mapped into main memory.
    BadInputError if it holds packed sequences and is not the whole: their boundaries are those of one call.
    """

    def __init__(self, first: Any, seqlen: int, device: torch.device, *, on_disk: bool = False) -> None:
        door = operators.of(first).door
        given = tensors(first)
        if "cu_seqlens" in given and given[door.views[0]].shape[1] != seqlen:
            raise BadInputError(
                "The model packs sequences (cu_seqlens), which cannot be captured in segments.",
                "Give --segment the length of the whole prompt.",
            )
        views = {name: given[name] for name in door.views}
        one = next(iter(views.values()))
        batch, dtype = one.shape[0], one.dtype
        self._head_shapes = {name: tuple(view.shape[2:]) for name, view in views.items()}
        conv_dim = sum(heads * width for heads, width in self._head_shapes.values())
        room = _mapped if on_disk else partial(torch.empty, device=device)
        self._buffer = room((batch, seqlen, conv_dim), dtype=dtype)
        self._per_position = {
            name: room((batch, seqlen, *given[name].shape[2:]), dtype=given[name].dtype)
            for name in door.per_position
            if name in given
        }
        positioned = {*views, *self._per_position}
        self._static = {
            # A copy: the state before the prompt may belong to the cache, which is written in place.
            name: tensor.detach().to(device, copy=True)
            for name, tensor in given.items()
            if name not in positioned
        }
        # Only values: a reference to `first` would keep the model's own tensors alive.
        self._kind: type[Any] = type(first)
        self._scalars = {field.name: getattr(first, field.name) for field in fields(first) if field.name not in given}

    def write(self, piece: Any, start: int) -> int:
        """Copy the positions of `piece` to start, start + 1, ...; returns their number."""
        given = tensors(piece)
        length = next(iter(given.values())).shape[1]
        for name, target in {**self._views(self._buffer), **self._per_position}.items():
            target[:, start : start + length].copy_(given[name].detach())
        return length

    def inputs(self, device: torch.device) -> Any:
        """The whole prompt's inputs on `device`; views of this buffer if it is on that device."""
        moved = {name: tensor.to(device) for name, tensor in {**self._per_position, **self._static}.items()}
        arguments: dict[str, Any] = {**self._scalars, **moved, **self._views(self._buffer.to(device))}
        return self._kind(**arguments)

    def _views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        views, offset = {}, 0
        for name, (heads, width) in self._head_shapes.items():
            columns = buffer[:, :, offset : offset + heads * width]
            views[name] = columns.view(*buffer.shape[:2], heads, width)
            offset += heads * width
        return views


def _mapped(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in an unlinked file of the temporary folder, which is freed with the tensor.

    Raises MissingCapabilityError if the disk is full: without this check it would kill the process later.
    """
    size = math.prod(shape) * dtype.itemsize
    with tempfile.NamedTemporaryFile(prefix="ssdprof-") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise MissingCapabilityError(
                f"The temporary folder has no room for {size_words(size)} of captured inputs: {error.strerror}.",
                "Use a shorter --seq, or set TMPDIR to a folder on a larger disk.",
            ) from error
        return torch.from_file(file.name, shared=True, size=math.prod(shape), dtype=dtype).view(shape)


def packed(inputs: Any, lengths: Sequence[int]) -> Any:
    """`inputs`, (1, l, ...), as packed sequences of these lengths.

    BadInputError if the operator's inputs cannot be packed.
    """
    if "cu_seqlens" not in {field.name for field in fields(inputs)}:
        raise BadInputError(
            f"Sequences of {operators.of(inputs).outline.layers} layers cannot be packed.", "Use --batch instead."
        )
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device(inputs))
    return replace(inputs, cu_seqlens=bounds)
