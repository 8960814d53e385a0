"""The oracle against the unrolled sum of the recurrence, and its two forms against each other."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ssd_cases import Case, assert_close, cut, sequences

from ssdprof.kernels import ssd_reference
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.reference import ssd_blocks, ssd_chunked, ssd_recurrence

FP64_ROUNDING = 1e-12

CASES = [
    Case(),
    Case(batch=2, seqlen=130, heads=6, headdim=5, dstate=3, groups=3, skip="(h, p)", gate=True, initial_states=True),
    Case(seqlen=1, skip="", initial_states=True),
    Case(seqlen=64, heads=4, groups=4),
    Case(lengths=(0, 1, 64, 0, 65, 3, 0), gate=True, initial_states=True),
]


def unrolled(inputs: SSDInputs) -> torch.Tensor:
    """out[t] = sum_{s <= t} (C[t] . B[s]) exp(A sum_{s < k <= t} dt[k]) dt[s] x[s], head after head."""
    x, dt, B, C = (getattr(inputs, name).double() for name in ("x", "dt", "B", "C"))
    assert inputs.dt_bias is not None
    dt = torch.log1p(torch.exp(dt + inputs.dt_bias.double())).clamp(*inputs.dt_limit)
    out = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for h in range(x.shape[2]):
            g = h // inputs.heads_per_group
            for t in range(x.shape[1]):
                for s in range(t + 1):
                    decay = torch.exp(inputs.A[h].double() * dt[b, s + 1 : t + 1, h].sum())
                    out[b, t, h] += (C[b, t, g] @ B[b, s, g]) * decay * dt[b, s, h] * x[b, s, h]
    return out


def test_recurrence_is_the_sum_it_stands_for() -> None:
    inputs = Case(batch=2, seqlen=9, heads=4, headdim=3, dstate=5, groups=2, dt_limit=(0.05, 0.5), skip="").inputs()
    torch.testing.assert_close(ssd_recurrence(inputs).out, unrolled(inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("skip", ["(h)", "(h, p)"])
def test_skip_then_gate(skip: str) -> None:
    inputs = Case(seqlen=5, skip=skip, gate=True).inputs()
    plain = ssd_recurrence(replace(inputs, D=None, z=None)).out
    assert inputs.D is not None
    assert inputs.z is not None
    D = inputs.D.double()
    z = inputs.z.double()
    expected = (plain + (D if D.ndim == 2 else D[:, None]) * inputs.x.double()) * z / (1 + torch.exp(-z))
    torch.testing.assert_close(ssd_recurrence(inputs).out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunked_is_the_recurrence(case: Case) -> None:
    inputs = case.inputs()
    assert_close(ssd_chunked(inputs), ssd_recurrence(inputs), FP64_ROUNDING)


@given(lengths=st.lists(st.integers(0, 70), min_size=1, max_size=5).filter(any), block=st.integers(1, 150))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_blocks_tile_every_sequence(lengths: list[int], block: int) -> None:
    inputs = Case(lengths=tuple(lengths), initial_states=True).inputs()
    whole = ssd_recurrence(inputs)
    blocks = list(ssd_blocks(inputs, block=block))
    assert [b.stop - b.start for b in blocks] == [len(b.out) for b in blocks]
    assert all(b.stop - b.start <= block for b in blocks)
    final_states = torch.stack([b.state for b in blocks if b.last])
    assert [b.sequence for b in blocks if b.last] == list(range(len(lengths)))
    assert_close(SSDOutput(torch.cat([b.out for b in blocks])[None], final_states), whole, FP64_ROUNDING)


def test_blocks_are_made_when_asked_for() -> None:
    inputs = Case(seqlen=70).inputs()
    first = next(iter(ssd_blocks(inputs, block=64)))
    assert (first.start, first.stop, first.last) == (0, 64, False)


def test_packed_sequences_do_not_see_each_other() -> None:
    inputs = Case(lengths=(3, 0, 70, 1), initial_states=True).inputs()
    alone = [ssd_chunked(one) for one in sequences(inputs)]
    packed = ssd_chunked(inputs)
    assert_close(packed, SSDOutput(torch.cat([o.out for o in alone], 1), packed.final_states), FP64_ROUNDING)
    assert inputs.initial_states is not None
    torch.testing.assert_close(packed.final_states[1], inputs.initial_states[1].double(), rtol=0, atol=0)
    torch.testing.assert_close(packed.final_states[[0, 2, 3]], torch.cat([o.final_states for o in alone]))


def test_two_segments_with_a_carried_state_are_one() -> None:
    inputs = Case(seqlen=150).inputs()
    first = ssd_chunked(cut(inputs, 0, 83))
    second = ssd_chunked(cut(inputs, 83, 150, initial_states=first.final_states))
    out = torch.cat([first.out, second.out], 1)
    assert_close(SSDOutput(out, second.final_states), ssd_chunked(inputs), FP64_ROUNDING)


def test_a_permuted_batch_gives_the_permuted_result() -> None:
    inputs = Case(batch=3, seqlen=70).inputs()
    order = torch.tensor([2, 0, 1])
    permuted = replace(inputs, **{name: getattr(inputs, name)[order] for name in ("x", "dt", "B", "C")})
    whole, moved = ssd_chunked(inputs), ssd_chunked(permuted)
    assert_close(moved, SSDOutput(whole.out[order], whole.final_states[order]), FP64_ROUNDING)


def test_one_huge_step_cancels_nothing_after_it() -> None:
    inputs = Case(seqlen=64).inputs(dt_bias=None, dt_softplus=False)
    inputs.dt.abs_()
    inputs.dt[:, 7] = 1e20  # a difference of cumulative sums would have no correct digit
    assert_close(ssd_chunked(inputs), ssd_recurrence(inputs), FP64_ROUNDING)


@pytest.mark.parametrize("dt", [0.0, 1e-30, 1e30])
def test_extreme_steps_stay_finite(dt: float) -> None:
    inputs = Case(seqlen=70, initial_states=True).inputs(dt_bias=None, dt_softplus=False)
    inputs.dt.fill_(dt)
    inputs.x.mul_(1e-30)
    assert_close(ssd_chunked(inputs), ssd_recurrence(inputs), FP64_ROUNDING)


def test_no_steps_leave_the_state_alone() -> None:
    inputs = Case(seqlen=70, initial_states=True).inputs(dt_bias=None, dt_softplus=False)
    inputs.dt.zero_()
    assert inputs.initial_states is not None
    torch.testing.assert_close(ssd_chunked(inputs).final_states, inputs.initial_states.double(), rtol=0, atol=0)


def test_fp32_is_fp32_and_near() -> None:
    inputs = Case(seqlen=200, heads=4, groups=2).inputs()
    output = ssd_chunked(inputs, torch.float32)
    assert output.out.dtype == output.final_states.dtype == torch.float32
    assert_close(output, ssd_recurrence(inputs), 1e-5)


def test_as_an_implementation_it_rounds_once() -> None:
    inputs = Case(dtype=torch.bfloat16).inputs()
    output = ssd_reference(inputs)
    assert torch.equal(output.out, ssd_chunked(inputs).out.to(torch.bfloat16))
    assert output.final_states.dtype == torch.float32


@pytest.mark.parametrize("bounds", [[0, 5, 3, 75], [1, 75], [0, 70]])
def test_bounds_that_do_not_rise_to_the_end_are_refused(bounds: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to 75"):
        ssd_chunked(Case().inputs(cu_seqlens=torch.tensor(bounds)))
