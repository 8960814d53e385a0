"""What only GDN's Hopper kernels have: first passes, longer first segments, parts of heads that
forget slowly, slices.  In the emulator, and the same on a GPU.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from gluon_emulator import GDN, emulate
from kernel_cases import (
    BF16,
    FP16,
    FP32,
    GDNCase,
    assert_close,
    assert_no_less_exact,
    changed,
    spoilt,
)
from targets import (
    GDN_CUT,
    GDN_ON_HOPPER,
    GDN_PARTS,
    OLMO,
    ON_HOPPER,
    TARGETS,
    WHOLE_PAST,
    Target,
    gdn_hopper_by,
    slow,
    targets,
)
from verdict import assert_passes

from ssdprof.kernels import Precision, get
from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig
from ssdprof.kernels.gdn.hopper.slices import unsupported
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.gdn.reference import gdn_chunked

SMALL = GDNCase(**GDN_ON_HOPPER | dict(seqlen=130))
LEADING = replace(GDN_CUT, first_segment_extra=True)
LIMITS = {BF16: 4.5e-3, FP16: 6e-4}


def run(inputs: GDNInputs, config: GDNHopperConfig | None, *, v_first: bool = False) -> GDNOutput:
    output: GDNOutput = gdn_hopper_by(config, state_v_first=v_first)(inputs, Precision())
    return output


def same(a: GDNOutput, b: GDNOutput) -> bool:
    return all(map(torch.equal, a, b))


def assert_right(result: GDNOutput, inputs: GDNInputs):
    assert_close(result, gdn_chunked(inputs), LIMITS[inputs.q.dtype])


def with_and_without_parts(
    inputs: GDNInputs, config: GDNHopperConfig
) -> tuple[GDNOutput, GDNOutput]:
    """Without: first passes over all chunks before, whose states are those of a single segment."""
    return run(inputs, config), run(inputs, replace(config, transition_parts=0))


# --- first passes


@pytest.mark.parametrize(("gate", "chunks"), [(0.06, 9), *slow((4.0, 8), (0.035, 10))])
def test_a_first_segment_is_longer_by_what_first_passes_cost(device: str, gate, chunks):
    """A NaN in the first of two segments reaches that segment's end, and no further if heads
    forget.
    """
    inputs = SMALL.but(seqlen=1024, values_per_key=1, gate=gate, device=device).inputs()
    config = replace(LEADING, segment=8)
    exact = run(inputs, config).out
    inputs.v[0, 0] = torch.nan
    out = run(inputs, config).out
    spread = out.isnan().all(-1)[0, :, 0].sum() // 64
    assert spread == chunks
    assert torch.equal(out[:, 64 * spread :], exact[:, 64 * spread :])


@pytest.mark.slow
def test_fast_heads_have_the_bits_of_even_segments(device: str):
    inputs = SMALL.but(seqlen=512, gate=4.0, device=device).inputs()
    even = replace(GDN_CUT, segment=4)
    assert same(run(inputs, even), run(inputs, replace(even, first_segment_extra=True)))


def test_a_first_pass_begins_where_little_enough_is_left(device: str):
    inputs = SMALL.but(seqlen=576, gate=0.05, device=device).inputs()  # 2^-4.6 a chunk
    eight = replace(GDN_CUT, segment=8)
    whole = run(inputs, replace(eight, truncation_log2=WHOLE_PAST)).final_states  # of nine chunks
    for enough, at_least in ((-1.0, 2.0**-20), (-8.0, 2.0**-28), (-24.0, 0.0)):
        states = run(inputs, replace(eight, truncation_log2=enough)).final_states
        # the omitted part may change how a product's operand rounds
        assert at_least <= (states - whole).norm() / whole.norm() < 2 ** max(enough, -14)


def test_a_cut_changes_no_bit_if_the_whole_past_is_seen(device: str):
    inputs = SMALL.but(
        seqlen=330 if device == "cpu" else 2000, initial_states=True, device=device
    ).inputs()
    one, cut = (
        run(inputs, GDNHopperConfig(segment=n, truncation_log2=WHOLE_PAST)) for n in (32, 2)
    )
    assert same(one, cut)


def test_minus_infinity_turns_first_passes_off(device: str):
    inputs = SMALL.but(seqlen=330, gate=0.02, device=device).inputs()  # 2^-1.8 a chunk
    early, never = (
        run(inputs, replace(GDN_PARTS, truncation_log2=enough)) for enough in (-1.0, WHOLE_PAST)
    )
    assert_right(never, inputs)
    with pytest.raises(AssertionError):
        assert_right(early, inputs)


@pytest.mark.parametrize("seeds", [3, *slow(6)])
def test_results_do_not_depend_on_whose_turn_it_is(monkeypatch, seeds):
    inputs = SMALL.but(seqlen=330, initial_states=True, l2norm=True).inputs()
    results = []
    for seed in range(seeds):
        emulate(monkeypatch, seed=seed, resident=1 + seed, source=GDN)
        results.append(run(inputs, GDN_CUT))
    assert all(same(result, results[0]) for result in results)


@pytest.mark.parametrize("sizes", [dict(batch=2, seqlen=150), OLMO], ids=["128", "slices"])
def test_final_states_with_v_before_k(device: str, sizes):
    inputs = SMALL.but(**sizes, initial_states=True, device=device).inputs()
    k_first, v_first = (
        run(inputs, replace(GDN_CUT, segment=3), v_first=flag) for flag in (False, True)
    )
    assert v_first.final_states.mT.is_contiguous()
    assert k_first.final_states.is_contiguous()
    assert same(k_first, v_first)


# --- heads that forget slowly


def mixed(inputs: GDNInputs):
    """Head 0 does not forget, heads 1 and 2 forget, and head 3 forgets in the second half."""
    inputs.g[..., 0], inputs.g[:, :320, 3] = -1e-4, -1e-4


def forgets_until_500(inputs: GDNInputs):
    inputs.g[:, 500:] = 0.0


def last_is_slow(inputs: GDNInputs):
    inputs.g[..., -1] = -1e-4


MIXED = dict(seqlen=640, values_per_key=4, gate=1.0, initial_states=True)
ONE_HEAD = dict(values_per_key=1, initial_states=True)
MANY_ROWS = GDNHopperConfig(segment=1, transition_parts=1, longest_first_pass=1)
NINE = GDNHopperConfig(segment=9, transition_parts=3, longest_first_pass=5)
# sizes, a change of the gates, the configuration, and (positions, heads) that have the bits of
# first passes over all
# chunks before, or not: those come from parts
LATER = slice(1, 3)
PARTS: dict[str, tuple[dict[str, Any], Any, GDNHopperConfig, list[Any], list[Any]]] = {
    "fast and slow heads": (MIXED, mixed, GDN_PARTS, [(slice(None), LATER)], [(slice(None), 0)]),
    # its parts begin where the first pass of the segment before begins
    "a slow segment after one with a first pass": (
        ONE_HEAD | dict(seqlen=2700, gate=1.0),
        forgets_until_500,
        GDNHopperConfig(segment=20, transition_parts=2, longest_first_pass=19),
        [(slice(2560), slice(None))],
        [(slice(2560, None), slice(None))],
    ),
    # even if it forgets within a segment: 24 / 4.6, first passes of 6 chunks
    "slower than the longest first pass": (
        ONE_HEAD | dict(seqlen=1200, gate=0.05),
        None,
        NINE,
        [],
        [(slice(576, None), slice(None))],
    ),
    **{
        f"no slower than {longest}": (
            ONE_HEAD | dict(seqlen=1200, gate=0.05),
            None,
            replace(NINE, longest_first_pass=longest),
            [(slice(None), slice(None))],
            [],
        )
        for longest in (6, 9)
    },
    # by the first pass of the second segment; the third segment's state comes from the second
    # segment's parts
    "a short past is gone over as a whole": (
        ONE_HEAD | dict(seqlen=500, gate=1e-4),
        None,
        replace(GDN_PARTS, longest_first_pass=2),
        [(slice(256), slice(None))],
        [(slice(256, None), slice(None))],
    ),
    # all segments of a slow head have parts then, except those with the shortest first passes
    "parts instead of short first passes": (
        MIXED,
        mixed,
        GDNHopperConfig(segment=2, transition_parts=1, longest_first_pass=6, least_first_pass=2),
        [(slice(256), slice(None)), (slice(None), LATER)],
        [(slice(256, 384), 0)],
    ),
    **{
        f"{heads} heads of which the last is slow": (
            dict(seqlen=256, values_per_key=heads, gate=3.0),
            last_is_slow,
            MANY_ROWS,
            [(slice(None), slice(-1))],
            [(slice(None), -1)],
        )
        for heads in (44, 90)
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_which_segments_take_parts(device: str, name):
    sizes, change, config, equal, different = PARTS[name]
    inputs = SMALL.but(**sizes, device=device).inputs()
    if change:
        change(inputs)
    result, whole = with_and_without_parts(inputs, config)

    def is_equal(at: slice, heads: slice | int) -> bool:
        return torch.equal(result.out[:, at, heads], whole.out[:, at, heads])

    assert all(is_equal(*part) for part in equal)
    assert not any(is_equal(*part) for part in different)
    assert (result.final_states - whole.final_states).norm() < 4e-3 * whole.final_states.norm()
    if not inputs.g[:, -1].eq(0).any():
        assert_right(result, inputs)


@pytest.mark.slow
def test_fast_heads_have_the_bits_that_they_have_without_parts(device: str):
    # first passes of three chunks
    inputs = SMALL.but(seqlen=700, initial_states=True, device=device).inputs()
    config = GDNHopperConfig(
        segment=3, transition_parts=1, longest_first_pass=3, transition_programs=4
    )
    assert same(*with_and_without_parts(inputs, config))


@pytest.mark.slow
def test_a_head_does_not_depend_on_the_others(device: str, monkeypatch):
    """It does not depend on the number of programs that compute parts, or on their order either."""
    inputs = SMALL.but(**MIXED, device=device).inputs()
    mixed(inputs)
    together = run(inputs, GDN_PARTS)
    for seed, gate in enumerate((0.0, -3.0)):
        inputs.g[..., 1:] = gate
        if device == "cpu":
            emulate(monkeypatch, seed=5 + seed, resident=1 + seed, source=GDN)
        alone = run(inputs, replace(GDN_PARTS, transition_programs=2 + 7 * seed))
        assert torch.equal(alone.out[:, :, 0], together.out[:, :, 0])
        assert torch.equal(alone.final_states[:, 0], together.final_states[:, 0])


# --- lengths of q and k


@pytest.mark.parametrize("sizes", [dict(values_per_key=2), OLMO], ids=["128", "slices"])
@pytest.mark.parametrize("dtype", [BF16, *slow(FP16)])
def test_long_and_short_q_and_k(device: str, dtype, sizes):
    """Products of raw ones are below and above the normal numbers of fp16."""
    inputs = SMALL.but(
        **sizes, dtype=dtype, l2norm=True, initial_states=True, device=device
    ).inputs()
    for tensor in (inputs.q, inputs.k):
        tensor[:, ::5] *= 1e-3 * tensor.shape[-1] ** -0.5
        tensor[:, 1::5] *= 100
    assert_passes(run(inputs, GDN_CUT), inputs, Precision())


# --- slices: K and V other than 128


def test_nan_stays_in_its_slice(device: str):
    inputs = SMALL.but(**OLMO, device=device).inputs()
    clean, result = (
        run(one, GDN_CUT) for one in (inputs, spoilt(inputs, torch.nan, (0, 70, 0, 100), "v"))
    )
    assert result.out[0, 70:, 0].isnan().any()
    assert torch.equal(result.out[..., :96], clean.out[..., :96])
    assert torch.equal(result.out[:, :, 1], clean.out[:, :, 1])


@pytest.mark.parametrize(
    ("sizes", "change", "reason"),
    [
        ({}, None, ""),
        (dict(value_dim=100), None, ""),
        (dict(key_dim=60), None, "K 60"),
        (dict(value_dim=64), None, "V 64"),
        (dict(value_dim=129), None, "V 129"),
        ({}, lambda v: torch.cat([v, v], 3)[..., :192], "side by side"),
        ({}, lambda v: v[..., :1].expand(v.shape), "side by side"),
        ({}, lambda v: torch.cat([v, v], 2)[:, :, :2], ""),
    ],
)
def test_what_slices_take(monkeypatch, sizes, change: Callable[..., Any] | None, reason):
    """Views of one tensor, but no heads apart."""
    monkeypatch.setattr(
        "ssdprof.kernels.gdn.hopper.slices.unsupported_otherwise", lambda _inputs: ""
    )
    inputs = SMALL.but(**OLMO | sizes).inputs()
    found = unsupported(changed(inputs, change, "v") if change else inputs)
    assert (reason in found) if reason else not found


# --- as exact as unfused, on a GPU

HARD = {
    "lab": {},
    "slow": dict(gate=1e-4),
    "ungated": dict(gate=0.0),
    "beta 2": dict(largest_beta=2.0),
    # a fast head's final state depends on its last few tokens, and its error on few roundings
    "fast": dict(gate=4.0, batch=128, seqlen=128),
    "collinear keys": dict(gate=1e-3, collinear=0.9),
    "normalised inside": dict(l2norm=True, gate=1e-3),
    **{
        f"slices, {name}": OLMO | dict(key_heads=4, seqlen=8192, largest_beta=2.0, gate=gate)
        for name, gate in (("olmo", 0.1), ("no gate", 0.0), ("slow", 1e-4))
    },
    # keys that make a chunk's system ill-conditioned
    "slices, collinear keys": OLMO
    | dict(key_heads=4, seqlen=4096, largest_beta=2.0, gate=0.01, collinear=0.9),
}


@pytest.mark.parametrize("run", [16, 1024])
@pytest.mark.parametrize(
    ("beta", "dtype"), [(0.5, BF16), (0.875, BF16), (0.99, BF16), (0.99, FP32)]
)
@targets("gdn wide", emulated_slow=["gdn hopper"], gpu=("gdn hopper", "gdn wide"))
def test_no_head_is_less_exact_in_runs_of_equal_keys(kernel: Target, beta, dtype, run):
    """Roundings of the inverse, and in fp32 of |k|^2, then add up in all tokens of the run, because
    A is a function of the distance.
    """
    if dtype == FP32 and kernel.only_hopper:
        pytest.skip("fp32 inputs run the portable kernel")
    case = kernel.case(gate=1e-4, l2norm=True, dtype=dtype)
    inputs = case.but(seqlen=max(192, case.seqlen)).inputs()
    first = torch.arange(inputs.length, device=inputs.device) // run * run
    inputs = replace(inputs, k=inputs.k[:, first], beta=torch.full_like(inputs.beta, beta))
    assert_no_less_exact(kernel(inputs), TARGETS["gdn unfused"](inputs), gdn_chunked(inputs))


@targets("gdn wide", emulated=("gdn hopper",), gpu=("gdn hopper", "gdn wide"))
def test_no_head_is_less_exact_for_short_keys_in_fp16(kernel: Target):
    """The products with q alone would be subnormal numbers."""
    inputs = kernel.case(l2norm=True, dtype=FP16, key_dim=128).inputs()
    inputs.k.mul_(1e-3 / inputs.k.float().norm(dim=-1, keepdim=True))
    assert_no_less_exact(kernel(inputs), TARGETS["gdn unfused"](inputs), gdn_chunked(inputs))


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("name", HARD)
def test_no_head_is_less_exact_than_unfused(name):
    """The RMS error against fp64 is at most 1 % larger, with the configuration that `gdn_fused`
    chooses.
    """
    case = SMALL.but(
        **dict(key_heads=2, values_per_key=4, seqlen=16384, initial_states=True) | HARD[name]
    )
    inputs = case.but(device="cuda").inputs()
    plan = get("gdn", "fused").plan(inputs, Precision())
    assert plan.variant == ("hopper, slices" if name.startswith("slices") else "hopper")
    fused, unfused = (get("gdn", name).run(inputs, Precision()) for name in ("fused", "unfused"))
    assert_no_less_exact(fused, unfused, gdn_chunked(inputs, torch.float64))
