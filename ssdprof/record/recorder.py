"""Takes the calls of places in a process of the program, and hands them to a thread.

    a call -> copies of the inputs -> the function -> copies of the outputs -> the queue
           -> the recorder's thread: `Keeper`, which stores calls, on a stream of the thread's own

The copies are on the tensors' device.  They are made before the program continues, because its next
statement may overwrite the buffers.  On a GPU they are made in the program's stream, and the
program does not wait for them.

The copies of a large prompt would take a considerable part of the call's time.  On a GPU they are
made on a second stream, while the program's kernels run:

- The inputs that the function overwrites are copied before it, in the program's stream.
- The initial states are copied while the function runs.  Many programs overwrite them with the
  final states in their next kernel, so that this kernel waits for the copy.
- All other tensors are copied after the function, outputs first, while the next kernels run.

The queue also holds the tensors that are copied, so that memory which the program frees is not
allocated again before it has been copied.  The thread frees neither them nor the copies before all
kernels that read them have ended.

A call for which the queue has no room is not copied, except for the states that `Place.bind`
gathers from a pool.  Only the thread waits for the device.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import util
from types import FrameType
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from ssdprof import operators
from ssdprof.core.words import plural
from ssdprof.kernels.inputs import Inputs
from ssdprof.record.keeper import Keeper
from ssdprof.record.place import INITIAL_STATES, FunctionCall, Place
from ssdprof.record.recorded_call import RecordedCall
from ssdprof.record.settings import GIGABYTE, RecordSettings, note

P = ParamSpec("P")
T = TypeVar("T")
_WAITING_BYTES = 4 * GIGABYTE  # of calls in the queue; beyond that no call is added
_RING_BYTES = 4 * GIGABYTE  # most bytes of calls in the rings of `Keeper`
# between two queries of a GPU's free memory: the program's launches may have to wait for a query
_MEMORY_QUERY_S = 0.1
_FLUSH_S = 60.0  # for the calls in the queue when the process ends
_FRAMES = 16  # the number of callers among whose variables a layer is searched
_LARGE_BYTES = 16 << 20  # a prompt with at least so many bytes is copied on the second stream
# a call, the event after its copies (None on a CPU), and what holds the tensors that are copied
_Queued: TypeAlias = "tuple[RecordedCall, torch.cuda.Event | None, object]"
# attributes of a module with its name or number, the preferred one first
_LAYER_NAMES = ("layer_name", "prefix", "layer_idx", "layer_id", "layer_number")
_IN_GRAPHS = "inside CUDA graphs"
# library -> the option of its server that disables CUDA graphs
_GRAPH_OPTIONS = {"vllm": "--enforce-eager", "sglang": "--disable-cuda-graph"}


@dataclass(frozen=True, kw_only=True)
class _BegunCall:
    """A call whose function has not run yet.

    inputs: with copies of the tensors in `copied`.  The others are copied after the function.
    layer: name or number of the layer; empty if it is not known.
    copied: names of inputs, also of some that the call does not have.
    second_stream: for the copies of a large prompt on a GPU; None for other calls.
    copies_states: whether the initial states are copied there.
    """

    call: FunctionCall
    inputs: Inputs
    layer: str
    copied: frozenset[str]
    second_stream: torch.cuda.Stream | None
    copies_states: bool


def call(
    place: Place,
    function: Callable[P, T],
    arguments: Callable[P, dict[str, object]],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Call the function of a place, record the call unless there is a reason not to, and return
    what the function returned.  Raises what the function raises; such a call is not recorded.

    arguments: returns the arguments of such a call by name, including defaults.
    """
    recorder = Recorder.of_process()
    begun = recorder.before(place, partial(arguments, *args, **kwargs)) if recorder else None
    if recorder is None or begun is None:
        return function(*args, **kwargs)
    with recorder.inside():
        returned = function(*args, **kwargs)
    recorder.after(place, begun, returned)
    return returned


