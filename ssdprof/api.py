"""The commands as functions, for programs and notebooks; a kernel of one's own is compared on
tensors of one's own.

    report = ssdprof.run("demo", seq=512)
    report = ssdprof.compare(inputs, [my_kernel, "fused"])

Options are those of the commands: `ssdprof.run("demo", gate="speedup:1.2")` is `ssdprof run demo
--gate speedup:1.2`.
"""

import html as text_html
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
from rich.console import Console

from ssdprof import files, operators
from ssdprof.capture.layers import CapturedLayer
from ssdprof.core.base import DType, Laws
from ssdprof.core.case import Case, call_size
from ssdprof.core.conditions import parse_percent
from ssdprof.core.outcome import Outcome
from ssdprof.core.report import Report
from ssdprof.core.target import Dims, LayerRef
from ssdprof.environment.machine import collect
from ssdprof.errors import BadInputError, MissingCapabilityError, nearest
from ssdprof.jobs import answers as answers_job
from ssdprof.jobs import bench as bench_job
from ssdprof.jobs import limits, options, reading, target
from ssdprof.jobs import prefill as prefill_job
from ssdprof.jobs import run as run_job
from ssdprof.jobs.documents import exported, format_of
from ssdprof.jobs.failures import load_call as load_call
from ssdprof.jobs.replay import Planned, Replay, planned
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.registry import Implementation
from ssdprof.operators.implementations import Resolve, own_implementation, required, resolver
from ssdprof.operators.operator import Operator
from ssdprof.operators.tensors import requested_precisions
from ssdprof.progress import LineWatcher, Watcher
from ssdprof.report import brief, exports
from ssdprof.report.document import compose
from ssdprof.report.terminal import render
from ssdprof.store import reports
from ssdprof.store.header import draft

Asked = TypeVar(
    "Asked",
    options.RunOptions,
    options.AnswersOptions,
    options.PrefillOptions,
    options.BenchOptions,
)
Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor]]
# options that a function does not have
_OF_THE_SCREEN = ("json", "full", "dry_run", "prefill", "stalls")
_FRAME = '<iframe srcdoc="{}" style="width: 100%; height: 40em; border: 0"></iframe>'


class Results:
    """A report; a notebook shows it as a page, and `print` as one screen.

    report: all of it, with every case.  folder: where it is stored; None for a comparison of
    tensors.
    """

    def __init__(self, report: Report, folder: Path | None = None) -> None:
        self.report, self.folder = report, folder

    @property
    def passed(self) -> bool:
        """Whether all requested cases were compared and passed, and all gates hold."""
        return Outcome(self.report).passed

    @property
    def cases(self) -> tuple[Case, ...]:
        """One per implementation and precision in each place.

        `case.accuracy` has errors (relative, or in the tensor's own unit), `case.samples` the raw
        times in microseconds of each recording and round, `case.device_us` and `case.call_us` their
        medians with 95 % intervals.
        """
        return self.report.cases

    def to_pandas(self) -> Any:
        """A data frame with a row for each case; the units are in the names of the columns.

        Raises MissingCapabilityError without pandas.
        """
        try:
            import pandas  # type: ignore[import-untyped, unused-ignore]
        except ImportError:
            raise MissingCapabilityError("pandas is not installed.", "pip install pandas") from None
        return pandas.DataFrame(exports.records(self.report))

    def export(
        self, file: str | os.PathLike[str], format: str | None = None, *, force: bool = False
    ) -> Path:
        """Write the report; format: as of `ssdprof export`; None: that of the file's suffix.
        Returns the file.

        Raises BadInputError for an unknown format, and for a file that exists, unless `force`.
        """
        target = Path(file)
        files.check_target(target, replace=force)
        text = exported(format or format_of(target), self.folder, self.report, target)
        files.write_text(target, text.rstrip("\n") + "\n", replace=force)
        return target

    def __repr__(self) -> str:
        shown = (
            brief.render(self.report) if self.report.kind == "run" else render(compose(self.report))
        )
        console = Console(file=io.StringIO(), width=100, color_system=None)
        with console.capture() as text:
            console.print(shown)
        return "\n".join(line.rstrip() for line in text.get().splitlines())

    def _repr_html_(self) -> str:
        """A notebook's own style does not reach into the frame."""
        return _FRAME.format(text_html.escape(exported("html", self.folder, self.report)))


