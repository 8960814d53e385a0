"""The sizes of a GDN call, and the least bytes and floating-point operations that it takes."""

from __future__ import annotations

from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.operators import tensors
from ssdprof.operators.dtypes import dtype_name
from ssdprof.operators.gdn.judgement import forms
from ssdprof.operators.operator import Cost
from ssdprof.schema import Dims

SMALLEST_CHUNK = 16  # the edge of a tensor core's tile


def dims(inputs: GDNInputs) -> Dims:
    """A call's sizes; `sizes` has key_heads, value_heads, key_dim and value_dim."""
    batch, seqlen, key_heads, key_dim = inputs.q.shape
    value_heads, value_dim = inputs.v.shape[2:]
    return Dims(
        operator="gdn",
        batch=batch,
        seqlen=seqlen,
        chunk_size=inputs.chunk_size,
        dtype=dtype_name(inputs.q.dtype),
        sizes={"key_heads": key_heads, "value_heads": value_heads, "key_dim": key_dim, "value_dim": value_dim},
        words=f"{key_heads}/{value_heads} heads, K {key_dim}, V {value_dim}",
    )


def bytes_moved(inputs: GDNInputs) -> int:
    """Every input read once; out and the fp32 final states written once."""
    return tensors.nbytes(inputs) + sum(form.nbytes for form in forms(inputs))


def flops(dims: Dims, chunk_size: int = SMALLEST_CHUNK) -> int:
    """Multiplications and additions of the chunked form's matrix products.

    Per position, with (C + 1) / 2 sources per position on average in a chunk of C positions (the causal half):

        k k^T, q k^T                       2 H K (C + 1) / 2 each
        the inverse, times what is written, and scores times what is written
                                           2 HV V (C + 1) / 2 each
        k S, q S, and the state's update   2 HV K V each

    It grows with C.  The default, the smallest chunk that fills a tensor core's tile, is the least that any chunked
    kernel does, so that no choice of chunk beats the floor.  The inverse itself, decays and norms are not counted.
    """
    names = ("key_heads", "value_heads", "key_dim", "value_dim")
    key_heads, heads, key_dim, value_dim = (dims.sizes[name] for name in names)
    sources = chunk_size + 1
    per_position = 2 * sources * (key_heads * key_dim + heads * value_dim) + 6 * heads * key_dim * value_dim
    return dims.batch * dims.seqlen * per_position


COST = Cost(dims=dims, bytes_moved=bytes_moved, flops=flops)
