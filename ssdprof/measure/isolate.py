"""Keeps a user's kernel, and a library that the user named, from harming this process and other
calls: guards around memory, and a process for first calls.

A call that hangs is stopped; one that crashes takes its own process with it, and its own CUDA
context.  All tensors of the call lie between guards, which hold bytes of 0xFF, a NaN in every
floating dtype, so that reads out of bounds give NaN in the output.

    python -m ssdprof.measure.isolate FOLDER PARENT

FOLDER holds the calls, and gets a `CallVerdict` of each.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ssdprof import operators
from ssdprof.core.base import Status
from ssdprof.core.case import Case
from ssdprof.environment import child
from ssdprof.errors import MissingCapabilityError, how_ended, printable
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation
from ssdprof.measure.accuracy import changes, fingerprint, fingerprints
from ssdprof.measure.first_run import Call, type_and_message
from ssdprof.operators import implementations

GUARD = 1 << 20  # bytes on each side
_ALIGNED = 512  # bytes; a copy keeps the tensor's offset within such a block
_ALLOCATION = re.compile("(new_)?(empty|zeros|ones|full)(_strided|_like)?")  # torch's functions


@dataclass(frozen=True, kw_only=True)
class _Block:
    """A block of memory between two guards.  names: of the tensors in it."""

    memory: Tensor
    start: int
    stop: int
    names: tuple[str, ...]

    @classmethod
    def of(cls, size: int, offset: int, device: torch.device, names: tuple[str, ...]) -> _Block:
        """A block of memory between guards.

        size: bytes between the guards.  offset: where the first of them lies within `_ALIGNED`
        bytes.
        """
        start = GUARD + offset
        whole = -(-(start + size + GUARD) // 8)
        memory = torch.full((whole,), -1, dtype=torch.int64, device=device).view(torch.uint8)
        return cls(memory=memory, start=start, stop=start + size, names=names)

    def allocated(self, tensor: Tensor, offset: int) -> Tensor:
        """A tensor in the block, of the same form, from this byte on."""
        block = self.memory[self.start + offset : self.start + offset + _extent(tensor)]
        return block.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def bits(self) -> tuple[int, ...]:
        """A fingerprint, with the guards."""
        return fingerprint(self.memory.view(torch.int64))

    def overrun(self) -> str:
        """ "before", "behind" or "around", by which guard has changed; empty if none has."""
        sides = self.memory[: self.start], self.memory[self.stop :]
        before, behind = (int(side.min()) != 0xFF for side in sides)  # the largest byte
        if before and behind:
            return "around"
        if before:
            return "before"
        return "behind" if behind else ""


class GuardedInputs:
    """A copy of an operator's inputs between guards, with the same strides and alignment.

    inputs: the copy.  Tensors that share memory share it in the copy.
    """

    def __init__(self, inputs: Inputs) -> None:
        self._blocks: list[tuple[_Block, tuple[int, ...]]] = []  # with its bytes
        copies: dict[str, Tensor] = {}
        for block, of_block in _copied(inputs.tensors):
            self._blocks.append((block, block.bits()))
            copies |= of_block
        self.inputs = replace(inputs, **copies)
        self._elements = fingerprints(copies)

    def out_of_bounds(self) -> str:
        """A phrase on writes to the inputs or next to them; empty if there were none."""
        if words := changes(self._elements, self.inputs.tensors):
            return words
        for block, bits in self._blocks:
            if where := block.overrun() or (
                "between the elements of" if block.bits() != bits else ""
            ):
                return f"it writes out of bounds, {where} its inputs {', '.join(block.names)}"
        return ""


class GuardedAllocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which torch allocates tensors between guards."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._blocks: list[_Block] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without it torch would spend a second on importing its compiler, to keep it out of the
        next method.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace a tensor that torch allocates by one between guards."""
        tensor = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        # meta tensors have no memory
        if (
            not _ALLOCATION.fullmatch(name)
            or tensor.layout != torch.strided
            or not tensor.numel()
            or tensor.is_meta
        ):
            return tensor
        shape = f"a tensor of shape {tuple(tensor.shape)} that it allocates"
        block = _Block.of(_extent(tensor), 0, tensor.device, (shape,))
        self._blocks.append(block)
        placed = block.allocated(tensor, 0)
        return placed.copy_(tensor) if "empty" not in name else placed

    def out_of_bounds(self) -> str:
        """A phrase on writes next to the tensors, asked in the context; empty if there were
        none.
        """
        over = ((block.overrun(), block.names[0]) for block in self._blocks)
        return next(
            (f"it writes out of bounds, {where} {name}" for where, name in over if where), ""
        )


