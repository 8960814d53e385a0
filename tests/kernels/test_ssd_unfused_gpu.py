"""The unfused kernels on a GPU: every supported size and dtype, with whole and partial chunks."""

from dataclasses import replace

import pytest
import torch
from ssd_cases import DTYPES, EXACT, PRECISIONS, RELAXED, Case, assert_close, cut, sequences

from ssdprof.kernels import get
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.inputs import SSDOutput
from ssdprof.kernels.ssd.unfused import run as run_unfused
from ssdprof.measure.accuracy import assert_passes

pytestmark = pytest.mark.gpu

REAL = Case(device="cuda", seqlen=1000, heads=8, headdim=64, dstate=128, chunk_size=256, dtype=torch.bfloat16)
PACKED = replace(REAL, lengths=(256, 0, 1, 513, 100, 0), initial_states=True)
MODELS = {
    "mamba2-2.7b": replace(REAL, seqlen=4000, heads=80),
    "granite-4.0-h-small": replace(REAL, seqlen=4000, heads=128),
    "nemotron-3-nano": replace(REAL, seqlen=4000, heads=64, groups=8, chunk_size=128),
}


def passes(case: Case, precision: Precision = EXACT) -> None:
    inputs = case.inputs()
    assert_passes(run_unfused(inputs, precision), inputs, precision)