class Recorder:
    """The recorder of a process.  A forked process has a new one."""

    _current: Recorder | None = None
    _was_tried = False  # whether this process has tried to create its recorder
    _creation = threading.Lock()  # several threads may make their first calls at once

    def __init__(self) -> None:
        self.settings = RecordSettings.of(os.environ)
        self._local = threading.local()
        self._unnamed_layers: dict[int, int] = {}  # id of a module -> order of first calls
        # operator and layer -> number of its next call, if none was lost
        self._next_numbers: Counter[tuple[str, str]] = Counter()
        self.lost: Counter[str] = Counter()  # reason -> calls that were not recorded
        self._queue = _Queue()
        self._keeper = Keeper(self.settings, _RING_BYTES)
        self._next_query_s = 0.0
        self._thread = threading.Thread(target=self._work, name="ssdprof-record", daemon=True)
        self._thread.start()
        # processes of `multiprocessing` end without atexit; in others, finalizers run after most
        # functions that the program has registered with atexit, which may end what recording needs
        util.Finalize(None, self.flush, exitpriority=100)
        atexit.register(self.flush)

    @classmethod
    def of_process(cls) -> Recorder | None:
        """The recorder of this process, which the first call creates.  None if that has failed: a
        process that is ending cannot start a thread, for example.  It is tried once.
        """
        with cls._creation:
            if not cls._was_tried:
                try:
                    cls._current = cls()
                except Exception as error:
                    note(f"This process is not recorded: {error}.")
                cls._was_tried = True
            return cls._current

    @classmethod
    def forget(cls) -> None:
        """Forget the recorder in a forked process, which does not have its thread."""
        cls._current, cls._was_tried = None, False
        cls._creation = threading.Lock()  # another thread may have held the old one

    # --- in the program's thread

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The context in which a place's function runs.  Other places that it calls are not
        recorded.
        """
        self._local.is_inside = True
        try:
            yield
        finally:
            self._local.is_inside = False

    def before(self, place: Place, by_name: Callable[[], dict[str, object]]) -> _BegunCall | None:
        """Read and copy the inputs of a call, before its function overwrites them.

        by_name: returns the arguments by name.

        Returns None if the call is not recorded.  Raises nothing: an error is counted as a lost
        call.
        """
        if self._queue.closed or getattr(self._local, "is_inside", False):
            return None
        on_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if on_gpu and torch.cuda.is_current_stream_capturing():
            self._count_captured(place.module)
            return None
        try:
            arguments = by_name()
            if not _is_plain(arguments):
                self.lost["with gradients, or of a subclass of Tensor"] += 1
                return None
            with torch.no_grad():
                bound = place.bind(arguments)
                if bound is None:
                    return None
                layer_id = arguments.get("layer_id")
                layer = self._layer() if layer_id is None else str(layer_id)
                if (place.operator, layer) in self._keeper.failed:
                    return None
                if not self._queue.wait_for_room(self.settings.max_delay_s):
                    self.lost["because the queue was full"] += 1
                    return None
                return self._begun(place, bound, layer)
        except Exception as error:
            self._count_failure(place, error)
            return None

    def _begun(self, place: Place, call: FunctionCall, layer: str) -> _BegunCall:
        """The call, with copies of the inputs that must be copied before its function runs."""
        stream = self._second_stream(place, call.inputs)
        copied_first = frozenset(call.inputs) if stream is None else call.overwrites
        values = _copies(call.inputs, copied_first - call.copied)
        copied_meanwhile = INITIAL_STATES - copied_first - call.copied
        copies_states = any(values.get(name) is not None for name in copied_meanwhile)
        if stream and copies_states:
            _wait(stream, torch.cuda.current_stream(stream.device))
            with torch.cuda.stream(stream):
                values = _copies(values, copied_meanwhile, stream)
        return _BegunCall(
            call=call,
            inputs=operators.get(place.operator).inputs(**values),
            layer=layer,
            copied=copied_first | INITIAL_STATES,
            second_stream=stream,
            copies_states=copies_states,
        )

    def _second_stream(
        self, place: Place, inputs: Mapping[str, object]
    ) -> torch.cuda.Stream | None:
        """The stream for the copies of a large prompt on a GPU.  None for other calls."""
        tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
        is_on_gpu = all(tensor.is_cuda for tensor in tensors)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if place.phase != "prompt" or not is_on_gpu or nbytes < _LARGE_BYTES:
            return None
        return _stream(tensors[0].device, "copies")

    def after(self, place: Place, begun: _BegunCall, returned: object) -> None:
        """Copy what is not copied yet, and put the call into the queue.  Raises nothing: an error
        is counted as a lost call.
        """
        device = begun.inputs.device
        try:
            with torch.no_grad():
                if stream := begun.second_stream:
                    program = torch.cuda.current_stream(device)
                    if begun.copies_states:
                        _wait(program, stream)
                    _wait(stream, program)
                with torch.cuda.stream(stream):
                    call = self._recorded(place, begun, returned)
                    names = call.tensors.keys() - begun.copied
                    copies = call.with_tensors(_copies(call.tensors, names, stream))
                    copied = None
                    if device.type == "cuda":
                        copied = torch.cuda.current_stream(device).record_event()
        except Exception as error:
            self._count_failure(place, error)
            return
        # graphs may be replayed between two calls, whose numbers then must not be consecutive
        self._next_numbers[call.layer_key] += 2 if _IN_GRAPHS in self.lost else 1
        self._queue.put((copies, copied, (call, begun, returned)))

    def _recorded(self, place: Place, begun: _BegunCall, returned: object) -> RecordedCall:
        """The call with its outputs.  Raises ValueError if their shapes are not as expected."""
        inputs = begun.inputs
        out, final_states = begun.call.result(returned)
        _check_shape("out", out, inputs.values.shape)
        if final_states is not None:
            _check_shape("final_states", final_states, inputs.final_shape)
        return RecordedCall(
            place=place,
            layer=begun.layer,
            # each lost call leaves a gap in the numbers of all layers
            number=self._next_numbers[place.operator, begun.layer] + self.lost.total(),
            inputs=inputs,
            out=out,
            final_states=final_states,
            slots=begun.call.slots,
            weights=begun.call.weights,
            activate=begun.call.activate,
        )

    def _count_failure(self, place: Place, error: Exception) -> None:
        """Count a call that this error prevents from being recorded, and print the error, except
        for one of full memory.
        """
        if isinstance(error, torch.OutOfMemoryError):
            self.lost["for which its device had no memory"] += 1
            return
        self.lost["of a kind that is not recorded"] += 1
        reason = " ".join(str(error).split())[:200]
        note(f"Calls of {place.module}.{place.function} are not recorded: {reason}.", once=True)

    def _count_captured(self, module: str) -> None:
        """Count a call that is captured in a CUDA graph.  Replays of the graph call no Python."""
        option = _GRAPH_OPTIONS.get(module.partition(".")[0])
        advice = f"  Start the server with {option}." if option else ""
        note(f"Calls inside CUDA graphs cannot be recorded.{advice}", once=True)
        self.lost[_IN_GRAPHS] += 1

    def _layer(self) -> str:
        """The layer of a call, for `before`: the name or number of the nearest module of torch
        among the callers' variables that has one.

        If none has, the nearest module is numbered, in the order of the first calls of such
        modules.  Empty if there is no module among the variables.
        """
        nearest = None
        for module in _modules_of_callers(sys._getframe(2)):
            if nearest is None:
                nearest = module
            for attribute in _LAYER_NAMES:
                name = getattr(module, attribute, None)
                if isinstance(name, int | str) and name != "":
                    return str(name)
        if nearest is None:
            return ""
        return str(self._unnamed_layers.setdefault(id(nearest), len(self._unnamed_layers)))

    # --- in the recorder's thread

    def _work(self) -> None:
        """Give calls to the keeper until the queue is closed and empty.

        The queue is closed when the process ends, when as much is stored as the settings allow, and
        when the disk is full.
        """
        while (queued := self._queue.get()) is not None:
            call, copied, originals = queued
            try:
                self._keep(call, copied)
            except OSError as error:
                note(f"Recording has ended: {error.strerror or error}.  The program goes on.")
                self._queue.close()
            except Exception as error:
                self._count_failure(call.place, error)
            # before the thread waits for the next call, so that the program may use the memory
            del queued, call, copied, originals
            if self._keeper.is_full:
                self._queue.close()
        self._keeper.release()

    def _keep(self, call: RecordedCall, copied: torch.cuda.Event | None) -> None:
        """Keep a call as soon as its copies are complete.

        On a GPU, kernels run on a stream of this thread.  They have ended when the function
        returns, so that the memory of the call can be freed.

        copied: the event after the copies on a GPU; None on the CPU, where they are complete.
        """
        stream = _stream(call.inputs.device, "thread") if copied else None
        with torch.no_grad(), torch.cuda.stream(stream):
            if copied:
                copied.wait()
                self._limit_memory(call.inputs.device)
            try:
                self._keeper.keep(call)
            finally:
                if stream:
                    stream.synchronize()

    def _limit_memory(self, device: torch.device) -> None:
        """Limit the memory that all calls on a GPU hold to as many bytes as are still free, so that
        the calls take at most half of what is not the program's.

        One half of these bytes is for the rings, the other for the queue.  A call in the queue
        holds twice its size: the copies, and the tensors that were copied.  If the process uses
        several GPUs, rings and queue hold the calls of all of them, and their limits are those of
        the GPU whose memory was queried last.
        """
        if time.monotonic() < self._next_query_s:
            return
        self._next_query_s = time.monotonic() + _MEMORY_QUERY_S
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        self._queue.most_bytes = min(_WAITING_BYTES, free // 4)
        self._keeper.most_bytes = min(_RING_BYTES, free // 2)

    def flush(self) -> None:
        """When the process ends: wait at most `_FLUSH_S` until the calls in the queue are stored,
        and print how many were lost.
        """
        if Recorder._current is not self:
            return
        self._queue.close()
        self._thread.join(_FLUSH_S)
        if self._thread.is_alive():
            note(f"Calls that were not stored within {_FLUSH_S:g} s are lost.")
        for reason, count in self.lost.items():
            note(f"{plural(count, 'call')} {reason}: not recorded (process {os.getpid()}).")


class _Queue:
    """Calls between the program and the recorder's thread, limited by their bytes."""

    def __init__(self) -> None:
        self._calls: deque[_Queued] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self.most_bytes = _WAITING_BYTES
        self.closed = False

    def wait_for_room(self, most_s: float) -> bool:
        """Wait until a call can be added or the queue is closed, but at most this long.

        Returns False if neither came.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: self.closed or self._bytes <= self.most_bytes, most_s
            )

    def put(self, queued: _Queued) -> None:
        """Append a call, unless the queue is closed."""
        with self._changed:
            if self.closed:
                return
            self._calls.append(queued)
            self._bytes += queued[0].nbytes
            self._changed.notify_all()

    def get(self) -> _Queued | None:
        """Wait for the next call.  None if the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self.closed)
            if not self._calls:
                return None
            queued = self._calls.popleft()
            self._bytes -= queued[0].nbytes
            self._changed.notify_all()
        return queued

    def close(self) -> None:
        """Accept no more calls.  Those in the queue stay there."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()


os.register_at_fork(after_in_child=Recorder.forget)


def _is_plain(arguments: Mapping[str, object]) -> bool:
    """Whether the arguments of a call can be recorded: tensors among them need no gradients, and
    are of no subclass but Parameter.  A FakeTensor, for example, has no values.
    """
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    return all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError, which names the tensor, if it has another shape."""
    if tensor.shape != shape:
        raise ValueError(f"{name} is {tuple(tensor.shape)}, not {tuple(shape)}")


