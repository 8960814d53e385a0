"""What the runners of the studies share: timing calls in turns, judging claims, and the files of a result."""

from __future__ import annotations

import json
import re
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tabulate import tabulate

from ssdprof import __version__, environment
from ssdprof.environment.machine import gpu
from ssdprof.errors import ExitCode
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.timing import CudaBench, time_in_turns

INTERRUPTED = 130
PUBLISHED = Path(__file__).parent.parent / "published"
_COMPARISON = re.compile(r"(\w+) (<=|>=|<|>|==) (-?\d+(?:\.\d+)?)")
_HOLDS: dict[str, Callable[[float, float], bool]] = {
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "==": lambda a, b: a == b,
}


@dataclass(frozen=True, kw_only=True)
class Time:
    """Medians, from a cold L2; low and high: 95 % interval of the device time.  See docs/measuring.md."""

    device_us: float
    device_low_us: float
    device_high_us: float
    call_us: float


@dataclass(kw_only=True)
class Result:
    """What a runner found.

    rows: a record per cell and contender.  values: the numbers that claims are about, by name.  wrong: outputs of ours.
    missing: what was not measured, and why.  more: what else belongs into the file.
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
        return {
            "study": self.study,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": f"python benchmarks/studies/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".strip(),
            "ssdprof_version": __version__,
            "environment": environment.collect().model_dump(mode="json"),
            "seconds": round(self.seconds, 1),
            "values": self.values,
            "missing": self.missing,
            "wrong": self.wrong,
            "rows": self.rows,
            **self.more,
        }


def timed(
    runs: Mapping[str, Callable[[], Any]], bench: CudaBench, seconds: float, wrong: Callable[[str, Any], str]
) -> tuple[dict[str, Time], dict[str, str], dict[str, str]]:
    """Times of calls, taken in turns for about `seconds`; why others have none; and what is wrong with an output.

    wrong(key, output): "" if the output is right, asked after the timed loop.
    """
    session = time_in_turns(runs, bench, SamplingPlan(seconds=seconds), check=wrong)
    found = {}
    for key, sampled in session.sampled.items():
        timing = sampled.timing()
        found[key] = Time(
            device_us=timing.device_median_us,
            device_low_us=timing.device_interval_us.low,
            device_high_us=timing.device_interval_us.high,
            call_us=timing.call_median_us,
        )
    return found, session.untimed, session.changed


def row(cell: Mapping[str, Any], contender: str, time_of: Time | None, **more: Any) -> dict[str, Any]:
    """A record of `Result.rows`."""
    return {**cell, "contender": contender, **(asdict(time_of) if time_of else {}), **more}


def measured(result: Result, run: Callable[[], None]) -> bool:
    """Runs it, until it is interrupted: what it found by then is kept.  Whether it came to its end."""
    try:
        run()
    except KeyboardInterrupt:
        result.missing["what comes after"] = "the run was interrupted"
        return False
    return True


def exit_code(result: Result, finished: bool) -> int:
    """1 for a wrong output, 130 for an interruption; says on stderr what is wrong."""
    for line in result.wrong:
        print(f"wrong: {line}", file=sys.stderr)
    if result.wrong:
        return int(ExitCode.GATE_FAILED)
    return int(ExitCode.OK) if finished else INTERRUPTED


# --- claims


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A published claim beside what was measured."""

    claim: str
    quoted: str
    measured: str
    verdict: str
    note: str = ""


def published(study: str) -> dict[str, Any]:
    """What benchmarks/published states of a study."""
    return tomllib.loads((PUBLISHED / f"{study}.toml").read_text(encoding="utf-8"))


def verdicts(document: Mapping[str, Any], values: Mapping[str, float], gpu: str) -> list[Verdict]:
    """Every claim of a published document: inside or outside what was quoted, other GPU, or not measured.

    gpu: the one that measured.  A claim about a time holds for the quoted GPU alone, one about a ratio for any.
    """
    return [_verdict(claim, values, claim.get("gpu", document["gpu"]) not in gpu) for claim in document["claim"]]


def _verdict(claim: Mapping[str, Any], values: Mapping[str, float], other_gpu: bool) -> Verdict:
    comparisons = _COMPARISON.findall(claim.get("holds", ""))
    names = list(dict.fromkeys(name for name, _, _ in comparisons))
    absent = [name for name in names if name not in values]
    if not comparisons or absent:
        verdict, measured = "not measured", claim.get("why", f"missing: {', '.join(absent)}")
    else:
        holds = all(_HOLDS[sign](values[name], float(bound)) for name, sign, bound in comparisons)
        verdict = "inside" if holds else "outside"
        if other_gpu:
            verdict = "other GPU" if claim.get("absolute") else f"{verdict} (other GPU)"
        measured = ", ".join(f"{name} {number(values[name])}" for name in names)
    return Verdict(
        claim=claim["words"], quoted=claim["quoted"], measured=measured, verdict=verdict, note=claim.get("note", "")
    )


# --- files


def number(value: Any) -> str:
    """Four significant digits."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Markdown, without the columns that are empty."""
    lines = [[number(cell) for cell in line] for line in rows]
    kept = [i for i in range(len(head)) if any(line[i] for line in lines)]
    cut = [[line[i] for i in kept] for line in lines]
    return tabulate(cut, [head[i] for i in kept], "pipe", disable_numparse=True)


def ticks(panel: Any, values: Iterable[int]) -> None:
    """Names the measured places of a logarithmic x axis, and no others."""
    places = sorted(set(values))
    panel.set_xticks(places, [f"{place:,}" for place in places], rotation=45 if max(places, default=0) > 999 else 0)
    panel.minorticks_off()


def gpu_name() -> str:
    """As torch calls the current GPU; "no GPU" if there is none."""
    found = gpu()
    return found.name if found else "no GPU"


def write(result: Result, folder: Path, sections: Mapping[str, str], plot: str) -> None:
    """<study>.json, <study>.md with its claims first, and <study>.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    document, stated = result.document(), published(result.study)
    machine = document["environment"]
    versions, packages = machine["gpu"] or {"driver": "none", "cuda": "none"}, machine["packages"]
    name = gpu_name()
    found = verdicts(stated, result.values, name)
    document["claims"] = [asdict(one) for one in found]
    missing = "\n".join(f"- {what}: {why}" for what, why in result.missing.items())
    lines = [
        f"# {stated['title']}",
        f"{stated['source']}  Quoted from {stated['gpu']}; measured on {name}.",
        f"![{stated['title']}]({result.study}.svg)",
        *(("## Wrong outputs", "\n".join(f"- {one}" for one in result.wrong)) if result.wrong else ()),
        "## Claims",
        table(
            ("claim", "quoted", "measured", "verdict"),
            ((one.claim, one.quoted, one.measured, one.verdict) for one in found),
        ),
        "\n".join(f"- {one.claim}: {one.note}" for one in found if one.note),
        "## What the source leaves open, and what was chosen",
        "\n".join(f"- {choice}" for choice in stated["choices"]),
        *(part for title, text in sections.items() if text for part in (f"## {title}", text)),
        *(("## Not measured", missing) if missing else ()),
        f"{name}, driver {versions['driver']}, CUDA {versions['cuda']}, torch {packages['torch']}, Triton "
        f"{packages['triton']}, Python {machine['python']}; {document['created']}; {document['seconds']} s; "
        f"`{document['command']}`.",
    ]
    (folder / f"{result.study}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (folder / f"{result.study}.md").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    (folder / f"{result.study}.svg").write_text(plot, encoding="utf-8")
