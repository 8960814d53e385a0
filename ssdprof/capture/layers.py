"""Runs a model on a prompt and passes on the operator inputs of the wanted layers, one layer at a
time.

transformers' torch path hands the operator transposed views, with neighbouring positions next to
each other.  A production model's causal convolution writes one token-major buffer, (b, l,
conv_dim), and passes views of it (`CallBinding.views`).  Captures are brought into that layout.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from ssdprof import operators
from ssdprof.capture.forward import PromptRun
from ssdprof.capture.intercept import OperatorCall, Result
from ssdprof.checkpoint.mixers import Mixer
from ssdprof.core.target import CallRef, LayerRef
from ssdprof.core.words import size_words
from ssdprof.environment.child import started
from ssdprof.environment.machine import host_memory
from ssdprof.errors import BadInputError, MissingCapabilityError
from ssdprof.kernels.inputs import Inputs
from ssdprof.operators.operator import Output


@dataclass(frozen=True, kw_only=True)
class CapturedLayer:
    """The inputs of one call of a layer's operator.

    call: which one; None: the one for a whole prompt
    inputs: token-major, on the model's device; the values and dtypes are the model's
    remark: one sentence if the inputs differ from what the config says
    served: the output that a server recorded; final states in any dtype
    slots: of the sequences, in the server's pool of states; empty if they are not known
    gap: whether calls of the layer may be missing before this one
    """

    layer: LayerRef
    inputs: Inputs
    remark: str = ""
    call: CallRef | None = None
    served: Output | None = None
    slots: tuple[int, ...] = ()
    gap: bool = False


OnLayer = Callable[[CapturedLayer], object]


def capture_layers(
    prompt: PromptRun, on_layer: OnLayer, *, host_budget_bytes: int | None = None
) -> int:
    """Run the model on the prompt and call `on_layer` for each of its layers and each of their
    calls (`Serving.calls`).

    The operators of the model, a base model, are computed by ours, exact, with fp32 states.  With
    one segment, on_layer is called while that layer runs.  With several segments or packed
    sequences, the layers' inputs are concatenated in main memory, and after the prompt each layer's
    are moved to the model's device for on_layer.  Chunks are segments that are passed on
    immediately, with their initial states.  The model itself computes decode steps; their inputs
    are passed on immediately.

    host_budget_bytes: main memory for collected inputs (half of the available memory if None).  If
        the layers need more, they are captured in groups, each with its own prefill.  If a single
        layer needs more, the disk is used.

    Returns how often the operators were called.  Never more than one layer's inputs are on the
    model's device.  Whatever ends the capture (an exception of on_layer, Ctrl-C), the model is left
    as it was.  Raises BadInputError if part of the model bypasses its operator or a token id is
    beyond the vocabulary, MissingCapabilityError if memory is too small.
    """
    wanted, serving = prompt.wanted, prompt.serving
    if serving.chunk is not None or (prompt.segments == 1 and not serving.packed):
        pass_on = _passing_on(prompt, wanted, on_layer, decode=False)

        def handler(call: OperatorCall) -> Result:
            pass_on(call)
            return call.replacement()

        return prompt.run(
            handler, _passing_on(prompt, wanted, on_layer, decode=True) if serving.decode else None
        )
    budget = host_memory() // 2 if host_budget_bytes is None else host_budget_bytes
    # in the order in which they run
    sizes = {
        mixer.layer_index: prompt.ids.numel() * capture_bytes_per_token(mixer)
        for mixer in prompt.mixers
        if mixer.layer_index in wanted
    }
    if on_disk := max(sizes.values()) > budget:
        budget = shutil.disk_usage(tempfile.gettempdir()).free // started()
    groups = list(_groups(prompt, wanted, sizes, budget))
    return sum(_capture_together(prompt, group, on_layer, on_disk=on_disk) for group in groups)


def _passing_on(
    prompt: PromptRun, wanted: dict[int, LayerRef], on_layer: OnLayer, *, decode: bool
) -> Callable[[OperatorCall], None]:
    """A handler of calls that passes those of the wanted layers to `on_layer` while they run.

    decode: handle the decode steps; False: the calls before them.
    """
    upcoming = {index: iter(prompt.calls(decode=decode)) for index in wanted}

    def pass_on(call: OperatorCall) -> None:
        """Pass the call on, unless its layer has had all calls that are captured."""
        layer = wanted.get(call.mixer.layer_index)
        which = next(upcoming[layer.index], None) if layer else None
        if layer is None or (decode and which is None):
            return
        # A copy, where the model begins: what the model does next may overwrite it, and may be on
        # another GPU.
        on_layer(
            CapturedLayer(
                layer=layer,
                inputs=token_major(call.inputs, prompt.ids.device),
                remark=call.remark,
                call=which,
            )
        )

    return pass_on


def _capture_together(
    prompt: PromptRun, wanted: dict[int, LayerRef], on_layer: OnLayer, *, on_disk: bool
) -> int:
    """Concatenate the inputs of all segments, and of all packed sequences, and pass them on at the
    end.
    """
    buffers: dict[int, PromptBuffer] = {}
    remarks: dict[int, str] = {}  # of the first segment
    filled = dict.fromkeys(wanted, 0)

    def handler(call: OperatorCall) -> Result:
        index = call.mixer.layer_index
        if index in wanted:
            if index not in buffers:
                buffers[index] = PromptBuffer(
                    call.inputs, prompt.ids.shape[1], torch.device("cpu"), on_disk=on_disk
                )
                remarks[index] = call.remark
            filled[index] += buffers[index].write(call.inputs, filled[index])
        return call.replacement()

    steps = _passing_on(prompt, wanted, on_layer, decode=True) if prompt.serving.decode else None
    calls = prompt.run(handler, steps)
    (whole,) = prompt.calls(decode=False)
    for index, layer in wanted.items():
        inputs = buffers.pop(index).inputs(prompt.model.device)
        if prompt.serving.packed:
            inputs = packed(inputs, prompt.serving.packed)
        captured = CapturedLayer(
            layer=layer,
            inputs=inputs,
            remark=f"{remarks[index]} {prompt.remark}".strip(),
            call=whole,
        )
        del inputs
        on_layer(captured)
        del captured
    return calls


def _groups(
    prompt: PromptRun, wanted: dict[int, LayerRef], sizes: dict[int, int], budget: int
) -> Iterator[dict[int, LayerRef]]:
    """`wanted` in groups whose inputs take at most `budget` bytes.  sizes: bytes of each layer's
    inputs.
    """
    group: dict[int, LayerRef] = {}
    used = 0
    for index, size in sizes.items():
        if size > budget:
            raise MissingCapabilityError(
                f"The inputs of layer {index} for {prompt.ids.shape[1]:,} tokens take "
                f"{size_words(size)}, which does not fit in main memory, and the disk of the "
                f"temporary folder has room for {size_words(budget)}.",
                "Use a shorter --seq, or set TMPDIR to a folder on a larger disk.",
            )
        if used + size > budget:
            yield group
            group = {}
            used = 0
        group[index] = wanted[index]
        used += size
    yield group


def capture_bytes_per_token(mixer: Mixer) -> int:
    """Bytes of the operator's inputs for one position."""
    item = next(mixer.module.parameters()).element_size()
    per_head = operators.get(mixer.operator).binding.gate_bytes(item, mixer.sizes)
    return item * conv_width(mixer.module) + per_head * gates(mixer.module)