def unwritten(tensor: Tensor) -> int:
    """The number of elements whose bytes all equal those of the guards.  In a tensor made under
    `GuardedAllocations`, they were never written.  A NaN that a GPU or torch computes has other
    bits.
    """
    elements = tensor.contiguous().view(torch.uint8).reshape(tensor.numel(), tensor.element_size())
    return int((elements == 0xFF).all(-1).sum())


def _copied(given: Mapping[str, Tensor]) -> Iterator[tuple[_Block, dict[str, Tensor]]]:
    """Blocks with the memory from the first to the last byte of the tensors that share it, and the
    tensors' copies.
    """
    groups: dict[int, list[str]] = {}
    for name, tensor in given.items():
        groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    for names in groups.values():
        first = min(given[name].data_ptr() for name in names)
        size = max(given[name].data_ptr() + _extent(given[name]) for name in names) - first
        storage = given[names[0]].untyped_storage()
        device = given[names[0]].device
        source = torch.empty(0, dtype=torch.uint8, device=device)
        source.set_(storage, first - storage.data_ptr(), (size,), (1,))
        block = _Block.of(size, first % _ALIGNED, device, tuple(names))
        block.memory[block.start : block.stop].copy_(source)
        yield (
            block,
            {name: block.allocated(given[name], given[name].data_ptr() - first) for name in names},
        )


def _extent(tensor: Tensor) -> int:
    """Bytes from the first to the last element, those between strides counted."""
    if not tensor.numel():
        return 0
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.element_size()


@contextmanager
def while_it_runs(case: Case | None) -> Iterator[None]:
    """If the process ends in the block, its parent knows which case ran.  Restores what a kernel
    may have changed.
    """
    folder = Path.cwd()
    grad = torch.is_grad_enabled()
    dtype = torch.get_default_dtype()
    if case:
        child.tell(f"case {case.model_dump_json(exclude_defaults=True)}")
    try:
        yield
    finally:
        child.tell("case")
        with suppress(OSError):
            os.chdir(folder)
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)


# --- first calls in another process

FIRST_CALL_S = 180.0
_START_S = 120.0  # for importing torch and loading the inputs, also on a busy machine
_STOPPED = 124  # exit code of a process whose call took too long
_CALL = "call.pt"
_VERDICTS = "verdicts.jsonl"
# of a first call, and the reason; "ran": the call may be made here
CallVerdict = tuple[Status, str]


class IsolatedFirstCall:
    """First calls of users' kernels and of named libraries, one for each precision and each form of
    the inputs.  limit_s: seconds for one.
    """

    def __init__(self, limit_s: float = FIRST_CALL_S) -> None:
        self._limit_s = limit_s
        self._verdicts: dict[Hashable, CallVerdict] = {}

    def verdict(
        self, implementation: Implementation, inputs: Inputs, precision: Precision
    ) -> CallVerdict:
        """What the first call of the kernel on inputs of this form, now or earlier, came to."""
        self.prepare(implementation, [inputs], precision)
        return self._verdicts[implementation.name, precision, inputs.form]

    def prepare(
        self, implementation: Implementation, several: Sequence[Inputs], precision: Precision
    ) -> None:
        """Make the first calls on inputs of several forms in one process, or in more if a call ends
        it.
        """
        keys = {(implementation.name, precision, inputs.form): inputs for inputs in several}
        waiting = {key: inputs for key, inputs in keys.items() if key not in self._verdicts}
        while waiting:
            if implementation.word:
                verdicts = _tried(implementation, list(waiting.values()), precision, self._limit_s)
            else:  # a function of this process, which no other one can import
                verdicts = [
                    try_call(implementation, inputs, precision) for inputs in waiting.values()
                ]
            for key, verdict in zip(list(waiting), verdicts, strict=False):
                self._verdicts[key] = verdict
                del waiting[key]

    def guarded(self, call: Call, inputs: GuardedInputs) -> Call:
        """The call of a user's kernel on a copy of its inputs, which protects other calls, made in
        another process first.
        """
        precheck = partial(self.verdict, call.implementation, call.inputs, call.precision)
        return replace(
            call, inputs=inputs.inputs, precheck=precheck, out_of_bounds=inputs.out_of_bounds
        )


