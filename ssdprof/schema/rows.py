"""A case of a run or of a bench as one flat row, for gates, exports and comparisons."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from ssdprof.schema.accuracy import Match, TensorAccuracy
from ssdprof.schema.answers import AnswerBand, AnswerCase, Answers
from ssdprof.schema.base import PrecisionRecord, Record, Status
from ssdprof.schema.prefill import CallTime, PartName, PrefillSpeedup
from ssdprof.schema.run import CaseResult, Cast, RunReport
from ssdprof.schema.serving import call_words, prompt_words, tokens
from ssdprof.schema.speed import Interval, Launch, Memory, Roofline, Speedup, Timing

JUDGED = "fused"  # the implementation that the gates of benches and prefills judge
Measured = tuple[float, Interval]


class Errors(Record):
    """The errors of a tensor.  Matches are empty for what is compared with itself."""

    rms_ratio: float  # rms(out - oracle) / rms(oracle)
    floor_rms_ratio: float  # the same of the oracle, rounded to the output's dtype
    max_abs: float | None = None  # largest difference from the oracle
    against_baseline: tuple[Match, ...] = ()
    against_oracle: tuple[Match, ...] = ()

    @property
    def over_floor(self) -> float | None:
        """None if the floor is 0: the oracle is exact in the output's dtype."""
        return self.rms_ratio / self.floor_rms_ratio if self.floor_rms_ratio else None

    def match_pct(self, tolerance: float) -> float | None:
        """Share of elements that match the baseline, in percent."""
        return next((match.match_pct for match in self.against_baseline if match.tolerance == tolerance), None)


class PrefillFigures(Record):
    """The measurements of a prefill of the whole model: call times, and no device times.

    speedup: over the baseline with the same surroundings.
    needs: what else the call time depends on, by name: versions, attention.
    gpu_us: the GPU's work for each part of the model.  The others are as in `schema.prefill.PrefillCase`.
    """

    baseline: str
    call: CallTime | None = None
    speedup: PrefillSpeedup | None = None
    needs: dict[str, str]
    gpu_us: dict[PartName, float] = Field(default_factory=dict)
    alone_us: float | None = None
    peak_bytes: int | None = None
    logits_rms: float | None = None


class Row(Record):
    """where: "layer 3"; of a bench a shape and a dtype.
    tokens: "131,072 tokens", "8 x 4,096"; of one of several calls also which: "8 tokens, chunk 2 of 5 of 40 tokens".
    calls: of a run, all calls of its kind: "131,072 tokens", "chunks of 8 tokens of 40 tokens".
    prompt: of a run, the tokens of the prompt: "40 tokens".
    shape: the sizes of the call, in words, and whether its inputs were cast; of the whole model, which model it is.
    gated: whether gates judge it: not for the baseline and other libraries.
    """

    where: str
    tokens: str
    calls: str = ""
    prompt: str = ""
    shape: str
    implementation: str
    variant: str
    precision: PrecisionRecord
    status: Status
    reason: str = ""
    gated: bool
    timing: Timing | None = None
    speedup: Speedup | None = None
    roofline: Roofline | None = None
    memory: Memory | None = None
    launches: tuple[Launch, ...] = ()
    out: Errors | None = None
    final_states: Errors | None = None
    answers: AnswerBand | None = None  # over all positions of the prompt, in a row of the whole model
    prefill: PrefillFigures | None = None  # in a row of the whole model, whether it was timed or not

    @property
    def call(self) -> Measured | None:
        """The call time."""
        time = self.prefill.call if self.prefill else None
        if time is not None:
            return time.median_us, time.interval_us
        return (self.timing.call_median_us, self.timing.call_interval_us) if self.timing else None

    @property
    def time(self) -> Measured | None:
        """The time that verdicts use: the device time; for a prefill the call time."""
        return (self.timing.device_median_us, self.timing.device_interval_us) if self.timing else self.call

    @property
    def kernels(self) -> int | None:
        """Number of launched Triton kernels; None if none was recorded (`launches` has the planned number)."""
        return sum(launch.registers is not None for launch in self.launches) or None

    @property
    def baseline(self) -> str:
        """The baseline of the speedup; empty if there is none."""
        if self.prefill:
            return self.prefill.baseline if self.prefill.speedup else ""
        return self.speedup.baseline if self.speedup else ""

    @property
    def over_baseline(self) -> Measured | None:
        """The speedup by `time`."""
        if self.prefill:
            found = self.prefill.speedup
            return (found.ratio, found.interval) if found else None
        return (self.speedup.device_ratio, self.speedup.device_interval) if self.speedup else None

    @property
    def place(self) -> str:
        """ "layer 3, 131,072 tokens"."""
        return f"{self.where}, {self.tokens}"

    @property
    def name(self) -> str:
        """ "layer 3, 131,072 tokens, fused, exact, fp32 states": the same case has the same name in every run."""
        return f"{self.place}, {self.implementation}, {self.precision}"


