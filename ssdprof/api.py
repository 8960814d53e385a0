"""The commands as functions, for programs and notebooks, and the comparison of kernels on given
tensors.

    report = ssdprof.run("demo", seq=512)
    report = ssdprof.compare(inputs, [my_kernel, "fused"])

The options are those of the commands: `ssdprof.run("demo", gate="speedup:1.2")` does the same as
`ssdprof run demo --gate speedup:1.2`.
"""

import html as text_html
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from ssdprof.errors import BadInputError, MissingCapabilityError, masked, nearest
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
from ssdprof.store import reports
from ssdprof.store.header import draft

CommandOptions = TypeVar(
    "CommandOptions",
    options.RunOptions,
    options.AnswersOptions,
    options.PrefillOptions,
    options.BenchOptions,
)
# (inputs) -> (out, final_states); dots, because each operator has a class of inputs of its own
Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor]]
# options of commands that the functions do not have
_COMMAND_ONLY = ("json", "full", "dry_run", "prefill", "stalls")
_FRAME = '<iframe srcdoc="{}" style="width: 100%; height: 40em; border: 0"></iframe>'


@dataclass(eq=False)
class Results:
    """A report.  A notebook shows it as a page, and `print` as its command does.

    report: the whole report, with every case.
    path: where it is stored: a folder, or a file that `--json` printed; None for a comparison on
        given tensors.
    """

    report: Report
    path: Path | None = None

    @property
    def passed(self) -> bool:
        """Whether all requested cases were compared and passed, and all gates hold."""
        return Outcome(self.report).passed

    @property
    def cases(self) -> tuple[Case, ...]:
        """The cases: one for each implementation and precision on each call.

        `case.accuracy` has the errors, `case.samples` the time of each round in microseconds, and
        `case.device_us` and `case.call_us` the medians of these times with 95 % intervals.
        """
        return self.report.cases

    def to_pandas(self) -> Any:
        """A data frame with a row for each case.  The names of the columns contain the units.

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
        """Write the report.  Returns the file.

        format: one of the formats of `ssdprof export`; None for that of the file's suffix.
        force: whether to overwrite a file that exists.

        Raises BadInputError for an unknown format, and for a file that exists, unless `force`;
        MissingCapabilityError if the file cannot be written.
        """
        target = Path(file)
        files.check_target(target, replace=force)
        text = exported(format or format_of(target), self.path, self.report, target)
        files.write_text(target, text.rstrip("\n") + "\n", replace=force)
        return target

    def __repr__(self) -> str:
        """The report as the command that makes it prints it, without colours."""
        console = Console(file=io.StringIO(), width=100, color_system=None)
        with console.capture() as text:
            console.print(brief.shown(self.report))
        return "\n".join(line.rstrip() for line in text.get().splitlines())

    def _repr_html_(self) -> str:
        """The report's HTML page, in a frame that the notebook's style does not change."""
        return _FRAME.format(text_html.escape(exported("html", self.path, self.report)))


def load(where: str | os.PathLike[str] | None = None) -> Results:
    """Read a stored report.

    where: the folder of a report, its name under `runs/`, or a file that `--json` printed; None for
        the latest report.

    Raises BadInputError if there is none, or if it cannot be read.
    """
    kinds = reports.KINDS if where is None else ()
    path, report = reports.load(where, *kinds)
    return Results(report, path)


# --- the commands


def run(model: str, *, watcher: Watcher | None = None, **settings: object) -> Results:
    """Run a model on a prompt, and compare the fused with the unfused kernels on the inputs of its
    layers.

    settings: the options of `ssdprof run`.  watcher: receives the progress; None to show nothing.

    Raises SsdprofError where the command ends with the exit code 2, 3 or 4.
    """
    return _called(options.RunOptions, target.run, run_job.run, model, watcher, settings)


def answers(model: str, *, watcher: Watcher | None = None, **settings: object) -> Results:
    """Compare a model's next-token predictions between implementations.

    settings: the options of `ssdprof answers`.  watcher: as in `run`.
    """
    job = answers_job.answers
    return _called(options.AnswersOptions, target.answers, job, model, watcher, settings)


def prefill(model: str, *, watcher: Watcher | None = None, **settings: object) -> Results:
    """Time a whole model up to its first token, on an NVIDIA GPU.

    settings: the options of `ssdprof prefill`.  watcher: as in `run`.
    """
    job = prefill_job.prefill
    return _called(options.PrefillOptions, target.prefill, job, model, watcher, settings)


def bench(operator: str, *, watcher: Watcher | None = None, **settings: object) -> Results:
    """Time kernels on random inputs, on an NVIDIA GPU.

    settings: the options of `ssdprof bench`.  watcher: as in `run`.
    """
    job = bench_job.run_bench
    return _called(options.BenchOptions, target.bench, job, operator, watcher, settings)


def _called(
    kind: type[CommandOptions],
    read: Callable[[CommandOptions], object],
    job: Callable[..., tuple[Path, Report]],
    first: str,
    watcher: Watcher | None,
    settings: Mapping[str, object],
) -> Results:
    """Do what a command does, and return its report.

    kind: the options of the command.
    read: the first function of the command in `cli._COMMANDS`, which returns the arguments of the
        job.
    job: makes the report.  Its last argument is the watcher.
    first: the first argument of the command line, such as the model.
    settings: name of an option -> its value.
    """
    command = options.command_name(kind)
    flags = _flags(kind)
    line: list[str] = [str(first)]
    for name, value in settings.items():
        if name not in flags:
            raise BadInputError(f"{command}() has no option {name!r}.", nearest(name, flags))
        flag, _ = flags[name]
        line += _words(flag, value)
    parsed = options.parsed(kind, line)
    arguments = read(replace(parsed, command=("ssdprof", command, *map(masked, line))))
    if not isinstance(arguments, tuple):
        arguments = (arguments,)
    folder, report = job(*arguments, watcher or Watcher())
    return Results(report, folder)


def _flags(kind: type) -> dict[str, tuple[str, Parameter]]:
    """Name of an option -> its flag on the command line, and its parameter."""
    return {
        name: (flag, parameter)
        for name, flag, parameter in options.flags(kind)
        if name not in _COMMAND_ONLY
    }


def _words(flag: str, value: object) -> Iterator[str]:
    """The words of an option on the command line.

    value: True for an option without a value; None and False leave the option out.  The items of a
        list or tuple are separated by commas, except for `--gate`, which is repeated.
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
    """Give a function a signature with every option of its command, for help() and completion."""
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


