"""What every kernel promises about calls on a GPU: the same bits each time, in a graph, beside
other work; no waits of the host; the bytes of the plan; an end beside other work.  Subnormal and
large numbers, which no ordinary layer has.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import (
    BF16,
    EXACT,
    FP32,
    RELAXED,
    GDNCase,
    KDACase,
    SSDCase,
    assert_bitwise,
    rows,
    tokens_of,
    with_steps,
)
from targets import (
    GDN_ON_HOPPER,
    KDA_HOPPER,
    ON_HOPPER,
    SSD_CHOSEN,
    SSD_EVERY,
    SSD_FINE,
    TARGETS,
    Target,
    gdn_hopper_by,
    targets,
)
from test_contract_oracle import LONG_CUT, LONG_PARTS
from verdict import assert_passes

from ssdprof.kernels import Precision, get
from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig
from ssdprof.kernels.ssd.fused import run
from ssdprof.kernels.ssd.inputs import SSDInputs

pytestmark = pytest.mark.gpu

MAMBA2 = SSDCase(
    heads=80, headdim=64, dstate=128, chunk_size=256, dtype=BF16, device="cuda", seqlen=16384
)
PACKED = MAMBA2.but(lengths=(5000, 0, 1384, 1, 63), initial_states=True)
QWEN = GDNCase(**GDN_ON_HOPPER | dict(key_heads=16, gate=1e-3), device="cuda", seqlen=4096)
# 160 programs of whole sequences and heads
KIMI = KDACase(
    batch=5, seqlen=1024, key_heads=32, key_dim=128, value_dim=128, dtype=BF16, device="cuda"
)
EXACT_AND_RELAXED = pytest.mark.parametrize("precision", [EXACT, RELAXED], ids=str)


def on_parts(segment: int) -> Target:
    config = GDNHopperConfig(segment=segment, transition_parts=2, longest_first_pass=segment - 1)
    return Target("gdn", gdn_hopper_by(config), device="cuda")


def long(kernel: Target):
    """A call in several waves of programs."""
    return {"ssd": MAMBA2, "gdn": QWEN, "kda": KIMI}[kernel.operator]


@EXACT_AND_RELAXED
@targets(
    gpu=(
        *SSD_EVERY,
        "ssd unfused",
        "gdn unfused",
        "gdn first passes",
        "gdn parts",
        "gdn fused",
        *KDA_HOPPER,
    )
)
def test_a_hundred_times(kernel: Target, precision: Precision):
    cases = [long(kernel), kernel.case(lengths=(40, 0, 3), initial_states=True)]
    cases += [MAMBA2.but(dstate=256)] if kernel.run is TARGETS["ssd hopper"].run else []
    if kernel.run is TARGETS["gdn parts"].run:
        kernel = on_parts(16)
        cases = [QWEN]
    for inputs in (case.inputs() for case in cases):
        first = kernel(inputs, precision)
        for _ in range(100):
            assert_bitwise(kernel(inputs, precision), first)


ROWS: list[tuple[dict[str, Any], Precision]] = [({}, EXACT), (dict(gate=True), EXACT)]
ROWS += [
    (dict(heads=32, dstate=n, initial_states=True), p) for n in (128, 256) for p in (EXACT, RELAXED)
]


@pytest.mark.parametrize(("changes", "precision"), ROWS, ids=str)
@pytest.mark.parametrize("seqlen", [1, 100, 2000, 20000])
def test_a_row_of_a_batch_is_what_it_is_alone(seqlen, changes, precision: Precision):
    """With `batch_invariant`.  Without it, the Hopper kernel cuts large batches into longer
    segments, or divides numbers of heads as 32 into equal shares.
    """
    inputs = MAMBA2.but(batch=9, seqlen=seqlen, **changes).inputs()
    whole = run(inputs, precision, batch_invariant=True)
    alone = run(rows(inputs, slice(5, 6)), precision, batch_invariant=True)
    assert_bitwise(alone, [one[5:6] for one in whole])


# --- graphs


def assert_replays(call: Callable[[Any], Any], case):
    """On new inputs, with memory that holds NaN."""
    inputs = case.inputs()
    others = case.but(seed=1).inputs()
    call(inputs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call(inputs)
    for source in (inputs, others, inputs):
        for name in tokens_of(inputs):
            getattr(inputs, name).copy_(getattr(source, name).clone())
        expected = call(inputs)
        for _ in range(3):
            for one in output:
                one.fill_(torch.nan)
            graph.replay()
            assert_bitwise(output, expected)


@targets(gpu=(*SSD_CHOSEN, "ssd unfused", "gdn fused", "gdn unfused", "gdn recurrent", *KDA_HOPPER))
def test_a_graph_replays_it_on_new_inputs(kernel: Target):
    for case in (
        dict(seqlen=1),
        dict(seqlen=12),
        dict(seqlen=255),
        dict(lengths=(200, 0, 55), initial_states=True),
    ):
        assert_replays(kernel, kernel.case(**case))


@ON_HOPPER
@targets(gpu=("ssd hopper, by default", "gdn first passes", "gdn parts"))
def test_a_graph_replays_shares_and_parts_on_new_inputs(kernel: Target):
    """States and flags that programs exchange are valid for one replay only."""
    if kernel.operator == "ssd":
        for n in (128, 256):
            assert_replays(kernel, MAMBA2.but(batch=5, seqlen=1000, dstate=n))
        return
    for config in (LONG_CUT, LONG_PARTS):
        call = replace(kernel, run=gdn_hopper_by(config))
        assert_replays(call, QWEN.but(key_heads=2, seqlen=3000, initial_states=True))


# --- the host and the memory


@targets(
    gpu=(
        "ssd fused",
        "ssd unfused",
        "ssd portable",
        "gdn fused",
        "gdn unfused",
        "gdn recurrent",
        *KDA_HOPPER,
    )
)
def test_the_host_never_waits(kernel: Target):
    for case in (dict(seqlen=255), dict(lengths=(200, 0, 55), initial_states=True)):
        inputs = kernel.case(**case).inputs()
        kernel(inputs)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            kernel(inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def requested(what: str) -> int:
    """Bytes requested from torch's allocator, which allocates more."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{what}"])


