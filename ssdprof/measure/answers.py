"""The difference between two models' next-token distributions, position by position."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssdprof.core.case import AnswerBand

# first positions of the bands, which are compared separately because errors of states may grow
BANDS = (0, 1024, 16384)
_WORKING_BYTES = 2**30  # memory for the comparison of one block of positions
_FP64_COPIES = 6  # fp64 tensors of the size of a block's logits that exist at the same time


# Tensors (n,) on the CPU, with an element for each position.  Tokens are int64, all others fp64 and
# in nats:
#     kl                      KL(reference || candidate)
#     reference_token, token  the most likely next token by the reference, and by the candidate; the
#                             first one if several are equally likely
#     margin                  by the reference, the log-probability of `reference_token` minus that
#                             of `token`
#     reference_loss, loss    minus the log-probability of the prompt's next token; NaN at the last
#                             position
Divergence = dict[str, Tensor]


def rows_that_fit(vocabulary: int) -> int:
    """The number of positions whose logits are compared at once, at least 1.

    vocabulary: number of tokens.
    """
    return max(1, _WORKING_BYTES // (8 * _FP64_COPIES * vocabulary))


def compare_logits(reference: Tensor, candidate: Tensor, targets: Tensor) -> Divergence:
    """The divergence of a block of positions.

    reference, candidate: logits, (n, vocabulary).
    targets: ids of the next tokens, (m): m is n, or n - 1 for the last block of a prompt.
    Computed in fp64, so that divergences far below the rounding of a logit are not lost.
    """
    reference = reference.double().log_softmax(-1)
    candidate = candidate.double().log_softmax(-1)
    terms = torch.nn.functional.kl_div(candidate, reference, log_target=True, reduction="none")
    # A token that the reference excludes adds nothing, even where the candidate excludes it, too.
    kl = terms.masked_fill(reference == -torch.inf, 0.0).sum(-1)
    reference_token = reference.argmax(-1)
    token = candidate.argmax(-1)

    def loss(log_probabilities: Tensor) -> Tensor:
        losses = torch.full_like(kl, torch.nan)
        losses[: len(targets)] = -_at(log_probabilities[: len(targets)], targets)
        return losses

    return {
        "kl": kl.cpu(),
        "reference_token": reference_token.cpu(),
        "token": token.cpu(),
        "margin": (_at(reference, reference_token) - _at(reference, token)).cpu(),
        "reference_loss": loss(reference).cpu(),
        "loss": loss(candidate).cpu(),
    }


def joined(blocks: Sequence[Divergence]) -> Divergence:
    """The divergence of a whole prompt, from those of its blocks."""
    return {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}


def first_nonfinite(comparison: Divergence) -> int | None:
    """The first position whose divergence is not finite; None if there is none."""
    bad = ~comparison["kl"].isfinite()
    return int(bad.to(torch.uint8).argmax()) if bool(bad.any()) else None


def bands(comparison: Divergence) -> tuple[AnswerBand, ...]:
    """The statistics of all positions, and, for a prompt that reaches into several bands, of each
    of these.
    """
    count = len(comparison["kl"])
    bounds = [*(start for start in BANDS if start < count), count]
    ranges = [(0, count)]
    if len(bounds) > 2:
        ranges += pairwise(bounds)
    return tuple(_band(comparison, start, stop) for start, stop in ranges)


def _band(comparison: Divergence, start: int, stop: int) -> AnswerBand:
    """The statistics of the positions from `start` up to `stop`, which is not included."""
    cut = {name: tensor[start:stop] for name, tensor in comparison.items()}
    kl = cut["kl"].numpy()
    margin = cut["margin"]
    # Without positions whose losses are not finite: at the last one of the prompt they are NaN.
    losses = torch.stack([cut["reference_loss"], cut["loss"]])
    reference_losses, other_losses = losses[:, losses.isfinite().all(0)].numpy()
    flipped = (cut["token"] != cut["reference_token"]).nonzero()[:, 0]  # positions in the band
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
        **_perplexities(reference_losses, other_losses),
    )


def _perplexities(reference: NDArray[np.float64], other: NDArray[np.float64]) -> dict[str, Any]:
    """The perplexities of a band, as fields of `AnswerBand`, which are None if there is no loss.

    reference, other: losses at the same positions, (n,), in nats.
    """
    if not len(reference):
        return {
            "reference_perplexity": None,
            "perplexity": None,
            "perplexity_increase_pct": None,
            "perplexity_interval_pct": None,
        }
    difference = other - reference
    low, high = mean_interval(difference)
    return {
        "reference_perplexity": float(np.exp(reference.mean())),
        "perplexity": float(np.exp(other.mean())),
        "perplexity_increase_pct": _increase_pct(difference.mean()),
        "perplexity_interval_pct": (_increase_pct(low), _increase_pct(high)),
    }


def _increase_pct(loss_difference: float) -> float:
    """By how many percent a perplexity increases if the mean loss increases by so many nats."""
    return float(100 * np.expm1(loss_difference))


def _at(log_probabilities: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability of each position's token: (n, vocabulary), (n) -> (n)."""
    return log_probabilities.gather(-1, tokens[:, None])[:, 0]


# --- the mean of an autocorrelated series

RESAMPLES = 2000  # samples of the bootstrap
_SEED = 0


def mean_interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """The 95 % interval of the mean of values (n,), n >= 1, by a circular block bootstrap.

    Predictions of neighbouring tokens are correlated, so that resampling single values would make
    the interval too narrow.  Blocks of sqrt(n) values are resampled instead.  Source: Politis and
    Romano 1992, "A circular block-resampling procedure for stationary data".
    """
    count = len(values)
    length = max(1, round(math.sqrt(count)))
    sums = np.cumsum(np.concatenate([[0.0], values, values[: length - 1]]))
    # the mean of the block that begins at each value, (n,); behind the last value is the first
    block_means = (sums[length:] - sums[:-length]) / length
    generator = np.random.default_rng(_SEED)
    starts = generator.integers(count, size=(RESAMPLES, math.ceil(count / length)))
    low, high = np.quantile(block_means[starts].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)
