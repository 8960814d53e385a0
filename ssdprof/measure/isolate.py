"""Keeps a user's kernel, and a library that the user named, from harming this process and other
calls: by guards around memory, and by a separate process for first calls.

A first call that hangs is stopped.  One that crashes ends its own process, with its own CUDA
context.  Its inputs, and what it allocates with functions such as torch.empty, lie between guards;
in later calls the inputs do.  Guards hold bytes of 0xFF, a NaN in every floating dtype, so that
reads out of bounds give NaN in the output.

    python -m ssdprof.measure.isolate FOLDER PARENT

makes the call that FOLDER describes, and writes its `CallVerdict` into it.  PARENT is the id of the
process that waits for it.  `probes` tests laws in such a process, too.
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
from ssdprof.core.base import STOPPED, Status, grouped
from ssdprof.core.case import Case
from ssdprof.environment import child
from ssdprof.errors import MissingCapabilityError, how_ended, printable
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation
from ssdprof.measure.accuracy import changes, fingerprint, fingerprints
from ssdprof.measure.first_run import Call, type_and_message
from ssdprof.operators import implementations

GUARD_BYTES = 1 << 20  # bytes of the guard on each side
# Bytes to which torch aligns memory on a GPU.  A copy has the same offset from a multiple of it as
# the tensor.  On a CPU, where torch aligns memory to 64 bytes, that holds for multiples of 64.
_ALIGNED = 512
# names of the functions of torch that allocate tensors
_ALLOCATION = re.compile("(new_)?(empty|zeros|ones|full)(_strided|_like)?")


@dataclass(frozen=True, kw_only=True)
class _Block:
    """A block of memory between two guards.

    memory: bytes, with both guards.  start, stop: the bytes between the guards.  names: names of
    the tensors in the block.
    """

    memory: Tensor
    start: int
    stop: int
    names: tuple[str, ...]

    @classmethod
    def of(cls, size: int, offset: int, device: torch.device, names: tuple[str, ...]) -> _Block:
        """A block of new memory.

        size: bytes between the guards.  offset: bytes from a multiple of `_ALIGNED` to the first of
        them.
        """
        start = GUARD_BYTES + offset
        number_count = -(-(start + size + GUARD_BYTES) // 8)  # of int64, rounded up
        numbers = torch.full((number_count,), -1, dtype=torch.int64, device=device)
        memory = numbers.view(torch.uint8)
        return cls(memory=memory, start=start, stop=start + size, names=names)

    def allocated(self, tensor: Tensor, offset: int) -> Tensor:
        """A tensor in the block, with the shape, strides and dtype of `tensor`, not its values.

        offset: bytes from `start` to its first element.
        """
        start = self.start + offset
        tensor_bytes = self.memory[start : start + _extent(tensor)]
        return tensor_bytes.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def bits(self) -> tuple[int, ...]:
        """The fingerprint of the block and its guards."""
        return fingerprint(self.memory.view(torch.int64))

    def overrun(self) -> str:
        """Which guard has changed: "before", "behind", or "around" for both; empty if none has."""
        # a guard is unchanged if its smallest byte is the largest possible one
        before = int(self.memory[: self.start].min()) != 0xFF
        behind = int(self.memory[self.stop :].min()) != 0xFF
        if before and behind:
            return "around"
        if before:
            return "before"
        return "behind" if behind else ""


class GuardedInputs:
    """A copy of an operator's inputs between guards, with the same strides and alignment.

    inputs: the copy.  Tensors that share memory share it in the copy, too.
    """

    def __init__(self, inputs: Inputs) -> None:
        self._blocks: list[tuple[_Block, tuple[int, ...]]] = []  # each with its fingerprint
        copies: dict[str, Tensor] = {}
        for block, tensors in _copied(inputs.tensors):
            self._blocks.append((block, block.bits()))
            copies |= tensors
        self.inputs = replace(inputs, **copies)
        self._fingerprints = fingerprints(copies)

    def out_of_bounds(self) -> str:
        """A phrase on writes to the inputs, or else next to them; empty if there were none."""
        if fault := changes(self._fingerprints, self.inputs.tensors):
            return fault
        for block, bits in self._blocks:
            place = block.overrun()
            if not place and block.bits() != bits:
                place = "between the elements of"
            if place:
                return f"it writes out of bounds, {place} its inputs {', '.join(block.names)}"
        return ""


class GuardedAllocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which functions such as torch.empty allocate tensors between guards."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._blocks: list[_Block] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: `__torch_dispatch__` need not be kept from torch's compiler, whose import takes a
        second.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch.  If it is one of `_ALLOCATION`, its tensor is replaced by one
        between guards.

        Tensors without elements, on the meta device, or that are not strided stay.
        """
        tensor = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if (
            not _ALLOCATION.fullmatch(name)
            or tensor.layout != torch.strided
            or not tensor.numel()
            or tensor.is_meta
        ):
            return tensor
        words = f"a tensor of shape {tuple(tensor.shape)} that it allocates"
        block = _Block.of(_extent(tensor), 0, tensor.device, (words,))
        self._blocks.append(block)
        guarded = block.allocated(tensor, 0)
        return guarded if "empty" in name else guarded.copy_(tensor)

    def out_of_bounds(self, pools: Sequence[Tensor] = ()) -> str:
        """A phrase on writes next to the tensors; empty if there were none.

        pools: the pools of states among the tensors, which the kernel did not allocate itself.

        Called while the context is open.
        """
        shapes = {pool.untyped_storage().data_ptr(): tuple(pool.shape) for pool in pools}
        for block in self._blocks:
            if place := block.overrun():
                shape = shapes.get(block.memory.untyped_storage().data_ptr())
                words = f"its pool of states, of shape {shape}" if shape else block.names[0]
                return f"it writes out of bounds, {place} {words}"
        return ""


