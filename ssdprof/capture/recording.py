"""Reads what a server wrote of its operators' calls as a capture, its outputs included.

flashinfer     the folder of FlashInfer's recorder (FLASHINFER_LOGLEVEL=10)
safetensors    `recording.json` and a file PROCESS_NUMBER.safetensors for each call, in the
               operator's own names

Calls are in the order in which their process made them, and name no layer: a forward pass calls
every layer once, on the same sequences.  docs/serving.md describes both.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from safetensors import safe_open

from ssdprof import operators
from ssdprof.capture.layers import CapturedLayer, strides
from ssdprof.checkpoint.load import unpickled
from ssdprof.checkpoint.names import select_indices
from ssdprof.core.target import CallRef, CheckpointRef, LayerRef, Prompt
from ssdprof.core.words import plural, size_words, words
from ssdprof.environment.machine import host_memory
from ssdprof.errors import BadInputError, MissingCapabilityError, SsdprofError, library_message
from ssdprof.files import parse_json, regular
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.oracle import sequences
from ssdprof.operators.operator import Output
from ssdprof.operators.tensors import dtype_name

T = TypeVar("T")
# inputs, what the server computed, and the slots of the sequences in its pool of states
Recorded: TypeAlias = "tuple[Inputs, Output | None, tuple[int, ...]]"
Format = Literal["flashinfer", "safetensors"]
MANIFEST = "recording.json"
CALL = "call"
WARM_UP = 64  # tokens of the longest sequence with which servers start
_OUTPUT = ("out", "final_states")
_AGAIN = "Record again: docs/serving.md says how."
_METADATA_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call of an operator.  shape: tokens and sequences.  identity: the server's description.
    load: gives inputs and output.
    """

    operator: str
    process: str
    shape: tuple[int, int]
    identity: str
    load: Callable[[], Recorded]


@dataclass(frozen=True, kw_only=True)
class ServerCalls:
    """The forward passes of a server.

    passes: of all processes, one after the other, each with the calls of its layers in order.
    left_out: a sentence on calls that are not among them; empty if there are none.
    """

    ref: CheckpointRef
    passes: tuple[tuple[_Call, ...], ...]
    left_out: str

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """One for each number of tokens."""
        identity = "".join(call.identity for call in chain.from_iterable(self.passes))
        digest = hashlib.sha256(identity.encode()).hexdigest()
        counts = Counter(calls[0].shape[0] for calls in self.passes)
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
        for number, calls in enumerate(self.passes, 1):
            # the last pass of a process may be cut off
            for layer, call in zip(self.ref.layers, calls, strict=False):
                if layer.index in chosen:
                    tokens, count = call.shape
                    which = CallRef(
                        kind="packed",
                        number=number,
                        count=len(self.passes),
                        prompt_seqlen=tokens,
                        sequences=count,
                    )
                    inputs, served, slots = call.load()
                    remark = (
                        ""
                        if served
                        else f"No output of {layer.name} was recorded in pass {number}."
                    )
                    yield CapturedLayer(
                        layer=layer,
                        inputs=inputs,
                        model_strides=strides(inputs),
                        call=which,
                        served=served,
                        slots=slots,
                        remark=remark,
                    )


def open_recording(folder: Path, kind: Format) -> ServerCalls:
    """Read the metadata of all calls, and no tensors.

    Raises BadInputError for a folder that is not of this kind, that is damaged, and that holds no
    forward pass.
    """
    calls, others, source = (_flashinfer if kind == "flashinfer" else _safetensors)(folder)
    passes, warm_up, partial_calls = _passes(calls)
    out = [
        (number, what)
        for what, number in [*sorted(others.items()), *warm_up.items(), *partial_calls.items()]
    ]
    left_out = (
        f"Left out: {words(f'{plural(number, CALL)} {what}' for number, what in out)}."
        if out
        else ""
    )
    if not passes:
        raise BadInputError(
            f"{folder} holds no call that can be replayed.  {left_out}".rstrip(), _AGAIN
        )
    longest = max(passes, key=len)
    layers = tuple(
        LayerRef(index=index, name=f"recorded layer {index}", operator=call.operator)
        for index, call in enumerate(longest)
    )
    ref = CheckpointRef(
        requested=str(folder),
        source="local",
        repo_id=folder.resolve().name or "recording",
        revision=None,
        model_type=f"recorded by {source}",
        layers=layers,
        layer_count=len(layers),
    )
    return ServerCalls(ref=ref, passes=tuple(passes), left_out=left_out)


