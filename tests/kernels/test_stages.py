"""Each unfused stage of both operators against its formula, chunk after chunk, in the interpreter.

A formula is evaluated twice: `hi` in fp64, and `lo` in fp32 with the roundings that the stage's precision has.  The
stage passes if max|ours - hi| <= 2 * (max|lo - hi| + eps * max|hi|), eps of the stage's output dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gdn_stages as oracle
import pytest
import torch
from gdn_stages import of_chunk, workspace
from kernel_cases import BF16, EXACT, FP16, FP32, RELAXED, GDNCase, SSDCase
from stage_formulas import Arithmetic, Chunk, assert_within, chunks_of

from ssdprof.kernels.chunks import Chunks
from ssdprof.kernels.gdn.config import operand_dtype
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.gdn.unfused import stages as gdn
from ssdprof.kernels.gdn.unfused.l2norm import qk_l2norm
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd import unfused as ssd
from ssdprof.kernels.ssd.inputs import SSDInputs

LN_2 = math.log(2)
DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
PRECISIONS = pytest.mark.parametrize("precision", [EXACT, RELAXED], ids=["exact", "relaxed"])
SSD_BATCH = SSDCase(batch=2, seqlen=75, heads=4, headdim=24, dstate=20, groups=2, gate=True, skip="(h, p)")
SSD_PACKED = SSDCase(lengths=(0, 33, 1, 0, 41, 0), heads=4, headdim=16, dstate=20, groups=2, initial_states=True)
SSD = pytest.mark.parametrize("case", [SSD_BATCH, SSD_PACKED], ids=["batch", "packed"])
GDN_SIZES = dict(key_heads=2, values_per_key=2, key_dim=20, value_dim=24, chunk_size=32)
GDN_BATCH = GDNCase(batch=2, seqlen=75, **GDN_SIZES, l2norm=False)
GDN_PACKED = GDNCase(lengths=(0, 65, 1, 0, 70), key_dim=40, value_dim=17, initial_states=True, l2norm=False)
GDN = pytest.mark.parametrize("case", [GDN_BATCH, GDN_PACKED], ids=["batch", "packed"])


@pytest.mark.parametrize("lengths", [(5,), (0,) * 3 + (1,), (32, 0, 64, 33, 0, 0), (1,) * 130])
def test_chunk_table(lengths: tuple[int, ...]) -> None:
    inputs = SSDCase(lengths=lengths, heads=1).inputs()
    chunks, expected = Chunks.of(inputs), chunks_of(inputs)
    assert chunks.spans is not None
    assert chunks.bounds is not None
    assert chunks.spans[: len(expected)].tolist() == [[chunk.start, chunk.stop] for chunk in expected]
    unused = chunks.spans[len(expected) :]
    assert len(unused) > 0
    assert torch.equal(unused[:, 0], unused[:, 1]), "a chunk that nobody needs is not empty"
    sequences = [chunk.sequence for chunk in expected]
    assert chunks.bounds.diff().tolist() == [sequences.count(i) for i in range(len(lengths))]


# --- SSD


def each_chunk(
    inputs: SSDInputs,
    ours: Callable[[Chunk], torch.Tensor],
    formula: Callable[[Chunk, Arithmetic], torch.Tensor],
    precision: Precision = EXACT,
) -> None:
    dtype = inputs.x.dtype
    low = Arithmetic(FP32, dtype, precision.intermediate_dtype(dtype))
    for chunk in chunks_of(inputs):
        assert_within(ours(chunk), partial(formula, chunk), low)


def gate(inputs: SSDInputs, chunks: Chunks) -> tuple[torch.Tensor, torch.Tensor]:
    return ssd.chunk_cumsum(inputs.dt, inputs.A, chunks, dt_bias=inputs.dt_bias, dt_softplus=True)


def per_head(tensor: torch.Tensor, inputs: SSDInputs) -> torch.Tensor:
    """(q, g, n) -> (h, q, n)"""
    return tensor.repeat_interleave(inputs.heads_per_group, 1).transpose(0, 1)


def part(tensor: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    return tensor[chunk.b, chunk.start : chunk.stop]


@SSD
@pytest.mark.parametrize("softplus", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_chunk_cumsum(case: SSDCase, softplus: bool, bias: bool) -> None:
    inputs, limit = case.inputs(), (0.02, 0.7)
    dt_bias = inputs.dt_bias if bias else None
    dt, dA_cumsum_log2 = ssd.chunk_cumsum(
        inputs.dt, inputs.A, Chunks.of(inputs), dt_bias=dt_bias, dt_softplus=softplus, dt_limit=limit
    )

    def step(chunk: Chunk, a: Arithmetic) -> torch.Tensor:
        raw = a.of(part(inputs.dt, chunk)).T
        raw = raw if dt_bias is None else raw + a.of(dt_bias)[:, None]
        return (torch.log1p(torch.exp(raw)) if softplus else raw).clamp(*limit)

    def decay(chunk: Chunk, a: Arithmetic) -> torch.Tensor:
        return (step(chunk, a) * a.of(inputs.A)[:, None] / a.of(torch.tensor(LN_2, dtype=torch.float64))).cumsum(-1)

    each_chunk(inputs, lambda chunk: dt[chunk.b, :, chunk.c, : chunk.length], step)
    each_chunk(inputs, lambda chunk: dA_cumsum_log2[chunk.b, :, chunk.c, : chunk.length], decay)
    for chunk in chunks_of(inputs):
        assert not dt[chunk.b, :, chunk.c, chunk.length :].any(), "a step past the end"
        sums = dA_cumsum_log2[chunk.b, :, chunk.c]
        assert (sums[:, chunk.length :] == sums[:, chunk.length - 1, None]).all(), "decay past the end"


@SSD
@DTYPES
@PRECISIONS
def test_ssd_chunk_state(case: SSDCase, dtype: torch.dtype, precision: Precision) -> None:
    inputs = case.but(dtype=dtype).inputs()
    chunks = Chunks.of(inputs)
    dt, dA = gate(inputs, chunks)
    states = ssd.chunk_state(inputs.x, inputs.B, dt, dA, chunks, precision=precision)

    def formula(chunk: Chunk, a: Arithmetic) -> torch.Tensor:
        log2_decay, step = (a.of(t[chunk.b, :, chunk.c, : chunk.length]) for t in (dA, dt))
        weight = a.intermediate(torch.exp2(log2_decay[:, -1:] - log2_decay) * step)  # (h, q)
        x = a.of(part(inputs.x, chunk)).transpose(0, 1)  # (h, q, p)
        written = a.operand(a.intermediate(a.intermediate(x) * weight[..., None]))
        return written.mT @ per_head(a.of(part(inputs.B, chunk)), inputs)

    each_chunk(inputs, lambda chunk: states[chunk.b, chunk.c], formula, precision)


@SSD
@pytest.mark.parametrize("state_dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("given", [True, False])
def test_state_passing(case: SSDCase, state_dtype: torch.dtype, given: bool) -> None:
    inputs = case.but(initial_states=given).inputs()
    chunks = Chunks.of(inputs)
    _, dA = gate(inputs, chunks)
    states = torch.randn(dA.shape[0], chunks.count, *inputs.x.shape[2:], inputs.B.shape[3])
    prev_states, final_states = ssd.state_passing(
        states, dA, chunks, initial_states=inputs.initial_states, state_dtype=state_dtype
    )
    assert (prev_states.dtype, final_states.dtype) == (state_dtype, FP32)
    expected = torch.zeros_like(final_states) if inputs.initial_states is None else inputs.initial_states
    expected = expected.double()
    for chunk in chunks_of(inputs):
        entering, ours = expected[chunk.sequence], prev_states[chunk.b, chunk.c].double()
        torch.testing.assert_close(ours, entering, rtol=torch.finfo(state_dtype).eps, atol=1e-6)
        decay = torch.exp2(dA[chunk.b, :, chunk.c, -1].double())[:, None, None]
        expected[chunk.sequence] = entering * decay + states[chunk.b, chunk.c]
    torch.testing.assert_close(final_states.double(), expected, rtol=1e-6, atol=1e-6)


@SSD
@DTYPES
@PRECISIONS
def test_bmm_chunk(case: SSDCase, dtype: torch.dtype, precision: Precision) -> None:
    inputs = case.but(dtype=dtype).inputs()
    CB = ssd.bmm_chunk(inputs.C, inputs.B, Chunks.of(inputs), precision=precision)
    assert CB.dtype == precision.intermediate_dtype(dtype)

    def formula(chunk: Chunk, a: Arithmetic) -> torch.Tensor:
        C, B = (a.of(part(t, chunk)).transpose(0, 1) for t in (inputs.C, inputs.B))
        return (C @ B.mT).tril()

    def causal(chunk: Chunk) -> torch.Tensor:
        ours = CB[chunk.b, chunk.c, :, : chunk.length, : chunk.length]
        return torch.where(torch.ones(ours.shape[-2:], dtype=torch.bool).tril(), ours, 0)

    each_chunk(inputs, causal, formula, precision)


@SSD
@DTYPES
@PRECISIONS
def test_chunk_scan(case: SSDCase, dtype: torch.dtype, precision: Precision) -> None:
    inputs = case.but(dtype=dtype).inputs()
    chunks = Chunks.of(inputs)
    dt, dA = gate(inputs, chunks)
    CB = ssd.bmm_chunk(inputs.C, inputs.B, chunks, precision=precision)
    shape = (dt.shape[0], chunks.count, *inputs.x.shape[2:], inputs.B.shape[3])
    prev_states = torch.randn(shape).to(precision.state_dtype)
    out = ssd.chunk_scan(inputs, dt, dA, prev_states, CB, chunks)

    def formula(chunk: Chunk, a: Arithmetic) -> torch.Tensor:
        x, C, D = a.of(part(inputs.x, chunk)), a.of(part(inputs.C, chunk)), a.of(inputs.D)  # type: ignore[arg-type]
        length, state = chunk.length, a.operand(a.of(prev_states[chunk.b, chunk.c]))
        log2_decay, step = (a.of(t[chunk.b, :, chunk.c, :length]) for t in (dA, dt))
        from_before = (per_head(C, inputs) @ state.mT) * torch.exp2(log2_decay)[..., None]
        scores = a.of(CB[chunk.b, chunk.c, :, :length, :length]).repeat_interleave(inputs.heads_per_group, 0)
        decay = torch.exp2((log2_decay[:, :, None] - log2_decay[:, None, :]).clamp(max=0))
        scores = a.operand(a.intermediate(scores * a.intermediate(decay * step[:, None, :])))
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        y = from_before + torch.where(causal, scores, 0) @ x.transpose(0, 1)  # (h, q, p)
        y = y.transpose(0, 1) + D.reshape(x.shape[1], -1) * x
        if inputs.z is None:
            return a.operand(y)
        z = a.of(part(inputs.z, chunk))
        return a.operand(y * z * torch.sigmoid(z))

    each_chunk(inputs, lambda chunk: part(out, chunk), formula, precision)


# --- GDN


@dataclass(frozen=True)
class Stages:
    """A call's chunks, and the results that stages pass on, with no rounding except of these results."""

    inputs: GDNInputs
    precision: Precision

    @property
    def chunks(self) -> list[Chunk]:
        return chunks_of(self.inputs)

    @property
    def operand(self) -> torch.dtype:
        return operand_dtype(self.inputs.q.dtype, self.precision)

    def piece(self, name: str, chunk: Chunk) -> torch.Tensor:
        return of_chunk(getattr(self.inputs, name), chunk, self.inputs.chunk_size, self.inputs.v.shape[2])

    def pieces(self) -> list[dict[str, torch.Tensor]]:
        """The stages' results for every chunk, in the dtypes in which they are stored."""
        inputs, results = self.inputs, []
        S = torch.zeros(inputs.v.shape[2], inputs.v.shape[3], inputs.q.shape[3], dtype=torch.float64)
        for chunk in self.chunks:
            if chunk.first:
                S = torch.zeros_like(S)
                if inputs.initial_state is not None:
                    S = inputs.initial_state[chunk.sequence].double().mT
            k, v, beta, g = (self.piece(name, chunk) for name in ("k", "v", "beta", "g"))
            g_cumsum = oracle.gate_cumsum(g)
            L = oracle.scaled_dot_kkt(k, beta, g_cumsum).float()
            A = oracle.solve_tril(L).to(self.operand)
            w, u = (tensor.to(self.operand) for tensor in oracle.recompute_w_u(A, k, v, beta, g_cumsum))
            v_new, after = oracle.chunk_state(k, w, u, g_cumsum, S)
            results.append(
                dict(g_cumsum_log2=(g_cumsum / LN_2).float(), L=L, A=A, w=w, u=u, entering=S)
                | dict(S=S.to(self.operand), v_new=v_new.to(self.operand), after=after)
            )
            S = after
        return results

    def workspaces(self, pieces: list[dict[str, torch.Tensor]], *names: str) -> Any:
        slots = (self.inputs.q.shape[0], Chunks.of(self.inputs).count)
        found = [workspace([piece[name] for piece in pieces], self.chunks, slots) for name in names]
        return found[0] if len(found) == 1 else found

    def assert_right(self, ours: torch.Tensor, formula: Callable[[Arithmetic], torch.Tensor]) -> None:
        intermediate = self.precision.intermediate_dtype(self.inputs.q.dtype)
        assert_within(ours, formula, Arithmetic(FP32, self.operand, intermediate))