# --- given tensors


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
    pass.

    inputs: `ssdprof.kernels.SSDInputs`, or the inputs of another operator; the docstrings of these
        classes have the shapes and dtypes.  The tensors are on the GPU if there is one, otherwise
        on the CPU.
    implementations: at least one name as in `--impl`, or function (inputs) -> (out, final_states);
        docs/your-own-kernel.md has the shapes and dtypes.  A function runs in this process: if it
        crashes, this process ends.
    baseline: the implementation to compare with, at exact intermediates and the same states.
    dtypes, states, smallest_difference, laws: as the options of `ssdprof run`.
    watcher: receives the progress; by default it is shown on stderr.

    Raises BadInputError for an argument of another type, an unknown name or option, a function with
    another one's name, and tensors that are not where kernels run; MissingCapabilityError for an
    unavailable implementation, without a compiler, and for more tokens than the interpreter takes.
    """
    _check_types(inputs, implementations)
    operator = operators.get(inputs.operator)
    device = limits.device()
    if inputs.device.type != device.type:
        raise BadInputError(
            f"The tensors are on {inputs.device}, and kernels run on {device}.", "Move the tensors."
        )
    dims = operator.oracle.dims(inputs)
    limits.check_replay((dims.seqlen,), dims.batch)
    # refuses what `ssdprof run` refuses; there is no model
    given = options.parsed(options.RunOptions, ["", "--dtypes", str(dtypes), "--laws", str(laws)])
    if states is not None:
        words = map(str, states) if isinstance(states, list | tuple) else [str(states)]
        states = reading.parse_states(",".join(words))
    resolve = resolver(device)
    baseline_implementation = required(resolve(operator.name, str(baseline)))
    compared = [_implementation(operator, resolve, kernel) for kernel in implementations]
    _refuse_same_names([baseline_implementation, *compared])
    precisions = requested_precisions(dims.dtype, dtypes, states)
    plans = planned(compared, baseline_implementation, precisions, dims.dtype)
    run_options = replace(
        given,
        baseline=baseline_implementation.name,
        smallest_difference=parse_percent("smallest_difference", smallest_difference),
    )
    writer = _unstored_writer(run_options, dims, plans)
    replay = Replay(writer, run_options, lambda *_: plans, None, watcher or LineWatcher(levels=2))
    layer = LayerRef(index=0, name="given tensors", operator=operator.name)
    with replay.calls(1) as on_layer:
        on_layer(CapturedLayer(layer=layer, inputs=inputs))
    writer.update(complete=True)
    return Results(writer.report)


def _check_types(inputs: object, implementations: object) -> None:
    """Raise BadInputError, which names the argument of `compare`, for inputs that are those of no
    operator, or have raw gates, which only `kda_fused` takes, and for implementations that are no
    list or tuple, or an empty one.
    """
    if not isinstance(inputs, Inputs) or type(inputs) is not operators.get(inputs.operator).inputs:
        raise BadInputError(
            f"inputs is {type(inputs).__name__!r}, not the inputs of an operator.",
            "Give an object of ssdprof.kernels.SSDInputs, GDNInputs or KDAInputs.",
        )
    if not isinstance(implementations, list | tuple) or not implementations:
        raise BadInputError(
            "implementations must be a list with at least one name or function.",
            'Give such a list: ["fused"], or [my_kernel].',
        )


def _unstored_writer(
    run_options: options.RunOptions, dims: Dims, plans: Sequence[Planned]
) -> reports.Writer:
    """The writer of a report on given tensors, which stores nothing.

    dims: of the tensors.  plans: the implementations and precisions to compare.
    """
    case_key = f"layer 0, {call_size(dims.seqlen, dims.batch, None)}"
    header = draft(
        kind="run",
        target="given tensors",
        environment=collect(),
        baseline=run_options.baseline,
        matched_with=run_options.baseline,
        smallest_difference=run_options.smallest_difference,
        laws=run_options.laws,
        requested=tuple(
            (case_key, implementation.name, str(precision))
            for implementation, precision, _ in plans
        ),
    )
    return reports.Writer(Path(), header.changed(id="in memory"), None)


def _implementation(operator: Operator, resolve: Resolve, kernel: str | Kernel) -> Implementation:
    """The implementation of a name, or of a user's function.

    Raises BadInputError if `kernel` is neither, and what `Resolve`, `required` and
    `own_implementation` raise.
    """
    if isinstance(kernel, str):
        return required(resolve(operator.name, kernel))
    if not callable(kernel):
        raise BadInputError(
            f"implementations has {type(kernel).__name__!r}, neither a name nor a function.",
            "Give a name as in --impl, or a function of the inputs.",
        )
    name = getattr(kernel, "__name__", type(kernel).__name__)
    return own_implementation(operator, name, kernel)


def _refuse_same_names(implementations: Iterable[Implementation]) -> None:
    """BadInputError for two implementations of one name, because only one of the two would be
    compared.  A name that is given twice is one implementation; a function that is given twice is
    two.
    """
    by_name: dict[str, Implementation] = {}
    for implementation in implementations:
        name = implementation.name
        if by_name.setdefault(name, implementation) != implementation:
            raise BadInputError(
                f"Two implementations are named {name}.", "Give your function another __name__."
            )