def _copies(
    values: Mapping[str, Any],
    names: Collection[str],
    second_stream: torch.cuda.Stream | None = None,
) -> dict[str, Any]:
    """The values, with copies of the tensors that have these names, made in the values' order.

    second_stream: the current stream, if it is not the program's.  There, one call of the driver
        copies all tensors that are dense, after the others.  It leaves the multiprocessors to the
        program's kernels: while the 207 MB of a call are copied, four matrix products on an H200
        take 38 us longer with `clone`, and with this not measurably longer (within 20 us).
    """
    copies = dict(values)
    dense = []
    for name, value in values.items():
        if name in names and isinstance(value, Tensor):
            copies[name] = copy = torch.empty_like(value)
            # the copy of a tensor with gaps or overlaps has other strides
            if second_stream and copy.stride() == value.stride():
                dense.append((copy, value))
            else:
                copy.copy_(value)
    if second_stream and dense:
        _copy_together(dense, second_stream)
    return copies


def _copy_together(pairs: list[tuple[Tensor, Tensor]], stream: torch.cuda.Stream) -> None:
    """Copy the second tensor of each pair to the first, in the stream, which is the current one.
    Both are dense, with the same strides.

    If the driver has no function that begins several copies, or it refuses, torch copies them.
    """
    memcpy_batch = _memcpy_batch()
    number = ctypes.c_size_t
    numbers = number * len(pairs)
    if memcpy_batch is None or memcpy_batch(
        numbers(*(copy.data_ptr() for copy, _ in pairs)),
        numbers(*(value.data_ptr() for _, value in pairs)),
        numbers(*(value.nbytes for _, value in pairs)),
        number(len(pairs)),
        # CUmemcpyAttributes: reads in the stream's order; both locations, 1 is a device; no flags
        (ctypes.c_int * 6)(1, 1, stream.device_index, 1, stream.device_index, 0),
        numbers(),  # 0: the first copy with these attributes
        number(1),
        numbers(),  # gets the first copy that is refused
        number(stream.cuda_stream),
    ):
        for copy, value in pairs:
            copy.copy_(value)


