"""Measure, on this machine's GPU, how often verdicts are wrong, how often real differences are
found, and the cost.

    PYTHONPATH=. python benchmarks/verdicts.py benchmarks/results/verdicts-h100.json

same:      a kernel against itself; any verdict but "no difference" is false.
different: a kernel with a short wait against the same with a longer one, which makes its device
           time 2 % longer when it is replayed, and its call time 2 % longer when it is called.  (2
           % more tokens do not: segments and waves of programs are whole.)

Writes FILE in JSON, and prints a table.  Shapes, lengths and implementations are compared in a
random order; --seconds ends this early, and then the result has the number of comparisons.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabulate import tabulate
from verdict_comparisons import DIFFERENCE, Place, Row, different, same

from ssdprof import __version__
from ssdprof.environment.machine import collect, kernels_hash
from ssdprof.jobs.options import COMPARED
from ssdprof.measure.timing import CudaTimer

SHAPES = {
    "ssd": ("mamba2-2.7b", "granite-4.0-h-small", "nemotron-3-nano"),
    "gdn": ("qwen3.5-9b", "qwen3.5-27b", "olmo-hybrid-7b"),
}
LENGTHS = (1024, 4096, 16384, 65536)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--same",
        type=int,
        default=100,
        help="comparisons of a kernel with itself, of each operator",
    )
    parser.add_argument(
        "--different", type=int, default=100, help="comparisons with a true difference"
    )
    parser.add_argument(
        "--seconds", type=float, default=480, help="after which no comparison is begun"
    )
    options = parser.parse_args()
    began = time.monotonic()
    found = measure({"same": options.same, "different": options.different}, options.seconds)
    result: dict[str, Any] = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python benchmarks/verdicts.py {' '.join(sys.argv[1:])}",
        "ssdprof_version": __version__,
        "kernels": {operator: kernels_hash(operator) for operator in SHAPES},
        "environment": collect().model_dump(mode="json"),
        "seconds": time.monotonic() - began,
        "difference": DIFFERENCE,
        **found,
    }
    options.file.write_text(text_of(result))
    print(tabulate(summary(found), ["what", "time", "must be", "is"], tablefmt="pipe"))


def text_of(result: dict[str, Any]) -> str:
    """JSON, with a line for each comparison."""
    fields = []
    for name, value in result.items():
        rows = (
            [json.dumps(row, separators=(",", ":")) for row in value]
            if isinstance(value, list)
            else None
        )
        text = json.dumps(value) if rows is None else "[\n" + ",\n".join(rows) + "\n]"
        fields.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def measure(counts: dict[str, int], seconds: float) -> dict[str, list[Row]]:
    timer = CudaTimer(torch.device("cuda"))
    end = time.monotonic() + seconds
    found: dict[str, list[Row]] = {"same": [], "different": []}
    wanted, began = list(jobs(counts)), time.monotonic()
    for number, (kind, place) in enumerate(wanted):
        if time.monotonic() > end:
            print("The time is up.", file=sys.stderr)
            break
        row = {"same": same, "different": different}[kind](timer, place, number)
        found[kind].append(row)
        if number % 20 == 19:
            now = time.monotonic()
            needed = (now - began) / (number + 1) * (len(wanted) - number - 1)
            said = (
                f"{number + 1} of {len(wanted)}; {end - now:.0f} s left, the others need "
                f"about {needed:.0f} s"
            )
            print(said, kind, row, file=sys.stderr, flush=True)
    return found


def jobs(counts: dict[str, int]) -> Iterator[tuple[str, Place]]:
    """Jobs of both kinds, mixed, each spread evenly over shapes, lengths and implementations."""
    draw = random.Random(0)
    wanted: list[tuple[str, Place]] = []
    for (operator, shapes), (kind, count) in product(SHAPES.items(), counts.items()):
        places = list(product([operator], shapes, LENGTHS, COMPARED))
        draw.shuffle(places)
        wanted += [(kind, place) for place, _ in zip(cycle(places), range(count), strict=False)]
    draw.shuffle(wanted)
    yield from wanted


def summary(found: dict[str, list[Row]]) -> list[tuple[str, str, str, str]]:
    """(question, clock, bar, result) for each question."""
    rows = []
    for operator, time_of in product(SHAPES, ("device", "call")):
        own = {
            kind: [row[time_of]["verdict"] for row in found[kind] if row["operator"] == operator]
            for kind in found
        }
        false, hits = (
            sum(one != "no difference" for one in own["same"]),
            own["different"].count("faster"),
        )
        rows.append(
            (
                f"{operator}, the same kernel: false verdicts",
                time_of,
                "<= 2%",
                share(false, len(own["same"])),
            )
        )
        bar = ">= 95%" if time_of == "device" else ""  # which verdicts are by
        rows.append(
            (f"{operator}, 2% longer: found", time_of, bar, share(hits, len(own["different"])))
        )
    for kind, title in (
        ("same", "a comparison of a kernel with itself"),
        ("different", "a comparison, 2% longer"),
    ):
        seconds = [row["seconds"] for row in found[kind]] or [0.0]
        rows.append((title, "", "", f"{np.mean(seconds):.2f} s, at most {max(seconds):.2f} s"))
    return rows


def share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.1f}%)" if whole else "none compared"


if __name__ == "__main__":
    main()
