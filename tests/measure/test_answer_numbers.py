"""Divergences, agreement and perplexities against a plain dense computation, and the interval for
autocorrelated series.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ssdprof.measure import answers
from ssdprof.measure.answers import (
    Divergence,
    bands,
    compare_logits,
    first_nonfinite,
    joined,
    mean_interval,
)

COUNT = 60
VOCABULARY = 17


def draw(scale: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a reference and of a candidate near it, and the prompt's tokens.  Both models
    exclude the last token of the vocabulary, as if it were padding.
    """
    generator = torch.Generator().manual_seed(0)
    reference = 2 * torch.randn(COUNT, VOCABULARY, generator=generator)
    other = reference + scale * torch.randn(COUNT, VOCABULARY, generator=generator)
    reference[:, -1] = other[:, -1] = -torch.inf
    return reference, other, torch.randint(VOCABULARY - 1, (COUNT,), generator=generator)


def compared(reference: Tensor, other: Tensor, tokens: Tensor, rows: int = 7) -> Divergence:
    """Compares in blocks of `rows` positions, as for a prompt's logits."""
    cuts = [slice(start, start + rows) for start in range(0, len(reference), rows)]
    return joined([compare_logits(reference[cut], other[cut], tokens[1:][cut]) for cut in cuts])


def test_the_numbers_are_those_of_a_dense_computation():
    reference, other, tokens = draw()
    (band,) = bands(compared(reference, other, tokens))
    p = reference.double().softmax(-1)
    q = other.double().softmax(-1)
    kl = (p * (p / q).log()).nansum(-1)
    assert band.kl_mean == pytest.approx(float(kl.mean()))
    assert band.kl_p99 == pytest.approx(float(kl.quantile(0.99)))
    assert (band.kl_max, band.kl_max_position) == (pytest.approx(float(kl.max())), int(kl.argmax()))

    flipped = (p.argmax(-1) != q.argmax(-1)).nonzero()[:, 0]
    margins = (p.max(-1).values / p.gather(-1, q.argmax(-1)[:, None])[:, 0]).log()[flipped]
    assert 0 < band.flips == len(flipped) < COUNT
    assert band.top1_pct == pytest.approx(100 * (COUNT - len(flipped)) / COUNT)
    assert band.flip_margin_median == pytest.approx(float(margins.quantile(0.5)))
    assert band.flip_margin_max == pytest.approx(float(margins.max()))
    assert band.flip_position == int(flipped[margins.argmax()])

    losses = [-table[:-1].gather(-1, tokens[1:, None])[:, 0].log().mean() for table in (p, q)]
    assert band.reference_perplexity == pytest.approx(math.exp(losses[0]))
    assert band.perplexity == pytest.approx(math.exp(losses[1]))
    assert band.perplexity_increase_pct == pytest.approx(
        100 * (math.exp(losses[1] - losses[0]) - 1)
    )
    low, high = band.perplexity_interval_pct
    assert low < band.perplexity_increase_pct < high


def test_a_divergence_below_the_rounding_of_fp32_is_a_number():
    reference, other, tokens = draw(scale=1e-5)
    (band,) = bands(compared(reference, other, tokens))
    assert 0 < band.kl_mean < 1e-9


def test_bands_are_of_their_own_positions(monkeypatch):
    monkeypatch.setattr(answers, "BANDS", (0, 10, 40))
    reference, other, tokens = draw()
    other[:40] = reference[:40]
    whole, *parts = bands(compared(reference, other, tokens))
    assert [(band.start, band.stop) for band in (whole, *parts)] == [
        (0, 60),
        (0, 10),
        (10, 40),
        (40, 60),
    ]
    assert [band.kl_mean > 0 for band in parts] == [False, False, True]
    assert parts[2].kl_max_position == whole.kl_max_position >= 40


def test_one_token_has_no_perplexity():
    reference, other, tokens = draw()
    (band,) = bands(compared(reference[:1], other[:1], tokens[:1]))
    assert (band.perplexity, band.perplexity_interval_pct) == (None, None)
    assert band.kl_mean > 0


def test_what_is_not_finite_is_found():
    reference, other, tokens = draw()
    assert first_nonfinite(compared(reference, other, tokens)) is None
    other[33, 2] = torch.nan
    assert first_nonfinite(compared(reference, other, tokens)) == 33


def test_the_interval_is_that_of_independent_values():
    values = np.random.default_rng(1).normal(3, 2, 4000)
    low, high = mean_interval(values)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * 2 / math.sqrt(4000), rel=0.2)


def test_the_interval_knows_that_neighbours_resemble_each_other():
    """AR(1) with coefficient 0.8: the mean's standard error is sqrt(1.8 / 0.2) = 3 times that of
    independent values.
    """
    noise = np.random.default_rng(2).normal(size=8000)
    values = np.zeros(8000)
    for i in range(1, 8000):
        values[i] = 0.8 * values[i - 1] + noise[i]
    low, high = mean_interval(values)
    assert high - low == pytest.approx(3 * 2 * 1.96 * values.std() / math.sqrt(8000), rel=0.25)
