"""Heads that forget slowly on GDN's Hopper kernels: parts and transition matrices, on a CPU (`gluon_emulator.py`)."""

from dataclasses import replace

import pytest
import torch
from gdn_hopper_cases import GDNCase, errors
from gluon_emulator import GDN, emulate

from ssdprof.kernels.gdn.hopper.combine_kernel import _combine_kernel
from ssdprof.kernels.gdn.hopper.config import MOST_PARTS, MOST_WAVES, WORTH_PARTS, GDNHopperConfig
from ssdprof.kernels.gdn.hopper.launch import gdn_fused_hopper
from ssdprof.kernels.gdn.hopper.parts import MOST_ROWS
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.launch import Launcher

TWO = GDNHopperConfig(segment=2, transition_parts=2, longest_first_pass=1, transition_programs=3)
CASES = {
    "no gate": (GDNCase(seqlen=500, gate=0.0), TWO),
    "-1e-4, initial state, batch": (
        GDNCase(batch=2, seqlen=450, gate=-1e-4, initial_state=True),
        GDNHopperConfig(segment=3, transition_parts=1, longest_first_pass=2, transition_programs=5),
    ),
    "four parts, normalised keys": (
        GDNCase(seqlen=520, gate=-1e-3, normalise=True, heads=1),
        GDNHopperConfig(segment=4, transition_parts=4, longest_first_pass=1, transition_programs=4),
    ),
    "packed": (
        GDNCase(lengths=(3, 0, 64, 400, 200), gate=-1e-4, initial_state=True, normalise=True),
        GDNHopperConfig(segment=2, transition_parts=2, longest_first_pass=1, transition_programs=7),
    ),
    "fp16": (GDNCase(seqlen=330, gate=0.0, dtype=torch.float16, normalise=True), TWO),
}


def run(inputs: GDNInputs, config: GDNHopperConfig) -> GDNOutput:
    return gdn_fused_hopper(inputs, config=config)


def whole_past(config: GDNHopperConfig) -> GDNHopperConfig:
    return replace(config, transition_parts=0)


