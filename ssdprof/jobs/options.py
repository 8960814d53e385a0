"""The options of every command: one class for each, whose docstring is the command's help.  The
jobs get objects of these classes as their requests.

A field is declared by `option`, `words`, `flag` or `argument`; or its type is annotated with
`info`; or, if it has no default, its metadata have its declaration.  A field that is declared by
`derived` is no option of the command.  The command line gives a field that is declared by `words`
as text, which `target.read` parses; its default has been parsed.

This module imports nothing that takes long, because --help and the shell's completion import it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from importlib import metadata
from inspect import Parameter, Signature
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    dataclass_transform,
    get_type_hints,
)

import typer

from ssdprof.errors import BadInputError, explain_option, unreadable
from ssdprof.files import regular

if TYPE_CHECKING:
    from ssdprof.core.base import DType
    from ssdprof.core.conditions import Condition
    from ssdprof.kernels.registry import Implementation
    from ssdprof.kernels.state_formats import StateFormat
    from ssdprof.operators.generate import Cell, Tokens

Kind = TypeVar("Kind")
# Options that are no whole numbers, in seconds or other units, must be below this, so that infinity
# and NaN are refused.
_LARGEST = 1_000_000_000
COMPARED = ("unfused", "fused")  # implementations compared by default; the first is the baseline
# Names, in annotations, of types whose import takes long.  Only fields that are declared by `words`
# or `derived` have them, whose types Typer does not need.
_LATER = dict.fromkeys(
    ("Cell", "Condition", "DType", "Implementation", "StateFormat", "Tokens"), Any
)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def options(kind: type[Kind]) -> type[Kind]:
    """A class decorator: the class becomes a frozen dataclass with keyword-only fields."""
    return dataclass(frozen=True, kw_only=True)(kind)


def path(text: str) -> Path:
    """An option parser for a path.  Refuses an empty string, such as an unset shell variable, which
    Path would take for ".".
    """
    if not text.strip():
        raise typer.BadParameter("the path is empty")
    return Path(text)


def existing_file(text: str) -> Path:
    """An option parser for a file that can be read.

    Raises typer.BadParameter for an empty string, and what `unreadable` returns for a file that
    cannot be read.
    """
    file = path(text)
    try:
        with regular(file, math.inf).open("rb"):
            return file
    except OSError as error:
        raise unreadable(f"The file {text}", error, "Give the path of a text file.") from None


# fields whose text may name functions of the user
_NAMING_KERNELS = ("implementations", "impl", "against", "baseline", "match_with", "decode_states")


def own_kernels(given: dict[str, Any]) -> tuple[str, ...]:
    """The names of implementations and state formats that are, or may be, the user's functions.
    Formats with a scale, such as `int8:head`, look like one.

    given: name of a field -> its value as Typer parsed it; of a field of `_NAMING_KERNELS`, text or
        None.  Fields may be missing.
    """
    names: dict[str, None] = {}
    for field_name in _NAMING_KERNELS:
        text = given.get(field_name) or ""
        names |= dict.fromkeys(name.strip() for name in text.split(","))
    registered = metadata.entry_points(group="ssdprof.implementations").names
    return tuple(name for name in names if ":" in name or name in registered)


def _finite(value: Any) -> Any:
    """The value of an option.  Raises typer.BadParameter for a float that is NaN, or whose absolute
    value is `_LARGEST` or more.
    """
    if isinstance(value, float) and not abs(value) < _LARGEST:
        raise typer.BadParameter(f"{value:g} is not below {_LARGEST:,}; give a smaller number")
    return value


def info(metavar: str, help: str, *names: str, shown: bool | str = True, **more: Any) -> Any:
    """An annotation of a type, which declares an option.

    metavar: the placeholder for the value in the help; empty: Typer's.  names: flags; by default
    one with the field's name.  shown: the default as the help shows it; True: the value itself;
    False: the help shows none.  more: other arguments of `typer.Option`.
    """
    return typer.Option(
        *names, metavar=metavar or None, help=help, show_default=shown, callback=_finite, **more
    )


def option(default: Any, metavar: str, help: str, *names: str, **more: Any) -> Any:
    """A field that is an option with a default.  The other arguments: see `info`."""
    return field(default=default, metadata={"typer": info(metavar, help, *names, **more)})


def words(
    metavar: str, help: str, *names: str, default: Any = None, typed: str | None = None, **more: Any
) -> Any:
    """A field that is an option, whose text `target.read` parses.

    default: the parsed default.  typed: the text of the default; None: the option has none.
    """
    declared = info(metavar, help, *names, **more)
    return field(default=default, metadata={"typer": declared, "typed": typed})


def derived(default: Any) -> Any:
    """A field that is no option of the command: its job, or the command line, sets it."""
    return field(default=default, metadata={"derived": True})


def flag(name: str, help: str) -> Any:
    """A field that is True if the flag `name` is given."""
    return option(False, "", help, name)


def argument(
    default: Any, metavar: str, help: str, *, shown: bool | str = False, **more: Any
) -> Any:
    """A field that the command line takes as an argument.

    default: `...` if it is required.  shown: see `info`.
    """
    declared = typer.Argument(metavar=metavar, help=help, show_default=shown, **more)
    return field(default=MISSING if default is ... else default, metadata={"typer": declared})


def parameters(kind: type) -> Iterator[Parameter]:
    """The options of a class as parameters of a function, those of its base classes first.

    Types and defaults are those of the command line: text for a field that is declared by `words`.
    """
    types = get_type_hints(kind, localns=_LATER, include_extras=True)
    for declaration in fields(kind):
        if "derived" in declaration.metadata:
            continue
        type_ = types[declaration.name]
        default = Parameter.empty if declaration.default is MISSING else declaration.default
        if "typed" in declaration.metadata:  # Typer passes the text on
            default = declaration.metadata["typed"]
            type_ = (str | None) if default is None else str
        declared = declaration.metadata.get("typer")
        annotation = Annotated[type_, declared] if declared else type_
        yield Parameter(
            declaration.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )


def as_command(kind: type, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, after its signature and annotations were set to those of a class of
    options.

    Typer reads both to build the command.
    """
    declared = list(parameters(kind))
    function.__signature__ = Signature(declared)  # type: ignore[attr-defined]
    function.__annotations__ = {option.name: option.annotation for option in declared}
    return function


