"""Reads what a server wrote of its operators' calls as a capture, its outputs included.

flashinfer          the folder of FlashInfer's recorder (FLASHINFER_LOGLEVEL=10)
safetensors         `recording.json` and a file PROCESS_NUMBER.safetensors for each call, in the
                    operator's own names; or files that say this themselves: those of `ssdprof
                    record`
flashinfer-bench    definitions and workloads, which have no outputs; each becomes a layer

Calls are in the order in which their process made them.  Where they name no layer, a forward pass
calls every layer of an operator once, on the same sequences.  docs/from-a-server.md describes all.
"""

from __future__ import annotations

import ast
import hashlib
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from operator import attrgetter, index, itemgetter
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from safetensors import safe_open

from ssdprof import operators
from ssdprof.capture.layers import CapturedLayer
from ssdprof.checkpoint.load import unpickled
from ssdprof.checkpoint.names import select_indices
from ssdprof.core.base import LONGEST_SEQLEN
from ssdprof.core.target import CallRef, CheckpointRef, LayerRef, Prompt
from ssdprof.core.words import plural, size_words, words
from ssdprof.environment.machine import host_memory
from ssdprof.errors import (
    BadInputError,
    MissingCapabilityError,
    SsdprofError,
    library_message,
    printable,
)
from ssdprof.files import parse_json, regular
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.oracle import spans_of
from ssdprof.operators.definition import Document
from ssdprof.operators.operator import Output
from ssdprof.operators.tensors import dtype_name

