"""The oracle of KDA, the operator in one precision, and its cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ssdprof.operators import gdn_oracle
from ssdprof.operators.gdn_oracle import (
    CHUNK,
    FORGOTTEN,
    SMALLEST_CHUNK,
    chunk_size,
    in_positions,
    inverse_of,
    operands,
    tf32,
)
from ssdprof.operators.late import lazy, rounding, torch
from ssdprof.operators.operator import OracleSpec

if TYPE_CHECKING:
    from ssdprof.kernels import KDAInputs
    from ssdprof.kernels.kda import reference
    from ssdprof.kernels.oracle import Block
    from ssdprof.operators.rounding import Gate, Rounded, Span
else:
    reference = lazy("ssdprof.kernels.kda.reference")


def bytes_per_position(inputs: KDAInputs) -> int:
    """About ten fp32 rows of the rounded form and ten fp64 rows of the oracle, of 2 K + V +
    CHUNK.
    """
    heads, value_dim = inputs.v.shape[2:]
    return int(heads * (10 * 4 + 10 * 8) * (2 * inputs.q.shape[3] + value_dim + CHUNK))


def gate(inputs: KDAInputs, span: Span, chunk: int = CHUNK) -> Gate:
    """The running sum of g in each chunk, (c, h, chunk * K); the padding has g = 0."""
    g = span.of(inputs.g).float().clamp(FORGOTTEN, 0)
    sums = rounding.running_sum(rounding.split_chunks(g, chunk).mT)
    return rounding.Gate(exponents=sums.mT.flatten(2))


def rounded_chunks(inputs: KDAInputs, low: Rounded, span: Span, gate: Gate) -> torch.Tensor:
    """out of a span: the `lo` of the comparison (docs/measuring.md).

    The chunked algorithm of `reference.py` with the gate's chunks, in plain torch.  Everything
    is computed in fp32 and rounded

        where a matrix product takes it     to the input's dtype; fp32 to two tf32 numbers, as
                                            tensor cores take it: q and k (normalised ones too),
                                            with the decays from the chunk's start and to its end,
                                            the inverse, beta times v, u, w, the state, what a chunk
                                            writes, the scores
        in the products of the scores       q and k with the decays of each half: bf16 inputs cut to
                                            tf32, fp16 ones
        and between the inverse's blocks    rounded to fp16, fp32 ones to two tf32 numbers
        where states pass from chunk to chunk, and at the end     to the state dtype
        as the output     to the input's dtype

    beta and the substitution inside blocks of 16 rows stay in fp32.  Relaxed intermediates round
    fp32 operands to 16 bits and nothing else.
    """
    operand, exp = low.operand, rounding.gpu_exp
    round_operand = {torch.float32: rounding.two_tf32, torch.float16: operand}.get(
        low.operand_dtype, tf32
    )
    chunk = gate.exponents.shape[2] // inputs.q.shape[3]
    q, k, v, beta = operands(inputs, low, span, chunk)
    sums = gate.exponents.reshape(*gate.exponents.shape[:2], chunk, -1)
    scores, system = reference.decayed_scores(q, k, sums, exp, round_operand)
    scores = operand(scores)
    inverse = operand(inverse_of(beta * system, round_operand))
    since_start = exp(sums)
    to_end = exp((sums[..., -1:, :] - sums).clamp(max=0))
    u = operand(inverse @ operand(beta * v))
    w = operand(inverse @ operand(beta * operand(since_start * k)))
    queries, keys = operand(q * since_start), operand(k * to_end)
    out = torch.empty_like(v)
    for c in range(len(v)):
        entering = operand(low.state)
        written = operand(u[c] - w[c] @ entering)
        out[c] = queries[c] @ entering + scores[c] @ written
        low.state = low.stored(low.state * since_start[c, :, -1, :, None] + keys[c].mT @ written)
    return in_positions(out, inputs, span)


# --- cost


def flops(sizes: Mapping[str, int], positions: int, chunk_size: int = SMALLEST_CHUNK) -> int:
    """Multiplications and additions of the chunked form's matrix products at that many positions.

    As of GDN, but k k^T and q k^T are of every value head, because their decays are inside the
    sums.
    """
    heads, key_dim, value_dim = (sizes[name] for name in ("value_heads", "key_dim", "value_dim"))
    return (
        positions * heads * (2 * (chunk_size + 1) * (key_dim + value_dim) + 6 * key_dim * value_dim)
    )


def blocks(inputs: KDAInputs, length: int) -> Iterable[Block]:
    return reference.kda_blocks(inputs, torch.float64, block=length)


ORACLE = OracleSpec(
    blocks=blocks,
    gate=gate,
    chunks=rounded_chunks,
    bytes_per_position=bytes_per_position,
    chunk_size=chunk_size,
    words=gdn_oracle.ORACLE.words,
    flops=flops,
)
