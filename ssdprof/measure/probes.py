"""Decides which laws are tested with which call, and tests them.

    python -m ssdprof.measure.probes FOLDER PARENT

tests laws of a user's kernel, or of a library that the user named, in a process of its own.
`isolate.elsewhere` starts it, and describes FOLDER; PARENT is the id of the process that waits.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from ssdprof import operators
from ssdprof.core.base import BETWEEN_CALLS, Laws, Probe
from ssdprof.kernels.device import INTERPRETED
from ssdprof.kernels.inputs import Inputs, Output
from ssdprof.kernels.oracle import spans_of
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation
from ssdprof.measure import pools
from ssdprof.measure.first_run import first_line
from ssdprof.measure.isolate import (
    IsolatedFirstCall,
    elsewhere,
    ending,
    is_stopped,
    limited,
    packed,
    requested,
    say,
    unpacked,
)
from ssdprof.measure.laws import (
    AMPLIFIED_HISTORY,
    EDGE_INPUTS,
    LAWS,
    LONGEST,
    LONGEST_INTERPRETED,
    SAME_FORM_LAWS,
    TURNING_KEYS,
    Skipped,
    Trial,
    laws_of,
    tested,
    untested,
)
from ssdprof.measure.sequences import is_packed, joined
from ssdprof.operators.operator import Operator
from ssdprof.operators.serving import pool_run

MOST_WHOLE_BYTES = 2 << 30  # larger inputs are cut to the beginnings of a few sequences
MOST_SEQUENCES = 3  # sequences of cut inputs
QUICK = {"causality", "cut in two"}  # the laws of --laws quick
# arguments: the name of the broken law; the inputs that broke it; the output, None if there is none
Keep: TypeAlias = "Callable[[str, Inputs, Output | None], object]"
LONG_HEADS = (1, 4)  # numbers of heads in histories that are longer than the call


class Prober:
    """Tests the laws of implementations, and decides which are due.

    Most laws are tested once for each implementation and kind of layer (operator, sizes, dtype) and
    of call (single tokens, packed, with states on the way), at the first precision that comes.
    There are two exceptions.  The amplified history is also tested in later layers of a kind, but
    not with bundled kernels, because layers differ in how slowly their heads forget.  Turning keys
    are tested once for each shape of a call, because kernels cut only long calls.

    Bundled kernels are tested by the laws whose calls need no other compiled kernels than the
    captured call, since compiling would take longer than the run; in Triton's interpreter they are
    not tested.  If all laws are requested, neither limit holds.

    kinds: the kinds of implementations that are tested.
    """

    def __init__(
        self, isolated: IsolatedFirstCall, *, laws: Laws = "default", only: str = ""
    ) -> None:
        """isolated: makes the first calls of users' kernels and named libraries.
        laws: "quick": only the laws in `QUICK`.  "all": every law in every call, also of bundled
            kernels; edge inputs once for each form of the calls.
        only: the one law that is tested, turning keys or the amplified history; empty: all that are
            due.
        """
        self._isolated = isolated
        self._only = only
        self._thorough = laws == "all"
        self._quick = laws == "quick"
        self._done: set[Hashable] = set()
        self._latest: dict[str, weakref.ref[Inputs]] = {}  # inputs by implementation
        # The results of edge inputs, which are the same for all calls of a form, by implementation,
        # precision and form.
        self._edges: dict[Hashable, Probe] = {}
        self.kinds = {"own", "library"}
        if self._thorough or not INTERPRETED:
            self.kinds.add("bundled")

    def probe(
        self,
        implementation: Implementation,
        inputs: Inputs,
        precision: Precision,
        interpreted: bool = False,
        keep: Keep | None = None,
    ) -> tuple[Probe, ...]:
        """The results of the laws that are due for this call; empty if none is.

        inputs: the inputs of a call that the implementation computed correctly.
        interpreted: whether Triton's interpreter ran it.  Then the laws of single calls, and the
            slow one between calls, are listed as untested, unless all laws were requested.
        keep: called with each call that broke a law, if it is known.

        Raises MissingCapabilityError if a fault in the implementation made the GPU unusable.
        """
        names, tests_kind = self._due(implementation, inputs, interpreted)
        if not names:
            return ()
        trial = _trial(
            implementation,
            inputs,
            precision,
            self._isolated,
            by_every_law=self._thorough or implementation.kind != "bundled",
            interpreted=interpreted,
        )
        too_slow = interpreted and not self._thorough
        listed = [name for name in laws_of(trial) if name in names]
        slow = set(listed) if too_slow else set()
        if tests_kind and not self._quick and applies(implementation, inputs):
            listed += [BETWEEN_CALLS + name for name in pools.LAWS]
            if too_slow:
                slow.add(BETWEEN_CALLS + pools.SLOW)
        form = implementation.name, precision, inputs.form
        results: dict[str, Probe] = {}
        if form in self._edges:
            results[EDGE_INPUTS] = self._edges[form]
        due = [name for name in listed if name not in slow and name not in results]
        # In later layers the amplified history alone is due.  Its calls mostly have forms that were
        # tried before, and another process would take seconds for each layer.
        is_apart = implementation.isolated and implementation.word and due != [AMPLIFIED_HISTORY]
        if is_apart:
            probes = list(_tested_elsewhere(trial, due, keep, interpreted=interpreted))
        else:
            probes = [try_law(trial, name, keep) for name in due]
        results |= {probe.name: probe for probe in probes}
        # the budget of a library depends on the call: see `Trial.room`
        if EDGE_INPUTS in results and implementation.kind != "library":
            self._edges[form] = results[EDGE_INPUTS]
        return tuple(results.get(name) or untested(name) for name in listed)

    def _due(
        self, implementation: Implementation, inputs: Inputs, interpreted: bool
    ) -> tuple[set[str], bool]:
        """The names of the laws of single calls that are due, and whether all laws of this kind of
        layer are, also those between calls.  From then on, these count as tested.
        """
        kind, shape = self._keys(implementation, inputs)
        latest = self._latest.get(implementation.name)
        same_inputs = latest is not None and latest() is inputs
        is_new_kind = self._thorough or kind not in self._done
        is_new_shape = self._thorough or shape not in self._done
        self.probed(implementation, inputs)

        by_every_law = self._thorough or implementation.kind != "bundled"
        too_slow = interpreted and not self._thorough
        tests_kind = is_new_kind and not self._only
        if tests_kind:
            names = set(LAWS if by_every_law or too_slow else SAME_FORM_LAWS)
            if self._quick:
                names &= QUICK
        else:
            names = set()
            if is_new_shape:
                names.add(TURNING_KEYS)
            if by_every_law and not same_inputs:
                names.add(AMPLIFIED_HISTORY)
            if self._only:
                names &= {self._only}
            if self._quick or too_slow:
                names.clear()
        return names, tests_kind

    def probed(self, implementation: Implementation, inputs: Inputs) -> None:
        """Note that the laws of this call have been tested, now or by an earlier process."""
        self._done.update(self._keys(implementation, inputs))
        self._latest[implementation.name] = weakref.ref(inputs)

    def _keys(self, implementation: Implementation, inputs: Inputs) -> tuple[Hashable, Hashable]:
        """A key of the implementation on this kind of layer, and one on this shape of a call."""
        dims = operators.get(inputs.operator).oracle.dims(inputs)
        kind = (
            implementation.name,
            dims.operator,
            *dims.sizes.items(),
            dims.dtype,
            dims.seqlen == 1,
            is_packed(inputs),
            inputs.state_every,
        )
        return kind, (kind, dims.batch, dims.seqlen, inputs.sequences)


def _trial(
    implementation: Implementation,
    inputs: Inputs,
    precision: Precision,
    isolated: IsolatedFirstCall,
    *,
    by_every_law: bool,
    interpreted: bool,
) -> Trial:
    """The trial of an implementation on these inputs, or on the beginnings of the first
    `MOST_SEQUENCES` of their sequences that have tokens.

    by_every_law: all laws will be tested, not only those of the call's form.  Then, and if the
        inputs are too large, sequences are cut to `LONGEST` positions.
    interpreted: whether Triton's interpreter runs the calls.  Then they are cut to
        `LONGEST_INTERPRETED` positions, and histories that are longer than the call have one head.
    """
    part = inputs
    if by_every_law or sum(tensor.nbytes for tensor in inputs.tensors.values()) > MOST_WHOLE_BYTES:
        longest = LONGEST_INTERPRETED if interpreted else LONGEST[inputs.device.type]
        spans = [
            replace(span, stop=min(span.stop, span.start + longest))
            for span in spans_of(inputs)
            if span.length
        ]
        part = joined(inputs, spans[:MOST_SEQUENCES], packed=is_packed(inputs))
    long_heads: Sequence[int] = LONG_HEADS if by_every_law else ()
    return Trial(
        operator=operators.get(inputs.operator),
        implementation=implementation,
        inputs=part,
        precision=precision,
        isolated=isolated,
        whole=inputs,
        long_heads=long_heads[:1] if interpreted else long_heads,
    )


# --- the test of a law


def try_law(trial: Trial, name: str, keep: Keep | None = None) -> Probe:
    """Test one of the laws, and return the result.

    keep: called with the call that broke the law, if it is known.
    """
    if name.startswith(BETWEEN_CALLS):
        return _between_calls(trial, name, keep)
    probe = tested(name, partial(LAWS[name], trial))
    if probe.holds == "no" and keep and trial.latest:
        inputs, output = trial.latest[0]
        keep(name, inputs, Output(*output) if output else None)
    return probe


def _between_calls(trial: Trial, name: str, keep: Keep | None) -> Probe:
    """Test a law of states between calls (`pools.LAWS`).

    If a chain of calls breaks it, they are made again, and each is judged alone: the first that is
    wrong by itself is reported and kept.  If none is, none is kept.
    """
    law = pools.LAWS[name.removeprefix(BETWEEN_CALLS)]
    room = pools.Room(trial)
    probe = tested(name, partial(_in_room, law, room))
    if probe.holds == "no" and law in pools.CHAINS:
        room = pools.Room(trial, by_call=True)
        again = tested(name, partial(_in_room, law, room))
        if again.holds != "no":
            return probe
        probe = again
    if probe.holds == "no" and keep and room.latest:
        call, before, output = room.latest
        if output:
            output = Output(output.out, output.final_states.contiguous())
        states = unpacked(*before)
        keep(name, replace(call.inputs, **{call.inputs.STATES: states}), output)
    return probe


def _in_room(law: Callable[[pools.Room], None], room: pools.Room) -> str:
    """Test the law, up to the first call that the implementation refuses, or that needs more memory
    than is free.  Returns the limits within which it holds: the number of calls before that one,
    and the reason; empty if all were made.

    Raises Skipped if the first call was not made, or if the law needs a GPU.
    """
    if law in pools.ON_GPU and room.device.type != "cuda":
        raise Skipped("it needs a GPU", "not tested")
    try:
        law(room)
    except Skipped as refusal:
        if not room.harmless:
            raise
        return f"in {room.harmless} of its calls: {refusal}"
    return ""


def applies(implementation: Implementation, inputs: Inputs) -> bool:
    """Whether the laws of states between calls are tested with this call.

    A user's kernel is tested if it works in place on a pool.  Other implementations that can be
    called on a pool (`pool_run`) are tested with calls as servers make them: single steps, drafted
    tokens, and calls that begin with slots of a pool.
    """
    if implementation.kind == "own":
        return implementation.in_place is not None
    is_step = inputs.cu_seqlens is None and inputs.length == 1
    is_serving = is_step or inputs.state_every == 1 or inputs.state_indices is not None
    return is_serving and pool_run(implementation) is not None


# --- laws in another process


def _tested_elsewhere(
    trial: Trial, names: Sequence[str], keep: Keep | None, *, interpreted: bool
) -> Iterator[Probe]:
    """The results of laws whose calls are made in another process.

    If a call ends it, its law is broken, and the next process tests the other laws.  If a call does
    not end, or the process ends before its first law, the other laws are not tested.
    """
    waiting = list(names)
    while waiting:
        probes, call, goes_on = _ask(trial, waiting, keep, interpreted=interpreted)
        yield from probes
        del waiting[: len(probes)]
        latest = probes[-1]
        if call and keep:
            _ask(trial, [latest.name], keep, interpreted=interpreted, stop=call)
        if not goes_on:
            reason = f"law '{latest.name}': {latest.detail}"
            yield from (untested(name, reason) for name in waiting)
            return


def _ask(
    trial: Trial, names: Sequence[str], keep: Keep | None, *, interpreted: bool, stop: int = 0
) -> tuple[list[Probe], int, bool]:
    """Test laws in another process, up to the law in which it ends.

    Returns their results; the number of the call that ended the process, counted from 1 in its law
    (0: none did); and whether another process can test the other laws.

    stop: the number of a call that is kept instead of made, and ends the process; 0: none is.
    """
    limit_s = trial.isolated.limit_s
    with tempfile.TemporaryDirectory(prefix="ssdprof-") as folder:
        said, ended = elsewhere(
            "ssdprof.measure.probes", Path(folder), trial.implementation, trial.whole,
            trial.precision, limit_s, laws=list(names), stop=stop, interpreted=interpreted,
        )  # fmt: skip
        probes: list[Probe] = []
        law = ""  # the law that is tested
        call = 0  # the number of its latest call
        runs = False  # whether this call has not returned
        for word, value in said:
            if word == "law":
                law = value
                call = 0
                runs = False
            elif word == "call":
                call = value
                runs = True
            elif word == "returned":
                runs = False
            elif word == "kept" and keep:
                keep(law, *_read(trial.operator, Path(folder) / value))
            elif word == "probe":
                probes.append(Probe.model_validate(value))
    if len(probes) == len(names):
        return probes, 0, True
    code, _ = ended
    words = ending(ended, limit_s)
    # SIGKILL is how Linux ends a process that takes too much memory
    crashed = code is not None and code < 0 and code != -signal.SIGKILL
    fault = untested(names[len(probes)], f"before its first call, it {words}")
    if runs:
        fault = fault.changed(holds="no", detail=f"its call {call} {words}")
    elif call:
        # a signal may be the late effect of a call
        holds = "no" if crashed else "not tested"
        fault = fault.changed(holds=holds, detail=f"after its call {call}, it {words}")
    return [*probes, fault], call if runs else 0, bool(law) and not is_stopped(code)


def _read(operator: Operator, file: Path) -> tuple[Inputs, Output | None]:
    """The inputs and the output that `_write` stored; the output is None if there was none."""
    stored = torch.load(file, weights_only=True)
    tensors = {name: unpacked(*copy) for name, copy in stored["tensors"].items()}
    output = None
    if stored["output"]:
        output = Output(*(unpacked(*copy) for copy in stored["output"]))
    return operator.inputs(**tensors, **stored["scalars"]), output


# --- in the other process


def _write(file: Path, inputs: Inputs, output: Output | None) -> None:
    """Store a call.  output: None if it has none."""
    stored = {
        "tensors": {name: packed(tensor) for name, tensor in inputs.tensors.items()},
        "scalars": inputs.scalars,
        "output": list(map(packed, output or ())),
    }
    torch.save(stored, file)


def main() -> None:
    """Test the laws that were requested, and say what happens."""
    implementation, inputs, precision, request = requested()
    limit_s: float = request["limit_s"]
    folder = Path(sys.argv[1])
    calls = 0  # of the law that is tested

    def keep(_law: str, inputs: Inputs, output: Output | None) -> None:
        file = f"{len(list(folder.iterdir()))}.pt"
        _write(folder / file, inputs, output)
        say(("kept", file))

    @contextmanager
    def watched(inputs: Inputs) -> Iterator[None]:
        """Say when a call begins and returns, and end this process if it takes too long.  The call
        that was requested to `stop` is kept instead, and ends this process.
        """
        nonlocal calls
        calls += 1
        if calls == request["stop"]:
            keep("", inputs, None)
            os._exit(0)
        say(("call", calls))
        with limited(limit_s):
            yield
        if inputs.device.type == "cuda":
            torch.cuda.synchronize(inputs.device)  # raises an error if a fault made it unusable
        say(("returned", calls))

    # without a word, its first calls are made in this process, and in no further one
    implementation = replace(implementation, word="", named=implementation.kind == "library")
    trial = _trial(
        implementation,
        inputs,
        precision,
        IsolatedFirstCall(),
        by_every_law=True,
        interpreted=request["interpreted"],
    )
    for name in request["laws"]:
        calls = 0
        say(("law", name))
        try:
            # A copy of the trial has no outputs of earlier laws: so a call has the same number when
            # its law is tested alone, up to `stop`.
            probe = try_law(replace(trial, watched=watched), name, keep)
        except (
            Exception
        ) as error:  # a fault of the GPU, after which no call can be made, or of ours
            print(first_line(error.__cause__ or error), flush=True)
            os._exit(1)
        say(("probe", probe.field_values))


if __name__ == "__main__":
    with torch.no_grad():
        main()
