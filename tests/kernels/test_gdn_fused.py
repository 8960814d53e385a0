"""The portable GDN kernel, in the interpreter, against the fp64 recurrence, and its other guarantees."""

from dataclasses import replace

import pytest
import torch
from gdn_cases import EXACT, RELAXED, Case
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdprof.kernels import get
from ssdprof.kernels.gdn.config import GDNPortableConfig
from ssdprof.kernels.gdn.fused import plan, run
from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.gdn.portable.scan import GDNPortableLaunch
from ssdprof.kernels.gdn.reference import gdn_recurrence
from ssdprof.kernels.precision import Precision

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LIMITS = {FP32: 5e-6, FP16: 2e-3, BF16: 1.2e-2}  # RMS error of a head over its RMS

# chunks of 16 and slices of 16 of V: 70 positions are five chunks, the last one ragged
TINY = GDNPortableConfig(chunk=16, block_k=16, block_v=16, v_rows=False)
CONFIGS = {
    "chosen": None,
    "tiny": TINY,
    "tiny, v rows": replace(TINY, v_rows=True),
    "tiny, cut": replace(TINY, segment=1),
    "cut": GDNPortableConfig(chunk=32, segment=1, block_k=32, block_v=32),
}
CASES = {
    "batch of GVA": Case(batch=2, key_heads=2, values_per_key=2, initial_state=True),
    "three values a key, odd dims": Case(values_per_key=3, key_dim=20, value_dim=28, initial_state=True),
    "one position": Case(length=17, key_dim=32),
    "beta to 2": Case(largest_beta=2.0, values_per_key=2),
    "no gate": Case(gate=0.0, value_dim=32),
    "strong gate": Case(gate=50.0),
    "normalised outside": Case(l2norm=False, key_dim=24),
    "packed": Case(lengths=(0, 1, 33, 0, 16, 15, 64, 0), initial_state=True),
    "packed, no state": Case(lengths=(40, 9), values_per_key=2),
}


def fused(inputs: GDNInputs, config: GDNPortableConfig | None = None, precision: Precision = EXACT) -> GDNOutput:
    if config is None:
        output: GDNOutput = get("gdn", "fused").run(inputs, precision)
        return output
    return GDNPortableLaunch(inputs, precision, config, state_v_first=False)(inputs)


def assert_close(ours: GDNOutput, expected: GDNOutput, limit: float) -> None:
    """The RMS error of every head, over the head's RMS."""
    for name, a, b, head in zip(GDNOutput._fields, ours, expected, (2, 1), strict=True):
        over = [axis for axis in range(4) if axis != head]
        error = (a.double() - b).square().mean(over).sqrt() / b.square().mean(over).sqrt().clamp_min(1e-30)
        assert error.max() <= limit, f"{name}: {error.tolist()}"


def assert_bitwise(ours: GDNOutput, theirs: GDNOutput) -> None:
    for name, a, b in zip(GDNOutput._fields, ours, theirs, strict=True):
        assert torch.isfinite(a).all(), f"{name} is not finite"
        assert torch.equal(a, b), name


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("case", CASES)
def test_against_the_recurrence(case: str, config: str) -> None:
    inputs = CASES[case].inputs()
    assert_close(fused(inputs, CONFIGS[config]), gdn_recurrence(inputs), LIMITS[FP32])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    "dims", [(60, 60), (96, 192), (100, 16), (16, 100), (120, 40), (192, 16), (256, 16), (16, 256)]
)
def test_sizes_in_16_bit(dims: tuple[int, int], dtype: torch.dtype) -> None:
    case = Case(key_dim=dims[0], value_dim=dims[1], dtype=dtype, values_per_key=2, length=80, initial_state=True)
    inputs = case.inputs()
    assert_close(fused(inputs), gdn_recurrence(inputs), LIMITS[dtype])


@pytest.mark.parametrize("chunk", [16, 32, 64, 128])
def test_the_inverse_of_collinear_keys(chunk: int) -> None:
    """beta near 2 and nearly collinear keys: the powers of the system are huge, its inverse is not."""
    case = Case(length=256, key_dim=32, collinear=0.95, largest_beta=1.99, gate=0.001)
    inputs = case.inputs(beta=torch.full((1, 256, 1), 1.95))
    config = GDNPortableConfig(chunk=chunk, block_k=32, block_v=16, v_rows=False)
    assert_close(fused(inputs, config), gdn_recurrence(inputs), 3e-4)


def test_keys_that_are_not_normalised() -> None:
    """Longer keys enlarge a state.  A first pass must begin before a chunk whose bound is not negligible."""
    case = Case(length=96, gate=3.0, key_dim=16)
    inputs = case.inputs()
    inputs = replace(inputs, use_qk_l2norm=False, k=inputs.k * 0.6)
    assert_close(fused(inputs, CONFIGS["tiny, cut"]), gdn_recurrence(inputs), 1e-4)


