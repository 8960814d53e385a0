"""Checks where the initial states of captured calls come from: they must be zeros, or the states
that an earlier call of the layer left for the same sequence.

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

# Largest relative distance of a head's states that differ by rounding only: to the dtype of the
# server's pool, and, if the recording has no final states, in the server's kernel.  The states of
# two sequences differ by about 1.
MOST_ROUNDING = 2**-4
_COLUMNS = 8  # of the projection in `_sketches`: a state of 32 heads then takes 1 KiB
_REMEMBERED = 4096  # newest states of each layer that are kept: 4 MiB with 32 heads


@dataclass(eq=False)
class _State:
    """A state that a call left.

    place: the row that left it: "row 1 (slot 5) of call 2".
    slot: where the server keeps it; None if that is not known.
    sketch: a row of `_sketches`.
    taken_by: the row that began with it, in the words of `place`, if one of both rows has no slot;
        otherwise empty.
    """

    place: str
    slot: int | None
    sketch: torch.Tensor
    taken_by: str = ""


class Provenance:
    """Follows the states of each layer from one captured call to the next.

    rows_are_sequences: whether row i of every call is sequence i, as in a capture of a model.  A
        recording names sequences by their slots in the server's pool of states instead.

    A row with a slot must begin with the state that the latest call left there.  A row without a
    slot may begin with any state, and leave one in any slot, as vLLM's prompts do.  Then two rows
    that begin with the same state are a fault.

    After a gap (`CapturedLayer.gap`) earlier states of the layer are forgotten, and only slots that
    a later call has written are followed.  A verification (`state_every`) counts as a gap, because
    it is not recorded which of its states the server keeps.  The oldest states are forgotten where
    a layer has left more than `_REMEMBERED`.  From then on it is no fault that a row begins with an
    unknown state, unless the state in its slot is known.
    """

    def __init__(self, *, rows_are_sequences: bool) -> None:
        self._rows_are_sequences = rows_are_sequences
        # layer index -> the states that its calls left, the newest last
        self._states: dict[int, deque[_State]] = {}
        self._with_gap: set[int] = set()  # indices of layers

    def state_break(self, captured: CapturedLayer) -> str:
        """Check the next call of a layer.  Returns a sentence on the first row that begins with a
        wrong state, and one on the number of others; empty if there is none, or if the call is a
        verification.
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
        newest_of_slot = {state.slot: state for state in earlier}
        faults = []
        if inputs.initial is not None:
            for slot, place, sketch in zip(slots, places, _sketches(inputs.initial), strict=True):
                if slot == -1 or not sketch.any():  # padding, or a sequence that begins with zeros
                    continue
                in_slot = None if slot is None else newest_of_slot.get(slot)
                if in_slot is None and index in self._with_gap:
                    continue
                fault = _fault(sketch, slot, place, in_slot, earlier)
                if fault:
                    faults.append(f"{place} begins with {fault}.")
        if captured.served:
            _, final_states = captured.served
        else:
            _, final_states = operators.get(inputs.operator).binding.replacement(inputs)
        for slot, place, sketch in zip(slots, places, _sketches(final_states), strict=True):
            earlier.append(_State(place, slot, sketch))
        if not faults:
            return ""
        first, *others = faults
        if not others:
            return first
        return f"{first}  Wrong in this call, too: {plural(len(others), 'row')}."

    def _rows(self, captured: CapturedLayer) -> tuple[Sequence[int | None], list[str]]:
        """The slot of each row of a call, and the row in words.  A slot is None if it is not known,
        and -1 if the row is padding; rows that are sequences have their numbers as slots.
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
    sketch: torch.Tensor,
    slot: int | None,
    place: str,
    in_slot: _State | None,
    earlier: deque[_State],
) -> str:
    """What is wrong with the state that the row `place` begins with; empty if it is right.

    in_slot: the state that the latest call left in the row's slot; None if it is not known.
    earlier: the states that earlier calls left, the newest last.
    """
    if in_slot is not None and _is_close(sketch, in_slot.sketch):
        return ""
    newest = None
    for state in reversed(earlier):
        if not _is_close(sketch, state.sketch):
            continue
        newest = newest or state
        if (slot is None or state.slot is None) and not state.taken_by:
            state.taken_by = place
            return ""
    if newest is None:
        is_forgotten = in_slot is None and len(earlier) == _REMEMBERED
        return "" if is_forgotten else "a state that no earlier call left"
    fault = f"the state that {newest.place} left"
    if newest.taken_by:
        return f"{fault}, as did {newest.taken_by}: a shared prefix, or another sequence"
    return fault if in_slot is None else f"{fault}, not with that of {in_slot.place}"


def _name(call: CallRef | None) -> str:
    """The call in words: "the prompt" without a `CallRef`, "call 2" for packed sequences, as in a
    recording, "chunk 3" for a chunk.
    """
    if call is None:
        return "the prompt"
    return f"{'call' if call.kind == 'packed' else call.kind} {call.number}"


def _sketches(states: torch.Tensor) -> torch.Tensor:
    """A random projection of each head's state, which roughly keeps relative distances: (rows,
    heads, ...) -> (rows, heads, columns) in fp32 on the CPU.
    """
    flat = states.detach().float().flatten(2)
    return (flat @ _projection(flat.shape[-1]).to(flat.device)).cpu()


@cache
def _projection(size: int) -> torch.Tensor:
    """The random matrix (size, columns) of `_sketches`, also if a program that is recorded has
    another default dtype than fp32.
    """
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, _COLUMNS, generator=generator, dtype=torch.float32)


def _is_close(sketch: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two sketches (heads, columns) are those of equal states, except for rounding.

    Heads that are not finite in both count as equal: how they differ is not known.
    """
    is_close = (sketch - other).norm(dim=-1) <= MOST_ROUNDING * other.norm(dim=-1)
    one_is_finite = sketch.isfinite().all(-1) | other.isfinite().all(-1)
    return bool((is_close | ~one_is_finite).all())
