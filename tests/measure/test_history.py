"""Kernels that drop history which matters are found: by turning keys, where decays are vectors, and
else by the amplified history.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from generated_inputs import generated
from measure.conftest import random_inputs
from measure.test_probes import Here, law, probed
from targets import slow
from torch import Tensor

from ssdprof import kernels, operators
from ssdprof.kernels.gdn.reference import gdn_recurrence
from ssdprof.kernels.kda.reference import kda_recurrence
from ssdprof.kernels.oracle import Span, spans_of
from ssdprof.measure.accuracy import oracle_output
from ssdprof.measure.laws import AMPLIFIED_HISTORY, DROPPED, TURNING_KEYS
from ssdprof.measure.probes import Prober
from ssdprof.measure.sequences import alone
from ssdprof.operators.implementations import own_implementation
from ssdprof.operators.kda_inputs import histories as kda_histories

pytestmark = [pytest.mark.usefixtures("small_guards"), pytest.mark.slow]
Forgotten = Callable[[Any, Span], Tensor]  # (inputs, window) -> of each head, (h)
LIMIT = -14.0  # about 2^-20


def by_the_largest_channel(inputs, window: Span) -> Tensor:
    """Whether the largest channel's sum of gates is below `LIMIT`: no bound for keys that mix."""
    sums = inputs.g[window.batch, window.start : window.stop].float().sum(0)
    return (sums.amax(-1) if sums.ndim == 2 else sums) < LIMIT


def by_the_sum(inputs, window: Span) -> Tensor:
    """Whether a head's decays multiply to less than exp(LIMIT): small, but not nothing."""
    gate = operators.get(inputs.operator).oracle.gate(inputs, window)
    return gate.exponents[..., -1].sum(0) < LIMIT


def dropping(window: int, forgotten: Forgotten, only: str, inputs):
    """Correct, but heads begin anew at each border of `window` tokens where the window after it is
    `forgotten`, and are read from that window's end on.

    only: "packs": nowhere else; "states": drops the initial states alone.
    """
    out, states = oracle_output(inputs)
    spans = spans_of(inputs)
    if only == "packs" and inputs.cu_seqlens is None:
        return out, states
    if only == "states" and inputs.initial is None:
        return out, states
    for span in spans:
        borders = range(span.start, span.stop - window, window)
        begins = {
            border: forgotten(inputs, replace(span, start=border, stop=border + window))
            for border in (borders[:1] if only == "states" else borders)
        }
        for border, heads in begins.items():
            if bool(heads.any()):
                # up to where all of them have begun anew once more
                again = (next_ for next_ in begins if next_ > border and begins[next_][heads].all())
                stop = next(again, span.stop - window) + window
                part = alone(inputs, replace(span, start=border, stop=stop))
                if part.initial is not None:
                    part = part.after(torch.zeros_like(part.initial))
                anew, end = oracle_output(part)
                read = slice(border + window, stop)
                out[span.batch, read, heads] = anew[0, window:][:, heads]
                states[span.sequence, heads] = end[0, heads]
    return out, states


# --- turning keys


@pytest.mark.parametrize(
    ("sizes", "seqlen", "changes"),
    [
        ("4/4x32x16", 300, {}),
        *slow(
            ("2/4x16x32", 140, {}),
            ("1/1x16x16", 2100, {}),
            ("4/4x32x16", 200, {"use_qk_l2norm": False, "scale": 0.5}),
        ),
    ],
)
def test_the_outputs_of_turning_keys_have_a_closed_form(sizes, seqlen, changes):
    like = replace(generated("kda", sizes, seqlen, sequences=2), **changes)
    kinds = list(kda_histories(like, (1, 2)))
    assert len(kinds) == 1 + 4 + 2
    for histories in (kinds[0], kinds[-1]):
        for inputs, outputs in histories:
            heads = inputs.v.shape[2]
            out, _ = kda_recurrence(inputs, dtype=torch.float64)
            for known in outputs:
                ours = out[known.batch, known.positions][:, known.heads]
                # keys of half the channels have lengths that 16 bit may miss
                room = 1e-4 if inputs.use_qk_l2norm else 6e-3
                error = (ours - known.expected).norm() / known.expected.norm()
                assert error < room, known.kind
            heads_known = torch.cat([known.heads for known in outputs])
            assert set(heads_known.tolist()) == set(range(heads))


def test_every_channel_of_turning_keys_decays_in_every_window():
    inputs, outputs = next(iter(next(kda_histories(generated("kda", "2/2x32x16", 320), ()))))
    for window, step, total in ((16, 16, -20), (32, 1, -40)):
        sums = inputs.g[0, :, 0].unfold(0, window, step).sum(-1)
        assert bool((sums == total).all())
    assert outputs[0].kind == "windows of 16 tokens"


@pytest.mark.parametrize(("window", "tokens"), [(16, 120), *slow((64, 260), (1024, 120))])
@pytest.mark.parametrize("only", ["", "packs", "states"])
def test_turning_keys_find_a_kernel_that_bounds_history_by_its_largest_channel(
    window, tokens, only
):
    kernel = partial(dropping, window, by_the_largest_channel, only)
    found = law(TURNING_KEYS, kernel, generated("kda", "2/2x32x16", tokens))
    assert found.holds == "no"
    assert found.detail.startswith("history that matters is dropped, with ")
    expected = "1 x 4,096 tokens and 4 heads" if only else f"1 x {tokens} tokens and 2 heads"
    if window < 1024 or only:
        assert expected in found.detail
    else:
        assert "1 x 4,096 tokens and 1 heads" in found.detail


