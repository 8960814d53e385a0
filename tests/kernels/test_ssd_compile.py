"""The unfused kernels compile for every supported GPU, fit its shared memory and do not spill."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from compile_target import CAPABILITIES, SHARED_BYTES, compiled, on_meta
from ssd_cases import EXACT, RELAXED, Case

from ssdprof.kernels.chunks import Chunks
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.unfused import chunk_scan, five_stages

pytestmark = pytest.mark.compiler

REGISTERS_OF_AN_SM = 65536
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MAMBA2 = dict(heads=16, headdim=64, dstate=128, chunk_size=256)
LARGEST = dict(heads=2, headdim=128, dstate=256, chunk_size=256)
PACKED = dict(lengths=(40, 9), initial_states=True, gate=True, skip="(h, p)")

CASES: dict[str, tuple[Case, Precision]] = {
    "mamba2 bf16 exact": (Case(**MAMBA2, dtype=BF16), EXACT),
    "mamba2 fp32 exact": (Case(**MAMBA2, dtype=FP32), EXACT),
    "packed fp16 relaxed": (Case(**MAMBA2, **PACKED, dtype=FP16), RELAXED),
    "largest bf16 exact": (Case(**LARGEST, **PACKED, dtype=BF16), EXACT),
}


def launch(case: Case, precision: Precision) -> None:
    five_stages(on_meta(case.inputs()), precision)


TOO_LARGE_BLOCKS = dict(block_q=256, block_p=128, block_s=32, block_n=128, num_warps=4, num_stages=3)


def launch_too_large() -> None:
    inputs = on_meta(Case(heads=2, headdim=128, dstate=128, chunk_size=256, dtype=BF16).inputs())
    chunks = Chunks.of(inputs)
    gate = torch.empty(1, 2, chunks.count, chunks.size, device="meta")
    states = torch.empty(1, chunks.count, 2, 128, 128, device="meta")
    CB = torch.empty(1, chunks.count, 1, chunks.size, chunks.size, device="meta")
    chunk_scan(inputs, gate, gate, states, CB, chunks, blocks=TOO_LARGE_BLOCKS)


LAUNCHES: dict[str, Callable[[], None]] = {label: partial(launch, *case) for label, case in CASES.items()}
TOO_LARGE = {"chunk_scan": launch_too_large}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("label", CASES)
def test_compiles_within_the_limits(label: str, capability: int) -> None:
    case, _ = CASES[label]
    kernels = compiled("test_ssd_compile", capability)[label]
    assert [kernel.kernel for kernel in kernels] == (["_chunk_table_kernel"] if case.lengths else []) + [
        "_chunk_cumsum_kernel",
        "_chunk_state_kernel",
        "_state_passing_kernel",
        "_bmm_chunk_kernel",
        "_chunk_scan_kernel",
    ]
    for kernel in kernels:
        # tf32x3 holds fp32 operands twice and may spill a few words
        assert kernel.spilled_bytes <= (64 if case.dtype == FP32 else 0), kernel
        # two programs per SM for the common sizes, so that each hides the other's waits; one for other sizes
        programs = 2 if label in ("mamba2 bf16 exact", "packed fp16 relaxed") else 1
        assert programs * kernel.registers * kernel.num_warps * 32 <= REGISTERS_OF_AN_SM, kernel
        assert programs * kernel.shared_bytes <= SHARED_BYTES[capability], kernel


@pytest.mark.parametrize("module", ["test_ssd_compile", "test_fused_compile", "test_fused_hopper_compile"])
def test_whatever_triton_is_set_to_products_and_sums_are_fused(module: str) -> None:
    """Otherwise results and speeds would depend on an environment variable or on Triton's version."""
    kernels = [kernel for kernels in compiled(module, 90).values() for kernel in kernels]
    assert kernels
    assert all(kernel.fuses for kernel in kernels)


def test_a_profiler_is_told_the_work() -> None:
    case, _ = CASES["mamba2 bf16 exact"]
    told = {kernel.kernel: kernel.metadata for kernel in compiled("test_ssd_compile", 90)["mamba2 bf16 exact"]}
    elements = case.seqlen * case.heads * case.headdim
    assert told["_chunk_state_kernel"]["flops"] == 2 * elements * case.dstate
    assert told["_chunk_scan_kernel"]["flops"] == elements * (2 * case.dstate + case.chunk_size)
    for kernel, metadata in told.items():
        assert metadata["name"].startswith(kernel)
        assert metadata["flops"] > 0
        assert metadata["bytes"] > 0


def test_the_limits_can_be_broken() -> None:
    """The test detects a configuration that cannot fit: 256 x 128 accumulators in 4 warps."""
    kernels = compiled("test_ssd_compile", 90, "TOO_LARGE")["chunk_scan"]
    assert kernels[0].spilled_bytes > 0
