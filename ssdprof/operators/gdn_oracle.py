"""The oracle of GDN, its rounded form in one precision, and the cost of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ssdprof.operators.late import deferred, lazy, rounding, torch
from ssdprof.operators.operator import LEAST_CHUNK, OracleSpec

if TYPE_CHECKING:
    from torch import Tensor

    from ssdprof.kernels import GDNInputs
    from ssdprof.kernels.gdn import reference
    from ssdprof.operators.rounding import Gate, Rounded, Span
else:
    reference = lazy("ssdprof.kernels.gdn.reference")

CHUNK = 64  # positions of a chunk of the rounded form
_LEAF = 16  # rows of the diagonal blocks that are inverted in fp32
# least g of a position: exp of it is zero in fp32, and sums of it are finite
FORGOTTEN_LN = -110.0


def bytes_per_position(inputs: GDNInputs) -> int:
    """`OracleSpec.bytes_per_position`: for each head, the rounded form holds about eight fp32 rows
    of K + V + CHUNK numbers, and the oracle about ten in fp64.
    """
    heads, value_dim = inputs.v.shape[2:]
    width = inputs.q.shape[3] + value_dim + CHUNK
    return int(heads * (8 * 4 * width + 10 * 8 * width))


def gate(inputs: GDNInputs, span: Span, chunk: int = CHUNK) -> Gate:
    """`OracleSpec.gate`: the cumulative sum of g in each chunk, (c, h, chunk) in fp32.  A g above 0
    counts as 0, and one below `FORGOTTEN_LN` as that; the padding has g = 0.
    """
    g = span.of(inputs.g).float().clamp(FORGOTTEN_LN, 0)
    return rounding.Gate(exponents=rounding.running_sum(rounding.split_chunks(g, chunk)))


def rounded_chunks(inputs: GDNInputs, low: Rounded, span: Span, gate: Gate) -> Tensor:
    """`OracleSpec.chunks`: out of a span in one precision, which docs/measuring.md calls `lo`.

    It is the chunked algorithm of Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464), section 3.3,
    in plain torch.  Its chunks are those of the gate, whatever the call's chunk size.  Everything
    is computed in fp32.  These values are rounded:

    - operands of matrix products, to the input's dtype, or from fp32 to two tf32 numbers, as tensor
      cores take it.  Operands are q and k (after their norm), the inverse, beta v, beta times decay
      times k, w, u, the state, the corrected values v_new, also times the decay to the chunk's end,
      and the scores
    - operands of the products between the inverse's blocks of 16 rows: cut to tf32, or if operands
      are in fp32 rounded to two tf32 numbers
    - states that pass from chunk to chunk, and the final state, to the state dtype
    - the output, to the input's dtype
    - with relaxed intermediates, also decays between positions, q k^T, beta and their products,
      v_new, and operands in fp32: to 16 bits, which are the input's dtype, or bfloat16 for fp32
      inputs

    k k^T, its decays and betas, the substitution inside blocks of 16 rows, and the decay of a state
    over a chunk stay in fp32.  The function imitates no kernel beyond that, and no constant is
    fitted: an implementation that rounds at fewer places only gets closer to the oracle.
    """
    operand, intermediate, exp = low.operand, low.intermediate, rounding.gpu_exp
    g = gate.exponents
    q, k, v, beta = operands(inputs, low, span, g.shape[2])

    # the system of each chunk and its inverse, then w and u
    decay = gate.decays.tril()  # (c, h, i, j)
    round_operand = rounding.two_tf32 if low.operand_dtype == torch.float32 else tf32
    system = ((k @ k.mT) * decay * beta).tril(-1)
    inverse = operand(inverse_of(system, round_operand))
    beta = intermediate(beta)
    since_start = intermediate(exp(g))[..., None]
    u = operand(inverse @ operand(beta * v))
    w = operand(inverse @ operand(intermediate(beta * since_start) * k))

    # the outputs, chunk after chunk
    last = g[..., -1:]
    to_end = intermediate(exp((last - g).clamp(max=0)))[..., None]
    chunk_decay = exp(last)[..., None]
    scores = operand(intermediate(intermediate(q @ k.mT) * intermediate(decay)))
    # the loop has few operations: on a GPU, each takes the time of its launch
    entering, v_new = [], []
    for c in range(len(v)):
        entering.append(operand(low.state))
        v_new.append(intermediate(torch.baddbmm(u[c], w[c], entering[c], alpha=-1)))
        decayed = low.state * chunk_decay[c]
        low.state = low.stored(torch.baddbmm(decayed, k[c].mT, operand(v_new[c] * to_end[c])))
    out = since_start * (q @ torch.stack(entering)) + scores @ operand(torch.stack(v_new))
    return in_positions(out, inputs, span)


def operands(inputs: GDNInputs, low: Rounded, span: Span, chunk: int) -> tuple[Tensor, ...]:
    """q, k, v and beta of a span in chunks, (c, h, chunk, width), of the widths K, K, V and 1.

    q and k are normalised if the call asks for it, repeated for each value head, and rounded as
    operands.  v and beta are in fp32.
    """
    q, k, v, beta = reference.load(inputs, span, torch.float32)
    q, k = (low.operand(keys).repeat_interleave(inputs.values_per_key, 1) for keys in (q, k))
    return tuple(rounding.split_chunks(tensor, chunk) for tensor in (q, k, v, beta[..., None]))


def in_positions(out: Tensor, inputs: GDNInputs, span: Span) -> Tensor:
    """The output of a span, (l, h, V) in the dtype of v, from that of its chunks before the scale,
    (c, h, chunk, V).
    """
    out = out * inputs.scale_or_default
    return out.transpose(1, 2).flatten(0, 1)[: span.length].to(inputs.v.dtype)


def inverse_of(system: Tensor, round_operand: Callable[[Tensor], Tensor]) -> Tensor:
    """(I + system)^-1 for strictly lower triangular systems (..., chunk, chunk), where chunk is a
    power of two, at least `_LEAF`.

    Blocks of `_LEAF` rows on the diagonal are inverted in fp32.  Then the inverses of neighbouring
    blocks A and B, with the block C below A, are joined to the inverse of the block twice as wide:
    (A, 0; C, B)^-1 = (A^-1, 0; -B^-1 C A^-1, B^-1).

    round_operand: rounds the operands of these products.
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
    """Blocks of a system (..., chunk, chunk), as (..., n, size, size): those on the diagonal for
    `below` 0; for `below` 1 the blocks under the first, the third, ... of them.
    """
    count = system.shape[-1] // size
    blocks = system.reshape(*system.shape[:-2], count, size, count, size)
    return torch.stack([blocks[..., i + below, :, i, :] for i in range(0, count, 1 + below)], -3)


