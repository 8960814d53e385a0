"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ssdprof.commands import terminal
from ssdprof.errors import unreadable

if TYPE_CHECKING:
    from ssdprof.environment.ranks import Ranks
    from ssdprof.pipeline.request import CaptureRequest, ServingRequest
    from ssdprof.schema import Gates
    from ssdprof.schema.placement import PlacementKind


def path(text: str) -> Path:
    """A parser of options: an empty string, as of an unset variable, is not the current folder."""
    if not text.strip():
        raise typer.BadParameter("the path is empty")
    return Path(text)


def existing_file(text: str) -> Path:
    """A parser of options, for a file that will be read later."""
    file = path(text)
    try:
        with file.open("rb"):
            return file
    except OSError as error:
        raise unreadable(f"The file {text}", error, "Give the path of a text file.") from None


MODEL_HELP = "Hub id, local folder, family name, [bold]demo[/bold] or [bold]demo-gdn[/bold]."

Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
ModelOrCaptures = Annotated[
    str,
    typer.Argument(metavar="MODEL", help=f"{MODEL_HELP} Or a folder of stored captures.", show_default=False),
]
Run = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="A run's folder, or its name under runs/.", show_default="the latest run"),
]
Seq = Annotated[
    str | None,
    typer.Option(
        metavar="N[,N...]",
        help="Tokens of the prompt: 16384, 128k, or several: 1k,16k.",
        show_default="16k on a GPU, 512 without",
    ),
]
Layers = Annotated[str, typer.Option(metavar="WHICH", help="all, first:N, every:K, or layer numbers: 3,7, 0-3.")]
PromptText = Annotated[
    Literal["default", "random"],
    typer.Option("--prompt", help="The built-in text, or random tokens (whose statistics no real prompt has)."),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Take the prompt from a UTF-8 text file.", parser=existing_file, show_default=False
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(metavar="REV", help="Branch, tag or commit on the hub.", show_default="the main branch"),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Take the tokenizer from another model.", show_default="the model's own"),
]
Segment = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Tokens per forward call of the model.", show_default="by length"),
]
Batch = Annotated[
    int, typer.Option(metavar="N", min=1, max=65536, help="Run N different prompts side by side.", show_default=True)
]
Packed = Annotated[
    str | None,
    typer.Option(
        metavar="NxA-B",
        help="Run N sequences of A to B tokens behind each other in one call: 64x1k-4k.",
        show_default=False,
    ),
]
ChunkedPrefill = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Replay the prompt as calls of N tokens, each with the states that the one before left: 8k.",
        show_default=False,
    ),
]
Decode = Annotated[
    int,
    typer.Option(
        metavar="N", min=0, max=4096, help="Let the model generate N tokens after the prompt, and replay each step."
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        metavar="N", min=1, help="Replay what one of N GPUs computes that share each layer's heads.", show_default=True
    ),
]
PlacementOption = Annotated[
    Literal["one-gpu", "all-gpus", "cpu-offload", "disk-offload"] | None,
    typer.Option(
        "--placement",
        help="Weights on one GPU, on all visible ones, or what those do not hold in main memory or on the disk.",
        show_default="the fastest that fits",
    ),
]
Implementations = Annotated[
    str,
    typer.Option(
        "--impl",
        "--implementations",
        metavar="I[,I...]",
        help="Implementations: unfused, fused, another library (mamba_ssm, published=DIR; fla, flash_qla, flashinfer), "
        "or your own kernel: MODULE:FUNCTION.",
    ),
]
Baseline = Annotated[str, typer.Option(metavar="NAME", help="The implementation that the others are compared with.")]
FirstCall = Annotated[
    float, typer.Option(metavar="SECONDS", min=1, help="Longest first call of your own kernel, compilation included.")
]
Dtypes = Annotated[
    Literal["exact", "relaxed", "all"],
    typer.Option(help="Intermediates in the original's dtypes (exact), in 16 bit (relaxed), or both."),
]
States = Annotated[str, typer.Option(metavar="D[,D...]", help="Dtypes of inter-chunk states: fp32, fp16, bf16, all.")]
UsualStates = Annotated[
    str | None,
    typer.Option(
        "--states",
        metavar="D[,D...]",
        help="Dtypes of inter-chunk states: fp32, fp16, bf16, all.",
        show_default="fp32 with exact, the inputs' with relaxed",
    ),
]
SmallestDifference = Annotated[
    str,
    typer.Option(
        metavar="P%", help="Report a kernel as faster or slower only if its 95 % interval lies beyond this difference."
    ),
]
Clock = Annotated[
    Literal["cold", "warm"],
    typer.Option(
        help="With warm, also time calls back to back with a warm cache, as many papers do: shown beside the others."
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Say what would be downloaded, what it needs, and what would keep it from running; then stop."
    ),
]
NoTuned = Annotated[
    bool, typer.Option("--no-tuned", help="Use the built-in configurations, not those that 'ssdprof tune' has stored.")
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", parser=path, help="The file to write.", show_default="stdout"),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite FILE.")]
Operator = Annotated[str, typer.Argument(metavar="OPERATOR", help="ssd or gdn.")]
Full = Annotated[bool, typer.Option("--full", help="Print every table, not one screen.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]

MinSpeedup = Annotated[
    float | None,
    typer.Option(metavar="X", min=0, help="Fail unless every case is X times as fast as the baseline, by device time."),
]
MinMatch = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TOL:P",
        help="Fail unless P % of the output matches the baseline's at 0, 1e-3 or 1e-2.  Repeatable.",
    ),
]
MaxRmsRatio = Annotated[
    float | None,
    typer.Option(metavar="R", min=0, help="Fail if the output's RMS error is more than R times its floor."),
]
Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        parser=existing_file,
        help="Settings: a TOML file.",
        show_default="the nearest ssdprof.toml, or pyproject.toml with [tool.ssdprof]",
    ),
]


