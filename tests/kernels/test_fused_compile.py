"""The portable fused kernel compiles for every supported GPU, fits its shared memory and does not spill much."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import triton
from compile_target import CAPABILITIES, SHARED_BYTES, compiled, on_meta
from ssd_cases import EXACT, RELAXED, Case

from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.config import SSDPortableConfig
from ssdprof.kernels.ssd.portable import ssd_fused_portable

pytestmark = pytest.mark.compiler

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MAMBA2 = dict(heads=2, headdim=64, dstate=128)

CASES: dict[str, tuple[Case, Precision]] = {
    "mamba2 bf16 exact": (Case(seqlen=1024, **MAMBA2, dtype=BF16), EXACT),
    "ragged bf16 exact": (Case(seqlen=1000, **MAMBA2, dtype=BF16), EXACT),
    "gated bf16 exact": (Case(seqlen=1024, gate=True, **MAMBA2, dtype=BF16), EXACT),
    "packed fp16 relaxed": (
        Case(lengths=(600, 9), initial_states=True, gate=True, skip="(h, p)", **MAMBA2, dtype=FP16),
        RELAXED,
    ),
    "mamba2 fp32 exact": (Case(seqlen=1000, **MAMBA2, dtype=FP32), EXACT),
    "p 80 bf16 exact": (Case(seqlen=1000, heads=2, headdim=80, dstate=128, dtype=BF16), EXACT),
    "n 256 bf16 exact": (Case(seqlen=1000, heads=2, headdim=64, dstate=256, dtype=BF16), EXACT),
    "n 8 bf16 exact": (Case(seqlen=1000, heads=2, headdim=64, dstate=8, dtype=BF16), EXACT),
    "n 48 bf16 exact": (Case(seqlen=1000, heads=2, headdim=64, dstate=48, dtype=BF16), EXACT),
}

# Bytes of one thread's stack with the ptxas of Triton 3.6.  For the common sizes, the loops over chunks do not access
# the stack, except for ten of 1,647 instructions with a gate on sm_100.  tf32x3 holds fp32 operands twice, and 256
# state dimensions fill shared memory and registers.  The configurations that spill there are still the fastest of
# about a hundred each on an H200.
STACK_BYTES = {"packed fp16 relaxed": 192, "mamba2 fp32 exact": 240, "n 256 bf16 exact": 296}
COMMON_STACK_BYTES = 80
ONE_PROGRAM_PER_SM = ("n 256 bf16 exact",)


def launch(case: Case, precision: Precision) -> None:
    inputs = on_meta(case.inputs())
    capability = triton.runtime.driver.active.get_current_target().arch
    ssd_fused_portable(inputs, precision, config=SSDPortableConfig.choose(inputs, divmod(capability, 10)))


def launch_too_large() -> None:
    inputs = on_meta(Case(seqlen=1024, **MAMBA2, dtype=FP32).inputs())
    ssd_fused_portable(inputs, EXACT, config=SSDPortableConfig(chunk=32, block_p=64, state_stages=2))


def launch_narrow() -> None:
    inputs = on_meta(Case(seqlen=1024, gate=True, **MAMBA2, dtype=BF16).inputs())
    ssd_fused_portable(inputs, EXACT, config=SSDPortableConfig(block_p=32, state_stages=2, scan_stages=1))


LAUNCHES: dict[str, Callable[[], None]] = {label: partial(launch, *case) for label, case in CASES.items()}
TOO_LARGE = {"fp32": launch_too_large}
NARROW = {"rows of 64 bytes": launch_narrow}
COMMON = {"mamba2 bf16 exact": LAUNCHES["mamba2 bf16 exact"]}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("label", CASES)
def test_compiles_within_the_limits(label: str, capability: int) -> None:
    (kernel,) = compiled("test_fused_compile", capability)[label]
    assert kernel.kernel == "_fused_kernel"
    assert kernel.lost_addresses == 0, kernel
    assert kernel.spilled_bytes <= STACK_BYTES.get(label, COMMON_STACK_BYTES), kernel
    # if the compiler discards a kernel's body, the kernel uses only a few registers
    assert kernel.registers > 100, kernel
    programs = 1 if label in ONE_PROGRAM_PER_SM else 2
    assert programs * kernel.shared_bytes <= SHARED_BYTES[capability], kernel


@pytest.mark.parametrize("capability", [89, 120])
def test_gpus_with_less_shared_memory(capability: int) -> None:
    """L4 and RTX: 99 KiB per program, and operands that pass through registers."""
    (kernel,) = compiled("test_fused_compile", capability, "COMMON")["mamba2 bf16 exact"]
    assert kernel.spilled_bytes <= COMMON_STACK_BYTES, kernel
    assert kernel.shared_bytes <= 99 << 10, kernel


def test_the_limits_can_be_broken() -> None:
    """Chunks of 32 exceed the limits in fp32; the kernel uses 16."""
    (kernel,) = compiled("test_fused_compile", 90, "TOO_LARGE")["fp32"]
    assert kernel.spilled_bytes > 1000


def test_lost_addresses_are_seen() -> None:
    """A kernel that gives wrong results on an H200."""
    (kernel,) = compiled("test_fused_compile", 90, "NARROW")["rows of 64 bytes"]
    assert kernel.lost_addresses == 3
