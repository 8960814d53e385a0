"""A report: its cases, and everything that belongs to all of them."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
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

# options with a value that a command for a single case does not repeat
_LEFT_OUT = ("--out", "--decode-states", "--implementations", "--against", "--budget", "--trace")


class LeftOut(Record):
    """Requested cases that were not begun.

    case_key: the key of the cases, or its words up to a comma, which they have in common; of a
        tuning, the search in words.
    implementations: those that were left out; empty if all were.
    """

    case_key: Text
    implementations: tuple[Text, ...] = ()
    reason: Text


class ProcessLine(Record):
    """The results of a process that belong to no case.

    A process writes such a line whenever one of them changes; its last line counts.

    process: the name of the process in its samples.
    captured: the layers whose inputs were captured.
    gates: index of a layer -> in its first call, numbers of heads: of those that forget within
        `MEMORIES[0]`; within each further one of `MEMORIES`, but not within the one before; and
        within none of them.  Every head counts once.
    doubts: a sentence on inputs that no model has -> the indices of the layers with such inputs.
    peak_bytes: the GPU memory allocated while the model ran and layers were replayed.
    seconds: wall-clock time.
    steps: step of the command -> its wall-clock time in seconds, compilation included.
    notes: sentences for the reader.
    complete: whether the process reached its end.
    ended: why the process stopped early, in a sentence; empty while it runs and after its end.
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


# The case key, implementation and precision of a case.  Joined by ", " they are the case's name.
Requested = tuple[Text, Text, Text]


