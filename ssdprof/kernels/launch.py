"""Launches a kernel repeatedly without searching for its compiled form again, and without Triton's
launcher.

At every launch, Triton finds the compiled form by the type, alignment and value of every argument,
encodes every descriptor again and unpacks some eighty Python objects.  Where these properties are
known to be unchanged, only the first launch goes through Triton.  Each later one writes the
addresses of its tensors and calls the CUDA driver.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from inspect import signature
from itertools import count
from threading import Lock, Thread
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

import torch
import triton
import triton.language as tl
from triton.runtime.cache import triton_key

from ssdprof.kernels.device import INTERPRETED, has_gpu

_FIXED = {
    # otherwise a setting of Triton decides, which will be off from Triton 3.10 on
    "enable_fp_fusion": True,
    # otherwise Triton builds, and drops again, a check of every integer sum and product
    "sanitize_overflow": False,
}
Kept = TypeVar("Kept")


class Kernel(Protocol):
    """What `triton.jit` and `gluon.jit` return."""

    fn: Callable[..., object]

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]: ...


class Constants(SimpleNamespace):
    """Compile-time arguments of a kernel, by name.  The kernel reads `S.BLOCK`."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(vars(self).items()))


class Launcher:
    """A kernel with all arguments except its tensors and the number of programs.

    scalars: the arguments after the tensors, including tuples of strides
    options: compile-time arguments in capitals, and launch options such as num_warps

    A kernel takes its descriptors, then its other tensors as one tuple, `tensors`, then the
    scalars, then its compile-time arguments as one, `S`.  A kernel without such parameters takes
    every tensor, and every compile-time argument, as a parameter.

    The current device, and for each tensor what `place` tells, must be the same in all launches.
    Triton settings that affect compilation, such as its debug mode, are those of the first launch.
    """

    def __init__(
        self, kernel: Kernel, scalars: tuple[object, ...], options: dict[str, object]
    ) -> None:
        names = _arguments(kernel.fn)
        if "S" in names and "S" not in options:
            constants = {name: value for name, value in options.items() if name.isupper()}
            launch_options = {n: value for n, value in options.items() if n not in constants}
            if not INTERPRETED:  # Triton takes no attribute for a constant
                constants = {name: tl.constexpr(value) for name, value in constants.items()}
            options = {"S": Constants(**constants)} | launch_options
        self.kernel, self._scalars, self._options = kernel, scalars, options
        self._constants = (*scalars, *(options[name] for name in names if name in options))
        self._descriptors = names.index("tensors") if "tensors" in names else None
        self._compiled: Any = None
        self._direct: DirectLaunch | None = None

    def __call__(self, programs: int, *tensors: object) -> None:
        if self._direct is not None and self._direct(programs, tensors):
            return
        grid, first = (programs, 1, 1), self._descriptors
        grouped = tensors if first is None else (*tensors[:first], tensors[first:])
        if self._compiled is not None:
            self._compiled[grid](*grouped, *self._constants)
            return
        # the first launch; in the interpreter, every launch
        wait_for_hash()
        # compiling creates so many objects that garbage collection would take a twentieth of the
        # time
        with no_garbage_collection():
            self._compiled = self.kernel[grid](*grouped, *self._scalars, **self._options, **_FIXED)
        if self._compiled is not None:
            self._direct = direct_launch(self._compiled, grouped, self._constants)


MOST_KEPT = 4096  # prepared launches
_kept: dict[Hashable, Launcher] = {}  # a call with new sizes adds a few


def kept(
    launches: dict[Hashable, Kept],
    signature: Hashable,
    prepare: Callable[..., Kept],
    *arguments: object,
) -> Kept:
    """The launch for the signature of a call.  If there is none, `prepare(*arguments)`, which takes
    most of a call's time on the host, is added.
    """
    launch = launches.get(signature)
    if launch is None:
        if len(launches) >= MOST_KEPT:
            launches.clear()
        launch = launches[signature] = prepare(*arguments)
    return launch


def place(tensor: torch.Tensor | None) -> Hashable:
    """The properties of a tensor that select a compiled kernel, if the kernel receives only its
    address.
    """
    return None if tensor is None else (tensor.dtype, tensor.device, tensor.data_ptr() % 16)


def launch(
    kernel: Kernel,
    programs: int,
    tensors: tuple[torch.Tensor | None, ...],
    scalars: tuple[object, ...],
    **options: object,
) -> None:
    """`kernel[(programs,)](*tensors, *scalars, **options)` on the current device, which must be
    that of the tensors.
    """
    # the key has the types too, because 0, 0.0 and False are equal but different arguments
    key = (kernel.fn, *map(place, tensors), scalars, *map(type, scalars), *options.items())
    kept(_kept, key, Launcher, kernel, scalars, options)(programs, *tensors)


