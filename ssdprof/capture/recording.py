"""Reads the operator calls of a server, which were recorded with its outputs, as those of a
capture.

flashinfer          the folder of FlashInfer's recorder (FLASHINFER_LOGLEVEL=10)
safetensors         a file PROCESS_NUMBER.safetensors for each call, with the operator's names of
                    tensors.  A file may describe its call, as those of `ssdprof record` do;
                    `recording.json` describes the calls of all others
flashinfer-bench    definitions and workloads, which have no outputs; each workload becomes a layer
                    of the operator that has its definition

The calls of a process are in the order in which it made them: that of NUMBER in the names of files.
If not all of them name their layers, it is assumed that a forward pass calls every layer of an
operator once, on the same sequences.
docs/from-a-server.md describes all of these.
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
from ssdprof.core.base import LONGEST_SEQLEN, WHILE_RECORDED
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
from ssdprof.operators.operator import OutputPair
from ssdprof.operators.tensors import dtype_name

T = TypeVar("T")
# the inputs; the server's output, None if it was not recorded; the slots of the sequences in the
# server's pool of states, empty if they were not recorded
Recorded: TypeAlias = "tuple[Inputs, OutputPair | None, tuple[int, ...]]"
Format = Literal["flashinfer", "flashinfer-bench", "safetensors"]
DESCRIPTION = "recording.json"
WARM_UP = 64  # tokens of the longest sequence with which servers warm up
_OUTPUT = ("out", "final_states")
_RECORD_HINT = "Record again: docs/from-a-server.md says how."
_METADATA_BYTES = 1 << 24  # size of the largest file with metadata that is read


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A recorded call of an operator.

    process: name of the process that made it; empty for a workload, which has no output.
    shape: numbers of tokens and of sequences.
    identity: text that differs between any two calls.
    load: () -> inputs, output and slots.  Raises BadInputError for damaged files, and
        MissingCapabilityError if main memory is too small.
    layer: name of the layer; empty if it is not known.
    number: number among the calls of the layer, from 0; None if it was not recorded, in which case
        no call is taken to be missing before this one.
    problem: what was wrong with the call while it was recorded, a sentence without its full stop;
        empty if nothing was.
    """

    operator: str
    process: str
    shape: tuple[int, int]
    identity: str
    load: Callable[[], Recorded]
    layer: str = ""
    number: int | None = None
    problem: str = ""


# the calls of a forward pass in order, each with its layer
_Pass: TypeAlias = "tuple[tuple[LayerRef, _Call], ...]"
# all calls of a recording; what kind of call was not read -> their number; the recorder's name
_Reading: TypeAlias = "tuple[list[_Call], Counter[str], str]"


