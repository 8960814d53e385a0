"""Launches a compiled kernel through the CUDA driver, with parameters in fixed memory.

At each launch, Triton's launcher encodes every descriptor again and unpacks some eighty Python objects.  This is most
of the host's time for a launch.  Here only the first launch goes through Triton.  Then the kernel's parameters are
written once, and each later launch writes only the addresses of its tensors.  Triton encodes a descriptor once per
address.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

import triton

_WARP = 32
_MOST_ENCODED = 256  # addresses per descriptor whose encoding is kept: more than a model has layers
_SCRATCH = 2  # most parameters at the end for addresses of scratch memory, which Triton allocates if a kernel needs it
_SLOT = 8  # bytes per parameter that is not a descriptor

Address = ctypes.c_uint64
SCALARS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


class Map(ctypes.Structure):
    """An encoded descriptor: CUtensorMap, aligned to 64 bytes."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


class Field(NamedTuple):
    """A parameter of a kernel.

    kind: its ctypes type
    value: its value, if it is a number
    place: index of its tensor or descriptor among the tensors of a launch
    meta: Triton's data for encoding it, if it is a descriptor
    """

    kind: Any
    value: int | float = 0
    place: int = -1
    meta: dict[str, Any] | None = None


class Driver:
    """The functions of the CUDA driver that a launch needs.  They return a status, 0 on success.

    They release Python's global lock, because a launch blocks while the queue of the stream is full.  Raises OSError or
    AttributeError if a function is missing.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        pointer, uint = ctypes.c_void_p, ctypes.c_uint
        self.launch = library.cuLaunchKernel
        self.launch.argtypes = [pointer, *[uint] * 7, *[pointer] * 3]
        self.parameter = library.cuFuncGetParamInfo
        self.parameter.argtypes = [pointer, ctypes.c_size_t, pointer, pointer]


@cache
def cuda_driver() -> Driver | None:
    """The driver, or None without a CUDA driver of version 12.4 or newer."""
    try:
        return Driver()
    except (OSError, AttributeError):
        return None


class DirectLaunch:
    """A compiled kernel and its parameters.  A call writes the parameters that depend on addresses.

    tensors: of the first launch.  Raises ValueError if Triton's encoding of a descriptor is not recognised.
    """

    def __init__(self, driver: Driver, compiled: Any, fields: Sequence[Field], tensors: Sequence[Any]) -> None:
        self._driver, self._function = driver, compiled.function
        self._threads, self._shared_bytes = _WARP * compiled.metadata.num_warps, compiled.metadata.shared
        self._lock = Lock()
        self._memory = ctypes.create_string_buffer(len(fields) * _SLOT)
        self._parameters = (ctypes.c_void_p * len(fields))()
        self._pointers: list[tuple[int, Any]] = []
        self._descriptors: list[tuple[int, int, _Encoded]] = []
        for number, field in enumerate(fields):
            if field.meta is not None:
                encoded = _Encoded(field.meta)
                encoded.of(tensors[field.place])
                self._descriptors.append((number, field.place, encoded))
                continue
            parameter = field.kind.from_buffer(self._memory, number * _SLOT)
            self._parameters[number] = ctypes.addressof(parameter)
            if field.place >= 0:
                self._pointers.append((field.place, parameter))
            else:
                parameter.value = field.value

    def __call__(self, programs: int, tensors: Sequence[Any]) -> bool:
        """Launch.  False if nothing was launched: the caller then uses Triton's launcher, which reports the error."""
        if _hooked():
            return False
        active = triton.runtime.driver.active
        stream = active.get_current_stream(active.get_current_device())
        with self._lock:
            for place, parameter in self._pointers:
                parameter.value = tensors[place].data_ptr()
            for number, place, encoded in self._descriptors:
                self._parameters[number] = encoded.of(tensors[place])
            return not self._driver.launch(
                self._function, programs, 1, 1, self._threads, 1, 1, self._shared_bytes, stream, self._parameters, None
            )


class _Encoded:
    """The encoded forms of one descriptor, by address."""

    def __init__(self, meta: dict[str, Any]) -> None:
        self._meta = meta
        self._kept: dict[int, tuple[int, Any]] = {}

    def of(self, descriptor: Any) -> int:
        """Address of the encoded descriptor."""
        address = descriptor.base.data_ptr()
        found = self._kept.get(address)
        if found is None:
            if len(self._kept) >= _MOST_ENCODED:
                self._kept.clear()
            encoded = encode(descriptor, self._meta)
            found = self._kept[address] = (_map_in(encoded), encoded)
        return found[0]


