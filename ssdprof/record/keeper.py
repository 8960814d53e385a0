"""Decides which calls of a process are stored, and stores them: `--when`.  Runs in the recorder's
thread.

always      Every call.
nonfinite   The first call of each layer with NaN or infinity in its output or final states, and the
            `--keep` calls of the layer before it.
wrong       As `nonfinite`.  A call is also wrong if it begins with a state that no earlier call
            left for its sequence, or if its output is outside the error budget.  Comparisons with
            the budget take a limited share of the time, so that most calls are not compared.

All of them end when as much is stored as the options allow.
"""

import errno
import json
import os
import time
from collections import defaultdict, deque
from functools import cache
from importlib import import_module, metadata
from pathlib import Path

import numpy.ctypeslib  # noqa: F401  # safetensors would import it in the thread: see `Keeper`
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ssdprof.capture.layers import CapturedLayer
from ssdprof.capture.provenance import Provenance
from ssdprof.core.target import CallRef, LayerRef
from ssdprof.record.recorded_call import RecordedCall, rank
from ssdprof.record.settings import PASSED, RecordSettings, note

# After a comparison of t seconds there is none for t / `_SHARE` seconds, so that comparisons take
# less than 5 % of the time.  The pause is at most `_LONGEST_PAUSE_S`, because a comparison that
# compiles kernels takes long, and those after it do not: for comparisons of over 3 s the share is
# larger.
_SHARE = 0.05
_LONGEST_PAUSE_S = 60.0