@dataclass(frozen=True, kw_only=True)
class ServerCalls:
    """The forward passes of a server.

    ref: stands for the model, of which only the layers that were called are known.
    passes: the passes of all processes, one process after the other; of calls that do not name
        their layers, those of one operator after those of another.
    left_out: a sentence on recorded calls that belong to no pass; empty if there are none.
    """

    ref: CheckpointRef
    passes: tuple[_Pass, ...]
    left_out: str

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """A prompt for each number of tokens that passes have.  All have the hash of all calls."""
        calls = [call for _, call in chain.from_iterable(self.passes)]
        identity = "".join(call.identity for call in calls)
        digest = hashlib.sha256(identity.encode()).hexdigest()
        counts = Counter(call.shape[0] for call in calls)
        return tuple(
            Prompt(
                kind="recorded",
                source=plural(count, "recorded call"),
                tokenizer="the server's",
                seqlen=tokens,
                token_sha256=digest,
            )
            for tokens, count in counts.items()
        )

    def layers(self, wanted: str = "all") -> Iterator[CapturedLayer]:
        """Every call of the wanted layers, loaded one at a time, pass by pass.

        wanted: as the option --layers.

        Raises BadInputError for damaged files and for layers that do not exist,
        MissingCapabilityError if main memory is too small.
        """
        chosen = select_indices(wanted, [layer.index for layer in self.ref.layers])
        # process, layer index -> number of its latest call
        latest_numbers: dict[tuple[str, int], int] = {}
        for pass_number, calls in enumerate(self.passes, 1):
            for layer, call in calls:
                gap = False
                if call.number is not None:
                    expected_number = latest_numbers.get((call.process, layer.index), -1) + 1
                    gap = call.number != expected_number
                    latest_numbers[call.process, layer.index] = call.number
                if layer.index in chosen:
                    yield self._captured(layer, call, pass_number, gap=gap)

    def _captured(
        self, layer: LayerRef, call: _Call, pass_number: int, *, gap: bool
    ) -> CapturedLayer:
        """A call of a pass, loaded.  gap: whether calls of its layer just before it were not
        recorded.
        """
        tokens, sequences = call.shape
        rank = re.match(r"rank(\d{1,6})-", call.process)  # as `record` names files
        call_ref = CallRef(
            kind="packed",
            number=pass_number,
            count=len(self.passes),
            prompt_seqlen=tokens,
            sequences=sequences,
            rank=int(rank[1]) if rank else None,
        )
        inputs, served, slots = call.load()
        remark = ""
        if call.problem:
            remark = f"{WHILE_RECORDED}{call.problem}."
        elif call.process and not served:
            remark = f"No output of {layer.name} was recorded in pass {pass_number}."
        return CapturedLayer(
            layer=layer,
            inputs=inputs,
            call=call_ref,
            served=served,
            slots=slots,
            remark=remark,
            gap=gap,
        )


def open_recording(folder: Path, kind: Format, name: str = "") -> ServerCalls:
    """Read the metadata of all calls in a recording, and no tensors.

    kind: the format of the recording.
    name: name of the recording; empty: that of the folder.

    Raises BadInputError if the folder is not of this kind, is damaged, or holds no forward pass.
    """
    calls, unread, source = _READERS[kind](folder)
    left_out_calls = dict(sorted(unread.items()))
    if all(call.layer for call in calls):
        passes = _named_passes(calls)
    else:
        passes, incomplete = _counted_passes(calls)
        left_out_calls |= incomplete
    counts = [f"{plural(count, 'call')} {what}" for what, count in left_out_calls.items()]
    left_out = f"Left out: {words(counts)}." if counts else ""
    if not passes:
        raise BadInputError(
            f"{folder} holds no call that can be replayed.  {left_out}".rstrip(), _RECORD_HINT
        )
    called = {layer for layer, _ in chain.from_iterable(passes)}
    layers = tuple(sorted(called, key=attrgetter("index")))
    ref = CheckpointRef(
        requested=str(folder),
        source="recorded",
        repo_id=name or folder.resolve().name or "recording",
        revision=None,
        model_type=f"recorded by {source}",
        layers=layers,
        layer_count=layers[-1].index + 1,
    )
    return ServerCalls(ref=ref, passes=tuple(passes), left_out=left_out)


def _named_passes(calls: Sequence[_Call]) -> list[_Pass]:
    """The forward passes of calls that name their layers.  A pass ends with its process, before a
    call on another number of tokens or sequences, and before a layer that it already has.

    Layers of two operators may have the same name: those of two models in one process.
    """
    keys = sorted({(call.layer, call.operator) for call in calls}, key=_sort_key)
    # indices are the first numbers between dots in the names, 3 of "model.layers.3.linear_attn", if
    # every name has one and they differ; otherwise the names are numbered
    numbers = [re.search(r"(?<![^.])\d+(?![^.])", name) for name, _ in keys]
    indices = [int(number[0]) for number in numbers if number]
    if len(set(indices)) < len(keys):
        indices = [*range(len(keys))]
    layers = {
        (name, operator): LayerRef(
            index=index, name=f"layer {name}" if name.isdecimal() else name, operator=operator
        )
        for index, (name, operator) in zip(indices, keys, strict=True)
    }
    passes: list[dict[LayerRef, _Call]] = []
    previous: tuple[str, tuple[int, int]] | None = None
    for call in calls:
        layer = layers[call.layer, call.operator]
        process_and_shape = (call.process, call.shape)
        if process_and_shape != previous or layer in passes[-1]:
            passes.append({})
        passes[-1][layer] = call
        previous = process_and_shape
    return [tuple(calls.items()) for calls in passes]