def test_segments_forget_but_not_too_early() -> None:
    """A decay of 2^-3 per chunk: eight chunks to forget.  A segment is shorter than that."""
    length, chunk = 16 * 24, 16
    g = torch.full((1, length, 1), -3 * 0.6931 / chunk)
    inputs = Case(length=length, values_per_key=1).inputs(g=g)
    whole, cut = fused(inputs, TINY), fused(inputs, replace(TINY, segment=2))
    assert_close(cut, GDNOutput(*(one.double() for one in whole)), 1e-6)
    assert not torch.equal(cut.out, whole.out)  # the first pass begins after the start of the sequence


def test_relaxed_rounds_fp32_inputs_to_bfloat16() -> None:
    inputs = Case(key_dim=32, value_dim=32).inputs()
    expected = gdn_recurrence(inputs)
    relaxed = fused(inputs, precision=RELAXED)
    assert_close(relaxed, expected, LIMITS[BF16])
    with pytest.raises(AssertionError):
        assert_close(relaxed, expected, 10 * LIMITS[FP32])


@given(split=st.integers(1, 69), config=st.sampled_from(sorted(CONFIGS)))
@settings(max_examples=8, deadline=None)
def test_two_calls_with_a_carried_state_are_one(split: int, config: str) -> None:
    inputs = Case(values_per_key=2, initial_state=True).inputs()
    expected = gdn_recurrence(inputs)
    first, second = (
        replace(inputs, **{name: getattr(inputs, name)[:, piece] for name in ("q", "k", "v", "g", "beta")})
        for piece in (slice(0, split), slice(split, None))
    )
    before = fused(first, CONFIGS[config])
    after = fused(replace(second, initial_state=before.final_states), CONFIGS[config])
    joined = GDNOutput(torch.cat([before.out, after.out], 1), after.final_states)
    assert_close(joined, expected, LIMITS[FP32])


@pytest.mark.slow
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any))
@settings(max_examples=8, deadline=None)
def test_a_pack_is_its_sequences_alone(lengths: list[int]) -> None:
    inputs = Case(lengths=tuple(lengths), values_per_key=2, initial_state=True).inputs()
    assert inputs.initial_state is not None
    packed, start = fused(inputs, TINY), 0
    for i, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(packed.final_states[i], inputs.initial_state[i])
            continue
        piece = {name: getattr(inputs, name)[:, start : start + length] for name in ("q", "k", "v", "g", "beta")}
        state = inputs.initial_state[i : i + 1]
        alone = fused(replace(inputs, **piece, initial_state=state, cu_seqlens=None), TINY)
        assert torch.equal(packed.out[:, start : start + length], alone.out)
        assert torch.equal(packed.final_states[i : i + 1], alone.final_states)
        start += length


def test_a_permuted_batch_is_a_permuted_result() -> None:
    inputs = Case(batch=3, initial_state=True).inputs()
    names = ("q", "k", "v", "g", "beta", "initial_state")
    order = [2, 0, 1]
    permuted = fused(replace(inputs, **{name: getattr(inputs, name)[order] for name in names}), TINY)
    assert_bitwise(permuted, GDNOutput(*(one[order] for one in fused(inputs, TINY))))


@pytest.mark.slow
@pytest.mark.parametrize("config", ["tiny", "tiny, v rows", "tiny, cut"])
def test_any_strides(config: str) -> None:
    """Positions innermost, as after a model's convolution; every second row; a state with V before K."""
    inputs = Case(batch=2, key_heads=2, key_dim=20, value_dim=24, initial_state=True).inputs()
    assert inputs.initial_state is not None
    strange = replace(
        inputs,
        q=inputs.q.transpose(1, 3).contiguous().transpose(1, 3),
        k=torch.cat([inputs.k, inputs.k], 3)[..., :20],
        v=inputs.v.repeat_interleave(2, 1)[:, ::2],
        g=inputs.g.mT.contiguous().mT,
        beta=torch.stack([inputs.beta, inputs.beta], -1)[..., 0],
        initial_state=inputs.initial_state.mT.contiguous().mT,
    )
    assert_bitwise(fused(strange, CONFIGS[config]), fused(inputs, CONFIGS[config]))


@pytest.mark.slow
@pytest.mark.parametrize("config", ["chosen", "tiny, cut"])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_a_nan_stays_in_its_head_and_sequence(name: str, config: str) -> None:
    inputs = Case(lengths=(30, 40), key_heads=2, values_per_key=2).inputs()
    expected = fused(inputs, CONFIGS[config])
    tensor = getattr(inputs, name).clone()
    tensor[0, 10, 0] = float("nan")
    found = fused(replace(inputs, **{name: tensor}), CONFIGS[config])
    heads = slice(2, None) if name in ("q", "k") else slice(1, None)
    assert torch.isnan(found.out[0, 10, 0]).all()
    assert torch.equal(found.out[:, :, heads], expected.out[:, :, heads])
    assert torch.equal(found.out[:, 30:], expected.out[:, 30:])
    assert torch.equal(found.final_states[:, heads], expected.final_states[:, heads])
    assert torch.equal(found.final_states[1], expected.final_states[1])


