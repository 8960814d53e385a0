"""The gated delta rule's oracle: its meaning, and its two forms against each other."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from ssdprof.kernels.gdn import GDNInputs
from ssdprof.kernels.gdn.reference import gdn_chunked, gdn_recurrence


def make(T: int = 70, *, batch: int = 1, heads: int = 2, values_per_key: int = 1, **overrides: Any) -> GDNInputs:
    generator = torch.Generator().manual_seed(0)
    K, V, value_heads = 8, 6, heads * values_per_key

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tensors: dict[str, Any] = dict(
        q=normal(batch, T, heads, K),
        k=normal(batch, T, heads, K),
        v=normal(batch, T, value_heads, V),
        g=-normal(batch, T, value_heads).abs(),
        beta=normal(batch, T, value_heads).sigmoid(),
        use_qk_l2norm=True,
    )
    return GDNInputs(**(tensors | overrides))


def test_without_decay_the_state_answers_a_key_with_its_last_value() -> None:
    """beta = 1 writes v exactly: the purpose of the rule."""
    k = torch.nn.functional.one_hot(torch.tensor([0, 1, 0, 2]), 8).float()[None, :, None]
    ones = torch.ones(1, 4, 1)
    inputs = make(4, heads=1, q=k, k=k, g=0 * ones, beta=ones, scale=1.0, use_qk_l2norm=False)
    output = gdn_recurrence(inputs)
    torch.testing.assert_close(output.out, inputs.v.double())
    torch.testing.assert_close(output.final_states[0, 0, :3], inputs.v[0, [2, 1, 3], 0].double())


@pytest.mark.parametrize("length", [1, 64, 65, 150])
@pytest.mark.parametrize("values_per_key", [1, 3])
def test_chunked_is_the_recurrence(length: int, values_per_key: int) -> None:
    state = torch.randn(2, 2 * values_per_key, 8, 6, generator=torch.Generator().manual_seed(1))
    inputs = make(length, batch=2, values_per_key=values_per_key, initial_state=state)
    expected = gdn_recurrence(inputs)
    for output in (gdn_chunked(inputs), gdn_chunked(inputs, block=64)):
        torch.testing.assert_close(output.out, expected.out, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(output.final_states, expected.final_states, rtol=1e-10, atol=1e-12)


def test_value_heads_share_the_key_head_before_them() -> None:
    inputs = make(5, values_per_key=2)
    alone = make(5, heads=1, q=inputs.q[:, :, 1:], k=inputs.k[:, :, 1:], v=inputs.v[:, :, 3:], g=inputs.g[:, :, 3:],
                 beta=inputs.beta[:, :, 3:])  # fmt: skip
    torch.testing.assert_close(gdn_recurrence(inputs).out[:, :, 3:], gdn_recurrence(alone).out)


def test_two_segments_with_a_carried_state_are_one() -> None:
    whole = make(100)
    names = ("q", "k", "v", "g", "beta")
    first = gdn_chunked(make(**{name: getattr(whole, name)[:, :37] for name in names}))
    rest = {name: getattr(whole, name)[:, 37:] for name in names}
    second = gdn_chunked(make(**rest, initial_state=first.final_states))
    expected = gdn_chunked(whole)
    torch.testing.assert_close(torch.cat([first.out, second.out], 1), expected.out)
    torch.testing.assert_close(second.final_states, expected.final_states)


def test_fp32_is_near() -> None:
    inputs = make(200)
    output = gdn_chunked(inputs, torch.float32)
    assert output.out.dtype == torch.float32
    assert (output.out - gdn_recurrence(inputs).out).abs().max() < 1e-5


def test_strong_decay_and_closed_gates_stay_finite() -> None:
    inputs = make(70, g=torch.full((1, 70, 2), -1e30), beta=torch.zeros(1, 70, 2))
    output = gdn_chunked(inputs)
    assert torch.equal(output.out, torch.zeros_like(output.out))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (dict(q=torch.zeros(1, 70, 8)), "q must be"),
        (dict(k=torch.zeros(1, 70, 2, 9)), "k must have shape"),
        (dict(v=torch.zeros(1, 70, 3, 6)), "must be a multiple of q's"),
        (dict(v=torch.zeros(1, 70, 2, 6, dtype=torch.float16)), "v must be torch.float32"),
        (dict(g=torch.zeros(1, 69, 2)), "g must have shape"),
        (dict(initial_state=torch.zeros(1, 2, 8, 8)), "initial_state must have shape"),
        (dict(initial_state=torch.zeros(1, 2, 6, 8)), "K comes before V"),
        (dict(initial_state=torch.zeros(8)), r"initial_state must have shape .*, not \(8,\)"),
        (dict(beta=None), "beta must be a tensor, not None"),
        (dict(initial_state=torch.zeros(1, 2, 8, 6, dtype=torch.int32)), "initial_state must be float64"),
        (dict(chunk_size=48), "chunk_size"),
        (dict(q=torch.zeros(1, 0, 2, 8)), r"q is empty: \(1, 0, 2, 8\)"),
        (dict(v=torch.zeros(1, 70, 0, 6)), "v is empty"),
        (dict(q=torch.zeros(1, 70, 2, 257)), "q's last dimension is at most 256, not 257"),
        (dict(v=torch.zeros(1, 70, 2, 257)), "v's last dimension is at most 256, not 257"),
        (dict(q=torch.zeros(1, 70, 2, 8, dtype=torch.float64)), "q must be float32"),
        (dict(cu_seqlens=torch.tensor([0])), "cu_seqlens must be"),
        (dict(cu_seqlens=torch.tensor([0.0, 70.0])), "cu_seqlens must be int32 or int64"),
        (dict(batch=2, cu_seqlens=torch.tensor([0, 70])), "cu_seqlens needs a batch of 1"),
        (dict(cu_seqlens=torch.tensor([0, 9, 70]), initial_state=torch.zeros(1, 2, 8, 6)), "initial_state must have"),
        (dict(beta=torch.zeros(1, 70, 2, device="meta")), "beta is on meta"),
    ],
)
def test_bad_inputs_are_named(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**overrides)


def test_a_pack_is_its_sequences_alone() -> None:
    """Ragged and empty ones, each with its own initial and final state."""
    bounds = [0, 37, 37, 130, 131]
    state = torch.randn(4, 2, 8, 6, generator=torch.Generator().manual_seed(1))
    pack = make(131, initial_state=state, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    for output in (gdn_recurrence(pack), gdn_chunked(pack, block=64)):
        for i, (start, stop) in enumerate(pairwise(bounds)):
            if start == stop:
                assert torch.equal(output.final_states[i], state[i].double())
                continue
            parts = {name: getattr(pack, name)[:, start:stop] for name in ("q", "k", "v", "g", "beta")}
            alone = gdn_recurrence(make(**parts, initial_state=state[i : i + 1]))
            torch.testing.assert_close(output.out[:, start:stop], alone.out)
            torch.testing.assert_close(output.final_states[i], alone.final_states[0])


@pytest.mark.parametrize("bounds", [[0, 40, 30, 70], [1, 70], [0, 69]])
def test_bounds_that_fall_are_refused(bounds: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to 70"):
        gdn_chunked(make(cu_seqlens=torch.tensor(bounds)))


def test_a_gate_above_zero_counts_as_zero_and_minus_infinity_forgets() -> None:
    g = make().g.clone()
    g[:, 3], g[:, 40], g[:, 68] = 2.0, 0.5, -torch.inf
    inputs = make(g=g)
    clamped = make(g=g.clamp(max=0))
    for evaluate in (gdn_recurrence, gdn_chunked):
        output = evaluate(inputs)
        assert torch.equal(output.out, evaluate(clamped).out)
        assert output.out.isfinite().all()
    torch.testing.assert_close(gdn_chunked(inputs).out, gdn_recurrence(inputs).out)


def test_nan_stays_in_its_head_and_sequence() -> None:
    v = make(100, batch=2).v.clone()
    v[1, 20, 0, 3] = torch.nan
    clean, output = gdn_chunked(make(100, batch=2)), gdn_chunked(make(100, batch=2, v=v))
    assert output.out[1, 20:, 0].isnan().any()
    assert torch.equal(output.out[0], clean.out[0])
    assert torch.equal(output.out[1, :, 1], clean.out[1, :, 1])


def test_signatures_tell_what_kernels_depend_on() -> None:
    inputs = make()
    assert inputs.signature == make().signature
    for other in (make(use_qk_l2norm=False), make(scale=2.0), make(69), make(cu_seqlens=torch.tensor([0, 70]))):
        assert inputs.signature != other.signature
