"""The fused kernel on a GPU: what the interpreter, which runs one program after the other, cannot show."""

from dataclasses import replace

import pytest
import torch
from ssd_cases import DTYPES, EXACT, PRECISIONS, RELAXED, Case
from test_fused import CASES, TINY, assert_bitwise, fused

from ssdprof.kernels import Precision, ssd_fused
from ssdprof.kernels.ssd.fused import run
from ssdprof.kernels.ssd.fused_config import FusedConfig
from ssdprof.kernels.ssd.fused_portable import ssd_fused_portable
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.measure.accuracy import assert_passes

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
MAMBA2 = dict(heads=80, headdim=64, dstate=128, dtype=BF16, device="cuda")
# one chunk per segment: as many waits as there can be
NERVOUS = FusedConfig(max_segments=10**6, min_chunks=1, max_chunks=1)
MODELS = {
    "mamba2-2.7b": dict(heads=80, headdim=64, dstate=128),
    "granite-4.0-h-small": dict(heads=128, headdim=64, dstate=128),
    "nemotron-3-nano": dict(heads=64, headdim=64, dstate=128, groups=8),
    "zamba2": dict(heads=16, headdim=64, dstate=64, groups=2),
    "p 80": dict(heads=8, headdim=80, dstate=128),
    "p 96": dict(heads=8, headdim=96, dstate=16),
    "p 128, n 256": dict(heads=8, headdim=128, dstate=256, groups=8),
    "p 32": dict(heads=8, headdim=32, dstate=128),
}