NEMOTRON = MAMBA2.but(heads=64, groups=8, chunk_size=128, lengths=(3000, 1, 500))
FUSED = [
    one.but(gate=gate)
    for gate in (False, True)
    for one in (MAMBA2.but(batch=2), MAMBA2.but(seqlen=100), PACKED)
]
FUSED += [KIMI, KIMI.but(batch=6), KIMI.but(lengths=(3000, 0, 500), initial_states=True)]
CB_IS_LARGEST = MAMBA2.but(seqlen=1000, heads=8, groups=8, headdim=32, dstate=16)
UNFUSED = [MAMBA2.but(seqlen=4000), NEMOTRON, CB_IS_LARGEST, QWEN.but(key_heads=4, seqlen=20000)]
PLANS = [("fused", one) for one in FUSED] + [("unfused", one) for one in UNFUSED]


@EXACT_AND_RELAXED
@pytest.mark.parametrize(("name", "case"), PLANS, ids=str)
def test_a_call_allocates_what_the_plan_says(name, case, precision: Precision):
    inputs = case.inputs()
    implementation = get(inputs.operator, name)
    implementation.run(inputs, precision)  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    allocated = torch.cuda.memory_allocated()
    output = implementation.run(inputs, precision)
    outputs = sum(tensor.nbytes for tensor in output)
    planned = implementation.plan(inputs, precision).workspace_bytes
    if name == "fused":
        assert requested("peak") - before - outputs == planned
    else:  # tensors of the stages are freed on the way
        assert (
            0.7 * planned
            < torch.cuda.max_memory_allocated() - allocated
            <= 1.01 * (planned + outputs)
        )


# --- no call needs two of its programs to run at once: every cut ends, even on a GPU that other
#   work fills


@targets(gpu=SSD_FINE)
def test_many_more_programs_than_fit(kernel: Target):
    """1,024 segments of 80 heads; each waits for another."""
    inputs = MAMBA2.but(seqlen=65536).inputs()
    assert_passes(kernel(inputs), inputs, EXACT)


@contextmanager
def busy_gpu() -> Iterator[torch.cuda.Stream]:
    """A stream, beside one that fills the GPU with products."""
    matrix = torch.randn(8192, 8192, dtype=BF16, device="cuda")
    ours = torch.cuda.Stream()
    theirs = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(theirs):
        for _ in range(100):
            matrix @ matrix
    with torch.cuda.stream(ours):
        yield ours
    torch.cuda.synchronize()


@targets(gpu=(*SSD_FINE, "gdn parts", *KDA_HOPPER))
def test_beside_another_stream_that_fills_the_gpu(kernel: Target):
    call = on_parts(32) if kernel.operator == "gdn" else kernel
    sizes = dict(seqlen=8192, gate=1e-4) if kernel.operator == "gdn" else {}
    inputs = long(kernel).but(**sizes).inputs()
    expected = call(inputs)
    with busy_gpu():
        outputs = [call(inputs) for _ in range(10)]
    for output in outputs:
        assert_bitwise(output, expected)


# --- numbers of any size


def with_subnormal(kernel: Target, name: str) -> SSDInputs:
    """No decay, steps of 1, and scales that make the subnormal tensor affect the output."""
    carried = name == "initial_states"
    # initial states: one chunk only, since a GPU's sums may lose them
    inputs = with_steps(
        kernel.case(seqlen=2 if carried else 28, skip="", initial_states=carried).inputs(), 1.0, 0.0
    )
    scales = (
        dict(x=1e-20, B=1e-20, C=1e25) if carried else dict.fromkeys({"x", "B", "C"} - {name}, 1e13)
    )
    for other, scale in scales.items():
        getattr(inputs, other).mul_(scale)
    tensor = getattr(inputs, name)
    tensor.copy_((tensor.cpu().float().tanh() * torch.finfo(FP32).tiny).to(tensor.dtype))
    return inputs


def products_keep_subnormal_numbers() -> bool:
    small = torch.full((256, 256), 1e-39, dtype=BF16, device="cuda")
    return bool((small @ torch.full_like(small, 1e30)).any())


@pytest.mark.parametrize("name", ["x", "B", "C", "initial_states"])
@targets(gpu=SSD_CHOSEN)
def test_subnormal_numbers(kernel: Target, name):
    """Kept, or treated as zero if the GPU's matrix products do that.  The two outputs differ
    here.
    """
    inputs = with_subnormal(kernel, name)
    zeroed = with_subnormal(kernel, name)
    getattr(zeroed, name).zero_()
    assert_passes(kernel(inputs), inputs if products_keep_subnormal_numbers() else zeroed, EXACT)
    with pytest.raises(AssertionError, match="oracle"):
        assert_passes(kernel(zeroed), inputs, EXACT)


@pytest.mark.parametrize("name", ["x", "B", "C"])
@targets(gpu=SSD_CHOSEN)
def test_large_numbers(kernel: Target, name):
    """Far beyond the range of fp16, since bf16 inputs may be."""
    inputs = kernel.case(seqlen=28).inputs()
    getattr(inputs, name).mul_(1e25)
    assert_passes(kernel(inputs), inputs, EXACT)
