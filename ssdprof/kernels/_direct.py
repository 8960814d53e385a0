"""Launching a compiled kernel by the CUDA driver itself, with parameters that stay where they are.

Triton's launcher encodes every descriptor again and takes some eighty Python objects apart, at each launch: on the host
that is most of what a launch costs.  Here a launch writes the addresses of its tensors into the kernel's parameters.
Triton encodes a descriptor once for each address.  All else is written after the first launch, which is Triton's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

import triton

_WARP = 32
_MOST_ENCODED = 256  # kept of each descriptor: as many as there are layers, and more
_SCRATCH = 2  # addresses of memory for Triton's own use, at the end of the parameters
_SLOT = 8  # bytes of a parameter that is not a descriptor

Address = ctypes.c_uint64
SCALARS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


class Map(ctypes.Structure):
    """An encoded descriptor: CUtensorMap, at a multiple of 64 bytes."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


class Field(NamedTuple):
    """A parameter of a kernel.

    value: of a number; place: of a tensor or descriptor among those of a launch; meta: of a descriptor, Triton's
    """

    kind: Any
    value: int | float = 0
    place: int = -1
    meta: dict[str, Any] | None = None


class Driver:
    """The functions of the CUDA driver that a launch needs.  They return a status: 0 if all is well.

    Other threads of Python may run meanwhile: a launch waits where too many are queued.  Raises OSError or
    AttributeError if the functions are not there.
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
    """None where there is no CUDA driver, or one from before 12.4."""
    try:
        return Driver()
    except (OSError, AttributeError):
        return None


class DirectLaunch:
    """A compiled kernel and its parameters: all but the addresses of tensors and of what descriptors are over."""

    def __init__(self, driver: Driver, compiled: Any, fields: Sequence[Field]) -> None:
        self._driver, self._function = driver, compiled.function
        self._threads, self._shared_bytes = _WARP * compiled.metadata.num_warps, compiled.metadata.shared
        self._lock = Lock()
        self._memory = ctypes.create_string_buffer(len(fields) * _SLOT)
        self._parameters = (ctypes.c_void_p * len(fields))()
        self._pointers: list[tuple[int, Any]] = []
        self._descriptors: list[tuple[int, int, _Encoded]] = []
        for number, field in enumerate(fields):
            if field.meta is not None:
                self._descriptors.append((number, field.place, _Encoded(field.meta)))
                continue
            parameter = field.kind.from_buffer(self._memory, number * _SLOT)
            self._parameters[number] = ctypes.addressof(parameter)
            if field.place >= 0:
                self._pointers.append((field.place, parameter))
            else:
                parameter.value = field.value

    def __call__(self, programs: int, tensors: Sequence[Any]) -> bool:
        """False if nothing was launched: Triton's launcher is to do it, and to say what is wrong."""
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
    """What Triton encoded of one descriptor, over different addresses."""

    def __init__(self, meta: dict[str, Any]) -> None:
        self._meta = meta
        self._kept: dict[int, tuple[int, Any]] = {}

    def of(self, descriptor: Any) -> int:
        """Where the encoded descriptor lies."""
        address = descriptor.base.data_ptr()
        found = self._kept.get(address)
        if found is None:
            if len(self._kept) >= _MOST_ENCODED:
                self._kept.clear()
            encoded = encode(descriptor, self._meta)
            found = self._kept[address] = (_map_in(encoded), encoded)
        return found[0]


def encode(descriptor: Any, meta: dict[str, Any]) -> Any:
    """Triton's object with the encoded descriptor."""
    from triton.backends.nvidia.driver import make_tensordesc_arg as make

    unused = [None] * (make.__code__.co_argcount - 2)  # from Triton 3.9 on
    return make(descriptor, meta, *unused)[0]


def _map_in(encoded: Any) -> int:
    """Where the map lies that Triton's object ends with.  ValueError if that is no place for one."""
    where = id(encoded) + type(encoded).__basicsize__ - ctypes.sizeof(Map)
    if type(encoded).__name__ != "PyCUtensorMap" or where <= id(encoded) or where % 64:
        raise ValueError("no encoded descriptor")
    return int(where)


def direct_launch(compiled: Any, tensors: Sequence[Any], constants: Sequence[Any]) -> DirectLaunch | None:
    """Prepare to launch what Triton compiled for `tensors` and `constants` again; None if only Triton can.

    Only Triton can without a CUDA driver of 12.4 or newer, for launches with options or arguments that this package
    does not use, and if the kernel's parameters are not those that Triton 3.6 makes of the arguments.
    """
    driver = cuda_driver()
    if driver is None:
        return None
    try:
        if not _is_plain(compiled.metadata):
            return None
        fields = list(_fields(compiled, (*tensors, *constants)))
        sizes = _sizes(driver, compiled.function)
        scratch = len(sizes) - len(fields)
        fields += [Field(Address)] * scratch  # of which there is none
        if scratch > _SCRATCH or [ctypes.sizeof(field.kind) for field in fields] != sizes:
            return None
        for field in fields:
            if field.meta is not None:
                _map_in(encode(tensors[field.place], field.meta))
        return DirectLaunch(driver, compiled, fields)
    except (ImportError, AttributeError, KeyError, IndexError, TypeError, ValueError):  # of another version of Triton
        return None


def _is_plain(metadata: Any) -> bool:
    """Without clusters, cooperative or dependent launches, and scratch memory."""
    special = metadata.launch_cooperative_grid or metadata.launch_pdl
    return metadata.num_ctas == 1 and not (special or metadata.global_scratch_size or metadata.profile_scratch_size)


def _fields(compiled: Any, arguments: Sequence[Any]) -> Iterator[Field]:
    """In the order of the kernel's parameters."""
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


def _sizes(driver: Driver, function: int) -> list[int]:
    """Bytes of each of a kernel's parameters."""
    found: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while driver.parameter(function, len(found), ctypes.byref(offset), ctypes.byref(size)) == 0:
        found.append(size.value)
    return found


def _hooked() -> bool:
    """Whether somebody asked Triton to be told of launches."""
    hooks = triton.knobs.runtime
    return bool(getattr(hooks.launch_enter_hook, "calls", None) or getattr(hooks.launch_exit_hook, "calls", None))
