"""The first run of a call: its output, kernels and memory, or the reason why it has none."""

from __future__ import annotations

import gc
import math
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import triton
from triton.compiler import ASTSource, CompiledKernel

from ssdprof import operators
from ssdprof.core.base import Fault, Status
from ssdprof.core.case import FirstCall, Launch
from ssdprof.environment.machine import free_memory
from ssdprof.errors import MissingCapabilityError, masked
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, UnsupportedError
from ssdprof.measure.accuracy import check_output, fingerprint
from ssdprof.operators.operator import OutputPair, in_pieces, pieces

# Files of ssdprof, torch, Triton and Python's library, whose frames at the start of a traceback are
# left out.  Other installed packages lie below Python's library, but may have the kernel at fault.
_KNOWN = re.compile(
    rf"^{re.escape(str(Path(operators.__file__).parents[1]))}/|"
    r"/(site|dist)-packages/(torch|triton)/|/lib(64)?/python[\d.]+t?/(?!(site|dist)-packages/)|^<"
)
_FRAMES = 5  # the most frames that a reason shows
T = TypeVar("T")
Run = Callable[[], OutputPair]
Fields = dict[str, Any]  # of a case


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """A run of an implementation on an operator's inputs.  Compared by identity.

    precision: the precision that the implementation declares.
    label: names the call in reports and messages.
    precheck: called before the first call.  Returns ("ran", ""), or the status and the reason of a
        call that must not be made in this process.
    out_of_bounds: called after the first call.  Returns a phrase on writes to the inputs or next to
        them; empty if there were none.
    """

    implementation: Implementation
    inputs: Inputs
    precision: Precision
    label: str
    precheck: Callable[[], tuple[Status, str]] = lambda: ("ran", "")
    out_of_bounds: Callable[[], str] = lambda: ""

    @cached_property
    def run(self) -> Run:
        """The function that computes the output.

        If the implementation cannot return states inside of sequences, or cannot read a pool, the
        function makes several calls, or copies the states.
        """
        implementation = self.implementation
        is_cut = self.inputs_of_calls[0] is not self.inputs
        if not (is_cut or self._copies_states):
            return partial(implementation.run, self.inputs, self.precision)
        return partial(
            in_pieces, implementation, self.inputs_of_calls, self.precision, is_cut=is_cut
        )

    @cached_property
    def inputs_of_calls(self) -> list[Inputs]:
        """The inputs of each call of the implementation: one, or, if it does not keep the wanted
        states, the pieces that end at these (`pieces`).  Every piece but the first gets its initial
        states from the call before, when it is made.
        """
        if not self.inputs.state_every or self.implementation.keeps(self.inputs):
            return [self.inputs]
        binding = operators.get(self.inputs.operator).binding
        return pieces(self.inputs, binding.positional(self.inputs))

    @property
    def _copies_states(self) -> bool:
        """Whether states are copied out of the pool, because the implementation cannot read it."""
        return self.inputs.state_indices is not None and not self.implementation.pools

    @property
    def device(self) -> torch.device:
        return self.inputs.device

    @property
    def outputs_that_fit(self) -> int:
        """The number of outputs that fit in half of the free memory; the other half is for a
        workspace and for a block of the oracle.
        """
        out_bytes = self.inputs.values.nbytes
        states_bytes = math.prod(self.inputs.final_shape) * torch.float32.itemsize
        return free_memory(self.device) // 2 // (out_bytes + states_bytes)

    def _plan(self) -> Plan:
        """The implementation's plan for the first call.  Its reason also names the several calls
        and the copies that `run` makes.  Raises what `Implementation.plan` raises.
        """
        inputs = self.inputs_of_calls[0]
        if self._copies_states:
            inputs = inputs.after(self.inputs.initial)
        plan = self.implementation.plan(inputs, self.precision)
        reason = plan.reason
        calls = len(self.inputs_of_calls)
        if calls > 1:
            copies = "one for each state, and copies that join the states"
            reason = f"{calls:,} calls, {copies}; {reason}"
        if self._copies_states:
            reason = f"copies of states out of the pool; {reason}"
        return replace(plan, reason=reason)

    def as_fp32(self, output: OutputPair) -> OutputPair:
        """The output in the form that is compared with the oracle: final states of a library, and
        those that a server recorded, converted to fp32.  Those of others must be in fp32.
        """
        out, final_states = output
        if self.implementation.kind in ("library", "served"):
            return out, final_states.to(torch.float32)
        return output

    def first_run(
        self, seconds: float | None = None, *, launches: bool = True
    ) -> tuple[OutputPair | None, Fields]:
        """Plan and run the call.  Returns the output, None unless it ran, and the fields of its
        case: those that are known when it fails.

        An error of the implementation becomes a status and a reason.
        seconds: the call is timed, and stopped with TimeIsUp after this number of seconds; None: it
            is neither timed nor stopped.
        launches: whether to record the Triton kernels that run, which walks all live objects.
            Otherwise the plan is recorded in their place.

        Raises MissingCapabilityError if a fault in the call made the GPU unusable, and
        KeyboardInterrupt if the call is interrupted.
        """
        fields: Fields = {"status": "failed"}

        def run() -> OutputPair:
            if seconds is None:
                return self.as_fp32(self.run())
            output, first_call = timed_first_call(self.run, self.device, seconds)
            fields["first_call"] = first_call
            return self.as_fp32(output)

        recording: AbstractContextManager[list[Launch]] = (
            recorded_launches() if launches else nullcontext([])
        )
        try:
            plan = self._plan()
            fields |= {"variant": plan.variant, "plan": plan.reason}
            status, reason = self.precheck()
            if status != "ran":
                return None, fields | {"status": status, "reason": reason}
            with recording as launched:
                output, workspace, late = run_and_measure(run, self.device)
            check_output(output, self.inputs)
            if fault := late or self.out_of_bounds():
                return None, fields | {"reason": fault}
        except Exception as error:
            status, reason = status_of(error, self.device, self.implementation.name)
            return None, fields | {"status": status, "reason": reason}
        # the plan describes the launch if no Triton kernel was recorded
        planned = Launch(kernel=self.implementation.name, config=dict(plan.config))
        return output, fields | {
            "status": "ran",
            "workspace_bytes": workspace,
            "launches": tuple(launched) or (planned,),
        }


