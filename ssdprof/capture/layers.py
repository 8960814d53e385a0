"""Runs a model on a prompt and passes on the operator inputs of the wanted layers, one layer at a
time.

transformers passes transposed views to the operator, in which neighbouring elements are
neighbouring positions.  The causal convolution of a production model writes one token-major buffer,
(b, l, conv_dim), and the model passes views of it (`CallBinding.views`).  Captures are copied into
the second layout.
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
from ssdprof.environment.child import rank_count
from ssdprof.environment.machine import host_memory
from ssdprof.errors import BadInputError, MissingCapabilityError
from ssdprof.kernels.inputs import Inputs
from ssdprof.operators.operator import OutputPair


@dataclass(frozen=True, kw_only=True)
class CapturedLayer:
    """The inputs of one call of a layer's operator.

    call: which call it is; None: the one on a whole prompt.
    inputs: token-major, on the device of the replay, with the model's values and dtypes.
    remark: sentences for the report, such as on how the inputs differ from the model's call; empty
        if there is nothing to say.
    served: the output that a server recorded, with final states in any dtype; None: there is none.
    slots: slot of each sequence in the server's pool of states; empty if they are not known.
    gap: whether calls of the layer may be missing before this one.
    """

    layer: LayerRef
    inputs: Inputs
    remark: str = ""
    call: CallRef | None = None
    served: OutputPair | None = None
    slots: tuple[int, ...] = ()
    gap: bool = False


OnLayer = Callable[[CapturedLayer], object]


def capture_layers(
    prompt: PromptRun, on_layer: OnLayer, *, host_budget_bytes: int | None = None
) -> int:
    """Run the model on the prompt and call `on_layer` for each of the prompt's layers and each of
    their calls (`Serving.calls`).

    `CallBinding.replacement` computes the operators of the model, a base model: on a GPU by bundled
    kernels, with exact intermediates and fp32 states.  With one segment, on_layer is called while
    the layer runs.  With several segments or packed sequences, the inputs of each layer are
    concatenated in main memory; after the prompt they are moved to the model's device for on_layer.
    Chunks are segments whose inputs are passed on immediately, with their initial states.  The
    model itself computes decode steps, whose inputs are passed on immediately too.

    host_budget_bytes: main memory for concatenated inputs; None: half of the available memory.  If
        the layers need more, they are captured in groups, each with its own run of the prompt.  If
        a single layer needs more, the disk is used.

    Returns the number of operator calls in all runs of the prompt, without decode steps.  At any
    time the inputs of at most one layer are on the model's device.  Whatever ends the capture (an
    exception of on_layer, Ctrl-C), the model is left as it was.  Raises the errors of
    `PromptRun.wanted` and `PromptRun.run`, and MissingCapabilityError if a layer's inputs fit
    neither in main memory nor on the disk.
    """
    wanted, serving = prompt.wanted, prompt.serving
    if serving.chunk is not None or (prompt.segment_count == 1 and not serving.packed):
        pass_on = _passing_on(prompt, wanted, on_layer, decode=False)

        def handler(call: OperatorCall) -> Result:
            pass_on(call)
            return call.replacement()

        return prompt.run(handler, _passing_on(prompt, wanted, on_layer, decode=True))
    budget = host_memory() // 2 if host_budget_bytes is None else host_budget_bytes
    # layer index -> bytes of its inputs, in the order in which layers run
    sizes = {
        mixer.layer_index: prompt.ids.numel() * capture_bytes_per_token(mixer)
        for mixer in prompt.mixers
        if mixer.layer_index in wanted
    }
    on_disk = max(sizes.values()) > budget
    if on_disk:
        budget = shutil.disk_usage(tempfile.gettempdir()).free // rank_count()
    groups = list(_groups(prompt, wanted, sizes, budget))
    return sum(_capture_together(prompt, group, on_layer, on_disk=on_disk) for group in groups)


def _passing_on(
    prompt: PromptRun, wanted: dict[int, LayerRef], on_layer: OnLayer, *, decode: bool
) -> Callable[[OperatorCall], None]:
    """A function that passes calls of the wanted layers to `on_layer` while the model runs.

    decode: whether it is called with the decode steps; otherwise with the calls before them.
    """
    upcoming = {index: iter(prompt.calls(decode=decode)) for index in wanted}

    def pass_on(call: OperatorCall) -> None:
        """Pass the call on if it is one of a wanted layer, and not a decode step after the last one
        that is captured.
        """
        layer = wanted.get(call.mixer.layer_index)
        if layer is None:
            return
        call_ref = next(upcoming[layer.index], None)
        if decode and call_ref is None:
            return
        # `token_major` copies the inputs, because the model may overwrite its tensors next.  The
        # copy is on the device where the model begins; the layer may be on another GPU.
        on_layer(
            CapturedLayer(
                layer=layer,
                inputs=token_major(call.inputs, prompt.ids.device),
                remark=call.remark,
                call=call_ref,
            )
        )

    return pass_on


def _capture_together(
    prompt: PromptRun, wanted: dict[int, LayerRef], on_layer: OnLayer, *, on_disk: bool
) -> int:
    """Run the model, concatenate each layer's inputs of all segments and packed sequences, and pass
    them on at the end; decode steps are passed on at once.  Returns the number of operator calls,
    without decode steps.
    """
    buffers: dict[int, PromptBuffer] = {}
    remarks: dict[int, str] = {}  # those of the first segment
    filled = dict.fromkeys(wanted, 0)  # positions in each layer's buffer

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

    calls = prompt.run(handler, _passing_on(prompt, wanted, on_layer, decode=True))
    (call_ref,) = prompt.calls(decode=False)
    for index, layer in wanted.items():
        inputs = buffers.pop(index).inputs(prompt.model.device)
        if prompt.serving.packed:
            inputs = packed(inputs, prompt.serving.packed)
        captured = CapturedLayer(
            layer=layer,
            inputs=inputs,
            remark=f"{remarks[index]} {prompt.remark}".strip(),
            call=call_ref,
        )
        # the device has room for one layer's inputs only
        del inputs
        on_layer(captured)
        del captured
    return calls


def _groups(
    prompt: PromptRun, wanted: dict[int, LayerRef], sizes: dict[int, int], budget: int
) -> Iterator[dict[int, LayerRef]]:
    """Divide the layers `wanted` into groups whose inputs take at most `budget` bytes.

    sizes: layer index -> bytes of the layer's inputs.

    Raises MissingCapabilityError if one layer takes more; `budget` is then that of the disk.
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
    """Bytes of the operator's inputs for one position of the prompt: the channels of the
    convolutions before the operator, and the gates of every head.  The mixer's parameters must have
    the dtype in which the model computes.
    """
    element_bytes = next(mixer.module.parameters()).element_size()
    per_head = operators.get(mixer.operator).binding.gate_bytes(element_bytes, mixer.sizes)
    return element_bytes * conv_width(mixer.module) + per_head * gated_heads(mixer.module)


