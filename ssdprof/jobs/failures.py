"""Stores calls that failed, so that `ssdprof case ID --save DIR` can copy them without the model.

For each implementation, a report's folder gets a file for the first call that failed or gave a
wrong output, and a file for the first call that broke each law.  A file has the inputs, the output
of the fp64 oracle, and the implementation's output, if it gave one.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ssdprof import kernels, operators
from ssdprof.core.base import BETWEEN_CALLS
from ssdprof.files import safe_name
from ssdprof.jobs import limits
from ssdprof.jobs.compare import Entry, OnFault
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.pools import token_positions
from ssdprof.kernels.precision import Precision
from ssdprof.measure.accuracy import oracle_output
from ssdprof.measure.isolate import packed, unpacked
from ssdprof.operators.implementations import resolve
from ssdprof.operators.operator import OutputPair
from ssdprof.operators.serving import gathered, pool_run
from ssdprof.store.reports import FAILURES

MOST_INPUT_BYTES = 1 << 30  # the largest inputs that are stored


def keeping(folder: Path) -> OnFault:
    """A function that stores calls in the folder of a report.

    For each implementation, it stores the first call that failed or gave a wrong output, and the
    first that broke each law.  It ignores inputs above `MOST_INPUT_BYTES`, and implementations
    without a `word` by which they can be found again.  If there is no memory for the oracle, the
    call is not stored, nor is a later one in its place.
    """
    # names of the implementation and of the law; the law is empty for a call that broke none
    stored: set[tuple[str, str]] = set()

    def keep(entry: Entry, law: str, inputs: Inputs, output: OutputPair | None) -> None:
        implementation = entry.call.implementation
        key = implementation.name, law
        size = sum(tensor.nbytes for tensor in inputs.tensors.values())
        if key in stored or not implementation.word or size > MOST_INPUT_BYTES:
            return
        stored.add(key)
        with suppress(torch.OutOfMemoryError):  # the failure itself is in the report
            _write(folder / FAILURES, entry, law, inputs, output)

    return keep


def _write(folder: Path, entry: Entry, law: str, inputs: Inputs, output: OutputPair | None) -> None:
    """Write a call with its tensors and their layouts.

    law: the law that the call broke; empty: the call failed or gave a wrong output.
    output: None if the implementation gave none.
    """
    in_place = law.startswith(BETWEEN_CALLS)
    groups = {"expected": _expected_in_place(inputs) if in_place else oracle_output(inputs)}
    if output is not None:
        groups["actual"] = output
    tensors = {f"inputs.{name}": tensor for name, tensor in inputs.tensors.items()}
    for group, (out, final_states) in groups.items():
        tensors |= {f"{group}.out": out, f"{group}.final_states": final_states}
    stored: dict[str, torch.Tensor] = {}
    layouts: dict[str, object] = {}
    for name, tensor in tensors.items():
        stored[name], layouts[name] = packed(tensor)
    call = {
        "operator": inputs.operator,
        "implementation": entry.call.implementation.word,
        "precision": str(entry.call.precision),
        "scalars": inputs.scalars,
        "layouts": layouts,
        "in_place": in_place,
    }
    folder.mkdir(exist_ok=True)
    suffix = f"-{safe_name(law)}" if law else ""
    save_file(
        stored, folder / f"{entry.case.id}{suffix}.safetensors", metadata={"call": json.dumps(call)}
    )


def _expected_in_place(inputs: Inputs) -> OutputPair:
    """The oracle's output for a call in place: `out`, with NaN for padded rows, and the pool after
    the call.
    """
    slots = inputs.slots_read
    assert slots is not None
    written = slots if inputs.write_indices is None else inputs.write_indices
    is_padding = (slots < 0) & (written.reshape(len(slots), -1) < 0).all(1)
    reference = kernels.get(inputs.operator, "reference")
    out, pool = gathered(reference, _with_a_copy(inputs), Precision())
    positions, exist = token_positions(inputs, inputs.length)
    out.flatten(0, 1)[positions[is_padding][exist[is_padding]]] = torch.nan
    return kernels.Output(out, pool)


def _with_a_copy(inputs: Inputs) -> Inputs:
    """The inputs of a call in place with a copy of the pool, which the call may write."""
    pool: torch.Tensor = getattr(inputs, inputs.STATES)
    return replace(inputs, **{inputs.STATES: unpacked(*packed(pool))})


class SavedCall(NamedTuple):
    """A call that failed, gave a wrong output or broke a law.

    expected: the output of the fp64 oracle.
    actual: the output of the implementation; None if there was none.
    implementation: as --impl names it.
    precision: the precision of the call, at which the implementation ran.
    in_place: whether it is a call on a pool of states.  Then the initial states of `inputs` are the
        pool before the call, between its guards, and the final states of an output are the pool
        after it.  Where `out` is not defined, `expected` is NaN.
    """

    inputs: Inputs
    expected: OutputPair
    actual: OutputPair | None
    implementation: str
    precision: Precision
    in_place: bool

    def run(self) -> OutputPair:
        """Call the implementation again; a call in place on a copy of the pool."""
        implementation = resolve(operators.get(self.inputs.operator), self.implementation)
        if not self.in_place:
            return implementation.run(self.inputs, self.precision)
        run = pool_run(implementation)
        assert run is not None
        return run(_with_a_copy(self.inputs), self.precision)


def load_call(file: str | os.PathLike[str]) -> SavedCall:
    """The call in a file of `ssdprof case ID --save DIR`, on the GPU if torch can use one."""
    groups: dict[str, dict[str, torch.Tensor]] = {"inputs": {}, "expected": {}, "actual": {}}
    with safe_open(file, framework="pt", device=str(limits.device())) as stored:
        call = json.loads(stored.metadata()["call"])
        for key, layout in call["layouts"].items():
            group, _, name = key.partition(".")
            groups[group][name] = unpacked(stored.get_tensor(key), layout)
    return SavedCall(
        inputs=operators.get(call["operator"]).inputs(**groups["inputs"], **call["scalars"]),
        expected=kernels.Output(**groups["expected"]),
        actual=kernels.Output(**groups["actual"]) if groups["actual"] else None,
        implementation=call["implementation"],
        precision=Precision.named(call["precision"]),
        in_place=call["in_place"],
    )