# --- how long a first call, in which kernels are compiled, may take

# seconds until TimeIsUp is raised once more, in case a callback swallowed the first
_REPEAT_S = 1.0
_THREADS_S = 1.0  # seconds to wait for the threads that a call started


class TimeIsUp(BaseException):
    """A first call was stopped because it took too long.

    Not an Exception, because the interrupted library might handle that.  The message is empty, or
    continues a sentence on the budget: " in the first call of fused".
    """


def timed_first_call(
    run: Callable[[], OutputPair], device: torch.device, seconds: float
) -> tuple[OutputPair, FirstCall]:
    """Make the call and wait for the GPU.  Returns the output, and the time of the call with the
    compile time of each kernel.

    Raises TimeIsUp after this number of seconds.  The call is stopped between two steps of a
    compiler, or while it waits for a compiler's process, but not while it waits for the GPU.
    """
    compiled: dict[str, float] = {}  # kernel -> seconds

    def note(
        *, src: ASTSource, times: triton.knobs.CompileTimes, cache_hit: bool, **_: object
    ) -> None:
        """Note the longest compile time of a kernel.  Triton calls this for every kernel that it
        compiles or finds in its cache, in any thread.
        """
        if not cache_hit:
            compiled[src.name] = max(times.total / 1e6, compiled.get(src.name, 0.0))

    original_listener = triton.knobs.compilation.listener
    began = time.monotonic()
    triton.knobs.compilation.listener = note
    try:
        with _at_most(seconds):
            output = run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    finally:
        triton.knobs.compilation.listener = original_listener
    return output, FirstCall(seconds=time.monotonic() - began, compiled=compiled)


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise TimeIsUp in the block after this number of seconds, and each `_REPEAT_S` again; never
    for infinity.  For the main thread alone, because it handles a signal.
    """
    if math.isinf(seconds):
        yield
        return

    def ring(*_: object) -> None:
        raise TimeIsUp

    original_handler = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6), _REPEAT_S)  # 0 would switch it off
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:  # again, because the timer may have raised in the inner `finally`
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, original_handler)


# --- errors in kernels: the status of the case, an unusable GPU, or an interrupt


def status_of(error: Exception, device: torch.device, culprit: str) -> tuple[Fault, str]:
    """The status of a case whose implementation raised an error, and the reason in words.

    culprit: the name of the implementation.  Raises what `refuse_if_interrupted` and
    `refuse_if_lost` raise.
    """
    if isinstance(error, UnsupportedError):
        return "refused", str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out of memory", first_line(error)
    refuse_if_interrupted(error)
    refuse_if_lost(device, culprit, error)
    return "failed", type_and_message(error)


def blaming(device: torch.device, culprit: str, work: Callable[[], T]) -> T:
    """The result of `work`.  Raises MissingCapabilityError with the culprit's name if `work` makes
    the GPU unusable.
    """
    try:
        return work()
    except Exception as error:
        refuse_if_lost(device, culprit, error)
        raise


def refuse_if_lost(device: torch.device, culprit: str, error: Exception) -> None:
    """Raises MissingCapabilityError if the GPU is unusable for this process.

    After a fault in one kernel, all later CUDA calls fail, and other implementations would be
    blamed.

    culprit: names what ran before.  error: what it raised.
    """
    if not _answers(device):
        raise MissingCapabilityError(
            f"{culprit} left the GPU unusable for this process: {first_line(error)}",
            "Nothing can be measured after that.  Leave it out, and please report it.",
        ) from error


def refuse_if_interrupted(error: Exception) -> None:
    """Raises KeyboardInterrupt if the error was caused by one.

    If a signal arrives during a callback from C code or from a class body, CPython raises a
    SystemError or RuntimeError from the KeyboardInterrupt.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        cause = cause.__cause__