def gated_heads(module: nn.Module) -> int:
    """The number of heads of a mixer that have a gate: the size of the parameter A_log.  In Kimi
    Delta Attention, a module inside the mixer has that parameter.
    """
    return next(gate.numel() for name, gate in module.named_parameters() if name.endswith("A_log"))


def conv_width(module: nn.Module) -> int:
    """The number of channels of all convolutions of a mixer: some models have one convolution,
    others one each for queries, keys and values.
    """
    return sum(child.in_channels for child in module.children() if isinstance(child, nn.Conv1d))


# --- layout


def token_major(inputs: Inputs, device: torch.device | None = None) -> Inputs:
    """A copy of the inputs in token-major layout, on `device`; None: on the device of the
    inputs.
    """
    device = device or inputs.device
    buffer = PromptBuffer(inputs, inputs.length, device)
    buffer.write(inputs, 0)
    return buffer.inputs(device)


class PromptBuffer:
    """A token-major buffer on `device` for the inputs of a prompt of `seqlen` positions, filled
    segment after segment.

    first: the inputs of the first segment.  They determine widths and dtypes, and everything that
        has no position (A, D, dt_bias, the state before the prompt, scalars).
    on_disk: whether the buffer is in the temporary folder, mapped into main memory.

    Raises BadInputError if `first` has packed sequences and is not the whole prompt, because their
    boundaries are those of one call.
    """

    def __init__(
        self, first: Inputs, seqlen: int, device: torch.device, *, on_disk: bool = False
    ) -> None:
        """Allocate the buffer, and copy the tensors that have no positions."""
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
            # a copy, because the state before the prompt may belong to the cache, which the model
            # overwrites
            name: tensor.detach().to(device, copy=True)
            for name, tensor in tensors.items()
            if name not in positioned
        }
        # no reference to `first`, which would keep the model's tensors alive
        self._kind: type[Any] = type(first)
        self._scalars = first.scalars

    def write(self, segment: Inputs, start: int) -> int:
        """Copy the inputs of a segment to the positions from `start`.  Returns their number."""
        for name, target in {**self._views(self._buffer), **self._per_position}.items():
            target[:, start : start + segment.length].copy_(segment.tensors[name].detach())
        return segment.length

    def inputs(self, device: torch.device) -> Inputs:
        """The inputs of the whole prompt on `device`; views of this buffer if it is there."""
        others = {**self._per_position, **self._static}
        moved = {name: tensor.to(device) for name, tensor in others.items()}
        whole: Inputs = self._kind(**self._scalars, **moved, **self._views(self._buffer.to(device)))
        return whole

    def _views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The buffer (b, l, conv_dim) as the tensors that are side by side in it, (b, l, heads,
        width).
        """
        views = {}
        offset = 0
        for name, (heads, width) in self._head_shapes.items():
            columns = buffer[:, :, offset : offset + heads * width]
            views[name] = columns.view(*buffer.shape[:2], heads, width)
            offset += heads * width
        return views


def _mapped(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in a temporary file, whose name is removed at once.

    Raises MissingCapabilityError if the disk has no room for all of it, because an access would end
    in SIGBUS later.
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
        flat = torch.from_file(file.name, shared=True, size=math.prod(shape), dtype=dtype)
        return flat.view(shape)


def packed(inputs: Inputs, lengths: Sequence[int]) -> Inputs:
    """The inputs (1, l, ...) as packed sequences of these lengths, which sum to l.  Raises
    BadInputError if inputs of the operator cannot be packed.
    """
    if "cu_seqlens" not in {field.name for field in fields(inputs)}:
        raise BadInputError(
            f"Sequences of {operators.get(inputs.operator).layers} layers cannot be packed.",
            "Use --batch instead.",
        )
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=inputs.device)
    return replace(inputs, cu_seqlens=bounds)