def cuda(inputs: SSDInputs) -> SSDInputs:
    tensors = {name: value.cuda() for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    return replace(inputs, **tensors)


@pytest.mark.parametrize("config", [None, TINY, replace(TINY, p_rows=False)], ids=["chosen", "tiny", "tiny, n rows"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_interpreters_cases(case: Case, config: FusedConfig | None) -> None:
    inputs = cuda(case.inputs())
    assert_passes(fused(inputs, EXACT, config), inputs, EXACT)


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_precisions(dtype: torch.dtype, precision: Precision) -> None:
    inputs = Case(**MAMBA2 | dict(heads=8, dtype=dtype), seqlen=5000, gate=True, initial_states=True).inputs()
    assert_passes(fused(inputs, precision), inputs, precision)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_sizes_of_models(model: str, dtype: torch.dtype) -> None:
    inputs = Case(seqlen=3333, batch=2, **MODELS[model], dtype=dtype, device="cuda").inputs()
    assert_passes(fused(inputs), inputs, EXACT)


@pytest.mark.parametrize("model", ["mamba2-2.7b", "nemotron-3-nano", "p 80"])
def test_packed_sequences_of_real_sizes(model: str) -> None:
    lengths = (1024, 0, 4000, 1, 63, 2500, 0)
    inputs = Case(lengths=lengths, initial_states=True, **MODELS[model], dtype=BF16, device="cuda").inputs()
    assert_passes(fused(inputs), inputs, EXACT)


@pytest.mark.parametrize("step", [0.0, 1e-30, 50.0, 1e4, 1e30], ids=str)
def test_steps_of_any_size(step: float) -> None:
    inputs = Case(seqlen=5000, heads=4, headdim=64, dstate=128, dt_limit=(step, step), device="cuda").inputs()
    assert_passes(fused(inputs), inputs, EXACT)


@pytest.mark.parametrize("name", ["x", "dt", "B", "C", "A", "initial_states"])
def test_nan_is_not_swallowed(name: str) -> None:
    inputs = Case(seqlen=40, initial_states=True, dt_limit=(0.0, 0.1), device="cuda").inputs()
    getattr(inputs, name)[-1:] = torch.nan
    assert not torch.isfinite(fused(inputs, EXACT, TINY).out).all()


def test_packed_sequences_do_not_meet() -> None:
    case = Case(lengths=(1000, 3001, 70), **MODELS["p 80"], gate=True, initial_states=True, dtype=BF16, device="cuda")
    inputs, spoilt = case.inputs(), case.inputs()
    for tensor in (spoilt.x, spoilt.dt, spoilt.B, spoilt.C, spoilt.z):
        assert tensor is not None
        tensor[:, :1000] = torch.nan
        tensor[:, 4001:] = torch.inf
    ours, theirs = (
        SSDOutput(output.out[:, 1000:4001], output.final_states[1]) for output in (fused(inputs), fused(spoilt))
    )
    assert_bitwise(theirs, ours)


# --- the same, again and again


@pytest.mark.parametrize("precision", [EXACT, RELAXED], ids=str)
@pytest.mark.parametrize("config", [None, NERVOUS], ids=["chosen", "nervous"])
def test_bitwise_the_same_in_every_call(config: FusedConfig | None, precision: Precision) -> None:
    inputs = Case(seqlen=16384, **MAMBA2).inputs()
    first = fused(inputs, precision, config)
    for _ in range(20):
        assert_bitwise(fused(inputs, precision, config), first)


def test_a_sequence_is_the_same_in_any_batch() -> None:
    inputs = Case(batch=16, seqlen=2000, **MAMBA2).inputs()
    whole = run(inputs, batch_invariant=True)
    alone = run(
        replace(inputs, **{name: getattr(inputs, name)[5:6] for name in ("x", "dt", "B", "C")}), batch_invariant=True
    )
    assert_bitwise(alone, SSDOutput(*(tensor[5:6] for tensor in whole)))


# --- progress


def test_many_more_programs_than_fit() -> None:
    """1,024 segments of 80 heads: 81,920 programs, every one of which waits for another."""
    inputs = Case(seqlen=65536, **MAMBA2).inputs()
    assert_passes(fused(inputs, EXACT, NERVOUS), inputs, EXACT)


def test_beside_another_stream_that_fills_the_gpu() -> None:
    inputs = Case(seqlen=16384, **MAMBA2).inputs()
    alone = fused(inputs, EXACT, NERVOUS)
    matrix = torch.randn(8192, 8192, dtype=BF16, device="cuda")
    ours, theirs = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(theirs):
        for _ in range(100):
            matrix @ matrix
    with torch.cuda.stream(ours):
        outputs = [fused(inputs, EXACT, NERVOUS) for _ in range(10)]
    torch.cuda.synchronize()
    for output in outputs:
        assert_bitwise(output, alone)


def test_two_calls_at_once() -> None:
    inputs = Case(seqlen=16384, **MAMBA2).inputs()
    alone = fused(inputs, EXACT, NERVOUS)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    outputs = []
    for stream in streams * 3:
        with torch.cuda.stream(stream):
            outputs.append(fused(inputs, EXACT, NERVOUS))
    torch.cuda.synchronize()
    for output in outputs:
        assert_bitwise(output, alone)


# --- graphs and compilers


@pytest.mark.parametrize("lengths", [(), (5000, 0, 1384)], ids=["batch", "packed"])
def test_in_a_cuda_graph(lengths: tuple[int, ...]) -> None:
    case = Case(seqlen=6384, lengths=lengths, **MAMBA2)
    inputs, others = case.inputs(), replace(case, seed=1).inputs()
    fused(inputs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = fused(inputs)
    names = ("x", "dt", "B", "C")
    for source in (inputs, others, inputs):
        for name in names:
            getattr(inputs, name).copy_(getattr(source, name).clone())
        expected = fused(inputs)
        for _ in range(3):
            output.out.fill_(torch.nan)
            output.final_states.fill_(torch.nan)
            graph.replay()
            assert_bitwise(output, expected)


def test_compiles_as_a_full_graph() -> None:
    inputs = Case(seqlen=1000, **MAMBA2).inputs()

    def layer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = ssd_fused(
            x.relu(), inputs.dt, inputs.A, inputs.B, inputs.C, D=inputs.D, dt_bias=inputs.dt_bias, dt_softplus=True
        )
        return 2 * output.out, output.final_states

    compiled = torch.compile(layer, fullgraph=True)
    assert_bitwise(SSDOutput(*compiled(inputs.x)), SSDOutput(*layer(inputs.x)))


def test_no_synchronisation() -> None:
    inputs = Case(lengths=(5000, 1384), **MAMBA2).inputs()
    fused(inputs)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- offsets past 2^31 elements


@pytest.mark.parametrize(("seqlen", "stride"), [(5000, 500_000), (70, 1 << 26)], ids=["of chunks", "within a chunk"])
def test_offsets_of_a_wide_projection(seqlen: int, stride: int) -> None:
    """x is a few columns of a matrix with more than 2^31 elements."""
    assert (seqlen - 1) * stride > 2**31
    inputs = Case(seqlen=seqlen, heads=2, headdim=64, dstate=64, dtype=BF16, device="cuda").inputs()
    wide = torch.zeros((seqlen - 1) * stride + 256, dtype=BF16, device="cuda")
    x = wide.as_strided((1, seqlen, 2, 64), (wide.numel(), stride, 64, 1)).copy_(inputs.x)
    expected = fused(inputs)
    assert_bitwise(fused(replace(inputs, x=x)), expected)


def test_offsets_of_a_large_output() -> None:
    """The second sequence starts past 2^31 elements."""
    case = Case(lengths=(420_000, 300), **MAMBA2)
    inputs = case.inputs()
    assert inputs.x[0, :420_000].numel() > 2**31
    whole = fused(inputs)
    tail = {name: getattr(inputs, name)[:, 420_000:].clone() for name in ("x", "dt", "B", "C")}
    alone = fused(replace(inputs, **tail, cu_seqlens=torch.tensor([0, 300], device="cuda")))
    assert_bitwise(SSDOutput(whole.out[:, 420_000:], whole.final_states[1:]), alone)


@pytest.mark.parametrize("config", [TINY, NERVOUS], ids=["tiny", "nervous"])
def test_configurations_agree(config: FusedConfig) -> None:
    inputs = Case(**MAMBA2 | dict(heads=4), seqlen=3000).inputs()
    assert_passes(ssd_fused_portable(inputs, EXACT, config=config), inputs, EXACT)
