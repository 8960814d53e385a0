"""The oracle of SSD, the operator in one precision, and its cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ssdprof.operators.late import lazy, rounding, torch
from ssdprof.operators.operator import OracleSpec

if TYPE_CHECKING:
    from torch import Tensor

    from ssdprof.kernels import SSDInputs
    from ssdprof.kernels.oracle import Block
    from ssdprof.kernels.ssd import reference
    from ssdprof.operators.rounding import Gate, Rounded, Span
else:
    reference = lazy("ssdprof.kernels.ssd.reference")

# of a chunk's scores that the rounded form computes at once, up to their last column
ROWS = {"cuda": 64, "cpu": 256}


def bytes_per_position(inputs: SSDInputs) -> int:
    """The rounded form holds about six fp32 rows of scores (h, chunk_size); the oracle and the sums
    hold about ten fp64 rows of (h, p + 64 + p n / 64), as `ssd_blocks` explains.
    """
    h, p = inputs.x.shape[2:]
    n = inputs.B.shape[3]
    q = inputs.power_of_two_chunk
    return h * (6 * 4 * q + 10 * 8 * (p + 64 + p * n // 64))


def gate(inputs: SSDInputs, span: Span, chunk: int = 0) -> Gate:
    """dt and the running sum of dt A in each chunk, (c, h, q).  chunk: 0 is that of the inputs.

    The last chunk is padded with dt = 0, which neither decays nor adds.
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
    """out of a span: the `lo` of the comparison (docs/measuring.md).

    It is the chunked algorithm of Dao and Gu 2024 (arXiv:2405.21060), section 6, in plain torch, at
    the chunk size of the gate.  Everything is computed in fp32.  Rounded are

    - operands of matrix products, to the input's dtype; fp32 to two tf32 numbers, as tensor cores
      take it
    - states that pass from chunk to chunk, and the final one, to the state dtype
    - the output, to the input's dtype
    - if relaxed: decays, C B^T, dt and their products, to 16 bit (the input's dtype; bfloat16 for
      fp32 inputs)

    It imitates no kernel and nothing is fitted: an implementation that rounds at fewer places only
    gets closer to the oracle.  fp32 sums are made in the order that a kernel may make them and that
    loses most, one addend after the other.
    """
    q = gate.exponents.shape[2]
    h, p = inputs.x.shape[2:]
    g, n = inputs.B.shape[2:]
    r = h // g
    intermediate = low.intermediate

    def operand(tensor: Tensor) -> Tensor:
        """(b, l, h, ...) -> (c, h, q, ...)."""
        return low.operand(rounding.split_chunks(span.of(tensor).float(), q))

    x = operand(inputs.x).reshape(-1, g, r, q, p)
    B = operand(inputs.B)
    C = operand(inputs.C)
    assert gate.dt is not None
    a, dt = (tensor.reshape(-1, g, r, q) for tensor in (gate.exponents, intermediate(gate.dt)))
    out = _within_chunks(low, gate.decays.reshape(*a.shape, q), C @ B.mT, dt, x)

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
    before = C @ low.operand(torch.stack(entering)).flatten(2, 3).mT
    before = before.reshape(-1, g, q, r, p).transpose(2, 3)
    out += before * intermediate(rounding.gpu_exp(a))[..., None]

    out = out.permute(0, 3, 1, 2, 4).reshape(-1, h, p)[: span.length]
    if inputs.D is not None:
        out = out + inputs.D.float().reshape(h, -1) * span.of(inputs.x).float()
    if inputs.z is not None:
        out = out * torch.nn.functional.silu(span.of(inputs.z).float())
    return out.to(inputs.x.dtype)


def _within_chunks(low: Rounded, decays: Tensor, CB: Tensor, dt: Tensor, x: Tensor) -> Tensor:
    """What a chunk's positions give to its own outputs (c, g, r, q, p), some rows at a time.

    decays (c, g, r, q, s), CB (c, g, q, s), dt (c, g, r, s), x (c, g, r, s, p).
    """
    q = x.shape[3]
    intermediate = low.intermediate
    causal = torch.ones(q, q, dtype=torch.bool, device=x.device).tril()
    CB = torch.where(causal, CB, 0.0)[:, :, None]
    count = min(q, ROWS[x.device.type])
    outs = []
    for stop in range(count, q + 1, count):
        part = (..., slice(stop - count, stop), slice(stop))
        decayed = intermediate(intermediate(CB[part]) * intermediate(decays[part]))
        scores = intermediate(decayed * dt[..., None, :stop])
        outs.append(low.operand(scores) @ x[..., :stop, :])
    return torch.cat(outs, -2)


# --- cost

SMALLEST_CHUNK = 16  # the edge of a tensor core's tile


def words(sizes: dict[str, int]) -> str:
    """ "80 heads x 64, state 128, 1 group"."""
    groups = "1 group" if sizes["ngroups"] == 1 else f"{sizes['ngroups']:,} groups"
    return f"{sizes['nheads']} heads x {sizes['headdim']}, state {sizes['dstate']}, {groups}"


def flops(sizes: Mapping[str, int], positions: int, chunk_size: int = SMALLEST_CHUNK) -> int:
    """Multiplications and additions of the chunked form's matrix products at that many positions.

    Per position, with (q + 1) / 2 sources per position on average in a chunk of q positions (the
    causal half):

        C B^T                  2 g n (q + 1) / 2
        scores x               2 h p (q + 1) / 2
        state update, C state  2 h p n each

    It grows with q.  The default, the smallest chunk that fills a tensor core's tile, is the least
    that any chunked kernel does, so that no choice of chunk beats the floor.  Decays, skip and gate
    are not counted.
    """
    h, p, n, g = (sizes[name] for name in ("nheads", "headdim", "dstate", "ngroups"))
    sources = chunk_size + 1
    return positions * (g * n * sources + h * p * sources + 4 * h * p * n)


def blocks(inputs: SSDInputs, length: int) -> Iterable[Block]:
    return reference.ssd_blocks(inputs, torch.float64, block=length)


def chunk_size(inputs: SSDInputs) -> int:
    return inputs.power_of_two_chunk


ORACLE = OracleSpec(
    blocks=blocks,
    gate=gate,
    chunks=rounded_chunks,
    bytes_per_position=bytes_per_position,
    chunk_size=chunk_size,
    words=words,
    flops=flops,
)