def flags(kind: type) -> Iterator[tuple[str, str, Parameter]]:
    """The long flags of a class, of which an option may have several.

    Each is a Python name ("chunked_prefill"), the flag as it is typed ("--chunked-prefill"), and
    the parameter of its option.
    """
    declared = {parameter.name: parameter for parameter in parameters(kind)}
    for option in _single_command(kind, lambda **_: None).params:
        for word in option.opts:
            if word.startswith("--") and option.name in declared:
                name = word.removeprefix("--").replace("-", "_")
                yield name, word, declared[option.name]


def command_name(kind: type) -> str:
    """The name of the command that has these options: "run" for `RunOptions`."""
    return kind.__name__.removesuffix("Options").lower()


def parsed(kind: type[Kind], line: list[str]) -> Kind:
    """The options of a class from the words of a command line after the command's name, without
    --help.  Text of fields that are declared by `words` is not parsed.

    Raises BadInputError for words that the command line would refuse, and for a file that cannot be
    read what `existing_file` raises.
    """
    try:
        # a function, because Typer reads the signature that `as_command` gives it
        command = _single_command(kind, lambda **values: kind(**values))
        values_of_line: Kind = command.main(line, standalone_mode=False)
    except typer.BadParameter.__base__ as error:  # type: ignore[misc]  # click's UsageError
        explain_option(error)
        raise BadInputError(error.format_message()) from None
    return values_of_line


