"""Launches a kernel repeatedly without searching for its compiled form again, and without Triton's
launcher.

At every launch, Triton finds the compiled form by the type, alignment and value of every argument,
encodes every descriptor again, and unpacks some eighty Python objects.  If these types, alignments
and values are known to be unchanged, only the first launch goes through Triton.  Later launches
write the addresses of the tensors and call the CUDA driver.
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

_FIXED = {  # options with which all kernels are compiled
    # without it, a setting of Triton decides, which is off from Triton 3.10 on
    "enable_fp_fusion": True,
    # without it, Triton builds a check of every integer sum and product, and drops it again
    "sanitize_overflow": False,
}
Kept = TypeVar("Kept")


class Constants(SimpleNamespace):
    """The compile-time arguments of a kernel, by name.  A kernel reads them as `S.BLOCK`."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(vars(self).items()))


class Launcher:
    """A kernel with all arguments except its tensors and the number of programs.

    scalars: the arguments between the tensors and the compile-time arguments, including tuples of
        strides.
    options: compile-time arguments, whose names are in capitals, and launch options such as
        num_warps.

    The parameters of a kernel are its descriptors, then `tensors`, a tuple of its other tensors,
    then the scalars, then `S`, which has its compile-time arguments.  A kernel without the
    parameter `tensors` has a parameter for every tensor, and one without `S` for every compile-time
    argument.

    The current device and the `argument_key` of each tensor must be the same in all launches.
    Settings of Triton that affect compilation, such as its debug mode, are those of the first
    launch.
    """

    def __init__(
        self, kernel: Any, scalars: tuple[object, ...], options: dict[str, object]
    ) -> None:
        """Put the arguments into the kernel's order.  Compiles nothing."""
        names = _parameter_names(kernel.fn)
        if "S" in names and "S" not in options:
            constants = {name: value for name, value in options.items() if name.isupper()}
            launch_options = {key: value for key, value in options.items() if key not in constants}
            if not INTERPRETED:  # Triton takes no attribute for a constant
                constants = {name: tl.constexpr(value) for name, value in constants.items()}
            options = {"S": Constants(**constants)} | launch_options
        self.kernel = kernel
        self._scalars = scalars
        self._options = options
        # all arguments after the tensors
        self._constants = (*scalars, *(options[name] for name in names if name in options))
        # number of descriptors; None for a kernel without the parameter `tensors`
        self._descriptor_count = names.index("tensors") if "tensors" in names else None
        self._compiled: CompiledKernel | None = None
        self._direct: DirectLaunch | None = None

    def __call__(self, programs: int, *tensors: object) -> None:
        """Launch on the current device.  The first launch compiles.  Later launches are direct, or
        go through Triton if a direct launch is impossible.  In the interpreter, which compiles
        nothing, every launch goes through Triton.

        tensors: the descriptors of the kernel, then its tensors, or None for those it does without.
        """
        if self._direct is not None and self._direct(programs, tensors):
            return
        grid = (programs, 1, 1)
        count = self._descriptor_count
        grouped = tensors if count is None else (*tensors[:count], tensors[count:])
        if self._compiled is not None:
            self._compiled[grid](*grouped, *self._constants)
            return
        # the first launch, or any launch in the interpreter, which returns None
        wait_for_hash()
        # compiling creates so many objects that garbage collection would take a twentieth of its
        # time
        with no_garbage_collection():
            self._compiled = self.kernel[grid](*grouped, *self._scalars, **self._options, **_FIXED)
        if self._compiled is not None:
            self._direct = direct_launch(self._compiled, grouped, self._constants)


MOST_KEPT = 4096  # launches in a dict of prepared launches; before one more, all are dropped
# launchers of `launch`, to which a call with new sizes adds a few
_kept: dict[Hashable, Launcher] = {}


def kept(
    launches: dict[Hashable, Kept],
    signature: Hashable,
    prepare: Callable[..., Kept],
    *arguments: object,
) -> Kept:
    """The launch for the signature of a call.  If `launches` has none, `prepare(*arguments)` makes
    and adds it, which takes most of a call's time on the host.
    """
    launch = launches.get(signature)
    if launch is None:
        if len(launches) >= MOST_KEPT:
            launches.clear()
        launch = launches[signature] = prepare(*arguments)
    return launch