T = TypeVar("T")
# inputs, what the server computed, and the slots of the sequences in its pool of states
Recorded: TypeAlias = "tuple[Inputs, Output | None, tuple[int, ...]]"
Format = Literal["flashinfer", "flashinfer-bench", "safetensors"]
MANIFEST = "recording.json"
CALL = "call"
WARM_UP = 64  # tokens of the longest sequence with which servers start
_OUTPUT = ("out", "final_states")
_AGAIN = "Record again: docs/from-a-server.md says how."
_METADATA_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call of an operator.  shape: tokens and sequences.  identity: the server's description.
    process: empty for a workload, which has no output.  load: gives inputs and output.
    layer: its name; empty if it is not known.  number: among the calls of the layer; None if calls
    may be missing before this one.  why: what was wrong with it while it was recorded.
    """

    operator: str
    process: str
    shape: tuple[int, int]
    identity: str
    load: Callable[[], Recorded]
    layer: str = ""
    number: int | None = None
    why: str = ""


# the calls of a forward pass, in order, by their layers
_Pass: TypeAlias = "tuple[tuple[LayerRef, _Call], ...]"


@dataclass(frozen=True, kw_only=True)
class ServerCalls:
    """The forward passes of a server.

    passes: of all processes, one after the other, each with the calls of its layers in order.
    left_out: a sentence on calls that are not among them; empty if there are none.
    """

    ref: CheckpointRef
    passes: tuple[_Pass, ...]
    left_out: str

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """One for each number of tokens."""
        identity = "".join(call.identity for _, call in chain.from_iterable(self.passes))
        digest = hashlib.sha256(identity.encode()).hexdigest()
        counts = Counter(calls[0][1].shape[0] for calls in self.passes)
        return tuple(
            Prompt(
                kind="recorded",
                source=f"{plural(count, 'call')} of each layer",
                tokenizer="the server's",
                seqlen=tokens,
                token_sha256=digest,
            )
            for tokens, count in counts.items()
        )

    def layers(self, wanted: str = "all") -> Iterator[CapturedLayer]:
        """Every call of the wanted layers, loaded one at a time.  Raises BadInputError,
        MissingCapabilityError.
        """
        chosen = select_indices(wanted, [layer.index for layer in self.ref.layers])
        last: dict[tuple[str, int], int] = {}  # number of the last call, by process and layer
        for number, calls in enumerate(self.passes, 1):
            for layer, call in calls:
                before = last.get((call.process, layer.index), -1)
                if call.number is not None:
                    last[call.process, layer.index] = call.number
                if layer.index in chosen:
                    tokens, count = call.shape
                    rank = re.match(r"rank(\d{1,6})-", call.process)  # as `record` names files
                    which = CallRef(
                        kind="packed",
                        number=number,
                        count=len(self.passes),
                        prompt_seqlen=tokens,
                        sequences=count,
                        rank=int(rank[1]) if rank else None,
                    )
                    inputs, served, slots = call.load()
                    remark = f"While it was recorded: {call.why}." if call.why else ""
                    if call.process and not served:
                        remark = f"No output of {layer.name} was recorded in pass {number}."
                    yield CapturedLayer(
                        layer=layer,
                        inputs=inputs,
                        call=which,
                        served=served,
                        slots=slots,
                        remark=remark,
                        gap=call.number not in (None, before + 1),
                    )


def open_recording(folder: Path, kind: Format, name: str = "") -> ServerCalls:
    """Read the metadata of all calls, and no tensors.  name: of the recording; by default the
    folder's.

    Raises BadInputError for a folder that is not of this kind, that is damaged, and that holds no
    forward pass.
    """
    calls, unread, source = _READERS[kind](folder)
    left_out_calls = dict(sorted(unread.items()))
    if all(call.layer for call in calls):
        passes = _named_passes(calls)
    else:
        passes, incomplete = _counted_passes(calls)
        left_out_calls |= incomplete
    counts = [f"{plural(number, CALL)} {why}" for why, number in left_out_calls.items()]
    left_out = f"Left out: {words(counts)}." if counts else ""
    if not passes:
        raise BadInputError(
            f"{folder} holds no call that can be replayed.  {left_out}".rstrip(), _AGAIN
        )
    layers = tuple(
        sorted({layer for calls in passes for layer, _ in calls}, key=attrgetter("index"))
    )
    ref = CheckpointRef(
        requested=str(folder),
        source="local",
        repo_id=name or folder.resolve().name or "recording",
        revision=None,
        model_type=f"recorded by {source}",
        layers=layers,
        layer_count=layers[-1].index + 1,
    )
    return ServerCalls(ref=ref, passes=tuple(passes), left_out=left_out)


def _named_passes(calls: Sequence[_Call]) -> list[_Pass]:
    """Forward passes of calls that name their layers: a pass ends where its process does, where
    other sequences begin, and before a layer that it has already.  Nothing is left out.
    """
    operators_of = {call.layer: call.operator for call in calls}
    names = sorted(operators_of, key=_by_numbers)
    # of "model.layers.3.linear_attn", 3, if these tell the layers apart
    numbers = [int(number[0]) for name in names if (number := re.search(r"\d+", name))]
    indices = numbers if len(set(numbers)) == len(names) else range(len(names))
    layers = {
        name: LayerRef(
            index=index,
            name=f"layer {name}" if name.isdecimal() else name,
            operator=operators_of[name],
        )
        for index, name in zip(indices, names, strict=True)
    }
    passes: list[dict[LayerRef, _Call]] = []
    before: tuple[str, tuple[int, int]] | None = None
    for call in calls:
        layer = layers[call.layer]
        same = (call.process, call.shape)
        if same != before or layer in passes[-1]:
            passes.append({})
        passes[-1][layer] = call
        before = same
    return [tuple(calls.items()) for calls in passes]


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """A key by which "layers.9" comes before "layers.10"."""
    return [(int(part or 0), text) for text, part in re.findall(r"(\D*)(\d*)", name)]


def _counted_passes(calls: Sequence[_Call]) -> tuple[list[_Pass], Counter[str]]:
    """Forward passes through the layers of each operator, of which a process's last may be cut off;
    numbers of calls of a warm-up, and of no whole pass.
    """
    numbered: list[_Pass] = []
    left_out: Counter[str] = Counter()
    first = 0
    for operator in dict.fromkeys(call.operator for call in calls):
        passes = _equal_passes([call for call in calls if call.operator == operator], left_out)
        count = max(map(len, passes), default=0)
        layers = [
            LayerRef(index=index, name=f"recorded layer {index}", operator=operator)
            for index in range(first, first + count)
        ]
        numbered += [tuple(zip(layers, calls, strict=False)) for calls in passes]
        first += count
    return numbered, left_out


def _equal_passes(calls: Iterable[_Call], left_out: Counter[str]) -> list[tuple[_Call, ...]]:
    """Forward passes of the calls of one operator.  Counts the calls that it leaves out.

    Consecutive calls of one shape, a run, are whole passes.  The last pass of a process may be cut
    off and stays; another incomplete pass is left out, and so is a first pass of a few tokens of
    one sequence, with which servers warm up.
    """
    processes = [
        [list(run) for _, run in groupby(of_process, key=attrgetter("shape"))]
        for _, of_process in groupby(calls, key=attrgetter("process"))
    ]
    layers = _layer_count(processes)
    passes: list[tuple[_Call, ...]] = []
    for runs in processes:
        of_process: list[tuple[_Call, ...]] = []
        for run in runs:
            cut = len(run) % layers
            starts = range(0, len(run) - cut, layers)
            of_process += [tuple(run[start : start + layers]) for start in starts]
            if cut and run is runs[-1]:
                of_process.append(tuple(run[-cut:]))
            elif cut:
                left_out["of incomplete passes"] += cut
        tokens, count = of_process[0][0].shape if of_process else (0, 0)
        if len(of_process) > 1 and tokens <= WARM_UP and count == 1:
            left_out["of a warm-up"] += len(of_process.pop(0))
        passes += of_process
    return passes


def _layer_count(processes: list[list[list[_Call]]]) -> int:
    """The number of calls in a forward pass: the greatest that divides the lengths of all runs.

    The last run of a process may be cut off, and its first may have begun before the recording, so
    these count only if there are no others.
    """
    inner = [run for runs in processes for run in runs[1:-1]]
    complete = [run for runs in processes for run in runs[:-1]]
    every = list(chain.from_iterable(processes))
    return math.gcd(*map(len, inner or complete or every)) or 1


def _checked(inputs: Inputs, output: Output | None, slots: torch.Tensor | None) -> Recorded:
    """The call, with `slots` as numbers, after its checks.

    ValueError if an output does not have its shape, the bounds of sequences do not rise, or an
    argument is no tensor and no finite number; a limit may be infinite.  KeyError if an output has
    a dtype that records do not have.
    """
    spans_of(inputs)
    for name, value in vars(inputs).items():
        if not isinstance(value, torch.Tensor | tuple | None) and not math.isfinite(value):
            raise ValueError(f"{name} is {value}")
    forms = operators.get(inputs.operator).oracle.forms(inputs)
    for name, form, tensor in zip(_OUTPUT, forms, output or (), strict=False):
        if tuple(tensor.shape) != tuple(form.shape):
            raise ValueError(f"{name} is {tuple(tensor.shape)}, not {tuple(form.shape)}")
        dtype_name(tensor.dtype)  # raises KeyError for a dtype that records do not have
        if name == "out" and tensor.dtype != form.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, not {form.dtype}")
    if slots is None:
        return inputs, output, ()
    if slots.shape != (inputs.sequences,) or slots.is_floating_point():
        raise ValueError(f"slots are not {inputs.sequences} integers, one for each sequence")
    return inputs, output, tuple(slots.tolist())


def _reading(path: Path, read: Callable[..., T], *arguments: object) -> T:
    """What `read` returns, with BadInputError that names the path for all that is wrong with its
    files.
    """
    try:
        return read(path, *arguments)
    except (SsdprofError, MemoryError):
        raise
    except Exception as error:  # of any class: the files may hold anything
        raise BadInputError(
            f"The recording's {path} cannot be used: {library_message(error)}.", _AGAIN
        ) from error


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    """What is in a file of torch.save or safetensors.  MissingCapabilityError if memory has no room
    for it twice.
    """
    _check_room(file, regular(file, math.inf).stat().st_size)
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt", device="cpu") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    content = unpickled(file)
    if not isinstance(content, dict) or not all(map(torch.is_tensor, content.values())):
        raise ValueError(f"{file.name} holds no table of tensors")
    return content


def _check_room(file: Path, size: int) -> None:
    if 2 * size > (room := host_memory()):
        raise MissingCapabilityError(
            f"{file} has {size_words(size)}, which main memory of {size_words(room)} cannot hold "
            "twice.",
            "Record with a smaller pool of states, or read it on a larger machine.",
        )


# --- FlashInfer's recorder


# by function of FlashInfer: the operator, and what makes its inputs and output of a call
_Known: TypeAlias = "dict[str, tuple[str, Callable[..., Any]]]"


def _flashinfer(folder: Path) -> tuple[list[_Call], Counter[str], str]:
    """The calls of known functions in order, the numbers of others, and the version."""
    known: _Known = {}
    for name in operators.names():
        recorded = operators.get(name).binding.recorded
        known |= {function: (name, read) for function, read in recorded.items()}
    calls: list[tuple[tuple[int, int], _Call]] = []
    others: Counter[str] = Counter()
    versions: dict[str, None] = {}
    for file in sorted(folder.glob("*_call*/metadata.jsonl")):
        order, version, call = _reading(file, _flashinfer_call, known)
        if isinstance(call, str):
            others[call] += 1
        else:
            versions[version] = None
            calls.append((order, call))
    if not calls and not others:
        raise BadInputError(f"{folder} holds no recording of FlashInfer.", _AGAIN)
    calls.sort(key=itemgetter(0))
    return [call for _, call in calls], others, f"FlashInfer {', '.join(versions)}"


def _flashinfer_call(file: Path, known: _Known) -> tuple[tuple[int, int], str, _Call | str]:
    """Process and number, version, and the call, or what kind of call cannot be replayed.  Raises
    errors of any class.
    """
    text = regular(file, _METADATA_BYTES).read_text(encoding="utf-8").strip().splitlines()[-1]
    metadata = parse_json(text)
    function = metadata["function_name"]
    process = int(metadata["process_id"])
    order = process, int(metadata["call_sequence"])
    version = str(metadata.get("versions", {}).get("flashinfer", "of unknown version"))
    if function not in known:
        return order, version, f"of {function}"
    if metadata.get("graph_capture"):
        return order, version, "inside CUDA graphs"
    operator, read = known[function]
    names = _names(metadata["function_signature"])
    shapes = {
        _argument(key, names): value["shape"]
        for key, value in metadata["tensor_details"].items()
        if not key.startswith("result")
    }
    scalars = {_argument(key, names): value for key, value in metadata["input_metadata"].items()}
    call = _Call(
        operator=operator,
        process=str(process),
        shape=(int(shapes["q"][0]), int(shapes["cu_seqlens"][0]) - 1),
        identity=text,
        load=partial(_reading, file.parent, _load_flashinfer, read, names, scalars),
    )
    return order, version, call


def _names(signature: str) -> list[str]:
    """Parameters of a function in order: "(q: Tensor, k: Optional[Tensor] = None) -> Tensor"."""
    function = ast.parse(f"def function{signature}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    return [
        argument.arg
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    ]


def _argument(key: str, names: list[str]) -> str:
    """ "arg_1", "kwarg_g" -> the parameter's name."""
    kind, _, which = key.partition("_")
    return names[int(which)] if kind == "arg" else which


