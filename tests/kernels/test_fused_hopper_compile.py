"""The Hopper kernel compiles without a GPU, and within its registers and shared memory."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from compile_target import SHARED_BYTES, compiled, on_meta
from ssd_cases import EXACT, RELAXED, Case

from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.hopper_config import HopperConfig, half_count
from ssdprof.kernels.ssd.hopper_launch import ssd_fused_hopper
from ssdprof.kernels.ssd.hopper_segments import Segments

MAMBA2 = dict(heads=4, headdim=64, dstate=128)

CUT = Segments(segment=4)
ALONE = Segments(segment=3, long_count=1, long_segment=9, recompute=True)

# Bytes of one thread's stack: 8 or 16 with Triton 3.6, and up to 40 where sequences are packed and N is 256.
CASES: dict[str, tuple[Case, Precision, int]] = {
    "mamba2 bf16 exact": (Case(seqlen=1024, **MAMBA2, dtype=torch.bfloat16), EXACT, 16),
    "mamba2 bf16 exact, alone": (Case(seqlen=1024, **MAMBA2, dtype=torch.bfloat16), EXACT, 16),
    "mamba2 fp16 exact": (Case(seqlen=1024, **MAMBA2, dtype=torch.float16), EXACT, 16),
    "mamba2 fp16 relaxed": (Case(seqlen=1024, **MAMBA2, dtype=torch.float16), RELAXED, 16),
    "packed bf16 exact": (Case(lengths=(600, 9), **MAMBA2, dtype=torch.bfloat16), EXACT, 16),
    "packed p 80 bf16": (
        Case(lengths=(600, 9), initial_states=True, heads=4, headdim=80, dstate=128, dtype=torch.bfloat16),
        EXACT,
        16,
    ),
    "p 128 n 64 bf16": (Case(seqlen=512, heads=2, headdim=128, dstate=64, dtype=torch.bfloat16), EXACT, 16),
    "one segment bf16": (Case(seqlen=256, **MAMBA2, dtype=torch.bfloat16), EXACT, 16),
    "one segment n 256 bf16": (Case(seqlen=256, heads=3, headdim=64, dstate=256, dtype=torch.bfloat16), EXACT, 16),
    "p 128 n 256 bf16": (Case(seqlen=1024, heads=3, headdim=128, dstate=256, dtype=torch.bfloat16), EXACT, 16),
    "n 256 fp16 relaxed": (Case(seqlen=1024, heads=3, headdim=64, dstate=256, dtype=torch.float16), RELAXED, 16),
    "packed p 80 n 256 bf16": (
        Case(lengths=(600, 9), initial_states=True, heads=3, headdim=80, dstate=256, dtype=torch.bfloat16),
        EXACT,
        40,
    ),
}


def launch(case: Case, precision: Precision, segments: Segments) -> None:
    inputs = on_meta(case.inputs())
    config = HopperConfig.choose(inputs, sm_count=132, batch_invariant=False)
    ssd_fused_hopper(inputs, precision, config=replace(config, **asdict(segments)))


LAUNCHES: dict[str, Callable[[], None]] = {
    label: partial(launch, *case[:2], ALONE if "alone" in label else CUT) for label, case in CASES.items()
}


@pytest.mark.parametrize("label", CASES)
def test_compiles_within_the_limits(label: str) -> None:
    (kernel,) = compiled("test_fused_hopper_compile", 90)[label]
    assert kernel.kernel == "_fused_hopper_kernel"
    assert kernel.spilled_bytes <= CASES[label][2], kernel
    assert kernel.registers == 128, kernel  # at entry: 512 threads share the register file, then roles trade
    assert kernel.shared_bytes <= SHARED_BYTES[90], kernel


@pytest.mark.parametrize("label", CASES)
def test_what_is_loaded_ahead_is_taken_up_a_turn_later(label: str) -> None:
    """dt: two positions a thread of one chunk, and in the first pass of two chunks."""
    (kernel,) = compiled("test_fused_hopper_compile", 90)[label]
    assert kernel.loads_ahead == 2 + 2 * 2


@pytest.mark.parametrize("label", CASES)
def test_no_product_waits_for_one_that_it_does_not_need(label: str) -> None:
    """One wait in the scores, and in each of the other two roles one for each chunk of a turn in the first pass and
    two in the second.  ptxas adds more where it thinks, or its registers make, that a product's operands change while
    it runs."""
    (kernel,) = compiled("test_fused_hopper_compile", 90)[label]
    turn = half_count(CASES[label][0].dstate)
    assert kernel.product_waits == 1 + 2 * (turn + 2)
