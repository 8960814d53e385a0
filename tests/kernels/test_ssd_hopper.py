"""What only SSD's Hopper kernel has: first passes, rings, shares.  In the emulator, and the same on
a GPU.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from gluon_emulator import emulate
from kernel_cases import BF16, EXACT, RELAXED, SSDCase, assert_bitwise
from targets import H200, ON_HOPPER, SSD_ON_HOPPER, ssd_hopper
from test_contract_oracle import CUTS, RAGGED
from verdict import assert_passes

from ssdprof.kernels import Precision, get
from ssdprof.kernels.hopper.schedule import Cut
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig, unsupported
from ssdprof.kernels.ssd.hopper.hopper_kernel import SEQUENCE_BLOCK
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.reference import ssd_chunked

SMALL = SSDCase(**SSD_ON_HOPPER)
SLOW = pytest.mark.slow
GPU = [pytest.mark.gpu, ON_HOPPER]


def passes(
    inputs: SSDInputs, cut: Cut, precision: Precision = EXACT, *, ring: int = 0
) -> SSDOutput:
    config = replace(SSDHopperConfig.choose(inputs, H200, batch_invariant=False), **vars(cut))
    output: SSDOutput = ssd_hopper(replace(config, ring=ring) if ring else config)(
        inputs, precision
    )
    assert_passes(output, inputs, precision)
    return output


def recompute(before: int) -> Cut:
    """The second segment is one chunk long, and goes over all chunks before."""
    return Cut(long_count=1, long_segment=before, segment=1, recompute=True)


def slowly(inputs: SSDInputs, factor: float = 0.01) -> SSDInputs:
    """The decays are slow, so that the first chunk contributes as much as the last."""
    inputs.A.mul_(factor)
    return inputs


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("resident", [1, 2, 5])
def test_every_cut_in_any_order(monkeypatch: pytest.MonkeyPatch, cut: str, resident: int):
    for seed in range(3):
        emulate(monkeypatch, seed=seed, resident=resident)
        passes(RAGGED.inputs(), CUTS[cut])


# more packed sequences than are looked at side by side
MANY = (1, 0, 0, 0, 0, 0) * 22 + (70, 0, 65)
STATEFUL = dict(seqlen=520, initial_states=True)
# sizes, the cut, the factor of the decays, and slots of the ring that tuning may find
FIRST_PASSES = [
    # over any number of chunks; with N = 256 two at once
    *(
        (dict(dstate=n, seqlen=64 * k + 50), recompute(k), 0.01, 0)
        for n in (64, 256)
        for k in range(1, 6)
    ),
    *(
        (STATEFUL | dict(seqlen=300, dstate=256, heads=1), CUTS[cut], 0.1, 0)
        for cut in ("long ones first", "none waits")
    ),
    *(
        pytest.param(STATEFUL | dict(dstate=n), CUTS["long ones first"], 0.1, ring, marks=SLOW)
        for ring, n in ((2, 64), (4, 64), (2, 256))
    ),
    pytest.param(dict(lengths=MANY, initial_states=True), CUTS["a chunk each"], 1.0, 0, marks=SLOW),
]


@pytest.mark.parametrize(("sizes", "cut", "factor", "ring"), FIRST_PASSES)
def test_first_passes(device: str, sizes: dict[str, Any], cut: Cut, factor: float, ring: int):
    assert len(MANY) > SEQUENCE_BLOCK.value
    passes(slowly(SMALL.but(**sizes, device=device).inputs(), factor), cut, ring=ring)


@pytest.mark.slow
@pytest.mark.parametrize("ring", [2, 3, 4])
@pytest.mark.parametrize("dstate", [64, 256])
def test_weights_that_nobody_has_read_are_not_overwritten(
    monkeypatch: pytest.MonkeyPatch, dstate: int, ring: int
):
    """The first pass uses every slot of each ring more than once, with roles in several orders."""
    inputs = slowly(SMALL.but(dstate=dstate, seqlen=64 * 12 + 5).inputs())
    for seed in range(4):
        emulate(monkeypatch, seed=seed)
        passes(inputs, recompute(12), ring=ring)


@pytest.mark.parametrize("before", [2, 3, 4])
@pytest.mark.parametrize("rates", [(-4.0, -0.01), (-0.01, -4.0)], ids=["the second", "the first"])
def test_a_first_pass_ends_when_both_heads_have_forgotten(
    device: str, rates: tuple[float, float], before: int
):
    """One of a program's two heads forgets within a chunk, and the other forgets very slowly."""
    inputs = SMALL.but(seqlen=64 * before + 50, device=device).inputs()
    inputs.A.copy_(torch.tensor(rates))
    inputs.dt.fill_(1.0)
    passes(inputs, recompute(before))


