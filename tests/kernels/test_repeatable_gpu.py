"""The same inputs give the same bits: in a repeated call, in any batch or pack, in a graph, in a compiled function.
The host never waits, and a call allocates the bytes of its plan."""

from dataclasses import replace

import pytest
import torch
from fused_kernels import CHOSEN, EVERY_KERNEL, ON_HOPPER, Kernel, hopper_by_default
from ssd_cases import EXACT, RELAXED, Case, sequences
from test_fused import assert_bitwise, fused

from ssdprof.kernels import Precision, get, ssd_fused
from ssdprof.kernels.ssd.fused import run
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
MAMBA2 = dict(heads=80, headdim=64, dstate=128, dtype=BF16, device="cuda")
PACKED = Case(lengths=(5000, 0, 1384, 1, 63), initial_states=True, **MAMBA2)
TOKENS = ("x", "dt", "B", "C")


@pytest.mark.parametrize("precision", [EXACT, RELAXED], ids=str)
@pytest.mark.parametrize("kernel", EVERY_KERNEL)
def test_a_hundred_times(kernel: Kernel, precision: Precision) -> None:
    inputs = Case(seqlen=16384, **MAMBA2).inputs()
    first = kernel(inputs, precision)
    for _ in range(100):
        assert_bitwise(kernel(inputs, precision), first)


@pytest.mark.parametrize("gate", [False, True], ids=["hopper on Hopper", "portable"])
@pytest.mark.parametrize("seqlen", [1, 100, 2000, 20000])
def test_a_row_of_a_batch_is_what_it_is_alone(seqlen: int, gate: bool) -> None:
    """With `batch_invariant`.  Without it, the Hopper kernel cuts large batches into longer segments."""
    inputs = Case(batch=9, seqlen=seqlen, gate=gate, **MAMBA2).inputs()
    whole = run(inputs, batch_invariant=True)
    names = (*TOKENS, "z") if gate else TOKENS
    row = replace(inputs, **{name: getattr(inputs, name)[5:6] for name in names})
    assert_bitwise(run(row, batch_invariant=True), SSDOutput(*(tensor[5:6] for tensor in whole)))


@pytest.mark.parametrize(("dstate", "precision"), [(128, RELAXED), (256, EXACT), (256, RELAXED)], ids=str)
@pytest.mark.parametrize("seqlen", [100, 2000, 20000])
def test_a_row_of_a_batch_is_what_it_is_alone_also_relaxed_and_with_n_256(
    seqlen: int, dstate: int, precision: Precision
) -> None:
    """With a number of heads that is divided into equal shares without `batch_invariant`."""
    inputs = Case(batch=9, seqlen=seqlen, initial_states=True, **MAMBA2 | dict(heads=32, dstate=dstate)).inputs()
    whole = run(inputs, precision, batch_invariant=True)
    row = replace(inputs, **{name: getattr(inputs, name)[5:6] for name in (*TOKENS, "initial_states")})
    alone = run(row, precision, batch_invariant=True)
    assert_bitwise(alone, SSDOutput(*(tensor[5:6] for tensor in whole)))


@pytest.mark.parametrize("kernel", EVERY_KERNEL)
def test_a_packed_sequence_is_what_it_is_packed_alone(kernel: Kernel) -> None:
    inputs = PACKED.inputs()
    packed = kernel(inputs)
    outputs = []
    for one in sequences(inputs):
        bounds = torch.tensor([0, one.x.shape[1]], device="cuda", dtype=torch.int32)
        outputs.append(kernel(replace(one, cu_seqlens=bounds)))
    alone = SSDOutput(
        torch.cat([output.out for output in outputs], 1), torch.cat([output.final_states for output in outputs])
    )
    assert_bitwise(SSDOutput(packed.out, packed.final_states[[0, 2, 3, 4]]), alone)
    assert inputs.initial_states is not None
    assert torch.equal(packed.final_states[1], inputs.initial_states[1])