def of_run(report: RunReport) -> tuple[Row, ...]:
    def is_gated(case: CaseResult) -> bool:
        return case.implementation not in {report.baseline_of(case.call), *report.libraries}

    return tuple(_row(case, report.cast, gated=is_gated(case)) for case in report.cases)


def of_answers(report: RunReport) -> tuple[Row, ...]:
    """The answers of the whole model: a row per prompt, implementation and precision."""
    return tuple(_answers(one, case) for one in report.answers for case in one.judged)


def _answers(answers: Answers, case: AnswerCase) -> Row:
    layers = ", ".join(map(str, answers.layers))
    return Row(
        where="answers",
        tokens=tokens(answers.seqlen),
        prompt=tokens(answers.seqlen),
        shape=f"{answers.weights} weights, reference {answers.reference}, layers {layers}",
        implementation=case.implementation,
        variant="",
        precision=case.precision,
        status="passed" if case.status == "compared" else case.status,
        reason=case.reason,
        gated=False,
        answers=case.bands[0] if case.bands else None,
    )


def _row(case: CaseResult, cast: Cast | None, *, gated: bool) -> Row:
    return Row(
        where=f"layer {case.layer.index}",
        tokens=_which(case),
        calls=call_words(case.call, case.dims.seqlen, case.dims.batch).partition(" ")[2],
        prompt=prompt_words(case.call, case.dims.seqlen, case.dims.batch),
        shape=f"{case.dims.operator}, {case.dims}{f', {cast}' if cast else ''}",
        implementation=case.implementation,
        variant=case.variant,
        precision=case.precision,
        status=case.status,
        reason=case.reason,
        gated=gated,
        timing=case.timing,
        speedup=case.speedup,
        roofline=case.roofline,
        memory=case.memory,
        launches=case.launches,
        out=errors(case.accuracy, "out"),
        final_states=errors(case.accuracy, "final_states"),
    )


def _which(case: CaseResult) -> str:
    """Which call it is, as no other case of its layer."""
    size = tokens(case.dims.seqlen, case.dims.batch)
    if case.call is None:
        return size
    return f"{size} {case.call}" if case.call.kind == "packed" else f"{size}, {case.call}"


def errors(accuracy: Iterable[TensorAccuracy], tensor: Literal["out", "final_states"]) -> Errors | None:
    """The errors of one tensor; None if it was not compared."""
    found = next((one for one in accuracy if one.tensor == tensor), None)
    if found is None:
        return None
    return Errors(
        rms_ratio=found.vs_oracle.rms_ratio,
        floor_rms_ratio=found.floor.rms_ratio,
        max_abs=found.vs_oracle.max_abs,
        against_baseline=found.vs_baseline.matches if found.vs_baseline else (),
        against_oracle=found.vs_oracle.matches,
    )
