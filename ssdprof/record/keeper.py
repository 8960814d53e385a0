"""Decides which calls of a process are stored, and stores them: `--when`.  Runs in the recorder's
thread.

always      every call
nonfinite   the first call of each layer with an output that is not finite, and those before it
wrong       calls that are outside the budget of what a server computed, of those for whose
            comparison there is time; and calls that begin with a state that no call left
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ssdprof import operators
from ssdprof.capture.layers import CapturedLayer
from ssdprof.capture.provenance import Provenance
from ssdprof.core.target import CallRef, LayerRef
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.oracle import spans_of
from ssdprof.operators.operator import CallBinding
from ssdprof.record.notes import note
from ssdprof.record.place import Place
from ssdprof.record.settings import RecordSettings

_SHARE = 0.05  # of the time that comparisons may take


@dataclass(kw_only=True)
class TakenCall:
    """A call of a place, on its device.

    number: of the calls of its layer, those that were not recorded among them.
    out, final_states: what the function returned.  done: the event behind it; None on a CPU.
    """

    place: Place
    layer: str
    inputs: Inputs
    result: Callable[[Any], tuple[Tensor, Tensor | None]]
    slots: Tensor | None
    number: int = 0
    out: Tensor | None = None
    final_states: Tensor | None = None
    done: torch.cuda.Event | None = None

    def returned(self, value: Any) -> None:
        """Take the output from what the function returned."""
        self.out, self.final_states = self.result(value)
        if self.inputs.device.type == "cuda":
            self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.done.record(torch.cuda.current_stream(self.inputs.device))
        else:
            self.out = self.out.clone()
            if self.final_states is not None:
                self.final_states = self.final_states.clone()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """In a file's names."""
        outputs = {"out": self.out, "final_states": self.final_states, "slots": self.slots}
        return self.inputs.tensors | {
            name: tensor for name, tensor in outputs.items() if tensor is not None
        }

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, kw_only=True)
class CallOnHost:
    """A call in main memory: a pack of sequences, without padding.  is_finite: of its output."""

    place: Place
    layer: str
    number: int
    inputs: Inputs
    out: Tensor
    final_states: Tensor | None
    slots: Tensor | None
    is_finite: bool

    @classmethod
    def of(cls, taken: TakenCall, copies: Mapping[str, Tensor], *, finite: bool) -> CallOnHost:
        """copies: of the call's tensors.  finite: whether its output is, padding included."""
        names = taken.inputs.tensors.keys()
        inputs = type(taken.inputs).unchecked(
            **vars(taken.inputs) | {name: copies[name] for name in names}
        )
        call = cls(
            place=taken.place,
            layer=taken.layer,
            number=taken.number,
            inputs=inputs,
            out=copies["out"],
            final_states=copies.get("final_states"),
            slots=copies.get("slots"),
            is_finite=finite,
        )
        return call._packed()._without_padding()

    def _packed(self) -> CallOnHost:
        """A batch as a pack."""
        inputs = self.inputs
        if inputs.cu_seqlens is not None:
            return self
        batch, length = inputs.values.shape[:2]
        flat = {
            name: tensor.flatten(0, 1)[None]
            for name, tensor in self._binding.positional(inputs).items()
        }
        bounds = torch.arange(batch + 1, dtype=torch.int32) * length
        packed = replace(inputs, **flat, cu_seqlens=bounds)
        return replace(self, inputs=packed, out=self.out.flatten(0, 1)[None])

    def _without_padding(self) -> CallOnHost:
        """Without the sequences that have no slot, and tokens behind the last sequence."""
        inputs, slots = self.inputs, self.slots
        assert inputs.cu_seqlens is not None
        bounds: list[int] = inputs.cu_seqlens.tolist()
        rows = torch.arange(inputs.sequences)
        if slots is not None:
            rows = rows[slots >= 0]
        if len(rows) == inputs.sequences and bounds[-1] == inputs.length:
            return self
        spans = [torch.arange(bounds[row], bounds[row + 1]) for row in rows.tolist()]
        tokens = torch.cat([rows[:0], *spans])
        lengths = torch.tensor([0, *map(len, spans)], dtype=torch.int32)
        kept = {
            name: tensor[:, tokens] for name, tensor in self._binding.positional(inputs).items()
        }
        if inputs.initial is not None:
            kept[inputs.LINEAR[1]] = inputs.initial[rows]
        states = tokens if inputs.state_every else rows
        return replace(
            self,
            inputs=type(inputs).unchecked(
                **vars(inputs) | kept | {"cu_seqlens": lengths.cumsum(0).int()}
            ),
            out=self.out[:, tokens],
            final_states=None if self.final_states is None else self.final_states[states],
            slots=None if slots is None else slots[rows],
        )

    @property
    def _binding(self) -> CallBinding:
        return operators.get(self.place.operator).binding

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def tensors(self) -> dict[str, Tensor]:
        """In a file's names."""
        outputs = {"out": self.out, "final_states": self.final_states, "slots": self.slots}
        if self.final_states is None:
            del outputs["out"]  # a file has both or none
        return self.inputs.tensors | {
            name: tensor for name, tensor in outputs.items() if tensor is not None
        }

    @property
    def name(self) -> str:
        """ "layer model.layers.3, rank 0"."""
        layer = f"layer {self.layer}" if self.layer else "a layer that is not known"
        return f"{layer}, rank {rank()}"

    def first_nonfinite(self) -> str:
        """Where the output is not finite first, and whether the inputs are; empty if it is
        finite.
        """
        spans = spans_of(self.inputs)
        bad = ~self.out[0].flatten(2).isfinite().all(-1)  # (tokens, heads)
        where = ""
        if bool(bad.any()):
            token, head = bad.nonzero()[0].tolist()
            row, start = next(
                (span.sequence, span.start) for span in spans if span.start <= token < span.stop
            )
            where = f"out, sequence {self._row(row)}, position {token - start}, head {head}"
        elif self.final_states is not None:
            bad = ~self.final_states.flatten(2).isfinite().all(-1)
            if bool(bad.any()):
                row, head = bad.nonzero()[0].tolist()
                where = f"the final state of sequence {self._row(row)}, head {head}"
        if not where:
            return ""
        before = [
            name for name, tensor in self.inputs.tensors.items() if not tensor.isfinite().all()
        ]
        inputs = "its inputs are finite"
        if before:
            inputs = f"before the call, {' and '.join(before)} was not finite already"
        return f"{self.name}: {where} is not finite; {inputs}"

    def _row(self, row: int) -> str:
        return str(row) if self.slots is None else f"{row} (slot {int(self.slots[row])})"