def load(where: str | os.PathLike[str] | None = None) -> Results:
    """A stored report: its folder, its name under runs/, what --json printed, or None for the
    latest one.

    Raises BadInputError if there is none, or if it cannot be read.
    """
    kinds = () if where else ("run", "bench", "prefill", "answers")
    folder, report = reports.load(None if where is None else Path(where), *kinds)
    return Results(report, folder)


# --- the commands


def run(model: str, *, watcher: Watcher | None = None, **settings: object) -> Results:
    """Run a model on a prompt, and compare the fused with the unfused kernels on the inputs of its
    layers.

    Options: those of `ssdprof run`.  watcher: gets the progress.
    Raises SsdprofError where the command ends with an exit code above 1.
    """
    return _called(options.RunOptions, target.run, run_job.run, model, watcher, settings)


def answers(model: str, *, watcher: Watcher | None = None, **settings: object) -> Results:
    """Compare a model's next-token predictions between implementations.  Options: those of `ssdprof
    answers`.
    """
    job = answers_job.answers
    return _called(options.AnswersOptions, target.answers, job, model, watcher, settings)


def prefill(model: str, *, watcher: Watcher | None = None, **settings: object) -> Results:
    """Time a whole model up to its first token, on an NVIDIA GPU.  Options: those of `ssdprof
    prefill`.
    """
    job = prefill_job.prefill
    return _called(options.PrefillOptions, target.prefill, job, model, watcher, settings)


def bench(operator: str, *, watcher: Watcher | None = None, **settings: object) -> Results:
    """Time kernels on random inputs, on an NVIDIA GPU.  Options: those of `ssdprof bench`."""
    job = bench_job.find_and_bench
    return _called(options.BenchOptions, target.bench, job, operator, watcher, settings)


def _called(
    kind: type[Asked],
    read: Callable[[Asked], object],
    job: Callable[..., tuple[Path, Report]],
    first: str,
    watcher: Watcher | None,
    settings: Mapping[str, object],
) -> Results:
    """What a command does.  read: its first function, as in `cli._COMMANDS`."""
    command = options.command_name(kind)
    flags = _flags(kind)
    if unknown := [name for name in settings if name not in flags]:
        raise BadInputError(
            f"{command}() has no option {unknown[0]!r}.", nearest(unknown[0], flags)
        )
    line: list[str] = [str(first)]
    for name, value in settings.items():
        line += _words(flags[name][0], value)
    asked = read(replace(options.parsed(kind, line), command=("ssdprof", command, *line)))
    request = asked if isinstance(asked, tuple) else (asked,)
    folder, report = job(*request, watcher or Watcher())
    return Results(report, folder)


def _flags(kind: type) -> dict[str, tuple[str, Parameter]]:
    return {
        name: (flag, parameter)
        for name, flag, parameter in options.flags(kind)
        if name not in _OF_THE_SCREEN
    }


def _words(flag: str, value: object) -> Iterator[str]:
    """An option as it is typed: a sequence is separated by commas, or repeats an option that may be
    repeated.
    """
    if value is True:
        yield flag
    elif isinstance(value, list | tuple):
        words = [str(part) for part in value]
        for word in words if flag == "--gate" else [",".join(words)]:
            yield flag
            yield word
    elif value is not None and value is not False:
        yield flag
        yield str(value)


def _signed(function: Callable[..., Results], kind: type) -> None:
    """Give the function a signature with every option of the command, for help() and completion."""
    parameters = [
        parameter
        for parameter in Signature.from_callable(function).parameters.values()
        if parameter.kind != Parameter.VAR_KEYWORD
    ]
    for name, (_, parameter) in _flags(kind).items():
        annotation = next(iter(get_args(parameter.annotation)), str)
        parameters.append(parameter.replace(name=name, annotation=annotation))
    signature = Signature(parameters, return_annotation=Results)
    function.__signature__ = signature  # type: ignore[attr-defined]


