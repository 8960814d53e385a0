"""The 27 small cases that are timed against flash-linear-attention."""

from __future__ import annotations

import pytest
import small_gdn_cases as cases
import torch
from fakes import contender, measured, report
from ssdprof.kernels._triton import INTERPRETED
from ssdprof.schema import precisions_for

from ssdprof import operators

# TODO ssdprof.bench.contenders: line_up
# TODO ssdprof.bench.judge: judge
# TODO ssdprof.bench.schema: BenchReport
from ssdprof.errors import BadInputError
from ssdprof.operators.implementations import resolve

CPU = torch.device("cpu")


def test_there_are_15_batches_and_12_packs() -> None:
    found = list(cases.cells())
    assert [cell.tokens.packed for cell in found] == [False] * 15 + [True] * 12
    assert len({str(cell) for cell in found}) == 27
    for cell in found:
        inputs = cases.draw(cell, CPU)
        assert (inputs.q.dtype, inputs.sequences) == (torch.float16, cell.tokens.sequences)
        if cell.tokens.packed:
            assert inputs.cu_seqlens is not None
            assert isinstance(cell.shape, cases.SmallShape)
            assert inputs.cu_seqlens.diff().min() > 0
            assert inputs.cu_seqlens[-1] == inputs.length == cell.shape.total
        else:
            assert inputs.length == cell.tokens.seqlen
    half = cases.draw(found[2], CPU).g
    assert 0.4 < (half == 0).float().mean() < 0.6


@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter's kernels run on a CPU")
@pytest.mark.parametrize("number", [0, 15])
def test_ours_compute_them(number: int) -> None:
    cell, gdn = list(cases.cells())[number], operators.get("gdn")
    inputs = cases.draw(cell, CPU)
    contenders = line_up(
        gdn, cell, precisions_for("fp16", "exact", None), [resolve(gdn, "unfused"), resolve(gdn, "fused")], ()
    )
    judged = judge([entry for one in contenders for entry in one.entries(gdn, inputs)])
    assert {one.verdict.status for one in judged} == {"passed"}, [one.verdict.reason for one in judged]


def test_the_table_has_ratios_of_device_times() -> None:
    times = (contender("fla", lambda _: 300.0, ours=False), contender("fused", lambda _: 100.0))
    text = cases.table(report(*measured(*times)))
    assert "| tiny | 300.0 | 100.0 | - | - | 3.00x | - | - |" in text
    assert "geometric mean of 1 cases: 3.00x" in text


def test_cases_of_an_earlier_run_are_joined_in_order() -> None:
    first, second = (cell.shape.name for cell in list(cases.cells())[:2])
    one = measured(contender("fused", lambda _: 100.0))
    earlier, later = (_of(name, report(*one, seconds=2.0)) for name in (second, first))
    found = cases.joined(earlier, later)
    assert [cell.shape for cell in found.cells] == [first, second]
    assert found.seconds == 4


def test_cases_of_other_kernels_are_not_joined() -> None:
    one = report(*measured(contender("fused", lambda _: 100.0)), kernels="0123")
    with pytest.raises(BadInputError, match="'kernels': '0123'"):
        cases.joined(one, one.model_copy(update={"kernels": "4567"}))


def _of(name: str, found: BenchReport) -> BenchReport:
    return found.model_copy(update={"cells": tuple(cell.model_copy(update={"shape": name}) for cell in found.cells)})
