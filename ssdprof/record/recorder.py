"""Takes the calls of places in a process of the program, and hands them to a thread.

    call -> copies of the inputs -> the function itself -> copies of what it returned -> the queue
         -> the thread: `Keeper`, which stores calls, on a stream of the thread's own

The copies are made on the tensors' device before the program goes on, on a GPU in the program's own
stream: its next statement may overwrite the buffers.  Copies of a large prompt would take a part of
the call's time.  They are made on a stream beside the program's: those of the initial states while
the function runs, which the program's next kernel waits for, as many programs overwrite them with
the final ones; all others after the function, outputs first, while the program's next kernels run.
What the function overwrites is copied before it.  No copy is made of a call for which the queue has
no room, and nothing but the thread waits for the device.

The queue holds what was copied, too: memory that the program frees is not used again before.  The
thread lets neither go before all kernels that read them have ended.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import util
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from ssdprof import operators
from ssdprof.core.words import plural
from ssdprof.kernels.inputs import Inputs
from ssdprof.record.keeper import Keeper
from ssdprof.record.place import FunctionCall, Place
from ssdprof.record.recorded_call import RecordedCall
from ssdprof.record.settings import GIGABYTE, RecordSettings, note

P = ParamSpec("P")
T = TypeVar("T")
_WAITING_BYTES = 4 * GIGABYTE  # of calls in the queue, after which no call is added
_RING_BYTES = 4 * GIGABYTE  # of calls that are kept on their device
_LOOK_S = 0.1  # between looks at a GPU's free memory, for which the program's launches may wait
_STATES = frozenset({"initial_state", "initial_states"})
_FLUSH_S = 60.0  # for what is in the queue when the process ends
_FRAMES = 16  # of callers, among whom a layer is looked for
_LARGE_BYTES = 16 << 20  # of a prompt's inputs, from which they are copied beside the program
# a call, the event behind it, None on a CPU, and what was copied
_Queued: TypeAlias = "tuple[RecordedCall, torch.cuda.Event | None, object]"
_LAYER_NAMES = ("layer_name", "prefix", "layer_idx", "layer_id", "layer_number")
_IN_GRAPHS = "inside CUDA graphs"
_GRAPHS = {"vllm": "--enforce-eager", "sglang": "--disable-cuda-graph"}


@dataclass(frozen=True, kw_only=True)
class _Begun:
    """A call before its function runs.

    inputs: copies of these names; what else they have is copied afterwards.
    beside: the stream of a large prompt's copies.  copies_states: whether initial states are copied
        there.
    """

    call: FunctionCall
    inputs: Inputs
    layer: str
    copied: frozenset[str]
    beside: torch.cuda.Stream | None
    copies_states: bool


def call(
    place: Place,
    function: Callable[P, T],
    arguments: Callable[P, dict[str, object]],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Call the function of a place, and record the call unless there is a reason not to.

    arguments: of a call, by name, with defaults.
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
    """The recorder of a process.  A forked one begins with its own."""

    _current: Recorder | None = None

    def __init__(self) -> None:
        self.settings = RecordSettings.of(os.environ)
        self._local = threading.local()
        self._layers: dict[int, int] = {}  # by the identity of the module: layers without names
        self._counts: Counter[tuple[str, str]] = Counter()  # of calls: operator and layer
        self.lost: Counter[str] = Counter()  # calls that were not recorded, by the reason
        self._queue = _Queue()
        self._keeper = Keeper(self.settings, _RING_BYTES)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # of the thread
        self._beside: dict[torch.device, torch.cuda.Stream] = {}  # for copies of large prompts
        self._looks_at = 0.0
        self._thread = threading.Thread(target=self._work, name="ssdprof-record", daemon=True)
        self._thread.start()
        # processes of multiprocessing end without atexit, others without its finalizers
        util.Finalize(None, self.flush, exitpriority=100)
        atexit.register(self.flush)

    @classmethod
    def of_process(cls) -> Recorder | None:
        """The recorder of this process.  None if it cannot be made: an ending process starts no
        thread.
        """
        if cls._current is None:
            try:
                cls._current = cls()
            except Exception as error:
                note(f"This process is not recorded: {error}.")
        return cls._current

    @classmethod
    def forget(cls) -> None:
        """Forget the recorder, in a forked process: its thread did not come along."""
        cls._current = None

    # --- in the program's thread

    @contextmanager
    def inside(self) -> Iterator[None]:
        """While the context is open, places that the function of this one calls are not recorded
        again.
        """
        self._local.is_inside = True
        try:
            yield
        finally:
            self._local.is_inside = False

    def before(self, place: Place, named: Callable[[], dict[str, object]]) -> _Begun | None:
        """The call, before its function overwrites anything; None if it is not recorded.  named:
        gives its arguments by name.
        """
        if self._queue.closed or getattr(self._local, "is_inside", False):
            return None
        on_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if on_gpu and torch.cuda.is_current_stream_capturing():
            self._note_graph(place.module)
            return None
        try:
            arguments = named()
            if not _is_plain(arguments):
                return None
            with torch.no_grad():
                bound = place.bind(arguments)
                if bound is None:
                    return None
                layer = str(bound.layer or self._layer())
                if (place.operator, layer) in self._keeper.told:
                    return None
                if not self._queue.wait_for_room(self.settings.max_delay_s):
                    self.lost["because the queue was full"] += 1
                    return None
                return self._begun(place, bound, layer)
        except Exception as error:
            self._cannot(place, error)
            return None

    def _begun(self, place: Place, call: FunctionCall, layer: str) -> _Begun:
        """The call, with copies of what must be copied before its function runs."""
        beside = self._stream_beside(place, call.inputs)
        now = frozenset(call.inputs) if beside is None else call.overwrites
        values = _copies(call.inputs, now - call.copied)
        meanwhile = _STATES - now - call.copied
        copies_states = any(values.get(name) is not None for name in meanwhile)
        if beside and copies_states:
            _wait(beside, torch.cuda.current_stream(beside.device))
            with torch.cuda.stream(beside):
                values = _copies(values, meanwhile, beside)
        return _Begun(
            call=call,
            inputs=operators.get(place.operator).inputs(**values),
            layer=layer,
            copied=now | _STATES,
            beside=beside,
            copies_states=copies_states,
        )

    def _stream_beside(
        self, place: Place, values: Mapping[str, object]
    ) -> torch.cuda.Stream | None:
        """The stream for copies of a large prompt on a GPU; None for those of another call."""
        tensors = [value for value in values.values() if isinstance(value, Tensor)]
        if place.phase != "prompt" or not all(tensor.is_cuda for tensor in tensors):
            return None
        if sum(tensor.nbytes for tensor in tensors) < _LARGE_BYTES:
            return None
        return _stream(self._beside, tensors[0].device)

    def after(self, place: Place, begun: _Begun, returned: object) -> None:
        """Queue the call with what it returned."""
        inputs, layer, beside = begun.inputs, begun.layer, begun.beside
        device = inputs.device
        try:
            with torch.no_grad():
                if beside:
                    program = torch.cuda.current_stream(device)
                    if begun.copies_states:
                        _wait(program, beside)
                    _wait(beside, program)
                with torch.cuda.stream(beside):
                    out, final_states = begun.call.result(returned)
                    _check_shape("out", out, inputs.values.shape)
                    if final_states is not None:
                        _check_shape("final_states", final_states, inputs.final_shape)
                    # after a call that was not recorded, and between replays of graphs, there is a
                    # gap
                    number = self._counts[place.operator, layer] + self.lost.total()
                    call = RecordedCall(
                        place=place,
                        layer=layer,
                        number=number,
                        inputs=inputs,
                        out=out,
                        final_states=final_states,
                        slots=begun.call.slots,
                        weights=begun.call.weights,
                        activate=begun.call.activate,
                    )
                    names = call.tensors.keys() - begun.copied
                    copies = call.with_tensors(_copies(call.tensors, names, beside))
                    done = None
                    if device.type == "cuda":
                        done = torch.cuda.current_stream(device).record_event()
        except Exception as error:
            self._cannot(place, error)
            return
        self._counts[place.operator, layer] += 2 if _IN_GRAPHS in self.lost else 1
        self._queue.put((copies, done, (call, begun, returned)))

    def _cannot(self, place: Place, error: Exception) -> None:
        """Count a call that is not recorded for this reason."""
        if isinstance(error, torch.OutOfMemoryError):
            self.lost["for which its device had no memory"] += 1
            return
        self.lost["of a kind that is not recorded"] += 1
        why = " ".join(str(error).split())[:200]
        note(f"Calls of {place.module}.{place.function} are not recorded: {why}.", once=True)

    def _note_graph(self, module: str) -> None:
        """Only the capture of a graph calls Python."""
        option = _GRAPHS.get(module.partition(".")[0])
        advice = f"  Start the server with {option}." if option else ""
        note(f"Calls inside CUDA graphs cannot be recorded.{advice}", once=True)
        self.lost[_IN_GRAPHS] += 1

    def _layer(self) -> str:
        """The layer of the call: the name or number of the nearest module of torch among the
        callers' variables; without one, the number of that module in the order of first calls;
        empty if there is no module.
        """
        frame = sys._getframe(2)
        module = None
        for _ in range(_FRAMES):
            for value in (frame.f_locals.get("self"), frame.f_locals.get("layer")):
                if isinstance(value, torch.nn.Module):
                    module = module or value
                    for name in _LAYER_NAMES:
                        if isinstance(word := getattr(value, name, None), int | str) and word != "":
                            return str(word)
            if frame.f_back is None:
                break
            frame = frame.f_back
        if module is None:
            return ""
        return str(self._layers.setdefault(id(module), len(self._layers)))

    # --- in the thread

    def _work(self) -> None:
        """Keep calls until the queue is closed and empty."""
        while (queued := self._queue.get()) is not None:
            try:
                self._keep(*queued[:2])
            except OSError as error:
                note(f"Recording has ended: {error.strerror or error}.  The program goes on.")
                self._queue.close()
            except Exception as error:
                self._cannot(queued[0].place, error)
            del queued  # before it waits, so that the program may use the memory
            if self._keeper.is_full:
                self._queue.close()
        self._keeper.release()

    def _keep(self, call: RecordedCall, done: torch.cuda.Event | None) -> None:
        """Keep a call, once its copies are complete.  What computes, does so on a stream of this
        thread, and has ended before the call goes.
        """
        stream = _stream(self._streams, call.inputs.device) if done else None
        with torch.no_grad(), torch.cuda.stream(stream):
            if stream and done:
                stream.wait_event(done)
                self._bound_memory(stream.device)
            try:
                self._keeper.keep(call)
            finally:
                if stream:
                    stream.synchronize()

    def _bound_memory(self, device: torch.device) -> None:
        """Have calls take no more than half of the memory that the program could have on a GPU: the
        queue, which also holds what it copied, and the rings.
        """
        if time.monotonic() < self._looks_at:
            return
        self._looks_at = time.monotonic() + _LOOK_S
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        self._queue.most_bytes = min(_WAITING_BYTES, free // 4)
        self._keeper.most_bytes = min(_RING_BYTES, free)

    def flush(self) -> None:
        """When the process ends: store what is in the queue, and say what was lost."""
        if Recorder._current is not self or not self._thread.is_alive():
            return
        self._queue.close()
        self._thread.join(_FLUSH_S)
        for reason, count in self.lost.items():
            note(f"{plural(count, 'call')} {reason}: not recorded (process {os.getpid()}).")


class _Queue:
    """Calls between the program and the thread, bounded by their bytes."""

    def __init__(self) -> None:
        self._calls: deque[_Queued] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self.most_bytes = _WAITING_BYTES
        self.closed = False

    def wait_for_room(self, most_s: float) -> bool:
        """Whether there is room for one more call, or becomes within this time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.closed or self._bytes <= self.most_bytes, most_s
            )

    def put(self, queued: _Queued) -> None:
        """Append a call to the queue."""
        with self._changed:
            if self.closed:
                return
            self._calls.append(queued)
            self._bytes += queued[0].nbytes
            self._changed.notify_all()

    def get(self) -> _Queued | None:
        """The next call; None if there is none and there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self.closed)
            if not self._calls:
                return None
            queued = self._calls.popleft()
            self._bytes -= queued[0].nbytes
            self._changed.notify_all()
        return queued

    def close(self) -> None:
        """Take no more calls."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()


