"""Launches a kernel repeatedly without searching for its compiled form again, and without Triton's
launcher.

At every launch, Triton finds the compiled form by the type, alignment and value of every argument,
encodes every descriptor again and unpacks some eighty Python objects.  Where these properties are
known to be unchanged, only the first launch goes through Triton.  Each later one writes the
addresses of its tensors and calls the CUDA driver.
"""

import ctypes
import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from inspect import signature
from threading import Lock, Thread
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.runtime.cache import triton_key

from ssdprof.kernels.device import INTERPRETED, has_gpu

_FIXED = {
    # otherwise a setting of Triton decides, which will be off from Triton 3.10 on
    "enable_fp_fusion": True,
    # otherwise Triton builds, and drops again, a check of every integer sum and product
    "sanitize_overflow": False,
}
Kept = TypeVar("Kept")


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

    The current device, and the `argument_key` of each tensor, must be the same in all launches.
    Triton settings that affect compilation, such as its debug mode, are those of the first launch.
    """

    def __init__(
        self, kernel: Any, scalars: tuple[object, ...], options: dict[str, object]
    ) -> None:
        """Put the arguments in the kernel's order; nothing is compiled yet."""
        names = _arguments(kernel.fn)
        if "S" in names and "S" not in options:
            constants = {name: value for name, value in options.items() if name.isupper()}
            launch_options = {n: value for n, value in options.items() if n not in constants}
            if not INTERPRETED:  # Triton takes no attribute for a constant
                constants = {name: tl.constexpr(value) for name, value in constants.items()}
            options = {"S": Constants(**constants)} | launch_options
        self.kernel = kernel
        self._scalars = scalars
        self._options = options
        self._constants = (*scalars, *(options[name] for name in names if name in options))
        self._descriptors = names.index("tensors") if "tensors" in names else None
        self._compiled: CompiledKernel | None = None
        self._direct: DirectLaunch | None = None

    def __call__(self, programs: int, *tensors: object) -> None:
        """Launch on the current device.  The first launch compiles; later ones are direct, or by
        Triton if a direct one is impossible.
        """
        if self._direct is not None and self._direct(programs, tensors):
            return
        grid = (programs, 1, 1)
        first = self._descriptors
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


def argument_key(tensor: torch.Tensor | None) -> Hashable:
    """The properties of a tensor that select a compiled kernel, if the kernel receives only its
    address.
    """
    return None if tensor is None else (tensor.dtype, tensor.device, tensor.data_ptr() % 16)


def launch(
    kernel: Any,
    programs: int,
    tensors: tuple[torch.Tensor | None, ...],
    scalars: tuple[object, ...],
    **options: object,
) -> None:
    """`kernel[(programs,)](*tensors, *scalars, **options)` on the current device, which must be
    that of the tensors.
    """
    # the key has the types too, because 0, 0.0 and False are equal but different arguments
    key = (kernel.fn, *map(argument_key, tensors), scalars, *map(type, scalars), *options.items())
    launcher = kept(_kept, key, Launcher, kernel, scalars, options)
    launcher(programs, *tensors)


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


# --- launches through the CUDA driver.  Triton's launcher encodes every descriptor at every launch.
# On an H200 this takes a fifth of a call of GDN with 1,024 tokens (benchmarks/log/gdn.md, row 52).

_WARP = 32
_MOST_ENCODED = 2048  # descriptors of a kernel: several, for each layer of a model
# most parameters at the end for addresses of scratch memory, which Triton allocates if a kernel
# needs it
_SCRATCH = 2
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64  # of CUtensorMap
_MAP_DTYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CUtensorMapDataType
_PROMOTE_TO_L2_128B = 2
_SCALARS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