def argument_key(tensor: torch.Tensor | None) -> Hashable:
    """The properties of a tensor that select the compiled form of a kernel, if the kernel gets only
    the tensor's address.
    """
    return None if tensor is None else (tensor.dtype, tensor.device, tensor.data_ptr() % 16)


def launch(
    kernel: Any,
    programs: int,
    tensors: tuple[torch.Tensor | None, ...],
    scalars: tuple[object, ...],
    **options: object,
) -> None:
    """Launch `kernel[(programs,)](*tensors, *scalars, **options)` on the current device, on which
    the tensors must be.  `Launcher` explains the kernel's parameters.
    """
    # the key has the types of scalars too, because 0, 0.0 and False are equal, but different
    # arguments
    key = (kernel.fn, *map(argument_key, tensors), scalars, *map(type, scalars), *options.items())
    launcher = kept(_kept, key, Launcher, kernel, scalars, options)
    launcher(programs, *tensors)


@cache
def _parameter_names(function: Callable[..., object]) -> tuple[str, ...]:
    """The names of a function's parameters, in order."""
    return tuple(signature(function).parameters)


# --- Triton's hash of itself, which Triton needs to compile a kernel for a GPU, and to find one on
# disk.  Reading the 400 MB takes 0.4 s, once per process.  A thread does it while the caller
# prepares the first call, because hashing does not hold Python's global lock.

# `triton_key` caches its result, so that Triton gets it at once later
_hashing = Thread(target=triton_key, name="Triton's hash of itself", daemon=True)
if has_gpu() and not INTERPRETED:
    _hashing.start()


def wait_for_hash() -> None:
    """Wait until the thread has computed the hash, so that Triton does not compute it again.
    Returns at once if the thread was not started, as without a GPU.
    """
    if _hashing.ident is not None:
        _hashing.join()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection while the context is open."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# --- launches through the CUDA driver.  Triton's launcher encodes every descriptor at every launch,
# which takes a fifth of a call of GDN with 1,024 tokens on an H200 (benchmarks/log/gdn.md, row 52).

_WARP = 32  # threads
# Most descriptors that are kept for a `DirectLaunch`: several for each layer of a model.  Before a
# launch that might need more, all are dropped
_MOST_ENCODED = 2048
# A kernel has at most this many parameters for addresses of scratch memory.  They come last, and
# Triton sets them if the kernel needs scratch memory
_MOST_SCRATCH_PARAMETERS = 2
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64  # size and alignment of a CUtensorMap, in bytes
_MAP_DTYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # of CUtensorMapDataType
_PROMOTE_TO_L2_128B = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
# Triton's name of a scalar's type -> the type of the kernel's parameter
_SCALAR_TYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