def _tried(
    implementation: Implementation, several: Sequence[Inputs], precision: Precision, limit_s: float
) -> list[CallVerdict]:
    """The verdicts of the first calls, up to the one that ended the process; at least one."""
    inputs = several[0]
    with tempfile.TemporaryDirectory(prefix="ssdprof-") as name:
        folder = Path(name)
        request = {
            "operator": inputs.operator,
            "word": implementation.word,
            "precision": str(precision),
            "arguments": [inputs.tensors | inputs.scalars for inputs in several],
            "limit_s": limit_s,
        }
        torch.save(request, folder / _CALL)
        if inputs.device.type == "cuda":
            torch.cuda.empty_cache()  # for the other process
        command = [*child.python("ssdprof.measure.isolate"), name, str(os.getpid())]
        environ = {
            name: value for name, value in os.environ.items() if not child.SECRET.search(name)
        }
        code, output = child.run(
            command,
            timeout_s=limit_s * len(several) + _START_S,
            environ=environ | child.search_path(),
        )
        lines = (
            (folder / _VERDICTS).read_text(encoding="utf-8").splitlines()
            if (folder / _VERDICTS).is_file()
            else []
        )
        verdicts: list[CallVerdict] = [tuple(json.loads(line)) for line in lines]
        if verdicts and (code == 0 or len(verdicts) == len(several)):
            return verdicts
    last = next((line for line in output.split("\n")[::-1] if line), "")
    return [*verdicts, ("failed", _death(code, limit_s, last))]


def _death(code: int | None, limit_s: float, last_words: str) -> str:
    """The reason why a process with this exit code left no verdict."""
    if code in (None, _STOPPED):
        return f"its first call was stopped after {limit_s:g} s"
    if code < 0:
        return f"its first call ended its process by {how_ended(code)}"
    words = printable(last_words)
    return f"its first call ended its process with {how_ended(code)}{f': {words}' if words else ''}"


# --- in the other process


def main() -> None:
    """Make the calls that the folder describes, and write a verdict after each."""
    child.end_with(int(sys.argv[2]))
    folder = Path(sys.argv[1])
    request = torch.load(folder / _CALL, weights_only=True)
    operator = operators.get(request["operator"])
    implementation = implementations.resolve(operator, request["word"])
    for arguments in request["arguments"]:
        watchdog = threading.Timer(request["limit_s"], os._exit, (_STOPPED,))
        watchdog.daemon = True
        watchdog.start()
        verdict = try_call(
            implementation, operator.inputs(**arguments), Precision.named(request["precision"])
        )
        watchdog.cancel()
        with (folder / _VERDICTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(verdict) + "\n")
        if verdict[0] == "failed":  # the rest in a process that this call cannot have harmed
            return


@torch.no_grad()
def try_call(implementation: Implementation, inputs: Inputs, precision: Precision) -> CallVerdict:
    """Make the first call, and check the memory around its tensors."""
    guarded = GuardedInputs(inputs)
    call = Call(
        implementation=implementation,
        inputs=guarded.inputs,
        precision=precision,
        label=implementation.name,
        out_of_bounds=guarded.out_of_bounds,
    )
    try:
        # it tunes itself, and the guards would keep all memory that it allocates for this
        if implementation.kind == "library":
            call.first_run(launches=False)
        with GuardedAllocations() as memory:
            output, tried = call.first_run()
            if output is None:
                return tried["status"], tried["reason"]
            if words := memory.out_of_bounds():
                return "failed", words
    # the GPU is unusable for this process, which ends here
    except MissingCapabilityError as error:
        return "failed", type_and_message(error.__cause__ or error)
    for name, tensor in zip(("out", "final_states"), output, strict=True):
        if elements := unwritten(tensor):
            return "failed", f"it leaves {elements:,} elements of {name} unwritten"
    return "ran", ""


if __name__ == "__main__":
    main()