@cache
def _arguments(function: Callable[..., object]) -> tuple[str, ...]:
    return tuple(signature(function).parameters)


# --- Triton's hash of itself, which it needs to compile a kernel for a GPU, or to find a compiled
# one.  It takes 0.4 s, once per process, to read 400 MB.  A thread does it while the caller
# prepares the first call: hashing does not hold Python's global lock.

# `triton_key` caches its result
_hashing = Thread(target=triton_key, name="Triton's hash of itself", daemon=True)
if has_gpu() and not INTERPRETED:
    _hashing.start()


def wait_for_hash() -> None:
    """Wait until the hash is complete, otherwise Triton would start a second one."""
    if _hashing.ident is not None:
        _hashing.join()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection in the context, and restore its state afterwards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# --- launches through the CUDA driver

_WARP = 32
_MOST_ENCODED = 256  # addresses per descriptor whose encoding is kept: more than a model has layers
# most parameters at the end for addresses of scratch memory, which Triton allocates if a kernel
# needs it
_SCRATCH = 2
_SLOT = 8  # bytes per parameter that is not a descriptor

Address = ctypes.c_uint64
Map = ctypes.c_uint64 * 16  # an encoded descriptor: CUtensorMap
SCALARS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


# A parameter of a kernel: its ctypes type, the value of a number, the index of its tensor or
# descriptor among the tensors of a launch (-1: none), Triton's data for encoding a descriptor
Field = tuple[Any, int | float, int, dict[str, Any] | None]


@cache
def cuda_driver() -> Any | None:
    """The CUDA driver's `launch` and `parameter`; None without a driver of version 12.4 or newer.

    They return a status, 0 on success, and release Python's global lock, because a launch blocks
    while the queue of the stream is full.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
        launch, parameter = library.cuLaunchKernel, library.cuFuncGetParamInfo
    except (OSError, AttributeError):
        return None
    pointer = ctypes.c_void_p
    launch.argtypes = [pointer, *[ctypes.c_uint] * 7, *[pointer] * 3]
    parameter.argtypes = [pointer, ctypes.c_size_t, pointer, pointer]
    return SimpleNamespace(launch=launch, parameter=parameter)


class DirectLaunch:
    """A compiled kernel and its parameters.  A call writes the parameters that depend on addresses.

    tensors: of the first launch.  Raises ValueError if Triton's encoding of a descriptor is not
    recognised.
    """

    def __init__(
        self, driver: Any, compiled: Any, fields: Sequence[Field], tensors: Sequence[Any]
    ) -> None:
        self._driver, self._function = driver, compiled.function
        self._threads, self._shared_bytes = (
            _WARP * compiled.metadata.num_warps,
            compiled.metadata.shared,
        )
        self._lock = Lock()
        self._memory = ctypes.create_string_buffer(len(fields) * _SLOT)
        self._parameters = (ctypes.c_void_p * len(fields))()
        self._pointers: list[tuple[int, Any]] = []
        self._descriptors: list[tuple[int, int, Callable[[Any], int]]] = []
        for number, (kind, value, place, meta) in enumerate(fields):
            if meta is not None:
                encoded = _encoder(meta)
                encoded(tensors[place])
                self._descriptors.append((number, place, encoded))
                continue
            parameter = kind.from_buffer(self._memory, number * _SLOT)
            self._parameters[number] = ctypes.addressof(parameter)
            if place >= 0:
                self._pointers.append((place, parameter))
            else:
                parameter.value = value

    def __call__(self, programs: int, tensors: Sequence[Any]) -> bool:
        """Launch.  False if nothing was launched: the caller then uses Triton's launcher, which
        reports the error.
        """
        if _hooked():
            return False
        active = triton.runtime.driver.active
        stream = active.get_current_stream(active.get_current_device())
        with self._lock:
            for place, parameter in self._pointers:
                parameter.value = tensors[place].data_ptr()
            for number, place, encoded in self._descriptors:
                self._parameters[number] = encoded(tensors[place])
            return not self._driver.launch(
                self._function,
                programs,
                1,
                1,
                self._threads,
                1,
                1,
                self._shared_bytes,
                stream,
                self._parameters,
                None,
            )


def _encoder(meta: dict[str, Any]) -> Callable[[Any], int]:
    """A function from a descriptor to the address of its encoded form.  It keeps one encoded form
    per address.
    """
    kept: dict[int, tuple[int, Any]] = {}

    def of(descriptor: Any) -> int:
        address = descriptor.base.data_ptr()
        found = kept.get(address)
        if found is None:
            if len(kept) >= _MOST_ENCODED:
                kept.clear()
            encoded = encode(descriptor, meta)
            found = kept[address] = (_map_in(encoded), encoded)
        return found[0]

    return of


def encode(descriptor: Any, meta: dict[str, Any]) -> Any:
    """Triton's object that contains the encoded descriptor."""
    # absent without NVIDIA's backend
    from triton.backends.nvidia.driver import make_tensordesc_arg as make

    unused = [None] * (make.__code__.co_argcount - 2)  # Triton 3.9 has a third parameter
    return make(descriptor, meta, *unused)[0]


