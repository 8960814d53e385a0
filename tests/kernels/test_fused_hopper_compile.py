"""The Hopper kernel compiles without a GPU, and within its registers and shared memory."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from compile_target import SHARED_BYTES, compiled, on_meta
from ssd_cases import EXACT, RELAXED, Case

from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.hopper_config import HopperConfig
from ssdprof.kernels.ssd.hopper_launch import ssd_fused_hopper

MAMBA2 = dict(heads=4, headdim=64, dstate=128)

# Bytes of one thread's stack, as ptxas left it with Triton 3.6: beside the 24 registers of gates and loads, and where
# a unit's role also masks a sequence's last rows and a head's last columns.
CUT = HopperConfig(segment=4)
ALONE = HopperConfig(segment=3, long_count=1, long_segment=9, recompute=True)
CASES: dict[str, tuple[Case, Precision, int]] = {
    "mamba2 bf16 exact": (Case(seqlen=1024, **MAMBA2, dtype=torch.bfloat16), EXACT, 40),
    "mamba2 bf16 exact, alone": (Case(seqlen=1024, **MAMBA2, dtype=torch.bfloat16), EXACT, 40),
    "mamba2 fp16 relaxed": (Case(seqlen=1024, **MAMBA2, dtype=torch.float16), RELAXED, 64),
    "ragged bf16 exact": (Case(seqlen=1000, **MAMBA2, dtype=torch.bfloat16), EXACT, 48),
    "packed p 80 bf16": (
        Case(lengths=(600, 9), initial_states=True, heads=4, headdim=80, dstate=128, dtype=torch.bfloat16),
        EXACT,
        200,
    ),
    "p 128 n 64 bf16": (Case(seqlen=512, heads=2, headdim=128, dstate=64, dtype=torch.bfloat16), EXACT, 64),
}


def launch(case: Case, precision: Precision, config: HopperConfig) -> None:
    ssd_fused_hopper(on_meta(case.inputs()), precision, config=config)


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
