"""GDN's Hopper kernels' source on a CPU (`gluon_emulator.py`), against the recurrence."""

from dataclasses import replace

import pytest
import torch
from gdn_hopper_cases import GDNCase, errors
from gluon_emulator import GDN, emulate

from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig
from ssdprof.kernels.gdn.hopper.launch import GDNHopperLaunch, gdn_fused_hopper
from ssdprof.kernels.gdn.hopper.slices import SlicedLaunch, unsupported
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput

WHOLE_PAST = float("-inf")  # a first pass covers all chunks before the segment
ONE_LAUNCH = GDNHopperConfig(segment=8, fused_inverse=True, key_ring=3)
CASES = {
    "one chunk": (GDNCase(seqlen=64), GDNHopperConfig(segment=1)),
    "one position": (GDNCase(seqlen=1, initial_state=True), GDNHopperConfig(segment=1)),
    "ragged batch": (
        GDNCase(batch=2, seqlen=330, initial_state=True),
        GDNHopperConfig(segment=2, truncation_log2=WHOLE_PAST),
    ),
    "three heads a key head": (GDNCase(seqlen=200, key_heads=2, heads=6), GDNHopperConfig(segment=4)),
    "three heads a key head, normalised": (GDNCase(seqlen=150, heads=3, normalise=True), GDNHopperConfig(segment=4)),
    "four heads a key head": (GDNCase(seqlen=200, heads=4), GDNHopperConfig(segment=4)),
    "programs that stay": (GDNCase(batch=3, seqlen=150), GDNHopperConfig(segment=3, persistent_programs=4)),
    "more places": (GDNCase(seqlen=400), GDNHopperConfig(segment=4, truncation_log2=WHOLE_PAST, key_ring=3)),
    "one launch": (GDNCase(seqlen=400, initial_state=True, heads=1), ONE_LAUNCH),
    "one launch, programs that stay": (GDNCase(batch=3, seqlen=150), replace(ONE_LAUNCH, persistent_programs=4)),
    "one launch, ragged batch, beta up to 2": (GDNCase(batch=2, seqlen=330, beta=2.0), ONE_LAUNCH),
    "one launch, packed": (GDNCase(lengths=(3, 0, 64, 200, 70), initial_state=True), ONE_LAUNCH),
    "longer first segments, ragged batch": (
        GDNCase(batch=2, seqlen=700, gate=-0.05, initial_state=True),
        GDNHopperConfig(segment=3, first_segment_extra=True),
    ),
    "longer first segments, no gate": (
        GDNCase(seqlen=400, gate=0.0),
        GDNHopperConfig(segment=2, first_segment_extra=True),
    ),
    "longer first segments, many": (GDNCase(seqlen=330), GDNHopperConfig(segment=1, first_segment_extra=True)),
    "no gate": (GDNCase(seqlen=200, gate=0.0), GDNHopperConfig(segment=2)),
    "normalised": (GDNCase(seqlen=200, normalise=True, key_heads=2), GDNHopperConfig(segment=4)),
    "beta up to 2": (GDNCase(seqlen=200, beta=2.0), GDNHopperConfig(segment=4)),
    "fp16": (GDNCase(seqlen=200, dtype=torch.float16, normalise=True), GDNHopperConfig(segment=4)),
    "packed": (
        GDNCase(lengths=(3, 0, 64, 200, 70), initial_state=True, normalise=True),
        GDNHopperConfig(segment=2, truncation_log2=WHOLE_PAST),
    ),
}


