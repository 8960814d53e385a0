"""Resident blocks, against values computed by hand from the programming guide's tables."""

import pytest

from ssdprof.core.case import Launch
from ssdprof.measure.roofline import SMLimits, with_occupancy

HOPPER = SMLimits(warps=64, blocks=32, shared_bytes=233_472)
AMPERE = SMLimits(warps=64, blocks=32, shared_bytes=167_936)  # sm_80


def launch(warps: int, registers: int, shared: int) -> Launch:
    return Launch(kernel="k", config={"num_warps": warps}, registers=registers, shared_bytes=shared)


@pytest.mark.parametrize(
    ("kernel", "limits", "blocks", "limited_by"),
    [
        (launch(4, 32, 0), HOPPER, 16, "registers and warps: 16 x 4 x 32 x 32 is all of either"),
        (launch(1, 16, 0), HOPPER, 32, "blocks"),
        (launch(4, 128, 1024), HOPPER, 4, "registers: 4 x 4 x 4,096"),
        (launch(4, 130, 1024), HOPPER, 3, "registers: 130 x 32 rounded up to 4,352"),
        (launch(4, 64, 100_000), HOPPER, 2, "shared: 2 x (100,096 + 1,024) of 233,472"),
        (launch(4, 64, 116_000), HOPPER, 1, "shared: 116,096 + 1,024 is more than half"),
        (launch(4, 64, 82_944), AMPERE, 2, "shared: 2 x (82,944 + 1,024) is all of it"),
        (launch(15, 128, 200_000), HOPPER, 1, "shared"),
        (launch(8, 255, 0), HOPPER, 1, "registers: 255 x 32 rounded up to 8,192, 8 warps"),
    ],
)
def test_blocks_per_sm(kernel: Launch, limits: SMLimits, blocks: int, limited_by: str) -> None:
    found = with_occupancy(kernel, limits)
    assert found.blocks_per_sm == blocks, limited_by
    warps = kernel.config["num_warps"]
    assert isinstance(warps, int)
    assert found.warps_pct == pytest.approx(100 * blocks * warps / 64)


def test_a_kernel_that_does_not_tell_what_it_takes() -> None:
    whole = launch(4, 32, 0)
    for silent in (whole.changed(registers=None), whole.changed(shared_bytes=None), whole.changed(config={})):
        assert with_occupancy(silent, HOPPER) == silent
