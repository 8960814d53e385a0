"""The unfused GDN kernels compile for every supported GPU, fit its shared memory and do not spill."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from compile_target import CAPABILITIES, SHARED_BYTES, compiled, on_meta
from gdn_cases import EXACT, RELAXED, Case

from ssdprof.kernels.gdn.unfused.pipeline import six_stages
from ssdprof.kernels.precision import Precision

pytestmark = pytest.mark.compiler

REGISTERS_OF_AN_SM = 65536
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
QWEN = dict(key_heads=2, values_per_key=2, key_dim=128, value_dim=128, length=256)
OLMO = dict(key_heads=2, values_per_key=1, key_dim=96, value_dim=192, length=256)
LARGEST = dict(key_heads=1, values_per_key=1, key_dim=256, value_dim=256, length=256)
SMALLEST = dict(key_heads=2, values_per_key=1, key_dim=16, length=256)
EIGHT_BYTES = dict(key_heads=3, values_per_key=1, key_dim=100, value_dim=60, length=256)
PACKED = dict(lengths=(40, 9, 0, 200), initial_state=True)

CASES: dict[str, tuple[Case, Precision]] = {
    "qwen bf16 exact": (Case(**QWEN, dtype=BF16), EXACT),
    "qwen fp32 exact": (Case(**QWEN, dtype=FP32), EXACT),
    "qwen packed fp16 relaxed": (Case(**QWEN, **PACKED, dtype=FP16), RELAXED),
    "qwen fp32 relaxed": (Case(**QWEN, dtype=FP32), RELAXED),
    "smallest fp32 exact": (Case(**SMALLEST, value_dim=16, dtype=FP32), EXACT),
    "smallest of K fp32 exact": (Case(**SMALLEST, value_dim=64, dtype=FP32), EXACT),
    "smallest of V fp32 exact": (Case(**QWEN | dict(value_dim=16), dtype=FP32), EXACT),
    "eight bytes at once bf16 exact": (Case(**EIGHT_BYTES, dtype=BF16), EXACT),
    "eight bytes at once packed fp16 exact": (Case(**EIGHT_BYTES | PACKED, dtype=FP16), EXACT),
    "olmo bf16 exact": (Case(**OLMO, dtype=BF16), EXACT),
    "largest bf16 exact": (Case(**LARGEST, dtype=BF16), EXACT),
    "largest packed fp32 exact": (Case(**LARGEST, **PACKED, dtype=FP32), EXACT),
}


def launch(case: Case, precision: Precision) -> None:
    six_stages(on_meta(case.inputs()), precision)


LAUNCHES: dict[str, Callable[[], None]] = {label: partial(launch, *case) for label, case in CASES.items()}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("label", CASES)
def test_compiles_within_the_limits(label: str, capability: int) -> None:
    case, precision = CASES[label]
    kernels = compiled("test_gdn_unfused_compile", capability)[label]
    stages = ["gate_cumsum", "scaled_dot_kkt", "solve_tril", "recompute_w_u", "chunk_state", "chunk_output"]
    names = ["_gdn_qk_l2norm_kernel"] * 2 + (["_chunk_table_kernel"] if case.lengths else [])
    names += [f"_gdn_{stage}_kernel" for stage in stages]
    assert [kernel.kernel for kernel in kernels] == names
    for kernel in kernels:
        # tf32x3 holds fp32 operands twice and may spill a few words, more at the smallest and largest sizes.  The
        # 16-bit chunk_state is made for Hopper; on other GPUs it passes the state differently and may also spill a few
        # words
        fp32 = case.dtype == FP32 and precision == EXACT
        most = 320 if fp32 and case.key_dim in (16, 256) else 64 if fp32 else 0 if capability == 90 else 40
        assert kernel.spilled_bytes <= most, kernel
        assert not kernel.lost_addresses, kernel
        assert kernel.registers * kernel.num_warps * 32 <= REGISTERS_OF_AN_SM, kernel
        assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel


@pytest.mark.parametrize("label", [label for label in CASES if label.startswith("eight bytes")])
def test_rows_that_are_no_multiple_of_16_numbers_are_read_four_at_a_time(label: str) -> None:
    """The compiler needs `in_units` for this.  Each thread reads at most beta, for 64 positions, one at a time."""
    for kernel in compiled("test_gdn_unfused_compile", 90)[label]:
        assert kernel.single_loads <= 8, kernel