def _passes(
    calls: Iterable[_Call],
) -> tuple[list[tuple[_Call, ...]], dict[str, int], dict[str, int]]:
    """Forward passes, of which a process's last may be cut off; numbers of calls of a warm-up, and
    of no whole pass.
    """
    processes = [
        [list(run) for _, run in groupby(of_process, key=attrgetter("shape"))]
        for _, of_process in groupby(calls, key=attrgetter("process"))
    ]
    layers = _layer_count(processes)
    passes: list[tuple[_Call, ...]] = []
    warm_up = rest = 0
    for runs in processes:
        of_process: list[tuple[_Call, ...]] = []
        for run in runs:
            cut = len(run) % layers
            starts = range(0, len(run) - cut, layers)
            of_process += [tuple(run[start : start + layers]) for start in starts]
            if cut and run is runs[-1]:
                of_process.append(tuple(run[-cut:]))
            elif cut:
                rest += cut
        tokens, count = of_process[0][0].shape if of_process else (0, 0)
        if len(of_process) > 1 and tokens <= WARM_UP and count == 1:
            warm_up += len(of_process.pop(0))
        passes += of_process
    return (
        passes,
        {"of a warm-up": warm_up} if warm_up else {},
        {"of incomplete passes": rest} if rest else {},
    )


def _layer_count(processes: list[list[list[_Call]]]) -> int:
    """Calls of a forward pass, from runs of calls of one shape: each run has whole passes, except
    the last of a process, and sometimes its first.
    """
    for kept in (slice(1, -1), slice(-1), slice(None)):
        runs = [*chain.from_iterable(runs[kept] for runs in processes)]
        if runs:
            return math.gcd(*map(len, runs))
    return 1


def _checked(inputs: Inputs, output: Output | None, slots: torch.Tensor | None) -> Recorded:
    """The same.  ValueError if an output does not have its shape, or the bounds of sequences do not
    rise.
    """
    sequences(1, inputs.length, inputs.cu_seqlens)
    forms = operators.get(inputs.operator).oracle.forms(inputs)
    for name, form, tensor in zip(_OUTPUT, forms, output or (), strict=False):
        if tuple(tensor.shape) != tuple(form.shape):
            raise ValueError(f"{name} is {tuple(tensor.shape)}, not {tuple(form.shape)}")
        if dtype_name(tensor.dtype) and name == "out" and tensor.dtype != form.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, not {form.dtype}")
    if slots is None:
        return inputs, output, ()
    if slots.shape != (inputs.sequences,) or slots.is_floating_point():
        raise ValueError(f"slots are not {inputs.sequences} integers, one for each sequence")
    return inputs, output, tuple(slots.tolist())


def _reading(path: Path, load: Callable[[], T]) -> T:
    """What `load` returns, with BadInputError that names the path for all that is wrong with its
    files.
    """
    try:
        return load()
    except (SsdprofError, MemoryError):
        raise
    except Exception as error:  # of any class: torch's reader checks little of what it reads
        raise BadInputError(
            f"The recorded call {path} cannot be used: {library_message(error)}.", _AGAIN
        ) from error


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    """What is in a file of torch.save or safetensors.  MissingCapabilityError if memory has no room
    for it twice.
    """
    size, room = regular(file, math.inf).stat().st_size, host_memory()
    if 2 * size > room:
        raise MissingCapabilityError(
            f"{file} has {size_words(size)}, which main memory of {size_words(room)} cannot hold "
            "twice.",
            "Record with a smaller pool of states, or read it on a larger machine.",
        )
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt", device="cpu") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    content = unpickled(file)
    if not isinstance(content, dict) or not all(map(torch.is_tensor, content.values())):
        raise ValueError(f"{file.name} holds no table of tensors")
    return content