@pytest.mark.parametrize("kernel", CHOSEN)
@pytest.mark.parametrize("case", [Case(seqlen=6384, **MAMBA2), PACKED], ids=["batch", "packed"])
def test_a_graph_replays_it_on_new_inputs(case: Case, kernel: Kernel) -> None:
    assert_replays(case, kernel)


@ON_HOPPER
@pytest.mark.parametrize("dstate", [128, 256])
def test_a_graph_replays_equal_shares_on_new_inputs(dstate: int) -> None:
    """States and flags that programs exchange are valid for one replay only."""
    assert_replays(Case(batch=5, seqlen=1000, **MAMBA2 | dict(dstate=dstate)), hopper_by_default)


def assert_replays(case: Case, kernel: Kernel) -> None:
    inputs, others = case.inputs(), replace(case, seed=1).inputs()
    kernel(inputs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = kernel(inputs)
    for source in (inputs, others, inputs):
        for name in TOKENS:
            getattr(inputs, name).copy_(getattr(source, name).clone())
        expected = kernel(inputs)
        for _ in range(3):
            output.out.fill_(torch.nan)
            output.final_states.fill_(torch.nan)
            graph.replay()
            assert_bitwise(output, expected)


@pytest.mark.parametrize("gate", [False, True], ids=["hopper on Hopper", "portable"])
def test_compiles_as_a_full_graph(gate: bool) -> None:
    inputs = Case(seqlen=1000, gate=gate, **MAMBA2).inputs()

    def layer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = ssd_fused(
            x.relu(), inputs.dt, inputs.A, inputs.B, inputs.C,
            D=inputs.D, z=inputs.z, dt_bias=inputs.dt_bias, dt_softplus=True,
        )  # fmt: skip
        return 2 * output.out, output.final_states

    compiled = torch.compile(layer, fullgraph=True)
    assert_bitwise(SSDOutput(*compiled(inputs.x)), SSDOutput(*layer(inputs.x)))


@pytest.mark.parametrize("gate", [False, True], ids=["hopper on Hopper", "portable"])
@pytest.mark.parametrize("case", [Case(seqlen=6384, **MAMBA2), PACKED], ids=["batch", "packed"])
def test_the_host_never_waits(case: Case, gate: bool) -> None:
    inputs = replace(case, gate=gate).inputs()
    fused(inputs)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", [EXACT, RELAXED], ids=str)
@pytest.mark.parametrize("gate", [False, True], ids=["hopper on Hopper", "portable"])
@pytest.mark.parametrize("case", [Case(batch=2, seqlen=16384, **MAMBA2), Case(seqlen=100, **MAMBA2), PACKED], ids=str)
def test_a_call_allocates_what_the_plan_says(case: Case, gate: bool, precision: Precision) -> None:
    inputs = replace(case, gate=gate).inputs()
    implementation = get("ssd", "fused")
    implementation.run(inputs, precision)  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    output = implementation.run(inputs, precision)
    workspace = requested("peak") - before - sum(tensor.nbytes for tensor in output)
    assert workspace == implementation.plan(inputs, precision).workspace_bytes


def requested(what: str) -> int:
    """Bytes requested from torch's allocator, which allocates more."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{what}"])


def test_the_hopper_kernel_allocates_a_state_and_flags_for_each_segment_but_the_last_and_no_more() -> None:
    inputs: SSDInputs = Case(seqlen=131072, **MAMBA2).inputs()
    plan = get("ssd", "fused").plan
    if plan(inputs, EXACT).variant != "hopper":
        pytest.skip("not a Hopper GPU")
    for precision, itemsize in ((EXACT, 4), (RELAXED, 2)):
        workspace = plan(inputs, precision).workspace_bytes
        slots, rest = divmod(workspace, 80 * (64 * 128 * itemsize + 32))
        assert 0 < slots < 16
        assert rest == 32  # the ticket counter counter
        assert workspace < inputs.x.nbytes / 50
