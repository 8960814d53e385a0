"""The Hopper kernel's source on a CPU (`gluon_emulator.py`), against the oracle."""

from dataclasses import asdict, replace

import pytest
import torch
from gluon_emulator import emulate
from ssd_cases import EXACT, RELAXED, Case, in_fp64

from ssdprof.kernels.hopper.schedule import Cut
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig
from ssdprof.kernels.ssd.hopper.hopper_kernel import SEQUENCE_BLOCK
from ssdprof.kernels.ssd.hopper.launch import ssd_fused_hopper
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.kernels.ssd.reference import ssd_chunked
from ssdprof.measure.accuracy import assert_passes

BF16 = torch.bfloat16
SMALL = dict(headdim=64, dstate=128, dtype=BF16)
CUTS = {
    "one segment": Cut(segment=9),
    "even": Cut(segment=2),
    "a chunk each": Cut(segment=1),
    "long ones first": Cut(long_count=2, long_segment=3, segment=1),
    "none waits": Cut(long_count=1, long_segment=3, segment=2, recompute=True),
}
CASES = {
    "whole chunks": Case(**SMALL, seqlen=384),
    "ragged batch": Case(**SMALL, batch=2, seqlen=333, initial_states=True),
    "p 80": Case(**SMALL | dict(headdim=80, heads=1), seqlen=200),
    "n 64, groups": Case(**SMALL | dict(dstate=64), heads=4, groups=2, seqlen=200),
    "n 256": Case(**SMALL | dict(dstate=256), heads=1, seqlen=300, initial_states=True),
    "packed": Case(**SMALL, lengths=(3, 0, 64, 200, 70), initial_states=True),
    "D (h, p)": Case(**SMALL, seqlen=130, skip="(h, p)"),
    "fp16": Case(**SMALL | dict(dtype=torch.float16), seqlen=200),
}


def config_of(inputs: SSDInputs, segments: Cut) -> SSDHopperConfig:
    return replace(SSDHopperConfig.choose(inputs, sm_count=132, batch_invariant=False), **asdict(segments))