def _load_flashinfer(
    path: Path, read: Callable[..., Any], names: list[str], scalars: dict[str, Any]
) -> Recorded:
    """A call in the folder that FlashInfer's recorder wrote for it.

    read: makes inputs and output of the arguments and of what the function returned.  names: of its
    parameters.
    """
    files = {file.stem: file for file in path.iterdir() if file.suffix in (".pt", ".safetensors")}
    if "inputs" not in files:
        raise ValueError("it has no inputs.pt")
    tensors = {_argument(key, names): tensor for key, tensor in _tensors(files["inputs"]).items()}
    # the server may have died in the call
    outputs = _tensors(files["outputs"]) if "outputs" in files else {}
    returned = [outputs[key] for key in sorted(outputs) if key.startswith("result")]
    inputs, output = read(scalars | tensors, returned)
    return _checked(inputs, output, tensors.get("state_indices"))


# --- safetensors in the operator's own names


def _safetensors(folder: Path) -> tuple[list[_Call], Counter[str], str]:
    """The calls in files of safetensors, with none left out, and what recorded them.

    A file describes its call itself, or else is as `recording.json` describes all of them.
    """
    files = sorted(folder.glob("*_*.safetensors"))
    texts = [_reading(file, _text_of_call) for file in files]
    described: dict[str, Any] = {}
    if not all(texts) or not files:
        described = _reading(folder / MANIFEST, _description)
    calls = []
    sources: dict[str, None] = {}
    if described:
        sources[str(described["source"])] = None
    for file, text in zip(files, texts, strict=True):
        call = _reading(file, partial(_described, text=text)) if text else described
        operator = call["operator"]
        arguments = dict(call.get("arguments", {}))
        sources[call["source"]] = None
        calls.append(
            _Call(
                operator=operator,
                process=file.stem.rpartition("_")[0],
                shape=_reading(file, _shape, operators.get(operator).inputs.FIRST),
                identity=f"{file.name} {operator} {call['source']} {arguments}",
                load=partial(_reading, file, _load_safetensors, operator, arguments),
                layer=str(call.get("layer", "")),
                number=call.get("number"),
                why=str(call.get("why", "")),
            )
        )
    return calls, Counter(), words(sources)


