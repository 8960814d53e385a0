"""A report: its cases, and what belongs to all of them."""

from __future__ import annotations

import re
from collections.abc import Container
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ssdprof.core.base import (
    SMALLEST_DIFFERENCE,
    Clock,
    Count,
    DType,
    Laws,
    NotNegative,
    PrecisionName,
    Processes,
    Record,
    Size,
    Text,
    Time,
    check_unique,
    distinct,
    exact_precision,
    grouped,
    intermediates_of,
    states_of,
)
from ssdprof.core.case import DECODER, Answers, Case, DecodedStates, Generated, Prefill
from ssdprof.core.conditions import Condition
from ssdprof.core.statistics import Estimate, Faster
from ssdprof.core.target import (
    Ceilings,
    CheckpointRef,
    Clocks,
    Environment,
    LayerRef,
    Placement,
    Prompt,
)

# of options with a value
_NOT_AGAIN = ("--out", "--decode-states", "--implementations", "--against", "--budget", "--trace")


class LeftOut(Record):
    """Requested cases that were not begun.  case_key: of the cases, or their common beginning."""

    case_key: Text
    implementations: tuple[Text, ...] = ()  # empty: all
    reason: Text


class ProcessLine(Record):
    """What belongs to a process of a report, and not to a case: the last line of each process
    counts.

    captured: layers whose inputs were taken.  notes: for the reader, in sentences.
    gates: of each layer's first call, by its index: the heads that forget within each of
    `MEMORIES`, and hardly at all.
    doubts: a sentence on inputs that no model has -> the indices of their layers.
    peak_bytes: GPU memory while the model ran and layers were replayed.
    seconds: wall clock.  steps: that of each step of the command, compilation included.
    ended: why it stopped early, in a sentence; empty while it runs, and at its end.
    complete: it reached its end.
    """

    process: Text = ""
    captured: tuple[LayerRef, ...] = ()
    clocks: Clocks | None = None
    ceilings: Ceilings | None = None
    gates: dict[Text, tuple[Count, ...]] = Field(default_factory=dict)
    doubts: dict[Text, tuple[Count, ...]] = Field(default_factory=dict)
    peak_bytes: Count | None = None
    seconds: NotNegative = 0.0
    steps: dict[Text, NotNegative] = Field(default_factory=dict)
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[Text, ...] = ()
    complete: bool = False
    ended: Text = ""


# a case's key, implementation and precision: joined by ", " its name
Requested = tuple[Text, Text, Text]


