"""What a person sees: data on stdout, everything else on stderr."""

from __future__ import annotations

import codecs
import ctypes
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from ssdprof.errors import BadInputError, MissingCapabilityError, masked
from ssdprof.quantities import size_words

if TYPE_CHECKING:
    from rich.progress import Progress

    from ssdprof.progress import Advance
    from ssdprof.schema import RunReport
    from ssdprof.schema.plan import DryRun

WIDTH_OF_A_PIPE = 120
READER_IS_GONE = 141  # as shells count a writer that SIGPIPE ended: no verdict, and no mistake


class _Output(Console):
    def on_broken_pipe(self) -> None:
        reader_is_gone()


def reader_is_gone() -> NoReturn:
    """End quietly when what reads stdout has had enough, as `head` does."""
    drop_output()
    raise SystemExit(READER_IS_GONE)


def drop_output() -> None:
    """Send what is left for stdout nowhere: the interpreter's last flush would fail, and change the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def check_working_directory() -> None:
    """BadInputError if another process has removed it: libraries end the process without a word then."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise BadInputError("The working directory does not exist any more.", "Change to a folder that does.") from None


def prepare() -> None:
    """Make stdout and stderr fit for any text.

    Characters that a stream cannot encode, under LC_ALL=C say, become \\uXXXX, which JSON reads back.
    MissingCapabilityError if stdout is closed: nothing should run for hours and then have nowhere to print to.
    """
    closed = sys.stdout is None
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # for as long as the process lasts
    codecs.register_error("json-escape", _json_escape)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="json-escape")
    if closed:
        raise MissingCapabilityError("Standard output is closed.", "Redirect it to a file or to /dev/null.")


def _json_escape(error: UnicodeError) -> tuple[str, int]:
    """A codec's error handler: each UTF-16 unit of what cannot be encoded as \\uXXXX."""
    assert isinstance(error, UnicodeEncodeError)
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{high:02x}{low:02x}" for high, low in zip(units[::2], units[1::2], strict=True)), error.end


def out() -> Console:
    """stdout, for data.  A pipe or a file has no width of its own."""
    console = _Output(highlight=False)
    return console if console.is_terminal else _Output(highlight=False, width=WIDTH_OF_A_PIPE)


def err() -> Console:
    """stderr, for progress, warnings and errors.  Text is printed as it is: a path may look like markup."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


@contextmanager
def only_data_on_stdout() -> Iterator[None]:
    """Around a job: what kernels of the user or of other libraries print, in Python or in C, goes to stderr."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "wb") as stdout, redirect_stdout(sys.stderr):
        os.dup2(2, 1)
        try:
            yield
        finally:
            ctypes.CDLL(None).fflush(None)  # the C library's buffers; Python's are its own
            os.dup2(stdout.fileno(), 1)


def print_json(value: Any) -> None:
    """A value of plain types as JSON on stdout."""
    print(json.dumps(value, indent=2))


def command_line() -> tuple[str, ...]:
    """The command as typed, for the report; secrets in it are masked."""
    return ("ssdprof", *(masked(word) for word in sys.argv[1:]))


def exit_by(report: RunReport) -> None:
    """End with exit code 1 unless everything that the run was asked for was compared and passed.

    Gates that do not hold are named on stderr, whatever stdout is for.
    """
    from ssdprof.schema.outcome import outcome

    found = outcome(report)
    if not found.passed:
        gate_failed(f"GATE FAILED: {one}" for one in found.broken)


def gate_failed(lines: Iterable[str]) -> NoReturn:
    """Say why, a line each on stderr, and end with exit code 1."""
    from ssdprof.errors import ExitCode

    console = err()
    for line in lines:
        console.print(Text(line))
    raise typer.Exit(ExitCode.GATE_FAILED)


def show_plan(plan: DryRun, as_json: bool) -> None:
    """The answer of --dry-run, on stdout."""
    if as_json:
        print_json(plan.model_dump(mode="json"))
        return
    from ssdprof.report.placement import placement_words
    from ssdprof.report.serving import serving_words

    console = out()
    checkpoint = plan.checkpoint
    console.print(Text(f"{checkpoint.repo_id} {checkpoint.revision or ''}".rstrip(), style="bold"))
    for note in plan.notes:
        console.print(Text(f"  {note}"))
    indices = ", ".join(str(layer.index) for layer in plan.layers)
    rows = {
        "layers": f"{indices} ({plan.layers[0].operator.upper()}, {plan.dims}) of {checkpoint.layer_count}",
        "prompt": f"{_tokens(plan.seqlens)}",
        "served": serving_words(plan.serving, batch=plan.batch, tensor_parallel=plan.tensor_parallel),
        "download": size_words(plan.download_bytes),
        "weights": f"{size_words(plan.weight_bytes)} loaded; {size_words(plan.free_bytes)} are free on {plan.device}",
        "placement": placement_words(plan.placement) if plan.placement else "",
    }
    for name, value in rows.items():
        if value:
            console.print(Text(f"  {name:<10}{value}"))
    for file in plan.files:
        size = size_words(file.size_bytes)
        console.print(Text(f"  {size:>12}  {file.name}{'  (here)' if file.cached else ''}"))


def _tokens(seqlens: tuple[int, ...]) -> str:
    """ "1 token", "1,024, 16,384 tokens"."""
    return f"{', '.join(f'{seqlen:,}' for seqlen in seqlens)} {'token' if seqlens == (1,) else 'tokens'}"


_ETA_FROM = 3600.0  # seconds of progress that an ETA is estimated from: a layer may take minutes


class TerminalWatcher:
    """Draws steps as progress bars on a terminal's stderr; where stderr is no terminal, prints a line now and then."""

    def __init__(self) -> None:
        self._console = err()
        self._bars: Progress | None = None
        self._depth = 0

    def say(self, text: str) -> None:
        self._console.print(Text(text))

    @contextmanager
    def step(self, text: str, total: int | None = None, *, unit: str = "") -> Iterator[Advance]:
        self._depth += 1
        try:
            if self._console.is_terminal:
                with self._shown() as bars:
                    yield from self._bar(bars, text, total, unit)
            else:
                yield self._lines(text, total, unit)
        finally:
            self._depth -= 1

    def _lines(self, text: str, total: int | None, unit: str) -> Advance:
        """Steps inside others are left out: a log is read afterwards."""
        done = 0

        def advance(amount: int) -> None:
            nonlocal done
            done += amount
            if outermost and total is not None:
                self.say(f"{text}: {done} of {total} {unit}".rstrip())

        if outermost := self._depth == 1:
            self.say(text)
        return advance

    def _bar(self, bars: Progress, text: str, total: int | None, unit: str) -> Iterator[Advance]:
        task = bars.add_task(text, total=total, unit=unit)
        bars.refresh()

        def advance(amount: int) -> None:
            bars.advance(task, amount)
            bars.refresh()

        try:
            yield advance
        finally:
            bars.remove_task(task)

    @contextmanager
    def _shown(self) -> Iterator[Progress]:
        """The bars on screen, the outermost step's first.  They are drawn when a step says something, and not by a
        thread of their own: what is being timed must not share its interpreter."""
        if self._bars is not None:
            yield self._bars
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        self._bars = Progress(
            *columns, console=self._console, transient=True, auto_refresh=False, speed_estimate_period=_ETA_FROM
        )
        try:
            with self._bars:
                yield self._bars
        finally:
            self._bars = None