def _sort_key(layer_and_operator: tuple[str, str]) -> list[tuple[int, str]]:
    """A key by which "layers.9" comes before "layers.10": numbers count before the words in front
    of them.
    """
    words_and_digits = re.findall(r"(\D*)(\d*)", " ".join(layer_and_operator))
    return [(int(digits or 0), text) for text, digits in words_and_digits]


def _counted_passes(calls: Sequence[_Call]) -> tuple[list[_Pass], Counter[str]]:
    """The forward passes of calls that do not name their layers, and the numbers of calls that are
    left out, by kind.  The layers and the passes of one operator follow those of another.
    """
    numbered: list[_Pass] = []
    left_out: Counter[str] = Counter()
    first = 0  # index of the operator's first layer
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
    """The forward passes of the calls of one operator.  Adds to `left_out` the numbers of calls
    that it leaves out.

    A run, which is consecutive calls of one shape, should consist of whole passes.  If it does not,
    its last pass is incomplete.  An incomplete pass at the end of a process is kept, because
    recording may have ended in it; others are left out.  So is a first pass of a few tokens of one
    sequence, with which servers warm up, unless it is the only pass of its process.
    """
    processes = [
        [list(run) for _, run in groupby(process_calls, key=attrgetter("shape"))]
        for _, process_calls in groupby(calls, key=attrgetter("process"))
    ]
    layers = _layer_count(processes)
    passes: list[tuple[_Call, ...]] = []
    for runs in processes:
        process_passes: list[tuple[_Call, ...]] = []
        for run in runs:
            incomplete = len(run) % layers
            starts = range(0, len(run) - incomplete, layers)
            process_passes += [tuple(run[start : start + layers]) for start in starts]
            if incomplete and run is runs[-1]:
                process_passes.append(tuple(run[-incomplete:]))
            elif incomplete:
                left_out["of incomplete passes"] += incomplete
        if len(process_passes) > 1:
            tokens, sequences = process_passes[0][0].shape
            if tokens <= WARM_UP and sequences == 1:
                left_out["of a warm-up"] += len(process_passes.pop(0))
        passes += process_passes
    return passes


def _layer_count(processes: list[list[list[_Call]]]) -> int:
    """The number of calls in a forward pass: the greatest common divisor of the lengths of runs.

    processes: the runs of each process.  The last run of a process may be cut off, and its first
        may have begun before the recording.  So first runs count only if there are no others but
        last ones, and last ones only if there are no others at all.
    """
    for usable in (slice(1, -1), slice(-1), slice(None)):
        runs = list(chain.from_iterable(runs[usable] for runs in processes))
        if runs:
            return math.gcd(*map(len, runs))
    return 1