def _text_of_call(file: Path) -> str:
    """What a file says of its call, in JSON; empty if nothing."""
    with safe_open(file, framework="pt", device="cpu") as opened:
        metadata: dict[str, str] = opened.metadata() or {}
    return metadata.get("call", "")


def _description(path: Path) -> dict[str, Any]:
    return _described(path, text=regular(path, _METADATA_BYTES).read_text(encoding="utf-8"))


def _described(_path: Path, *, text: str) -> dict[str, Any]:
    """Operator, source, scalar arguments, and perhaps the layer and the number of its calls before.
    Raises errors of any class.
    """
    description = parse_json(text)
    if description["operator"] not in operators.names():
        raise ValueError(f"there is no operator {description['operator']!r}")
    return {"source": "a server", **description}


def _shape(file: Path, first: str) -> tuple[int, int]:
    """Tokens and sequences, from the header.  first: an input of the operator that has both."""
    with safe_open(file, framework="pt", device="cpu") as opened:
        packed = "cu_seqlens" in opened.keys()  # noqa: SIM118
        sequences = opened.get_slice("cu_seqlens").get_shape()[0] - 1 if packed else 1
        return opened.get_slice(first).get_shape()[1], sequences


def _load_safetensors(file: Path, operator: str, arguments: dict[str, Any]) -> Recorded:
    """A call in the operator's own names; one without `cu_seqlens` is a pack of one sequence."""
    tensors = _tensors(file)
    slots = tensors.pop("slots", None)
    output = tuple(tensors.pop(name) for name in _OUTPUT if name in tensors)
    scalars = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in arguments.items()
    }
    inputs = operators.get(operator).inputs(**tensors, **scalars)
    if inputs.cu_seqlens is None:
        if inputs.values.shape[0] != 1:
            raise ValueError("a batch is recorded as packed sequences, with cu_seqlens")
        inputs = replace(inputs, cu_seqlens=torch.tensor([0, inputs.length], dtype=torch.int32))
    call = _checked(inputs, output if len(output) == 2 else None, slots)
    return _side_by_side(*call) if inputs.state_every else call