def _answers(device: torch.device) -> bool:
    """Whether the GPU still works: after a fault, no call of this process can use it.  True for a
    CPU.
    """
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def type_and_message(error: BaseException) -> str:
    """An error as a reason, with the user's frames: "RuntimeError: boom (my_kernels.py:12 in
    my_ssd, my_kernels.py:30 in inner)".
    """
    return f"{type(error).__name__}: {first_line(error)}{_trail(error)}"


def _trail(error: BaseException) -> str:
    """The frames of the traceback, from the first one outside of ssdprof, torch, Triton and
    Python's library: " (file:line in function, file:line in function)"; empty if there is none.
    At most `_FRAMES`: the first ones and the last one, with "..." for those between.
    """
    frames = traceback.extract_tb(error.__traceback__)
    while frames and _KNOWN.search(frames[0].filename):
        frames.pop(0)
    if not frames:
        return ""
    places = [f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in frames]
    if len(places) > _FRAMES:
        places[_FRAMES - 1 : -1] = ["..."]
    return f" ({', '.join(places)})"


def first_line(error: BaseException) -> str:
    """The first line of the error's message that is not empty, with secrets masked; if there is
    none, a phrase with the place where the error was raised.

    Messages of compilers and of CUDA may fill pages.
    """
    for line in str(error).splitlines():
        if line.strip():
            return masked(line)
    frames = traceback.extract_tb(error.__traceback__)
    place = "outside of Python"
    if frames:
        place = f"in {Path(frames[-1].filename).name}, line {frames[-1].lineno}"
    return f"no message, raised {place}"


# --- the Triton kernels that a call launched, and their compiled resources


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """The context's value is a list.  When the block ends, it has the Triton kernels that were
    launched in it, each once, in the order of their first launches.

    It stays empty in Triton's interpreter, and for libraries that launch no Triton kernel.
    """
    handles: dict[int, None] = {}  # the driver's handles of the launched functions

    def note(metadata: Any) -> None:
        handles[metadata.data["function"]] = None

    launches: list[Launch] = []
    with _at_launch(note):
        yield launches
    if handles:
        # Triton keeps no list of compiled kernels, but the garbage collector knows all objects.
        # Their exact types are compared, because isinstance asks every object for its __class__,
        # which makes lazy modules import themselves.
        loaded = {
            kernel.function: kernel for kernel in gc.get_objects() if type(kernel) is CompiledKernel
        }
        launches += [describe(loaded[handle]) for handle in handles if handle in loaded]


@contextmanager
def counted_launches() -> Iterator[list[object]]:
    """The context's value is a list, which gets an entry for every launch of a Triton kernel in the
    block.
    """
    launches: list[object] = []
    with _at_launch(launches.append):
        yield launches


