"""Launching a compiled kernel by the CUDA driver itself, with parameters that stay where they are.

Triton's launcher encodes every descriptor again and takes some eighty Python objects apart, at each launch: on the host
that is most of what a launch costs.  Here a launch writes the addresses of its tensors into the kernel's parameters;
everything else was written after the first launch, which is Triton's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import cache
from threading import Lock
from typing import Any

import torch
import triton

_WARP = 32
_MAP_DTYPE = {torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
_MAP_L2_PROMOTION = 2  # 128 bytes, as Triton encodes descriptors


class Map(ctypes.Structure):
    """An encoded descriptor: CUtensorMap, at a multiple of 64 bytes."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


Address = ctypes.c_uint64
SCALARS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
Field = tuple[Any, Any]  # a parameter's type; a number, a tensor's place among those of a launch, or what a map is of


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
        self.encode = library.cuTensorMapEncodeTiled
        self.encode.argtypes = [pointer, uint, uint, *[pointer] * 5, *[uint] * 4]
        self.replace_address = library.cuTensorMapReplaceAddress
        self.replace_address.argtypes = [pointer, pointer]
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
    """A compiled kernel and its parameters: all but the addresses of tensors and of what descriptors are over.

    Raises ValueError if a descriptor cannot be encoded.
    """

    def __init__(self, driver: Driver, compiled: Any, fields: Sequence[Field]) -> None:
        self._driver, self._function = driver, compiled.function
        self._threads, self._shared_bytes = _WARP * compiled.metadata.num_warps, compiled.metadata.shared
        self._lock = Lock()
        self._memory = ctypes.create_string_buffer((len(fields) + 1) * ctypes.sizeof(Map))
        begin = -ctypes.addressof(self._memory) % ctypes.sizeof(Map)
        self._parameters = (ctypes.c_void_p * len(fields))()
        self._pointers: list[tuple[int, Any]] = []
        self._maps: list[tuple[int, int, Any]] = []  # place, where it lies, what it is over
        for i, (kind, value) in enumerate(fields):
            parameter = kind.from_buffer(self._memory, begin + i * ctypes.sizeof(Map))
            self._parameters[i] = where = ctypes.addressof(parameter)
            if kind is Map:
                place, descriptor, meta = value
                _encode(driver, where, descriptor, meta)
                self._maps.append((place, where, Address(descriptor.base.data_ptr())))
            elif kind is Address:
                self._pointers.append((value, parameter))
            else:
                parameter.value = value

    def __call__(self, programs: int, tensors: Sequence[Any]) -> bool:
        """False if nothing was launched: Triton's launcher is to do it, and to say what is wrong."""
        if _hooked():
            return False
        active = triton.runtime.driver.active
        stream = active.get_current_stream(active.get_current_device())
        with self._lock:
            for place, parameter in self._pointers:
                parameter.value = tensors[place].data_ptr()
            for place, encoded, known in self._maps:
                address = tensors[place].base.data_ptr()
                if address != known.value:
                    if self._driver.replace_address(encoded, address):
                        return False
                    known.value = address
            return not self._driver.launch(
                self._function, programs, 1, 1, self._threads, 1, 1, self._shared_bytes, stream, self._parameters, None
            )


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
        fields += [(ctypes.c_int64, 0)] * (len(sizes) - len(fields))  # Triton's scratch memory, of which there is none
        return DirectLaunch(driver, compiled, fields) if [ctypes.sizeof(kind) for kind, _ in fields] == sizes else None
    except (AttributeError, KeyError, IndexError, ValueError):  # another version of Triton keeps it elsewhere
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
            yield Map, (place, value, metas.pop(0))
            yield from ((ctypes.c_int32, size) for size in value.shape)
            yield from ((ctypes.c_int64, stride) for stride in value.strides)
        elif kind.startswith("*"):
            yield Address, place
        elif kind != "constexpr":
            yield SCALARS[kind], value

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


def _encode(driver: Driver, encoded: int, descriptor: Any, meta: dict[str, Any]) -> None:
    """As Triton does: dimensions from the innermost on, no stride for that one."""
    if meta["fp4_padded"] or descriptor.padding != "zero":
        raise ValueError("a descriptor that this package does not make")
    rank = len(descriptor.shape)
    sizes = (ctypes.c_uint64 * rank)(*reversed(descriptor.shape))
    strides = (ctypes.c_uint64 * rank)(*(meta["elem_size"] * stride for stride in descriptor.strides[-2::-1]))
    block = (ctypes.c_uint32 * rank)(*reversed(meta["block_size"]))
    ones = (ctypes.c_uint32 * rank)(*[1] * rank)
    status = driver.encode(
        encoded, _MAP_DTYPE[descriptor.base.dtype], rank, descriptor.base.data_ptr(), sizes, strides, block, ones,
        0, meta["swizzle"], _MAP_L2_PROMOTION, 0,
    )  # fmt: skip
    if status:
        raise ValueError(f"cuTensorMapEncodeTiled: {status}")


def _hooked() -> bool:
    """Whether somebody asked Triton to be told of launches."""
    hooks = triton.knobs.runtime
    return bool(getattr(hooks.launch_enter_hook, "calls", None) or getattr(hooks.launch_exit_hook, "calls", None))