os.register_at_fork(after_in_child=Recorder.forget)


def _is_plain(arguments: Mapping[str, object]) -> bool:
    """Whether the arguments' tensors hold numbers, and no gradient is wanted of them."""
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    return all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} is {tuple(tensor.shape)}, not {tuple(shape)}")


def _copies(
    values: Mapping[str, Any], names: Collection[str], beside: torch.cuda.Stream | None = None
) -> dict[str, Any]:
    """The values, with copies in place of the tensors of these names.  beside: the current stream,
    if it is beside the program's.
    """
    tensors = {
        name: value for name, value in values.items() if name in names and isinstance(value, Tensor)
    }
    if beside:
        copies = _copies_beside(tensors.values(), beside)
    else:
        copies = [tensor.clone() for tensor in tensors.values()]
    return {**values, **dict(zip(tensors, copies, strict=True))}


def _copies_beside(tensors: Collection[Tensor], stream: torch.cuda.Stream) -> list[Tensor]:
    """Clones, on the current stream: of dense tensors by one call of the driver, where it can.

    It leaves the multiprocessors to the program's kernels.  Beside the 207 MB of a call, four
    matrix products on an H200 take 38 us longer with `clone`, and with this not measurably so
    (+-20 us).
    """
    copies = [torch.empty_like(tensor) for tensor in tensors]
    together: list[tuple[Tensor, Tensor]] = []
    for copy, tensor in zip(copies, tensors, strict=True):
        # of a tensor with gaps or overlaps, the copy has other strides
        if tensor.device == stream.device and copy.stride() == tensor.stride():
            together.append((copy, tensor))
        else:
            copy.copy_(tensor)
    if not _are_copied(together, stream):
        for copy, tensor in together:
            copy.copy_(tensor)
    return copies