def encode(descriptor: Any, meta: dict[str, Any]) -> Any:
    """Triton's object that contains the encoded descriptor."""
    from triton.backends.nvidia.driver import make_tensordesc_arg as make

    unused = [None] * (make.__code__.co_argcount - 2)  # Triton 3.9 has a third parameter
    return make(descriptor, meta, *unused)[0]


def _map_in(encoded: Any) -> int:
    """Address of the map at the end of Triton's object.  Raises ValueError for any other object."""
    where = id(encoded) + type(encoded).__basicsize__ - ctypes.sizeof(Map)
    if type(encoded).__name__ != "PyCUtensorMap" or where <= id(encoded) or where % 64:
        raise ValueError("no encoded descriptor")
    return int(where)


def direct_launch(compiled: Any, tensors: Sequence[Any], constants: Sequence[Any]) -> DirectLaunch | None:
    """A direct launch of the kernel that Triton compiled for these arguments, or None if only Triton can launch it.

    It is None if the CUDA driver is older than 12.4, if the launch has options or arguments that this package does not
    use, or if the kernel's parameters differ from those that Triton 3.6 derives from the arguments.
    """
    driver = cuda_driver()
    if driver is None:
        return None
    try:
        if not _is_plain(compiled.metadata):
            return None
        fields = list(_fields(compiled, (*tensors, *constants)))
        sizes = _sizes(driver, compiled.function, parameter_count(compiled.asm["ptx"]))
        scratch = len(sizes) - len(fields)
        fields += [Field(Address)] * scratch  # 0, because `_is_plain` requires that there is no scratch memory
        if scratch > _SCRATCH or [ctypes.sizeof(field.kind) for field in fields] != sizes:
            return None
        return DirectLaunch(driver, compiled, fields, tensors)
    except (ImportError, AttributeError, KeyError, IndexError, TypeError, ValueError):  # another version of Triton
        return None


def _is_plain(metadata: Any) -> bool:
    """Whether the launch uses neither clusters, cooperative or dependent launches, nor scratch memory."""
    special = metadata.launch_cooperative_grid or metadata.launch_pdl
    return metadata.num_ctas == 1 and not (special or metadata.global_scratch_size or metadata.profile_scratch_size)


def _fields(compiled: Any, arguments: Sequence[Any]) -> Iterator[Field]:
    """The kernel's parameters, in their order."""
    metas = list(compiled.metadata.tensordesc_meta or ())

    def of(kind: Any, value: Any, place: int) -> Iterator[Field]:
        if isinstance(kind, tuple):
            for one, part in zip(kind, value, strict=True):
                yield from of(one, part, place)
        elif kind.startswith("tensordesc"):
            yield Field(Map, place=place, meta=metas.pop(0))
            yield from (Field(ctypes.c_int32, size) for size in value.shape)
            yield from (Field(ctypes.c_int64, stride) for stride in value.strides)
        elif kind.startswith("*"):
            yield Field(Address, place=place)
        elif kind != "constexpr":
            yield Field(SCALARS[kind], value)

    kinds = compiled.src.signature.values()
    for place, (kind, value) in enumerate(zip(kinds, arguments, strict=True)):
        yield from of(kind, value, place)


def parameter_count(ptx: str) -> int:
    """Parameters of a module's only kernel.

    The driver reveals the number only by an error for the first index beyond it, which `compute-sanitizer` reports.
    """
    return ptx.partition(".entry")[2].partition(")")[0].count(".param ")


def _sizes(driver: Driver, function: int, count: int) -> list[int]:
    """The size of each parameter of a kernel, in bytes.  Raises ValueError if there are fewer than `count`."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()

    def of(index: int) -> int:
        if driver.parameter(function, index, ctypes.byref(offset), ctypes.byref(size)):
            raise ValueError("no such parameter")
        return size.value

    return [of(index) for index in range(count)]


def _hooked() -> bool:
    """Whether a launch hook of Triton is set."""
    hooks = triton.knobs.runtime
    return bool(getattr(hooks.launch_enter_hook, "calls", None) or getattr(hooks.launch_exit_hook, "calls", None))