def test_a_kernel_that_is_wrong_from_the_first_window_on_is_not_said_to_drop_history():
    def half(inputs):
        out, states = oracle_output(inputs)
        return out / 2, states

    found = law(TURNING_KEYS, half, generated("kda", "2/2x32x16", 120))
    assert found.holds == "no"
    assert found.detail.startswith(
        "outputs are wrong, with 1 x 120 tokens and 2 heads: 0.501 RMS error"
    )


@pytest.mark.parametrize("chunk", [16, *slow(32, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_correct_roundings_stay_far_below_the_limit_of_turning_keys(chunk, dtype):
    """The rounded form, also with states in 16 bit."""
    operator = operators.get("kda")
    precision = kernels.Precision(intermediates="relaxed", state_dtype=dtype)
    for histories in kda_histories(generated("kda", "4/4x32x32", 600), (1, 4)):
        for inputs, outputs in histories:
            found = []
            rounded = operator.oracle.rounded(inputs, precision)
            for span in spans_of(inputs):
                gate = operator.oracle.gate(inputs, span, chunk)
                found.append(rounded.advance(inputs, span, gate)[0])
            out = torch.cat(found)
            for known in outputs:
                ours = out[known.positions][:, known.heads].double()
                squares = (ours - known.expected).square(), known.expected.square()
                error, size = (each.sum((1, 2)) for each in squares)
                assert float((error / size).max().sqrt()) < DROPPED / 2, known.kind


def test_turning_keys_have_the_shape_of_every_new_call():
    shapes = []

    def noted(inputs):
        shapes.append(tuple(inputs.v.shape))
        return oracle_output(inputs)

    implementation = own_implementation(operators.get("kda"), "fused", noted)
    implementation = replace(implementation, kind="bundled")
    prober = Prober(Here())
    first = generated("kda", "2/2x16x16", 100)
    second = generated("kda", "2/2x16x16", 150)
    assert len(prober.probe(implementation, first, kernels.Precision())) > 1
    assert (
        prober.probe(implementation, generated("kda", "2/2x16x16", 100), kernels.Precision()) == ()
    )
    assert {shape[1] for shape in shapes} == {100}
    (found,) = prober.probe(implementation, second, kernels.Precision())
    assert (found.name, found.holds) == (TURNING_KEYS, "yes")
    assert shapes[-1] == (1, 150, 2, 16)
    assert TURNING_KEYS not in probed(oracle_output, generated("kda", "2/2x16x16", 30)), (
        "one window"
    )


# --- the amplified history


def fast(name: str, **changes):
    """Inputs whose heads forget e^-14 within 100 tokens or so."""
    if name == "ssd":
        decaying = {"A": torch.tensor([-0.2, -0.4]), "dt_bias": torch.zeros(2)}
        return random_inputs(seqlen=400, heads=2, headdim=16, groups=1, **decaying | changes)
    given = generated("gdn", "1/2x16x16", 400)
    return replace(given, g=torch.full_like(given.g, -0.2), **changes)


@pytest.mark.parametrize("name", ["ssd", *slow("gdn")])
@pytest.mark.parametrize("only", ["", "packs", "states"])
def test_the_amplified_history_finds_a_kernel_that_drops_small_history(name, only):
    given = fast(name)
    kernel = partial(dropping, 100, by_the_sum, only)
    assert law(AMPLIFIED_HISTORY, oracle_output, given).holds == "yes"
    found = law(AMPLIFIED_HISTORY, kernel, given)
    assert (found.holds, bool(found.detail)) == ("no", True)
    initial = torch.randn(given.states_shape)
    assert law(AMPLIFIED_HISTORY, kernel, given.after(initial)).holds == "no"


def test_no_law_for_gdn_without_normalised_keys_as_16_bit_hide_what_is_dropped():
    """A constant key with beta |k|^2 near 2 keeps the state, however fast it decays.  What is left
    when the decays are below 2^-24 is less than the error of the rounded form.
    """
    given = replace(generated("gdn", "1/1x16x16", 512), use_qk_l2norm=False)
    key = (torch.full((16,), 0.25) * 2.1**0.5).to(given.k.dtype)
    changes = {
        "k": key.expand_as(given.k).contiguous(),
        "q": torch.full_like(given.q, 0.25),
        "g": torch.full_like(given.g, -0.105),
        "beta": torch.ones_like(given.beta),
    }
    inputs = replace(given, **changes)
    tokens = 160
    assert tokens * -0.105 < -16
    left = abs(torch.tensor(-0.105).exp() * (1 - key.double().square().sum())) ** tokens
    assert left > 0.03
    span = Span(sequence=0, batch=0, start=0, stop=512)
    oracle = operators.get("gdn").oracle
    rounded = oracle.rounded(inputs, kernels.Precision())
    out, _ = rounded.advance(inputs, span, oracle.gate(inputs, span))
    exact = gdn_recurrence(inputs, dtype=torch.float64)[0][0]
    errors = (out - exact)[256:].square().sum((1, 2)) / exact[256:].square().sum((1, 2))
    assert errors.max().sqrt() > left
