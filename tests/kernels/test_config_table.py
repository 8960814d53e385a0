"""The committed configurations: which row a call gets, every call gets a row, and every row is used."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
import triton
from ssd_cases import Case

from ssdprof.kernels.ssd.config import (
    BMM_CHUNK,
    CHUNK_SCAN,
    CHUNK_STATE,
    HOPPER,
    PORTABLE,
    Rule,
    SSDPortableConfig,
    first_fit,
    unfused_blocks,
)
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig

CALLS: list[dict[str, Any]] = [
    dict(major=major, wide=wide, headdim=headdim, dstate=dstate, gate=gate)
    for major, wide, headdim, dstate, gate in product(
        (8, 9, 10, 12, 13), (False, True), (1, 16, 64, 80, 128, 256), (16, 64, 128, 256), (False, True)
    )
]
TABLES: dict[str, Sequence[Rule[Any]]] = {
    "HOPPER": HOPPER,
    "PORTABLE": PORTABLE,
    "CHUNK_STATE": CHUNK_STATE,
    "BMM_CHUNK": BMM_CHUNK,
    "CHUNK_SCAN": CHUNK_SCAN,
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_call_has_a_row_and_every_row_a_call(table: Sequence[Rule[Any]]) -> None:
    taken = [first_fit(table, **call) for call in CALLS]
    assert all(any(row is one for one in taken) for row in table)
    assert all(row.why for row in table)


def portable(capability: tuple[int, int], headdim: int = 64, dstate: int = 128, **case: Any) -> tuple[object, ...]:
    inputs = Case(seqlen=1024, heads=1, headdim=headdim, dstate=dstate, **case).inputs()
    config = SSDPortableConfig.choose(inputs, capability)
    return config.chunk, config.block_p, config.p_rows, config.num_warps


@pytest.mark.parametrize(
    ("capability", "sizes", "expected"),
    [
        ((8, 0), {}, (64, 64, True, 8)),
        ((8, 9), {}, (64, 64, True, 8)),
        ((9, 0), {}, (64, 64, True, 4)),
        ((10, 0), {}, (64, 64, True, 4)),
        ((12, 0), {}, (64, 64, True, 8)),
        ((8, 0), {"dstate": 256}, (32, 32, True, 8)),
        ((9, 0), {"dstate": 256}, (64, 64, False, 8)),
        ((10, 0), {"dstate": 256}, (64, 32, False, 4)),
        ((9, 0), {"headdim": 32}, (32, 32, True, 2)),
        ((9, 0), {"headdim": 8}, (32, 16, True, 2)),
    ],
)
def test_the_portable_kernel_by_gpu_and_sizes(
    capability: tuple[int, int], sizes: dict[str, int], expected: tuple[object, ...]
) -> None:
    assert portable(capability, **sizes, dtype=torch.bfloat16) == expected


@pytest.mark.parametrize("call", [call for call in CALLS if call["wide"]], ids=str)
def test_fp32_sums_over_n_are_short(call: dict[str, Any]) -> None:
    """benchmarks/log/ssd.md#row-60: a tensor core rounds towards zero whenever it adds products."""
    assert first_fit(PORTABLE, **call).take.block_n <= 64


def test_fp32_takes_short_chunks_on_every_gpu() -> None:
    for capability in ((8, 0), (9, 0), (12, 0)):
        assert portable(capability, dstate=64, dtype=torch.float32) == (32, 32, True, 4)
        assert portable(capability, dtype=torch.float32) == (32, 32, True, 4)
        assert portable(capability, dstate=256, dtype=torch.float32) == (16, 32, True, 4)


@pytest.mark.parametrize("call", [call for call in CALLS if call["major"] == 9], ids=str)
def test_no_product_on_hopper_has_rows_whose_addresses_ptxas_loses(call: dict[str, Any]) -> None:
    """benchmarks/log/ssd.md#row-57.  Products of less than 64 rows take their operands from registers."""
    tile = first_fit(PORTABLE, **call).take
    width = min(tile.block_p, triton.next_power_of_2(call["headdim"])) * (4 if call["wide"] else 2)
    assert tile.chunk < 64 or width >= 128


def test_a_reason_goes_with_the_choice() -> None:
    inputs = Case(dtype=torch.bfloat16, headdim=64, dstate=128).inputs()
    assert SSDPortableConfig.choose(inputs, (8, 0)).reason == PORTABLE[-2].why
    assert SSDHopperConfig.choose(inputs, 132, batch_invariant=False).reason.endswith(HOPPER[0].why)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, (128, 64, 128, 4)),
        ({"gate": True}, (64, 64, 128, 4)),
        ({"headdim": 80}, (64, 128, 128, 8)),
        ({"dstate": 256}, (128, 64, 32, 4)),
        ({"dtype": torch.float32}, (64, 64, 32, 8)),
        ({"chunk": 16, "headdim": 8, "dstate": 24}, (16, 16, 32, 4)),
    ],
)
def test_chunk_scan_by_sizes(sizes: dict[str, Any], expected: tuple[int, ...]) -> None:
    blocks = unfused_blocks(
        "chunk_scan", **({"headdim": 64, "dstate": 128, "chunk": 256, "dtype": torch.bfloat16} | sizes)
    )
    assert tuple(blocks[name] for name in ("block_q", "block_p", "block_n", "num_warps")) == expected


def test_chunk_state_holds_a_whole_state_where_it_can() -> None:
    def tile(headdim: int, dstate: int, dtype: torch.dtype = torch.bfloat16) -> tuple[int, ...]:
        blocks = unfused_blocks("chunk_state", dtype, chunk=256, headdim=headdim, dstate=dstate)
        return blocks["block_p"], blocks["block_n"], blocks["num_warps"]

    assert tile(64, 128) == (64, 128, 4)
    assert tile(80, 64) == (128, 64, 4)
    assert tile(128, 256) == (128, 128, 8)
    assert tile(128, 256, torch.float32) == (64, 64, 4)


def test_bmm_chunk_reads_half_as_many_fp32_numbers_at_a_time() -> None:
    for dtype, block_n in ((torch.bfloat16, 64), (torch.float32, 32)):
        blocks = unfused_blocks("bmm_chunk", dtype, chunk=256, dstate=128)
        assert (blocks["block_q"], blocks["block_s"], blocks["block_n"]) == (64, 64, block_n)


@pytest.mark.parametrize(("major", "gate", "stages"), [(9, True, 2), (9, False, 3), (10, True, 3), (8, True, 3)])
def test_only_beside_a_gate_on_hopper_the_first_pass_has_two_chunks_in_flight(
    major: int, gate: bool, stages: int
) -> None:
    inputs = Case(seqlen=1024, heads=1, headdim=64, dstate=128, dtype=torch.bfloat16, gate=gate).inputs()
    assert SSDPortableConfig.choose(inputs, (major, 0)).state_stages == stages