def _side_by_side(inputs: Inputs, served: Output | None, slots: tuple[int, ...]) -> Recorded:
    """A packed verification whose sequences have equal lengths, reshaped to a batch (sequences,
    length, ...); any other unchanged.

    As a batch it also runs on kernels that return only final states.
    """
    assert inputs.cu_seqlens is not None
    lengths = set(inputs.cu_seqlens.diff().tolist())
    if len(lengths) > 1:
        return inputs, served, slots
    (length,) = lengths
    rows = (inputs.sequences, length)
    positional = operators.get(inputs.operator).binding.positional(inputs)
    batch = {name: tensor.reshape(*rows, *tensor.shape[2:]) for name, tensor in positional.items()}
    if served:
        out, states = served
        served = out.reshape(*rows, *out.shape[2:]), states
    return replace(inputs, **batch, cu_seqlens=None), served, slots


# --- definitions and workloads of flashinfer-bench


def _flashinfer_bench(folder: Path) -> tuple[list[_Call], Counter[str], str]:
    """The calls of workloads, the numbers of those that have no counterpart here, and what wrote
    them.
    """
    files = sorted((folder / "definitions").rglob("*.json"))
    documents = dict(_reading(file, _definition) for file in files)
    entries: list[_Call | str] = []
    for file in sorted((folder / "workloads").rglob("*.jsonl")):
        entries += _reading(file, _workloads, folder, documents)
    if not entries:
        raise BadInputError(f"{folder} holds no workloads of flashinfer-bench.", _AGAIN)
    others = Counter(entry for entry in entries if isinstance(entry, str))
    calls = [entry for entry in entries if isinstance(entry, _Call)]
    return calls, others, "flashinfer-bench"