@cache
def _memcpy_batch() -> Callable[..., int] | None:
    """The driver's function that begins several copies.  It returns 0 if it has begun all of them.
    None for a driver older than CUDA 12.8.
    """
    return getattr(ctypes.CDLL("libcuda.so.1"), "cuMemcpyBatchAsync", None)


def _wait(stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
    """Have a stream wait for another, as `wait_stream` does, without a new event."""
    stream.wait_event(other.record_event(_event(other)))


@cache
def _event(_stream: torch.cuda.Stream) -> torch.cuda.Event:
    """The event of a stream that `_wait` records again and again.  A later record does not change
    the waits that were begun before it.
    """
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _modules_of_callers(frame: FrameType | None) -> Iterator[torch.nn.Module]:
    """The modules of torch that are variables `self` or `layer` of a frame or of its callers, the
    nearest one first.  At most `_FRAMES` frames are searched.
    """
    for _ in range(_FRAMES):
        if frame is None:
            return
        # before Python 3.13, `f_locals` is a copy that keeps the frame's tensors alive until the
        # frame ends: a caller of this generator should stop as soon as it has found its module
        for value in (frame.f_locals.get("self"), frame.f_locals.get("layer")):
            if isinstance(value, torch.nn.Module):
                yield value
        frame = frame.f_back


@cache
def _stream(device: torch.device, _purpose: str) -> torch.cuda.Stream:
    """The stream on this device for one purpose: "thread", for the recorder's thread, or "copies",
    for those of large prompts.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