def unwritten(tensor: Tensor) -> int:
    """The number of elements that were never written, in a tensor that was allocated in the context
    of `GuardedAllocations`.

    Their bytes are those of the guards.  A NaN that a GPU computes has other bits; a CPU may round
    an fp32 NaN to these in bf16.
    """
    elements = tensor.contiguous().view(torch.uint8).reshape(tensor.numel(), tensor.element_size())
    return int((elements == 0xFF).all(-1).sum())


def _copied(tensors: Mapping[str, Tensor]) -> Iterator[tuple[_Block, dict[str, Tensor]]]:
    """Copies of the tensors in blocks between guards.

    Tensors that share memory share a block, which is a copy of all bytes from the first to the last
    of theirs.
    """
    by_storage = grouped(tensors.items(), lambda item: item[1].untyped_storage().data_ptr())
    for sharing in by_storage.values():
        _, tensor_of_storage = sharing[0]
        first = min(tensor.data_ptr() for _, tensor in sharing)
        size = max(tensor.data_ptr() + _extent(tensor) for _, tensor in sharing) - first
        # these bytes of the memory that the tensors share, as a tensor
        source = torch.empty(0, dtype=torch.uint8, device=tensor_of_storage.device)
        storage = tensor_of_storage.untyped_storage()
        source.set_(storage, first - storage.data_ptr(), (size,), (1,))
        names = tuple(name for name, _ in sharing)
        block = _Block.of(size, first % _ALIGNED, tensor_of_storage.device, names)
        block.memory[block.start : block.stop].copy_(source)
        copies = {
            name: block.allocated(tensor, tensor.data_ptr() - first) for name, tensor in sharing
        }
        yield block, copies


def _extent(tensor: Tensor) -> int:
    """Bytes of memory from the first to the last element, with the gaps between elements."""
    if not tensor.numel():
        return 0
    sizes_and_strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes_and_strides)  # index in memory
    return (last + 1) * tensor.element_size()