def file_to_write(output: Path | None, *, force: bool) -> Path | None:
    """The file of -o, which can be written; None for stdout, which "-" is too.  Raises BadInputError."""
    from ssdprof import files

    if output is None or str(output) == "-":
        return None
    files.check_target(output, replace=force)
    return output


def use_tuned(no_tuned: bool) -> Path | None:
    """Let kernels take what was tuned on this GPU, and say so, unless the user does not want it.  The file, if any."""
    from ssdprof.tuning.use import use_saved

    return None if no_tuned else use_saved(terminal.TerminalWatcher().say)


def gates_here(gates: Gates, *, speedup_given: bool) -> Gates:
    """The gates that this machine can judge: without a GPU nothing is timed.

    Raises MissingCapabilityError if the minimum speedup was given on the command line.
    """
    import torch

    if gates.min_speedup is None or torch.cuda.is_available():
        return gates
    if speedup_given:
        from ssdprof.environment.present import require_gpu

        require_gpu("--min-speedup needs", "Run on a machine with an NVIDIA GPU, or leave --min-speedup out.")
    terminal.err().print("min-speedup of the settings file is not judged: this machine has no GPU.")
    return gates.model_copy(update={"min_speedup": None})


def capture_request(
    model: str,
    revision: str | None,
    tokenizer: str | None,
    prompt: Literal["default", "random"],
    prompt_file: Path | None,
    seq: str | None,
    layers: str,
    segment: int | None,
    serving: ServingRequest | None = None,
    placement: PlacementKind | None = None,
) -> CaptureRequest:
    """The options of `run` and `capture` as one value."""
    from ssdprof.capture.prompt import parse_seqs
    from ssdprof.capture.select import check_layers
    from ssdprof.errors import BadInputError
    from ssdprof.pipeline.request import CaptureRequest, ModelRequest, PromptRequest, ServingRequest

    if prompt_file is not None and prompt == "random":
        raise BadInputError("--prompt random and --prompt-file exclude each other.", "Give one of them.")
    check_layers(layers)
    return CaptureRequest(
        model=ModelRequest(model=model, revision=revision, tokenizer=tokenizer),
        prompt=PromptRequest(
            text=prompt_file or prompt,
            seqlens=None if seq is None else parse_seqs(seq),
            serving=serving or ServingRequest(),
        ),
        layers=layers,
        segment_length=segment,
        placement=placement,
    )


def join_ranks(of_one_process: Mapping[str, bool]) -> Ranks | None:
    """The processes that torchrun started, with this one's GPU taken; None if there are no others.

    of_one_process: options that several cannot share, and whether they were given.  Raises BadInputError for one.
    """
    from ssdprof.environment.ranks import join
    from ssdprof.errors import BadInputError

    ranks = join()
    if ranks is not None and (given := [option for option, wanted in of_one_process.items() if wanted]):
        raise BadInputError(
            f"{ranks.count} ranks cannot share {' and '.join(given)}.",
            "Leave it out, or start without torchrun.",
        )
    return ranks


def refuse_captures(request: CaptureRequest, option: str) -> None:
    """BadInputError if the request names stored captures, and not a model, for an option that runs the model."""
    from ssdprof.errors import BadInputError
    from ssdprof.pipeline.subject import captures_of

    folder = captures_of(request)
    if folder is not None:
        raise BadInputError(f"{folder} holds stored captures, and {option} runs the model.", "Name the model.")