def run(inputs: GDNInputs, config: GDNHopperConfig) -> GDNOutput:
    return gdn_fused_hopper(inputs, config=config)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_recurrence(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case, config = CASES[name]
    for seed in range(2):
        emulate(monkeypatch, seed=seed, source=GDN)
        inputs = case.inputs(seed)
        out, states = errors(run(inputs, config), inputs)
        limit = 6e-4 if case.dtype == torch.float16 else 4.5e-3
        assert max(out, states) < limit


@pytest.mark.parametrize(("gate", "chunks"), [(-4.0, 8), (-0.06, 9), (-0.035, 10)])
def test_a_first_segment_is_longer_by_what_first_passes_cost(
    monkeypatch: pytest.MonkeyPatch, gate: float, chunks: int
) -> None:
    """A NaN in the first of two segments reaches that segment's end, and no further if heads forget."""
    emulate(monkeypatch, seed=0, source=GDN)
    inputs = GDNCase(seqlen=1024, heads=1, gate=gate).inputs()
    config = GDNHopperConfig(segment=8, first_segment_extra=True)
    exact = run(inputs, config).out
    inputs.v[0, 0] = torch.nan
    out = run(inputs, config).out
    spread = out.isnan().all(-1)[0, :, 0].sum() // 64
    assert spread == chunks
    assert torch.equal(out[:, 64 * spread :], exact[:, 64 * spread :])


def test_fast_heads_have_the_bits_of_even_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, seed=0, source=GDN)
    inputs = GDNCase(seqlen=512, gate=-4.0).inputs()
    even = GDNHopperConfig(segment=4)
    assert all(map(torch.equal, run(inputs, even), run(inputs, replace(even, first_segment_extra=True))))


@pytest.mark.parametrize("case", [GDNCase(seqlen=512), GDNCase(lengths=(300, 9))])
def test_a_longer_first_segment_is_refused_without_others_and_of_packs(case: GDNCase) -> None:
    with pytest.raises(ValueError, match="a longer first segment needs"):
        run(case.inputs(), GDNHopperConfig(segment=8, first_segment_extra=True))


def test_a_first_pass_begins_where_little_enough_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = GDNCase(seqlen=576, gate=-0.05).inputs()  # 2^-4.6 a chunk
    emulate(monkeypatch, seed=1, source=GDN)
    whole = run(inputs, GDNHopperConfig(segment=8, truncation_log2=WHOLE_PAST)).final_states  # of nine chunks
    for enough, at_least in ((-1.0, 2.0**-20), (-8.0, 2.0**-28), (-24.0, 0.0)):
        states = run(inputs, GDNHopperConfig(segment=8, truncation_log2=enough)).final_states
        # the omitted part may change how a product's operand rounds
        assert at_least <= (states - whole).norm() / whole.norm() < 2 ** max(enough, -14)


def test_a_cut_changes_no_bit_if_the_whole_past_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = GDNCase(seqlen=330, initial_state=True).inputs()
    emulate(monkeypatch, seed=2, source=GDN)
    one, cut = (run(inputs, GDNHopperConfig(segment=segment, truncation_log2=WHOLE_PAST)) for segment in (6, 2))
    assert all(map(torch.equal, one, cut))


def test_nan_stays_in_its_head_and_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, seed=3, source=GDN)
    inputs = GDNCase(batch=2, seqlen=150).inputs()
    clean = run(inputs, GDNHopperConfig(segment=3))
    for name, place in (("v", (1, 70, 0, 5)), ("g", (1, 70, 0)), ("beta", (1, 70, 0))):
        poisoned = getattr(inputs, name).clone()
        poisoned[place] = float("nan")
        result = run(replace(inputs, **{name: poisoned}), GDNHopperConfig(segment=3))
        assert result.out[1, 70:, 0].isnan().any()
        assert not result.out[0].isnan().any()
        assert torch.equal(result.out[1, :, 1], clean.out[1, :, 1])
        assert torch.equal(result.out[1, :64, 0], clean.out[1, :64, 0])


