"""Triton's interpreter, turned on for this process and made to follow the GPU in bfloat16.

The interpreter keeps bfloat16 as bare 16-bit integers: it multiplies them as integers and rounds towards zero.  Here
bfloat16 operands are widened to fp32, and results are rounded to nearest even, as a GPU does.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def interpret() -> None:
    """Interpret the kernels defined from now on, and Triton's own device functions, defined when it was imported."""
    triton.knobs.runtime.interpret = True
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("triton.language"):
            for name, value in list(vars(module).items()):
                if isinstance(value, triton.JITFunction):
                    setattr(module, name, triton.jit(value.fn))


def skip_idle_work() -> None:
    """Leave out what the interpreter does at every call and to no effect; it takes longer than small blocks do.

    At every call of a device function it searches Triton's language for the functions to replace, which the launch has
    replaced already.  And it computes whether a 32-bit sum or product overflows, but drops the answer unless its
    option `debug` is set.
    """

    def patch_builtin(pkg: Any, *rest: Any) -> None:
        names = _builtins(pkg)
        if not names or not tl.core.is_builtin(getattr(pkg, names[0])):
            return  # a launch in progress has replaced all of them
        for name in names:
            member = getattr(pkg, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(pkg, name, member, *rest)

    interpreter._patch_builtin = patch_builtin
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


@cache
def _builtins(pkg: Any) -> tuple[str, ...]:
    return tuple(name for name, member in inspect.getmembers(pkg) if tl.core.is_builtin(member))


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
