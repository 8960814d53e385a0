"""The unfused pipeline in Triton's interpreter: against the recurrence, the error budget, and algebraic properties."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from gdn_cases import EXACT, RELAXED, Case
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdprof import kernels
from ssdprof.kernels import gdn_unfused
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.gdn.reference import gdn_chunked, gdn_recurrence
from ssdprof.kernels.gdn.unfused.pipeline import plan, run
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import UnsupportedError
from ssdprof.measure.accuracy import assert_passes

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PER_POSITION = ("q", "k", "v", "g", "beta")


def assert_is_recurrence(inputs: GDNInputs, tolerance: float = 2e-5) -> None:
    ours, exact = run(inputs), gdn_recurrence(inputs)
    for one, other in zip(ours, exact, strict=True):
        assert (one - other).abs().max() <= tolerance * (1 + other.abs().max())


@pytest.mark.parametrize("length", [1, 15, 63, 64, 65, 130])
def test_any_length(length: int) -> None:
    assert_is_recurrence(Case(length=length, values_per_key=2, key_dim=24, initial_state=True).inputs())


@pytest.mark.parametrize(("key_dim", "value_dim"), [(1, 1), (16, 60), (60, 16), (96, 192), (100, 120), (256, 33)])
def test_any_dims(key_dim: int, value_dim: int) -> None:
    assert_is_recurrence(Case(length=70, key_dim=key_dim, value_dim=value_dim).inputs())


@pytest.mark.slow
@pytest.mark.parametrize("values_per_key", [1, 2, 3])
def test_value_heads_share_key_heads(values_per_key: int) -> None:
    assert_is_recurrence(Case(key_heads=2, values_per_key=values_per_key, batch=2).inputs())


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_any_chunk_size(chunk_size: int) -> None:
    assert_is_recurrence(Case(chunk_size=chunk_size).inputs())


@pytest.mark.parametrize("lengths", [(0, 37, 0, 93, 1, 0), (1,) * 5, (64, 64), (0,) * 2 + (3,)])
def test_packs(lengths: tuple[int, ...]) -> None:
    assert_is_recurrence(Case(lengths=lengths, values_per_key=2, initial_state=True).inputs())


@pytest.mark.parametrize("gate", [0.0, 50.0, 1e30, torch.inf])
def test_gates_from_none_to_all(gate: float) -> None:
    inputs = Case(initial_state=True).inputs()
    assert_is_recurrence(Case(initial_state=True).inputs(g=torch.full_like(inputs.g, -gate)))


def test_a_gate_above_zero_counts_as_zero() -> None:
    g = Case().inputs().g.clone()
    g[:, 3], g[:, 40] = 2.0, 100.0
    ours, clamped = run(Case().inputs(g=g)), run(Case().inputs(g=g.clamp(max=0)))
    assert torch.equal(ours.out, clamped.out)
    assert torch.equal(ours.final_states, clamped.final_states)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(
    "precision", [EXACT, RELAXED, Precision(state_dtype=FP16), Precision(state_dtype=BF16)], ids=str
)
def test_within_the_budget_of_its_precision(dtype: torch.dtype, precision: Precision) -> None:
    inputs = Case(length=140, values_per_key=2, key_dim=32, value_dim=24, dtype=dtype, initial_state=True).inputs()
    assert_passes(run(inputs, precision), inputs, precision)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(
    ("collinear", "largest_beta"),
    [(0.99, 2.0), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((0.9, 1.0), (0.9, 2.0), (0.99, 1.0)))],
)
def test_collinear_keys_stay_within_the_budget(dtype: torch.dtype, collinear: float, largest_beta: float) -> None:
    case = Case(length=100, key_dim=32, dtype=dtype, gate=0.0, collinear=collinear, largest_beta=largest_beta)
    inputs = case.inputs()
    assert_passes(run(inputs), inputs, EXACT)


def test_identical_keys_with_full_beta_do_not_explode() -> None:
    """The system is all ones below the diagonal: the worst case of the powers that a Neumann series would sum."""
    inputs = Case(length=128, key_dim=32, dtype=BF16, gate=0.0, collinear=1.0).inputs()
    inputs = Case(length=128, key_dim=32, dtype=BF16, gate=0.0, collinear=1.0).inputs(beta=torch.ones_like(inputs.beta))
    out, exact = run(inputs).out.double(), gdn_recurrence(inputs).out
    assert (out - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize("name", ["unfused", "recurrent"])
def test_long_keys_under_strong_gates_stay_finite(name: str) -> None:
    """Without gates, the inverse of such a chunk overflows in fp16."""
    inputs = Case(length=64, key_dim=64, l2norm=False, gate=8.0, dtype=torch.float16).inputs()
    inputs = replace(inputs, k=8 * inputs.k)
    output, exact = kernels.get("gdn", name).run(inputs, EXACT), gdn_recurrence(inputs)
    for ours, expected in zip(output, exact, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())


def test_layouts_of_models_change_no_bit() -> None:
    """Positions innermost, as after a convolution, and views of a wider projection."""
    inputs = Case(length=70, key_heads=2, key_dim=24, value_dim=20, dtype=BF16, initial_state=True).inputs()
    expected = run(inputs)
    views: dict[str, Any] = {}
    for name in PER_POSITION:
        tensor = getattr(inputs, name)
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), torch.nan, dtype=tensor.dtype)
        views[name] = wide[..., 1 : 1 + tensor.shape[-1]].copy_(tensor)
    views["q"] = inputs.q.transpose(1, 3).contiguous().transpose(1, 3)
    views["initial_state"] = inputs.initial_state.mT.contiguous().mT  # type: ignore[union-attr]
    ours = run(Case(l2norm=True).inputs(**views))
    assert torch.equal(ours.out, expected.out)
    assert torch.equal(ours.final_states, expected.final_states)


@pytest.mark.parametrize("dtype", [torch.float64, FP16, BF16], ids=str)
def test_gates_and_states_of_any_dtype(dtype: torch.dtype) -> None:
    inputs = Case(initial_state=True).inputs()
    assert inputs.initial_state is not None
    cast = Case().inputs(g=inputs.g.to(dtype), beta=inputs.beta.to(dtype), initial_state=inputs.initial_state.to(dtype))
    assert_is_recurrence(cast)


def test_nan_stays_in_its_head_and_sequence() -> None:
    case = Case(lengths=(70, 66), key_heads=1, values_per_key=2, initial_state=True)
    v = case.inputs().v.clone()
    v[0, 75, 1, 2] = torch.nan
    clean, ours = run(case.inputs()), run(case.inputs(v=v))
    assert ours.out[0, 75:, 1].isnan().any()
    assert torch.equal(ours.out[0, :70], clean.out[0, :70])
    assert torch.equal(ours.out[:, :, 0], clean.out[:, :, 0])
    assert torch.equal(ours.final_states[0], clean.final_states[0])


def test_the_function_takes_what_the_inputs_take() -> None:
    inputs = Case(lengths=(20, 5), initial_state=True, chunk_size=16).inputs(scale=0.5)
    ours, expected = gdn_unfused(**vars(inputs)), run(inputs)
    assert torch.equal(ours.out, expected.out)
    assert torch.equal(ours.final_states, expected.final_states)
    assert ours.final_states.dtype == FP32


def test_what_it_refuses() -> None:
    with pytest.raises(UnsupportedError, match="chunk_size is at most 64"):
        run(Case(chunk_size=128).inputs())
    with pytest.raises(UnsupportedError, match="forward only"):
        run(Case().inputs(v=Case().inputs().v.requires_grad_()))


def test_it_is_registered_with_a_plan() -> None:
    implementation = kernels.get("gdn", "unfused")
    inputs = Case(lengths=(20, 5)).inputs()
    told = implementation.plan(inputs, EXACT)
    assert told == plan(inputs)
    assert told.launches == 9
    assert told.config["chunk_state.block_v"] == 16
    assert told.workspace_bytes > 0


# --- properties


def cut(inputs: GDNInputs, start: int, stop: int, initial_state: torch.Tensor | None) -> GDNInputs:
    pieces = {name: getattr(inputs, name)[:, start:stop] for name in PER_POSITION}
    return Case().inputs(**pieces, initial_state=initial_state, use_qk_l2norm=True)


def assert_near(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


cases = st.builds(
    Case,
    length=st.integers(2, 140),
    key_heads=st.integers(1, 2),
    values_per_key=st.integers(1, 3),
    key_dim=st.integers(1, 40),
    value_dim=st.integers(1, 40),
    gate=st.sampled_from([0.0, 0.1, 3.0]),
    largest_beta=st.sampled_from([1.0, 2.0]),
    initial_state=st.booleans(),
    seed=st.integers(0, 9),
)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(case=cases, where=st.floats(0, 1))
def test_two_segments_with_a_carried_state_are_one(case: Case, where: float) -> None:
    inputs = case.inputs()
    middle = 1 + int(where * (case.length - 2))
    first = run(cut(inputs, 0, middle, inputs.initial_state))
    second = run(cut(inputs, middle, case.length, first.final_states))
    whole = run(inputs)
    assert_near(torch.cat([first.out, second.out], 1), whole.out)
    assert_near(second.final_states, whole.final_states)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(case=cases)
def test_chunked_is_the_recurrence(case: Case) -> None:
    inputs = case.inputs()
    assert_is_recurrence(inputs, 1e-4)
    for one, other in zip(gdn_chunked(inputs), gdn_recurrence(inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(case=cases, lengths=st.lists(st.integers(0, 70), min_size=1, max_size=4).filter(any))
def test_a_pack_is_its_sequences_alone(case: Case, lengths: list[int]) -> None:
    inputs = case.but(lengths=tuple(lengths)).inputs()
    pack = run(inputs)
    for i, (start, stop) in enumerate(pairwise([0, *accumulate(lengths)])):
        state = None if inputs.initial_state is None else inputs.initial_state[i : i + 1]
        if start < stop:
            alone = run(cut(inputs, start, stop, state))
            assert torch.equal(pack.out[:, start:stop], alone.out)
            assert torch.equal(pack.final_states[i], alone.final_states[0])
        else:
            empty = torch.zeros_like(pack.final_states[i]) if state is None else state[0]
            assert torch.equal(pack.final_states[i], empty)


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(case=cases, order=st.permutations(range(3)))
def test_a_permuted_batch_gives_a_permuted_result(case: Case, order: list[int]) -> None:
    inputs = case.but(batch=3, length=min(case.length, 70)).inputs()
    tensors = {name: value[order] for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    ours: GDNOutput = run(Case().inputs(**tensors, use_qk_l2norm=True))
    for one, other in zip(ours, run(inputs), strict=True):
        assert torch.equal(one, other[order])
