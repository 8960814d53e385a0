"""Tests of the fused kernel that need a GPU, because the interpreter runs one program after the other."""

from dataclasses import replace

import pytest
import torch
from sanitizer_target import on_the_gpu
from ssd_cases import DTYPES, EXACT, PRECISIONS, Case
from test_fused import CASES, TINY, assert_bitwise, fused

from ssdprof.kernels import Precision
from ssdprof.kernels.ssd.config import SSDPortableConfig
from ssdprof.kernels.ssd.inputs import SSDOutput
from ssdprof.kernels.ssd.portable import ssd_fused_portable
from ssdprof.measure.accuracy import assert_passes

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
MAMBA2 = dict(heads=80, headdim=64, dstate=128, dtype=BF16, device="cuda")
# one chunk per segment: the largest number of waits
NERVOUS = SSDPortableConfig(max_segments=10**6, min_chunks=1, max_chunks=1)
MODELS = {
    "mamba2-2.7b": dict(heads=80, headdim=64, dstate=128),
    "granite-4.0-h-small": dict(heads=128, headdim=64, dstate=128),
    "nemotron-3-nano": dict(heads=64, headdim=64, dstate=128, groups=8),
    "zamba2": dict(heads=16, headdim=64, dstate=64, groups=2),
    "p 80": dict(heads=8, headdim=80, dstate=128),
    "p 96": dict(heads=8, headdim=96, dstate=16),
    "p 128, n 256": dict(heads=8, headdim=128, dstate=256, groups=8),
    "p 32": dict(heads=8, headdim=32, dstate=128),
}


@pytest.mark.parametrize("config", [None, TINY, replace(TINY, p_rows=False)], ids=["chosen", "tiny", "tiny, n rows"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_interpreters_cases(case: Case, config: SSDPortableConfig | None) -> None:
    inputs = on_the_gpu(case.inputs())
    assert_passes(fused(inputs, EXACT, config), inputs, EXACT)


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_precisions(dtype: torch.dtype, precision: Precision) -> None:
    inputs = Case(**MAMBA2 | dict(heads=8, dtype=dtype), seqlen=5000, gate=True, initial_states=True).inputs()
    assert_passes(fused(inputs, precision), inputs, precision)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_sizes_of_models(model: str, dtype: torch.dtype) -> None:
    inputs = Case(seqlen=3333, batch=2, **MODELS[model], dtype=dtype, device="cuda").inputs()
    assert_passes(fused(inputs), inputs, EXACT)


@pytest.mark.parametrize("gate", [False, True], ids=["", "gate"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model", ["mamba2-2.7b", "nemotron-3-nano", "zamba2", "p 80", "p 128, n 256", "p 32"])
def test_packed_sequences_of_real_sizes(model: str, dtype: torch.dtype, gate: bool) -> None:
    case = dict(lengths=(1024, 0, 4000, 1, 63, 2500, 0), initial_states=True, gate=gate) | MODELS[model]
    inputs = Case(**case, dtype=dtype, device="cuda").inputs()
    assert_passes(fused(inputs), inputs, EXACT)


@pytest.mark.parametrize("step", [0.0, 1e-30, 50.0, 1e4, 1e30], ids=str)
def test_steps_of_any_size(step: float) -> None:
    inputs = Case(seqlen=5000, heads=4, headdim=64, dstate=128, dt_limit=(step, step), device="cuda").inputs()
    assert_passes(fused(inputs), inputs, EXACT)


def test_packed_sequences_do_not_meet() -> None:
    case = Case(lengths=(1000, 3001, 70), **MODELS["p 80"], gate=True, initial_states=True, dtype=BF16, device="cuda")
    inputs, spoilt = case.inputs(), case.inputs()
    for tensor in (spoilt.x, spoilt.dt, spoilt.B, spoilt.C, spoilt.z):
        assert tensor is not None
        tensor[:, :1000] = torch.nan
        tensor[:, 4001:] = torch.inf
    ours, theirs = (
        SSDOutput(output.out[:, 1000:4001], output.final_states[1]) for output in (fused(inputs), fused(spoilt))
    )
    assert_bitwise(theirs, ours)


@pytest.mark.parametrize("config", [TINY, NERVOUS], ids=["tiny", "nervous"])
def test_configurations_agree(config: SSDPortableConfig) -> None:
    inputs = Case(**MAMBA2 | dict(heads=4), seqlen=3000).inputs()
    assert_passes(ssd_fused_portable(inputs, EXACT, config=config), inputs, EXACT)


@pytest.mark.parametrize("p_rows", [True, False], ids=["p rows", "n rows"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_state_in_blocks_of_n(dtype: torch.dtype, p_rows: bool) -> None:
    config = SSDPortableConfig(
        chunk=32, max_segments=5, min_chunks=1, block_p=32, block_n=64, p_rows=p_rows, num_warps=8
    )
    sizes = MODELS["p 128, n 256"]
    inputs = Case(lengths=(700, 0, 1300), **sizes, gate=True, initial_states=True, dtype=dtype, device="cuda").inputs()
    assert_passes(ssd_fused_portable(inputs, EXACT, config=config), inputs, EXACT)