def _checked(inputs: Inputs, output: OutputPair | None, slots: torch.Tensor | None) -> Recorded:
    """Check a call and return it, with its slots as integers.

    Raises ValueError if an output does not have its shape, or out not its dtype; if the bounds of
    sequences do not rise; if a scalar argument is not finite (the numbers in a tuple are not
    checked, because a limit may be infinite); and if there is not one slot for each sequence.
    Raises TypeError for a scalar that is no number, and KeyError if an output has a dtype that
    records do not have, such as one of integers.
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
    """`read(path, *arguments)`.  Any error but SsdprofError and MemoryError becomes a BadInputError
    that names the path.
    """
    try:
        return read(path, *arguments)
    except (SsdprofError, MemoryError):
        raise
    except Exception as error:  # any class is possible, because the files may hold anything
        fault = library_message(error)
        if isinstance(error, KeyError):
            fault = f"there is no {error}"
        elif isinstance(error, TypeError | AttributeError):
            fault = f"a value has another type than expected ({fault})"
        raise BadInputError(
            f"The recording's {path} cannot be used: {fault}.", _RECORD_HINT
        ) from error


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors in a file of torch.save or safetensors, by name.

    Raises MissingCapabilityError if main memory cannot hold them twice, and errors of any class for
    a damaged file.
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
    """Raise MissingCapabilityError if main memory cannot hold `size` bytes twice."""
    room = host_memory()
    if 2 * size > room:
        raise MissingCapabilityError(
            f"{file} has {size_words(size)}, which main memory of {size_words(room)} cannot hold "
            "twice.",
            "Record with a smaller pool of states, or read it on a larger machine.",
        )


# --- FlashInfer's recorder


# function of FlashInfer -> the operator, and the entry of its `CallBinding.recorded`
_Known: TypeAlias = "dict[str, tuple[str, Callable[..., Any]]]"


def _flashinfer(folder: Path) -> _Reading:
    """Read the folder of FlashInfer's recorder."""
    known: _Known = {}
    for name in operators.names():
        for function, convert in operators.get(name).binding.recorded.items():
            known[function] = (name, convert)
    calls: list[tuple[tuple[int, int], _Call]] = []
    unread: Counter[str] = Counter()
    versions: dict[str, None] = {}  # a set in order
    for file in sorted(folder.glob("*_call*/metadata.jsonl")):
        order, version, call = _reading(file, _flashinfer_call, known)
        if isinstance(call, str):
            unread[call] += 1
        else:
            versions[version] = None
            calls.append((order, call))
    if not calls and not unread:
        raise BadInputError(f"{folder} holds no recording of FlashInfer.", _RECORD_HINT)
    calls.sort(key=itemgetter(0))
    return [call for _, call in calls], unread, f"FlashInfer {', '.join(versions)}"