def run(case: Case, segments: Cut, precision: Precision = EXACT) -> None:
    inputs = case.inputs()
    assert_passes(ssd_fused_hopper(inputs, precision, config=config_of(inputs, segments)), inputs, precision)


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("resident", [1, 2, 5])
def test_every_cut(monkeypatch: pytest.MonkeyPatch, cut: str, resident: int) -> None:
    for seed in range(3):
        emulate(monkeypatch, seed=seed, resident=resident)
        run(CASES["ragged batch"], CUTS[cut])


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        *((name, "even") for name in CASES),
        *((name, "none waits") for name in ("ragged batch", "packed")),
        *(
            pytest.param(name, "none waits", marks=pytest.mark.slow)
            for name in sorted(CASES.keys() - {"ragged batch", "packed"})
        ),
    ],
)
def test_every_kind_of_input(monkeypatch: pytest.MonkeyPatch, name: str, cut: str) -> None:
    emulate(monkeypatch, seed=1)
    run(CASES[name], CUTS[cut])


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "ragged batch"),
        (BF16, "fp16"),
        pytest.param(torch.float32, "fp16", marks=pytest.mark.slow),
        pytest.param(torch.float16, "ragged batch", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_dt_of_another_dtype_than_x(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, name: str) -> None:
    emulate(monkeypatch, seed=2)
    inputs = CASES[name].inputs()
    inputs = replace(inputs, dt=inputs.dt.to(dtype))
    config = config_of(inputs, CUTS["long ones first"])
    assert_passes(ssd_fused_hopper(inputs, EXACT, config=config), inputs, EXACT)


def test_rates_residual_and_initial_states_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, seed=2)
    inputs = CASES["ragged batch"].inputs()
    wide = in_fp64(inputs, "A", "D", "dt_bias", "initial_states")
    ours, theirs = (ssd_fused_hopper(one, EXACT, config=config_of(one, CUTS["even"])) for one in (wide, inputs))
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("before", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dstate", [64, 256])
def test_a_first_pass_over_any_number_of_chunks(monkeypatch: pytest.MonkeyPatch, dstate: int, before: int) -> None:
    """The decays are slow, so that the first chunk contributes as much as the last."""
    emulate(monkeypatch, seed=3)
    inputs = Case(**SMALL | dict(dstate=dstate), seqlen=64 * before + 50).inputs()
    inputs.A.mul_(0.01)
    segments = Cut(long_count=1, long_segment=before, segment=1, recompute=True)
    assert_passes(ssd_fused_hopper(inputs, EXACT, config=config_of(inputs, segments)), inputs, EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("ring", [2, 3, 4])
@pytest.mark.parametrize("dstate", [64, 256])
def test_weights_that_nobody_has_read_are_not_overwritten(
    monkeypatch: pytest.MonkeyPatch, dstate: int, ring: int
) -> None:
    """The first pass uses every slot of each ring more than once, with roles in several orders."""
    inputs = Case(**SMALL | dict(dstate=dstate), seqlen=64 * 12 + 5).inputs()
    inputs.A.mul_(0.01)
    config = replace(config_of(inputs, Cut(long_count=1, long_segment=12, segment=1, recompute=True)), ring=ring)
    for seed in range(4):
        emulate(monkeypatch, seed=seed)
        assert_passes(ssd_fused_hopper(inputs, EXACT, config=config), inputs, EXACT)


@pytest.mark.parametrize("before", [2, 3, 4])
@pytest.mark.parametrize("rates", [(-4.0, -0.01), (-0.01, -4.0)], ids=["the second", "the first"])
def test_a_first_pass_ends_when_both_heads_have_forgotten(
    monkeypatch: pytest.MonkeyPatch, rates: tuple[float, float], before: int
) -> None:
    """One of a program's two heads forgets within a chunk, and the other forgets very slowly."""
    emulate(monkeypatch, seed=9)
    inputs = Case(**SMALL | dict(heads=2), seqlen=64 * before + 50).inputs()
    inputs.A.copy_(torch.tensor(rates))
    inputs.dt.fill_(1.0)
    segments = Cut(long_count=1, long_segment=before, segment=1, recompute=True)
    assert_passes(ssd_fused_hopper(inputs, EXACT, config=config_of(inputs, segments)), inputs, EXACT)


def test_more_packed_sequences_than_are_looked_at_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, seed=8)
    lengths = (1, 0, 0, 0, 0, 0) * 22 + (70, 0, 65)
    assert len(lengths) > SEQUENCE_BLOCK.value
    run(Case(**SMALL, lengths=lengths, initial_states=True), CUTS["a chunk each"])


@pytest.mark.slow
@pytest.mark.parametrize("ring", [2, 4])
@pytest.mark.parametrize("dstate", [64, 256])
def test_rings_that_tuning_may_find(monkeypatch: pytest.MonkeyPatch, ring: int, dstate: int) -> None:
    """The decays are slow, so that every chunk of a first pass contributes."""
    emulate(monkeypatch, seed=7)
    inputs = Case(**SMALL | dict(dstate=dstate), seqlen=520, initial_states=True).inputs()
    inputs.A.mul_(0.1)
    config = replace(config_of(inputs, CUTS["long ones first"]), ring=ring)
    assert_passes(ssd_fused_hopper(inputs, EXACT, config=config), inputs, EXACT)


def test_sequences_that_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a buffer for longer sequences."""
    emulate(monkeypatch, seed=5)
    whole = CASES["ragged batch"].inputs()
    inputs = replace(whole, **{name: getattr(whole, name)[:, 7:300] for name in ("x", "dt", "B", "C")})
    assert inputs.x.stride(0) > inputs.x.shape[1] * inputs.x.stride(1)
    assert_passes(ssd_fused_hopper(inputs, EXACT, config=config_of(inputs, CUTS["even"])), inputs, EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("shares", range(1, 12))
@pytest.mark.parametrize("dstate", [64, 256])
def test_equal_shares_of_all_sequences(monkeypatch: pytest.MonkeyPatch, dstate: int, shares: int) -> None:
    """Six pairs of heads, or twelve of halves, of five chunks each.  The bits are those of undivided sequences."""
    emulate(monkeypatch, seed=shares)
    inputs = Case(**SMALL | dict(dstate=dstate), heads=4, batch=3, seqlen=300, initial_states=True).inputs()
    ours, whole = (
        ssd_fused_hopper(inputs, EXACT, config=config_of(inputs, Cut(segment=5, shares=how_many)))
        for how_many in (shares, 0)
    )
    assert_passes(ours, inputs, EXACT)
    assert torch.equal(ours.out, whole.out)
    assert torch.equal(ours.final_states, whole.final_states)


@pytest.mark.parametrize("name", ["ragged batch", pytest.param("n 256", marks=pytest.mark.slow)])
def test_relaxed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    emulate(monkeypatch, seed=2)
    run(CASES[name], CUTS["even"], RELAXED)


@pytest.mark.parametrize("cut", ["long ones first", "none waits"])
def test_a_first_pass_over_an_odd_number_of_chunks(monkeypatch: pytest.MonkeyPatch, cut: str) -> None:
    """With N = 256 it processes two chunks at once.  The decays are slow, so that every chunk contributes."""
    emulate(monkeypatch, seed=6)
    inputs = Case(**SMALL | dict(dstate=256), heads=1, seqlen=300, initial_states=True).inputs()
    inputs.A.mul_(0.1)
    assert_passes(ssd_fused_hopper(inputs, EXACT, config=config_of(inputs, CUTS[cut])), inputs, EXACT)


@pytest.mark.parametrize(
    ("dstate", "cut"),
    [
        (128, "a chunk each"),
        (256, "even"),
        pytest.param(128, "even", marks=pytest.mark.slow),
        pytest.param(256, "a chunk each", marks=pytest.mark.slow),
    ],
)
def test_neighbours_do_not_meet(monkeypatch: pytest.MonkeyPatch, dstate: int, cut: str) -> None:
    """NaN and infinity in a sequence do not reach other sequences."""
    emulate(monkeypatch, seed=3)
    case = Case(**SMALL | dict(dstate=dstate), lengths=(30, 100, 70))
    inputs, spoilt = case.inputs(), case.inputs()
    for tensor in (spoilt.x, spoilt.dt, spoilt.B, spoilt.C):
        tensor[:, :30] = torch.nan
        tensor[:, 130:] = torch.inf
    ours, theirs = (ssd_fused_hopper(one, EXACT, config=config_of(one, CUTS[cut])) for one in (inputs, spoilt))
    assert torch.equal(ours.out[:, 30:130], theirs.out[:, 30:130])
    assert torch.equal(ours.final_states[1], theirs.final_states[1])
    assert theirs.out[:, :30].isnan().all()


@pytest.mark.parametrize("cut", ["one segment", "even", "none waits"])
@pytest.mark.parametrize(
    ("step", "scale"),
    [
        (1e-6, 100.0),
        *(pytest.param(*slow, marks=pytest.mark.slow) for slow in ((1e-6, 10.0), (1e-5, 10.0), (1e-5, 100.0))),
    ],
)
def test_small_steps_of_large_numbers_in_fp16(
    monkeypatch: pytest.MonkeyPatch, step: float, scale: float, cut: str
) -> None:
    """Weights below 2^-14, which are subnormal in fp16, and products that are not."""
    emulate(monkeypatch, seed=4)
    case = Case(**SMALL | dict(dstate=64, dtype=torch.float16), seqlen=330, skip="")
    inputs = case.inputs(dt=torch.full((1, 330, 2), step), dt_bias=None, dt_softplus=False)
    inputs.x.mul_(scale)
    assert_passes(ssd_fused_hopper(inputs, EXACT, config=config_of(inputs, CUTS[cut])), inputs, EXACT)


def test_states_lose_less_than_their_operands_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding x times its weight to bf16 would cost 1.6e-3; the kernel adds the rounding error back."""
    emulate(monkeypatch, seed=4)
    inputs = CASES["whole chunks"].inputs()
    states = ssd_fused_hopper(inputs, EXACT, config=config_of(inputs, CUTS["one segment"])).final_states.double()
    exact = ssd_chunked(inputs, torch.float64).final_states
    assert (states - exact).norm() / exact.norm() < 2**-14


@pytest.mark.parametrize(
    "cut",
    [
        "a chunk each",
        "none waits",
        *(pytest.param(cut, marks=pytest.mark.slow) for cut in ("one segment", "even", "long ones first")),
    ],
)
def test_nan_in_an_initial_state_reaches_every_segment(monkeypatch: pytest.MonkeyPatch, cut: str) -> None:
    """Also for heads whose product of decays underflows to zero."""
    emulate(monkeypatch, seed=5)
    inputs = Case(**SMALL, heads=4, seqlen=300, initial_states=True, dt_limit=(0.0, 0.1)).inputs()
    assert inputs.initial_states is not None
    inputs.initial_states.fill_(torch.nan)
    assert ssd_fused_hopper(inputs, EXACT, config=config_of(inputs, CUTS[cut])).out.isnan().all()