# --- FlashInfer's recorder


def _flashinfer(folder: Path) -> tuple[list[_Call], Counter[str], str]:
    """The calls of known functions in order, the numbers of others, and the version."""
    known: dict[str, tuple[str, Callable[..., Any]]] = {}
    for name in operators.names():
        recorded = operators.get(name).binding.recorded
        known |= {function: (name, read) for function, read in recorded.items()}
    calls: list[tuple[tuple[int, int], _Call]] = []
    others: Counter[str] = Counter()
    versions: dict[str, None] = {}
    for file in sorted(folder.glob("*_call*/metadata.jsonl")):
        try:
            text = (
                regular(file, _METADATA_BYTES).read_text(encoding="utf-8").strip().splitlines()[-1]
            )
            metadata = parse_json(text)
            function = metadata["function_name"]
            process = int(metadata["process_id"])
            number = int(metadata["call_sequence"])
            if function not in known or metadata.get("graph_capture"):
                others[f"of {function}" if function not in known else "inside CUDA graphs"] += 1
                continue
            names = _names(metadata["function_signature"])
            details = {
                _argument(key, names): value["shape"]
                for key, value in metadata["tensor_details"].items()
                if not key.startswith("result")
            }
            operator, read = known[function]
            shape = int(details["q"][0]), int(details["cu_seqlens"][0]) - 1
            scalars = {
                _argument(key, names): value for key, value in metadata["input_metadata"].items()
            }
        except SsdprofError:
            raise
        except Exception as error:  # of any class: the file may hold anything
            why = library_message(error)
            raise BadInputError(
                f"{file} is not what FlashInfer's recorder writes: {why}.", _AGAIN
            ) from error
        versions[str(metadata.get("versions", {}).get("flashinfer", "of unknown version"))] = None
        load = partial(_load_flashinfer, file.parent, read, names, scalars)
        call = _Call(
            operator=operator,
            process=str(process),
            shape=shape,
            identity=text,
            load=partial(_reading, file.parent, load),
        )
        calls.append(((process, number), call))
    if not calls and not others:
        raise BadInputError(f"{folder} holds no recording of FlashInfer.", _AGAIN)
    calls.sort(key=itemgetter(0))
    return [call for _, call in calls], others, f"FlashInfer {', '.join(versions)}"


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
    """As `_flashinfer`."""
    path = folder / MANIFEST
    try:
        description = parse_json(regular(path, _METADATA_BYTES).read_text(encoding="utf-8"))
        operator = description["operator"]
        source, arguments = (
            str(description.get("source", "a server")),
            dict(description.get("arguments", {})),
        )
        if operator not in operators.names():
            raise ValueError(f"there is no operator {operator!r}")
    except Exception as error:  # of any class: the file may hold anything
        raise BadInputError(f"{path} cannot be used: {library_message(error)}.", _AGAIN) from error
    kind = operators.get(operator)
    calls = []
    for file in sorted(folder.glob("*_*.safetensors")):
        first = kind.inputs.FIRST

        def shape(file: Path = file, first: str = first) -> tuple[int, int]:
            with safe_open(file, framework="pt", device="cpu") as opened:
                packed = "cu_seqlens" in opened.keys()  # noqa: SIM118
                bounds = opened.get_slice("cu_seqlens").get_shape()[0] - 1 if packed else 1
                return opened.get_slice(first).get_shape()[1], bounds

        load = partial(_load_safetensors, file, operator, arguments)
        calls.append(
            _Call(
                operator=operator,
                process=file.stem.rpartition("_")[0],
                shape=_reading(file, shape),
                identity=f"{file.name} {json.dumps(description)}",
                load=partial(_reading, file, load),
            )
        )
    return calls, Counter(), source


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
    return _checked(inputs, output if len(output) == 2 else None, slots)