def _single_command(kind: type, function: Callable[..., Any]) -> Any:
    """A click command that calls `function` with the options of a class."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(as_command(kind, function))
    return typer.main.get_command(app)


# --- shared by several commands

_STATES = "Dtypes of inter-chunk states: fp32, fp16, bf16, all."
_DIFFERENCE = "as faster or slower only if its 95 % interval lies beyond this difference."
_MODEL = "Hub id, local folder, family name, demo, demo-gdn or demo-kda."
_LENGTHS = "Sequence lengths: 1k,16k.  1k,...,256k doubles at each step."
_BATCHES = "Batch sizes, each combined with every length."
_DTYPES = "Dtypes of the inputs: bf16, fp16, fp32."
_KERNELS = (
    "unfused, fused, another library (mamba_ssm, published=DIR; fla, flash_qla, flashinfer), "
    "or your own kernel"
)

Baseline = Annotated[str, info("NAME", "The implementation that the others are compared with.")]
SomeIntermediates = Annotated[
    Literal["exact", "relaxed", "all"],
    info(
        "",
        "Intermediates in the dtypes of the original kernels (exact), in 16 bit (relaxed), or "
        "both.",
        "--dtypes",
    ),
]
OneIntermediates = Annotated[
    Literal["exact", "relaxed"], info("", "Precision of intermediates.", "--dtypes")
]
OneState = Annotated[
    Literal["fp32", "fp16", "bf16"], info("", "Dtype of inter-chunk states.", "--states")
]
_GATES = (
    "Fail unless it holds: speedup@fla:1.3, time@call:500, match@1e-2:99%, rms:2, memory:1e9, "
    "launches:2, kl:0.001, top1:99%.  Repeatable."
)
GateOption = Annotated[list[str] | None, info("METRIC[@WHERE]:LIMIT", _GATES, "--gate")]
_SETTINGS = "the nearest ssdprof.toml, or pyproject.toml with [tool.ssdprof]"
NoTuned = Annotated[
    bool,
    info(
        "",
        "Use the built-in configurations, not those that 'ssdprof tune' has stored.",
        "--no-tuned",
    ),
]
_DRY_RUN = (
    "Show the download, the memory needed, and what would keep the model from running; then stop."
)
DryRunOption = Annotated[bool, info("", _DRY_RUN, "--dry-run")]
RunFolder = Annotated[
    Path | None, info("DIR", "Folder of the run.", shown="runs/<time>-<model>", parser=path)
]
OutputOption = Annotated[
    Path | None, info("FILE", "The file to write.", "--output", "-o", shown="stdout", parser=path)
]
Config = Annotated[
    Path | None, info("FILE", "Settings file, in TOML.", shown=_SETTINGS, parser=existing_file)
]
Force = Annotated[bool, info("", "Overwrite FILE.", "--force")]
_SHAPES = "Models' shapes; all; or sizes: 80x64x128x1 for SSD, 16/32x128x128 for GDN and KDA."
ShapeOption = Annotated[
    str | None, info("S[,S...]", _SHAPES, shown="mamba2-2.7b, qwen3-next-80b or kimi-linear-48b")
]
Json = Annotated[bool, info("", "Print JSON on stdout.", "--json")]
FormatJson = Annotated[bool, info("", "The same as --format json.", "--json")]
_PLACEMENTS = (
    "Where the weights are: on one GPU, on all visible GPUs, or partly in main memory or "
    "on the disk."
)
PlacementOption = Annotated[
    Literal["one-gpu", "all-gpus", "cpu-offload", "disk-offload"] | None,
    info("", _PLACEMENTS, shown="the fastest that fits"),
]


def _implementations() -> Any:
    how = f"Implementations: {_KERNELS}: MODULE:FUNCTION."
    return words(
        "I[,I...]", how, "--impl", "--implementations", default=COMPARED, typed="unfused,fused"
    )


def _states() -> Any:
    return words("D[,D...]", _STATES, shown="fp32 with exact, the inputs' or 16 bit with relaxed")


def _decode_states() -> Any:
    how = (
        "Instead, decode token by token with states in fp32, bf16, fp16, bf16-stochastic, "
        "fp16-stochastic, fp8, int8, int8-carried, or MODULE:FUNCTION of yours, and tell how long "
        "each keeps its digits."
    )
    return words("F[,F...]", how, "--decode-states", shown=False)


def _decode_step() -> Any:
    how = "Round states after every N tokens, as verification of drafted ones does."
    return option(1, "N", how, "--decode-step", min=1, max=32)


def _processes(default: int | None = 1, shown: bool | str = True) -> Any:
    how = (
        "Take samples in N fresh processes, one after another, on a GPU; call times of several "
        "have intervals."
    )
    return option(default, "N", how, min=1, max=9, shown=shown)


@options
class ModelOptions:
    """The model, its layers, and the prompt.

    Fields that are derived here, except `command`, are options of some of the subclasses.
    """

    model: str = argument(..., "MODEL", _MODEL)
    seqlens: tuple[int, ...] | None = words(
        "N[,N...]",
        "Tokens of the prompt: 16384, 128k, or several: 1k,16k.",
        "--seq",
        shown="16k on a GPU, 512 without",
    )
    layers: str = option("all", "WHICH", "all, first:N, every:K, or layer numbers: 3,7, 0-3.")
    prompt: Literal["default", "random"] = option(
        "default", "", "The built-in text, or random tokens, which are unlike a real prompt."
    )
    prompt_file: Path | None = option(
        None, "FILE", "Take the prompt from a UTF-8 text file.", parser=existing_file
    )
    revision: str | None = option(
        None, "REV", "Branch, tag or commit on the hub.", shown="the main branch"
    )
    tokenizer: str | None = option(
        None, "MODEL", "Take the tokenizer from another model.", shown="the model's own"
    )
    segment_length: int | None = words(
        "N",
        "Tokens per forward call of the model: 8192, or 8k.",
        "--segment",
        shown="the longest that fits",
    )
    yes: bool = flag("--yes", "Download more than 10 GB without asking.")
    placement: PlacementOption = derived(None)
    batch: int = derived(1)
    packed: Tokens | None = derived(None)
    chunk: int | None = derived(None)
    decode: int = derived(0)
    command: tuple[str, ...] = derived(())  # as typed


@options
class ServedModelOptions(ModelOptions):
    """The model, where its weights are, and how a server would run the prompt."""

    placement: PlacementOption = None
    batch: int = option(1, "N", "Run N different prompts side by side.", min=1, max=65536)
    packed: Tokens | None = words(
        "NxA-B", "Run N sequences of A to B tokens, packed into one call: 64x1k-4k."
    )
    chunk: int | None = words(
        "N",
        "Replay the prompt in chunks of N tokens, each with the states that the previous one "
        "left: 8k.",
        "--chunked-prefill",
    )
    decode: int = option(
        0,
        "N",
        "Let the model generate N tokens after the prompt, and replay each step.",
        min=0,
        max=4096,
    )


@options
class TimingOptions:
    """The implementations, how they are timed, and the conditions that must hold."""

    implementations: tuple[str, ...] = _implementations()
    smallest_difference: float = words(
        "P%", f"Report a kernel {_DIFFERENCE}", default=0.01, typed="1%"
    )
    first_call_s: float = option(
        180,
        "SECONDS",
        "Longest first call of your own kernel, and in a bench of any kernel, with compilation.",
        "--first-call",
        min=1,
    )
    gate: GateOption = None
    config: Config = None
    no_tuned: NoTuned = False
    json: Json = False
    command: tuple[str, ...] = derived(())  # as typed
    conditions: tuple[Condition, ...] = derived(())


# --- the commands


@options
class RunOptions(TimingOptions, ServedModelOptions):
    """Run a model on a prompt, and compare the fused with the unfused kernels on the inputs of its
    layers.

    Exit code 0 says that all requested cases were compared and passed.  Exit code 1 says that a
    case could not run, was inaccurate, not finite or refused, that a gate does not hold, that
    nothing was compared, or that the stored capture was interrupted.
    """

    model: str = argument(..., "MODEL", f"{_MODEL} Or a folder of stored captures.")
    tensor_parallel: int = option(
        1, "N", "Replay the share of one GPU when N GPUs divide each layer's heads.", min=1
    )
    verify: int = option(
        0,
        "T",
        "Replay the last T tokens of each prompt as drafted ones, with the state after each.",
        min=0,
        max=32,
    )
    decode_states: tuple[StateFormat, ...] | None = _decode_states()
    decode_step: int = _decode_step()
    intermediates: SomeIntermediates = "all"
    states: tuple[DType, ...] | None = _states()
    dtype: Literal["fp16", "bf16", "fp32"] | None = option(
        None, "", "Replay the captured inputs in this dtype.", shown="the model's"
    )
    baseline: Baseline = "unfused"
    laws: Literal["quick", "default", "all"] = option(
        "default", "", "Laws that are tested: quick: causality and cut in two; all: in every case."
    )
    out: RunFolder = None
    save_captures: bool = flag(
        "--save-captures", "Also store the inputs of the layers, which can take gigabytes."
    )
    answers: bool = flag("--answers", "Also compare the model's answers: see 'ssdprof answers'.")
    trace: Path | None = option(
        None, "FILE", "Write a trace of the first layer's cases, for Perfetto.", parser=path
    )
    stalls: bool = flag("--stalls", "Also profile one layer with ncu: see 'ssdprof stalls'.")
    prefill: bool = flag("--prefill", "Also time the whole model's prefill: see 'ssdprof prefill'.")
    processes: int = _processes()
    dry_run: DryRunOption = False
    full: bool = flag("--full", "Print every table instead of one screen.")
    # number of this process if it only adds samples to the report in `out`; else 0
    sampler: int = derived(0)


@options
class CaptureOptions(ServedModelOptions):
    """Store the inputs of a model's SSD, GDN or KDA layers, or what a server recorded of them, for
    'ssdprof run DIR'.

    One layer of a large model takes gigabytes at 128k tokens.
    """

    recorded: Literal["flashinfer", "flashinfer-bench", "safetensors"] | None = option(
        None,
        "",
        "MODEL is a folder that a server or flashinfer-bench wrote: see docs/from-a-server.md.",
        "--from",
        shown="a model",
    )
    out: Path | None = option(
        None,
        "DIR",
        "Folder of the captures.",
        shown="in the assets cache of huggingface_hub",
        parser=path,
    )
    force: bool = flag("--force", "Replace a complete capture in DIR.")
    dry_run: DryRunOption = False
    json: Json = False


@options
class RecordOptions:
    """Run a program, such as a server, and store the calls of SSD, GDN and KDA operators in it, for
    'ssdprof run DIR'.

    The program runs as without ssdprof; the exit code is its own.
    """

    program: list[str] = field(
        metadata={"typer": typer.Argument(metavar="COMMAND...", help="After --: vllm serve MODEL.")}
    )
    operators: str = option("ssd,gdn,kda", "O[,O...]", "Operators that are recorded.")
    when: Literal["always", "nonfinite", "wrong"] = option(
        "always",
        "",
        "Store every call; those of a layer up to the first with an output that is not finite; or "
        "those outside the budget, of a sample that is computed again.",
    )
    keep: int = option(
        2, "N", "Calls of the layer to store before the one that went wrong.", min=0, max=1000
    )
    max_gb: float = option(
        20, "G", "Stop recording in a process after so many gigabytes.", min=0.001
    )
    max_calls: int = option(10_000, "N", "Stop recording in a process after N calls.", min=1)
    max_delay: float = option(
        0, "MS", "How long a call may wait for room; without room it is not recorded.", min=0
    )
    out: Path = field(
        metadata={"typer": info("DIR", "Folder of the captures.", "--out", parser=path)}
    )
    force: bool = flag("--force", "Overwrite a capture or an unfinished recording in DIR.")


@options
class AccuracyOptions:
    """Show the accuracy of each implementation in a run.

    Exit code 0 says that all requested cases at the precisions shown were compared and passed.
    Exit code 1 says that a case could not run, was inaccurate, not finite or refused, that a gate
    does not hold, or that the run is partial.
    """

    run: str | None = argument(
        None, "RUN", "A run's folder, or its name under runs/.", shown="the latest run"
    )
    impl: str | None = option(
        None, "I[,I...]", "Implementations that the run compared.", "--impl", shown="all of them"
    )
    intermediates: SomeIntermediates = "all"
    states: str = option("all", "D[,D...]", _STATES)
    gate: GateOption = None
    config: Config = None
    json: Json = False


@options
class AnswersOptions(ModelOptions):
    """Compare a model's next-token predictions between implementations of its operators.

    A prompt of your own (--prompt-file) is the best test.

    Exit code 0 says that every case was compared and that all gates hold.  Exit code 1 says that a
    case was not compared, or that a gate does not hold.
    """

    placement: PlacementOption = None
    intermediates: SomeIntermediates = "all"
    states: tuple[DType, ...] | None = _states()
    implementations: tuple[str, ...] = _implementations()
    decode_states: tuple[StateFormat, ...] | None = words(
        "F[,F...]",
        "Also compute the operators token by token, with states rounded after each one to fp32, "
        "bf16, fp16, bf16-stochastic, fp16-stochastic, fp8, int8, int8-carried, or "
        "MODULE:FUNCTION of yours.",
        "--decode-states",
        shown=False,
    )
    reference: Literal["auto", "oracle", "unfused"] = option(
        "auto",
        "",
        "The operator in fp64, or unfused exact, to compare with.",
        shown="oracle, unless it takes too long",
    )
    weights: Literal["auto", "own", "fp32"] = option(
        "auto",
        "",
        "Dtype of the model outside its operators: the checkpoint's own, or fp32, which leaves "
        "only the operators' error.",
        shown="own on a GPU, fp32 without",
    )
    per_layer: bool = flag(
        "--per-layer",
        "Also replace one layer at a time, to find the layer that causes a difference.",
    )
    generate: int = option(
        0, "N", "Also compare N greedy tokens after the prompt.", shown="none", min=0
    )
    gate: GateOption = None
    out: RunFolder = None
    no_tuned: NoTuned = False
    dry_run: DryRunOption = False
    json: Json = False
    conditions: tuple[Condition, ...] = derived(())


@options
class ExportOptions:
    """Write the report of a run, a bench, prefill times or answers in another format.

    baseline is short, for compare: a line per case, without samples.  github appends a summary and
    outputs to the files that GITHUB_STEP_SUMMARY and GITHUB_OUTPUT name, and prints annotations.
    flashinfer-bench writes captures, named or of a run, as workloads into the folder FILE.

    The report is written in any case.  Exit code 1 says that not all requested cases were compared
    and passed.
    """

    run: str | None = argument(
        None,
        "RUN",
        "A report's folder, its name under runs/, or what --json printed.",
        shown="the latest report",
    )
    format: (
        Literal[
            "markdown", "html", "json", "baseline", "junit", "csv", "github", "flashinfer-bench"
        ]
        | None
    ) = option(None, "", "What to write.", shown="that of FILE's suffix, or markdown")
    output: OutputOption = None
    force: Force = False
    json: FormatJson = False


@options
class CaseOptions:
    """Show one case of a report, and the command that runs just it again.

    Reports name the id of every case that did not pass.
    """

    case: str = argument(..., "ID", "The case's id, or its whole name.")
    run: str | None = argument(
        None, "RUN", "A report's folder, or its name under runs/.", shown="the latest report"
    )
    save: Path | None = option(
        None, "DIR", "Write the tensors of its failure, and a script for them.", parser=path
    )
    json: Json = False


@options
class CompareOptions:
    """Compare two runs, two benches, two prefill results or two comparisons of answers, case by
    case.

    Absolute times are compared only between runs with the same GPU, driver and Triton; speedups
    over the baseline are compared in any case.  Exit code 1 says that a case violates --fail-if,
    that --fail-if applies to no case, or that nothing was compared.
    """

    base: str = argument(
        ..., "BASE", "A report's folder, its name under runs/, or what --json printed."
    )
    new: str = argument(..., "NEW", "The same, for the new result.")
    fail_if: list[str] | None = option(
        None,
        "METRIC[@WHERE]:base+N[%]",
        "Fail if a case is worse: time:base+3%, time@call:base+3%, speedup:base-3%, "
        "match@1e-2:base-0.1, rms:base+5%, memory:base+5%, launches:base+0, kl:base+0.001, "
        "top1:base-0.1, perplexity:base+1%.  Repeatable.",
    )
    smallest_difference: str | None = option(None, "P%", f"Report a case {_DIFFERENCE}", shown="1%")
    config: Config = None
    format: Literal["markdown", "html", "json"] | None = option(
        None, "", "What to write.", shown="that of FILE's suffix"
    )
    output: OutputOption = None
    force: Force = False
    json: FormatJson = False


@options
class PrefillOptions(TimingOptions, ModelOptions):
    """Time a whole model up to its first token, with each implementation of its operators.

    Shows the share of each part of the model, and what Amdahl's law predicts from the operator's
    own times.  Needs an NVIDIA GPU.  Exit code 1 says that an implementation failed, or that a gate
    does not hold.
    """

    copies: int = option(1, "B", "Copies of the prompt in one batch.", "--batch", min=1)
    intermediates: OneIntermediates = "exact"
    state_dtype: OneState = "fp32"
    baseline: Baseline = "unfused"
    conv_and_norm: Literal["model", "bundled"] = option(
        "model",
        "",
        "Kernels of convolution and gated norm: the model's own; bundled: also all times with "
        "the bundled ones.",
    )
    seconds: float = option(
        20, "S", "Sampling time for each length and each convolution and norm.", min=0.1
    )
    budget: float | None = option(
        None, "S", "Leave out what does not fit into this time.", shown="no limit", min=1
    )
    out: RunFolder = None

    @property
    def states(self) -> tuple[DType, ...]:
        """The same as `RunOptions.states`, with the only dtype that is timed."""
        return (self.state_dtype,)


@options
class StallsOptions:
    """Show where the warps of each implementation wait, stage by stage and line by line.

    Profiles one layer with NVIDIA Nsight Compute (ncu), which needs an NVIDIA GPU, or reads
    existing reports.  Exit code 3 says that this machine cannot profile.  With a GPU and without
    ncu, the command shows what Triton reports about the kernels.
    """

    where: str | None = argument(
        None, "RUN|MODEL", "A run, a model, or a folder of stored captures.", shown="the latest run"
    )
    layer: int | None = option(
        None, "N", "The layer to profile.", shown="the middle one of the run"
    )
    implementations: tuple[str, ...] = _implementations()
    seqlen: int | None = words(
        "N", "Tokens of the prompt.", "--seq", shown="the longest of the run"
    )
    intermediates: OneIntermediates = "exact"
    state_dtype: OneState = "fp32"
    files: list[Path] | None = option(
        None, "FILE", "Read a report of ncu (.ncu-rep) instead.  Repeatable.", "--from", parser=path
    )
    markdown: Path | None = option(
        None, "FILE", "Write Markdown to FILE, and its pictures next to it.", parser=path
    )
    html: Path | None = option(None, "FILE", "Write a page to FILE.", parser=path)
    timeout_s: float = option(
        300, "S", "Time limit of each process, in seconds.", "--timeout", min=1
    )
    out: Path | None = option(
        None, "DIR", "Folder for the results.", shown="the run's", parser=path
    )
    force: bool = flag("--force", "Replace existing results.")
    no_tuned: NoTuned = False
    json: Json = False
    tuned: Path | None = derived(None)  # file with tuned configurations of the kernels
    command: tuple[str, ...] = derived(())


@options
class BenchOptions(TimingOptions):
    """Time the fused and the unfused kernels on random inputs, and compare them with other
    libraries.

    Needs an NVIDIA GPU, but not for --decode-states.  Outputs are compared with the fp64 oracle
    first.  Exit code 1 says that one of ssdprof's kernels was wrong or refused a case, that nothing
    was compared, or that a gate does not hold: gates judge the fused kernel.
    """

    operator: str = argument(..., "OPERATOR", "ssd, gdn or kda.")
    shape: ShapeOption = None
    seq: str = option("1k,4k,16k,64k", "N[,N...]", _LENGTHS)
    batch: str = option("1", "B[,B...]", _BATCHES)
    cells: str = option("", "BxN[,...]", "Additional pairs of batch x length: 8x4k,32x1k.")
    packed: str = option("", "BxN-M[,...]", "Packed sequences of random lengths: 64x1k-4k.")
    verify: str = option(
        "", "T[,T...]", "Instead of --seq: a few drafted tokens, with the state after each: 4,8."
    )
    state_every: str = option(
        "", "N[,N...]", "Also return the states after every N tokens, as prefix caches do: 64,2k."
    )
    pool: int = option(
        0,
        "SLOTS",
        "Sequences begin with slots of a pool; steps and drafted tokens are computed in place.",
        min=0,
    )
    decode_states: tuple[StateFormat, ...] | None = _decode_states()
    decode_step: int = _decode_step()
    max_tokens: str = option("256k", "N", "Leave out pairs of --batch and --seq with more tokens.")
    dtype: str = option("bf16", "D[,D...]", _DTYPES)
    layout: Literal["contiguous", "views", "transposed"] = option(
        "contiguous",
        "",
        "views: slices of wide tensors, as in a model; transposed: with positions innermost.",
    )
    draw: str = option(
        "",
        "W[,W...]",
        "Other inputs, such as slow (GDN) or bounded (KDA); a wrong word lists them.",
    )
    intermediates: SomeIntermediates = "exact"
    states: tuple[DType, ...] | None = _states()
    against: str = option("", "P[,P...]", "Additional names for --impl; the baseline first.")
    baseline: str | None = option(
        None,
        "NAME",
        "The implementation that speedups are relative to.",
        shown="the first of --against, else unfused",
    )
    match_with: str | None = option(
        None,
        "NAME",
        "The implementation that outputs are compared with, element by element.",
        shown="unfused",
    )
    chunk_size: str = option(
        "best",
        "Q[,Q...]",
        "Chunk sizes from which implementations that do not choose their own take the fastest.",
        shown="128,256 for SSD",
    )
    processes: int | None = _processes(None, "3, with torchrun 1")
    check: Literal["full", "short"] = option(
        "full", "", "Compare outputs on all tokens, or on one sequence of up to 4,096 tokens."
    )
    budget: float | None = option(
        None, "SECONDS", "Limit of the wall-clock time.", shown="no limit", min=1
    )
    out: Path | None = option(
        None, "DIR", "Folder of the report.", shown="runs/<time>-<operator>", parser=path
    )
    measured: tuple[Cell, ...] = derived(())
    # with unavailable ones, which are not measured, but which the report names
    compared: tuple[Implementation, ...] = derived(())
    # chunk sizes to try, for implementations that take the size from the inputs
    chunk_sizes: tuple[int, ...] = derived(())
    # number of this process if it only adds samples to the report in `out`; else 0
    sampler: int = derived(0)


@options
class TuneOptions:
    """Search for faster configurations of the fused kernel on this GPU, and store them for later
    runs.

    Needs an NVIDIA GPU.  A candidate is compared with the fp64 oracle before it is timed.  run,
    bench, prefill, answers and stalls use the stored configurations, and say so, unless --no-tuned
    is given.
    """

    operator: str = argument("ssd", "OPERATOR", "ssd, gdn or kda.", shown=True)
    shape: ShapeOption = None
    seq: str = option("1k,8k,64k", "N[,N...]", _LENGTHS)
    batch: str = option("1", "B[,B...]", _BATCHES)
    dtype: str = option("bf16", "D[,D...]", _DTYPES)
    intermediates: SomeIntermediates = "exact"
    budget: float | None = option(
        None, "SECONDS", "Start no new search after this time.", shown="no limit", min=1
    )
    clear: bool = flag("--clear", "Delete the stored results, and stop.")
    json: Json = False
    command: tuple[str, ...] = derived(())
