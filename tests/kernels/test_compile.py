"""The kernels compile for every supported GPU without one, fit its shared memory and registers, and spill little."""

from __future__ import annotations

import json
from typing import Any

import pytest
import triton
from compile_cases import (
    GDN_HOPPER_CASES,
    GDN_ONE_LAUNCH,
    GDN_PORTABLE,
    GDN_UNFUSED_CASES,
    HOPPER_CASES,
    PORTABLE_CASES,
    SHIPPED_PORTABLE,
    SHIPPED_UNFUSED,
    TABLES,
    UNFUSED_CASES,
)
from compile_target import CAPABILITIES, OLDEST, RECORDED, SHARED_BYTES, Compiled, assert_recorded, recorded_form
from compile_target import compiled as compiled_of
from kernel_cases import EXACT, FP32
from machine_code import HASHES, operators_hashes
from operand_races import racy_writes

from ssdprof.kernels.ssd import config
from ssdprof.kernels.ssd.config import SSDPortableConfig
from ssdprof.kernels.ssd.unfused import five_stages

pytestmark = pytest.mark.compiler

REGISTERS_OF_AN_SM = 65536
NEWER = triton.__version__ != OLDEST  # than the compiler of the limits in this file
EVERY_GPU = pytest.mark.parametrize("capability", CAPABILITIES)


def compiled(table: str, capability: int = 90) -> dict[str, list[Compiled]]:
    return compiled_of("compile_cases", capability, table)


def assert_fits(kernel: Compiled, capability: int = 90, *, stack: int = 0, programs: int = 1) -> None:
    """stack: most bytes of one thread.  programs: that share a multiprocessor, so that each hides the other's waits."""
    assert kernel.spilled_bytes <= stack or NEWER, kernel
    assert kernel.lost_addresses == kernel.idle_barriers == 0, kernel
    assert programs * kernel.registers * kernel.num_warps * 32 <= REGISTERS_OF_AN_SM, kernel
    assert programs * kernel.shared_bytes <= SHARED_BYTES[capability], kernel


# --- recorded: registers, stack, shared memory and machine code.  After an intended change, record again:
# python tests/kernels/machine_code.py --record


@EVERY_GPU
def test_takes_no_more_than_recorded(capability: int) -> None:
    """Every row of the committed configurations.  Other tests have absolute limits; this one detects a change for the
    worse."""
    if not RECORDED.exists():
        pytest.skip(f"nothing was recorded with Triton {triton.__version__}")
    recorded = json.loads(RECORDED.read_text())[str(capability)]
    for name, taken in recorded_form("SHIPPED", capability).items():
        kernel, *limits = recorded[name].split()
        found, *resources = taken.split()
        assert found == kernel
        for value, limit in zip(resources[:3], limits[:3], strict=True):
            said = f"{name}: registers, stack, shared memory {taken}, recorded {recorded[name]}"
            assert int(value) <= int(limit), said


@pytest.mark.parametrize("table", TABLES)
def test_machine_code_is_the_recorded_one_and_safe(table: str) -> None:
    """No product reads from a lost address, or registers that may be overwritten while it is in flight.  Products and
    sums are fused whatever Triton is set to: otherwise results and speeds would depend on an environment variable or
    on Triton's version."""
    assert_recorded(table)
    for label, kernels in compiled(table).items():
        for kernel in kernels:
            assert kernel.racy_writes == kernel.lost_addresses == 0, f"{label}: {kernel}"
            assert kernel.fuses or table.startswith("GDN_") or table == "SSD_SMALL", f"{label}: {kernel}"


def test_operators_hashes_are_those_of_the_recorded_kernels() -> None:
    assert json.loads(HASHES.read_text()) == operators_hashes(
        json.loads(RECORDED.with_name("compiled.json").read_text())["90"]
    )


def test_every_row_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: set[int] = set()
    first_fit = config.first_fit

    def noting(table: Any, **call: Any) -> Any:
        row = first_fit(table, **call)
        chosen.add(id(row))
        return row

    monkeypatch.setattr(config, "first_fit", noting)
    for case, precision in SHIPPED_PORTABLE.values():
        for capability in CAPABILITIES:
            SSDPortableConfig.choose(case.inputs(), divmod(capability, 10), precision)
    for case, precision in SHIPPED_UNFUSED.values():
        five_stages(case.but(seqlen=17, chunk_size=16, heads=1).inputs(), precision)
    for table in (config.PORTABLE, config.CHUNK_STATE, config.BMM_CHUNK, config.CHUNK_SCAN):
        for row in table:
            assert id(row) in chosen, row


# --- unfused


