"""Stores calls that failed, so that `ssdprof case ID --save DIR` can copy them without the model.

For each implementation, a report's folder gets a file for the first call that failed, and a file
for the first call that broke each law.  A file has the inputs, the output of the fp64 oracle, and
the implementation's output.
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

MOST_INPUT_BYTES = 1 << 30  # the largest inputs that are stored


def keeping(folder: Path) -> OnFault:
    """A function that stores calls in the folder of a report.

    For each implementation, it stores the first call that failed, and the first that broke each
    law.  It ignores inputs above `MOST_INPUT_BYTES`, and implementations without a `word` by which
    they can be found again.
    """
    stored: set[tuple[str, str]] = set()  # names of the implementation and of the law

    def keep(entry: Entry, law: str, inputs: Inputs, output: Output | None) -> None:
        implementation = entry.call.implementation
        key = implementation.name, law
        size = sum(tensor.nbytes for tensor in inputs.tensors.values())
        if key in stored or not implementation.word or size > MOST_INPUT_BYTES:
            return
        stored.add(key)
        with suppress(torch.OutOfMemoryError):  # the failure itself is in the report
            _write(folder / FAILURES, entry, law, inputs, output)

    return keep


def _write(folder: Path, entry: Entry, law: str, inputs: Inputs, output: Output | None) -> None:
    """Write a call with its tensors and their strides.

    law: the law that the call broke; empty: the call failed.
    """
    tensors = {f"inputs.{name}": tensor for name, tensor in inputs.tensors.items()}
    outputs = {"expected": oracle_output(inputs)}
    if output is not None:
        outputs["actual"] = output
    for group, (out, final_states) in outputs.items():
        tensors |= {f"{group}.out": out, f"{group}.final_states": final_states}
    call = {
        "operator": inputs.operator,
        "word": entry.call.implementation.word,
        "precision": str(entry.call.precision),
        "scalars": inputs.scalars,
        "strides": {name: tensor.stride() for name, tensor in tensors.items()},
    }
    folder.mkdir(exist_ok=True)
    suffix = f"-{safe_name(law)}" if law else ""
    stored = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(
        stored, folder / f"{entry.case.id}{suffix}.safetensors", metadata={"call": json.dumps(call)}
    )


class SavedCall(NamedTuple):
    """A call that failed.

    expected: the output of the fp64 oracle.
    actual: the output of the implementation; None if there was none.
    word: the implementation, as --impl names it.
    precision: the precision that the implementation declared for the call.
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
    """The call in a file of `ssdprof case ID --save DIR`, on the GPU if there is one."""
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
    """The tensor with the strides that it had in the call.

    A tensor that was expanded (a stride is 0) stays contiguous: its elements cannot be written one
    by one.
    """
    if 0 in strides:
        return tensor
    return torch.empty_strided(
        tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)
