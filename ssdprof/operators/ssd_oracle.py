"""The oracle of SSD, its rounded form in one precision, and the cost of a call.

Letters in shapes are those of docs/glossary.md: c chunk, q position in the chunk, s source position
in the chunk, h head, g group, p element of a head, n element of the state; r is a head of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ssdprof.operators.late import deferred, rounding, torch
from ssdprof.operators.operator import LEAST_CHUNK, OracleSpec

if TYPE_CHECKING:
    from torch import Tensor

    from ssdprof.kernels import SSDInputs
    from ssdprof.operators.rounding import Gate, Rounded, Span

# most rows of a chunk's scores that the rounded form computes at once, by type of the device:
# powers of two, as chunks are, so that they divide longer chunks
ROWS = {"cuda": 64, "cpu": 256}


def bytes_per_position(inputs: SSDInputs) -> int:
    """`OracleSpec.bytes_per_position`: for each head, the rounded form holds about six fp32 rows of
    chunk_size scores, and the oracle with the comparator's sums about ten fp64 rows of p + 64 +
    p n / 64 numbers: x, the scores of chunks of 64 positions, and their states.
    """
    h, p = inputs.x.shape[2:]
    n = inputs.B.shape[3]
    q = inputs.power_of_two_chunk
    return h * (6 * 4 * q + 10 * 8 * (p + 64 + p * n // 64))


def gate(inputs: SSDInputs, span: Span, chunk: int = 0) -> Gate:
    """`OracleSpec.gate`: dt and the cumulative sum of dt A in each chunk, (c, h, q) in fp32.

    The last chunk is padded with dt = 0, which neither decays a state nor adds to it.

    chunk: q, a power of two; 0 stands for `chunk_size`.
    """
    dt = span.of(inputs.dt).float()
    if inputs.dt_bias is not None:
        dt = dt + inputs.dt_bias.float()
    if inputs.dt_softplus:
        dt = torch.nn.functional.softplus(dt)
    chunk = chunk or inputs.power_of_two_chunk
    dt = rounding.split_chunks(dt.clamp(*inputs.dt_limit), chunk)
    A = inputs.A.float().clamp(min=-1e30)  # -inf times a step of 0 would be NaN
    return rounding.Gate(exponents=rounding.running_sum(dt * A[:, None]), dt=dt)


def rounded_chunks(inputs: SSDInputs, low: Rounded, span: Span, gate: Gate) -> Tensor:
    """`OracleSpec.chunks`: out of a span in one precision, which docs/measuring.md calls `lo`.

    It is the chunked algorithm of Dao and Gu 2024 (arXiv:2405.21060), section 6, in plain torch, at
    the chunk size of the gate.  Everything is computed in fp32.  These values are rounded:

    - operands of matrix products, to the input's dtype, or from fp32 to two tf32 numbers, as tensor
      cores take it
    - states that pass from chunk to chunk, and the final state, to the state dtype
    - the output, to the input's dtype
    - with relaxed intermediates, also decays, C B^T, dt and their products, and operands in fp32:
      to 16 bits, which are the input's dtype, or bfloat16 for fp32 inputs

    The decay of a state over a chunk, D and z stay in fp32.  The function imitates no kernel, and
    no constant is fitted: an implementation that rounds at fewer places only gets closer.
    """
    q = gate.exponents.shape[2]
    h, p = inputs.x.shape[2:]
    g, n = inputs.B.shape[2:]
    r = h // g
    intermediate = low.intermediate

    def operand(tensor: Tensor) -> Tensor:
        """The span's positions of a tensor, in chunks and rounded: (b, l, h, ...) -> (c, h, q,
        ...).
        """
        return low.operand(rounding.split_chunks(span.of(tensor).float(), q))

    x = operand(inputs.x).reshape(-1, g, r, q, p)
    B = operand(inputs.B)
    C = operand(inputs.C)
    assert gate.dt is not None
    a, dt = (tensor.reshape(-1, g, r, q) for tensor in (gate.exponents, intermediate(gate.dt)))
    # what positions of the same chunk give to the outputs
    out = _within_chunks(low, gate.decays.reshape(*a.shape, q), C @ B.mT, dt, x)

    # the state that enters each chunk
    last = a[..., -1:]
    weights = intermediate(intermediate(rounding.gpu_exp((last - a).clamp(max=0))) * dt)
    chunk_states = low.operand(x * weights[..., None]).mT @ B[:, :, None]  # (c, g, r, p, n)
    chunk_decay = rounding.gpu_exp(last)[..., None]
    state = low.state.reshape(g, r, p, n)
    entering = []
    for c in range(len(chunk_states)):
        entering.append(state)
        state = low.stored(state * chunk_decay[c] + chunk_states[c])
    low.state = state.reshape(h, p, n)

    # what these states give to the outputs
    from_states = C @ low.operand(torch.stack(entering)).flatten(2, 3).mT
    from_states = from_states.reshape(-1, g, q, r, p).transpose(2, 3)
    out += from_states * intermediate(rounding.gpu_exp(a))[..., None]

    # (c, g, r, q, p) -> (l, h, p), then the skip and the gate
    out = out.permute(0, 3, 1, 2, 4).reshape(-1, h, p)[: span.length]
    if inputs.D is not None:
        out = out + inputs.D.float().reshape(h, -1) * span.of(inputs.x).float()
    if inputs.z is not None:
        out = out * torch.nn.functional.silu(span.of(inputs.z).float())
    return out.to(inputs.x.dtype)


def _within_chunks(low: Rounded, decays: Tensor, CB: Tensor, dt: Tensor, x: Tensor) -> Tensor:
    """The part of the output that comes from positions of the same chunk, (c, g, r, q, p).

    decays (c, g, r, q, s), CB (c, g, q, s), dt (c, g, r, s), x (c, g, r, s, p).  At most `ROWS`
    positions q are computed at a time, because scores need most of the memory.
    """
    q = x.shape[3]
    intermediate = low.intermediate
    causal = torch.ones(q, q, dtype=torch.bool, device=x.device).tril()
    CB = torch.where(causal, CB, 0.0)[:, :, None]
    count = min(q, ROWS[x.device.type])
    outs = []
    for stop in range(count, q + 1, count):
        causal_rows = (..., slice(stop - count, stop), slice(stop))
        decayed = intermediate(intermediate(CB[causal_rows]) * intermediate(decays[causal_rows]))
        scores = intermediate(decayed * dt[..., None, :stop])
        outs.append(low.operand(scores) @ x[..., :stop, :])
    return torch.cat(outs, -2)


# --- cost


def words(sizes: dict[str, int]) -> str:
    """The sizes for people, such as "80 heads x 64, state 128, 1 group"."""
    groups = "1 group" if sizes["ngroups"] == 1 else f"{sizes['ngroups']:,} groups"
    return f"{sizes['nheads']} heads x {sizes['headdim']}, state {sizes['dstate']}, {groups}"


def flops(sizes: Mapping[str, int], positions: int, chunk: int = LEAST_CHUNK) -> int:
    """Multiplications and additions of the chunked form's matrix products for `positions` positions
    of all heads.

    In a chunk of q positions, a position reads from (q + 1) / 2 positions on average, because a
    chunk is causal.  Per position:

        C B^T                  2 g n (q + 1) / 2
        scores x               2 h p (q + 1) / 2
        state update, C state  2 h p n each

    It grows with q.  The default, the smallest chunk that fills a tensor core's tile, is the least
    that any chunked kernel does, so that no choice of chunk beats the floor.  Decays, skip and gate
    are not counted.
    """
    h, p, n, g = (sizes[name] for name in ("nheads", "headdim", "dstate", "ngroups"))
    pair_sources = chunk + 1  # from which two positions read on average
    return positions * (g * n * pair_sources + h * p * pair_sources + 4 * h * p * n)


def chunk_size(inputs: SSDInputs) -> int:
    """`OracleSpec.chunk_size`."""
    return inputs.power_of_two_chunk


ORACLE = OracleSpec(
    blocks=deferred("ssd.reference:ssd_blocks"),
    gate=gate,
    chunks=rounded_chunks,
    bytes_per_position=bytes_per_position,
    chunk_size=chunk_size,
    words=words,
    flops=flops,
)
