"""The gated delta rule's oracle: its meaning, and its two forms against each other."""

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
    """beta = 1 writes v exactly: what the rule is for."""
    k = torch.nn.functional.one_hot(torch.tensor([0, 1, 0, 2]), 8).float()[None, :, None]
    ones = torch.ones(1, 4, 1)
    inputs = make(4, heads=1, q=k, k=k, g=0 * ones, beta=ones, scale=1.0, use_qk_l2norm=False)
    output = gdn_recurrence(inputs)
    torch.testing.assert_close(output.o, inputs.v.double())
    torch.testing.assert_close(output.final_state[0, 0, :3], inputs.v[0, [2, 1, 3], 0].double())


@pytest.mark.parametrize("length", [1, 64, 65, 150])
@pytest.mark.parametrize("values_per_key", [1, 3])
def test_chunked_is_the_recurrence(length: int, values_per_key: int) -> None:
    state = torch.randn(2, 2 * values_per_key, 8, 6, generator=torch.Generator().manual_seed(1))
    inputs = make(length, batch=2, values_per_key=values_per_key, initial_state=state)
    expected = gdn_recurrence(inputs)
    for output in (gdn_chunked(inputs), gdn_chunked(inputs, block=64)):
        torch.testing.assert_close(output.o, expected.o, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(output.final_state, expected.final_state, rtol=1e-10, atol=1e-12)


def test_value_heads_share_the_key_head_before_them() -> None:
    inputs = make(5, values_per_key=2)
    alone = make(5, heads=1, q=inputs.q[:, :, 1:], k=inputs.k[:, :, 1:], v=inputs.v[:, :, 3:], g=inputs.g[:, :, 3:],
                 beta=inputs.beta[:, :, 3:])  # fmt: skip
    torch.testing.assert_close(gdn_recurrence(inputs).o[:, :, 3:], gdn_recurrence(alone).o)


def test_two_segments_with_a_carried_state_are_one() -> None:
    whole = make(100)
    names = ("q", "k", "v", "g", "beta")
    first = gdn_chunked(make(**{name: getattr(whole, name)[:, :37] for name in names}))
    rest = {name: getattr(whole, name)[:, 37:] for name in names}
    second = gdn_chunked(make(**rest, initial_state=first.final_state))
    expected = gdn_chunked(whole)
    torch.testing.assert_close(torch.cat([first.o, second.o], 1), expected.o)
    torch.testing.assert_close(second.final_state, expected.final_state)


def test_fp32_is_near() -> None:
    inputs = make(200)
    output = gdn_chunked(inputs, torch.float32)
    assert output.o.dtype == torch.float32
    assert (output.o - gdn_recurrence(inputs).o).abs().max() < 1e-5


def test_strong_decay_and_closed_gates_stay_finite() -> None:
    inputs = make(70, g=torch.full((1, 70, 2), -1e30), beta=torch.zeros(1, 70, 2))
    output = gdn_chunked(inputs)
    assert torch.equal(output.o, torch.zeros_like(output.o))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (dict(q=torch.zeros(1, 70, 8)), "q must be"),
        (dict(k=torch.zeros(1, 70, 2, 9)), "k must have shape"),
        (dict(v=torch.zeros(1, 70, 3, 6)), "must be a multiple of q's"),
        (dict(v=torch.zeros(1, 70, 2, 6, dtype=torch.float16)), "v must be torch.float32"),
        (dict(g=torch.zeros(1, 69, 2)), "g must have shape"),
        (dict(initial_state=torch.zeros(1, 2, 8, 8)), "initial_state must have shape"),
        (dict(chunk_size=48), "chunk_size"),
        (dict(beta=torch.zeros(1, 70, 2, device="meta")), "beta is on meta"),
    ],
)
def test_bad_inputs_are_named(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**overrides)
