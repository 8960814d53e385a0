"""Reads files that `ssdprof bench --out` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ssdprof import files
from ssdprof.errors import BadInputError

if TYPE_CHECKING:
    from ssdprof.bench.schema import BenchReport


def is_bench(file: Path) -> bool:
    """Whether the file is a bench.  False for a file that is not JSON: the reader of runs refuses it."""
    return files.has_key(file, "cells")


def read(file: Path) -> BenchReport:
    """Raises BadInputError, with the file's name, for any other content."""
    from ssdprof.bench.schema import load  # torch comes with it

    try:
        return load(file.read_text(encoding="utf-8"))
    except BadInputError as error:
        raise BadInputError(f"{file}: {error.message}", error.hint) from error
