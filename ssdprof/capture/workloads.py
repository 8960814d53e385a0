"""Writes captures as a folder of flashinfer-bench, with the bundled kernels as solutions.

definitions/OP/NAME.json     what is computed, with a reference in fp64
workloads/OP/NAME.jsonl      a line for each call
blob/workloads/OP/NAME/      the tensors of the calls
solutions/OP/NAME/           the bundled kernels

`recording.py` reads such folders.
"""

import inspect
import json
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from ssdprof import kernels, operators
from ssdprof.capture import store
from ssdprof.core.words import plural, words
from ssdprof.errors import BadInputError
from ssdprof.files import put
from ssdprof.kernels.inputs import Inputs
from ssdprof.operators.definition import UNWRITTEN, Definition, Document, Values
from ssdprof.operators.operator import Operator, OutputPair

# axes whose sizes are part of a workload; the sizes of the others are part of its definition
_VARIABLE = ("total_seq_len", "num_seqs", "len_cu_seqlens", "batch_size")
_REFERENCE = """from itertools import pairwise

import torch
from torch import Tensor

OutputPair = tuple[Tensor, Tensor]


{source}

def run({names}):
    return {function}({keywords})
"""
_SOLUTION = """from ssdprof.capture.workloads import solve


def run({names}):
    return solve({kind!r}, {implementation!r}, {names})
"""


def solve(kind: str, implementation: str, *values: Any) -> OutputPair:
    """The outputs of a call, computed by a bundled implementation.  Solutions call this function.

    kind: name of a `Definition`.
    implementation: "fused" or "unfused".
    values: the inputs of the definition in order.
    """
    operator, definition = next(pair for pair in operators.definitions() if pair[1].name == kind)
    inputs: Values = dict(zip(definition.inputs, values, strict=True))
    run = kernels.get(operator.name, implementation).run
    out, final_states = run(definition.read(**inputs), kernels.Precision())
    return definition.finish(inputs, out, final_states)


def write_folder(captures: Path, folder: Path) -> list[str]:
    """Write the calls of a capture.  Returns a sentence on what was rounded, and if calls were left
    out, one on these.

    captures: folder of a capture, which may be incomplete.
    folder: that of flashinfer-bench.  Files of the same names are replaced.

    Raises BadInputError if the capture is damaged or no call of it can be written, and OSError if
    the folder cannot be written.
    """
    manifest, read = store.load(captures)
    documents: dict[Path, Document] = {}
    lines: defaultdict[Path, list[str]] = defaultdict(list)
    left_out: Counter[str] = Counter()
    rounded: defaultdict[str, float] = defaultdict(float)
    for stored in manifest.layers:
        operator = operators.get(stored.layer.operator)
        inputs = read(stored).inputs
        try:
            definition, values = _defined(operator, inputs)
            sizes: dict[str, int] = {}
            for name, axes in definition.inputs.items():
                sizes |= dict(zip(axes, values[name].shape, strict=True))
            path = Path(operator.name, definition.name.format(**sizes))
            document = _document(path, definition, values, sizes)
            if documents.setdefault(path, document) != document:
                raise ValueError("its dtypes are not those of earlier calls")
        except ValueError as error:
            left_out[f"of {operator.title} ({error})"] += 1
            continue
        if path not in lines:
            _write_definition(folder, path, definition, document)
        identity = str(uuid.uuid5(uuid.NAMESPACE_OID, stored.model_dump_json()))
        workload = {
            "uuid": identity,
            "axes": {axis: sizes[axis] for axis in sizes if axis in _VARIABLE},
            "inputs": _write_values(folder, path / f"{identity}.safetensors", values),
        }
        lines[path].append(json.dumps({"definition": path.name, "workload": workload}))
        read_back = definition.read(**values)
        for gate in operator.binding.per_position:
            change = _largest_change(inputs.tensors[gate], read_back.tensors[gate])
            rounded[gate] = max(change, rounded[gate])
    sentences = []
    if left_out:
        skipped = words(f"{plural(count, 'call')} {kind}" for kind, count in left_out.items())
        sentences.append(f"Left out: {skipped}.")
    if not lines:
        raise BadInputError(" ".join([f"{captures} has no call to write.", *sentences]))
    for path, path_lines in lines.items():
        _put_text(folder / "workloads" / f"{path}.jsonl", "\n".join(path_lines))
    changes = words(f"{gate} by up to {100 * change:.2g} %" for gate, change in rounded.items())
    return [f"Raw gates have the dtype of the values, which changes {changes}.", *sentences]