def test_decays_of_minus_infinity_and_above_one(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = GDNCase(seqlen=150).inputs()
    g = inputs.g.clone()
    g[:, 30], g[:, 100], g[:, 40:60] = -torch.inf, -1e30, 0.5
    emulate(monkeypatch, seed=4, source=GDN)
    inputs = replace(inputs, g=g)
    assert max(errors(run(inputs, GDNHopperConfig(segment=3)), inputs)) < 4.5e-3


@pytest.mark.parametrize("seeds", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_results_do_not_depend_on_whose_turn_it_is(monkeypatch: pytest.MonkeyPatch, seeds: int) -> None:
    inputs = GDNCase(seqlen=330, initial_state=True, normalise=True).inputs()
    results = []
    for seed in range(seeds):
        emulate(monkeypatch, seed=seed, resident=1 + seed, source=GDN)
        results.append(run(inputs, GDNHopperConfig(segment=2, key_ring=2 + seed % 2)))
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


def test_final_states_with_v_before_k(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = GDNCase(batch=2, seqlen=150, initial_state=True).inputs()
    emulate(monkeypatch, seed=5, source=GDN)
    config = GDNHopperConfig(segment=3)
    k_first, v_first = (GDNHopperLaunch(inputs, config, state_v_first=flag)(inputs) for flag in (False, True))
    assert v_first.final_states.mT.is_contiguous()
    assert all(map(torch.equal, k_first, v_first))


# --- K and V other than 128

SHORT = GDNHopperConfig(segment=2)
OLMO = GDNCase(seqlen=130, key_heads=2, heads=2, key_dim=96, value_dim=192)
SLICED = {
    "olmo": OLMO,
    "olmo, normalised, beta to 2": replace(OLMO, normalise=True, beta=2.0),
    "olmo, batch with states": replace(OLMO, batch=2, initial_state=True),
    "olmo, packed": replace(OLMO, lengths=(3, 0, 64, 70), initial_state=True),
    "one slice, two value heads a key head": GDNCase(key_heads=1, heads=2, key_dim=72, value_dim=120),
    "V 256": GDNCase(key_heads=1, heads=1, value_dim=256, initial_state=True),
}


def run_slices(inputs: GDNInputs, config: GDNHopperConfig = SHORT, *, v_first: bool = False) -> GDNOutput:
    return SlicedLaunch(inputs, config, state_v_first=v_first)(inputs)


@pytest.mark.parametrize("name", SLICED)
def test_slices_agree_with_the_recurrence(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    emulate(monkeypatch, seed=1, source=GDN)
    inputs = SLICED[name].inputs()
    result = run_slices(inputs, GDNHopperConfig(segment=2, truncation_log2=float("-inf")))
    assert (result.out.shape, result.final_states.shape) == (inputs.v.shape, inputs.states_shape)
    assert result.out.is_contiguous()
    assert result.final_states.is_contiguous()
    assert max(errors(result, inputs)) < 4.5e-3


def test_final_states_of_slices_with_v_before_k(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, seed=2, source=GDN)
    inputs = replace(OLMO, initial_state=True).inputs()
    k_first, v_first = (run_slices(inputs, v_first=flag) for flag in (False, True))
    assert v_first.final_states.mT.is_contiguous()
    assert all(map(torch.equal, k_first, v_first))


def test_nan_stays_in_its_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, seed=3, source=GDN)
    inputs = OLMO.inputs()
    v = inputs.v.clone()
    v[0, 70, 0, 100] = float("nan")
    clean, result = run_slices(inputs), run_slices(replace(inputs, v=v))
    assert result.out[0, 70:, 0].isnan().any()
    assert torch.equal(result.out[..., :96], clean.out[..., :96])
    assert torch.equal(result.out[:, :, 1], clean.out[:, :, 1])


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (replace(OLMO, key_dim=60), "K 60"),
        (replace(OLMO, value_dim=100), ""),
        (replace(OLMO, value_dim=64), "V 64"),
        (replace(OLMO, value_dim=129), "V 129"),
        (OLMO, ""),
    ],
)
def test_sizes_that_it_takes(monkeypatch: pytest.MonkeyPatch, case: GDNCase, reason: str) -> None:
    monkeypatch.setattr("ssdprof.kernels.gdn.hopper.slices.unsupported_otherwise", lambda _inputs: "")
    found = unsupported(case.inputs())
    assert (reason in found) if reason else not found


def test_views_of_one_tensor_are_taken_and_heads_apart_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssdprof.kernels.gdn.hopper.slices.unsupported_otherwise", lambda _inputs: "")
    inputs = OLMO.inputs()
    wide = torch.cat([inputs.v, inputs.v], 3)
    assert "side by side" in unsupported(replace(inputs, v=wide[..., :192]))
    joined = torch.cat([inputs.v, inputs.v], 2)
    assert not unsupported(replace(inputs, v=joined[:, :, :2]))
