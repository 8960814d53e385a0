"""Terminal output: data on stdout, everything else on stderr."""

from __future__ import annotations

import codecs
import ctypes
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, NoReturn

from rich.console import Console
from rich.text import Text

from ssdprof.errors import BadInputError, MissingCapabilityError, harmless, masked


class Unread(io.FileIO):
    """A stream of progress and warnings, which are no data: what cannot be written, because its
    reader has gone or its disk is full, is dropped.
    """

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def unread(number: int, *, close: bool) -> io.TextIOWrapper:
    """A text stream on a file descriptor, by lines.  close: when it is closed."""
    raw = io.BufferedWriter(Unread(number, "w", closefd=close))
    return io.TextIOWrapper(raw, errors="backslashreplace", line_buffering=True)


WIDTH_OF_A_PIPE = 120
READER_IS_GONE = 141  # the exit code in shells of a writer that SIGPIPE ended


def reader_is_gone() -> NoReturn:
    """End without a message when the reader of stdout has closed it, as `head` does."""
    drop_output()
    raise SystemExit(READER_IS_GONE)


def drop_output() -> None:
    """Discard the remaining output: the interpreter's last flush would fail and change the exit
    code.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def check_working_directory() -> None:
    """BadInputError if another process has removed it, because libraries would end the process
    without a message.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise BadInputError(
            "The working directory does not exist any more.", "Change to a folder that does."
        ) from None


def prepare() -> None:
    """Make stdout and stderr accept any text, and keep the profiler of torch 2.13 from writing
    there.

    Characters that a stream cannot encode, under LC_ALL=C say, become \\uXXXX, which JSON reads
    back.  MissingCapabilityError if stdout is closed, so that a long job does not end without
    output.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch is imported
    closed = sys.stdout is None
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # for as long as the process lasts
    elif sys.stderr is sys.__stderr__:
        sys.stderr = unread(2, close=False)
    codecs.register_error("json-escape", _json_escape)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="json-escape")
    if sys.flags.optimize > 1:
        raise MissingCapabilityError(
            "Python runs without docstrings, which transformers needs.",
            "Unset PYTHONOPTIMIZE, or leave out -OO.",
        )
    if closed:
        raise MissingCapabilityError(
            "Standard output is closed.", "Redirect it to a file or to /dev/null."
        )


def _json_escape(error: UnicodeError) -> tuple[str, int]:
    """An error handler for codecs: writes each UTF-16 unit that cannot be encoded as \\uXXXX."""
    assert isinstance(error, UnicodeEncodeError)
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    return "".join(
        f"\\u{high:02x}{low:02x}" for high, low in zip(units[::2], units[1::2], strict=True)
    ), error.end


def out() -> Console:
    """stdout, for data.  A pipe or a file has no width of its own."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH_OF_A_PIPE)
    console.on_broken_pipe = reader_is_gone  # type: ignore[method-assign]
    return console


def err() -> Console:
    """stderr, for progress, warnings and errors.  Text is printed without markup, because a path
    may look like it.
    """
    return Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def say(text: str) -> None:
    """A sentence on stderr, harmless wherever its words came from."""
    err().print(Text(harmless(text)))


@contextmanager
def only_data_on_stdout() -> Iterator[None]:
    """While the context is open, output of users' kernels and of libraries, from Python or C, goes
    to stderr.
    """
    sys.stdout.flush()
    with (
        os.fdopen(os.dup(1), "wb") as stdout,
        # a kernel may close it
        unread(os.dup(2), close=True) as diverted,
        redirect_stdout(diverted),
    ):
        os.dup2(2, 1)
        try:
            yield
        finally:
            # the buffers of the C library, which are separate from Python's
            ctypes.CDLL(None).fflush(None)
            os.dup2(stdout.fileno(), 1)


def print_json(value: object) -> None:
    """A value of plain types as JSON on stdout."""
    print(json.dumps(value, indent=2, allow_nan=False))


def command_line() -> tuple[str, ...]:
    """The command as typed, for the report; secrets in it are masked."""
    return ("ssdprof", *(masked(word) for word in sys.argv[1:]))
