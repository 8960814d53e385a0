"""Files that are whole or not there, and what a user is told when one cannot be written."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from ssdprof.errors import BadInputError, MissingCapabilityError


def write_text(file: Path, text: str, *, replace: bool = True) -> None:
    """Write a whole file or none of it: a temporary file beside it, flushed to the disk, then renamed.

    replace: False refuses a file that exists.
    Raises BadInputError if it exists or its folder does not; MissingCapabilityError if it cannot be written.
    """
    check_target(file, replace=replace)
    try:
        if file.exists() and not file.is_file():  # a pipe or a device: there is nothing to replace
            file.write_text(text, encoding="utf-8")
        else:
            _replace(file.resolve(), text)
    except OSError as error:
        raise unwritable(file, error) from error


def check_target(file: Path, *, replace: bool) -> None:
    """What `write_text` raises for a file that cannot be written, before there is something to write."""
    if file.is_dir():
        raise BadInputError(f"{file} is a folder.", "Name a file.")
    if not file.parent.is_dir():
        raise BadInputError(f"There is no folder {file.parent}.", "Create it, or write somewhere else.")
    if file.is_file() or not file.exists():
        check_writable(file.parent)
    if file.is_file() and not replace:
        raise BadInputError(f"{file} exists.", "Give --force to overwrite it, or another name with -o.")


def check_writable(folder: Path) -> None:
    """MissingCapabilityError for a folder, there or still to be made, that this user may not write into."""
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    if not os.path.isdir(there):
        raise unwritable(folder, NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)))
    if not os.access(there, os.W_OK | os.X_OK):
        raise unwritable(folder, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def unwritable(path: Path, error: OSError) -> MissingCapabilityError:
    """What the user is told when `path` cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return MissingCapabilityError(
            f"The disk is full: {path} could not be written.",
            "Free some space, or write to another disk.  What was written before is whole.",
        )
    return MissingCapabilityError(
        f"{path} cannot be written: {why(error)}.", "Check the permissions, or write somewhere else."
    )


def safe_name(model: str) -> str:
    """The last part of a model's name as part of a folder's name: letters, digits, '.', '_' and '-'."""
    last = model.rstrip("/").rsplit("/", 1)[-1]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-.")[:80] or "model"


def _replace(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename itself survives a power cut
        finally:
            os.close(folder)
    finally:
        temporary.unlink(missing_ok=True)


def why(error: Exception) -> str:
    """What went wrong, in the words of the operating system where it says so."""
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error)).lower()
