"""Checks where the initial states of captured calls come from: they must be zeros, or states that
an earlier call of the layer left.

Even if each call is right by itself, the server can be wrong: it may give a sequence the states of
another one, or states that it has overwritten.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from ssdprof import operators
from ssdprof.capture.layers import CapturedLayer
from ssdprof.core.target import CallRef
from ssdprof.core.words import plural

# Largest relative distance of a head's states that differ by rounding only: to the server's dtype,
# and in its kernel if the recording has no final states.  Two sequences' states differ by about 1.
MOST_ROUNDING = 2**-4
_COLUMNS = 8  # of the projection in `_sketches`
_REMEMBERED = 4096  # newest states of each layer that are kept


@dataclass(frozen=True, eq=False)
class _State:
    """A state that a call left.

    place: the row that left it: "row 1 (slot 5) of call 2".
    slot: where the server keeps it; None if that is not known.
    sketch: a row of `_sketches`.
    """

    place: str
    slot: int | None
    sketch: torch.Tensor


class Provenance:
    """Follows the states of each layer from one captured call to the next.

    rows_are_sequences: whether row i of every call is sequence i, as in a capture of a model.  A
        recording names sequences by their slots in the server's pool of states instead.  If it does
        not have the slots, two rows that begin with the same state are a fault.

    After a gap (`CapturedLayer.gap`) earlier states of the layer are forgotten, and only slots that
    a later call has written are followed.  A verification (`state_every`) counts as a gap, because
    it is not recorded which of its states the server keeps.
    """

    def __init__(self, *, rows_are_sequences: bool) -> None:
        self._rows_are_sequences = rows_are_sequences
        # layer index -> the states that its calls left, the newest last
        self._states: dict[int, deque[_State]] = {}
        # state -> the row that began with it, for rows without slots
        self._taken_by: dict[_State, str] = {}
        self._with_gap: set[int] = set()  # indices of layers

    def state_break(self, captured: CapturedLayer) -> str:
        """Check the next call of a layer.  Returns a sentence on the first row that begins with a
        wrong state; empty if there is none.
        """
        inputs = captured.inputs
        slots, places = self._rows(captured)
        if inputs.state_indices is not None:  # replace the pool by the states of the rows
            inputs = inputs.after(inputs.initial)
        index = captured.layer.index
        if captured.gap or inputs.state_every:
            self._with_gap.add(index)
            self._states.pop(index, None)
        if inputs.state_every:
            return ""
        earlier = self._states.setdefault(index, deque(maxlen=_REMEMBERED))
        written = {state.slot for state in earlier if state.slot is not None}
        faults = []
        if inputs.initial is not None:
            for slot, place, sketch in zip(slots, places, _sketches(inputs.initial), strict=True):
                if slot == -1 or not sketch.any():  # no sequence, or one that begins with zeros
                    continue
                if index in self._with_gap and slot not in written:
                    continue
                fault = self._fault(sketch, slot, place, earlier)
                if fault is not None:
                    faults.append(f"{place} begins with {fault}.")
        if captured.served:
            _, final_states = captured.served
        else:
            _, final_states = operators.get(inputs.operator).binding.replacement(inputs)
        for slot, place, sketch in zip(slots, places, _sketches(final_states), strict=True):
            earlier.append(_State(place, slot, sketch))
        if len(faults) <= 1:
            return "".join(faults)
        first, *others = faults
        return f"{first}  Wrong in this call, too: {plural(len(others), 'row')}."

    def _rows(self, captured: CapturedLayer) -> tuple[Sequence[int | None], list[str]]:
        """The slot of each row of a call, and the row in words.  A slot is None if it is not known;
        rows that are sequences have their numbers as slots.
        """
        call = _name(captured.call)
        slots: Sequence[int | None] = captured.slots
        if captured.inputs.state_indices is not None:
            slots = captured.inputs.state_indices.tolist()
        if slots:
            return slots, [f"row {row} (slot {slot}) of {call}" for row, slot in enumerate(slots)]
        rows = range(captured.inputs.sequences)
        slots = rows if self._rows_are_sequences else [None] * len(rows)
        return slots, [f"row {row} of {call}" for row in rows]

    def _fault(
        self, sketch: torch.Tensor, slot: int | None, place: str, earlier: deque[_State]
    ) -> str | None:
        """What is wrong with the state that the row `place` begins with; None if it is right."""
        equal = [state for state in reversed(earlier) if _is_close(sketch, state.sketch)]
        if not equal:
            return "a state that no earlier call left"
        newest = f"the state that {equal[0].place} left"
        if slot is not None:
            in_slot = [state for state in earlier if state.slot == slot]
            if not in_slot:
                return newest
            if in_slot[-1] in equal:
                return None
            return f"{newest}, not with that of {in_slot[-1].place}"
        for state in equal:
            if state not in self._taken_by:
                self._taken_by[state] = place
                return None
        taker = self._taken_by[equal[0]]
        return f"{newest}, as did {taker}: a shared prefix, or another sequence"


def _name(call: CallRef | None) -> str:
    """The call in words: "the prompt", "call 2", "chunk 3"."""
    if call is None:
        return "the prompt"
    return f"{'call' if call.kind == 'packed' else call.kind} {call.number}"


def _sketches(states: torch.Tensor) -> torch.Tensor:
    """A random projection of each head's state, which keeps relative distances: (rows, heads, ...)
    -> (rows, heads, columns) in fp32 on the CPU.
    """
    flat = states.detach().float().flatten(2)
    return (flat @ _projection(flat.shape[-1]).to(flat.device)).cpu()


@cache
def _projection(size: int) -> torch.Tensor:
    """The random matrix (size, columns) of `_sketches`."""
    return torch.randn(size, _COLUMNS, generator=torch.Generator().manual_seed(0))


def _is_close(sketch: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two sketches (heads, columns) are those of equal states, except for rounding.

    States that are not finite count as equal: how they differ is not known.
    """
    is_close = (sketch - other).norm(dim=-1) <= MOST_ROUNDING * other.norm(dim=-1)
    is_finite = sketch.isfinite().all(-1) | other.isfinite().all(-1)
    return bool((is_close | ~is_finite).all())
