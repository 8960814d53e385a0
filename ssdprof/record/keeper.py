"""Decides which calls of a process are stored, and stores them: `--when`.  Runs in the recorder's
thread.

always      every call
nonfinite   the first call of each layer with an output that is not finite, and those before it
wrong       calls that are outside the budget of what a server computed, of those for whose
            comparison there is time; and calls that begin with a state that no call left
"""

import errno
import json
import os
import time
from collections import deque
from functools import cache
from importlib import import_module, metadata
from pathlib import Path

import numpy.ctypeslib  # noqa: F401  # safetensors would import it in the thread: see `Keeper`
from safetensors import SafetensorError
from safetensors.torch import save_file

from ssdprof.capture.layers import CapturedLayer
from ssdprof.capture.provenance import Provenance
from ssdprof.core.target import CallRef, LayerRef
from ssdprof.record.recorded_call import RecordedCall, rank
from ssdprof.record.settings import SEEN, RecordSettings, note

_SHARE = 0.05  # of the time that comparisons may take
_LONGEST_PAUSE_S = 60.0  # after a comparison, which may have compiled kernels


class Keeper:
    """Keeps calls of this process as the settings say."""

    def __init__(self, settings: RecordSettings, most_bytes: int) -> None:
        """Called in the program's thread.  In the recorder's, nothing is imported: a process that
        is forked meanwhile would have half a module.  most_bytes: of all rings.
        """
        self._settings = settings
        self.most_bytes = most_bytes
        if settings.when == "wrong":
            self._outside_budget = import_module("ssdprof.record.verdict").outside_budget
        # by `RecordedCall.of_layer`: the last calls, on their device, the number of the last one,
        # and whether a call went wrong, after which no more calls are wanted
        self._rings: dict[tuple[str, str], deque[RecordedCall]] = {}
        self._last: dict[tuple[str, str], int] = {}
        self.told: set[tuple[str, str]] = set()
        self._has_seen = False
        self._stored = self._bytes = self._in_rings = 0
        self._provenance = Provenance(rows_are_sequences=False)
        self._compares_at = time.monotonic()

    @property
    def is_full(self) -> bool:
        """Whether a limit has been reached."""
        return self._stored >= self._settings.max_calls or self._bytes >= self._settings.max_bytes

    def keep(self, call: RecordedCall) -> None:
        """Store the call, and those before it, if they are wanted.  Raises OSError."""
        if not self._has_seen:
            (Path(self._settings.folder) / SEEN).touch(mode=0o600)
            self._has_seen = True
        if self._settings.when == "always":
            self._store(call)
        layer = call.of_layer
        if self._settings.when == "always" or layer in self.told:
            return
        before = self._last.setdefault(layer, -1)
        why = "" if call.is_finite() else call.packed().first_nonfinite()
        if self._settings.when == "wrong" and not why:
            why = self._wrong(call.packed(), gap=call.number != before + 1)
        self._last[layer] = call.number
        ring = self._rings.setdefault(layer, deque())
        ring.append(call)
        self._in_rings += call.nbytes
        if why:
            self.told.add(layer)
            note(f"{why}.")
            for stored in ring:
                self._store(stored, why if stored is call else "")
        while len(ring) > (0 if why else self._settings.keep):
            self._in_rings -= ring.popleft().nbytes
        while self._in_rings > self.most_bytes:
            oldest = min(filter(None, self._rings.values()), key=lambda ring: ring[0].number)
            self._in_rings -= oldest.popleft().nbytes

    def release(self) -> None:
        """Let the calls in rings go."""
        self._rings.clear()

    def _store(self, call: RecordedCall, why: str = "") -> None:
        """Write a call to a file of its own, which appears under its name once it is whole.

        why: what is wrong with it, for the report of a run.
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
            "why": why,
        }
        folder = Path(self._settings.folder)
        process = f"rank{rank()}-{os.getpid()}"
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

    def _wrong(self, call: RecordedCall, *, gap: bool) -> str:
        """What is wrong with a finite call, a pack, in a sentence; empty if nothing is, as far as
        it was tested.  gap: whether calls of the layer may be missing before it.
        """
        if call.final_states is None or not call.inputs.length:
            return ""
        served = call.out, call.final_states
        index = list(self._last).index(call.of_layer)
        number = call.number + 1
        captured = CapturedLayer(
            layer=LayerRef(index=index, name=call.layer or "-", operator=call.place.operator),
            inputs=call.inputs,
            call=CallRef(
                kind="packed",
                number=number,
                count=number,
                prompt_seqlen=call.inputs.length,
                sequences=call.inputs.sequences,
            ),
            served=served,
            slots=() if call.slots is None else tuple(call.slots.tolist()),
            gap=gap,
        )
        if faults := self._provenance.faults(captured):
            return f"{call.name}: {faults[0].removesuffix('.')}"
        if time.monotonic() < self._compares_at:
            return ""
        began = time.monotonic()
        fault = self._outside_budget(call.activated().inputs, served)
        ended = time.monotonic()
        self._compares_at = ended + min((ended - began) / _SHARE, _LONGEST_PAUSE_S)
        return fault and f"{call.name}: {fault}"


@cache
def source(library: str) -> str:
    """ "flash-linear-attention 0.6.0"."""
    try:
        return f"{library} {metadata.version(library)}"
    except metadata.PackageNotFoundError:
        return f"{library} of unknown version"