@EVERY_GPU
@pytest.mark.parametrize("label", UNFUSED_CASES)
def test_ssd_unfused(label: str, capability: int) -> None:
    """tf32x3 holds fp32 operands twice and may spill a few words.  Two programs of the common sizes share an SM."""
    (case, _), kernels = UNFUSED_CASES[label], compiled("SSD_UNFUSED", capability)[label]
    stages = ["chunk_table"] * bool(case.lengths)
    stages += ["chunk_cumsum", "chunk_state", "state_passing", "bmm_chunk", "chunk_scan"]
    assert [kernel.kernel for kernel in kernels] == [f"_{stage}_kernel" for stage in stages]
    programs = 2 if label in ("mamba2 bf16 exact", "packed fp16 relaxed") else 1
    for kernel in kernels:
        assert_fits(kernel, capability, stack=64 if case.dtype == FP32 else 0, programs=programs)


@EVERY_GPU
@pytest.mark.parametrize("label", GDN_UNFUSED_CASES)
def test_gdn_unfused(label: str, capability: int) -> None:
    """tf32x3 holds fp32 operands twice and may spill a few words, more at the smallest and largest sizes.  The 16-bit
    chunk_state is made for Hopper; on other GPUs it passes the state differently and may also spill a few words."""
    (case, precision), kernels = GDN_UNFUSED_CASES[label], compiled("GDN_UNFUSED", capability)[label]
    stages = ["gate_cumsum", "scaled_dot_kkt", "solve_tril", "recompute_w_u", "chunk_state", "chunk_output"]
    names = ["_gdn_qk_l2norm_kernel"] * 2 + ["_chunk_table_kernel"] * bool(case.lengths)
    assert [kernel.kernel for kernel in kernels] == names + [f"_gdn_{stage}_kernel" for stage in stages]
    fp32 = case.dtype == FP32 and precision == EXACT
    most = 320 if fp32 and case.key_dim in (16, 256) else 64 if fp32 else 0 if capability == 90 else 40
    for kernel in kernels:
        assert_fits(kernel, capability, stack=most)


# --- portable

# Bytes of one thread's stack with the ptxas of Triton 3.6.  For the common sizes, the loops over chunks do not access
# the stack, except for ten of 1,647 instructions with a gate on sm_100.  tf32x3 holds fp32 operands twice, and 256
# state dimensions fill shared memory and registers.  The configurations that spill there are still the fastest of
# about a hundred each on an H200.
STACK_BYTES = {"packed fp16 relaxed": 192, "mamba2 fp32 exact": 240, "n 256 bf16 exact": 296}
COMMON_STACK_BYTES = 80
# of GDN: without wgmma, accumulators and operands of the first launch share registers.  On Hopper, a few more words on
# the stack permit a third program on each SM
GDN_STACK_BYTES = {80: 160, 90: 80, 100: 160}


@EVERY_GPU
@pytest.mark.parametrize("label", PORTABLE_CASES)
def test_ssd_portable(label: str, capability: int) -> None:
    *before, kernel = compiled("SSD_PORTABLE", capability)[label]
    assert kernel.kernel == "_fused_kernel"
    assert [one.kernel for one in before] == ["_bmm_chunk_kernel"] * (PORTABLE_CASES[label][0].dtype == FP32)
    for one in before:
        assert_fits(one, capability)
    assert_fits(kernel, capability, stack=STACK_BYTES.get(label, COMMON_STACK_BYTES))
    assert kernel.registers > 100, "if the compiler discards a kernel's body, the kernel uses only a few registers"
    assert NEWER or label == "n 256 bf16 exact" or 2 * kernel.shared_bytes <= SHARED_BYTES[capability], kernel


@pytest.mark.parametrize("capability", [89, 120])
def test_gpus_with_less_shared_memory(capability: int) -> None:
    """L4 and RTX: 99 KiB per program, and operands that pass through registers."""
    (kernel,) = compiled("COMMON", capability)["mamba2 bf16 exact"]
    assert kernel.spilled_bytes <= COMMON_STACK_BYTES, kernel
    assert kernel.shared_bytes <= 99 << 10, kernel


@EVERY_GPU
@pytest.mark.parametrize("label", GDN_PORTABLE)
def test_gdn_portable(label: str, capability: int) -> None:
    kernels = compiled("GDN_PORTABLE", capability)[label]
    assert [kernel.kernel for kernel in kernels] == ["_gdn_factors_kernel", "_gdn_scan_kernel"]
    for kernel in kernels:
        assert_fits(kernel, capability, stack=GDN_STACK_BYTES[capability])
        assert kernel.registers > 60, kernel


def test_the_limits_can_be_broken() -> None:
    """Accumulators or chunks that are too large are detected, and a kernel that gives wrong results on an H200."""
    broken = compiled("BROKEN")
    assert broken["chunk_scan"][0].spilled_bytes > 0
    assert broken["fp32"][-1].spilled_bytes > 2 * STACK_BYTES["mamba2 fp32 exact"]
    assert broken["rows of 64 bytes"][0].lost_addresses == (0 if NEWER else 3)
    assert broken["gdn 256"][1].shared_bytes > SHARED_BYTES[90]


# --- Hopper