def _are_copied(pairs: Sequence[tuple[Tensor, Tensor]], stream: torch.cuda.Stream) -> bool:
    """Queue copies of tensors to the first of each pair.  False if the driver cannot."""
    if (copy_together := _memcpy_batch()) is None:
        return False
    numbers, device = ctypes.c_uint64 * len(pairs), stream.device_index
    # read in the order of the stream; where both are, of which 1 is a device; no flags
    attributes = (ctypes.c_int * 6)(1, 1, device, 1, device, 0)
    return not copy_together(
        numbers(*(copy.data_ptr() for copy, _ in pairs)),
        numbers(*(tensor.data_ptr() for _, tensor in pairs)),
        numbers(*(tensor.nbytes for _, tensor in pairs)),
        ctypes.c_size_t(len(pairs)),
        attributes,
        ctypes.byref(ctypes.c_size_t(0)),  # the attributes are those from the first copy on
        ctypes.c_size_t(1),
        ctypes.byref(ctypes.c_size_t()),  # which copy the driver refuses
        ctypes.c_void_p(stream.cuda_stream),
    )


@cache
def _memcpy_batch() -> Callable[..., int] | None:
    """cuMemcpyBatchAsync of CUDA 12.8 and newer."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync
    except (OSError, AttributeError):
        return None


def _wait(stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
    """Have a stream wait for another, without a new event for each time."""
    stream.wait_event(other.record_event(_event(other)))


@cache
def _event(_stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event of a stream.  Who waits for it waits for what it was when the wait began."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _stream(
    streams: dict[torch.device, torch.cuda.Stream], device: torch.device
) -> torch.cuda.Stream:
    """The stream of this device; a new one at the first use."""
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return streams[device]
