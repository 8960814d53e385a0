"""Each unfused stage against the formula in its docstring, written out in torch, chunk after chunk.

A formula is evaluated twice: `hi` in fp64, and `lo` in fp32 with the roundings that the stage's precision has.  The
stage passes if max|ours - hi| <= 2 * (max|lo - hi| + eps * max|hi|), eps of the stage's output dtype.
"""

import pytest
import torch
from ssd_cases import EXACT, RELAXED, Case
from stage_formulas import Arithmetic, Chunk, Formula, assert_within, chunks_of

from ssdprof.kernels.chunks import Chunks
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.kernels.ssd.unfused import bmm_chunk, chunk_cumsum, chunk_scan, chunk_state, state_passing

LN_2 = torch.log(torch.tensor(2.0, dtype=torch.float64))
BATCH = Case(batch=2, seqlen=75, heads=4, headdim=24, dstate=20, groups=2, gate=True, skip="(h, p)")
PACKED = Case(lengths=(0, 33, 1, 0, 41, 0), heads=4, headdim=16, dstate=20, groups=2, initial_states=True)
CASES = pytest.mark.parametrize("case", [BATCH, PACKED], ids=["batch", "packed"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
PRECISIONS = pytest.mark.parametrize("precision", [EXACT, RELAXED], ids=["exact", "relaxed"])


def assert_stage(ours: torch.Tensor, formula: Formula, inputs: SSDInputs, precision: Precision = EXACT) -> None:
    dtype = inputs.x.dtype
    assert_within(ours, formula, Arithmetic(torch.float32, dtype, precision.intermediate_dtype(dtype)))


def gate(inputs: SSDInputs, chunks: Chunks) -> tuple[torch.Tensor, torch.Tensor]:
    return chunk_cumsum(inputs.dt, inputs.A, chunks, dt_bias=inputs.dt_bias, dt_softplus=True)


def per_head(tensor: torch.Tensor, inputs: SSDInputs) -> torch.Tensor:
    """(q, g, n) -> (h, q, n)"""
    return tensor.repeat_interleave(inputs.heads_per_group, 1).transpose(0, 1)


@pytest.mark.parametrize("lengths", [(5,), (0,) * 3 + (1,), (32, 0, 64, 33, 0, 0), (1,) * 130])
def test_chunk_table(lengths: tuple[int, ...]) -> None:
    inputs = Case(lengths=lengths, heads=1).inputs()
    chunks = Chunks.of(inputs)
    expected = chunks_of(inputs)
    assert chunks.spans is not None
    assert chunks.bounds is not None
    assert chunks.spans[: len(expected)].tolist() == [[chunk.start, chunk.stop] for chunk in expected]
    unused = chunks.spans[len(expected) :]
    assert len(unused) > 0
    assert torch.equal(unused[:, 0], unused[:, 1]), "a chunk that nobody needs is not empty"
    sequences = [chunk.sequence for chunk in expected]
    assert chunks.bounds.diff().tolist() == [sequences.count(i) for i in range(len(lengths))]


@CASES
@pytest.mark.parametrize("softplus", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_chunk_cumsum(case: Case, softplus: bool, bias: bool) -> None:
    inputs = case.inputs()
    dt_bias = inputs.dt_bias if bias else None
    chunks, limit = Chunks.of(inputs), (0.02, 0.7)
    dt, dA_cumsum_log2 = chunk_cumsum(
        inputs.dt, inputs.A, chunks, dt_bias=dt_bias, dt_softplus=softplus, dt_limit=limit
    )
    for chunk in chunks_of(inputs):

        def step(a: Arithmetic, chunk: Chunk = chunk) -> torch.Tensor:
            raw = a.of(inputs.dt[chunk.b, chunk.start : chunk.stop]).T
            raw = raw if dt_bias is None else raw + a.of(dt_bias)[:, None]
            return (torch.log1p(torch.exp(raw)) if softplus else raw).clamp(*limit)

        def decay(a: Arithmetic, step: Formula = step) -> torch.Tensor:
            return (step(a) * a.of(inputs.A)[:, None] / a.of(LN_2)).cumsum(-1)

        ours = dt[chunk.b, :, chunk.c]
        assert_stage(ours[:, : chunk.length], step, inputs)
        assert torch.equal(ours[:, chunk.length :], torch.zeros_like(ours[:, chunk.length :])), "a step past the end"
        ours = dA_cumsum_log2[chunk.b, :, chunk.c]
        assert_stage(ours[:, : chunk.length], decay, inputs)
        assert (ours[:, chunk.length :] == ours[:, chunk.length - 1, None]).all(), "decay past the end"


def test_softplus_keeps_its_digits() -> None:
    """If exp(dt) is far below 1, a direct computation of log(1 + exp(dt)) loses all digits."""
    inputs = Case(seqlen=9, heads=1).inputs(dt_bias=None)
    values = torch.tensor([-80.0, -30.0, -17.0, -8.0, 0.0, 8.0, 19.99, 20.01, 100.0])
    inputs.dt.copy_(values[None, :, None])
    dt, _ = chunk_cumsum(inputs.dt, inputs.A, Chunks.of(inputs), dt_softplus=True)
    expected = torch.log1p(torch.exp(values.double()))
    torch.testing.assert_close(dt[0, 0, 0, :9].double(), expected, rtol=2e-6, atol=0)


@CASES
@DTYPES
@PRECISIONS
def test_chunk_state(case: Case, dtype: torch.dtype, precision: Precision) -> None:
    inputs = Case(**{**vars(case), "dtype": dtype}).inputs()
    chunks = Chunks.of(inputs)
    dt, dA = gate(inputs, chunks)
    states = chunk_state(inputs.x, inputs.B, dt, dA, chunks, precision=precision)
    for chunk in chunks_of(inputs):

        def formula(a: Arithmetic, chunk: Chunk = chunk) -> torch.Tensor:
            log2_decay, step = (a.of(t[chunk.b, :, chunk.c, : chunk.length]) for t in (dA, dt))
            weight = a.intermediate(torch.exp2(log2_decay[:, -1:] - log2_decay) * step)  # (h, q)
            x = a.of(inputs.x[chunk.b, chunk.start : chunk.stop]).transpose(0, 1)  # (h, q, p)
            B = per_head(a.of(inputs.B[chunk.b, chunk.start : chunk.stop]), inputs)
            return a.operand(a.intermediate(a.intermediate(x) * weight[..., None])).mT @ B

        assert_stage(states[chunk.b, chunk.c], formula, inputs, precision)


@CASES
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", [True, False])
def test_state_passing(case: Case, state_dtype: torch.dtype, given: bool) -> None:
    inputs = Case(**{**vars(case), "initial_states": given}).inputs()
    chunks, chunk_list = Chunks.of(inputs), chunks_of(inputs)
    _, dA = gate(inputs, chunks)
    states = torch.randn(dA.shape[0], chunks.count, *inputs.x.shape[2:], inputs.B.shape[3])
    prev_states, final_states = state_passing(
        states, dA, chunks, initial_states=inputs.initial_states, state_dtype=state_dtype
    )
    assert prev_states.dtype == state_dtype
    assert final_states.dtype == torch.float32
    expected = torch.zeros_like(final_states) if inputs.initial_states is None else inputs.initial_states
    expected = expected.double()
    for chunk in chunk_list:
        entering = expected[chunk.sequence]
        ours = prev_states[chunk.b, chunk.c]
        torch.testing.assert_close(ours.double(), entering, rtol=torch.finfo(state_dtype).eps, atol=1e-6)
        decay = torch.exp2(dA[chunk.b, :, chunk.c, -1].double())[:, None, None]
        expected[chunk.sequence] = entering * decay + states[chunk.b, chunk.c]
    torch.testing.assert_close(final_states.double(), expected, rtol=1e-6, atol=1e-6)


@CASES
@DTYPES
@PRECISIONS
def test_bmm_chunk(case: Case, dtype: torch.dtype, precision: Precision) -> None:
    inputs = Case(**{**vars(case), "dtype": dtype}).inputs()
    CB = bmm_chunk(inputs.C, inputs.B, Chunks.of(inputs), precision=precision)
    assert CB.dtype == precision.intermediate_dtype(dtype)
    for chunk in chunks_of(inputs):

        def formula(a: Arithmetic, chunk: Chunk = chunk) -> torch.Tensor:
            C, B = (a.of(t[chunk.b, chunk.start : chunk.stop]).transpose(0, 1) for t in (inputs.C, inputs.B))
            return (C @ B.mT).tril()

        ours = CB[chunk.b, chunk.c, :, : chunk.length, : chunk.length]
        causal = torch.ones(chunk.length, chunk.length, dtype=torch.bool).tril()
        assert_stage(torch.where(causal, ours, 0), formula, inputs, precision)


@CASES
@DTYPES
@PRECISIONS
def test_chunk_scan(case: Case, dtype: torch.dtype, precision: Precision) -> None:
    inputs = Case(**{**vars(case), "dtype": dtype}).inputs()
    chunks = Chunks.of(inputs)
    dt, dA = gate(inputs, chunks)
    CB = bmm_chunk(inputs.C, inputs.B, chunks, precision=precision)
    shape = (dt.shape[0], chunks.count, *inputs.x.shape[2:], inputs.B.shape[3])
    prev_states = torch.randn(shape).to(precision.state_dtype)
    out = chunk_scan(inputs, dt, dA, prev_states, CB, chunks)
    for chunk in chunks_of(inputs):

        def formula(a: Arithmetic, chunk: Chunk = chunk) -> torch.Tensor:
            x, C, z = (
                None if t is None else a.of(t[chunk.b, chunk.start : chunk.stop])
                for t in (inputs.x, inputs.C, inputs.z)
            )
            assert x is not None
            assert C is not None
            length, state = chunk.length, a.operand(a.of(prev_states[chunk.b, chunk.c]))
            log2_decay, step = (a.of(t[chunk.b, :, chunk.c, :length]) for t in (dA, dt))
            from_before = (per_head(C, inputs) @ state.mT) * torch.exp2(log2_decay)[..., None]
            scores = a.of(CB[chunk.b, chunk.c, :, :length, :length]).repeat_interleave(inputs.heads_per_group, 0)
            decay = torch.exp2((log2_decay[:, :, None] - log2_decay[:, None, :]).clamp(max=0))
            scores = a.operand(a.intermediate(scores * a.intermediate(decay * step[:, None, :])))
            causal = torch.ones(length, length, dtype=torch.bool).tril()
            out = from_before + torch.where(causal, scores, 0) @ x.transpose(0, 1)  # (h, q, p)
            assert inputs.D is not None
            out = out.transpose(0, 1) + a.of(inputs.D).reshape(x.shape[1], -1) * x
            return a.operand(out if z is None else out * z * torch.sigmoid(z))

        assert_stage(out[chunk.b, chunk.start : chunk.stop], formula, inputs, precision)
