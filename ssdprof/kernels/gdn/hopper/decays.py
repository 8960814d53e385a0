# mypy: ignore-errors
"""Gates as log2 decays, and their cumulative sums in a chunk."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssdprof.kernels._gluon import add

LOG2_E = gl.constexpr(1.4426950408889634)
LEAST = gl.constexpr(-150.0)  # 2^LEAST rounds to 0 in fp32

STAGES = {"less": "caller", "log2_decays": "gate_cumsum", "sums": "gate_cumsum"}


@gluon.jit
def less(a, b):
    """Minimum of a and b; NaN if b is NaN."""
    return gl.where(b > a, a, b)


@gluon.jit
def log2_decays(g):
    """Convert natural logarithms to log2, clamped between LEAST and 0; NaN stays NaN."""
    g = gl.where(g > 0.0, 0.0, g.to(gl.float32) * LOG2_E)
    return gl.where(g < LEAST, LEAST, g)


@gluon.jit
def sums(g, AXIS: gl.constexpr):
    """Cumulative sums, made non-increasing: the rounding of a parallel scan could make a sum rise."""
    return gl.associative_scan(gl.associative_scan(g, AXIS, add), AXIS, less)
