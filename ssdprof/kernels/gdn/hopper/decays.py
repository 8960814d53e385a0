# mypy: ignore-errors
"""Gates as log2 decays, and their sums since a chunk's start."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssdprof.kernels._gluon import add

LOG2_E = gl.constexpr(1.4426950408889634)
LEAST = gl.constexpr(-150.0)  # 2^LEAST is 0 in fp32, as is whatever is smaller

STAGES = {"less": "caller", "log2_decays": "gate_cumsum", "sums": "gate_cumsum"}


@gluon.jit
def less(a, b):
    """The smaller one; NaN if b is."""
    return gl.where(b > a, a, b)


@gluon.jit
def log2_decays(g):
    """Natural logarithms in log2 units, at most 0; NaN stays NaN."""
    g = gl.where(g > 0.0, 0.0, g.to(gl.float32) * LOG2_E)
    return gl.where(g < LEAST, LEAST, g)


@gluon.jit
def sums(g, AXIS: gl.constexpr):
    """Not increasing, as they are if summed one after the other; summed in another order, they may be."""
    return gl.associative_scan(gl.associative_scan(g, AXIS, add), AXIS, less)