def _map_in(encoded: Any) -> int:
    """Address of the map at the end of Triton's object.  Raises ValueError for any other object."""
    where = id(encoded) + type(encoded).__basicsize__ - ctypes.sizeof(Map)
    if type(encoded).__name__ != "PyCUtensorMap" or where <= id(encoded) or where % 64:
        raise ValueError("no encoded descriptor")
    return int(where)


def direct_launch(
    compiled: Any, tensors: tuple[Any, ...], constants: tuple[Any, ...]
) -> DirectLaunch | None:
    """A direct launch of the kernel that Triton compiled for these arguments; the last of `tensors`
    may be a tuple.

    None if the CUDA driver is older than 12.4, if the launch has options or arguments that this
    package does not use, or if the kernel's parameters differ from those that Triton 3.6 derives
    from the arguments.
    """
    driver = cuda_driver()
    if driver is None:
        return None
    try:
        if not _is_plain(compiled.metadata):
            return None
        fields = list(_fields(compiled, tensors, constants))
        sizes = _sizes(driver, compiled.function, parameter_count(compiled.asm["ptx"]))
        scratch = len(sizes) - len(fields)
        # 0, because `_is_plain` requires that there is no scratch memory
        fields += [(Address, 0, -1, None)] * scratch
        if scratch > _SCRATCH or [ctypes.sizeof(kind) for kind, *_ in fields] != sizes:
            return None
        return DirectLaunch(driver, compiled, fields, list(_leaves(tensors)))
    # another version of Triton
    except (ImportError, AttributeError, KeyError, IndexError, TypeError, ValueError):
        return None


def _leaves(arguments: tuple[Any, ...]) -> Iterator[Any]:
    for one in arguments:
        yield from _leaves(one) if isinstance(one, tuple) else (one,)


def _is_plain(metadata: Any) -> bool:
    """Whether the launch uses neither clusters, cooperative or dependent launches, nor scratch
    memory.
    """
    special = metadata.launch_cooperative_grid or metadata.launch_pdl
    return metadata.num_ctas == 1 and not (
        special or metadata.global_scratch_size or metadata.profile_scratch_size
    )


def _fields(compiled: Any, tensors: tuple[Any, ...], constants: tuple[Any, ...]) -> Iterator[Field]:
    """The kernel's parameters, in their order."""
    metas, places = list(compiled.metadata.tensordesc_meta or ()), count()

    def of(kind: Any, value: Any, is_tensor: bool) -> Iterator[Field]:
        """The fields of one argument, which may be a tuple, in the order of the kernel's
        parameters.
        """
        if isinstance(kind, tuple):
            for one, part in zip(kind, value, strict=True):
                yield from of(one, part, is_tensor)
            return
        place = next(places) if is_tensor else -1
        if kind.startswith("tensordesc"):
            yield Map, 0, place, metas.pop(0)
            yield from ((ctypes.c_int32, size, -1, None) for size in value.shape)
            yield from ((ctypes.c_int64, stride, -1, None) for stride in value.strides)
        elif kind.startswith("*"):
            yield Address, 0, place, None
        elif kind != "constexpr":
            yield SCALARS[kind], value, -1, None

    kinds = compiled.src.signature.values()
    for index, (kind, value) in enumerate(zip(kinds, (*tensors, *constants), strict=True)):
        yield from of(kind, value, index < len(tensors))


def parameter_count(ptx: str) -> int:
    """Parameters of a module's only kernel.

    The driver reveals the number only by an error for the first index beyond it, which
    `compute-sanitizer` reports.
    """
    return ptx.partition(".entry")[2].partition(")")[0].count(".param ")


def _sizes(driver: Any, function: int, count: int) -> list[int]:
    """The size of each parameter of a kernel, in bytes.  Raises ValueError if there are fewer than
    `count`.
    """
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()

    def of(index: int) -> int:
        if driver.parameter(function, index, ctypes.byref(offset), ctypes.byref(size)):
            raise ValueError("no such parameter")
        return size.value

    return [of(index) for index in range(count)]


def _hooked() -> bool:
    """Whether a launch hook of Triton is set."""
    hooks = triton.knobs.runtime
    return bool(
        getattr(hooks.launch_enter_hook, "calls", None)
        or getattr(hooks.launch_exit_hook, "calls", None)
    )
