"""No kernel overwrites registers of a matrix product that may still be in flight, as compiled for sm_90."""

import pytest
from compile_target import compiled
from operand_races import racy_writes

pytestmark = pytest.mark.compiler

MODULES = (
    "test_shipped_compile", "test_ssd_compile", "test_fused_compile", "test_fused_hopper_compile",
    "test_gdn_unfused_compile", "test_gdn_fused_compile", "test_gdn_hopper_compile",
)  # fmt: skip
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


@pytest.mark.parametrize("module", MODULES)
def test_no_operand_is_overwritten(module: str) -> None:
    racy = {label: one.racy_writes for label, kernels in compiled(module, 90).items() for one in kernels}
    assert not {label: count for label, count in racy.items() if count}


@pytest.mark.parametrize(
    ("first", "second", "count"),
    [
        ("MOV R104, R6", WAIT, 1),
        (WAIT, "MOV R104, R6", 0),
        ("@P1 MOV R107, R6", WAIT, 1),
        ("@!PT MOV R107, R6", WAIT, 0),
        ("LDS.128 R100, [R6]", WAIT, 0),
        ("LDS.128 R101, [R6]", WAIT, 1),
        ("STS.128 [R6], R104", WAIT, 0),
        ("ISETP.GT.AND P0, PT, R104, R6, PT", WAIT, 0),
        ("MOV R105, R6", "@P1 " + WAIT, 1),
        ("WARPGROUP.DEPBAR.LE gsb0, 0x1", "MOV R104, R6", 1),
        ("FADD R6, R6, R6", "NOP", 0),
    ],
)
def test_finds_writes_before_a_wait(first: str, second: str, count: int) -> None:
    assert len(racy_writes(LOOP.format(first=first, second=second))) == count
