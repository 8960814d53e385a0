"""The dtype of every product of the unfused kernels.

    what                                            exact                 relaxed
    k k^T, beta and the decays of the system        fp32                  fp32
    inverse: blocks of 16 rows                      fp32                  fp32
    inverse: products between these blocks          tf32; fp32: tf32x3    tf32
    operands: q, k after normalisation, inverse,
        w, u, v_new, state, scores                  inputs' dtype         16 bit
    decays, beta times decay, q k^T, and their
        products before they become an operand      fp32                  16 bit
    sums                                            fp32                  fp32
    state from chunk to chunk                       `state_dtype`         `state_dtype`

16 bit is the inputs' dtype, and bfloat16 for fp32 inputs.  fp32 operands are multiplied as two tf32 numbers each.  The
exact column has the dtypes of the Triton kernels of flash-linear-attention, which also store w, u, v_new and the states
that enter chunks in the operands' dtype.  The system is never relaxed, because collinear keys amplify its errors.
"""

from __future__ import annotations

import torch
import triton.language as tl

from ssdprof.kernels.functions import TL_DTYPE
from ssdprof.kernels.precision import Precision


def operand_dtype(inputs: torch.dtype, precision: Precision) -> torch.dtype:
    """The dtype of operands of matrix products, and of the workspace except gates and system."""
    return inputs if precision.exact else precision.intermediate_dtype(inputs)


def intermediate(inputs: torch.dtype, precision: Precision) -> tl.dtype:
    """Triton's dtype of decays, of q k^T and of their products."""
    return TL_DTYPE[precision.intermediate_dtype(inputs)]


def inverse_products(operand: torch.dtype) -> str:
    """Input precision of the inverse's products of fp32 blocks.  Errors of tf32 are below those of 16-bit operands."""
    return "tf32x3" if operand == torch.float32 else "tf32"
