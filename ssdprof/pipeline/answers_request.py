"""The request of `ssdprof answers`, as plain values.  Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ssdprof.core.base import DType, PrecisionRecord
from ssdprof.errors import BadInputError
from ssdprof.pipeline.request import COMPARED, parse_percent
from ssdprof.schema.answers import AnswerGate  # TODO

Reference = Literal["auto", "oracle", "unfused"]
Weights = Literal["auto", "own", "fp32"]


@dataclass(frozen=True, kw_only=True)
class AnswersRequest:
    """The implementations that replace a model's operators, and their reference.

    precisions: the requested ones, by dtype of the model.
    reference: "auto" is the fp64 oracle unless it takes too long, then unfused exact.
    weights: the dtype that the model runs in; "auto" is its own on a GPU and fp32 without one.
    per_layer: each layer alone, too.  generate: greedy tokens after the prompt.
    """

    precisions: Callable[[DType], tuple[PrecisionRecord, ...]]
    implementations: tuple[str, ...] = COMPARED
    reference: Reference = "auto"
    weights: Weights = "auto"
    per_layer: bool = False
    generate: int = 0
    gate: AnswerGate = field(default_factory=AnswerGate)


def parse_gate(max_kl: float | None, min_top1: str | None, max_perplexity_increase: str | None) -> AnswerGate:
    """The limits of the command line.  Raises BadInputError for an invalid one."""
    if max_kl is not None and not 0 <= max_kl < math.inf:
        raise BadInputError(
            f"--max-kl is not a divergence: {max_kl}.", "Give a number of nats, 0 or more, such as 0.001."
        )
    top1 = None if min_top1 is None else 100 * parse_percent("--min-top1", min_top1, whole=True)
    increase = max_perplexity_increase
    return AnswerGate(
        max_kl=max_kl,
        min_top1_pct=top1,
        max_perplexity_increase_pct=(
            None if increase is None else 100 * parse_percent("--max-perplexity-increase", increase)
        ),
    )
