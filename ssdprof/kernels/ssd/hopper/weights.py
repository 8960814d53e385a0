# mypy: ignore-errors
"""Weights of positions as two 16-bit numbers, and their products with x.  `role_gates.py` computes the weights.

In fp16 the second number is stored times 2^11 (0x45000000 in fp32), because it would be lost for weights below 2^-14.
Code that reads it multiplies by 0x10001000, a pair of 2^-11.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

STAGES = {"two_parts": "caller", "weighted": "caller", "rounded_off": "caller"}


@gluon.constexpr_function
def for_dtype(code, dtype):
    """Replace DTYPE in assembly by its PTX name.  Keep lines with prefix `f16:` or `bf16:` for that dtype only."""
    name = "bf16" if dtype == gl.bfloat16 else "f16"
    lines = [line.strip().removeprefix(f"{name}:") for line in code.replace("DTYPE", name).splitlines()]
    return "\n".join(line for line in lines if not line.startswith(("f16:", "bf16:")))


@gluon.jit
def two_parts(v, dtype: gl.constexpr):
    """v as a sum of two numbers of `dtype`: the nearest one in the low half of a word, the rest in the high half."""
    code: gl.constexpr = for_dtype(
        """{
            .reg .b16 near, rest;
            .reg .f32 wide, scale;
            cvt.rn.DTYPE.f32 near, $1;
            cvt.f32.DTYPE wide, near;
            sub.rn.f32 wide, $1, wide;
     f16:   mov.b32 scale, 0x45000000;
     f16:   mul.rn.f32 wide, wide, scale;
            cvt.rn.DTYPE.f32 rest, wide;
            mov.b32 $0, {near, rest};
        }""",
        dtype,
    )
    return gl.inline_asm_elementwise(code, "=f,f", [v], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def weighted(x, weight, WHOLE: gl.constexpr):
    """x^T (lane p, q) times a weight per position, as an operand: the WHOLE weight, or only its first part."""
    if WHOLE:
        code: gl.constexpr = for_dtype(
            """{
                .reg .b32 near, rest, scale;
                prmt.b32 near, $2, $3, 0x5410;
                prmt.b32 rest, $2, $3, 0x7632;
                mul.rn.DTYPEx2 rest, $1, rest;
         f16:   mov.b32 scale, 0x10001000;
         f16:   mul.rn.f16x2 rest, rest, scale;
                fma.rn.DTYPEx2 $0, $1, near, rest;
            }""",
            x.dtype,
        )
    else:
        code: gl.constexpr = for_dtype(
            """{
                .reg .b32 near;
                prmt.b32 near, $2, $3, 0x5410;
                mul.rn.DTYPEx2 $0, $1, near;
            }""",
            x.dtype,
        )
    return gl.inline_asm_elementwise(code, "=r,r,f,f", [x, weight[None, :]], dtype=x.dtype, is_pure=True, pack=2)


@gluon.jit
def rounded_off(x, weight, product):
    """x * weight - product: the rounding error of `product`, which is x times the first part of the weight.

    x * near - product has no more digits than x, so that only the sum with x * rest is rounded.
    """
    code: gl.constexpr = for_dtype(
        """{
            .reg .b32 near, rest, lost, scale;
            prmt.b32 near, $2, $3, 0x5410;
            prmt.b32 rest, $2, $3, 0x7632;
            neg.DTYPEx2 lost, $4;
            fma.rn.DTYPEx2 lost, $1, near, lost;
     bf16:  fma.rn.bf16x2 $0, $1, rest, lost;
     f16:   mul.rn.f16x2 rest, $1, rest;
     f16:   mov.b32 scale, 0x10001000;
     f16:   fma.rn.f16x2 $0, rest, scale, lost;
        }""",
        x.dtype,
    )
    args = [x, weight[None, :], product]
    return gl.inline_asm_elementwise(code, "=r,r,f,f,r", args, dtype=x.dtype, is_pure=True, pack=2)
