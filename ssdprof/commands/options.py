"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ssdprof.commands import progress_bars
from ssdprof.errors import unreadable

if TYPE_CHECKING:
    from ssdprof.environment.ranks import Ranks
    from ssdprof.schema import PrecisionRecord


def path(text: str) -> Path:
    """An option parser that refuses an empty string, such as an unset variable, which Path would read as "."."""
    if not text.strip():
        raise typer.BadParameter("the path is empty")
    return Path(text)


def existing_file(text: str) -> Path:
    """An option parser for a file that is read later."""
    file = path(text)
    try:
        with file.open("rb"):
            return file
    except OSError as error:
        raise unreadable(f"The file {text}", error, "Give the path of a text file.") from None


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
    typer.Option(help="Intermediates in the dtypes of the original kernels (exact), in 16 bit (relaxed), or both."),
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
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Show the download, the memory needed, and what would keep the model from running; then stop."
    ),
]
NoTuned = Annotated[
    bool, typer.Option("--no-tuned", help="Use the built-in configurations, not those that 'ssdprof tune' has stored.")
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", parser=path, help="The file to write.", show_default="stdout"),
]
RunFolder = Annotated[
    Path | None, typer.Option(metavar="DIR", parser=path, help="Folder of the run.", show_default="runs/<time>-<model>")
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite FILE.")]
Operator = Annotated[str, typer.Argument(metavar="OPERATOR", help="ssd or gdn.")]
Shape = Annotated[
    str | None,
    typer.Option(
        metavar="S[,S...]",
        help="Models' shapes; all; or sizes: 80x64x128x1 for SSD, 16/32x128x128 for GDN.",
        show_default="mamba2-2.7b or qwen3-next-80b",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]

MinMatch = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TOL:P",
        help="Fail unless P % of the output matches the baseline's within TOL: 0, 1e-3 or 1e-2.  Repeatable.",
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
        help="Settings file, in TOML.",
        show_default="the nearest ssdprof.toml, or pyproject.toml with [tool.ssdprof]",
    ),
]


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """One precision, for commands that use only one."""

    dtypes: Annotated[Literal["exact", "relaxed"], typer.Option(help="Precision of intermediates.")] = "exact"
    states: Annotated[Literal["fp32", "fp16", "bf16"], typer.Option(help="Dtype of inter-chunk states.")] = "fp32"

    def record(self) -> PrecisionRecord:
        from ssdprof.schema import PrecisionRecord

        return PrecisionRecord(intermediates=self.dtypes, state_dtype=self.states)


@dataclass(frozen=True, kw_only=True)
class TimingOptions:
    """How times are taken and compared."""

    clock: Annotated[
        Literal["cold", "warm"],
        typer.Option(help="warm: also time back-to-back calls with a warm cache, as many papers do."),
    ] = "cold"
    smallest_difference: SmallestDifference = "1%"

    @property
    def warm(self) -> bool:
        return self.clock == "warm"

    def smallest(self) -> float:
        """The smallest relative difference of two times that counts.  Raises BadInputError."""
        from ssdprof.pipeline.request import parse_percent

        return parse_percent("--smallest-difference", self.smallest_difference)


def file_to_write(output: Path | None, *, force: bool) -> Path | None:
    """The file of -o, checked for writing; None for stdout or "-".  Raises BadInputError."""
    from ssdprof import files

    if output is None or str(output) == "-":
        return None
    files.check_target(output, replace=force)
    return output


def use_tuned(no_tuned: bool) -> Path | None:
    """Use configurations tuned on this GPU, and say so, unless the user disabled them.  Returns their file, if any."""
    from ssdprof.tuning.use import use_saved

    return None if no_tuned else use_saved(progress_bars.TerminalWatcher().say)


def join_ranks(of_one_process: Mapping[str, bool]) -> Ranks | None:
    """Join the other processes of torchrun, and select this process's GPU.  None if there are no others.

    of_one_process: options for single processes, and whether they were given.  Raises BadInputError for a given one.
    """
    from ssdprof.environment.ranks import join

    refuse_ranks(*(option for option, given in of_one_process.items() if given))
    return join()


def refuse_ranks(*what: str) -> None:
    """BadInputError if torchrun started several processes.  what: the options or command that they cannot share."""
    from ssdprof.environment.ranks import started
    from ssdprof.errors import BadInputError

    if what and (count := started()) > 1:
        raise BadInputError(
            f"{count} ranks cannot share {' and '.join(what)}.", "Start a single process, without torchrun."
        )
