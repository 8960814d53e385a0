"""Keeps calls that failed, so that `ssdprof case ID --save DIR` hands them over without the model.

A report's folder gets a file for the first call of each implementation that failed, and one for
each law that it broke first: the inputs, the output of the fp64 oracle, and the implementation's.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ssdprof import kernels, operators
from ssdprof.files import safe_name
from ssdprof.jobs import limits
from ssdprof.jobs.compare import Entry, OnFault
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.precision import Precision
from ssdprof.measure.accuracy import oracle_output
from ssdprof.operators.implementations import resolve
from ssdprof.operators.operator import Output
from ssdprof.store.reports import FAILURES

MOST_BYTES = 1 << 30  # of the inputs in a file


def keeping(folder: Path) -> OnFault:
    """Keeps calls in the folder of a report: one that failed, and one for each broken law, of each
    implementation.
    """
    kept: set[tuple[str, str]] = set()

    def keep(entry: Entry, law: str, inputs: Inputs, output: Output | None) -> None:
        implementation = entry.call.implementation
        key = implementation.name, law
        size = sum(tensor.nbytes for tensor in inputs.tensors.values())
        if key in kept or not implementation.word or size > MOST_BYTES:
            return
        kept.add(key)
        with suppress(torch.OutOfMemoryError):  # the failure itself is in the report
            _write(folder / FAILURES, entry, law, inputs, output)

    return keep


def _write(folder: Path, entry: Entry, law: str, inputs: Inputs, output: Output | None) -> None:
    """Write a call with all of its tensors, each with the strides that it had.  law: that it broke;
    empty: it failed.
    """
    tensors = {f"inputs.{name}": tensor for name, tensor in inputs.tensors.items()}
    outputs = {"expected": oracle_output(inputs)}
    if output is not None:
        outputs["actual"] = output
    for which, (out, final_states) in outputs.items():
        tensors |= {f"{which}.out": out, f"{which}.final_states": final_states}
    call = {
        "operator": inputs.operator,
        "word": entry.call.implementation.word,
        "precision": str(entry.call.precision),
        "scalars": inputs.scalars,
        "strides": {name: tensor.stride() for name, tensor in tensors.items()},
    }
    folder.mkdir(exist_ok=True)
    file = folder / f"{entry.case.id}{f'-{safe_name(law)}' if law else ''}.safetensors"
    stored = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(stored, file, metadata={"call": json.dumps(call)})


class SavedCall(NamedTuple):
    """A call that failed.

    expected: of the fp64 oracle.  actual: what the implementation computed; None if nothing.
    word: the implementation, as it was named.
    """

    inputs: Inputs
    expected: Output
    actual: Output | None
    word: str
    precision: Precision

    def run(self) -> Output:
        """Call the implementation again."""
        implementation = resolve(operators.get(self.inputs.operator), self.word)
        return implementation.run(self.inputs, self.precision)


def load_call(file: str | os.PathLike[str]) -> SavedCall:
    """A file of `ssdprof case ID --save DIR`, on the GPU if there is one."""
    groups: dict[str, dict[str, torch.Tensor]] = {"inputs": {}, "expected": {}, "actual": {}}
    with safe_open(file, framework="pt", device=str(limits.device())) as stored:
        call = json.loads(stored.metadata()["call"])
        for key, strides in call["strides"].items():
            group, _, name = key.partition(".")
            groups[group][name] = _restored(stored.get_tensor(key), strides)
    return SavedCall(
        inputs=operators.get(call["operator"]).inputs(**groups["inputs"], **call["scalars"]),
        expected=kernels.Output(**groups["expected"]),
        actual=kernels.Output(**groups["actual"]) if groups["actual"] else None,
        word=call["word"],
        precision=Precision.named(call["precision"]),
    )


def _restored(tensor: torch.Tensor, strides: list[int]) -> torch.Tensor:
    """With the strides of the call; elements that share memory get memory of their own."""
    if 0 in strides:
        return tensor
    return torch.empty_strided(
        tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)
