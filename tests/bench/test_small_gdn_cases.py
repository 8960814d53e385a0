"""The 27 small cases that are timed against flash-linear-attention."""

from __future__ import annotations

import pytest
import small_gdn_cases as cases
import torch
from ssdprof.bench.contenders import line_up
from ssdprof.bench.judge import judge
from ssdprof.operators.named import resolve
from ssdprof.schema import precisions_for

from ssdprof import operators
from ssdprof.kernels._triton import INTERPRETED

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
