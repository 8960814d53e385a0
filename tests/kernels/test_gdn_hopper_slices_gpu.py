"""K and V other than 128 on GDN's Hopper kernels, against the oracle in fp64 and the unfused pipeline."""

from dataclasses import replace

import pytest
import torch
from gdn_hopper_cases import GDNCase
from test_gdn_hopper_gpu import assert_same, head_errors, on_gpu
from test_gdn_hopper_gpu import pytestmark as pytestmark

from ssdprof.kernels import get
from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig
from ssdprof.kernels.gdn.hopper.slices import SlicedLaunch
from ssdprof.kernels.gdn.reference import gdn_chunked
from ssdprof.kernels.precision import Precision
from ssdprof.measure.accuracy import assert_passes

OLMO = GDNCase(key_heads=4, heads=4, key_dim=96, value_dim=192, initial_state=True, seqlen=2048, beta=2.0)
CASES = {
    "olmo": OLMO,
    "normalised, fp16": replace(OLMO, normalise=True, dtype=torch.float16),
    "no gate": replace(OLMO, gate=0.0),
    "slow": replace(OLMO, gate=-1e-4, seqlen=4096),
    "ragged batch": replace(OLMO, batch=3, seqlen=1000),
    "packed": replace(OLMO, lengths=(5, 0, 295, 1024, 76, 0, 1600), gate=-1e-3),
    "one slice": GDNCase(key_heads=2, heads=4, key_dim=72, value_dim=120, seqlen=700),
    "V 256": GDNCase(key_heads=2, heads=2, value_dim=256, seqlen=700, initial_state=True),
}


@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(name: str) -> None:
    inputs = on_gpu(CASES[name].inputs())
    plan = get("gdn", "fused").plan(inputs, Precision())
    assert plan.variant == "hopper"
    assert "padded to 128" in plan.reason
    result = get("gdn", "fused").run(inputs, Precision())
    assert_passes(result, inputs, Precision())
    assert_passes(SlicedLaunch(inputs, GDNHopperConfig(segment=8))(inputs), inputs, Precision())
    assert_same(result, get("gdn", "fused").run(inputs, Precision()))


@pytest.mark.parametrize("name", ["olmo", "no gate", "slow"])
def test_no_head_is_less_exact_than_unfused(name: str) -> None:
    inputs = on_gpu(replace(CASES[name], seqlen=8192).inputs())
    exact = gdn_chunked(inputs, torch.float64)
    ours, theirs = (get("gdn", which).run(inputs, Precision()) for which in ("fused", "unfused"))
    for a, b, reference, head_dim in zip(ours, theirs, exact, (2, 1), strict=True):
        assert (head_errors(a, reference, head_dim) <= 1.01 * head_errors(b, reference, head_dim)).all()
