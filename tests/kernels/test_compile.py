"""The kernels compile for every supported GPU without one, fit its shared memory and registers, and
spill little.
"""

import json

import pytest
import triton
from compile_cases import SHIPPED_PORTABLE, SHIPPED_UNFUSED, TABLES
from compile_target import CAPABILITIES, OLDEST, RECORDED, SHARED_BYTES, compiled, recorded_form
from machine_code import HASHES, operators_hashes
from operand_races import racy_writes

from ssdprof.kernels.ssd import config
from ssdprof.kernels.ssd.config import SSDPortableConfig
from ssdprof.kernels.ssd.unfused import five_stages

pytestmark = pytest.mark.compiler

REGISTERS_OF_AN_SM = 65536
NEWER = triton.__version__ != OLDEST  # than the compiler of the limits in this file
# Most bytes of one thread's stack in a table with the ptxas of Triton 3.6, of others none.  tf32x3
# holds fp32 operands twice; 256 state dimensions fill shared memory and registers, and the
# configurations that spill there are still the fastest of about a hundred each on an H200.  Without
# wgmma, accumulators and operands of GDN's first launch share registers.  The tables of Hopper are
# compiled for it alone.
STACK_BYTES = {
    "SHIPPED": 296, "COMMON": 80, "SSD_UNFUSED": 64, "SSD_PORTABLE": 296, "GDN_UNFUSED": 320,
    "GDN_PORTABLE": 160, "SSD_HOPPER": 56, "GDN_HOPPER": 168,
    "KDA_UNFUSED": 320, "KDA_PORTABLE": 240, "KDA_HOPPER": 224,
}  # fmt: skip
ANYWHERE = (
    "SSD_UNFUSED",
    "SSD_PORTABLE",
    "SSD_SMALL",
    "GDN_UNFUSED",
    "GDN_PORTABLE",
    "GDN_SMALL",
    "SMALL_LIMITS",
)
PLACES = [("SHIPPED", one) for one in CAPABILITIES] + [
    (table, 90) for table in TABLES if table != "SHIPPED"
]
PLACES += [("SMALL_LIMITS", 90), *((table, one) for one in (80, 100) for table in ANYWHERE)]
PLACES += [("COMMON", one) for one in (89, 120)]  # L4 and RTX


@pytest.mark.parametrize(("table", "capability"), PLACES)
def test_kernels_fit_spill_little_and_are_safe(table, capability):
    """No product reads from a lost address, or registers that may be overwritten while it is in
    flight.  Products and
    sums are fused whatever Triton is set to: otherwise results and speeds would depend on an
    environment variable or on Triton's version.  A direct launch counts the parameters.
    """
    for label, kernels in compiled("compile_cases", capability, table).items():
        for kernel in kernels:
            assert kernel.racy_writes == kernel.lost_addresses == kernel.idle_barriers == 0, (
                f"{label}: {kernel}"
            )
            assert kernel.fuses or not table.startswith(
                ("SSD_U", "SSD_P", "SSD_H", "SHIPPED", "KDA")
            ), label
            assert kernel.spilled_bytes <= STACK_BYTES.get(table, 0) or NEWER, f"{label}: {kernel}"
            assert kernel.registers * kernel.num_warps * 32 <= REGISTERS_OF_AN_SM, (
                f"{label}: {kernel}"
            )
            assert kernel.shared_bytes <= SHARED_BYTES[capability], f"{label}: {kernel}"
            assert kernel.counted_parameters == kernel.parameters, f"{label}: {kernel}"


# --- recorded: registers, stack, shared memory and machine code.  After an intended change, record
# again: python tests/kernels/machine_code.py


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_shipped_configurations_take_no_more_than_recorded(capability):
    """Every row of the committed configurations, with any Triton."""
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


@pytest.mark.skipif(NEWER, reason="recorded with the oldest Triton")
@pytest.mark.parametrize("table", TABLES)
def test_machine_code_is_the_recorded_one(table):
    """Names, resources and instructions of every kernel for sm_90."""
    recorded = json.loads(RECORDED.read_text())["90"]
    theirs = {name: text for name, text in recorded.items() if name.startswith(f"{table} ")}
    assert recorded_form(table, 90) == theirs, "after an intended change, run machine_code.py"


def test_operators_hashes_are_those_of_the_recorded_kernels():
    assert json.loads(HASHES.read_text()) == operators_hashes(
        json.loads(RECORDED.with_name("compiled.json").read_text())["90"]
    )


def test_every_row_is_compiled(monkeypatch):
    chosen = set()
    first_fit = config.first_fit

    def noting(table, **call):
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


def test_the_limits_can_be_broken():
    """Chunks that are too large are detected, and a kernel that gives wrong results on an H200."""
    broken = compiled("compile_cases", 90, "BROKEN")
    assert broken["fp32"][-1].spilled_bytes > STACK_BYTES["SSD_PORTABLE"]
    assert broken["rows of 64 bytes"][0].lost_addresses == (0 if NEWER else 3)


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
    ("@!PT MOV R107, R6", WAIT, 0), ("LDS.128 R100, [R6]", WAIT, 0),
    ("LDS.128 R101, [R6]", WAIT, 1), ("STS.128 [R6], R104", WAIT, 0),
    ("ISETP.GT.AND P0, PT, R104, R6, PT", WAIT, 0), ("MOV R105, R6", "@P1 " + WAIT, 1),
    ("WARPGROUP.DEPBAR.LE gsb0, 0x1", "MOV R104, R6", 1), ("FADD R6, R6, R6", "NOP", 0),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second", "count"), FOUND)
def test_finds_writes_to_operands_before_a_wait(first, second, count):
    assert len(racy_writes(LOOP.format(first=first, second=second))) == count
