"""The oracle of KDA, its rounded form in one precision, and the cost of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ssdprof.operators import gdn_oracle
from ssdprof.operators.gdn_oracle import (
    CHUNK,
    FORGOTTEN_LN,
    chunk_size,
    in_positions,
    inverse_of,
    operands,
    tf32,
)
from ssdprof.operators.late import deferred, lazy, rounding, torch
from ssdprof.operators.operator import LEAST_CHUNK, OracleSpec

if TYPE_CHECKING:
    from ssdprof.kernels import KDAInputs
    from ssdprof.kernels.kda import reference
    from ssdprof.operators.rounding import Gate, Rounded, Span
else:
    reference = lazy("ssdprof.kernels.kda.reference")


def bytes_per_position(inputs: KDAInputs) -> int:
    """`OracleSpec.bytes_per_position`: for each head, the rounded form holds about ten fp32 rows of
    2 K + V + CHUNK numbers, and the oracle about ten in fp64.
    """
    heads, value_dim = inputs.v.shape[2:]
    width = 2 * inputs.q.shape[3] + value_dim + CHUNK
    return int(heads * (10 * 4 * width + 10 * 8 * width))


def gate(inputs: KDAInputs, span: Span, chunk: int = CHUNK) -> Gate:
    """`OracleSpec.gate`: the cumulative sum of g in each chunk, (c, h, chunk * K) in fp32.  A g
    above 0 counts as 0, and one below `FORGOTTEN_LN` as that; the padding has g = 0.
    """
    g = span.of(inputs.g).float().clamp(FORGOTTEN_LN, 0)
    sums = rounding.running_sum(rounding.split_chunks(g, chunk).mT)
    return rounding.Gate(exponents=sums.mT.flatten(2))


def rounded_chunks(inputs: KDAInputs, low: Rounded, span: Span, gate: Gate) -> torch.Tensor:
    """`OracleSpec.chunks`: out of a span in one precision, which docs/measuring.md calls `lo`.

    It is the chunked algorithm of `kernels/kda/reference.py` with the gate's chunks, in plain
    torch.  Everything is computed in fp32.  These values are rounded:

    - operands of matrix products, to the input's dtype, or from fp32 to two tf32 numbers, as tensor
      cores take it.  Operands are q and k (after their norm), both with the decays from the chunk's
      start, k with those to its end, beta k with those from its start, the inverse, beta v, u, w,
      the state, the corrected values v_new, and the scores
    - operands of the scores' products, which are q and k with the decays of each half of a chunk,
      and of the products between the inverse's blocks of 16 rows: cut to tf32 if operands are in
      bf16, rounded to fp16 if in fp16, and to two tf32 numbers if in fp32
    - states that pass from chunk to chunk, and the final state, to the state dtype
    - the output, to the input's dtype

    Decays, beta and the substitution inside blocks of 16 rows stay in fp32.  Relaxed intermediates
    change fp32 operands to bf16 ones, and nothing else.
    """
    operand, exp = low.operand, rounding.gpu_exp
    if low.operand_dtype == torch.float32:
        round_operand = rounding.two_tf32
    else:
        round_operand = operand if low.operand_dtype == torch.float16 else tf32
    chunk = gate.exponents.shape[2] // inputs.q.shape[3]
    q, k, v, beta = operands(inputs, low, span, chunk)
    sums = gate.exponents.reshape(*gate.exponents.shape[:2], chunk, -1)  # (c, h, chunk, K)

    # scores, the system of each chunk and its inverse, then w and u
    scores, system = reference.decayed_scores(q, k, sums, exp, round_operand)
    scores = operand(scores)
    inverse = operand(inverse_of(beta * system, round_operand))
    since_start = exp(sums)
    to_end = exp((sums[..., -1:, :] - sums).clamp(max=0))
    u = operand(inverse @ operand(beta * v))
    w = operand(inverse @ operand(beta * operand(since_start * k)))

    # the outputs, chunk after chunk
    queries, keys = operand(q * since_start), operand(k * to_end)
    # the loop has few operations: on a GPU, each takes the time of its launch
    entering, v_new = [], []
    for c in range(len(v)):
        entering.append(operand(low.state))
        v_new.append(operand(torch.baddbmm(u[c], w[c], entering[c], alpha=-1)))
        decayed = low.state * since_start[c, :, -1, :, None]
        low.state = low.stored(torch.baddbmm(decayed, keys[c].mT, v_new[c]))
    out = queries @ torch.stack(entering) + scores @ torch.stack(v_new)
    return in_positions(out, inputs, span)


# --- cost


def flops(sizes: Mapping[str, int], positions: int, chunk: int = LEAST_CHUNK) -> int:
    """Multiplications and additions of the chunked form's matrix products for `positions` positions
    of all heads.

    They are those of GDN's `flops`, except that k k^T and q k^T count for every value head, because
    their decays are inside the sums.
    """
    heads, key_dim, value_dim = (sizes[name] for name in ("value_heads", "key_dim", "value_dim"))
    pair_sources = chunk + 1  # from which two positions read on average
    per_head = 2 * pair_sources * (key_dim + value_dim) + 6 * key_dim * value_dim
    return positions * heads * per_head


ORACLE = OracleSpec(
    blocks=deferred("kda.reference:kda_blocks"),
    gate=gate,
    chunks=rounded_chunks,
    bytes_per_position=bytes_per_position,
    chunk_size=chunk_size,
    words=gdn_oracle.ORACLE.words,
    flops=flops,
)