_signed(run, options.RunOptions)
_signed(answers, options.AnswersOptions)
_signed(prefill, options.PrefillOptions)
_signed(bench, options.BenchOptions)


# --- tensors of one's own


def compare(
    inputs: Inputs,
    implementations: Sequence[str | Kernel],
    *,
    baseline: str = "unfused",
    dtypes: Literal["exact", "relaxed", "all"] = "exact",
    states: str | Sequence[DType] | None = None,
    smallest_difference: str = "1%",
    laws: Laws = "default",
    watcher: Watcher | None = None,
) -> Results:
    """Compare implementations on given tensors with the fp64 oracle and, on a GPU, time those that
    are right.

    inputs: `ssdprof.kernels.SSDInputs` or another operator's inputs, on the GPU or, without one, on
        the CPU: their docstrings have the shapes and dtypes.
    implementations: names as those of --impl, or functions (inputs) -> (out, final_states), whose
        tensors have the shapes and dtypes in docs/your-own-kernel.md.  A function runs in this
        process: a crash ends both.
    baseline: what they are compared with, at exact intermediates and the same states.
    dtypes, states, smallest_difference, laws: as the options of `ssdprof run`.
    watcher: gets the progress; by default it is shown on stderr.

    Raises BadInputError for a name that is unknown, and for tensors on the CPU of a machine with a
    GPU; MissingCapabilityError for an implementation that is unavailable, and for more tokens than
    the interpreter takes.
    """
    operator = operators.get(inputs.operator)
    device = limits.device()
    if inputs.device.type != device.type:
        raise BadInputError(
            f"The tensors are on {inputs.device}, and kernels run on {device}.", "Move the tensors."
        )
    dims = operator.oracle.dims(inputs)
    limits.check_replay((dims.seqlen,), dims.batch)
    resolve = resolver(device)
    compared = [_implementation(operator, resolve, kernel) for kernel in implementations]
    if isinstance(states, str):
        states = reading.parse_states(states)
    first = required(resolve(operator.name, baseline))
    precisions = requested_precisions(dims.dtype, dtypes, states)
    plans = planned(compared, first, precisions, dims.dtype)
    wanted = options.RunOptions(
        model="",
        baseline=first.name,
        smallest_difference=parse_percent("smallest_difference", smallest_difference),
        laws=laws,
    )
    writer = _unstored_writer(wanted, dims, plans)
    replay = Replay(writer, wanted, lambda *_: plans, None, watcher or LineWatcher(levels=2))
    with replay.calls(1) as on_layer:
        on_layer(
            CapturedLayer(
                layer=LayerRef(index=0, name="given tensors", operator=operator.name), inputs=inputs
            )
        )
    writer.update(complete=True)
    return Results(writer.report)


def _unstored_writer(
    asked: options.RunOptions, dims: Dims, plans: Sequence[Planned]
) -> reports.Writer:
    """The writer of a report on a call of these sizes, on given tensors; it stores nothing."""
    case_key = f"layer 0, {call_size(dims.seqlen, dims.batch, None)}"
    header = draft(
        kind="run",
        target="given tensors",
        environment=collect(),
        baseline=asked.baseline,
        matched_with=asked.baseline,
        smallest_difference=asked.smallest_difference,
        laws=asked.laws,
        requested=tuple(
            (case_key, implementation.name, str(precision))
            for implementation, precision, _ in plans
        ),
    )
    return reports.Writer(Path(), header.changed(id="in memory"), None)


def _implementation(operator: Operator, resolve: Resolve, kernel: str | Kernel) -> Implementation:
    if isinstance(kernel, str):
        return required(resolve(operator.name, kernel))
    name = getattr(kernel, "__name__", type(kernel).__name__)
    return own_implementation(operator, name, kernel)