class Keeper:
    """Stores the calls of this process that the settings ask for.

    most_bytes: of the calls in all rings together; the recorder may change it.
    failed: keys of the layers that went wrong, of which no later call is wanted.
    """

    def __init__(self, settings: RecordSettings, most_bytes: int) -> None:
        """Called in the program's thread.  The recorder's thread must not import any module: a
        process that is forked during an import would have half of the module.

        Raises OSError if the folder of calls cannot be written.
        """
        self._settings = settings
        self.most_bytes = most_bytes
        if settings.when == "wrong":
            self._why_outside_budget = import_module("ssdprof.record.verdict").why_outside_budget
        # the keys of these three are `RecordedCall.layer_key`
        # the last calls of each layer, on their device
        self._rings: defaultdict[tuple[str, str], deque[RecordedCall]] = defaultdict(deque)
        self._last_numbers: dict[tuple[str, str], int] = {}  # of calls that had final states
        self.failed: set[tuple[str, str]] = set()
        self._stored_calls = self._stored_bytes = self._ring_bytes = 0
        self._provenance = Provenance(rows_are_sequences=False)
        self._next_comparison_s = time.monotonic()
        flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY
        self._passed = os.open(Path(settings.folder) / PASSED, flags, 0o600)

    @property
    def is_full(self) -> bool:
        """Whether this process has stored as much as the settings allow."""
        limits = self._settings
        return self._stored_calls >= limits.max_calls or self._stored_bytes >= limits.max_bytes

    def keep(self, call: RecordedCall) -> None:
        """Store the call, and the calls in its layer's ring before it, if it is wrong or if every
        call is wanted; otherwise add it to the ring.  A call of a layer that has failed is dropped.

        Raises OSError if a file cannot be written, and any error of a comparison with the budget.
        """
        if self._settings.when == "always":
            self._store(call, fault="")
            return
        layer = call.layer_key
        if layer in self.failed:
            return
        fault = self._fault(call)
        # without final states, the next call has a gap before it, because its states are not known
        if call.final_states is not None:
            self._last_numbers[layer] = call.number
        ring = self._rings[layer]
        ring.append(call)
        self._ring_bytes += call.nbytes
        if fault:
            self.failed.add(layer)
            note(f"{fault}.")
            for stored in ring:
                self._store(stored, fault if stored is call else "")
        else:
            os.write(self._passed, b"\0")
        most_calls = 0 if fault else self._settings.keep
        while len(ring) > most_calls:
            self._ring_bytes -= ring.popleft().nbytes
        while self._ring_bytes > self.most_bytes:
            rings = [ring for ring in self._rings.values() if ring]
            oldest = min(rings, key=lambda ring: ring[0].number)
            self._ring_bytes -= oldest.popleft().nbytes

    def release(self) -> None:
        """Free the calls in rings, and close the file of passed calls, when no call follows."""
        self._rings.clear()
        os.close(self._passed)

    def _fault(self, call: RecordedCall) -> str:
        """What is wrong with a call, a sentence without its full stop.  Empty if no test failed."""
        # `is_finite` is also False for NaN in padding, and for a sum that overflows: then
        # `first_nonfinite` is empty
        fault = "" if call.is_finite() else call.packed().first_nonfinite()
        if fault or self._settings.when == "nonfinite":
            return fault
        return self._fault_of_values(call.packed())

    def _fault_of_values(self, call: RecordedCall) -> str:
        """As `_fault`, for a finite, packed call: whether earlier calls left its initial states,
        and whether its output is within the budget.

        Empty for a call without final states, or without tokens.  The budget is not tested before
        `_next_comparison_s`.
        """
        if call.final_states is None or not call.inputs.length:
            return ""
        outputs = call.out, call.final_states
        last_number = self._last_numbers.setdefault(call.layer_key, -1)
        number = call.number + 1
        captured = CapturedLayer(
            layer=LayerRef(
                index=list(self._last_numbers).index(call.layer_key),
                name=call.layer or "-",
                operator=call.place.operator,
            ),
            inputs=call.inputs,
            call=CallRef(
                kind="packed",
                number=number,
                count=number,
                prompt_seqlen=call.inputs.length,
                sequences=call.inputs.sequences,
            ),
            served=outputs,
            slots=() if call.slots is None else tuple(call.slots.tolist()),
            gap=call.number != last_number + 1,
        )
        if state_break := self._provenance.state_break(captured):
            return f"{call.name}: {state_break.removesuffix('.')}"
        begin_s = time.monotonic()
        if begin_s < self._next_comparison_s:
            return ""
        try:
            fault = self._why_outside_budget(call.activated().inputs, outputs)
        finally:
            end_s = time.monotonic()
            self._next_comparison_s = end_s + min((end_s - begin_s) / _SHARE, _LONGEST_PAUSE_S)
        return f"{call.name}: {fault}" if fault else ""

    def _store(self, call: RecordedCall, fault: str) -> None:
        """Write a call to a file of its own, unless the limits are reached or it has no tokens.

        fault: what is wrong with the call, for the report of a run; empty if nothing is.
        """
        if self.is_full:
            return
        call = call.on_host().packed()
        if not call.inputs.length:
            return
        call = call.activated()
        tensors = {name: tensor.contiguous() for name, tensor in call.tensors.items()}
        if call.final_states is None:
            del tensors["out"]  # a file has both or none
        description = {
            "operator": call.place.operator,
            "source": source(call.place.library),
            "arguments": call.inputs.scalars,
            "layer": call.layer,
            "number": call.number,
            "why": fault,
        }
        number = rank()
        process = "process" if number is None else f"rank{number}"
        name = f"{process}-{os.getpid()}_{self._stored_calls:06d}.safetensors"
        _write(Path(self._settings.folder) / name, tensors, description)
        self._stored_calls += 1
        self._stored_bytes += call.nbytes
        if self.is_full:
            note("Recording has ended: as much is stored as the options allow.", once=True)


def _write(file: Path, tensors: dict[str, Tensor], description: dict[str, object]) -> None:
    """Write a file that only its owner may read.  It appears under its name once it is complete.

    Raises OSError if it cannot be written.
    """
    temporary = file.with_suffix(".tmp")
    try:
        save_file(tensors, temporary, {"call": json.dumps(description)})
        temporary.chmod(0o600)  # until then, its folder lets nobody else in
        temporary.replace(file)
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error)) from error
    finally:
        temporary.unlink(missing_ok=True)


@cache
def source(library: str) -> str:
    """A library with its installed version: "flash-linear-attention 0.6.0".

    library: name of its distribution.
    """
    try:
        return f"{library} {metadata.version(library)}"
    except metadata.PackageNotFoundError:
        return f"{library} of unknown version"