@contextmanager
def while_it_runs(case: Case | None) -> Iterator[None]:
    """Tell the parent process which case runs in the block, in case this process ends there.  None:
    it is not told.

    At the end of the block, the settings that a kernel may have changed are restored: the working
    directory, and torch's default dtype and whether it records gradients.
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


# --- tensors with the memory around them

# A copy of a tensor, and the layout of the tensor: shape, strides, index of its first element in
# its memory, and number of elements in its memory
Packed = tuple[Tensor, tuple[tuple[int, ...], tuple[int, ...], int, int]]


def packed(tensor: Tensor) -> Packed:
    """A copy of a tensor that can be stored in a file, and its layout.

    If the tensor's memory has at most twice its elements, all of the memory is copied: with the
    guards around a pool of states, unless the pool is smaller than these.
    """
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    layout = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), elements
    if elements <= 2 * tensor.numel():
        return tensor.detach().as_strided((elements,), (1,), 0).clone(), layout
    return tensor.detach().clone(memory_format=torch.contiguous_format), layout


def unpacked(copy: Tensor, layout: Sequence[Any]) -> Tensor:
    """The tensor that `packed` copied, in its layout.

    If all of its memory was copied, it is a view of the copy.  Otherwise the memory around it holds
    any numbers.
    """
    shape, strides, first, elements = layout
    if copy.shape == (elements,):
        return copy.as_strided(shape, strides, first)
    memory = torch.empty(elements, dtype=copy.dtype, device=copy.device)
    return memory.as_strided(shape, strides, first).copy_(copy)


# --- calls in another process

FIRST_CALL_S = 180.0  # limit in seconds for one first call
# seconds that the other process may spend between two calls, on a busy machine too: for importing
# torch, or for the oracle
_START_S = 120.0
_STOPPED = 124  # exit code of a process whose call took too long
_REQUEST = "request.pt"
_SAID = "said.jsonl"
# The status of a first call, and the reason.  After "ran" the call may be made in this process.
CallVerdict = tuple[Status, str]


class IsolatedFirstCall:
    """Makes first calls of users' kernels and of named libraries in another process: one for each
    implementation, precision and form of the inputs.

    limit_s: limit in seconds for one call.
    """

    def __init__(self, limit_s: float = FIRST_CALL_S) -> None:
        self.limit_s = limit_s
        self._verdicts: dict[Hashable, CallVerdict] = {}

    def verdict(
        self, implementation: Implementation, inputs: Inputs, precision: Precision
    ) -> CallVerdict:
        """The verdict on the first call with inputs of this form, which is made if it was not made
        earlier.  An implementation without a `word` is called in this process.
        """
        key = implementation.name, precision, inputs.form
        if key not in self._verdicts:
            if implementation.word:
                verdict = _tried(implementation, inputs, precision, self.limit_s)
            else:  # a function of this process, which no other process can import
                verdict = try_call(implementation, inputs, precision)
            self._verdicts[key] = verdict
        return self._verdicts[key]

    def guarded(self, call: Call, inputs: GuardedInputs) -> Call:
        """The same call on a guarded copy of its inputs, so that it cannot change those of others.

        inputs: the copy.
        Before its first run, the verdict on such a call is asked for.
        """
        precheck = partial(self.verdict, call.implementation, call.inputs, call.precision)
        return replace(
            call, inputs=inputs.inputs, precheck=precheck, out_of_bounds=inputs.out_of_bounds
        )


def _tried(
    implementation: Implementation, inputs: Inputs, precision: Precision, limit_s: float
) -> CallVerdict:
    """Make a first call in another process.  If that says no verdict, its end is the reason."""
    with tempfile.TemporaryDirectory(prefix="ssdprof-") as folder:
        module = "ssdprof.measure.isolate"
        said, ended = elsewhere(module, Path(folder), implementation, inputs, precision, limit_s)
    if not said:
        return "failed", f"its first call {ending(ended, limit_s)}"
    status, reason = said[0]
    return status, reason


ProcessResult = tuple[int | None, str]  # the exit code and the output of a process: see `child.run`


def elsewhere(
    module: str,
    folder: Path,
    implementation: Implementation,
    inputs: Inputs,
    precision: Precision,
    limit_s: float,
    **more: object,
) -> tuple[list[Any], ProcessResult]:
    """Run a module of ssdprof, which calls the implementation, in another process.  Returns what
    the process said (`say`), and what `child.run` returns of it.

    folder: an empty folder, in which the two processes exchange files.
    limit_s: limit in seconds for one call, which the module must keep (`limited`).  A process that
        says nothing for `_START_S` longer is stopped.
    more: other values that the process gets by `requested`.
    """
    request = {
        "operator": inputs.operator,
        "word": implementation.word,
        "precision": str(precision),
        "arguments": inputs.tensors | inputs.scalars,
        "limit_s": limit_s,
    }
    torch.save(request | more, folder / _REQUEST)
    if inputs.device.type == "cuda":
        torch.cuda.empty_cache()  # leaves the memory to the other process
    environ = {name: value for name, value in os.environ.items() if not child.SECRET.search(name)}
    ended = child.run(
        [*child.python(module), str(folder), str(os.getpid())],
        timeout_s=limit_s + _START_S,
        environ=environ | child.search_path(),
        signs=folder / _SAID,
    )
    said: list[Any] = []
    if (folder / _SAID).is_file():
        said += map(json.loads, (folder / _SAID).read_text(encoding="utf-8").splitlines())
    return said, ended


def is_stopped(code: int | None) -> bool:
    """Whether a process with this exit code (None: it was killed) took too long, mostly in a call,
    and was stopped.
    """
    return code in (None, _STOPPED)


def ending(ended: ProcessResult, limit_s: float) -> str:
    """The predicate of a sentence on the call in which another process ended."""
    code, output = ended
    if code is None or is_stopped(code):
        return f"{STOPPED} {limit_s:g} s"
    if code < 0:
        return f"ended its process by {how_ended(code)}"
    words = printable(output.rstrip("\n").rpartition("\n")[2])
    return f"ended its process with {how_ended(code)}{f': {words}' if words else ''}"


# --- in the other process


def requested() -> tuple[Implementation, Inputs, Precision, dict[str, Any]]:
    """The arguments of `elsewhere` in the process that it started, and its other values.

    From then on, this process ends when the one that started it does.
    """
    child.end_with(int(sys.argv[2]))
    request = torch.load(Path(sys.argv[1]) / _REQUEST, weights_only=True)
    operator = operators.get(request["operator"])
    return (
        implementations.resolve(operator, request["word"]),
        operator.inputs(**request["arguments"]),
        Precision.named(request["precision"]),
        request,
    )


def say(words: object) -> None:
    """Tell the process that started this one something that JSON can express."""
    with (Path(sys.argv[1]) / _SAID).open("a", encoding="utf-8") as file:
        file.write(json.dumps(words) + "\n")


@contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """End this process if the block takes longer than `limit_s` seconds."""
    watchdog = threading.Timer(limit_s, os._exit, (_STOPPED,))
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()


def main() -> None:
    """Make the first call that was requested, and say the verdict on it."""
    implementation, inputs, precision, request = requested()
    with limited(request["limit_s"]):
        verdict = try_call(implementation, inputs, precision)
    say(verdict)


@torch.no_grad()
def try_call(implementation: Implementation, inputs: Inputs, precision: Precision) -> CallVerdict:
    """Make the first call, in this process, check the memory around its tensors, and whether all of
    its output was written.

    A library is called once before, without guards around what it allocates.
    """
    guarded = GuardedInputs(inputs)
    call = Call(
        implementation=implementation,
        inputs=guarded.inputs,
        precision=precision,
        label=implementation.name,
        out_of_bounds=guarded.out_of_bounds,
    )
    try:
        # A library may tune itself in its first call.  The guards would keep all the memory that it
        # allocates for that.
        if implementation.kind == "library":
            call.first_run(launches=False)
        with GuardedAllocations() as memory:
            output, fields = call.first_run()
            if output is None:
                return fields["status"], fields["reason"]
            # `in_pool` makes the pool of a kernel that works in place; the first of several calls
            # has the first block
            pools: Sequence[Tensor] = ()
            if implementation.in_place is not None:
                pools = implementation.copies(call.inputs_of_calls[0])
            if fault := memory.out_of_bounds(pools):
                return "failed", fault
    # the GPU is unusable for this process, which ends after this verdict
    except MissingCapabilityError as error:
        return "failed", type_and_message(error.__cause__ or error)
    # A CPU may round NaN to the bits of memory that was never written, and an output is right to
    # have NaN where its inputs have it.
    if any(bool(tensor.isnan().any()) for tensor in inputs.tensors.values()):
        return "ran", ""
    for name, tensor in zip(("out", "final_states"), output, strict=True):
        if count := unwritten(tensor):
            return "failed", f"it leaves {count:,} elements of {name} unwritten"
    return "ran", ""


if __name__ == "__main__":
    main()