@pytest.mark.parametrize("label", HOPPER_CASES)
def test_ssd_hopper(label: str) -> None:
    (kernel,), (*_, stack) = compiled("SSD_HOPPER")[label], HOPPER_CASES[label]
    assert kernel.kernel == "_fused_hopper_kernel"
    assert kernel.registers == 128, "at entry: equal for 512 threads; roles redistribute later"
    assert_fits(kernel, stack=stack)


SPILLED = {"_parts_kernel": 8, "_combine_kernel": 168}  # packed, outside the loop of chunks; with an initial state
REGISTERS = {"_hopper_kernel": 128, "_parts_kernel": 168}  # at entry, equal for all; roles redistribute later


@pytest.mark.parametrize("label", GDN_HOPPER_CASES)
def test_gdn_hopper(label: str) -> None:
    """Two more launches for heads that forget slowly.  A direct launch counts the parameters."""
    kernels, (_, config) = compiled("GDN_HOPPER")[label], GDN_HOPPER_CASES[label]
    slow = ["_parts_kernel", "_combine_kernel"] if config.transition_parts else []
    assert [kernel.kernel for kernel in kernels] == ["_prep_kernel", *slow, "_hopper_kernel"]
    for kernel in kernels:
        prep = kernel.kernel == "_prep_kernel"
        assert_fits(kernel, stack=kernel.spilled_bytes if prep else SPILLED.get(kernel.kernel, 0))
        assert kernel.registers == REGISTERS.get(kernel.kernel, kernel.registers), kernel
        assert kernel.counted_parameters == kernel.parameters > 0, kernel


@pytest.mark.parametrize("label", GDN_ONE_LAUNCH)
def test_one_launch_fits_into_shared_memory(label: str) -> None:
    (kernel,) = compiled("GDN_ONE_LAUNCH")[label]
    assert_fits(kernel, stack=64)


# --- the kernels of one token, and those around an operator

SMALL = {
    "ssd recurrent": ["_ssd_recurrent_kernel"], "gdn recurrent": ["_gdn_recurrent_kernel"],
    "ssd step": ["_ssd_step_state_kernel", "_ssd_step_output_kernel"],
    "gdn step": [f"_gdn_{name}_kernel" for name in ("qk_l2norm", "step_write", "step_state", "step_output")],
    "ssd convolution": ["_causal_conv1d_kernel"], "ssd norm": ["_gated_rms_norm_kernel"],
    "ssd rows": ["_rows_kernel"],
}  # fmt: skip


@EVERY_GPU
@pytest.mark.parametrize("table", ["SSD_SMALL", "GDN_SMALL", "SMALL_LIMITS"])
def test_small_kernels_spill_nothing(table: str, capability: int) -> None:
    """The recurrent kernels hold their states in registers."""
    for label, kernels in compiled(table, capability).items():
        ssd = table == "SSD_SMALL" or label.startswith("ssd")
        kind = f"{'ssd' if ssd else 'gdn'} {label.removeprefix('ssd ').split()[0]}"
        assert list(dict.fromkeys(kernel.kernel for kernel in kernels)) == SMALL[kind]
        for kernel in kernels:
            assert_fits(kernel, capability)


@EVERY_GPU
def test_mixer_kernels(capability: int) -> None:
    """Of convolutions four programs and more run on an SM, of norms two."""
    for table, name, programs in (("CONVOLUTIONS", "ssd convolution", 1), ("NORMS", "ssd norm", 2)):
        for (kernel,) in compiled(table, capability).values():
            assert_fits(kernel, capability, programs=programs)
            assert kernel.kernel == SMALL[name][0]
            assert NEWER or programs == 2 or kernel.registers <= 128


# --- how races are found

LOOP = """
 Function : loop
.L_x_0:
        /*0000*/                   HGMMA.64x64x16.F32.BF16 R24, R104, gdesc[UR4], R24, gsb0 ;
        /*0010*/                   {first} ;
        /*0020*/                   {second} ;
        /*0030*/              @P0 BRA `(.L_x_0) ;
        /*0040*/                   EXIT ;
"""
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
FOUND = [
    ("MOV R104, R6", WAIT, 1), (WAIT, "MOV R104, R6", 0), ("@P1 MOV R107, R6", WAIT, 1),
    ("@!PT MOV R107, R6", WAIT, 0), ("LDS.128 R100, [R6]", WAIT, 0), ("LDS.128 R101, [R6]", WAIT, 1),
    ("STS.128 [R6], R104", WAIT, 0), ("ISETP.GT.AND P0, PT, R104, R6, PT", WAIT, 0),
    ("MOV R105, R6", "@P1 " + WAIT, 1), ("WARPGROUP.DEPBAR.LE gsb0, 0x1", "MOV R104, R6", 1),
    ("FADD R6, R6, R6", "NOP", 0),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second", "count"), FOUND)
def test_finds_writes_to_operands_before_a_wait(first: str, second: str, count: int) -> None:
    assert len(racy_writes(LOOP.format(first=first, second=second))) == count
