"""Resident blocks, against values computed by hand from the programming guide's tables."""

from types import SimpleNamespace

import pytest
import torch

from ssdprof.core.case import Launch
from ssdprof.measure.roofline import with_occupancy


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    sizes = {"max_threads_per_multi_processor": 2048, "shared_memory_per_multiprocessor": 233_472}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=9, minor=0, **sizes)
    )


def launch(warps: int, registers: int, shared: int) -> Launch:
    return Launch(kernel="k", config={"num_warps": warps}, registers=registers, shared_bytes=shared)


@pytest.mark.parametrize(
    ("warps", "registers", "shared", "blocks", "limited_by"),
    [
        (4, 32, 0, 16, "registers and warps: 16 x 4 x 32 x 32 is all of either"),
        (1, 16, 0, 32, "blocks"),
        (4, 128, 1024, 4, "registers: 4 x 4 x 4,096"),
        (4, 130, 1024, 3, "registers: 130 x 32 rounded up to 4,352"),
        (4, 64, 100_000, 2, "shared: 2 x (100,096 + 1,024) of 233,472"),
        (4, 64, 116_000, 1, "shared: 116,096 + 1,024 is more than half"),
        (4, 64, 115_712, 2, "shared: 2 x (115,712 + 1,024) is all of it"),
        (15, 128, 200_000, 1, "shared"),
        (8, 255, 0, 1, "registers: 255 x 32 rounded up to 8,192, 8 warps"),
    ],
)
def test_blocks_per_sm(warps, registers, shared, blocks, limited_by):
    found = with_occupancy(launch(warps, registers, shared), torch.device("cuda"))
    assert found.blocks_per_sm == blocks, limited_by
    assert found.warps_pct == pytest.approx(100 * blocks * warps / 64)


def test_a_kernel_that_does_not_tell_what_it_takes():
    for unknown in ({"registers": None}, {"shared_bytes": None}, {"config": {}}):
        silent = launch(4, 32, 0).changed(**unknown)
        assert with_occupancy(silent, torch.device("cuda")) == silent