def gates(mixer: nn.Module) -> int:
    """Heads with a gate: the numbers in A_log, which of Kimi Delta Attention a module inside the
    mixer has.
    """
    return next(gate.numel() for name, gate in mixer.named_parameters() if name.endswith("A_log"))


def conv_width(mixer: nn.Module) -> int:
    """Channels of the convolution before the operator."""
    return sum(module.in_channels for module in mixer.children() if isinstance(module, nn.Conv1d))


# --- layout


def token_major(inputs: Inputs, device: torch.device | None = None) -> Inputs:
    """A copy of `inputs` in token-major layout, on its own device or on another."""
    device = device or inputs.device
    buffer = PromptBuffer(inputs, inputs.length, device)
    buffer.write(inputs, 0)
    return buffer.inputs(device)


class PromptBuffer:
    """A token-major buffer on `device` for the inputs of a prompt of `seqlen` positions, filled
    piece by piece.

    first: the first piece.  It gives widths and dtypes, and everything that has no position (A, D,
        dt_bias and the state before the prompt).
    on_disk: the buffer is in the temporary folder, mapped into main memory.

    BadInputError if `first` holds packed sequences and is not the whole: their boundaries are those
    of one call.
    """

    def __init__(
        self, first: Inputs, seqlen: int, device: torch.device, *, on_disk: bool = False
    ) -> None:
        """Allocates the buffer, and copies what has no position; `write` copies the rest."""
        binding = operators.get(first.operator).binding
        tensors = first.tensors
        if "cu_seqlens" in tensors and first.length != seqlen:
            raise BadInputError(
                "The model packs sequences (cu_seqlens), which cannot be captured in segments.",
                "Give --segment the length of the whole prompt.",
            )
        views = {name: tensors[name] for name in binding.views}
        first_view = tensors[binding.views[0]]
        batch = first_view.shape[0]
        self._head_shapes = {name: tuple(view.shape[2:]) for name, view in views.items()}
        conv_dim = sum(heads * width for heads, width in self._head_shapes.values())
        allocate = _mapped if on_disk else partial(torch.empty, device=device)
        self._buffer = allocate((batch, seqlen, conv_dim), dtype=first_view.dtype)
        self._per_position = {
            name: allocate((batch, seqlen, *tensors[name].shape[2:]), dtype=tensors[name].dtype)
            for name in binding.per_position
            if name in tensors
        }
        positioned = {*views, *self._per_position}
        self._static = {
            # A copy: the state before the prompt may belong to the cache, which is written in
            # place.
            name: tensor.detach().to(device, copy=True)
            for name, tensor in tensors.items()
            if name not in positioned
        }
        # Only values: a reference to `first` would keep the model's own tensors alive.
        self._kind: type[Any] = type(first)
        self._scalars = first.scalars

    def write(self, piece: Inputs, start: int) -> int:
        """Copy the positions of `piece` to start, start + 1, ...; returns their number."""
        for name, target in {**self._views(self._buffer), **self._per_position}.items():
            target[:, start : start + piece.length].copy_(piece.tensors[name].detach())
        return piece.length

    def inputs(self, device: torch.device) -> Inputs:
        """The whole prompt's inputs on `device`; views of this buffer if it is on that device."""
        moved = {
            name: tensor.to(device)
            for name, tensor in {**self._per_position, **self._static}.items()
        }
        whole: Inputs = self._kind(**self._scalars, **moved, **self._views(self._buffer.to(device)))
        return whole

    def _views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        views = {}
        offset = 0
        for name, (heads, width) in self._head_shapes.items():
            columns = buffer[:, :, offset : offset + heads * width]
            views[name] = columns.view(*buffer.shape[:2], heads, width)
            offset += heads * width
        return views


def _mapped(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in an unlinked temporary file.  MissingCapabilityError if the disk is full, instead
    of SIGBUS later.
    """
    size = math.prod(shape) * dtype.itemsize
    with tempfile.NamedTemporaryFile(prefix="ssdprof-") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise MissingCapabilityError(
                f"The temporary folder has no room for {size_words(size)} of captured inputs: "
                f"{error.strerror}.",
                "Use a shorter --seq, or set TMPDIR to a folder on a larger disk.",
            ) from error
        return torch.from_file(file.name, shared=True, size=math.prod(shape), dtype=dtype).view(
            shape
        )


def packed(inputs: Inputs, lengths: Sequence[int]) -> Inputs:
    """`inputs`, (1, l, ...), as packed sequences of these lengths.

    BadInputError if the operator's inputs cannot be packed.
    """
    if "cu_seqlens" not in {field.name for field in fields(inputs)}:
        raise BadInputError(
            f"Sequences of {operators.get(inputs.operator).layers} layers cannot be packed.",
            "Use --batch instead.",
        )
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=inputs.device)
    return replace(inputs, cu_seqlens=bounds)