def test_a_gate_above_0_counts_as_0_and_minus_infinity_forgets() -> None:
    inputs = Case(initial_state=True).inputs()
    g = inputs.g.clone()
    g[:, 5], g[:, 40] = 0.5, float("-inf")
    inputs = replace(inputs, g=g)
    for config in (None, TINY, CONFIGS["tiny, cut"]):
        assert_close(fused(inputs, config), gdn_recurrence(inputs), LIMITS[FP32])


@pytest.mark.parametrize("dtype", [torch.float64, BF16, FP16])
def test_dtypes_of_gates_and_states(dtype: torch.dtype) -> None:
    inputs = Case(initial_state=True).inputs()
    assert inputs.initial_state is not None
    inputs = replace(
        inputs, g=inputs.g.to(dtype), beta=inputs.beta.to(dtype), initial_state=inputs.initial_state.to(dtype)
    )
    assert_close(fused(inputs), gdn_recurrence(inputs), LIMITS[FP32])


@pytest.mark.parametrize("lengths", [(10, 10), (1, 1, 30), (1,)])
def test_a_sequence_is_the_same_in_any_pack_if_batch_invariant(lengths: tuple[int, ...]) -> None:
    """Without the option, short packs run the recurrent kernel, and longer ones with the same sequences do not."""
    inputs = Case(lengths=lengths, initial_state=True, l2norm=False).inputs()
    assert plan(inputs, batch_invariant=True).variant != "recurrent"
    together = run(inputs, batch_invariant=True)
    end = lengths[0]
    assert inputs.initial_state is not None
    first = replace(
        inputs,
        **{name: getattr(inputs, name)[:, :end] for name in ("q", "k", "v", "g", "beta")},
        initial_state=inputs.initial_state[:1],
        cu_seqlens=torch.tensor([0, end]),
    )
    assert_bitwise(run(first, batch_invariant=True), GDNOutput(together.out[:, :end], together.final_states[:1]))


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("heads", [32, 160])
def test_the_length_of_a_pack_decides_nothing_if_batch_invariant(heads: int, l2norm: bool) -> None:
    """Otherwise segments or tiles would differ between a sequence in a pack and the sequence alone."""
    hopper, portable = [], []
    for sequences, seqlen in ((1, 64), (1, 4000), (2, 8000), (64, 160_000)):
        empty = torch.empty(1, seqlen, 1, 1, device="meta", dtype=BF16)
        q, v = (empty.expand(1, seqlen, count, 128) for count in (heads // 2, heads))
        inputs = GDNInputs.unchecked(
            q=q, k=q, v=v, g=v[..., 0], beta=v[..., 0], use_qk_l2norm=l2norm,
            cu_seqlens=torch.empty(sequences + 1, device="meta", dtype=torch.int32),
        )  # fmt: skip
        config = GDNHopperConfig.choose(inputs, 132, batch_invariant=True)
        assert 64 * config.segment >= seqlen
        hopper.append(replace(config, segment=0))
        portable.append(GDNPortableConfig.choose(inputs, (9, 0), 132, batch_invariant=True))
    assert len(set(hopper)) == len(set(portable)) == 1
    assert portable[0].segment == 0


def chosen(key_dim: int, value_dim: int, capability: tuple[int, int] = (9, 0)) -> GDNPortableConfig:
    q, v = (
        torch.empty(8, 1024, heads, dim, device="meta", dtype=BF16) for heads, dim in ((4, key_dim), (8, value_dim))
    )
    inputs = GDNInputs.unchecked(q=q, k=q, v=v, g=v[..., 0], beta=v[..., 0], use_qk_l2norm=True)
    return GDNPortableConfig.choose(inputs, capability, 132)


@pytest.mark.parametrize(
    ("dims", "block_v"), [((256, 256), 32), ((192, 192), 32), ((256, 64), 32), ((256, 16), 16), ((200, 100), 16)]
)
def test_on_hopper_states_with_many_keys_are_narrow_rows_with_two_chunks_in_flight(
    dims: tuple[int, int], block_v: int
) -> None:
    """benchmarks/log/gdn.md, row 42."""
    config = chosen(*dims)
    assert (config.v_rows, config.block_v, config.num_warps, config.scan_stages) == (True, block_v, 4, 2)
    assert config.factors_registers == 168
    assert not chosen(*dims, capability=(8, 0)).v_rows


def test_on_hopper_small_keys_take_two_warps_and_three_programs_a_multiprocessor() -> None:
    assert [chosen(dim, dim).num_warps for dim in (16, 32, 64)] == [2, 4, 4]
    assert [chosen(dim, dim).factors_registers for dim in (16, 32, 60, 64, 100)] == [168, 168, 168, 168, 0]