def mixed() -> GDNInputs:
    """Head 0 does not forget, heads 1 and 2 forget, and head 3 forgets in the second half."""
    inputs = GDNCase(seqlen=640, heads=4, gate=-1.0, initial_state=True).inputs()
    g = inputs.g.clone()
    g[..., 0], g[:, :320, 3] = -1e-4, -1e-4
    return replace(inputs, g=g)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_recurrence(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case, config = CASES[name]
    emulate(monkeypatch, seed=1, source=GDN)
    inputs = case.inputs()
    limit = 6e-4 if case.dtype == torch.float16 else 4.5e-3
    ours, whole = (errors(run(inputs, one), inputs) for one in (config, whole_past(config)))
    assert max(ours) < limit
    assert all(a < 1.02 * b for a, b in zip(ours, whole, strict=True))


@pytest.mark.slow
def test_fast_and_slow_heads_together(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, seed=2, source=GDN)
    inputs = mixed()
    result, whole = (run(inputs, config) for config in (TWO, whole_past(TWO)))
    assert max(errors(result, inputs)) < 4.5e-3
    assert torch.equal(result.out[:, :, 1:3], whole.out[:, :, 1:3])
    assert not torch.equal(result.out[:, :, 0], whole.out[:, :, 0])


@pytest.mark.slow
def test_a_slow_segment_after_one_with_a_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts begin where that first pass begins: the head forgets until position 500, and not after it."""
    inputs = GDNCase(seqlen=2700, heads=1, gate=-1.0, initial_state=True).inputs()
    g = inputs.g.clone()
    g[:, 500:] = 0.0
    emulate(monkeypatch, seed=8, source=GDN)
    inputs = replace(inputs, g=g)
    config = GDNHopperConfig(segment=20, transition_parts=2, longest_first_pass=19)
    result, whole = (run(inputs, config) for config in (config, whole_past(config)))
    assert torch.equal(result.out[:, :2560], whole.out[:, :2560])
    assert not torch.equal(result.out[:, 2560:], whole.out[:, 2560:])
    assert (result.final_states - whole.final_states).norm() < 4e-3 * whole.final_states.norm()


def test_fast_heads_have_the_bits_that_they_have_without_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = GDNCase(seqlen=700, gate=-0.1, initial_state=True).inputs()  # first passes of three chunks
    emulate(monkeypatch, seed=3, source=GDN)
    config = GDNHopperConfig(segment=3, transition_parts=1, longest_first_pass=3, transition_programs=4)
    assert all(map(torch.equal, run(inputs, config), run(inputs, whole_past(config))))


@pytest.mark.slow
def test_a_head_slower_than_the_longest_first_pass_takes_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it forgets within a segment.  A first pass covers a short past completely."""
    inputs = GDNCase(
        seqlen=1200, heads=1, gate=-0.05, initial_state=True
    ).inputs()  # 24 / 4.6: first passes of 6 chunks
    emulate(monkeypatch, seed=9, source=GDN)
    config = GDNHopperConfig(segment=9, transition_parts=3, longest_first_pass=5)
    result, whole = (run(inputs, one) for one in (config, whole_past(config)))
    assert not torch.equal(result.out[:, 576:], whole.out[:, 576:])
    assert max(errors(result, inputs)) < 4.5e-3
    for longest in (6, 9):
        assert all(map(torch.equal, run(inputs, replace(config, longest_first_pass=longest)), whole))


@pytest.mark.slow
def test_a_short_past_is_gone_over_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first pass of the second segment.  The third segment's state comes from the second segment's parts."""
    inputs = GDNCase(seqlen=500, heads=1, gate=-1e-4, initial_state=True).inputs()
    emulate(monkeypatch, seed=10, source=GDN)
    config = GDNHopperConfig(segment=2, transition_parts=2, longest_first_pass=2)
    result, whole = (run(inputs, one) for one in (config, whole_past(config)))
    assert torch.equal(result.out[:, :256], whole.out[:, :256])
    assert not torch.equal(result.out[:, 256:], whole.out[:, 256:])
    assert max(errors(result, inputs)) < 4.5e-3


@pytest.mark.slow
def test_parts_replace_short_first_passes_of_a_slow_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its segments have parts then, except those with the shortest first passes.  Other heads have none."""
    inputs = mixed()
    emulate(monkeypatch, seed=12, source=GDN)
    config = GDNHopperConfig(segment=2, transition_parts=1, longest_first_pass=6, least_first_pass=2)
    result, whole = (run(inputs, one) for one in (config, whole_past(config)))
    assert torch.equal(result.out[:, :256], whole.out[:, :256])
    assert not torch.equal(result.out[:, 256:384, 0], whole.out[:, 256:384, 0])  # a first pass of four chunks
    assert torch.equal(result.out[:, :, 1:3], whole.out[:, :, 1:3])
    assert max(errors(result, inputs)) < 4.5e-3


@pytest.mark.slow
@pytest.mark.parametrize("heads", [44, 90])
def test_many_rows(monkeypatch: pytest.MonkeyPatch, heads: int) -> None:
    """The last row is that of the only slow head."""
    inputs = GDNCase(seqlen=256, heads=heads, gate=-3.0).inputs()
    inputs.g[..., -1] = -1e-4
    emulate(monkeypatch, seed=11, source=GDN)
    config = GDNHopperConfig(segment=1, transition_parts=1, longest_first_pass=1)
    result, whole = (run(inputs, one) for one in (config, whole_past(config)))
    assert torch.equal(result.out[:, :, :-1], whole.out[:, :, :-1])
    assert not torch.equal(result.out[:, :, -1], whole.out[:, :, -1])
    assert max(errors(result, inputs)) < 4.5e-3


@pytest.mark.slow
def test_a_head_does_not_depend_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not depend on the number of programs that compute parts, or on their order either."""
    inputs = mixed()
    emulate(monkeypatch, seed=4, source=GDN)
    together = run(inputs, TWO)
    for seed, gate in enumerate((0.0, -3.0)):
        g = inputs.g.clone()
        g[..., 1:] = gate
        emulate(monkeypatch, seed=5 + seed, resident=1 + seed, source=GDN)
        alone = run(replace(inputs, g=g), replace(TWO, transition_programs=2 + 7 * seed))
        assert torch.equal(alone.out[:, :, 0], together.out[:, :, 0])
        assert torch.equal(alone.final_states[:, 0], together.final_states[:, 0])


def test_minus_infinity_turns_first_passes_off(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = GDNCase(seqlen=330, gate=-0.02).inputs()  # 2^-1.8 a chunk
    emulate(monkeypatch, seed=6, source=GDN)
    early, never = (
        errors(run(inputs, replace(TWO, truncation_log2=enough)), inputs) for enough in (-1.0, float("-inf"))
    )
    assert max(never) < 4.5e-3 < min(early)


@pytest.mark.slow
def test_nan_stays_in_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, seed=7, source=GDN)
    for name, place in (("v", (0, 70, 0, 5)), ("g", (0, 70, 0)), ("beta", (0, 70, 0))):
        inputs = GDNCase(seqlen=330, gate=-1e-4).inputs()
        poisoned = getattr(inputs, name).clone()
        poisoned[place] = float("nan")
        clean, result = (run(one, TWO) for one in (inputs, replace(inputs, **{name: poisoned})))
        assert result.out[0, 70:, 0].isnan().any(-1).all()
        assert torch.equal(result.out[:, :, 1], clean.out[:, :, 1])
        assert torch.equal(result.out[:, :64, 0], clean.out[:, :64, 0])
        if name == "v":
            assert torch.equal(result.out[:, :, 0, :5], clean.out[:, :, 0, :5])


def test_parts_are_combined_as_the_recurrence_of_matrices() -> None:
    """Ignores rows of segments that are not slow.  A known state before a row is the initial one, or negligible."""
    pairs, boundaries, parts, dim, segment = 3, 4, 2, 128, 5
    generator = torch.Generator().manual_seed(0)
    backs = torch.tensor([[-1, 3, -1], [-1, -1, 10], [5, -1, -1], [-1, -1, -1]], dtype=torch.int32)
    ends, transitions = torch.randn(2, boundaries, pairs, parts, dim, dim, generator=generator)
    transitions /= dim**0.5
    initial = torch.randn(1, pairs, dim, dim, generator=generator)
    for matrices in (ends, transitions):
        matrices[backs >= 0] = torch.nan
    high = transitions.bfloat16()
    moves = torch.stack([high, (transitions - high.float()).bfloat16()], -3)
    entering = torch.full((boundaries, pairs, dim, dim), 7.0)
    options = {"HEADS": pairs, "PARTS": parts, "BOUNDARIES": 4, "DIM": dim, "BLOCK_V": 16, "AHEAD": 3}
    tensors = [t.to("cuda" if torch.cuda.is_available() else "cpu") for t in (ends, moves, backs, initial, entering)]
    scalars = (initial.stride(), pairs, boundaries, segment)
    Launcher(_combine_kernel, scalars, options)(pairs * dim // 16, *tensors)
    entering = tensors[4].cpu()
    for pair in range(pairs):
        state = initial[0, pair].double().mT
        for boundary in range(boundaries):
            before = backs[boundary - 1, pair] if boundary else 0
            if before >= 0:
                state = initial[0, pair].double().mT * (before == boundary * segment)
            if backs[boundary, pair] >= 0:
                assert (entering[boundary, pair] == 7.0).all()
                continue
            for part in range(parts):
                N, M = (matrices[boundary, pair, part].double() for matrices in (ends, transitions))
                state = state @ M + N
            error = (entering[boundary, pair] - state).norm() / state.norm()
            assert error < 1e-5


def shapes(seqlen: int, key_heads: int, heads: int) -> GDNInputs:
    """Inputs for choices that depend only on shapes."""
    empty = torch.empty(1, seqlen, 1, 1, device="meta")
    tensors = {name: empty.expand(1, seqlen, n, 128) for name, n in (("q", key_heads), ("k", key_heads), ("v", heads))}
    return GDNInputs.unchecked(**tensors, g=empty[..., 0], beta=empty[..., 0])


@pytest.mark.parametrize("seqlen", [4096, 8192, 65536, 131072, 1 << 20])
@pytest.mark.parametrize(("key_heads", "heads"), [(16, 32), (2, 8), (16, 16), (16, 64), (1, 1)])
def test_long_sequences_are_cut_into_whole_parts(seqlen: int, key_heads: int, heads: int) -> None:
    shape = shapes(seqlen, key_heads, heads)
    config = GDNHopperConfig.choose(shape, 132, batch_invariant=False)
    nchunks = seqlen // 64
    rows = (-(-nchunks // config.segment) - 1) * heads
    assert (config.transition_parts > 0) == (nchunks - config.segment > WORTH_PARTS and rows <= MOST_ROWS)
    assert not config.transition_parts or config.segment % config.transition_parts == 0
    assert GDNHopperConfig.choose(shape, 132, batch_invariant=True).transition_parts == 0


@pytest.mark.parametrize("seqlen", [64, 4096, 8192, 65536, 131072, 1 << 20])
@pytest.mark.parametrize("heads", [1, 8, 16, 20, 30, 48, 60, 64, 96, 131])
def test_a_cut_keeps_sms_busy_without_needless_segments(seqlen: int, heads: int) -> None:
    inputs, nchunks = shapes(seqlen, 1, heads), seqlen // 64
    config = GDNHopperConfig.choose(inputs, 132, batch_invariant=False)
    count = -(-nchunks // config.segment)
    waves = -(-count * heads // 132)
    assert waves <= MOST_WAVES
    one_wave = -(-nchunks // min(nchunks, 132 // heads))
    assert waves * config.segment <= one_wave + config.transition_parts
    if waves > 1:
        assert waves * config.segment < one_wave
    assert (count - 1) * heads * config.transition_parts <= MOST_PARTS


def test_a_first_segment_is_longer_only_where_that_is_possible_and_segments_are_not_short() -> None:
    def leads(seqlen: int, batch_invariant: bool = False) -> bool:
        inputs = shapes(seqlen, 16, 32)
        return GDNHopperConfig.choose(inputs, 132, batch_invariant=batch_invariant).first_segment_extra

    assert [leads(seqlen) for seqlen in (512, 1024, 2048, 4096, 65536)] == [False, False, True, True, False]
    assert leads(65536, batch_invariant=True)  # no parts


def test_48_heads_do_not_leave_a_quarter_of_the_sms_idle() -> None:
    config = GDNHopperConfig.choose(shapes(65536, 16, 48), 132, batch_invariant=False)
    waves = -(-48 * (1024 // config.segment) // 132)
    assert waves * config.segment < 0.85 * 512  # of two segments, 96 programs


@pytest.mark.parametrize(
    "config", [GDNHopperConfig(segment=3, transition_parts=2), GDNHopperConfig(segment=2, transition_parts=2)]
)
def test_refuses_what_cannot_be_divided_and_too_many_rows(config: GDNHopperConfig) -> None:
    heads = 2 if config.segment == 3 else 96
    with pytest.raises(ValueError, match="transition_parts = 2 with"):
        run(GDNCase(seqlen=1000, heads=heads).inputs(), config)