def tf32(tensor: Tensor) -> Tensor:
    """An fp32 operand as a tensor core reads it: without its low 13 bits."""
    return (tensor.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


# --- cost

SIZE_WORDS = "{key_heads}/{value_heads} heads, K {key_dim}, V {value_dim}"


def flops(sizes: Mapping[str, int], positions: int, chunk: int = LEAST_CHUNK) -> int:
    """Multiplications and additions of the chunked form's matrix products for `positions` positions
    of all heads.

    In a chunk of C positions, a position reads from (C + 1) / 2 positions on average, because a
    chunk is causal.  Per position:

        k k^T, q k^T                                 2 H K (C + 1) / 2 each
        inverse times (v - k S), scores times v_new  2 HV V (C + 1) / 2 each
        k S, q S, and the state's update             2 HV K V each

    It grows with C.  The default, the smallest chunk that fills a tensor core's tile, is the least
    that any chunked kernel does, so that no choice of chunk beats the floor.  The inverse itself,
    decays and norms are not counted.
    """
    key_heads, heads, key_dim, value_dim = (
        sizes[name] for name in ("key_heads", "value_heads", "key_dim", "value_dim")
    )
    pair_sources = chunk + 1  # from which two positions read on average
    per_position = (
        2 * pair_sources * (key_heads * key_dim + heads * value_dim)
        + 6 * heads * key_dim * value_dim
    )
    return positions * per_position


def chunk_size(_inputs: GDNInputs) -> int:
    """`OracleSpec.chunk_size`."""
    return CHUNK


ORACLE = OracleSpec(
    blocks=deferred("gdn.reference:gdn_blocks"),
    gate=gate,
    chunks=rounded_chunks,
    bytes_per_position=bytes_per_position,
    chunk_size=chunk_size,
    words=SIZE_WORDS.format_map,
    flops=flops,
)
