"""Triton's interpreter, turned on for this process and made to follow the GPU in bfloat16.

The interpreter keeps bfloat16 as bare 16-bit integers: it multiplies them as integers and rounds towards zero.  Here
bfloat16 operands are widened to fp32, and results are rounded to nearest even, as a GPU does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def interpret() -> None:
    """Interpret the kernels defined from now on, and Triton's own device functions, defined when it was imported."""
    triton.knobs.runtime.interpret = True
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("triton.language"):
            for name, value in list(vars(module).items()):
                if isinstance(value, triton.JITFunction):
                    setattr(module, name, triton.jit(value.fn))


def follow_bfloat16() -> None:
    """Replace the interpreter's casts, products and element-wise operations where a bfloat16 takes part."""
    builder: Any = InterpreterBuilder
    cast, binary, dot = builder.cast_impl, builder.binary_op, builder.create_dot

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if dst_type.scalar == tl.bfloat16:
            return _narrow(_widen(src).data.astype(np.float32))
        return cast(self, _widen(src), dst_type)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        if lhs.dtype.scalar != tl.bfloat16:
            return binary(self, lhs, rhs, op)
        result = op(_widen(lhs).data, _widen(rhs).data)
        if result.dtype == np.bool_:  # a comparison
            return TensorHandle(result.astype(np.uint16), tl.bfloat16)
        return _narrow(result)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, _widen(a), _widen(b), *rest)

    builder.cast_impl, builder.binary_op, builder.create_dot = cast_impl, binary_op, create_dot


def _widen(handle: Any) -> Any:
    """The same values in fp32 if they are bfloat16."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _narrow(values: npt.NDArray[np.float32]) -> Any:
    """fp32 values as bfloat16, rounded to nearest even."""
    rounded = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
