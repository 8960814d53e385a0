"""Reads a file with NVIDIA's ncu-report package, in a separate process.

    python -m ssdprof.stalls.unpack FILE OUT         OUT gets the launches, as JSON

The process is separate because the package is compiled code: a damaged file can crash it, and an intact file
crashes it if torch is loaded too (with 2025.3.1).  So this module imports neither torch nor anything that does.
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ssdprof.stalls.raw import SAMPLED, Point, RawKernel, Value
from ssdprof.stalls.reasons import canonical

NOT_INSTALLED = 9  # exit code
_TO_BASE = {"s": 1e9, "ms": 1e6, "us": 1e3, "ns": 1.0, "second": 1e9, "msecond": 1e6, "usecond": 1e3, "nsecond": 1.0}


def main() -> None:
    try:
        import ncu_report
    except ImportError:
        sys.exit(NOT_INSTALLED)
    file, out = map(Path, sys.argv[1:])
    out.write_text(json.dumps([asdict(kernel) for kernel in kernels(ncu_report, file)]), encoding="utf-8")


def parse(text: str) -> tuple[RawKernel, ...]:
    """Reads the output of `main`."""
    return tuple(
        RawKernel(**(fields | {"points": tuple(Point(**point) for point in fields["points"])}))
        for fields in json.loads(text)
    )


def kernels(ncu_report: Any, path: Path) -> Iterator[RawKernel]:
    """Every launch in the file, by the module `ncu_report`."""
    context = ncu_report.load_report(str(path))
    for i in range(context.num_ranges()):
        profiled = context.range_by_idx(i)
        for j in range(profiled.num_actions()):
            yield _kernel(profiled.action_by_idx(j))


def _kernel(action: Any) -> RawKernel:
    names = [name for name in action.metric_names() if "TriageCompute" not in name]
    metrics: dict[str, Value] = {}
    totals: dict[str, int] = {}
    samples: dict[int, dict[str, int]] = defaultdict(dict)
    for name in names:
        metric = action.metric_by_name(name)
        if name.startswith(SAMPLED) and not name.endswith("_not_issued"):
            reason = canonical(name.removeprefix(SAMPLED))
            totals[reason] = totals.get(reason, 0) + int(metric.value() or 0)
            addresses = metric.correlation_ids()
            for k in range(metric.num_instances()):
                count, at = metric.as_uint64(k), samples[addresses.as_uint64(k)]
                if count:
                    at[reason] = at.get(reason, 0) + count
        value = _value(metric)
        if value is not None:
            metrics[name] = value
    return RawKernel(
        function=action.name(),
        metrics=metrics,
        totals=totals,
        points=tuple(_point(action, address, samples[address]) for address in sorted(samples)),
        sources={name: text for name, text in dict(action.source_files().asdict()).items() if text},
    )


def _value(metric: Any) -> Value | None:
    """A metric's value in base units; None if it has no number."""
    value = metric.value()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int | float) and metric.name().startswith("gpu__time"):
        return value * _TO_BASE.get(metric.unit(), 1.0)
    return value if isinstance(value, int | float | str) else None


def _point(action: Any, address: int, samples: dict[str, int]) -> Point:
    source = action.source_info(address)
    return Point(
        address=address,
        file=source.file_name() if source else "",
        line=source.line() if source else 0,
        sass=" ".join((action.sass_by_pc(address) or "").split()),
        samples=samples,
    )


if __name__ == "__main__":
    main()
