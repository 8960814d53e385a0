"""Where kernels run: on a GPU, or in Triton's interpreter on the CPU.

Without an NVIDIA GPU, kernels run in the interpreter.  Triton reads this choice when a kernel is
defined, so that this module makes the choice before any file with kernels is imported.  Triton's
variable TRITON_INTERPRET has precedence.

The interpreter stores bfloat16 as 16-bit integers, multiplies these as integers and rounds towards
zero.  A patch here widens bfloat16 operands to fp32, and rounds results to nearest even, as a GPU
does.
"""

import inspect
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from ssdprof.kernels.registry import UnsupportedError


def has_gpu() -> bool:
    """Whether torch can use a GPU.

    `device_count` asks NVML if possible, and does not start the CUDA driver, which a process that
    is forked later could not use.
    """
    return torch.cuda.device_count() > 0


def capability(tensor: Tensor) -> tuple[int, int]:
    """Compute capability of the tensor's GPU, (9, 0) for Hopper."""
    return torch.cuda.get_device_capability(tensor.device)


def sm_count(tensor: Tensor) -> int:
    """Number of multiprocessors of the tensor's GPU.  On the CPU it is that of an H200, so that the
    interpreter divides calls as an H200 does.
    """
    if not tensor.is_cuda:
        return 132
    return int(torch.cuda.get_device_properties(tensor.device).multi_processor_count)


def gpu_name(tensor: Tensor) -> str:
    """Name of the tensor's GPU, for example "NVIDIA H200"; "cpu" for a tensor on the CPU."""
    return str(torch.cuda.get_device_properties(tensor.device).name) if tensor.is_cuda else "cpu"


# --- the interpreter


def interpret() -> None:
    """Interpret all kernels that are defined from now on, and Triton's device functions, which are
    defined already.
    """
    triton.knobs.runtime.interpret = True
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("triton.language"):
            for name, value in list(vars(module).items()):
                if isinstance(value, triton.JITFunction):
                    setattr(module, name, triton.jit(value.fn))


