"""The committed configurations: every call gets a row, and every row is used.  `test_choices.py` freezes which one."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
import triton
from kernel_cases import SSDCase

from ssdprof.kernels.ssd.config import (
    BMM_CHUNK,
    CHUNK_SCAN,
    CHUNK_STATE,
    HOPPER,
    PORTABLE,
    Rule,
    SSDPortableConfig,
    first_fit,
)
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig

CALLS: list[dict[str, Any]] = [
    dict(major=major, wide=wide, headdim=headdim, dstate=dstate, gate=gate)
    for major, wide, headdim, dstate, gate in product(
        (8, 9, 10, 12, 13), (False, True), (1, 16, 64, 80, 128, 256), (16, 64, 128, 256), (False, True)
    )
]
TABLES: dict[str, Sequence[Rule[Any]]] = {
    "HOPPER": HOPPER, "PORTABLE": PORTABLE, "CHUNK_STATE": CHUNK_STATE, "BMM_CHUNK": BMM_CHUNK,
    "CHUNK_SCAN": CHUNK_SCAN,
}  # fmt: skip


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_call_has_a_row_and_every_row_a_call(table: Sequence[Rule[Any]]) -> None:
    taken = [first_fit(table, **call) for call in CALLS]
    assert all(any(row is one for one in taken) for row in table)
    assert all(row.why for row in table)


def test_fp32_sums_over_n_are_short() -> None:
    """benchmarks/log/ssd.md#row-60: a tensor core rounds towards zero whenever it adds products."""
    assert all(first_fit(PORTABLE, **call).take.block_n <= 64 for call in CALLS if call["wide"])


def test_no_product_on_hopper_has_rows_whose_addresses_ptxas_loses() -> None:
    """benchmarks/log/ssd.md#row-57.  Products of less than 64 rows take their operands from registers."""
    for call in (call for call in CALLS if call["major"] == 9):
        tile = first_fit(PORTABLE, **call).take
        width = min(tile.block_p, triton.next_power_of_2(call["headdim"])) * (4 if call["wide"] else 2)
        assert tile.chunk < 64 or width >= 128, call


def test_a_reason_goes_with_the_choice() -> None:
    inputs = SSDCase(dtype=torch.bfloat16, headdim=64, dstate=128).inputs()
    assert SSDPortableConfig.choose(inputs, (8, 0)).reason == PORTABLE[-2].why
    assert SSDHopperConfig.choose(inputs, 132, batch_invariant=False).reason.endswith(HOPPER[0].why)
