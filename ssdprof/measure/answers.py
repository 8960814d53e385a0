"""The difference between two models' next-token distributions, position by position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssdprof.core.case import AnswerBand

BANDS = (0, 1024, 16384)  # starts of the bands of positions: errors of a state grow with length
_WORKING_BYTES = 2**30  # of a block of positions
_FP64_COPIES = 6  # of a block's logits, held at the same time


# For each position (n,) on the CPU; "kl", "margin" and losses in fp64 and nats, tokens in int64:
#     kl                      KL(reference || candidate)
#     reference_token, token  the most likely ones; the first if several are equal
#     margin                  log-probability, by the reference, of its own token less that of the
#                             candidate's
#     reference_loss, loss    minus the log-probability of the prompt's next token; NaN at the last
#                             position
Divergence = dict[str, Tensor]


def rows_that_fit(vocabulary: int) -> int:
    """Positions whose logits are compared at once."""
    return max(1, _WORKING_BYTES // (8 * _FP64_COPIES * vocabulary))


def compare_logits(reference: Tensor, candidate: Tensor, targets: Tensor) -> Divergence:
    """A block of positions.  reference, candidate: logits (n, vocabulary).

    targets: ids (m) of the next tokens, m = n, or n - 1 for the last block of a prompt.
    Computed in fp64, so that divergences far below the rounding of a logit are not lost.
    """
    high, low = (logits.double().log_softmax(-1) for logits in (reference, candidate))
    kl = torch.nn.functional.kl_div(low, high, log_target=True, reduction="none").sum(-1)
    tops = high.argmax(-1)
    others = low.argmax(-1)
    margin = _at(high, tops) - _at(high, others)

    def loss(log_probabilities: Tensor) -> Tensor:
        losses = torch.full_like(kl, torch.nan)
        losses[: len(targets)] = -_at(log_probabilities[: len(targets)], targets)
        return losses

    numbers = {"kl": kl, "reference_token": tops, "token": others, "margin": margin}
    return {
        name: part.cpu()
        for name, part in (numbers | {"reference_loss": loss(high), "loss": loss(low)}).items()
    }


def joined(blocks: Sequence[Divergence]) -> Divergence:
    """The blocks of a prompt as one."""
    return {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}


def first_nonfinite(comparison: Divergence) -> int | None:
    """The first position whose divergence is not finite; None if there is none."""
    bad = ~comparison["kl"].isfinite()
    return int(bad.to(torch.uint8).argmax()) if bool(bad.any()) else None


def bands(comparison: Divergence) -> tuple[AnswerBand, ...]:
    """The band of all positions, then, for a long prompt, one for each part of it."""
    count = len(comparison["kl"])
    edges = zip(BANDS, (*BANDS[1:], count), strict=True)
    parts = [(start, min(stop, count)) for start, stop in edges if start < count]
    return tuple(
        _band(comparison, start, stop)
        for start, stop in ((0, count), *(parts if len(parts) > 1 else ()))
    )


def _band(comparison: Divergence, start: int, stop: int) -> AnswerBand:
    """The statistics of some positions."""
    cut = {name: part[start:stop] for name, part in comparison.items()}
    kl = cut["kl"].numpy()
    margin = cut["margin"]
    losses = torch.stack([cut["reference_loss"], cut["loss"]])
    flipped = (cut["token"] != cut["reference_token"]).nonzero()[:, 0]
    worst = int(flipped[margin[flipped].argmax()]) if len(flipped) else None
    return AnswerBand(
        start=start,
        stop=stop,
        kl_mean=float(kl.mean()),
        kl_p99=float(np.quantile(kl, 0.99)),
        kl_max=float(kl.max()),
        kl_max_position=start + int(kl.argmax()),
        top1_pct=100.0 * (1 - len(flipped) / len(kl)),
        flips=len(flipped),
        flip_margin_median=float(margin[flipped].quantile(0.5)) if len(flipped) else None,
        flip_margin_max=None if worst is None else float(margin[worst]),
        flip_position=None if worst is None else start + worst,
        **_perplexities(*losses[:, losses.isfinite().all(0)].numpy()),
    )


def _perplexities(reference: NDArray[np.float64], other: NDArray[np.float64]) -> dict[str, Any]:
    """The fields of a band, from the losses at the same positions (n,)."""
    if not len(reference):
        return dict.fromkeys(
            (
                "reference_perplexity",
                "perplexity",
                "perplexity_increase_pct",
                "perplexity_interval_pct",
            )
        )
    interval = mean_interval(other - reference)
    differences = (float((other - reference).mean()), *interval)
    increase, low, high = (
        float(100 * np.expm1(difference)) for difference in differences
    )  # percent
    return {
        "reference_perplexity": float(np.exp(reference.mean())),
        "perplexity": float(np.exp(other.mean())),
        "perplexity_increase_pct": increase,
        "perplexity_interval_pct": (low, high),
    }


def _at(log_probabilities: Tensor, tokens: Tensor) -> Tensor:
    """(n, vocabulary) and (n) -> (n)"""
    return log_probabilities.gather(-1, tokens[:, None])[:, 0]


# --- the mean of an autocorrelated series

RESAMPLES = 2000
_SEED = 0


def mean_interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """95 % interval of the mean of values (n,), n >= 1, by a circular block bootstrap.

    Blocks are sqrt(n) long, because predictions of neighbouring tokens are correlated: resampling
    single values would make the interval too narrow.  Source: Politis and Romano
    1992, "A circular block-resampling procedure for stationary data".
    """
    count = len(values)
    length = max(1, round(math.sqrt(count)))
    sums = np.cumsum(np.concatenate([[0.0], values, values[: length - 1]]))
    # (n,), of the blocks that begin at each value
    block_means = (sums[length:] - sums[:-length]) / length
    generator = np.random.default_rng(_SEED)
    starts = generator.integers(count, size=(RESAMPLES, math.ceil(count / length)))
    low, high = np.quantile(block_means[starts].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)