@cache
def cuda_driver() -> ctypes.CDLL | None:
    """The CUDA driver; None without one that encodes descriptors.

    Its functions return a status, 0 on success, and release Python's global lock, because a launch
    blocks while the queue of the stream is full.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        launch, encode = driver.cuLaunchKernel, driver.cuTensorMapEncodeTiled
    except (OSError, AttributeError):
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    launch.argtypes = [pointer, *[number] * 7, *[pointer] * 3]
    encode.argtypes = [pointer, number, number, *[pointer] * 5, *[number] * 4]
    return driver


class DirectLaunch:
    """A compiled kernel and its parameters.  A call writes those that depend on addresses.

    tensors, constants: the arguments of the first launch, which may be tuples.  Raises ValueError
    or KeyError if the launch has options or arguments that this package does not use, or if the
    kernel does not have the parameters that Triton 3.6 derives from the arguments.
    """

    def __init__(
        self,
        driver: ctypes.CDLL,
        compiled: CompiledKernel,
        tensors: tuple[object, ...],
        constants: tuple[object, ...],
    ) -> None:
        """Write each parameter into memory of its own, in the kernel's order."""
        metadata = compiled.metadata
        special = metadata.launch_cooperative_grid or metadata.launch_pdl
        scratch_bytes = metadata.global_scratch_size + metadata.profile_scratch_size
        if metadata.num_ctas != 1 or special or scratch_bytes:
            raise ValueError("options that this package does not use")
        self._driver = driver
        self._function = compiled.function
        self._threads = _WARP * metadata.num_warps
        self._shared_bytes = metadata.shared
        self._lock = Lock()
        self._pointers: list[tuple[int, ctypes.c_uint64]] = []
        self._descriptors: list[tuple[int, int, dict[str, Any]]] = []
        self._maps: dict[tuple[int, int], tuple[int, object]] = {}
        self._values: list[Any] = []
        metas = iter(metadata.tensordesc_meta or ())
        kinds = tuple(compiled.src.signature.values())
        for index, (kind, value) in enumerate(_leaves(kinds, (*tensors, *constants))):
            if kind.startswith("tensordesc"):
                self._descriptors.append((len(self._values), index, next(metas)))
                self._values.append(ctypes.c_uint64())
                self._values += [ctypes.c_int32(size) for size in value.shape]
                self._values += [ctypes.c_int64(stride) for stride in value.strides]
            elif kind.startswith("*"):
                self._values.append(ctypes.c_uint64())
                self._pointers.append((index, self._values[-1]))
            elif kind != "constexpr":
                self._values.append(_SCALARS[kind](value))
        scratch = parameter_count(compiled.asm["ptx"]) - len(self._values)
        if not 0 <= scratch <= _SCRATCH:
            raise ValueError("other parameters")
        self._values += [ctypes.c_uint64()] * scratch
        addresses = map(ctypes.addressof, self._values)
        self._parameters = (ctypes.c_void_p * len(self._values))(*addresses)
        for _, index, meta in self._descriptors:
            self._encoded(index, tensors[index], meta)

    def __call__(self, programs: int, tensors: Sequence[Any]) -> bool:
        """Launch.  False if nothing was launched: the caller then uses Triton's launcher, which
        reports the error.
        """
        if _hooked():
            return False
        active = triton.runtime.driver.active
        stream = active.get_current_stream(active.get_current_device())
        with self._lock:
            for index, pointer in self._pointers:
                pointer.value = tensors[index].data_ptr()
            for parameter, index, meta in self._descriptors:
                self._parameters[parameter] = self._encoded(index, tensors[index], meta)
            return not self._driver.cuLaunchKernel(
                self._function,
                *(programs, 1, 1),
                *(self._threads, 1, 1),
                self._shared_bytes,
                stream,
                self._parameters,
                None,
            )

    def _encoded(self, index: int, descriptor: Any, meta: dict[str, Any]) -> int:
        """The address of the descriptor's encoded form, a CUtensorMap, of which one is kept for
        each address of a tensor.  meta: Triton's choice of box and swizzle.
        """
        base = descriptor.base
        rank = len(descriptor.shape)
        key = index, base.data_ptr()
        if key in self._maps:
            return self._maps[key][0]
        if len(self._maps) >= _MOST_ENCODED:
            self._maps.clear()
        memory = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
        address = -(-ctypes.addressof(memory) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
        numbers, bytes_ = ctypes.c_uint32 * rank, ctypes.c_uint64 * rank
        # the driver's first dimension is the innermost one, whose stride is known
        outer = (stride * base.dtype.itemsize for stride in descriptor.strides[-2::-1])
        if self._driver.cuTensorMapEncodeTiled(
            address,
            _MAP_DTYPES[base.dtype],
            rank,
            key[1],
            bytes_(*descriptor.shape[::-1]),
            bytes_(*outer),
            numbers(*meta["block_size"][::-1]),
            numbers(*[1] * rank),
            0,
            meta["swizzle"],
            _PROMOTE_TO_L2_128B,
            0,
        ):
            raise ValueError("the driver does not encode this descriptor")
        self._maps[key] = address, memory
        return address


def direct_launch(
    compiled: CompiledKernel, tensors: tuple[object, ...], constants: tuple[object, ...]
) -> DirectLaunch | None:
    """A direct launch of the kernel that Triton compiled for these arguments; None if only Triton
    can launch it.
    """
    driver = cuda_driver()
    if driver is None:
        return None
    try:
        return DirectLaunch(driver, compiled, tensors, constants)
    # another version of Triton
    except (AttributeError, KeyError, IndexError, StopIteration, TypeError, ValueError):
        return None


def _leaves(kinds: Any, values: Any) -> Iterator[tuple[str, Any]]:
    """Each argument with Triton's name of its type, in the order of the kernel's parameters."""
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, tuple):
            yield from _leaves(kind, value)
        else:
            yield kind, value


def parameter_count(ptx: str) -> int:
    """Parameters of a module's only kernel."""
    return ptx.partition(".entry")[2].partition(")")[0].count(".param ")


def _hooked() -> bool:
    """Whether a launch hook of Triton is set."""
    hooks = triton.knobs.runtime
    return any(
        getattr(hook, "calls", None) for hook in (hooks.launch_enter_hook, hooks.launch_exit_hook)
    )
