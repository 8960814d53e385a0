"""A recorded call: on its device as its function took it, then packed, and as it is stored."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from ssdprof import operators
from ssdprof.core.words import words
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.oracle import spans_of
from ssdprof.record.place import Activate, Place, unchanged


@dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """A call of a place's function, with its output.

    layer: its name or number in the model; empty if it is not known.
    number: rises from call to call of a layer: by 1, or by more if calls of the process may have
        been lost in between.
    inputs: until the call is `activated`, with gates as the function takes them.
    final_states: None if the function keeps none.
    slots: (sequences), slots in the program's pool of states, -1 for padding; None without a pool.
    weights, activate: as in `FunctionCall`.
    """

    place: Place
    layer: str
    number: int
    inputs: Inputs
    out: Tensor
    final_states: Tensor | None
    slots: Tensor | None
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    activate: Activate = unchanged

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors that the call has, by their names in a file; before it is `activated`, also
        its weights.

        Outputs come first, because they are copied in this order, and programs overwrite outputs
        before inputs.
        """
        outputs = {"out": self.out, "final_states": self.final_states, "slots": self.slots}
        present = {name: tensor for name, tensor in outputs.items() if tensor is not None}
        return {**present, **self.inputs.tensors, **self.weights}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def name(self) -> str:
        """ "layer model.layers.3, rank 0", or with "process 4711" if the rank is not known."""
        layer = f"layer {self.layer}" if self.layer else "a layer that is not known"
        number = rank()
        process = f"process {os.getpid()}" if number is None else f"rank {number}"
        return f"{layer}, {process}"

    @property
    def layer_key(self) -> tuple[str, str]:
        """Operator and layer.  Both are needed to identify a layer: layers of two operators may
        have the same name.
        """
        return self.place.operator, self.layer

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> RecordedCall:
        """The call with other tensors, under the names that the property `tensors` has for them."""
        fields = vars(self.inputs)
        changed = {name: tensors[name] for name in fields.keys() & tensors.keys()}
        return replace(
            self,
            inputs=type(self.inputs).unchecked(**fields | changed),
            out=tensors["out"],
            final_states=tensors.get("final_states"),
            slots=tensors.get("slots"),
            weights={name: tensors[name] for name in self.weights},
        )

    def on_host(self) -> RecordedCall:
        """The call in main memory: itself, or a copy in pinned memory if it is on a GPU.  Waits for
        the copy.
        """
        if self.inputs.device.type != "cuda":
            return self
        # without blocking, torch copies into pinned memory
        copies = {
            name: tensor.to("cpu", non_blocking=True) for name, tensor in self.tensors.items()
        }
        torch.cuda.current_stream(self.inputs.device).synchronize()
        return self.with_tensors(copies)

    def activated(self) -> RecordedCall:
        """The call with gates after their activations, and without weights."""
        inputs = self.activate(self.inputs, self.weights)
        return replace(self, inputs=inputs, weights={}, activate=unchanged)

    def packed(self) -> RecordedCall:
        """The call with its sequences packed in one row, with `cu_seqlens`.

        Padding (sequences with slot -1, and tokens behind the last sequence) is left out.
        There may be no token left.  Waits for the device, whose `cu_seqlens` and slots it reads.
        """
        inputs = self.inputs
        binding = operators.get(self.place.operator).binding
        of_tokens = {**binding.positional(inputs), "out": self.out}  # (b, l, ...)
        if inputs.cu_seqlens is not None:
            bounds = inputs.cu_seqlens.cpu()
        else:
            bounds = torch.arange(inputs.sequences + 1, dtype=torch.int32) * inputs.length
            of_tokens = {name: tensor.flatten(0, 1)[None] for name, tensor in of_tokens.items()}
        sequences = torch.arange(inputs.sequences)
        slots = self.slots
        if slots is not None:
            slots = slots.cpu()
            sequences = sequences[slots >= 0]
            slots = slots[sequences]
        lengths = bounds.diff()[sequences]
        packed_bounds = torch.cat([bounds[:1] * 0, lengths.cumsum(0, dtype=bounds.dtype)])
        shifts = bounds[sequences] - packed_bounds[:-1]
        # the indices of the tokens that stay
        tokens = torch.arange(int(packed_bounds[-1])) + shifts.repeat_interleave(lengths)
        if len(tokens) < of_tokens["out"].shape[1]:
            of_tokens = {name: tensor[:, tokens] for name, tensor in of_tokens.items()}
        out = of_tokens.pop("out")
        changed = of_tokens | {"cu_seqlens": packed_bounds.to(inputs.device)}
        if inputs.initial is not None:
            changed[inputs.STATES] = inputs.initial[sequences]
        final_states = self.final_states
        if final_states is not None:
            final_states = final_states[tokens if inputs.state_every else sequences]
        return replace(
            self,
            inputs=type(inputs).unchecked(**vars(inputs) | changed),  # a check refuses no tokens
            out=out,
            final_states=final_states,
            slots=slots,
        )

    def is_finite(self) -> bool:
        """Whether out and final states are finite, judged by their sums, so that each is read once.

        False also for finite ones whose sum overflows in fp32, and for NaN in padding of a call
        that is not packed.  Waits for the device.
        """
        outputs = [tensor for tensor in (self.out, self.final_states) if tensor is not None]
        sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in outputs])
        return bool(sums.sum().isfinite())

    def first_nonfinite(self) -> str:
        """A sentence, without a full stop, on the first NaN or infinity in the outputs of a packed
        call, and on the inputs that are not finite after their activations.  Empty if all outputs
        are finite.
        """
        where = self._nonfinite_place()
        if not where:
            return ""
        tensors = self.activated().inputs.tensors
        nonfinite = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
        cause = f"it came with {words(nonfinite)}" if nonfinite else "its inputs are finite"
        return f"{self.name}: {where} is NaN or infinite; {cause}"

    def _nonfinite_place(self) -> str:
        """Where the outputs of a packed call are first NaN or infinite: in `out`, or else in the
        final states.  Empty if they are finite.
        """
        index = _first_nonfinite(self.out[0])
        if index is not None:
            token, head = index
            return f"out, {self._token_name(token)}, head {head}"
        index = None if self.final_states is None else _first_nonfinite(self.final_states)
        if index is None:
            return ""
        row, head = index
        if self.inputs.state_every:
            return f"the state after {self._token_name(row)}, head {head}"
        return f"the final state of {self._sequence_name(row)}, head {head}"

    def _sequence_name(self, sequence: int) -> str:
        """ "sequence 2 (slot 7)"."""
        slot = "" if self.slots is None else f" (slot {int(self.slots[sequence])})"
        return f"sequence {sequence}{slot}"

    def _token_name(self, token: int) -> str:
        """ "sequence 2 (slot 7), position 5"."""
        span = next(span for span in spans_of(self.inputs) if token < span.stop)
        return f"{self._sequence_name(span.sequence)}, position {token - span.start}"


def _first_nonfinite(tensor: Tensor) -> tuple[int, int] | None:
    """The first index (row, head) at which a tensor (rows, heads, ...) has NaN or infinity; None if
    all numbers are finite.
    """
    is_finite = tensor.flatten(2).isfinite().all(-1)
    indices = (~is_finite).nonzero()
    if not len(indices):
        return None
    row, head = indices[0].tolist()
    return row, head


def rank() -> int | None:
    """The rank of this process in `torch.distributed`, or if that is not initialised in the
    variable RANK; None if neither has one.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    number = os.environ.get("RANK", "")
    return int(number) if number.isdecimal() else None
