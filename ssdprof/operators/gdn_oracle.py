"""The oracle of GDN, the operator in one precision, and its cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from ssdprof.operators.late import lazy, rounding, torch
from ssdprof.operators.operator import OracleSpec

if TYPE_CHECKING:
    from torch import Tensor

    from ssdprof.kernels import GDNInputs
    from ssdprof.kernels.gdn import reference
    from ssdprof.kernels.oracle import Block
    from ssdprof.operators.rounding import Gate, Rounded, Span
else:
    reference = lazy("ssdprof.kernels.gdn.reference")

CHUNK = 64  # of the rounded form
_LEAF = 16  # rows of the blocks that are inverted in fp32
FORGOTTEN = -110.0  # a decay of exp(-110) is zero in fp32


def bytes_per_position(inputs: GDNInputs) -> int:
    """The rounded form holds about eight fp32 rows of K, V or CHUNK; the oracle about ten fp64 rows
    of K + V + 64.
    """
    heads, value_dim = inputs.v.shape[2:]
    width = inputs.q.shape[3] + value_dim + CHUNK
    return int(heads * (8 * 4 * width + 10 * 8 * width))


def gate(inputs: GDNInputs, span: Span, chunk: int = CHUNK) -> Gate:
    """The running sum of g in each chunk, (c, h, chunk); the padding has g = 0."""
    g = span.of(inputs.g).float().clamp(FORGOTTEN, 0)
    return rounding.Gate(exponents=rounding.running_sum(rounding.split_chunks(g, chunk)))


def rounded_chunks(inputs: GDNInputs, low: Rounded, span: Span, gate: Gate) -> Tensor:
    """out of a span: the `lo` of the comparison (docs/measuring.md).

    It is the chunked algorithm of Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464), section 3.3,
    with the gate's chunks, of 64 positions whatever the call's chunk size, in plain torch.
    Everything is computed in fp32.  Rounded are

    - operands of matrix products, to the input's dtype; fp32 to two tf32 numbers, as tensor cores
      take it: q and k (normalised ones too), the inverse, beta times v and beta times decay times
      k, w, u, the state, what a chunk writes, the scores
    - products between the inverse's blocks of 16 rows: cut to tf32; for fp32 inputs to two tf32
      numbers
    - states that pass from chunk to chunk, and the final one, to the state dtype
    - the output, to the input's dtype
    - if relaxed: decays, q k^T, beta and their products, what a chunk writes, and fp32 operands, to
      16 bit (the input's dtype; bfloat16 for fp32 inputs)

    k k^T, its decays and betas, and the substitution inside blocks of 16 rows stay in fp32.  No
    kernel is imitated beyond that and nothing here is fitted: an implementation that rounds at
    fewer places only gets closer to the oracle.
    """
    operand, intermediate, exp = low.operand, low.intermediate, rounding.gpu_exp
    g = gate.exponents
    q, k, v, beta = operands(inputs, low, span, g.shape[2])

    decay = gate.decays.tril()  # (c, h, i, j)
    round_operand = rounding.two_tf32 if low.operand_dtype == torch.float32 else tf32
    inverse = operand(inverse_of(((k @ k.mT) * decay * beta).tril(-1), round_operand))
    beta = intermediate(beta)
    since_start = intermediate(exp(g))[..., None]
    u = operand(inverse @ operand(beta * v))
    w = operand(inverse @ operand(intermediate(beta * since_start) * k))

    last = g[..., -1:]
    to_end = intermediate(exp((last - g).clamp(max=0)))[..., None]
    chunk_decay = exp(last)[..., None]
    scores = operand(intermediate(intermediate(q @ k.mT) * intermediate(decay)))
    out = torch.empty_like(v)
    for c in range(len(v)):
        entering = operand(low.state)
        written = intermediate(u[c] - w[c] @ entering)
        out[c] = since_start[c] * (q[c] @ entering) + scores[c] @ operand(written)
        low.state = low.stored(low.state * chunk_decay[c] + k[c].mT @ operand(written * to_end[c]))
    return in_positions(out, inputs, span)


def operands(inputs: GDNInputs, low: Rounded, span: Span, chunk: int) -> tuple[Tensor, ...]:
    """The inputs in chunks (c, h, chunk, ...): q and k of value heads as operands, normalised if
    the call asks for it; v and beta (..., 1) in fp32.
    """

    q, k, v, beta = reference.load(inputs, span, torch.float32)
    q, k = (low.operand(rows).repeat_interleave(inputs.values_per_key, 1) for rows in (q, k))
    return tuple(rounding.split_chunks(rows, chunk) for rows in (q, k, v, beta[..., None]))


def in_positions(out: Tensor, inputs: GDNInputs, span: Span) -> Tensor:
    """(c, h, chunk, V), before the scale, -> the output of the span."""
    out = out * inputs.scale_or_default
    return out.transpose(1, 2).flatten(0, 1)[: span.stop - span.start].to(inputs.v.dtype)


def inverse_of(system: Tensor, round_operand: Callable[[Tensor], Tensor]) -> Tensor:
    """(I + system)^-1 by blocks: those on the diagonal in fp32, then pairs of neighbours.

    round_operand: rounds an operand of the products between blocks as the kernel does.
    """
    identity = torch.eye(_LEAF, device=system.device)
    leaves = _blocks_below(system, _LEAF, 0)
    inverse: Tensor = torch.linalg.solve_triangular(
        leaves, identity.expand_as(leaves), upper=False, unitriangular=True
    )
    half = _LEAF
    while half < system.shape[-1]:
        top = inverse[..., 0::2, :, :]
        bottom = inverse[..., 1::2, :, :]
        between = _blocks_below(system, half, 1)
        between_top = round_operand(between) @ round_operand(top)
        corner = -round_operand(bottom) @ round_operand(between_top)
        upper = torch.cat([top, torch.zeros_like(top)], -1)
        lower = torch.cat([corner, bottom], -1)
        inverse = torch.cat([upper, lower], -2)
        half *= 2
    return inverse.squeeze(-3)


def _blocks_below(system: Tensor, size: int, below: int) -> Tensor:
    """(..., chunk, chunk) -> (..., n, size, size): blocks on the diagonal, or the one below each
    even block of it.
    """
    count = system.shape[-1] // size
    blocks = system.reshape(*system.shape[:-2], count, size, count, size)
    return torch.stack([blocks[..., i + below, :, i, :] for i in range(0, count, 1 + below)], -3)


def tf32(tensor: Tensor) -> Tensor:
    """An fp32 operand as a tensor core reads it: without its low 13 bits."""
    return (tensor.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


# --- cost

WORDS = "{key_heads}/{value_heads} heads, K {key_dim}, V {value_dim}"
SMALLEST_CHUNK = 16  # the edge of a tensor core's tile


def flops(sizes: Mapping[str, int], positions: int, chunk_size: int = SMALLEST_CHUNK) -> int:
    """Multiplications and additions of the chunked form's matrix products at that many positions.

    Per position, with (C + 1) / 2 sources per position on average in a chunk of C positions (the
    causal half):

        k k^T, q k^T                       2 H K (C + 1) / 2 each
        the inverse, times what is written, and scores times what is written
                                           2 HV V (C + 1) / 2 each
        k S, q S, and the state's update   2 HV K V each

    It grows with C.  The default, the smallest chunk that fills a tensor core's tile, is the least
    that any chunked kernel does, so that no choice of chunk beats the floor.  The inverse itself,
    decays and norms are not counted.
    """
    key_heads, heads, key_dim, value_dim = (
        sizes[name] for name in ("key_heads", "value_heads", "key_dim", "value_dim")
    )
    sources = chunk_size + 1
    per_position = (
        2 * sources * (key_heads * key_dim + heads * value_dim) + 6 * heads * key_dim * value_dim
    )
    return positions * per_position


def blocks(inputs: GDNInputs, length: int) -> Iterable[Block]:
    return reference.gdn_blocks(inputs, torch.float64, block=length)


def chunk_size(_inputs: GDNInputs) -> int:
    return CHUNK


ORACLE = OracleSpec(
    blocks=blocks,
    gate=gate,
    chunks=rounded_chunks,
    bytes_per_position=bytes_per_position,
    chunk_size=chunk_size,
    words=WORDS.format_map,
    flops=flops,
)
