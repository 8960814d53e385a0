"""Combines gates of the command line and the settings file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ssdprof.errors import BadInputError, nearest
from ssdprof.schema import Gates
from ssdprof.schema.gates import TOLERANCE_NAMES
from ssdprof.settings import find

_EXAMPLE = "Give TOLERANCE:PERCENT, such as 1e-3:99."


def parse_matches(words: list[str]) -> dict[str, float]:
    """ "1e-3:99" -> {"1e-3": 99.0}.  Raises BadInputError."""
    found = {}
    for word in words:
        tolerance, colon, share = word.partition(":")
        if not colon or tolerance not in TOLERANCE_NAMES:
            hint = nearest(tolerance, TOLERANCE_NAMES) if colon else _EXAMPLE
            raise BadInputError(f"--min-match does not know {word!r}.", hint)
        try:
            least = float(share.removesuffix("%"))
        except ValueError:
            least = math.nan
        if not 0 <= least <= 100:
            raise BadInputError(f"--min-match has no percentage in {word!r}.", _EXAMPLE)
        found[tolerance] = least
    return found


def chosen(
    config: Path | None,
    *,
    min_speedup: float | None = None,
    min_match: list[str] | None = None,
    max_rms_ratio: float | None = None,
) -> Gates:
    """The gates of the command line, completed by those of the settings file.  Raises BadInputError."""
    stored = find.load(config).gates
    given = {
        "min_speedup": min_speedup,
        "min_match": parse_matches(min_match) if min_match else None,
        "max_rms_ratio": max_rms_ratio,
    }
    return Gates.model_validate(stored.model_dump() | _set(given))


def of_prefill(config: Path | None, min_speedup: float | None) -> Gates:
    """The gate of prefill times: from the command line, else from the settings file.  Raises BadInputError."""
    stored = find.load(config).prefill.min_speedup
    return Gates(min_speedup=stored if min_speedup is None else min_speedup)


def of_accuracy(limits: Gates, of_run: Gates) -> Gates:
    """The gates of a run, with gates on accuracy replaced by those of `limits`."""
    given = {"min_match": limits.min_match or None, "max_rms_ratio": limits.max_rms_ratio}
    return of_run.model_copy(update=_set(given))


def _set(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}