def _flashinfer_call(file: Path, known: _Known) -> tuple[tuple[int, int], str, _Call | str]:
    """Read the metadata of one call.  Raises errors of any class.

    Returns the process and the number of the call, by which calls are sorted; the version of
    FlashInfer; and the call, or, if it cannot be replayed, a text that says what kind it is.
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
    operator, convert = known[function]
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
        load=partial(_reading, file.parent, _load_flashinfer, convert, names, scalars),
    )
    return order, version, call


def _names(signature: str) -> list[str]:
    """Names of the parameters in a signature such as "(q: Tensor, k: Optional[Tensor] = None) ->
    Tensor", in order.
    """
    function = ast.parse(f"def function{signature}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    return [
        argument.arg
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    ]


def _argument(key: str, names: list[str]) -> str:
    """The parameter's name of a recorded argument, "arg_1" or "kwarg_g".

    names: of all parameters, in order.
    """
    kind, _, number_or_name = key.partition("_")
    return names[int(number_or_name)] if kind == "arg" else number_or_name


def _load_flashinfer(
    path: Path, convert: Callable[..., Any], names: list[str], scalars: dict[str, Any]
) -> Recorded:
    """Load a call from the folder that FlashInfer's recorder wrote for it.  Raises errors of any
    class.

    convert: entry of `CallBinding.recorded`.  names: names of the function's parameters.  scalars:
    the arguments that are no tensors, by name.
    """
    files = {file.stem: file for file in path.iterdir() if file.suffix in (".pt", ".safetensors")}
    if "inputs" not in files:
        raise ValueError("it has no inputs.pt")
    tensors = {_argument(key, names): tensor for key, tensor in _tensors(files["inputs"]).items()}
    # the server may have died in the call
    outputs = _tensors(files["outputs"]) if "outputs" in files else {}
    returned = [outputs[key] for key in sorted(outputs) if key.startswith("result")]
    inputs, output = convert(scalars | tensors, returned)
    return _checked(inputs, output, tensors.get("state_indices"))


# --- safetensors in the operator's own names


def _safetensors(folder: Path) -> _Reading:
    """Read a folder with a file of safetensors for each call.

    `recording.json` describes the calls of those files that do not describe their calls themselves.
    """
    files = sorted(folder.glob("*_*.safetensors"), key=_order_of_call)
    if not files:
        return [], Counter(), ""
    texts = [_reading(file, _text_of_call) for file in files]
    folder_description: dict[str, Any] = {}
    if not all(texts):
        folder_description = _reading(folder / DESCRIPTION, _description_of_folder)
    calls = []
    sources: dict[str, None] = {}  # a set in order
    for file, text in zip(files, texts, strict=True):
        description = folder_description
        if text:
            description = _reading(file, _description, text)
        operator, arguments = description["operator"], description["arguments"]
        sources[str(description["source"])] = None
        calls.append(
            _Call(
                operator=operator,
                process=file.stem.rpartition("_")[0],
                shape=_reading(file, _shape, operators.get(operator).inputs.FIRST),
                identity=f"{file.name} {operator} {description['source']} {arguments}",
                load=partial(_reading, file, _load_safetensors, operator, arguments),
                layer=str(description.get("layer", "")),
                number=description.get("number"),
                problem=str(description.get("why", "")),
            )
        )
    return calls, Counter(), words(sources)


def _order_of_call(file: Path) -> tuple[str, int, str]:
    """The key by which files PROCESS_NUMBER are sorted: the process, then how many digits the
    number has, and the number.  So 10 comes after 9, also without zeros in front.
    """
    process, _, number = file.stem.rpartition("_")
    digits = number.lstrip("0")
    return process, len(digits), digits


def _text_of_call(file: Path) -> str:
    """The JSON text in which a file describes its call; empty if it has none."""
    with safe_open(file, framework="pt", device="cpu") as opened:
        metadata: dict[str, str] = opened.metadata() or {}
    return metadata.get("call", "")


def _description_of_folder(path: Path) -> dict[str, Any]:
    """The description in `recording.json`."""
    return _description(path, regular(path, _METADATA_BYTES).read_text(encoding="utf-8"))


def _description(_path: Path, text: str) -> dict[str, Any]:
    """Parse the description of a call: operator, source, scalar arguments, and optionally the
    layer, the number among its calls, and what went wrong.  Raises errors of any class.

    _path: where the text is; not used, but `_reading` passes it.
    """
    description = parse_json(text)
    if description["operator"] not in operators.names():
        raise ValueError(f"there is no operator {description['operator']!r}")
    # `operator.index` raises TypeError for a number that is no integer
    index(description.get("number", 0))
    arguments = dict(description.get("arguments", {}))
    # a file of a program of the user need not say what computed its output
    return {"source": "a server", **description, "arguments": arguments}


def _shape(file: Path, first: str) -> tuple[int, int]:
    """The numbers of tokens and sequences of a call, from the header of its file.

    first: name of an input (1, tokens, ...).

    Raises errors of any class.
    """
    with safe_open(file, framework="pt", device="cpu") as opened:
        sequences = 1
        if "cu_seqlens" in opened.keys():  # noqa: SIM118
            sequences = opened.get_slice("cu_seqlens").get_shape()[0] - 1
        return opened.get_slice(first).get_shape()[1], sequences


def _load_safetensors(file: Path, operator: str, arguments: dict[str, Any]) -> Recorded:
    """Load a call whose tensors have the operator's names.  Without `cu_seqlens` it has one
    sequence.

    arguments: those that are no tensors, by the operator's names; a list stands for a tuple.

    Raises errors of any class, also for an output without the other.
    """
    tensors = _tensors(file)
    slots = tensors.pop("slots", None)
    output = tuple(tensors.pop(name) for name in _OUTPUT if name in tensors)
    if len(output) == 1:
        raise ValueError("it has only one of out and final_states, which belong together")
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
    return _as_batch(*call) if inputs.state_every else call


def _as_batch(inputs: Inputs, served: OutputPair | None, slots: tuple[int, ...]) -> Recorded:
    """A packed verification, and its output, reshaped to a batch (sequences, length, ...) if its
    sequences have equal lengths, so that it also runs on kernels that return only final states.
    Otherwise it stays packed.
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


