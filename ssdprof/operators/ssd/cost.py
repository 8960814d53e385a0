"""The sizes of an SSD call, and the least bytes and floating-point operations that it takes."""

from __future__ import annotations

from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.operators import tensors
from ssdprof.operators.dtypes import dtype_name
from ssdprof.operators.operator import Cost
from ssdprof.operators.ssd.judgement import forms
from ssdprof.schema import Dims

SMALLEST_CHUNK = 16  # the edge of a tensor core's tile


def dims(inputs: SSDInputs) -> Dims:
    """A call's sizes; `sizes` has nheads, headdim, dstate and ngroups."""
    batch, seqlen, nheads, headdim = inputs.x.shape
    ngroups, dstate = inputs.B.shape[2:]
    groups = "1 group" if ngroups == 1 else f"{ngroups:,} groups"
    return Dims(
        operator="ssd",
        batch=batch,
        seqlen=seqlen,
        chunk_size=inputs.chunk_size,
        dtype=dtype_name(inputs.x.dtype),
        sizes={"nheads": nheads, "headdim": headdim, "dstate": dstate, "ngroups": ngroups},
        words=f"{nheads} heads x {headdim}, state {dstate}, {groups}",
    )


def bytes_moved(inputs: SSDInputs) -> int:
    """Every input read once; out and the fp32 final states written once."""
    return tensors.nbytes(inputs) + sum(form.nbytes for form in forms(inputs))


def flops(dims: Dims, chunk_size: int = SMALLEST_CHUNK) -> int:
    """Multiplications and additions of the chunked form's matrix products.

    Per position, with (q + 1) / 2 sources per position on average in a chunk of q positions (the causal half):

        C B^T                  2 g n (q + 1) / 2
        scores x               2 h p (q + 1) / 2
        state update, C state  2 h p n each

    It grows with q.  The default, the smallest chunk that fills a tensor core's tile, is the least that any chunked
    kernel does, so that no choice of chunk beats the floor.  Decays, skip and gate are not counted.
    """
    h, p, n, g = (dims.sizes[name] for name in ("nheads", "headdim", "dstate", "ngroups"))
    sources = chunk_size + 1
    return dims.batch * dims.seqlen * (g * n * sources + h * p * sources + 4 * h * p * n)


COST = Cost(dims=dims, bytes_moved=bytes_moved, flops=flops)