def skip_idle_work() -> None:
    """Patch the interpreter so that it skips work without effect, which takes longer than computing
    small blocks.

    At every call of a device function, the interpreter searches for functions to replace, although
    the launch has replaced them.  It checks 32-bit sums and products for overflow, but drops the
    result unless its option `debug` is set.  For every value, it computes fields again that depend
    on the dtype and the shape alone.
    """

    patch_modules = interpreter._patch_lang

    def patch_lang(fn: Callable[..., object]) -> object:
        """Replaces `interpreter._patch_lang`: replace the functions of Triton that `fn` calls,
        unless the launch has done so.
        """
        # only during a launch, the interpreter has given tensors this method
        in_launch = hasattr(tl.tensor, "__index__")
        if in_launch and not any(tl.core.is_builtin(module.load) for module in _modules(fn)):
            return None
        return patch_modules(fn)

    def patch_builtin(pkg: ModuleType, *rest: object) -> None:
        """Replaces `interpreter._patch_builtin`, which searches through all members of the module
        each time.
        """
        for name in _builtins(pkg):
            member = getattr(pkg, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(pkg, name, member, *rest)

    init_tensor = tl.core.tensor.__init__
    init_block = tl.core.block_type.__init__
    np_dtype = interpreter._get_np_dtype
    tensors: dict[Hashable, dict[str, object]] = {}
    blocks: dict[Hashable, dict[str, object]] = {}
    np_dtypes: dict[str, npt.DTypeLike] = {}

    def tensor(self: tl.tensor, handle: TensorHandle, type: tl.dtype) -> None:
        """Replaces the constructor of `tl.tensor`, which computes the same fields, except for the
        handle and the type, for every tensor of one dtype and shape.
        """
        key = type.scalar.name, tuple(type.shape) if type.is_block() else ()
        if key not in tensors:
            init_tensor(self, handle, type)
            tensors[key] = vars(self) | {"handle": None}  # keeps no values
        vars(self).update(tensors[key], handle=handle, type=type)

    def block(
        self: tl.block_type, element_ty: tl.dtype, shape: Sequence[int | tl.constexpr]
    ) -> None:
        """Replaces the constructor of `tl.block_type`, which computes the same fields for every
        type of one dtype and shape.
        """
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def known_np_dtype(kind: tl.dtype) -> npt.DTypeLike:
        """Replaces `interpreter._get_np_dtype`."""
        name = kind.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype(kind)
        return np_dtypes[name]

    tl.core.tensor.__init__, tl.core.block_type.__init__ = tensor, block
    interpreter._get_np_dtype = known_np_dtype
    interpreter._patch_lang, interpreter._patch_builtin = patch_lang, patch_builtin
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


@cache
def _modules(fn: Callable[..., object]) -> tuple[ModuleType, ...]:
    """The modules of Triton's language among the globals of a device function."""
    values = fn.__globals__.values()
    return tuple(module for module in (tl, tl.core) if any(value is module for value in values))


@cache
def _builtins(pkg: ModuleType) -> tuple[str, ...]:
    """The names of the builtin functions of Triton in a module."""
    return tuple(name for name, member in inspect.getmembers(pkg) if tl.core.is_builtin(member))


def follow_bfloat16() -> None:
    """Patch the interpreter's casts, matrix products and element-wise operations, so that bfloat16
    is computed as on a GPU.
    """
    builder = InterpreterBuilder
    cast, binary, dot = builder.cast_impl, builder.binary_op, builder.create_dot

    def cast_impl(self: InterpreterBuilder, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
        if dst_type.scalar == tl.bfloat16:
            return _narrow(_widen(src).data.astype(np.float32))
        return cast(self, _widen(src), dst_type)

    def binary_op(
        self: InterpreterBuilder,
        lhs: TensorHandle,
        rhs: TensorHandle,
        op: Callable[..., npt.NDArray[Any]],
    ) -> TensorHandle:
        """An element-wise operation, in fp32 for bfloat16 operands, because NumPy has no
        bfloat16.

        op: (left, right) -> result, a function of NumPy: fp32 for arithmetic, bool for comparisons.
        """
        if lhs.dtype.scalar != tl.bfloat16:
            return binary(self, lhs, rhs, op)
        result = op(_widen(lhs).data, _widen(rhs).data)
        if result.dtype == np.bool_:
            # The interpreter labels the result of a comparison with the left operand's dtype, and
            # Triton's language replaces the label by int1.  uint16 is how bfloat16 is stored.
            return TensorHandle(result.astype(np.uint16), tl.bfloat16)
        return _narrow(result)

    def create_dot(
        self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: object
    ) -> TensorHandle:
        return dot(self, _widen(a), _widen(b), *rest)

    builder.cast_impl, builder.binary_op, builder.create_dot = cast_impl, binary_op, create_dot


def _widen(handle: TensorHandle) -> TensorHandle:
    """Convert values from bfloat16 to fp32, and leave other dtypes unchanged."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _narrow(values: npt.NDArray[np.float32]) -> TensorHandle:
    """Round fp32 values to the nearest bfloat16, ties to even."""
    rounded = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)


if "TRITON_INTERPRET" not in os.environ and not has_gpu():
    interpret()
INTERPRETED: bool = triton.knobs.runtime.interpret
if INTERPRETED:
    follow_bfloat16()
    skip_idle_work()


# --- calls that no Triton kernel of this package supports


def refuse_gradient(name: str, arguments: Iterable[object]) -> None:
    """Raises UnsupportedError if a tensor among the arguments requires a gradient, and torch would
    compute it (outside of `torch.no_grad`).

    name: name of the implementation, for the message.
    """
    if torch.is_grad_enabled() and any(
        isinstance(argument, Tensor) and argument.requires_grad for argument in arguments
    ):
        raise UnsupportedError(
            f"{name}: forward only; call it under torch.no_grad() or detach the inputs"
        )


def refuse_device(name: str, tensor: Tensor, *, oldest: tuple[int, int] = (8, 0)) -> None:
    """Raises UnsupportedError for a tensor on a device that the kernels do not run on.

    name: name of the implementation, for the message.  oldest: the lowest compute capability.
    """
    if tensor.is_cuda:
        if capability(tensor) < oldest:
            lowest = ".".join(map(str, oldest))
            raise UnsupportedError(f"{name}: needs a GPU of compute capability {lowest} or newer")
    elif not INTERPRETED:
        raise UnsupportedError(
            f"{name}: without TRITON_INTERPRET=1, tensors must be on the GPU, not on "
            f"{tensor.device}"
        )