def _flashinfer_bench(folder: Path) -> _Reading:
    """Read a folder of definitions and workloads.  Workloads of definitions that no operator has
    are not read.
    """
    files = sorted((folder / "definitions").rglob("*.json"))
    documents = dict(_reading(file, _definition) for file in files)
    entries: list[_Call | str] = []
    for file in sorted((folder / "workloads").rglob("*.jsonl")):
        entries += _reading(file, _workloads, folder, documents)
    if not entries:
        raise BadInputError(f"{folder} holds no workloads of flashinfer-bench.", _RECORD_HINT)
    unread = Counter(entry for entry in entries if isinstance(entry, str))
    calls = [entry for entry in entries if isinstance(entry, _Call)]
    return calls, unread, "flashinfer-bench"


def _definition(file: Path) -> tuple[str, Document]:
    """Read a definition.  Returns its name and the document.  Raises errors of any class."""
    document = parse_json(regular(file, _METADATA_BYTES).read_text(encoding="utf-8"))
    return str(document["name"]), document


def _workloads(file: Path, folder: Path, documents: dict[str, Document]) -> list[_Call | str]:
    """Read a file of workloads.  Returns the calls in order; in place of one whose definition no
    operator has, a text that says what kind it is.  Raises errors of any class.

    folder: that of definitions and workloads, in which their tensors are.
    documents: name of a definition -> the definition.
    """
    entries: list[_Call | str] = []
    for line in regular(file).read_text(encoding="utf-8").splitlines():
        entry = parse_json(line)
        name, workload = entry["definition"], entry["workload"]
        document = documents[name]
        matching = [
            (operator, definition)
            for operator, definition in operators.definitions()
            if definition.defines(document)
        ]
        if not matching:
            entries.append(f"of {name}")
        for operator, definition in matching:
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
                number=1,  # not 0: a gap, because calls before it are not known
            )
            entries.append(call)
    return entries


def _sizes(document: Document, workload: Document) -> dict[str, int]:
    """Name of an axis -> its size, which for variable axes is in the workload, and for others in
    the definition.
    """
    return {
        axis: index(workload["axes"][axis] if form["type"] == "var" else form["value"])
        for axis, form in document["axes"].items()
    }


def _load_workload(
    file: Path, folder: Path, read: Callable[..., Inputs], document: Document, workload: Document
) -> Recorded:
    """Load or draw the tensors of a workload.

    file: for messages.  read: `Definition.read`.

    Raises ValueError for tensors that do not have the shapes and dtypes of the definition, or that
    are outside of the folder, MissingCapabilityError if main memory cannot hold those that are
    drawn, and errors of any class for damaged files.
    """
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
            _check_room(file, 8 * math.prod(shape))  # 8 bytes: fp32 and a normalised copy
            tensor = _drawn(workload["uuid"], name, shape, dtype)
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


def _drawn(uuid: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random numbers ~ N(0, 1) for the input `name` of a workload.  They depend on the workload's
    `uuid`, on the name and on the shape only, but for their rounding to `dtype`.  Rows of q and k
    have length 1, so that states stay finite.  Raises ValueError for integers.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"random integers are no {name}")
    generator = torch.Generator().manual_seed(zlib.crc32(f"{uuid} {name}".encode()))
    values = torch.randn(shape, generator=generator)
    if name in ("q", "k"):
        values = torch.nn.functional.normalize(values, dim=-1)
    return values.to(dtype)


_READERS = {
    "flashinfer": _flashinfer,
    "flashinfer-bench": _flashinfer_bench,
    "safetensors": _safetensors,
}
