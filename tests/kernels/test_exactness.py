"""Accuracy of the portable kernel with exact intermediates, in the interpreter.  `test_exactness_gpu.py` tests every
kernel and models' sizes on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from ssd_cases import EXACT, Case
from test_exactness_gpu import assert_no_head_is_less_exact

from ssdprof.kernels.ssd.config import SSDPortableConfig
from ssdprof.kernels.ssd.portable import ssd_fused_portable
from ssdprof.kernels.ssd.reference import ssd_recurrence

UNIT_ROUNDOFF = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
SMALL = dict(headdim=16, dstate=16, chunk_size=256, skip="")
SEGMENT = 256  # positions: a sequence of this length has no first pass


@pytest.mark.slow
@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF, ids=str)
def test_no_head_is_less_exact_than_unfused(dtype: torch.dtype) -> None:
    """Chunks: 64 positions, 256 in the unfused pipeline.  The heads forget within 40 and 3 positions."""
    case = Case(batch=6, seqlen=SEGMENT + 64, heads=2, dt_limit=(0.025, 0.025), dtype=dtype, **SMALL)
    assert_no_head_is_less_exact(
        partial(ssd_fused_portable, precision=EXACT, config=SSDPortableConfig()), case.inputs()
    )


@pytest.mark.parametrize("p_rows", [True, False], ids=["p rows", "n rows"])
@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF, ids=str)
def test_nothing_is_rounded_on_the_way_into_the_state(dtype: torch.dtype, p_rows: bool) -> None:
    """Rounding x times its weight would cost 0.4 of a unit roundoff."""
    inputs = Case(seqlen=SEGMENT, initial_states=True, dtype=dtype, **SMALL).inputs()
    states = ssd_fused_portable(inputs, EXACT, config=replace(SSDPortableConfig(), p_rows=p_rows)).final_states.double()
    exact = ssd_recurrence(inputs).final_states
    assert (states - exact).norm() < UNIT_ROUNDOFF[dtype] / 16 * exact.norm()
