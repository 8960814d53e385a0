"""State and chunk sizes of models that are not powers of two, against the fp64 oracle."""

from dataclasses import replace

import pytest
import torch
from ssd_cases import EXACT, RELAXED, Case

from ssdprof.kernels import Precision, UnsupportedError, get
from ssdprof.kernels.ssd.config import SSDPortableConfig
from ssdprof.kernels.ssd.portable import ssd_fused_portable
from ssdprof.measure.accuracy import assert_passes

BF16, FP32 = torch.bfloat16, torch.float32
PACKED = Case(lengths=(40, 0, 35), gate=True, skip="(h, p)", initial_states=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unfused", "fused"])
@pytest.mark.parametrize("dstate", [1, 8, 24, 48, 96, 100, 192, 255])
def test_a_state_size_that_is_no_power_of_two_passes(name: str, dstate: int) -> None:
    dtype = BF16 if dstate % 16 else FP32
    for case in (Case(dstate=dstate, dtype=dtype), replace(PACKED, dstate=dstate, dtype=dtype)):
        inputs = case.inputs()
        assert_passes(get("ssd", name).run(inputs, EXACT), inputs, EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unfused", "fused"])
@pytest.mark.parametrize("chunk_size", [1, 8, 48, 96, 100, 300, 1024])
def test_any_chunk_size_passes(name: str, chunk_size: int) -> None:
    inputs = Case(seqlen=150, chunk_size=chunk_size, initial_states=True, dtype=BF16).inputs()
    for precision in (EXACT, RELAXED):
        assert_passes(get("ssd", name).run(inputs, precision), inputs, precision)


@pytest.mark.slow
@pytest.mark.parametrize("p_rows", [True, False])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16])
def test_a_padded_state_is_handed_from_segment_to_segment(p_rows: bool, state_dtype: torch.dtype) -> None:
    """Three blocks of N, the last half empty; four segments; the memory next to a state belongs to something else."""
    precision = Precision(state_dtype=state_dtype)
    config = SSDPortableConfig(chunk=16, max_segments=4, min_chunks=1, block_p=16, block_n=16, p_rows=p_rows)
    inputs = Case(batch=2, seqlen=70, headdim=20, dstate=40, initial_states=True, dtype=BF16).inputs()
    assert config.handover(inputs)
    assert_passes(ssd_fused_portable(inputs, precision, config=config), inputs, precision)


def test_what_lies_behind_a_row_of_b_and_c_is_not_read() -> None:
    """B and C are columns of one projection: after B's 24 columns come others, here NaN."""
    inputs = Case(dstate=24, dtype=BF16).inputs()
    wide = torch.full((*inputs.B.shape[:3], 40), torch.nan, dtype=BF16)
    B, C = wide.clone(), wide.clone()
    B[..., :24], C[..., :24] = inputs.B, inputs.C
    spoilt = replace(inputs, B=B[..., :24], C=C[..., :24])
    for name in ("unfused", "fused"):
        assert_passes(get("ssd", name).run(spoilt, EXACT), inputs, EXACT)


@pytest.mark.parametrize("name", ["unfused", "fused"])
@pytest.mark.parametrize("dstate", [257, 512])
def test_a_state_size_above_256_is_refused_by_name(name: str, dstate: int) -> None:
    inputs = Case(dstate=dstate).inputs()
    for call in (get("ssd", name).run, get("ssd", name).plan):
        with pytest.raises(UnsupportedError, match=f"{name}: dstate is at most 256, not {dstate}"):
            call(inputs, EXACT)