@pytest.mark.parametrize("headdim", [32, 64, 80, 96, 128])
@pytest.mark.parametrize("dstate", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_and_states(headdim: int, dstate: int, dtype: torch.dtype) -> None:
    passes(replace(REAL, headdim=headdim, dstate=dstate, dtype=dtype))


@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_and_groups(chunk_size: int, groups: int, dtype: torch.dtype) -> None:
    passes(replace(REAL, chunk_size=chunk_size, groups=groups, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda p: f"{p.intermediates}-{p.state_dtype}")
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_precisions(dtype: torch.dtype, precision: Precision, packed: bool) -> None:
    passes(replace(PACKED if packed else REAL, dtype=dtype), precision)


@pytest.mark.parametrize("seqlen", [1, 15, 64, 255, 256, 257, 2049])
def test_lengths(seqlen: int) -> None:
    passes(replace(REAL, seqlen=seqlen, batch=3, initial_states=True))


@pytest.mark.parametrize("skip", ["", "(h)", "(h, p)"])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("headdim", [64, 80])
def test_skip_and_gate(skip: str, gate: bool, headdim: int) -> None:
    passes(replace(REAL, skip=skip, gate=gate, headdim=headdim, dt_limit=(0.01, 0.2)))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", [EXACT, RELAXED], ids=["exact", "relaxed"])
def test_models(model: str, precision: Precision) -> None:
    passes(MODELS[model], precision)


def test_many_short_sequences() -> None:
    passes(replace(REAL, lengths=tuple(i % 67 for i in range(300)), initial_states=True))


def test_packed_sequences_are_bitwise_what_they_are_alone() -> None:
    inputs = PACKED.inputs()
    packed = run_unfused(inputs)
    alone = [run_unfused(one) for one in sequences(inputs)]
    assert torch.equal(packed.out, torch.cat([output.out for output in alone], 1))
    assert torch.equal(packed.final_states[[0, 2, 3, 4]], torch.cat([output.final_states for output in alone]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_repeated_runs_and_permuted_batches_agree_in_every_bit(dtype: torch.dtype) -> None:
    inputs = replace(REAL, batch=3, dtype=dtype).inputs()
    order = torch.tensor([2, 0, 1], device="cuda")
    permuted = replace(inputs, **{name: getattr(inputs, name)[order] for name in ("x", "dt", "B", "C")})
    first, again, moved = run_unfused(inputs), run_unfused(inputs), run_unfused(permuted)
    assert torch.equal(first.out, again.out)
    assert torch.equal(first.out[order], moved.out)
    assert torch.equal(first.final_states[order], moved.final_states)


@pytest.mark.parametrize(("dt", "A"), [(0.0, -1.0), (1e4, -16.0), (1e30, -16.0), (0.5, 0.0), (1e-38, -1e-38)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extreme_decays_stay_finite_and_right(dt: float, A: float, dtype: torch.dtype) -> None:
    inputs = replace(REAL, seqlen=300, dtype=dtype).inputs(dt_bias=None, dt_softplus=False)
    inputs = replace(inputs, A=torch.full_like(inputs.A, A))
    inputs.dt.fill_(dt)
    inputs.x.mul_(1e-30 if dt > 1e10 else 1)
    assert_passes(run_unfused(inputs), inputs, EXACT)


@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C", "D", "dt_bias", "initial_states", "z"])
def test_nan_is_not_swallowed(name: str) -> None:
    """A GPU's minimum and maximum drop NaN by default; the interpreter's never do."""
    inputs = replace(REAL, seqlen=300, initial_states=True, gate=True, dt_limit=(0.0, 0.1)).inputs()
    getattr(inputs, name).fill_(torch.nan)
    assert not torch.isfinite(run_unfused(inputs).out).any()


@pytest.mark.parametrize("case", [REAL, PACKED], ids=["batch", "packed"])
def test_the_host_never_waits(case: Case) -> None:
    inputs = case.inputs()
    run_unfused(inputs)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_unfused(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", [REAL, PACKED], ids=["batch", "packed"])
def test_a_graph_replays_it(case: Case) -> None:
    inputs = case.inputs()
    expected = run_unfused(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run_unfused(inputs)
    output.out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(output.out, expected.out)
    assert torch.equal(output.final_states, expected.final_states)


@pytest.mark.parametrize(
    "case",
    [
        MODELS["mamba2-2.7b"],
        replace(MODELS["nemotron-3-nano"], lengths=(3000, 1, 500)),
        replace(REAL, groups=8, headdim=32, dstate=16),  # CB is the largest
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", [EXACT, RELAXED], ids=["exact", "relaxed"])
def test_the_plan_knows_the_workspace(case: Case, precision: Precision) -> None:
    inputs = case.inputs()
    run_unfused(inputs, precision)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = run_unfused(inputs, precision)
    peak = torch.cuda.max_memory_allocated() - before
    outputs = sum(tensor.numel() * tensor.element_size() for tensor in output)
    planned = get("ssd", "unfused").plan(inputs, precision).workspace_bytes
    assert peak <= (planned + outputs) * 1.01
    assert planned <= peak


@pytest.mark.usefixtures("much_gpu_memory")
def test_offsets_of_inputs_pass_2_to_the_31() -> None:
    """A row stride of 8M elements: 5 GB.  The same values without gaps give the same bits."""
    near = replace(REAL, seqlen=300, heads=4, gate=True).inputs()
    rows, row = 300, 1 << 23
    assert rows * row > 2**31
    memory = torch.zeros(rows, row, dtype=torch.bfloat16, device="cuda")

    def far(tensor: torch.Tensor, column: int) -> torch.Tensor:
        flat = tensor[0].flatten(1)
        view = memory[:, column : column + flat.shape[1]]
        view.copy_(flat)
        return view.reshape(1, rows, *tensor.shape[2:])

    names = ("x", "z", "B", "C", "dt")
    inputs = replace(near, **{name: far(getattr(near, name), i << 20) for i, name in enumerate(names)})
    assert inputs.x.stride(1) == row
    ours, theirs = run_unfused(inputs), run_unfused(near)
    assert torch.equal(ours.out, theirs.out)
    assert torch.equal(ours.final_states, theirs.final_states)


@pytest.mark.usefixtures("much_gpu_memory")
def test_offsets_of_outputs_and_states_pass_2_to_the_31() -> None:
    """262,244 positions of 128 heads of 64: 2^31 elements and more of x, of out and of states.  About 35 GB."""
    case = replace(REAL, seqlen=(1 << 18) + 100, heads=128, chunk_size=128)
    inputs = case.inputs()
    assert inputs.x.numel() > 2**31
    start = case.seqlen - 1000
    first = run_unfused(cut(inputs, 0, start))
    assert first.out.isfinite().all()
    carried = first.final_states
    del first
    whole = run_unfused(inputs)
    last = run_unfused(cut(inputs, start, case.seqlen, initial_states=carried))
    assert_close(SSDOutput(whole.out[:, start:].clone(), whole.final_states), last, 2e-2)  # a few roundings to bf16