class Report(Record):
    """The result of `ssdprof run`, `bench`, `prefill`, `answers` or `tune`.

    id: the name of the report's folder, or the kind and the time of a report without one.
    created: ISO 8601, UTC.
    command: as typed, without access tokens.
    commit: of the repository in the working directory, followed by "-dirty" if files differ; empty
        without a repository.
    target: the repository of the model, or the operator of a bench.
    model: None for a bench.
    requested: the cases, known before the first one runs.
    baseline: the implementation that the others are compared with.  Decode steps have a baseline of
        their own, which their cases name.
    matched_with: the implementation whose output the others' outputs are matched with.
    smallest_difference: the smallest relative difference of two times that counts.
    segment_length: tokens per forward call of the model.
    cast: the dtype of the inputs in the model, and the dtype in which they were replayed; None if
        they are equal.
    laws: which laws were tested.
    tensor_parallel: the number of ranks in a server.  The heads of the first one were replayed.
    ranks: the number of processes that shared the cases, each on its own GPU.
    samplers: the number of processes that sampled every case, one after another.
    capture_complete: False if the replayed capture was interrupted.
    placement: of the model's weights; None for stored captures.
    kernels: the hash of the machine code of the bundled kernels; only in a bench.
    absent: a sentence for each requested implementation that is unavailable.
    notes: sentences for the reader.
    processes: a line for each rank, then a line for each further sampler.
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
    capture_complete: bool = True
    placement: Placement | None = None
    kernels: Text = ""
    absent: tuple[Text, ...] = ()
    notes: tuple[Text, ...] = ()
    cases: tuple[Case, ...] = ()
    processes: tuple[ProcessLine, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Report:
        """Check that no name occurs twice, that there are not too many processes, that errors along
        the positions of equally long calls have equally many slices, and that each call that ran
        has errors.
        """
        check_unique("a case", [case.name for case in self.cases])
        check_unique("a requested case", self.requested)
        check_unique("a process", [line.process for line in self.processes])
        if len(self.processes) > self.process_count:
            raise ValueError(f"it has {len(self.processes)} processes of {self.process_count}")
        slices: dict[int, int] = {}  # tokens of a call -> slices of its errors
        for case in self.cases:
            of_out = case.tensor("out")
            seqlen = case.dims.seqlen if case.dims else 0
            if of_out is None:
                if case.status == "ran" and case.is_call:
                    raise ValueError(f"{case.name} ran, and nothing says what it computed")
                continue
            for error in (of_out.vs_oracle, of_out.floor):
                if not error.along:
                    continue
                count = len(error.along)
                if count != slices.setdefault(seqlen, count):
                    raise ValueError(
                        f"{case.name} has errors in {count} slices of its positions, where other "
                        f"calls of {seqlen:,} tokens have {slices[seqlen]}"
                    )
        return self

    # --- of all processes

    @property
    def process_count(self) -> int:
        """The number of processes, each of which writes a file."""
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
    def is_recorded(self) -> bool:
        """Whether a server recorded the calls, so that its model is not known."""
        return any(prompt.kind == "recorded" for prompt in self.prompts)

    @property
    def captured(self) -> tuple[LayerRef, ...]:
        """The layers that any process captured, in the order of their indices."""
        layers = distinct(line.captured for line in self.processes)
        return tuple(sorted(layers, key=lambda layer: layer.index))

    @property
    def peak_bytes(self) -> int | None:
        peaks = [line.peak_bytes for line in self.processes if line.peak_bytes is not None]
        return max(peaks, default=None)

    @property
    def seconds(self) -> float:
        """The wall-clock time of the slowest rank.  The first rank waits for the others and for the
        further samplers.
        """
        return max((line.seconds for line in self.processes), default=0.0)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        return tuple(distinct(line.left_out for line in self.processes))

    @property
    def cast_words(self) -> str:
        """The cast of the inputs: "cast from bf16 to fp16"; empty if there was none."""
        return "cast from {} to {}".format(*self.cast) if self.cast else ""

    @property
    def doubts(self) -> dict[str, int]:
        """A sentence on inputs that no model has -> the number of layers with such inputs."""
        layers: dict[str, set[int]] = {}
        for line in self.processes:
            for text, indices in line.doubts.items():
                layers.setdefault(text, set()).update(indices)
        return {text: len(indices) for text, indices in layers.items()}

    @property
    def state_breaks(self) -> dict[str, list[Case]]:
        """Sentence of `LayerCall.state_break` -> the cases of the calls that it is about."""
        return grouped(filter(_state_break, self.cases), _state_break)

    @property
    def remarks(self) -> tuple[str, ...]:
        """The report's notes and those of its processes."""
        return tuple(distinct([self.notes, *(line.notes for line in self.processes)]))

    # --- cases

    @property
    def of_calls(self) -> tuple[Case, ...]:
        """The cases of captured calls or of generated inputs."""
        return tuple(case for case in self.cases if case.is_call)

    @property
    def of_states(self) -> tuple[Case, ...]:
        """The cases of states of decoded tokens."""
        return tuple(case for case in self.cases if isinstance(case.task, DecodedStates))

    @property
    def of_answers(self) -> tuple[Case, ...]:
        return tuple(case for case in self.cases if isinstance(case.task, Answers))

    @cached_property
    def _by_key(self) -> dict[tuple[str, str], list[Case]]:
        return grouped(self.cases, lambda case: (case.case_key, case.implementation))

    def baseline_of(self, case: Case, implementation: str = "") -> Case | None:
        """The case that a case is compared with; None if there is none.

        It is of the case's baseline and has the same key.  For generated inputs it is the fastest
        such case that was timed; cases of libraries and of the baseline itself have none there.
        Otherwise it is
        the one with exact intermediates and equal states, or else the first one, unless that is the
        case itself.

        implementation: another implementation, in place of the baseline.
        """
        name = implementation or case.baseline
        candidates = self._by_key.get((case.case_key, name), []) if name else []
        if isinstance(case.task, Generated):
            if case.kind == "library" or name == case.implementation:
                return None
            return min(filter(device_time, candidates), key=device_time, default=None)
        exact = exact_precision(case.precision)
        nearest = min(candidates, key=lambda other: other.precision != exact, default=None)
        return None if nearest is case else nearest

    def speedup(self, case: Case, clock: Clock | None = None, over: str = "") -> Estimate | None:
        """The speedup of a case over its baseline; None if there is none or a time is missing.

        clock: None for the clock that verdicts use.
        over: another implementation, in place of the baseline.
        """
        return case.over(self.baseline_of(case, over), clock or case.clock)

    def faster(self, case: Case, clock: Clock | None = None) -> Faster | None:
        """The verdict on the speedup of a case over its baseline; None without a speedup."""
        speedup = self.speedup(case, clock)
        return speedup.verdict(self.smallest_difference) if speedup else None

    def predicted(self, case: Case) -> float | None:
        """The speedup of a prefill over its baseline that Amdahl's law predicts.

        It follows from the device times of the operator in one layer alone.  If these calls take
        the share f of the baseline's prefill, and the operator has the speedup s, then the
        prediction is 1 / (1 - f + f / s).  None if a time is missing, or if the prediction is not
        positive.
        """
        base = self.baseline_of(case)
        if not (base and base.call_us and isinstance(case.task, Prefill)):
            return None
        assert isinstance(base.task, Prefill)
        base_operator_us = base.task.alone_us
        operator_us = case.task.alone_us
        if base_operator_us is None or operator_us is None:
            return None
        base_us = base.call_us.value
        predicted_us = base_us - case.task.operator_calls * (base_operator_us - operator_us)
        return base_us / predicted_us if predicted_us > 0 else None

    def again(self, case: Case) -> tuple[str, ...]:
        """The words of a command that runs this case and its baseline, and nothing else.

        Empty if no command made the report.
        """
        if len(self.command) < 3:  # the program, the command and what it is to measure
            return ()
        options = self._options_of(case)
        command = []
        words = iter(self.command)
        for word in words:
            if word.partition("=")[0] not in options:
                command.append(word)
            elif "=" not in word:
                next(words, None)  # skip the option's value
        for option, value in options.items():
            if value is not None:
                command += [option, value]
        return tuple(command)

    def _options_of(self, case: Case) -> dict[str, str | None]:
        """The options in which a command for this case alone differs from the report's command.

        A value of None removes the option: {"--out": None, ..., "--impl": "fused", "--dtypes":
        "exact", "--states": "fp32", "--layers": "3"}.
        """
        command = " ".join(self.command)
        # the user's own kernels are typed as NAME=MODULE:FUNCTION
        own_kernel = f"{case.implementation}="
        as_typed = re.search(rf"(?<![^ ,=]){re.escape(own_kernel)}[^ ,]+", command)
        options: dict[str, str | None] = dict.fromkeys(_LEFT_OUT)
        if isinstance(case.task, DecodedStates):
            options["--decode-states"] = states_of(case.precision)
        elif case.implementation == DECODER and "--decode-states" in command:
            # Answers with states in a format.  An option asks for them, and is added to a command
            # that runs the baseline alone.
            options["--decode-states"] = states_of(case.precision)
            options |= {"--impl": self.baseline, "--dtypes": "exact", "--states": "fp32"}
        else:
            # what a server computed cannot be named: it is compared in every run
            name = self.baseline if case.kind == "served" else case.implementation
            options["--impl"] = as_typed[0] if as_typed else name
            options["--dtypes"] = intermediates_of(case.precision)
            options["--states"] = states_of(case.precision)
        generated = case.inputs_of
        if isinstance(generated, Generated):
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
        """The requested cases that are neither in the report nor left out."""
        present = {case.name for case in self.cases}
        left_out = self.left_out

        def is_left_out(case_key: str, implementation: str) -> bool:
            return any(
                f"{case_key}, ".startswith(f"{cases.case_key}, ")
                and (not cases.implementations or implementation in cases.implementations)
                for cases in left_out
            )

        return tuple(
            (case_key, implementation, precision)
            for case_key, implementation, precision in self.requested
            if f"{case_key}, {implementation}, {precision}" not in present
            and not is_left_out(case_key, implementation)
        )

    @property
    def complete(self) -> bool:
        """Whether every process reached its end."""
        return len(self.processes) == self.process_count and all(
            line.complete for line in self.processes
        )

    def restricted(
        self,
        *,
        precisions: Sequence[PrecisionName] | None = None,
        implementations: Container[str] | None = None,
    ) -> Report:
        """The report as if only some precisions or implementations had been requested.

        Cases of baselines stay, at the precisions that others are compared with.  Answers are
        removed.

        precisions, implementations: None for all.
        """
        baselines = {case.baseline for case in self.cases}
        of_baselines = None
        if precisions is not None:
            of_baselines = {*precisions, *map(exact_precision, precisions)}

        def is_kept(precision: str, implementation: str) -> bool:
            if implementation in baselines:
                return of_baselines is None or precision in of_baselines
            if precisions is not None and precision not in precisions:
                return False
            return implementations is None or implementation in implementations

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


def _state_break(case: Case) -> str:
    return case.state_break


def device_time(case: Case) -> float:
    """The device time in microseconds; 0 if it was not timed."""
    return case.device_us.value if case.device_us else 0.0
