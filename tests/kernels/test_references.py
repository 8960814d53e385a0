"""The oracles: their meaning, and their two forms against each other."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import BF16, FP32, GDNCase, SSDCase, assert_close

from ssdprof.kernels import ssd_reference
from ssdprof.kernels.gdn.reference import gdn_chunked, gdn_recurrence
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.reference import ssd_blocks, ssd_chunked, ssd_recurrence

FP64_ROUNDING = 1e-12


def unrolled(inputs: SSDInputs) -> torch.Tensor:
    """out[t] = sum_{s <= t} (C[t] . B[s]) exp(A sum_{s < k <= t} dt[k]) dt[s] x[s], head after
    head.
    """
    x, dt, B, C = (getattr(inputs, name).double() for name in ("x", "dt", "B", "C"))
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


def test_ssd_recurrence_is_the_sum_it_stands_for():
    inputs = SSDCase(
        batch=2, seqlen=9, heads=4, headdim=3, dstate=5, groups=2, dt_limit=(0.05, 0.5), skip=""
    ).inputs()
    torch.testing.assert_close(ssd_recurrence(inputs).out, unrolled(inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("skip", ["(h)", "(h, p)"])
def test_skip_then_gate(skip):
    inputs = SSDCase(seqlen=5, skip=skip, gate=True).inputs()
    plain = ssd_recurrence(replace(inputs, D=None, z=None)).out
    D = inputs.D.double()
    z = inputs.z.double()
    expected = (
        (plain + (D if D.ndim == 2 else D[:, None]) * inputs.x.double()) * z / (1 + torch.exp(-z))
    )
    torch.testing.assert_close(ssd_recurrence(inputs).out, expected, rtol=1e-12, atol=1e-12)


@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=5).filter(any),
    block=st.integers(1, 150),
)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_blocks_tile_every_sequence(lengths: list[int], block: int):
    inputs = SSDCase(lengths=tuple(lengths), initial_states=True).inputs()
    blocks = list(ssd_blocks(inputs, block=block))
    assert [span.stop - span.start for span, *_ in blocks] == [len(out) for _, out, _, _ in blocks]
    assert all(len(out) <= block for _, out, _, _ in blocks)
    final_states = torch.stack([state for _, _, state, row in blocks if row is not None])
    assert [span.sequence for span, _, _, row in blocks if row is not None] == list(
        range(len(lengths))
    )
    found = SSDOutput(torch.cat([out for _, out, _, _ in blocks])[None], final_states)
    assert_close(found, ssd_recurrence(inputs), FP64_ROUNDING)


two_forms = pytest.mark.parametrize(
    ("recurrence", "chunked", "case"),
    [
        (ssd_recurrence, ssd_chunked, SSDCase(seqlen=200, heads=4, groups=2)),
        (gdn_recurrence, gdn_chunked, GDNCase(seqlen=200, gate=0.8)),
    ],
    ids=["ssd", "gdn"],
)


@two_forms
def test_nan_does_not_reach_earlier_positions(recurrence, chunked, case):
    inputs = case.inputs()
    inputs.values[0, [20, 70, 71], 0, [3, 4, 5]] = torch.nan
    torch.testing.assert_close(chunked(inputs), recurrence(inputs), equal_nan=True)


@two_forms
def test_fp32_is_fp32_and_near(recurrence, chunked, case):
    output = chunked(case.inputs(), FP32)
    assert output.out.dtype == output.final_states.dtype == FP32
    assert_close(output, recurrence(case.inputs()), 1e-5)


def test_as_an_implementation_it_rounds_once():
    inputs = SSDCase(dtype=BF16).inputs()
    output = ssd_reference(inputs)
    assert torch.equal(output.out, ssd_chunked(inputs).out.to(BF16))
    assert output.final_states.dtype == FP32


@pytest.mark.parametrize("bounds", [[0, 5, 3, 75], [1, 75], [0, 70]])
@pytest.mark.parametrize(
    ("chunked", "case"), [(ssd_chunked, SSDCase()), (gdn_chunked, GDNCase(seqlen=75))]
)
def test_bounds_that_do_not_rise_to_the_end_are_refused(bounds, chunked, case):
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to 75"):
        chunked(case.inputs(cu_seqlens=torch.tensor(bounds)))


def test_without_decay_the_state_answers_a_key_with_its_last_value():
    """beta = 1 writes v exactly: the purpose of the rule."""
    k = torch.nn.functional.one_hot(torch.tensor([0, 1, 0, 2]), 8).float()[None, :, None]
    ones = torch.ones(1, 4, 1)
    inputs = GDNCase(seqlen=4, key_dim=8, value_dim=6, l2norm=False).inputs(
        q=k, k=k, g=0 * ones, beta=ones, scale=1.0
    )
    output = gdn_recurrence(inputs)
    torch.testing.assert_close(output.out, inputs.v.double())
    torch.testing.assert_close(output.final_states[0, 0, :3], inputs.v[0, [2, 1, 3], 0].double())


def test_value_heads_share_the_key_head_before_them():
    inputs = GDNCase(seqlen=5, key_heads=2, values_per_key=2).inputs()
    last = {name: getattr(inputs, name)[:, :, 3:] for name in ("v", "g", "beta")}
    alone = replace(inputs, q=inputs.q[:, :, 1:], k=inputs.k[:, :, 1:], **last)
    torch.testing.assert_close(gdn_recurrence(inputs).out[:, :, 3:], gdn_recurrence(alone).out)


@pytest.mark.parametrize("length", [1, 64, 65, 150])
@pytest.mark.parametrize("values_per_key", [1, 3])
def test_gdn_in_blocks_is_the_recurrence(length, values_per_key):
    case = GDNCase(
        batch=2,
        seqlen=length,
        key_heads=2,
        values_per_key=values_per_key,
        gate=0.8,
        initial_states=True,
    )
    inputs = case.inputs()
    for output in (gdn_chunked(inputs), gdn_chunked(inputs, block=64)):
        assert_close(output, gdn_recurrence(inputs), 1e-10)
