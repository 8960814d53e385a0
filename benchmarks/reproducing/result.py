"""NAME.json: the result of measuring a published comparison."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from reproducing import judging, reports
from reproducing.published import Published
from reproducing.values import values
from ssdprof import __version__
from ssdprof.environment.machine import kernels_hash
from ssdprof.errors import BadInputError
from ssdprof.measure.faults import first_line

_FOLDERS = re.compile(r"(?<![^=,])/(?:[^/,=]+/)*(?=[^/,=])")  # the part of an absolute path before the name


@dataclass(frozen=True, kw_only=True)
class Result:
    """gpu: torch's name.  missing: name of a missing measurement -> reason.  stored: the JSON document.

    origin: sentences about the origin of the numbers.
    """

    name: str
    gpu: str
    values: Mapping[str, float]
    missing: Mapping[str, str]
    wrong: tuple[str, ...] = ()
    origin: tuple[str, ...] = ()
    stored: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """The folder of this GPU's results in results/published."""
        return folder_of(self.gpu)


class Recorded(BaseModel):
    """A report that was measured before.  file: its path in benchmarks/results, or its name.  kernels: their hash, ""
    if it is unknown.  stated: whether the command line gave the hash, because the report lacks it.  report: as JSON;
    in a result it is one of the reports.
    """

    file: str
    created: str
    kernels: str
    stated: bool
    report: dict[str, Any] = Field(default_factory=dict, exclude=True)


def stored(
    name: str, document: Published, found: Mapping[str, Any], missing: Mapping[str, str], *, seconds: float,
    recorded: Mapping[str, Recorded],
) -> dict[str, Any]:  # fmt: skip
    """The JSON document of the new reports, with references to recorded ones.  `values` and `claims` are for readers;
    `load` computes them from the reports again.
    """
    plain = {
        "study": name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": typed(("python", "benchmarks/reproduce.py", *sys.argv[1:])),
        "ssdprof_version": __version__,
        "kernels": {one: kernels_hash(one) for one in ("ssd", "gdn")} if found.keys() - recorded.keys() else {},
        "seconds": round(seconds, 1),
        "missing": dict(missing),
        "recorded": {key: one.model_dump() for key, one in recorded.items()},
        "reports": _without_folders(found),
    }
    result = understood(name, document, plain)
    claims = [vars(one) for one in judging.claims(document, result.values, result.gpu)]
    return {**plain, "gpu": result.gpu, "wrong": list(result.wrong), "values": dict(result.values), "claims": claims}


def folder_of(gpu: str) -> str:
    """ "NVIDIA H200" -> "h200"."""
    return re.sub(r"\W+", "-", gpu.removeprefix("NVIDIA ").lower()).strip("-")


def typed(words: Iterable[str]) -> str:
    """A command without the folders of this machine, because results are read on other machines."""
    return shlex.join(_FOLDERS.sub("", word) for word in words)


def _without_folders(reports: Any) -> Any:
    """Removes the folders of this machine from commands in reports."""
    if isinstance(reports, list):
        return [_without_folders(one) for one in reports]
    if not isinstance(reports, dict):
        return reports
    found = {key: _without_folders(one) for key, one in reports.items()}
    if "command" in found:
        found["command"] = [_FOLDERS.sub("", word) for word in found["command"]]
    return found


def load(name: str, document: Published, file: Path) -> Result:
    """Reads the output of reproduce.py or of a runner.

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
    try:
        return understood(name, document, content)
    except (LookupError, TypeError, AttributeError, ValueError) as error:  # a key or a report of another form
        raise BadInputError(f"{file} is no whole result of {name}: {first_line(error)}.", again) from error


def understood(name: str, document: Published, content: Mapping[str, Any]) -> Result:
    if document.runner:
        gpu = (content["environment"].get("gpu") or {}).get("name", "no GPU")
        return Result(
            name=name,
            gpu=gpu,
            values=content["values"],
            missing=content["missing"],
            wrong=tuple(content.get("wrong", ())),
            origin=(f"Measured {content['created']}.",) if "created" in content else (),
            stored=content,
        )
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
        origin=tuple(_origin(content)),
        stored=content,
    )


def _origin(content: Mapping[str, Any]) -> Iterator[str]:
    """The date and the kernels of the measurement; unknown for results from before they were recorded."""
    recorded = {key: Recorded.model_validate(one) for key, one in content.get("recorded", {}).items()}
    hashes = ", ".join(f"{operator} {digest[:12]}" for operator, digest in content.get("kernels", {}).items())
    if content["reports"].keys() - recorded.keys():
        yield f"Measured {content.get('created', '')}{f', kernels {hashes}' if hashes else ''}."
    for name, one in recorded.items():
        kernels = f"kernels {one.kernels[:12]}" if one.kernels else "its kernels are not known"
        if one.stated:
            kernels += " (the record does not hold their hash: it was taken from the sources of that time)"
        created = one.created or "an unknown time"
        yield f"The measurement {name} is the record `{one.file}` of {created}, {kernels}."
