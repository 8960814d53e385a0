"""NAME.json: what a measurement of a published comparison found, whoever measured it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from reproducing import judging, reports
from reproducing.published import Published
from reproducing.values import values
from ssdprof import __version__
from ssdprof.errors import BadInputError


@dataclass(frozen=True, kw_only=True)
class Result:
    """gpu: as torch calls it.  missing: what was not measured, and why.  stored: the JSON document itself."""

    name: str
    gpu: str
    values: Mapping[str, float]
    missing: Mapping[str, str]
    wrong: tuple[str, ...] = ()
    stored: Mapping[str, Any] = field(default_factory=dict)


def stored(
    name: str, document: Published, found: Mapping[str, Any], missing: Mapping[str, str], seconds: float
) -> dict[str, Any]:
    """The JSON document of reports that were measured now.  `values` and `claims` are there for readers: whoever reads
    the file draws them from the reports again.
    """
    plain = {
        "study": name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/reproduce.py", *sys.argv[1:]]),
        "ssdprof_version": __version__,
        "seconds": round(seconds, 1),
        "missing": dict(missing),
        "reports": dict(found),
    }
    result = understood(name, document, plain)
    claims = [vars(one) for one in judging.claims(document, result.values, result.gpu)]
    return {**plain, "gpu": result.gpu, "wrong": list(result.wrong), "values": dict(result.values), "claims": claims}


def load(name: str, document: Published, file: Path) -> Result:
    """Reads what reproduce.py or a runner wrote.

    Raises BadInputError for a file that is neither, or of another comparison.
    """
    again = f"python benchmarks/reproduce.py {name} writes one."
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(f"{file} cannot be read: {error.strerror}.", again) from error
    except ValueError as error:
        raise BadInputError(f"{file} is not JSON: {error}.", again) from error
    if not isinstance(content, dict) or "study" not in content:
        raise BadInputError(f"{file} is no result of a published comparison.", again)
    if content["study"] != name:
        raise BadInputError(f"{file} is a result of {content['study']}, not of {name}.", again)
    return understood(name, document, content)


def understood(name: str, document: Published, content: Mapping[str, Any]) -> Result:
    if document.runner:
        gpu = (content["environment"].get("gpu") or {}).get("name", "no GPU")
        return Result(
            name=name, gpu=gpu, values=content["values"], missing=content["missing"], stored=content,
        )  # fmt: skip
    kinds = {one.name: one.reads for one in document.measure}
    found = {key: reports.again(kinds[key], one) for key, one in content["reports"].items() if key in kinds}
    missing = dict(content["missing"])
    for key, report in found.items():
        missing |= {f"{key}: {what}": why for what, why in reports.missing(report).items()}
    return Result(
        name=name,
        gpu=next((reports.gpu(report) for report in found.values()), "no GPU"),
        values=values(document, found),
        missing=missing,
        wrong=tuple(one for report in found.values() for one in reports.wrong(report)),
        stored=content,
    )
