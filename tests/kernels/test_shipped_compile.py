"""Every row of the committed configurations compiles for sm_80, sm_90 and sm_100, and needs no more registers, stack
and shared memory than is recorded in `data/compiled.json`.

Other tests (`test_*_compile.py`) have absolute limits; this one detects a change for the worse.  After an intended
change, record again: python tests/kernels/machine_code.py --record
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import triton
from compile_target import CAPABILITIES, RECORDED, assert_recorded, compiled, on_meta, recorded_form
from machine_code import HASHES, TABLES, operators_hashes
from ssd_cases import EXACT, RELAXED, Case

from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd import config
from ssdprof.kernels.ssd.config import SSDPortableConfig
from ssdprof.kernels.ssd.portable import ssd_fused_portable
from ssdprof.kernels.ssd.unfused import five_stages

pytestmark = pytest.mark.compiler

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
P64 = Case(seqlen=1000, heads=2, headdim=64, dstate=128, chunk_size=256, dtype=BF16)
PACKED = dict(lengths=(600, 9), initial_states=True, gate=True, skip="(h, p)")

PORTABLE: dict[str, tuple[Case, Precision]] = {
    "fp32, n 64": (replace(P64, dstate=64, dtype=FP32), EXACT),
    "fp32, n 128": (replace(P64, dtype=FP32), EXACT),
    "fp32, n 256": (replace(P64, dstate=256, dtype=FP32), EXACT),
    "bf16, p 32": (replace(P64, headdim=32), EXACT),
    "bf16": (replace(P64, seqlen=1024), EXACT),
    "bf16, gate": (replace(P64, seqlen=1024, gate=True), EXACT),
    "fp16, p 80, packed, relaxed": (replace(P64, headdim=80, dtype=FP16, **PACKED), RELAXED),  # type: ignore[arg-type]
    "bf16, n 256": (replace(P64, dstate=256), EXACT),
    "bf16, p 128, n 256, packed": (replace(P64, headdim=128, dstate=256, **PACKED), EXACT),  # type: ignore[arg-type]
}
UNFUSED: dict[str, tuple[Case, Precision]] = {
    "fp32": (replace(P64, dtype=FP32), EXACT),
    "bf16": (P64, EXACT),
    "bf16, n 256": (replace(P64, dstate=256), EXACT),
    "fp16, packed, relaxed": (replace(P64, dtype=FP16, **PACKED), RELAXED),  # type: ignore[arg-type]
    "bf16, n 256, packed": (replace(P64, dstate=256, **PACKED), EXACT),  # type: ignore[arg-type]
    "bf16, p 128, n 64": (replace(P64, headdim=128, dstate=64), EXACT),
    "bf16, p 128": (replace(P64, headdim=128), EXACT),
    "bf16, p 128, n 256": (replace(P64, headdim=128, dstate=256), EXACT),
}


def launch_portable(case: Case, precision: Precision) -> None:
    inputs = on_meta(case.inputs())
    capability = triton.runtime.driver.active.get_current_target().arch
    ssd_fused_portable(inputs, precision, config=SSDPortableConfig.choose(inputs, divmod(capability, 10)))


def launch_unfused(case: Case, precision: Precision) -> None:
    five_stages(on_meta(case.inputs()), precision)


LAUNCHES: dict[str, Callable[[], None]] = {
    f"portable: {label}": partial(launch_portable, *case) for label, case in PORTABLE.items()
} | {f"unfused: {label}": partial(launch_unfused, *case) for label, case in UNFUSED.items()}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_takes_no_more_than_recorded(capability: int) -> None:
    recorded = json.loads(RECORDED.read_text())[str(capability)]
    for name, taken in recorded_form("test_shipped_compile", capability).items():
        kernel, *limits = recorded[name].split()
        found, *resources = taken.split()
        assert found == kernel
        for value, limit in zip(resources[:3], limits[:3], strict=True):
            assert int(value) <= int(limit), (
                f"{name}: registers, stack, shared memory {taken}, recorded {recorded[name]}"
            )


@pytest.mark.parametrize(("module", "table"), TABLES)
def test_machine_code_is_the_recorded_one(module: str, table: str) -> None:
    assert_recorded(module, table)


def test_operators_hashes_are_those_of_the_recorded_kernels() -> None:
    assert json.loads(HASHES.read_text()) == operators_hashes(json.loads(RECORDED.read_text())["90"])


@pytest.mark.parametrize("label", LAUNCHES)
def test_no_product_on_hopper_reads_from_a_lost_address(label: str) -> None:
    assert [
        kernel.lost_addresses for kernel in compiled("test_shipped_compile", 90)[label] if kernel.lost_addresses
    ] == []


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The rows that are chosen during a test, by id."""
    chosen: set[int] = set()

    first_fit = config.first_fit

    def noting(table: Any, **call: Any) -> Any:
        row = first_fit(table, **call)
        chosen.add(id(row))
        return row

    monkeypatch.setattr(config, "first_fit", noting)
    return chosen


def test_every_row_is_compiled(rows: set[int]) -> None:
    for case, _ in PORTABLE.values():
        for capability in CAPABILITIES:
            SSDPortableConfig.choose(case.inputs(), divmod(capability, 10))
    for case, precision in UNFUSED.values():
        five_stages(replace(case, seqlen=17, chunk_size=16, heads=1).inputs(), precision)
    for table in (config.PORTABLE, config.CHUNK_STATE, config.BMM_CHUNK, config.CHUNK_SCAN):
        for row in table:
            assert id(row) in rows, row
