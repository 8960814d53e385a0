"""The result of a study: its record, its three files, and their tables."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tabulate import tabulate

sys.path.append(str(Path(__file__).parents[1]))  # for `reproducing`; Python searches only the runner's folder
from reproducing import judging, published, rendering
from reproducing import result as results

from ssdprof import __version__
from ssdprof.environment import machine
from ssdprof.errors import BadInputError
from ssdprof.files import write_text


@dataclass(kw_only=True)
class Result:
    """The result of a runner.

    rows: a record per cell and contender.  values: the values for claims, by name.  wrong: our wrong outputs.
    missing: missing measurement -> reason.  more: other content of the file.
    """

    study: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def document(self) -> dict[str, Any]:
        words = ("python", f"benchmarks/studies/{Path(sys.argv[0]).name}", *sys.argv[1:])
        return {
            "study": self.study,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": results.typed(words),
            "ssdprof_version": __version__,
            "environment": machine.collect().model_dump(mode="json"),
            "seconds": round(self.seconds, 1),
            "values": self.values,
            "missing": self.missing,
            "wrong": self.wrong,
            "rows": self.rows,
            **self.more,
        }


def number(value: Any) -> str:
    """A cell of a table: floats have four or five significant digits, None is empty."""
    if isinstance(value, float):
        return judging.number(value)
    return "" if value is None else str(value)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Markdown, without the columns that are empty."""
    lines = [[number(cell) for cell in line] for line in rows]
    kept = [i for i in range(len(head)) if any(line[i] for line in lines)]
    cut = [[line[i] for i in kept] for line in lines]
    return tabulate(cut, [head[i] for i in kept], "pipe", disable_numparse=True)


def ticks(panel: Any, values: Iterable[int]) -> None:
    """Ticks only at the measured points of a logarithmic x axis, and at 1, 2 and 5 of each decade of the y axis."""
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    places = sorted(set(values))
    panel.set_xticks(places, [f"{place:,}" for place in places], rotation=45 if max(places, default=0) > 999 else 0)
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    panel.minorticks_off()


def gpu_of(content: Mapping[str, Any]) -> str:
    """torch's name of the GPU that measured a result; "no GPU" if there was none."""
    return results.understood(content["study"], published.load(content["study"]), content).gpu


def save(result: Result, folder: Path) -> dict[str, Any]:
    """Writes <study>.json, complete or partial, and returns its content."""
    content = result.document()
    stated = published.load(result.study)
    understood = results.understood(result.study, stated, content)
    content["claims"] = [vars(one) for one in judging.claims(stated, understood.values, understood.gpu)]
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{result.study}.json", json.dumps(content, indent=1) + "\n")
    return content


def write_pages(content: Mapping[str, Any], folder: Path, sections: Mapping[str, str], plot: str) -> None:
    """Writes <study>.md, with its claims first, and <study>.svg, from the content of <study>.json."""
    name = content["study"]
    stated = published.load(name)
    page = rendering.as_markdown(stated, results.understood(name, stated, content), sections)
    write_text(folder / f"{name}.svg", plot)
    write_text(folder / f"{name}.md", page)
    print(page)


def stored(study: str, file: Path) -> dict[str, Any]:
    """The content of a file from `save`.  Raises BadInputError for any other file."""
    content = dict(results.load(study, published.load(study), file).stored)
    if "rows" not in content:
        raise BadInputError(f"{file} has no rows: it is no result of a runner.", "Give the JSON file that --out wrote.")
    return content
