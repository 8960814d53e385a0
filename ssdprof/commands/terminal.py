"""The terminal: data go to stdout, everything else goes to stderr."""

import codecs
import ctypes
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, NoReturn

from rich.console import Console
from rich.text import Text

from ssdprof.errors import BadInputError, MissingCapabilityError, harmless, masked


class LossyFile(io.FileIO):
    """A file for progress and warnings.  What cannot be written to it is dropped.

    A command goes on if the reader of its progress has gone, if the disk with its log is full, and
    if a pipe that does not block is full, for which `FileIO.write` returns None.
    """

    def write(self, data: Any) -> int:
        written = None
        with suppress(OSError):
            written = super().write(data)
        return len(data) if written is None else written


def lossy_stream(number: int, *, close: bool) -> io.TextIOWrapper:
    """A text stream that writes lines to a file descriptor, and drops what cannot be written.

    close: whether to close the descriptor with the stream.
    """
    raw = io.BufferedWriter(LossyFile(number, "w", closefd=close))
    return io.TextIOWrapper(raw, errors="backslashreplace", line_buffering=True)


WIDTH_OF_A_PIPE = 120  # characters; also the width of a file
READER_IS_GONE = 141  # the exit code in shells of a writer that SIGPIPE ended


def end_without_reader() -> NoReturn:
    """End without a message when the reader of stdout has closed it, as `head` does."""
    drop_output()
    raise SystemExit(READER_IS_GONE)


def drop_output() -> None:
    """Discard the remaining output of stdout.

    Otherwise the interpreter's last flush would fail and change the exit code.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def check_working_directory() -> None:
    """Raise BadInputError if another process has removed the working directory.

    Libraries would otherwise end the process without a message.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise BadInputError(
            "The working directory does not exist any more.", "Change to a folder that does."
        ) from None


def prepare() -> None:
    """Make stdout and stderr accept any text, and keep the profiler of torch 2.13 from writing to
    them.

    A character that a stream cannot encode, as under LC_ALL=C, is written as \\uXXXX, which JSON
    reads back.

    Raises MissingCapabilityError if stdout is closed, so that a long job does not end without
    output, and if Python runs without docstrings.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch reads it when it is imported
    is_closed = sys.stdout is None
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # for as long as the process lasts
    elif sys.stderr is sys.__stderr__:
        sys.stderr = lossy_stream(2, close=False)
    codecs.register_error("json-escape", _json_escape)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="json-escape")
    if sys.flags.optimize > 1:
        raise MissingCapabilityError(
            "Python runs without docstrings, which transformers needs.",
            "Unset PYTHONOPTIMIZE, or leave out -OO.",
        )
    if is_closed:
        raise MissingCapabilityError(
            "Standard output is closed.", "Redirect it to a file or to /dev/null."
        )


def _json_escape(error: UnicodeError) -> tuple[str, int]:
    """An error handler for codecs, which writes each UTF-16 unit of the text as \\uXXXX.

    Returns the replacement, and the position at which encoding continues.
    """
    assert isinstance(error, UnicodeEncodeError)
    encoded = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    units = (encoded[start : start + 2].hex() for start in range(0, len(encoded), 2))
    return "".join(f"\\u{unit}" for unit in units), error.end


def out() -> Console:
    """A console on stdout, for data.  On a pipe or a file it is `WIDTH_OF_A_PIPE` wide."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH_OF_A_PIPE)
    console.on_broken_pipe = end_without_reader  # type: ignore[method-assign]
    return console


def err() -> Console:
    """A console on stderr, for progress, warnings and errors.

    It does not interpret markup, because a path may look like markup.
    """
    return Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def say(text: str) -> None:
    """Print a sentence on stderr.  Characters that would control the terminal are escaped."""
    err().print(Text(harmless(text)))


@contextmanager
def only_data_on_stdout() -> Iterator[None]:
    """While the context is open, all output to stdout goes to stderr.

    This includes output of users' kernels and of libraries, from Python and from C.
    """
    sys.stdout.flush()
    with (
        os.fdopen(os.dup(1), "wb") as stdout,
        # on a descriptor of its own, because a kernel may close stderr
        lossy_stream(os.dup(2), close=True) as diverted,
        redirect_stdout(diverted),
    ):
        os.dup2(2, 1)
        try:
            yield
        finally:
            # write the buffers of the C library, which are separate from Python's
            ctypes.CDLL(None).fflush(None)
            os.dup2(stdout.fileno(), 1)


def print_json(value: object) -> None:
    """Print a value of plain types as JSON on stdout."""
    print(json.dumps(value, indent=2, allow_nan=False))


def command_line() -> tuple[str, ...]:
    """The command as typed, with secrets masked, for the report."""
    return ("ssdprof", *(masked(word) for word in sys.argv[1:]))