def stages_of(case: GDNCase, dtype: torch.dtype, precision: Precision) -> tuple[Stages, Any, Any, Any]:
    """Also the inputs, their chunks, and the results of all stages."""
    stages = Stages(case.but(dtype=dtype).inputs(), precision)
    return stages, stages.inputs, Chunks.of(stages.inputs), stages.pieces()


def g_of(piece: dict[str, torch.Tensor]) -> torch.Tensor:
    return piece["g_cumsum_log2"].double() * LN_2


@GDN
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float64], ids=str)
def test_gate_cumsum(case: GDNCase, dtype: torch.dtype) -> None:
    g = case.inputs().g.to(dtype)
    g[:, 5], g[:, 11], g[:, 40] = 0.5, -torch.inf, -1e30
    inputs = case.inputs(g=g)
    ours = gdn.gate_cumsum(inputs.g, Chunks.of(inputs))
    for chunk in chunks_of(inputs):
        piece = of_chunk(inputs.g, chunk, inputs.chunk_size, inputs.g.shape[2])
        expected = (piece / LN_2).clamp(-160, 0).cumsum(-1)
        torch.testing.assert_close(ours[chunk.b, chunk.c].double(), expected, rtol=2**-22, atol=1e-6)


@DTYPES
@pytest.mark.parametrize("key_dim", [1, 16, 60, 100])
def test_qk_l2norm(dtype: torch.dtype, key_dim: int) -> None:
    inputs = GDNCase(batch=2, seqlen=9, key_heads=3, key_dim=key_dim, dtype=dtype).inputs()
    strided = inputs.q.transpose(1, 2).contiguous().transpose(1, 2)
    Stages(inputs, EXACT).assert_right(qk_l2norm(strided, dtype=dtype), partial(oracle.qk_l2norm, inputs.q))