@cache
def cuda_driver() -> ctypes.CDLL | None:
    """The library of the CUDA driver; None without a driver, or with one that has no descriptors.

    Its functions return a status, which is 0 after success.  They release Python's global lock,
    because a launch waits while the queue of the stream is full.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        launch, encode = driver.cuLaunchKernel, driver.cuTensorMapEncodeTiled
    except (OSError, AttributeError):
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    # function; sizes of grid and program, and bytes of shared memory; stream, parameters, extra
    launch.argtypes = [pointer, *[number] * 7, *[pointer] * 3]
    # result, dtype, rank; address, sizes, strides, box, steps; interleaving, swizzle, promotion to
    # L2, fill
    encode.argtypes = [pointer, number, number, *[pointer] * 5, *[number] * 4]
    return driver


class DirectLaunch:
    """A compiled kernel and the memory of its parameters.  A call writes those parameters that
    depend on addresses.

    tensors, constants: the arguments of the first launch, some of which are tuples.  Descriptors
    come first, and tensors before constants: without tuples, each has the index that it has in a
    call.

    Raises ValueError or KeyError if the launch has options or arguments that this package does not
    use, if the kernel does not have the parameters that Triton 3.6 derives from the arguments, or
    if the driver does not encode a descriptor.  With another version of Triton, what this reads may
    be missing: then it raises AttributeError, IndexError, StopIteration or TypeError.
    """

    def __init__(
        self,
        driver: ctypes.CDLL,
        compiled: CompiledKernel,
        tensors: tuple[object, ...],
        constants: tuple[object, ...],
    ) -> None:
        """Write the parameters, each into memory of its own, in the kernel's order."""
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
        # index of a tensor in a call, and the memory for its address
        self._pointers: list[tuple[int, ctypes.c_uint64]] = []
        # index of a descriptor's first parameter in the kernel; index of the descriptor in a call;
        # Triton's choice of box and swizzle
        self._descriptors: list[tuple[int, int, dict[str, Any]]] = []
        # index and address of a tensor -> address of its encoded descriptor, and the memory
        self._maps: dict[tuple[int, int], tuple[int, object]] = {}
        self._values: list[Any] = []  # the memory of each parameter
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
                self._values.append(_SCALAR_TYPES[kind](value))
        scratch = parameter_count(compiled.asm["ptx"]) - len(self._values)
        if not 0 <= scratch <= _MOST_SCRATCH_PARAMETERS:
            raise ValueError("other parameters")
        self._values += [ctypes.c_uint64()] * scratch
        addresses = map(ctypes.addressof, self._values)
        self._parameters = (ctypes.c_void_p * len(self._values))(*addresses)
        # those of the first launch, to find out whether the driver encodes them
        for _, index, meta in self._descriptors:
            self._encoded(index, tensors[index], meta)

    def __call__(self, programs: int, tensors: Sequence[Any]) -> bool:
        """Launch the kernel.  Returns False if nothing was launched, because Triton has a launch
        hook, or because the driver refuses; then the caller uses Triton's launcher, which calls the
        hook or reports the error.

        tensors: in the order of the first launch, but not in tuples.
        """
        if _hooked():
            return False
        active = triton.runtime.driver.active
        stream = active.get_current_stream(active.get_current_device())
        with self._lock:
            # before the first descriptor, so that none of this launch is dropped
            if len(self._maps) + len(self._descriptors) > _MOST_ENCODED:
                self._maps.clear()
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
        """The address of a descriptor's encoded form, a CUtensorMap.  One is kept for each argument
        and address of a tensor.  Raises ValueError if the driver does not encode it.

        index: of the argument.  meta: Triton's choice of box and swizzle.
        """
        base = descriptor.base
        base_address = base.data_ptr()
        rank = len(descriptor.shape)
        key = index, base_address
        if key in self._maps:
            address, _ = self._maps[key]
            return address
        memory = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
        address = -(-ctypes.addressof(memory) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
        uint32s, uint64s = ctypes.c_uint32 * rank, ctypes.c_uint64 * rank
        # the driver's first dimension is the innermost one, which has no stride, because it is 1
        outer_strides = (stride * base.dtype.itemsize for stride in descriptor.strides[-2::-1])
        if self._driver.cuTensorMapEncodeTiled(
            address,
            _MAP_DTYPES[base.dtype],
            rank,
            base_address,
            uint64s(*descriptor.shape[::-1]),
            uint64s(*outer_strides),
            uint32s(*meta["block_size"][::-1]),
            uint32s(*[1] * rank),  # steps between elements
            0,  # no interleaving
            meta["swizzle"],
            _PROMOTE_TO_L2_128B,
            0,  # zeros outside of the tensor
        ):
            raise ValueError("the driver does not encode this descriptor")
        self._maps[key] = address, memory
        return address


def direct_launch(
    compiled: CompiledKernel, tensors: tuple[object, ...], constants: tuple[object, ...]
) -> DirectLaunch | None:
    """The direct launch of a kernel that Triton compiled for these arguments; None if only Triton
    can launch it.
    """
    driver = cuda_driver()
    if driver is None:
        return None
    try:
        return DirectLaunch(driver, compiled, tensors, constants)
    # another version of Triton may have other metadata and parameters
    except (AttributeError, KeyError, IndexError, StopIteration, TypeError, ValueError):
        return None


def _leaves(kinds: Any, values: Any) -> Iterator[tuple[str, Any]]:
    """Pairs of Triton's name of an argument's type and the argument, in the order of the kernel's
    parameters, without tuples.

    kinds: names of types, in tuples where arguments are tuples.
    """
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, tuple):
            yield from _leaves(kind, value)
        else:
            yield kind, value


def parameter_count(ptx: str) -> int:
    """The number of parameters of the only kernel in a PTX module, which are in the parentheses
    after its name.
    """
    return ptx.partition(".entry")[2].partition(")")[0].count(".param ")


def _hooked() -> bool:
    """Whether a launch hook of Triton is set."""
    runtime = triton.knobs.runtime
    hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
    return any(getattr(hook, "calls", None) for hook in hooks)