@contextmanager
def _at_launch(note: Callable[[Any], None]) -> Iterator[None]:
    """Call `note` with Triton's metadata of every launch in the block."""
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(note)
    try:
        yield
    finally:
        hooks.remove(note)


def describe(kernel: Any) -> Launch:
    """A compiled kernel of Triton as a launch: its compile-time arguments and options as `config`,
    and its resources as the driver reports them.
    """
    metadata = kernel.metadata
    config: dict[str, int | str | bool] = {}
    for name, argument in _constants(kernel.src).items():
        constant = getattr(argument, "value", argument)  # of Triton's constexpr
        config[name] = constant if isinstance(constant, int | str) else str(constant)
    config |= {"num_warps": metadata.num_warps, "num_stages": metadata.num_stages}
    return Launch(
        kernel=metadata.name,
        config=config,
        registers=kernel.n_regs,
        spills=kernel.n_spills,
        shared_bytes=metadata.shared,
    )


def _constants(source: object) -> dict[str, Any]:
    """The compile-time arguments of a kernel, by name.

    An argument that groups several constants, as bundled kernels have it, is listed by its fields.
    A kernel that was not compiled from Python source has none.  Arguments that are constants only
    because of their values, such as None and 1, are left out.
    """
    constants: dict[str, Any] = {}
    if isinstance(source, ASTSource):
        for (index, *_), value in source.constants.items():  # more numbers: inside of a tuple
            parameter = source.fn.params[index]
            if not parameter.is_constexpr:
                continue
            if isinstance(value, SimpleNamespace):
                constants |= vars(value)
            elif is_dataclass(value):
                constants |= {field.name: getattr(value, field.name) for field in fields(value)}
            else:
                constants[parameter.name] = value
    return constants


# --- memory

# device index -> the peak in bytes before `run_and_measure` reset torch's own
_peaks_before_reset: dict[int, int] = {}


def run_and_measure(run: Run, device: torch.device) -> tuple[OutputPair, int | None, str]:
    """The call's output, its workspace in bytes, None on the CPU, and the phrase of `completed`.

    The workspace is the peak of the call's allocations through torch, without the output.  The
    function is meant for an implementation's first call, which also allocates memory that later
    calls reuse.

    Waits for the GPU, so that an error of a kernel is raised here.
    """
    if device.type != "cuda":
        output, late = completed(run, device)
        return output, None, late
    torch.cuda.synchronize(device)
    _peaks_before_reset[_index(device)] = peak_bytes(device)
    torch.cuda.reset_peak_memory_stats(device)
    allocated = torch.cuda.memory_allocated(device)
    peaks: list[int] = []

    def run_and_note_peak() -> OutputPair:
        output = run()
        peaks.append(torch.cuda.max_memory_allocated(device) - allocated)
        return output

    output, late = completed(run_and_note_peak, device)
    # both tensors may be views of one storage
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in output}
    output_bytes = sum(storage.nbytes() for storage in storages.values())
    return output, max(0, peaks[0] - output_bytes), late


def completed(run: Run, device: torch.device) -> tuple[OutputPair, str]:
    """The output, and a phrase if it changed later than it may: after the call had returned and all
    work on the current stream had ended.  The phrase is empty if it did not.

    Waits for the GPU, and for threads that the call started, `_THREADS_S` seconds at most.
    """
    earlier_threads = threading.enumerate()
    output = run()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    bits = fingerprint(*output)
    end = time.monotonic() + _THREADS_S
    for thread in set(threading.enumerate()).difference(earlier_threads):
        thread.join(max(0.0, end - time.monotonic()))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    late = ""
    if fingerprint(*output) != bits:
        late = "it leaves work to another stream or thread: its output changes after the call"
    return output, late


def forget_peak(device: torch.device) -> None:
    """Let `peak_bytes` begin anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        _peaks_before_reset.pop(_index(device), None)


def peak_bytes(device: torch.device) -> int:
    """The peak of torch's allocations on a GPU since `forget_peak`, or since the process began; 0
    on the CPU.

    `run_and_measure` resets torch's own peak, and keeps the one before.
    """
    if device.type != "cuda":
        return 0
    return max(_peaks_before_reset.get(_index(device), 0), torch.cuda.max_memory_allocated(device))


def _index(device: torch.device) -> int:
    """The index of the GPU: that of the current one if the device names none."""
    return torch.cuda.current_device() if device.index is None else device.index