@GDN
@DTYPES
@PRECISIONS
def test_scaled_dot_kkt(case: GDNCase, dtype: torch.dtype, precision: Precision) -> None:
    stages, inputs, chunks, pieces = stages_of(case, dtype, precision)
    g = stages.workspaces(pieces, "g_cumsum_log2")
    ours = gdn.scaled_dot_kkt(inputs.k, inputs.beta, g, chunks, operand=stages.operand)
    for chunk, piece in zip(stages.chunks, pieces, strict=True):
        given = (stages.piece("k", chunk), stages.piece("beta", chunk), g_of(piece))
        # blocks above the diagonal are not written
        stages.assert_right(ours[chunk.b, chunk.c].nan_to_num(0.0), partial(oracle.scaled_dot_kkt, *given))


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("kind", [{}, dict(collinear=0.99), dict(collinear=0.99, largest_beta=2.0)], ids=str)
def test_solve_tril(size: int, kind: dict[str, float]) -> None:
    """Near-collinear keys and beta near 2: entries of the inverse stay small where powers of L are huge."""
    case = GDNCase(seqlen=size, key_dim=16, l2norm=False, chunk_size=size, gate=0.0, **kind)  # type: ignore[arg-type]
    stages, _, chunks, pieces = stages_of(case, FP32, EXACT)
    L = stages.workspaces(pieces, "L")
    above = torch.ones(size // 16, size // 16).triu(1).repeat_interleave(16, 0).repeat_interleave(16, 1) > 0
    ours = gdn.solve_tril(L.masked_fill(above, torch.nan), size, chunks, operand=FP32)
    exact = oracle.solve_tril(L.double())
    assert (ours - exact).abs().max() < 2e-6 * exact.abs().max()
    assert torch.equal(ours.triu(1), torch.zeros_like(ours))


@GDN
@DTYPES
@PRECISIONS
def test_recompute_w_u(case: GDNCase, dtype: torch.dtype, precision: Precision) -> None:
    stages, inputs, chunks, pieces = stages_of(case, dtype, precision)
    A, g = stages.workspaces(pieces, "A", "g_cumsum_log2")
    w, u = gdn.recompute_w_u(A, inputs.k, inputs.v, inputs.beta, g, chunks, precision=precision)
    for chunk, piece in zip(stages.chunks, pieces, strict=True):
        given = (piece["A"], *(stages.piece(name, chunk) for name in ("k", "v", "beta")), g_of(piece))
        for i, ours in enumerate((w, u)):
            formula = partial(lambda i, given, a: oracle.recompute_w_u(*given, a=a)[i], i, given)
            stages.assert_right(ours[chunk.b, chunk.c], formula)


@GDN
@DTYPES
@PRECISIONS
def test_gdn_chunk_state(case: GDNCase, dtype: torch.dtype, precision: Precision) -> None:
    stages, inputs, chunks, pieces = stages_of(case, dtype, precision)
    w, u, g = stages.workspaces(pieces, "w", "u", "g_cumsum_log2")
    prev_states, v_new, final_states = gdn.chunk_state(
        inputs.k, w, u, g, chunks, inputs_dtype=dtype, precision=precision, initial_state=inputs.initial_state
    )
    rounding = 8 * torch.finfo(stages.operand).eps  # of every chunk's operands, from the start of the sequence
    for chunk, piece in zip(stages.chunks, pieces, strict=True):
        for ours, name in ((prev_states[chunk.b, chunk.c], "entering"), (v_new[chunk.b, chunk.c], "v_new")):
            hi = piece[name].double()
            assert torch.isfinite(ours).all()
            assert (ours.double() - hi).abs().max() <= rounding * (1 + hi.abs().max())
        if chunk.last:
            assert (final_states[chunk.sequence].mT - piece["after"]).abs().max() <= rounding * 8
    if inputs.initial_state is not None:
        assert torch.equal(final_states[0], inputs.initial_state[0]), "an empty sequence ends as it begins"


@GDN
@DTYPES
@PRECISIONS
def test_chunk_output(case: GDNCase, dtype: torch.dtype, precision: Precision) -> None:
    stages, inputs, chunks, pieces = stages_of(case, dtype, precision)
    S, v_new, g = stages.workspaces(pieces, "S", "v_new", "g_cumsum_log2")
    out = gdn.chunk_output(inputs.q, inputs.k, S, v_new, g, chunks, scale=0.3, out_dtype=dtype, precision=precision)
    for chunk, piece in zip(stages.chunks, pieces, strict=True):
        q, k = stages.piece("q", chunk), stages.piece("k", chunk)
        given = (q, k, piece["S"], piece["v_new"], g_of(piece), 0.3)
        formula = partial(lambda n, given, a: oracle.chunk_output(*given, a=a)[:, :n], chunk.length, given)
        stages.assert_right(part(out, chunk).transpose(0, 1), formula)
