"""A recorded call: on its device, then in main memory, as it is stored."""

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
from ssdprof.operators.operator import CallBinding
from ssdprof.record.place import Activate, Place, unchanged


@dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """A call of a place, with its output.

    layer: empty if it is not known.  number: of the calls of its layer, those that were not
    recorded among them.
    inputs: with gates as the function takes them, until they are `activated`.
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

    @property
    def outputs(self) -> dict[str, Tensor]:
        """The outputs that the call has, and its slots, by their names in a file."""
        outputs = {"out": self.out, "final_states": self.final_states, "slots": self.slots}
        return {name: tensor for name, tensor in outputs.items() if tensor is not None}

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """By their names in a file.  Outputs first: programs overwrite them first."""
        return {**self.outputs, **self.inputs.tensors, **self.weights}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def name(self) -> str:
        """ "layer model.layers.3, rank 0"."""
        layer = f"layer {self.layer}" if self.layer else "a layer that is not known"
        return f"{layer}, rank {rank()}"

    @property
    def of_layer(self) -> tuple[str, str]:
        """Operator and layer, which together identify a layer: two operators may name theirs
        alike.
        """
        return self.place.operator, self.layer

    @property
    def _binding(self) -> CallBinding:
        return operators.get(self.place.operator).binding

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> RecordedCall:
        """With these tensors in place of its own, by a file's names."""
        values = vars(self.inputs)
        inputs = {name: tensors[name] for name in values.keys() & tensors.keys()}
        return replace(
            self,
            inputs=type(self.inputs).unchecked(**values | inputs),
            out=tensors["out"],
            final_states=tensors.get("final_states"),
            slots=tensors.get("slots"),
            weights={name: tensors[name] for name in self.weights},
        )

    def on_host(self) -> RecordedCall:
        """The call in main memory, in pinned memory if it was on a GPU.  Waits for the copy."""
        if self.inputs.device.type != "cuda":
            return self
        copies = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            for name, tensor in self.tensors.items()
        }
        for name, tensor in self.tensors.items():
            copies[name].copy_(tensor, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return self.with_tensors(copies)

    def activated(self) -> RecordedCall:
        """The call with gates after their activations."""
        inputs = self.activate(self.inputs, self.weights)
        return replace(self, inputs=inputs, weights={}, activate=unchanged)

    def packed(self) -> RecordedCall:
        """A batch as a pack; without the sequences that have no slot, and without tokens behind the
        last sequence.  Waits for values of the device.
        """
        inputs = self.inputs
        positional = self._binding.positional(self.inputs)
        out = self.out
        bounds = inputs.cu_seqlens
        slots = None if self.slots is None else self.slots.cpu()
        if bounds is not None:
            bounds = bounds.cpu()
        else:
            bounds = torch.arange(inputs.sequences + 1, dtype=torch.int32) * inputs.length
            positional = {key: tensor.flatten(0, 1)[None] for key, tensor in positional.items()}
            out = out.flatten(0, 1)[None]
        rows = torch.arange(inputs.sequences)
        if slots is not None:
            rows = rows[slots >= 0]
        lengths = bounds.diff()[rows]
        starts = bounds[:-1].tolist()
        spans = [
            torch.arange(starts[row], starts[row] + length)
            for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)
        ]
        tokens = torch.cat([rows[:0], *spans])
        if len(rows) < inputs.sequences or len(tokens) < out.shape[1]:
            positional = {key: tensor[:, tokens] for key, tensor in positional.items()}
            out = out[:, tokens]
        bounds = torch.cat([bounds[:1] * 0, lengths.cumsum(0).int()])
        changed = positional | {"cu_seqlens": bounds.to(inputs.device)}
        if inputs.initial is not None:
            changed[inputs.LINEAR[1]] = inputs.initial[rows]
        states = self.final_states
        if states is not None:
            states = states[tokens if inputs.state_every else rows]
        return replace(
            self,
            inputs=type(inputs).unchecked(**vars(inputs) | changed),  # there may be no token
            out=out,
            final_states=states,
            slots=None if slots is None else slots[rows],
        )

    def is_finite(self) -> bool:
        """Whether all outputs are, by their sum, which takes one pass over them.  A sum of large
        numbers may overflow.
        """
        outputs = [tensor for tensor in (self.out, self.final_states) if tensor is not None]
        sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in outputs])
        return bool(sums.sum().isfinite())

    def first_nonfinite(self) -> str:
        """Where the output of a pack is not finite first, and whether the inputs are; empty if it
        is finite.
        """
        bad = ~self.out[0].flatten(2).isfinite().all(-1)  # (tokens, heads)
        where = ""
        if bool(bad.any()):
            token, head = bad.nonzero()[0].tolist()
            span = next(each for each in spans_of(self.inputs) if token < each.stop)
            row = self._row(span.sequence)
            position = token - span.start
            where = f"out, sequence {row}, position {position}, head {head}"
        elif self.final_states is not None:
            bad = ~self.final_states.flatten(2).isfinite().all(-1)
            if bool(bad.any()):
                row, head = bad.nonzero()[0].tolist()
                where = f"the final state of sequence {self._row(row)}, head {head}"
        if not where:
            return ""
        tensors = self.activated().inputs.tensors
        before = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
        inputs = f"it came with {words(before)}" if before else "its inputs are finite"
        return f"{self.name}: {where} is NaN or infinite; {inputs}"

    def _row(self, row: int) -> str:
        return str(row) if self.slots is None else f"{row} (slot {int(self.slots[row])})"


def rank() -> int:
    """The rank of this process."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK") or 0)