def _definition(file: Path) -> tuple[str, Document]:
    """The name of a definition, and the definition.  Raises errors of any class."""
    document = parse_json(regular(file, _METADATA_BYTES).read_text(encoding="utf-8"))
    return str(document["name"]), document


def _workloads(file: Path, folder: Path, documents: dict[str, Document]) -> list[_Call | str]:
    """A line each: the call, or what call has no counterpart.  Raises errors of any class."""
    entries: list[_Call | str] = []
    for line in regular(file).read_text(encoding="utf-8").splitlines():
        entry = parse_json(line)
        name, workload = entry["definition"], entry["workload"]
        document = documents[name]
        known = [pair for pair in operators.definitions() if pair[1].defines(document)]
        entries += [] if known else [f"of {name}"]
        for operator, definition in known:
            sizes = _sizes(document, workload)
            tokens = math.prod(sizes[axis] for axis in definition.tokens)
            sequences = sizes[definition.sequences]
            if not (0 < tokens <= LONGEST_SEQLEN and 0 < sequences <= LONGEST_SEQLEN):
                raise ValueError(f"{tokens:,} tokens of {sequences:,} sequences are no call")
            load = partial(
                _reading, file, _load_workload, folder, definition.read, document, workload
            )
            call = _Call(
                operator=operator.name,
                process="",
                shape=(tokens, sequences),
                identity=line,
                load=load,
                layer=printable(f"{name} {workload['uuid']}"),
                number=1,  # nothing is known of calls before it
            )
            entries.append(call)
    return entries


def _sizes(document: Document, workload: Document) -> dict[str, int]:
    """Axis -> its size."""
    return {
        axis: index(workload["axes"][axis] if form["type"] == "var" else form["value"])
        for axis, form in document["axes"].items()
    }


def _load_workload(
    file: Path, folder: Path, read: Callable[..., Inputs], document: Document, workload: Document
) -> Recorded:
    """A call whose tensors have the shapes and dtypes of its definition."""
    values: Document = {}
    sizes = _sizes(document, workload)
    for name, form in document["inputs"].items():
        source = workload["inputs"].get(name, {"type": "random"})
        if source["type"] == "scalar":
            values[name] = source["value"]
            continue
        shape = tuple(sizes[axis] for axis in form["shape"])
        dtype = getattr(torch, form["dtype"])
        if source["type"] == "random":
            _check_room(file, 8 * math.prod(shape))
            tensor = _drawn(f"{workload['uuid']} {name}", shape, dtype)
        else:
            path = (folder / source["path"]).resolve()
            if not path.is_relative_to(folder.resolve()):
                raise ValueError(f"{source['path']} is outside of the folder")
            with safe_open(regular(path, math.inf), framework="pt", device="cpu") as opened:
                tensor = opened.get_tensor(source["tensor_key"])
        if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
            raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, not {shape} {dtype}")
        values[name] = tensor
    return _checked(read(**values), None, None)


def _drawn(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers, the same whenever `name` is.  q and k have length 1: states stay finite."""
    if not dtype.is_floating_point:
        raise ValueError(f"random integers are no {name.split()[-1]}")
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator)
    if name.endswith((" q", " k")):
        values = torch.nn.functional.normalize(values, dim=-1)
    return values.to(dtype)


_READERS = {
    "flashinfer": _flashinfer,
    "flashinfer-bench": _flashinfer_bench,
    "safetensors": _safetensors,
}
