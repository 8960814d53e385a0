"""Measure the inter-chunk state pass on the GPU here, and judge the claims of its proposal.

    python benchmarks/studies/scan_002.py --out DIR [--budget SECONDS] [--without-ncu]
    python benchmarks/studies/scan_002.py --from scan-002.json

Writes scan-002.json, after each cell, and in the end scan-002.md and scan-002.svg into DIR.  Every contender is
compared with the recurrence in fp64 before it is timed; one that is wrong or fails has no time, and the exit code is
then 1.  Cells and counters for which the budget leaves no time are named.  --from writes the pages of a result again,
next to it, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from inter_chunk import peer, report
from inter_chunk.cells import BATCH, HEADS, Cell, cells
from inter_chunk.contenders import BASELINE, NOT_AHEAD, PROPOSED, baseline_of, diagonal, of_rank
from inter_chunk.counters import Watched, count
from inter_chunk.inputs import InterChunkInputs, draw
from inter_chunk.reference import Judge
from inter_chunk.values import values_of
from study import Study, carried_out, end, options_of, row, timed
from study_result import save, write_pages

from ssdprof.errors import SsdprofError
from ssdprof.measure.faults import first_line, refuse_if_lost
from ssdprof.measure.launches import counted_launches, recorded_launches
from ssdprof.report.plots.canvas import draw as drawn
from ssdprof.schema import Launch

MOST_WATCHED_LAUNCHES = 32  # per call: ncu replays each a dozen times
NCU_SECONDS = 40
NAME = "scan-002"
CELL_SECONDS = 0.8
COUNTED = "L2 sectors, DRAM bytes and achieved occupancy"


Run = Callable[[], torch.Tensor | peer.Passed]


class StatePassing(Study[Cell]):
    """One run of all cells, then one of ncu."""

    def __init__(self, budget: float, folder: Path, *, with_ncu: bool = True) -> None:
        super().__init__(NAME, budget, folder)
        self.with_ncu = with_ncu
        self.watched: list[Watched] = []
        self.counters: list[dict[str, Any]] = []
        self.peer = self.library(peer.NAME, peer.MambaSsm)

    def run(self) -> None:
        reserved = NCU_SECONDS if self.with_ncu else 0
        self.measure_all(cells(), "the cell {}".format, seconds=CELL_SECONDS + reserved)
        if self.with_ncu:
            self.count()
        else:
            self.result.missing[COUNTED] = "not asked for"

    def keep(self) -> dict[str, Any]:
        """The current content of the file."""
        self.result.values |= values_of(self.result.rows, self.counters)
        self.result.more["counters"] = self.counters
        return save(self.result, self.folder)

    def measure(self, cell: Cell) -> None:
        inputs = draw(
            batch=BATCH, chunks=cell["chunks"], heads=HEADS, dim=cell["dim"], rank=cell["rank"], device=self.device
        )
        judge, kernels = Judge(inputs), (of_rank if cell["rank"] else diagonal)(cell["dim"])
        found, counts, facts, outputs = {}, {}, {}, {}
        with recorded_launches() as launches:  # one compiled kernel for each contender
            for name, kernel in kernels.items():
                try:
                    with counted_launches() as launched:
                        found[name] = kernel(inputs)
                except Exception as error:  # any error of its compiler or its launch; the others continue
                    refuse_if_lost(self.bench.device, name, error)
                    self.result.wrong.append(f"{name} at {cell}: {first_line(error)}")
                    continue
                counts[name] = len(launched)
        for (name, out), launch in zip(found.items(), launches, strict=True):
            facts[name] = facts_of(launch, counts[name], judge, out)
            if facts[name]["excess"] > 1:
                self.result.wrong.append(f"{name} at {cell}: {facts[name]['excess']:.2f} of what rounding allows")
                continue
            outputs[name] = out
            self.watch(cell, name, [launch.kernel] * counts[name])
        baselines = {name: outputs[base] for name in outputs if (base := baseline_of(name)) in outputs}
        for name, out in outputs.items():
            facts[name]["same_bits"] = name in baselines and torch.equal(out, baselines[name])
        floor_us = inputs.least_bytes() / self.result.values["copy_gb_per_s"] / 1e3

        runs: dict[str, Run] = {name: partial(kernels[name], inputs) for name in outputs}
        run, known = self.peer_call(cell, inputs)
        if known:
            facts[peer.NAME] = known
        if run:
            runs[peer.NAME] = run
        firsts = {name: run() for name, run in runs.items()}

        def changed(name: str, out: torch.Tensor | peer.Passed) -> str:
            now, first = ((one,) if isinstance(one, torch.Tensor) else one for one in (out, firsts[name]))
            return "" if all(map(torch.equal, now, first)) else "other bits after the timed loop"

        times, untimed, wrong = timed(runs, self.bench, CELL_SECONDS, changed)
        self.result.missing |= {f"{name} at {cell}": why for name, why in (untimed | wrong).items()}
        for name in facts:
            self.result.rows.append(row(cell, name, times.get(name), **facts[name], floor_us=floor_us))

    def peer_call(self, cell: Cell, inputs: InterChunkInputs) -> tuple[Run | None, dict[str, Any]]:
        """A call on the same states, with one decay for each chunk and head, and facts about it.

        None if the library is missing, wrong, or raises an error; the others continue.
        """
        if self.peer is None or cell["rank"]:
            return None, {}
        own = peer.scalar(inputs)
        run = partial(self.peer.run, *peer.arguments(own))
        try:
            run()  # tunes itself
            with recorded_launches() as launches, counted_launches() as launched:
                out = peer.leaving(run(), own)
        except Exception as error:
            refuse_if_lost(self.bench.device, peer.NAME, error)
            self.result.missing[f"{peer.NAME} at {cell}"] = first_line(error)
            return None, {}
        known = facts_of(launches[0], len(launched), Judge(own), out)
        if known["excess"] > 1:
            self.result.missing[f"{peer.NAME} at {cell}"] = "its output is not right"
            return None, known
        return run, known

    def watch(self, cell: Cell, name: str, kernels: list[str]) -> None:
        if not cell["rank"] and len(kernels) <= MOST_WATCHED_LAUNCHES and wanted(cell, name):
            self.watched.append(Watched(contender=name, chunks=cell["chunks"], dim=cell["dim"], kernels=tuple(kernels)))

    def count(self) -> None:
        """Counts with ncu, in another process."""
        try:
            self.counters = count(self.watched, timeout_s=max(self.left, 20.0))
        except SsdprofError as error:
            self.result.missing[COUNTED] = f"{error.message} {error.hint}"


def facts_of(launch: Launch, count: int, judge: Judge, out: torch.Tensor) -> dict[str, Any]:
    """Facts about a contender in addition to its time."""
    return {
        "launches": count,
        **launch.model_dump(include={"registers", "spills", "shared_bytes"}),
        "excess": judge.excess(out),
        "rms_error": judge.rms_error(out),
    }


def wanted(cell: Cell, name: str) -> bool:
    """Whether ncu profiles it: every contender at one size, those of the criteria at their sizes."""
    criteria = cell["chunks"] in (32, 64, 128) and name in (BASELINE, NOT_AHEAD, PROPOSED)
    return (cell["dim"] == 64 and (criteria or cell["chunks"] == 32)) or (cell["chunks"] == 64 and criteria)


def pages(content: Mapping[str, Any], folder: Path) -> None:
    rows, counters = content["rows"], content.get("counters", ())
    write_pages(content, folder, report.tables(rows, counters), drawn(partial(report.paint, rows), (11, 4.6)))


def main() -> int:
    parser = options_of(__doc__, seconds=180)
    parser.add_argument("--without-ncu", action="store_true")
    options = parser.parse_args()
    with torch.no_grad():
        return carried_out(
            NAME, options, lambda: StatePassing(options.budget, options.out, with_ncu=not options.without_ncu), pages
        )


if __name__ == "__main__":
    end(main)
