"""Records of a model's answers: its next-token distributions, compared with those of a reference.

The divergence is that of the candidate from the reference, KL(reference || candidate), in nats.  Position t is that of
the distribution of token t + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ssdprof.schema.base import DType, PrecisionRecord, Record
from ssdprof.schema.speed import Interval


class Flip(Record):
    """A position at which candidate and reference have different most likely tokens.

    margin: the reference's log-probability of its own token minus that of the other one, in nats.
    """

    position: int
    margin: float
    reference_token: int
    token: int


class AnswerBand(Record):
    """Positions start..stop of the prompt.

    perplexity_increase_pct: relative to the reference's, and its 95 % interval: from the differences at each position,
    resampled in blocks.  The perplexities are None if no next token is known.
    """

    start: int
    stop: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    kl_max_position: int
    top1_pct: float  # positions at which both have the same most likely token
    flips: int
    flip_margin_median: float | None
    worst_flip: Flip | None  # the one with the largest margin
    reference_perplexity: float | None
    perplexity: float | None
    perplexity_increase_pct: float | None
    perplexity_interval_pct: Interval | None


class Generated(Record):
    """Greedy tokens after the prompt.  first_difference: the first that differs from the reference's; None: none."""

    tokens: int
    first_difference: int | None


AnswerStatus = Literal["compared", "nonfinite", "refused", "out of memory", "failed"]


class AnswerCase(Record):
    """The model with its operators replaced by one implementation at one precision.

    change: for a case that shows noise: the change, in words.
    layer: the only decoder layer that the implementation computed; None: all requested layers.
    bands: of all positions, then of parts of a long prompt.  Empty unless compared.
    """

    implementation: str
    precision: PrecisionRecord
    change: str = ""
    layer: int | None = None
    status: AnswerStatus
    reason: str = ""
    bands: tuple[AnswerBand, ...] = ()
    generated: Generated | None = None

    @property
    def label(self) -> str:
        """ "fused (relaxed, bf16 states)"."""
        what = f"{self.implementation} ({self.precision})"
        where = "" if self.layer is None else f" in layer {self.layer} alone"
        return f"{what}{where}, {self.change}" if self.change else f"{what}{where}"

    @property
    def judged(self) -> bool:
        """Whether gates apply: to implementations in all requested layers."""
        return not self.change and self.layer is None


_LIMITS = {
    "max_kl": "max-kl {:g}",
    "min_top1_pct": "min-top1 {:g}%",
    "max_perplexity_increase_pct": "max-perplexity-increase {:g}%",
}


class AnswerGate(Record):
    """Limits of a case, over all positions: mean divergence, agreement, and increase of the perplexity."""

    max_kl: float | None = None
    min_top1_pct: float | None = None
    max_perplexity_increase_pct: float | None = None

    @property
    def empty(self) -> bool:
        return self == AnswerGate()

    @property
    def names(self) -> tuple[str, ...]:
        """ "max-kl 0.001", "min-top1 99%", ...: the limits that are set."""
        return tuple(self._name(limit) for limit in _LIMITS if getattr(self, limit) is not None)

    def _name(self, limit: str) -> str:
        return _LIMITS[limit].format(getattr(self, limit))

    def objections(self, case: AnswerCase) -> Iterator[tuple[str, str]]:
        """(name, explanation) of each limit that the case breaks.  NaN breaks every limit."""
        whole = case.bands[0]
        if self.max_kl is not None and not whole.kl_mean <= self.max_kl:
            yield self._name("max_kl"), f"mean KL {whole.kl_mean:.3g} is above {self.max_kl:g}"
        if self.min_top1_pct is not None and not whole.top1_pct >= self.min_top1_pct:
            found = f"the same top token at {whole.top1_pct:.4g}% of positions, below {self.min_top1_pct:g}%"
            yield self._name("min_top1_pct"), found
        increase, limit = whole.perplexity_increase_pct, self.max_perplexity_increase_pct
        if limit is not None and increase is not None and not increase <= limit:
            yield (
                self._name("max_perplexity_increase_pct"),
                f"perplexity rises by {increase:.3g}%, more than {limit:g}%",
            )


class Answers(Record):
    """The cases of one prompt.

    reference: computed the operators in the reference model.  remark: the reason of this choice.
    weights: the dtype of the model outside of its operators; own_weights: it is the checkpoint's.
    layers: decoder layers in which implementations computed; elsewhere the reference did.
    seconds: total wall-clock time.
    """

    seqlen: int
    reference: str
    remark: str = ""
    weights: DType
    own_weights: bool = True
    layers: tuple[int, ...]
    segment_length: int
    gate: AnswerGate
    cases: tuple[AnswerCase, ...] = ()
    peak_bytes: int | None = None  # GPU memory, of model, reference and cases
    seconds: float = 0.0

    @property
    def judged(self) -> tuple[AnswerCase, ...]:
        return tuple(case for case in self.cases if case.judged)

    def failures(self) -> tuple[str, ...]:
        """A sentence for each judged case that was not compared or breaks a limit."""
        found = []
        for case in self.judged:
            if case.status != "compared":
                found.append(f"{case.label} at {self.seqlen:,} tokens: {case.status}: {case.reason}")
            elif why := "; ".join(how for _, how in self.gate.objections(case)):
                found.append(f"{case.label} at {self.seqlen:,} tokens: {why}")
        return tuple(found)
