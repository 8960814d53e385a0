"""The portable and the recurrent GDN kernels compile for every GPU and fit its shared memory and registers."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import triton
from compile_target import CAPABILITIES, SHARED_BYTES, compiled, on_meta
from gdn_cases import EXACT, Case

from ssdprof.kernels.gdn.config import GDNPortableConfig
from ssdprof.kernels.gdn.portable.scan import GDNPortableLaunch
from ssdprof.kernels.gdn.recurrent import GDNRecurrentConfig, GDNRecurrentLaunch

pytestmark = pytest.mark.compiler

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
QWEN = dict(key_heads=16, values_per_key=2, key_dim=128, value_dim=128)
CASES: dict[str, Case] = {
    "qwen": Case(**QWEN, length=2048, dtype=BF16),
    "qwen, batch": Case(**QWEN, length=1024, batch=32, dtype=BF16),
    "qwen, packed": Case(**QWEN, lengths=(600, 9), initial_state=True, dtype=FP16),
    "qwen, wide and cut": Case(**QWEN, lengths=(4500,), initial_state=True, dtype=BF16),
    "a rank of eight, cut": Case(key_heads=2, values_per_key=4, key_dim=128, value_dim=128, length=8192, dtype=BF16),
    "olmo": Case(key_heads=30, key_dim=96, value_dim=192, length=2000, dtype=BF16),
    "60": Case(key_heads=4, key_dim=60, value_dim=60, length=1000, l2norm=False, dtype=FP16),
    "16": Case(key_heads=4, key_dim=16, value_dim=16, length=1024, batch=8, dtype=BF16),
    "32": Case(key_heads=4, key_dim=32, value_dim=32, length=4096, dtype=BF16),
    "192, cut": Case(key_heads=2, key_dim=192, value_dim=192, length=8192, dtype=BF16),
    "200 and 100, packed": Case(
        key_heads=2, key_dim=200, value_dim=100, lengths=(600, 9), initial_state=True, dtype=FP16
    ),
    "256": Case(key_heads=2, key_dim=256, value_dim=256, length=1024, dtype=BF16),
    "256 and 64, wide and cut": Case(
        key_heads=2, key_dim=256, value_dim=64, lengths=(4500,), initial_state=True, dtype=BF16
    ),
    "qwen fp32": Case(key_heads=2, key_dim=128, value_dim=128, length=256, dtype=FP32),
}
# Bytes of one thread's stack with the ptxas of Triton 3.6.  Without wgmma, accumulators and operands of the first
# launch share registers.  On Hopper, a few more words on the stack permit a third program on each SM.
STACK_BYTES = {80: 160, 90: 80, 100: 160}


def launch(case: Case, **changes: object) -> None:
    inputs = on_meta(case.inputs())
    capability = triton.runtime.driver.active.get_current_target().arch
    config = GDNPortableConfig.choose(inputs, (capability // 10, capability % 10), 132)
    GDNPortableLaunch(inputs, EXACT, replace(config, **changes), state_v_first=False)(inputs)  # type: ignore[arg-type]


def recurrent(case: Case) -> None:
    inputs = on_meta(case.inputs())
    GDNRecurrentLaunch(inputs, GDNRecurrentConfig.choose(inputs))(inputs)


LAUNCHES: dict[str, Callable[[], None]] = {label: partial(launch, case) for label, case in CASES.items()}
TOO_LARGE = {"256": partial(launch, CASES["256"], block_v=64, scan_stages=3)}
RECURRENT = {
    "qwen": partial(recurrent, Case(**QWEN, length=1, batch=8, initial_state=True, dtype=BF16)),
    "256": partial(recurrent, Case(key_dim=256, value_dim=256, length=8, dtype=FP32)),
    "256 with states": partial(recurrent, Case(key_dim=256, value_dim=256, length=1, initial_state=True, dtype=BF16)),
}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("label", CASES)
def test_compiles_within_the_limits(label: str, capability: int) -> None:
    factors, scan = compiled("test_gdn_fused_compile", capability)[label]
    assert (factors.kernel, scan.kernel) == ("_gdn_factors_kernel", "_gdn_scan_kernel")
    for kernel in (factors, scan):
        assert kernel.lost_addresses == 0, kernel
        assert kernel.spilled_bytes <= STACK_BYTES[capability], kernel
        assert kernel.registers > 60, kernel  # fewer: the compiler discarded the kernel's body
        assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("label", RECURRENT)
def test_the_recurrent_kernel_keeps_its_state_in_registers(label: str, capability: int) -> None:
    (kernel,) = compiled("test_gdn_fused_compile", capability, "RECURRENT")[label]
    assert kernel.kernel == "_gdn_recurrent_kernel"
    assert kernel.spilled_bytes == 0, kernel


def test_the_limits_can_be_broken() -> None:
    _, scan = compiled("test_gdn_fused_compile", 90, "TOO_LARGE")["256"]
    assert scan.shared_bytes > SHARED_BYTES[90]
