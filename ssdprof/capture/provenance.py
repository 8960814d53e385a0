"""Where the initial states of captured calls come from: an earlier call of the layer left them, or
they are zeros.

Each call may be right by itself and the server still wrong: it may hand a sequence the states of
another one, or states that it has overwritten.
"""

from collections import deque
from dataclasses import dataclass
from functools import cache

import torch

from ssdprof import operators
from ssdprof.capture.layers import CapturedLayer
from ssdprof.core.target import CallRef
from ssdprof.core.words import plural

# Relative distance of a head's states that are equal but for rounding: in the server's dtype, and
# by its kernel where the recording has no final states.  Those of two sequences differ by about 1.
CLOSE = 2**-4
_COLUMNS = 8  # of the projection
_REMEMBERED = 4096  # states of each layer


@dataclass(frozen=True, eq=False)
class _State:
    """A state that a call left.  place: "row 1 (slot 5) of call 2".  sketch: see `_sketches`."""

    place: str
    slot: int | None
    sketch: torch.Tensor


class Provenance:
    """Follows the states of each layer from one captured call to the next.

    rows_are_sequences: row i of every call is sequence i, as in a capture of a model.  A recording
    names sequences by their slots in the server's pool, which it may hold whole, or not at all;
    then two rows that begin with one state are told.

    After a gap (`CapturedLayer.gap`) earlier states of the layer are forgotten, and only slots that
    a later call has written are followed.  A verification (`state_every`) is a gap, too: which of
    its states the server keeps is not recorded.
    """

    def __init__(self, *, rows_are_sequences: bool) -> None:
        self._rows_are_sequences = rows_are_sequences
        self._left: dict[int, deque[_State]] = {}
        self._taken: dict[_State, str] = {}  # by whom
        self._gaps: set[int] = set()  # layers that had one

    def faults(self, captured: CapturedLayer) -> list[str]:
        """A sentence, if this call, the next one of its layer, has a row with a wrong state: on the
        first such row.
        """
        inputs = captured.inputs
        call = _name(captured.call)
        known = captured.slots
        if inputs.state_indices is not None:  # the states of a whole pool
            known = tuple(inputs.state_indices.tolist())
            inputs = inputs.after(inputs.initial)
        index = captured.layer.index
        if captured.gap or inputs.state_every:
            self._gaps.add(index)
            self._left.pop(index, None)
        if inputs.state_every:
            return []
        earlier = self._left.setdefault(index, deque(maxlen=_REMEMBERED))
        places = [f"row {row} of {call}" for row in range(inputs.sequences)]
        slots: list[int | None] = [None] * inputs.sequences
        if known:
            slots = [*known]
            places = [f"row {row} (slot {slot}) of {call}" for row, slot in enumerate(slots)]
        elif self._rows_are_sequences:
            slots = [*range(inputs.sequences)]
        written = {state.slot for state in earlier if state.slot is not None}
        faults = []
        if inputs.initial is not None:
            for slot, place, sketch in zip(slots, places, _sketches(inputs.initial), strict=True):
                if slot == -1 or not sketch.any():  # no sequence, or one that begins with zeros
                    continue
                if index in self._gaps and slot not in written:
                    continue
                fault = self._fault(sketch, slot, place, earlier)
                if fault is not None:
                    faults.append(f"{place} begins with {fault}.")
        if captured.served:
            _, final = captured.served
        else:
            _, final = operators.get(inputs.operator).binding.replacement(inputs)
        for slot, place, sketch in zip(slots, places, _sketches(final), strict=True):
            earlier.append(_State(place, slot, sketch))
        if len(faults) <= 1:
            return faults
        first, *others = faults
        return [f"{first}  Wrong in this call, too: {plural(len(others), 'row')}."]

    def _fault(
        self, sketch: torch.Tensor, slot: int | None, taker: str, earlier: deque[_State]
    ) -> str | None:
        """What is wrong with the state that a row begins with; None if nothing is."""
        equal = [state for state in reversed(earlier) if _is_close(sketch, state.sketch)]
        if not equal:
            return "a state that no earlier call left"
        newest = f"the state that {equal[0].place} left"
        if slot is not None:
            last = next((state for state in reversed(earlier) if state.slot == slot), None)
            if last in equal:
                return None
            return f"{newest}, not with that of {last.place}" if last else newest
        free = next((state for state in equal if state not in self._taken), None)
        if free is None:
            return f"{newest}, as did {self._taken[equal[0]]}: a shared prefix, or another sequence"
        self._taken[free] = taker
        return None


def _name(call: CallRef | None) -> str:
    if call is None:
        return "the prompt"
    return f"{'call' if call.kind == 'packed' else call.kind} {call.number}"


def _sketches(states: torch.Tensor) -> torch.Tensor:
    """(rows, heads, ...) -> (rows, heads, columns) fp32 on the CPU: a random projection of each
    head's state, which keeps relative distances.
    """
    flat = states.detach().float().flatten(2)
    return (flat @ _projection(flat.shape[-1]).to(flat.device)).cpu()


@cache
def _projection(size: int) -> torch.Tensor:
    return torch.randn(size, _COLUMNS, generator=torch.Generator().manual_seed(0))


def _is_close(sketch: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((sketch - other).norm(dim=-1) <= CLOSE * other.norm(dim=-1)).all())