class Report(Record):
    """The result of run, bench, prefill, answers or tune.

    id: name of the run's folder; of another report its kind and time.  created: ISO 8601, UTC.
    command: as typed, without tokens.
    commit: of the repository in the working directory, "-dirty" after it if files differ; empty
    without one.
    target: the model's repo, or the operator of a bench.  model: None for a bench.
    requested: the cases, known before the first one runs.
    cast: the inputs' dtype in the model, and that in which they were replayed, if it is another
    one.
    baseline: that others are compared with; decode steps have their own, which their cases name.
    matched_with: the implementation whose output others are matched with.
    laws: which ones were tested.
    tensor_parallel: number of ranks; the first one's share of the heads was replayed.
    ranks: processes that shared the cases, each on a GPU of its own.
    samplers: processes that sampled every case, one after another.
    kernels: hash of the machine code of the bundled kernels, of a bench.
    absent: a sentence for each requested implementation that is unavailable.
    processes: one line for each rank, then for each further sampler.
    """

    version: Literal[4]  # `base.VERSION`
    kind: Literal["run", "bench", "prefill", "answers", "tune"]
    id: Text
    created: Time
    command: tuple[Text, ...]
    commit: Text = ""
    ssdprof_version: Text
    target: Text
    model: CheckpointRef | None = None
    environment: Environment
    requested: tuple[Requested, ...] = ()
    conditions: tuple[Condition, ...] = ()
    baseline: Text
    matched_with: Text = ""
    smallest_difference: Annotated[float, Field(ge=0, lt=1)] = SMALLEST_DIFFERENCE
    prompts: tuple[Prompt, ...] = ()
    segment_length: Size | None = None
    cast: tuple[DType, DType] | None = None
    laws: Laws = "default"
    tensor_parallel: Processes = 1
    ranks: Processes = 1
    samplers: Processes = 1
    capture_complete: bool = True  # False: the replayed capture was interrupted
    placement: Placement | None = None  # of the weights; None for stored captures
    kernels: Text = ""
    absent: tuple[Text, ...] = ()
    notes: tuple[Text, ...] = ()  # for the reader, in sentences
    cases: tuple[Case, ...] = ()
    processes: tuple[ProcessLine, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Report:
        """Check that no name occurs twice, that errors along the positions of one length have equal
        slices, and that each call that ran has its errors.
        """
        check_unique("a case", [case.name for case in self.cases])
        check_unique("a requested case", self.requested)
        check_unique("a process", [line.process for line in self.processes])
        if len(self.processes) > self.files:
            raise ValueError(f"it has {len(self.processes)} processes of {self.files}")
        slices: dict[int, int] = {}
        for case in self.cases:
            of_out = case.tensor("out")
            seqlen = case.dims.seqlen if case.dims else 0
            for error in (of_out.vs_oracle, of_out.floor) if of_out else ():
                if error.along and slices.setdefault(seqlen, len(error.along)) != len(error.along):
                    raise ValueError(
                        f"{case.name} has errors along the positions in another number of slices"
                    )
            if case.status == "ran" and case.is_call and not case.tensor("out"):
                raise ValueError(f"{case.name} ran, and nothing says what it computed")
        return self

    # --- of all processes

    @property
    def files(self) -> int:
        """The number of processes, each with a file of its own."""
        return self.ranks + self.samplers - 1

    @property
    def first(self) -> ProcessLine:
        return self.processes[0] if self.processes else ProcessLine()

    @property
    def clocks(self) -> Clocks | None:
        return self.first.clocks

    @property
    def ceilings(self) -> Ceilings | None:
        return self.first.ceilings

    @property
    def captured(self) -> tuple[LayerRef, ...]:
        layers = distinct(line.captured for line in self.processes)
        return tuple(sorted(layers, key=lambda layer: layer.index))

    @property
    def peak_bytes(self) -> int | None:
        peaks = [line.peak_bytes for line in self.processes if line.peak_bytes is not None]
        return max(peaks, default=None)

    @property
    def seconds(self) -> float:
        return max((line.seconds for line in self.processes), default=0.0)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        return tuple(distinct(line.left_out for line in self.processes))

    @property
    def cast_words(self) -> str:
        """ "cast from bf16 to fp16", or ""."""
        return "cast from {} to {}".format(*self.cast) if self.cast else ""

    @property
    def doubts(self) -> dict[str, int]:
        """A sentence on inputs that no model has -> the number of their layers."""
        layers: dict[str, set[int]] = {}
        for line in self.processes:
            for text, indices in line.doubts.items():
                layers.setdefault(text, set()).update(indices)
        return {text: len(indices) for text, indices in layers.items()}

    @property
    def remarks(self) -> tuple[str, ...]:
        """The report's notes and those of its processes."""
        return tuple(distinct([self.notes, *(line.notes for line in self.processes)]))

    # --- cases

    @property
    def of_calls(self) -> tuple[Case, ...]:
        """Cases of captured calls or generated inputs."""
        return tuple(case for case in self.cases if case.is_call)

    @property
    def of_states(self) -> tuple[Case, ...]:
        """Cases of states of decoded tokens."""
        return tuple(case for case in self.cases if isinstance(case.task, DecodedStates))

    @property
    def of_answers(self) -> tuple[Case, ...]:
        return tuple(case for case in self.cases if isinstance(case.task, Answers))

    @cached_property
    def _by_key(self) -> dict[tuple[str, str], list[Case]]:
        return grouped(self.cases, lambda case: (case.case_key, case.implementation))

    def baseline_of(self, case: Case, implementation: str = "") -> Case | None:
        """The case's baseline, or another implementation, with the same key: at exact intermediates
        and equal states if there is such a case, else its first one.  None if that is the case
        itself.

        In a bench it is the fastest case of the other implementation; other libraries have no
        baseline there.
        """
        name = implementation or case.baseline
        there = self._by_key.get((case.case_key, name), []) if name else []
        if isinstance(case.task, Generated):
            if case.kind == "library" or name == case.implementation:
                return None
            return min(filter(device_time, there), key=device_time, default=None)
        exact = exact_precision(case.precision)
        nearest = min(there, key=lambda other: other.precision != exact, default=None)
        return None if nearest is case else nearest

    def speedup(self, case: Case, clock: Clock | None = None, over: str = "") -> Estimate | None:
        """Over the case's baseline, or over another implementation.  clock: None: the one that
        verdicts use.
        """
        return case.over(self.baseline_of(case, over), clock or case.clock)

    def faster(self, case: Case, clock: Clock | None = None) -> Faster | None:
        """The verdict of `speedup`."""
        speedup = self.speedup(case, clock)
        return speedup.verdict(self.smallest_difference) if speedup else None

    def predicted(self, case: Case) -> float | None:
        """The speedup of a prefill over its baseline by Amdahl's law: from the share of the
        operator in the baseline's time and its own speedup, both from device times of one layer
        alone.  None if that layer was not timed.

        With f = part / whole and s = part / faster this is 1 / (1 - f + f / s).
        """
        base = self.baseline_of(case)
        if not (base and base.call_us and isinstance(case.task, Prefill)):
            return None
        assert isinstance(base.task, Prefill)
        part = base.task.alone_us
        faster = case.task.alone_us
        if part is None or faster is None:
            return None
        whole = base.call_us.value
        left = whole - case.task.operator_calls * (part - faster)
        return whole / left if left > 0 else None

    def again(self, case: Case) -> tuple[str, ...]:
        """The words of a command that runs just this case, and its baseline; empty if no command
        made the report.
        """
        if len(self.command) < 3:
            return ()
        options = self._options_of(case)
        again = []
        words = iter(self.command)
        for word in words:
            if word.partition("=")[0] not in options:
                again.append(word)
            elif "=" not in word:
                next(words, None)  # skip the option's value
        for option, value in options.items():
            if value is not None:
                again += [option, value]
        return tuple(again)

    def _options_of(self, case: Case) -> dict[str, str | None]:
        """The options, each with a value, that a command for this case alone does not share with
        the report's command; None: it has none.

        {"--out": None, ..., "--impl": "fused", "--dtypes": "exact", "--states": "fp32",
        "--layers": "3"}
        """
        command = " ".join(self.command)
        as_typed = [
            word for word in re.split("[ ,]", command) if word.startswith(f"{case.implementation}=")
        ]
        options: dict[str, str | None] = dict.fromkeys(_NOT_AGAIN)
        if isinstance(case.task, DecodedStates):
            options["--decode-states"] = states_of(case.precision)
        elif case.implementation == DECODER and "--decode-states" in command:  # of answers
            options["--decode-states"] = states_of(case.precision)
            options |= {"--impl": self.baseline, "--dtypes": "exact", "--states": "fp32"}
        else:
            options["--impl"] = as_typed[0] if as_typed else case.implementation
            options["--dtypes"] = intermediates_of(case.precision)
            options["--states"] = states_of(case.precision)
        if isinstance(generated := case.inputs_of, Generated):
            options |= {"--shape": generated.shape, "--dtype": generated.dims.dtype}
            if not generated.packed:
                options |= {"--cells": None, "--packed": None}
                length = "--verify" if "--verify" in command else "--seq"
                options[length] = str(case.seqlen)
                options["--batch"] = str(case.batch)
            return options
        if case.layer:
            options["--layers"] = str(case.layer.index)
        # stored captures have their own prompts
        packed = any(prompt.serving.packed for prompt in self.prompts)
        if not packed and (isinstance(case.task, Prefill) or self.placement):
            options["--seq"] = str(case.call.prompt_seqlen if case.call else case.seqlen)
        return options

    # --- completeness

    @cached_property
    def missing(self) -> tuple[Requested, ...]:
        """Requested cases that are neither there nor left out."""
        there = {case.name for case in self.cases}
        left = self.left_out

        def is_left_out(case_key: str, name: str) -> bool:
            return any(
                case_key.startswith(out.case_key) and name in (out.implementations or (name,))
                for out in left
            )

        return tuple(
            parts
            for parts in self.requested
            if ", ".join(parts) not in there and not is_left_out(*parts[:2])
        )

    @property
    def complete(self) -> bool:
        """Whether every process reached its end."""
        return len(self.processes) == self.files and all(line.complete for line in self.processes)

    def restricted(
        self,
        *,
        precisions: Container[PrecisionName] | None = None,
        implementations: Container[str] | None = None,
    ) -> Report:
        """The report as if only these precisions or implementations had been requested, and no
        answers.  Baselines stay.
        """
        baselines = {case.baseline for case in self.cases}

        def is_kept(precision: str, implementation: str) -> bool:
            if precisions is not None and precision not in precisions:
                return False
            if implementations is None or implementation in implementations:
                return True
            return implementation in baselines

        cases = tuple(
            case
            for case in self.cases
            if not isinstance(case.task, Answers) and is_kept(case.precision, case.implementation)
        )
        requested = tuple(
            (case_key, implementation, precision)
            for case_key, implementation, precision in self.requested
            if not case_key.startswith("answers") and is_kept(precision, implementation)
        )
        return self.changed(cases=cases, requested=requested)


def device_time(case: Case) -> float:
    """The device time in microseconds; 0 if it was not timed."""
    return case.device_us.value if case.device_us else 0.0