@dataclass(kw_only=True)
class _Layer:
    """What is known of a layer.  ring: its last calls.  told: whether one went wrong."""

    ring: deque[CallOnHost]
    index: int
    told: bool = False
    last: int = -1  # number of its last call


class Keeper:
    """Keeps calls of this process as the settings say."""

    def __init__(self, settings: RecordSettings) -> None:
        """Called in the program's thread: a fork while another one imports inherits half a
        module.
        """
        self._settings = settings
        if settings.when == "wrong":
            self._outside_budget = import_module("ssdprof.record.verdict").outside_budget
        self._layers: dict[str, _Layer] = {}
        self._stored = self._bytes = self._in_rings = 0
        self._provenance = Provenance(rows_are_sequences=False)
        self._compares_at = time.monotonic()

    @property
    def is_full(self) -> bool:
        """Whether a limit has been reached."""
        return self._stored >= self._settings.max_calls or self._bytes >= self._settings.max_bytes

    def keep(self, call: CallOnHost) -> None:
        """Store the call, and those before it, if they are wanted.  Raises OSError."""
        if not call.inputs.length:
            return
        layer = self._layers.setdefault(call.layer, _Layer(ring=deque(), index=len(self._layers)))
        if self._settings.when == "always":
            self._store(call)
            return
        why = (
            self._nonfinite(call)
            if self._settings.when == "nonfinite"
            else self._wrong(call, layer)
        )
        layer.last = call.number
        if layer.told:
            return
        layer.ring.append(call)
        self._in_rings += call.nbytes
        if why:
            layer.told = True
            note(f"{why}.")
            for earlier in layer.ring:
                self._store(earlier)
        kept = 0 if why else self._settings.keep
        while layer.ring and (len(layer.ring) > kept or self._in_rings > self._settings.max_bytes):
            self._in_rings -= layer.ring.popleft().nbytes

    def _store(self, call: CallOnHost) -> None:
        if self.is_full:
            return
        tensors = {name: tensor.contiguous() for name, tensor in call.tensors.items()}
        description = {
            "operator": call.place.operator,
            "source": source(call.place.library),
            "arguments": call.inputs.scalars,
            "layer": call.layer,
            "number": call.number,
        }
        folder, process = Path(self._settings.folder), f"rank{rank()}-{os.getpid()}"
        file = folder / f"{process}_{self._stored:06d}.safetensors"
        temporary = file.with_suffix(".tmp")
        try:
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL, 0o600))
            save_file(tensors, temporary, {"call": json.dumps(description)})
            temporary.chmod(0o600)
            temporary.replace(file)
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error)) from error
        finally:
            temporary.unlink(missing_ok=True)
        self._stored += 1
        self._bytes += call.nbytes
        if self.is_full:
            note("Recording has ended: as many calls are stored as the options allow.", once=True)

    def _nonfinite(self, call: CallOnHost) -> str:
        return "" if call.is_finite else call.first_nonfinite()

    # --- wrong

    def _wrong(self, call: CallOnHost, layer: _Layer) -> str:
        """What is wrong with the call, in a sentence; empty if nothing is, as far as it was
        tested.
        """
        if not call.is_finite or call.final_states is None:
            return self._nonfinite(call)
        served = call.out, call.final_states
        captured = CapturedLayer(
            layer=LayerRef(index=layer.index, name=call.layer or "-", operator=call.place.operator),
            inputs=call.inputs,
            call=CallRef(
                kind="packed",
                number=call.number + 1,
                count=call.number + 1,
                prompt_seqlen=call.inputs.length,
                sequences=call.inputs.sequences,
            ),
            served=served,
            slots=() if call.slots is None else tuple(call.slots.tolist()),
            gap=call.number != layer.last + 1,
        )
        faults = self._provenance.faults(captured)
        if faults:
            return f"{call.name}: {faults[0].removesuffix('.')}"
        if time.monotonic() < self._compares_at:
            return ""
        began = time.monotonic()
        fault = self._outside_budget(call.inputs, served)
        ended = time.monotonic()
        self._compares_at = ended + (ended - began) / _SHARE
        return fault and f"{call.name}: {fault}"


@cache
def source(library: str) -> str:
    """ "flash-linear-attention 0.6.0"."""
    try:
        return f"{library} {metadata.version(library)}"
    except metadata.PackageNotFoundError:
        return f"{library} of unknown version"


def rank() -> int:
    """The rank of this process."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", 0))