def _defined(operator: Operator, inputs: Inputs) -> tuple[Definition, Values]:
    """The operator's first definition that describes the call, and the definition's inputs, in
    order.

    Raises ValueError if none does: with the reason of the last one, or `UNWRITTEN` if the operator
    has no definition.
    """
    reason = UNWRITTEN
    for definition in operator.load_definitions():
        try:
            values = definition.write(inputs)
        except ValueError as error:
            reason = str(error)
        else:
            return definition, {name: values[name] for name in definition.inputs}
    raise ValueError(reason)


def _document(
    path: Path, definition: Definition, values: Values, sizes: Mapping[str, int]
) -> Document:
    """The JSON document of a definition with the sizes and dtypes of a call.

    path: OP/NAME.
    values: the definition's inputs in the call.
    sizes: of all axes.
    """
    inputs = {
        name: {"shape": axes or None, "dtype": str(values[name].dtype).removeprefix("torch.")}
        for name, axes in definition.inputs.items()
    }
    reference = definition.reference
    return {
        "name": path.name,
        "op_type": path.parent.name,
        "axes": {
            axis: {"type": "var"} if axis in _VARIABLE else {"type": "const", "value": size}
            for axis, size in sizes.items()
        },
        "inputs": inputs,
        "outputs": {name: inputs[like] for name, like in definition.outputs.items()},
        "reference": _REFERENCE.format(
            source=inspect.getsource(reference),
            names=", ".join(inputs),
            function=reference.__name__,
            keywords=", ".join(f"{name}={name}" for name in inputs),
        ),
    }


def _write_definition(folder: Path, path: Path, definition: Definition, document: Document) -> None:
    """Write the document of a definition, and the bundled implementations as its solutions.

    path: OP/NAME.
    """
    _put_text(folder / "definitions" / f"{path}.json", json.dumps(document, indent=1))
    for implementation in ("fused", "unfused"):
        name = f"ssdprof_{implementation}_{path.name}"
        text = _SOLUTION.format(
            names=", ".join(document["inputs"]), kind=definition.name, implementation=implementation
        )
        solution = {
            "name": name,
            "definition": path.name,
            "author": "ssdprof",
            "spec": {
                "language": "python",
                "target_hardware": ["cuda"],
                "entry_point": "main.py::run",
                "dependencies": ["ssdprof"],
                "destination_passing_style": False,
            },
            "sources": [{"path": "main.py", "content": text}],
        }
        _put_text(folder / "solutions" / path / f"{name}.json", json.dumps(solution, indent=1))


def _write_values(folder: Path, file: Path, values: Values) -> Document:
    """Write the tensors of a call to `file` among the blobs.  Returns the workload's inputs: where
    each tensor is, and the values of scalars.
    """
    path = Path("blob", "workloads", file)
    tensors = {name: value.contiguous() for name, value in values.items() if value.ndim}
    _put(folder / path, partial(save_file, tensors))
    inputs: Document = {}
    for name, value in values.items():
        if name in tensors:
            inputs[name] = {"type": "safetensors", "path": str(path), "tensor_key": name}
        else:
            inputs[name] = {"type": "scalar", "value": value.item()}
    return inputs


def _largest_change(before: Tensor, after: Tensor) -> float:
    """The largest relative change of an element from `before` to `after`, whose elements are in the
    same order.  Elements that are 0 before, or infinite after, do not count.
    """
    ratio = after.double().flatten() / before.double().flatten()
    return float((ratio - 1).abs().nan_to_num(0, 0).max())


def _put_text(file: Path, text: str) -> None:
    """Write a text file atomically."""
    _put(file, lambda temporary: temporary.write_text(f"{text}\n", encoding="utf-8"))


def _put(file: Path, write: Callable[[Path], object]) -> None:
    """`files.put`, which writes atomically, in a folder that may not exist yet."""
    file.parent.mkdir(parents=True, exist_ok=True)
    put(file, write)