SHARED = [
    *(
        pytest.param(dict(dstate=n, heads=4, batch=3, seqlen=300, initial_states=True), marks=SLOW)
        for n in (64, 256)
    ),
    *(
        pytest.param(dict(device="cuda") | sizes, marks=GPU)
        for sizes in (
            dict(heads=80, batch=7, seqlen=3000, initial_states=True),
            dict(heads=24, dstate=64, groups=4, batch=13, seqlen=1, skip="(h, p)"),
            dict(heads=16, headdim=80, groups=2, batch=40, seqlen=100),
            dict(heads=32, dstate=256, headdim=128, batch=5, seqlen=1000, initial_states=True),
        )
    ),
]


@pytest.mark.parametrize("sizes", SHARED, ids=str)
def test_in_equal_shares_to_the_last_bit_as_if_no_sequence_were_divided(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any]
):
    """States pass between shares in fp32, with exact and relaxed intermediates.  On all
    multiprocessors and on few.
    """
    case = SMALL.but(**sizes)
    inputs = case.inputs()
    nchunks = -(-case.seqlen // 64)
    gpu = case.device == "cuda"
    for precision, shares in product(
        (EXACT, RELAXED) if gpu else (EXACT,), (H200, 131, 7, 1) if gpu else range(1, 12)
    ):
        if not gpu:
            emulate(monkeypatch, seed=shares)
        whole = passes(inputs, Cut(segment=nchunks), precision)
        assert_bitwise(passes(inputs, Cut(segment=nchunks, shares=shares), precision), whole)


def test_states_lose_less_than_their_operands_do(device: str):
    """Rounding x times its weight to bf16 would cost 1.6e-3; the kernel adds the rounding error
    back.
    """
    inputs = SMALL.but(seqlen=384, device=device).inputs()
    states = passes(inputs, CUTS["one segment"]).final_states.double()
    exact = ssd_chunked(inputs, torch.float64).final_states
    assert (states - exact).norm() / exact.norm() < 2**-14


# --- on a GPU


@pytest.mark.gpu
@ON_HOPPER
def test_what_it_takes_and_what_it_leaves_to_the_portable_kernel():
    plan = get("ssd", "fused").plan
    gpu = SMALL.but(heads=4, device="cuda")
    for heads, headdim, dstate, groups in (
        (80, 64, 128, 1),
        (128, 64, 128, 1),
        (64, 64, 128, 8),
        (48, 64, 128, 1),
        (128, 80, 128, 8),
        (80, 64, 64, 1),
        (32, 128, 256, 1),
        (24, 64, 256, 1),
    ):
        case = gpu.but(seqlen=300, heads=heads, headdim=headdim, dstate=dstate, groups=groups)
        assert plan(case.inputs(), EXACT).variant == "hopper"
    inputs = gpu.but(seqlen=200).inputs()
    for left, why in (
        (gpu.but(dtype=torch.float32).inputs(), "fp32"),
        (gpu.but(gate=True).inputs(), "gate"),
        (gpu.but(dstate=32).inputs(), "dstate 32"),
        (gpu.but(groups=4).inputs(), "heads per group"),
        (replace(inputs, dt=inputs.dt.double()), "dt"),
    ):
        assert plan(left, EXACT).variant == "portable"
        assert why in plan(left, EXACT).reason
        assert_passes(get("ssd", "fused").run(left, EXACT), left, EXACT)
    shifted = (
        torch.empty(200 * 4 * 64 + 1, dtype=BF16, device="cuda")[1:]
        .view(1, 200, 4, 64)
        .copy_(inputs.x)
    )
    assert "alignment of x" in unsupported(replace(inputs, x=shifted))
