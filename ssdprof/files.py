"""Reading of documents, writing of files that are complete or absent, and the errors of both."""

import errno
import fcntl
import json
import os
import re
import signal
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from ssdprof.errors import (
    BadInputError,
    MissingCapabilityError,
    SsdprofError,
    library_message,
    unreadable,
)

LOCK = ".lock"  # in a folder that one process writes to at a time
Stored = TypeVar("Stored")
LARGEST = 1 << 30  # bytes of a document that is read into memory


def regular(file: Path, most: float = LARGEST) -> Path:
    """Return the file if it can be read to an end: it has at most `most` bytes, and is no pipe or
    device.

    A folder is returned, too, because opening it raises an OSError that says what it is.

    Raises OSError for all others, and if there is no such file.
    """
    status = file.stat()
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EINVAL, "It is not a regular file", str(file))
    if status.st_size > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(file))
    return file


def read_json(file: Path) -> Any:
    """The JSON value in a file.

    Raises OSError if the file cannot be read, and ValueError if it is not valid: see `parse_json`.
    """
    try:
        return parse_json(regular(file).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8") from error


def read_object(file: Path, what: str, hint: str) -> dict[str, Any]:
    """The JSON object in a file.

    what: names the file in the error.  hint: of the error.

    Raises BadInputError if the file is missing, cannot be read or holds no JSON object, and
    MissingCapabilityError if the user may not read it.
    """
    try:
        document = read_json(file)
    except OSError as error:
        raise unreadable(what, error, hint) from error
    except ValueError as error:
        raise BadInputError(f"{what} is not valid JSON: {library_message(error)}.", hint) from error
    if not isinstance(document, dict):
        raise BadInputError(f"{what} holds no JSON object.", hint)
    return document


def read_stored(
    file: Path,
    validate: Callable[[object], Stored],
    version: int,
    hint: str,
    *,
    key: str = "version",
) -> Stored:
    """The record in a file that ssdprof wrote.

    validate: makes the record of a JSON object, or raises ValueError.
    version: the version that this ssdprof reads; `key` is the field that has it.
    hint: of the errors.

    Raises BadInputError if there is no document, if it is damaged, or if it has another version,
    and MissingCapabilityError if the user may not read it.
    """
    document = read_object(file, str(file), hint)
    if key not in document:
        raise BadInputError(f"{file} is not a document of ssdprof.", hint)
    if document[key] != version:
        raise BadInputError(
            f"{file} has format version {document[key]}; this ssdprof reads version {version}.",
            hint,
        )
    try:
        return validate(document)
    except ValueError as error:
        raise BadInputError(f"{file} is damaged: {library_message(error)}.", hint) from error


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises ValueError if it is not JSON, if a key occurs twice in an object, and if it is nested too
    deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The fields of a JSON object.

    Raises ValueError for a key that occurs twice; the module `json` would use its last value.
    """
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:80]!r} occurs twice")
    return fields


def write_text(file: Path, text: str, *, replace: bool = True) -> None:
    """Write a file atomically: see `put`.  A pipe or a device is written in place.

    replace: whether to overwrite a file that exists.

    Raises BadInputError if the file exists and may not be overwritten, if it is a folder, or if its
    folder does not exist; MissingCapabilityError if it cannot be written.
    """
    check_target(file, replace=replace)
    try:
        if file.exists() and not file.is_file():  # a pipe or a device, which cannot be replaced
            file.write_text(text, encoding="utf-8")
        else:
            put(file.resolve(), partial(Path.write_text, data=text, encoding="utf-8"))
    except OSError as error:
        raise unwritable(file, error) from error


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM while an interrupted command stores its results.  Outside of the
    main thread this has no effect.

    When a rank dies, torchrun sends SIGTERM to the others, which may be storing their results.
    """
    # only the main thread receives signals, and may set their handlers
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def append_text(file: Path, text: str) -> None:
    """Append to a file, which is created if necessary.

    Raises what `unwritable` returns if it cannot be written.
    """
    try:
        with open_to_append(file, os.O_NONBLOCK) as opened:
            opened.write(text.encode())
    except OSError as error:
        raise unwritable(file, error) from error


def open_to_append(file: Path, flags: int = os.O_NOFOLLOW | os.O_NONBLOCK) -> BinaryIO:
    """Open a file for appending.  It is created if necessary.

    flags: of `os.open`, besides those of the mode "ab".  By default, links are refused.

    Raises OSError if the file cannot be opened, for a link that is refused, and with O_NONBLOCK for
    a pipe that nobody reads.
    """

    def opener(name: str, mode_flags: int) -> int:
        return os.open(name, mode_flags | flags, 0o666)

    return open(file, "ab", opener=opener)


def put(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically, so that it is complete or unchanged whatever happens.

    `write` writes a temporary file in the same folder, which is flushed to the disk and renamed.
    The mode of the file is rw-rw-rw- without the bits of the user's umask.

    Raises what `write` raises, and OSError.
    """
    descriptor, name = tempfile.mkstemp(
        prefix=f".{file.name[:80]}.", suffix=".tmp", dir=file.parent
    )
    os.close(descriptor)
    temporary = Path(name)
    try:
        write(temporary)
        temporary.chmod(_file_mode())
        _flush(temporary)
        temporary.replace(file)
        _flush(file.parent)  # otherwise a power cut could undo the rename
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, what: str, hint: str) -> Iterator[BinaryIO]:
    """A file for appending that this process alone writes to while the context is open.

    The file and its folder are created if necessary.

    what, hint: of the error if the lock is held: the start of the sentence, before the folder,
        such as "Another run is writing into", and the hint.

    Raises BadInputError if the file's lock is held, by another process or by another context of
    this one, and what `unwritable` returns if the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open_to_append(path)
    except OSError as error:
        raise unwritable(path.parent, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadInputError(f"{what} {path.parent}.", hint) from error
        yield file


def check_target(
    file: Path, *, replace: bool, hint: str = "Give --force to overwrite it, or another name."
) -> None:
    """Raise what `write_text` would raise for a file that cannot be created, or may not be
    overwritten.  Whether a pipe or a device can be written is not checked.

    hint: of the error if the file exists and may not be overwritten.
    """
    if file.is_dir():
        raise BadInputError(f"{file} is a folder.", "Name a file.")
    if not file.parent.is_dir():
        raise BadInputError(
            f"There is no folder {file.parent}.", "Create it, or write somewhere else."
        )
    if file.is_file() or not file.exists():  # a pipe or a device is written in place
        check_writable(file.parent)
    if file.is_file() and not replace:
        raise BadInputError(f"{file} exists.", hint)


def check_writable(folder: Path) -> None:
    """Raise MissingCapabilityError if this user cannot write into a folder, and BadInputError if it
    is a file, or is inside of one.

    The folder need not exist yet: then the nearest folder above it is checked.
    """
    paths = (folder, *folder.absolute().parents)
    nearest_existing = next(path for path in paths if os.path.lexists(path))
    try:
        with tempfile.TemporaryDirectory(prefix=".ssdprof-", dir=nearest_existing):
            pass
    except OSError as error:
        raise unwritable(folder, error) from error


def unwritable(path: Path, error: OSError) -> SsdprofError:
    """The error for a path that cannot be written: BadInputError if a file is in the place of a
    folder, else MissingCapabilityError.
    """
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return BadInputError(
            f"The folder {path} cannot be made: a file is in its place.", "Name another folder."
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return MissingCapabilityError(
            f"The disk is full: {path} could not be written.",
            "Free some space, or write to another disk.  Files that were written earlier are "
            "complete.",
        )
    return MissingCapabilityError(
        f"{path} cannot be written: {why(error)}.",
        "Check the permissions, or write somewhere else.",
    )


def safe_name(name: str) -> str:
    """The part of a name after its last slash, but for slashes at the end, for a file's or a
    folder's name: at most 80 characters, which are ASCII letters, digits, '.', '_' and '-'; "model"
    if nothing is left of it.
    """
    last = name.rstrip("/").rsplit("/", 1)[-1]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-.")[:80] or "model"


def why(error: Exception) -> str:
    """The reason of an error, in lower case, for the end of a sentence: "no such file or
    directory".
    """
    reason = error.strerror if isinstance(error, OSError) else None
    return (reason or str(error)).lower()


def _flush(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _file_mode() -> int:
    """The mode of new files: rw-rw-rw- without the bits of the user's umask.

    A temporary file, and a file of safetensors, can be read by its owner only.
    """
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask
