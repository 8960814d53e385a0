"""Measure the selective scan on the GPU here, and judge the published claims about it.

    python benchmarks/studies/scan_003.py --out DIR [--budget SECONDS]
    python benchmarks/studies/scan_003.py --from scan-003.json

Writes scan-003.json, after each cell, and in the end scan-003.md and scan-003.svg into DIR.  mamba_ssm takes part if it
can be imported.  Every contender is compared with the scan in fp64 before it is timed; one of ours that is wrong or
fails has no time, and the exit code is then 1.  Cells for which the budget leaves no time are named.  --from writes the
pages of a result again, next to it, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from selective_scan import report
from selective_scan.cells import BATCH, DSTATE, HEADS, LOOP_LENGTHS, Cell, cells
from selective_scan.clocks import kernel_us, warm_us
from selective_scan.contenders import SEQUENTIAL, Forward, both, forward, kept_bytes, tile, tiles
from selective_scan.inputs import Layer, ScanInputs, draw_layer
from selective_scan.peer import MOST_RMS_ERROR, MambaSsm
from selective_scan.peer import NAME as PEER
from selective_scan.quoted import quoted
from selective_scan.reference import Judge, scan
from selective_scan.values import values_of
from study import Study, carried_out, end, options_of, row, timed
from study_result import gpu_of, published, save, write_pages

from ssdprof.measure.events import cuda_event
from ssdprof.measure.faults import first_line, refuse_if_lost
from ssdprof.measure.launches import counted_launches, recorded_launches
from ssdprof.report.plots.canvas import draw as drawn

NAME = "scan-003"
CELL_SECONDS = 0.8  # of sampling by our clock
WARM_SECONDS = 0.15  # of the source's clock, for each contender
LOOP = "a loop in Python"
KERNEL_TIMED = (tile(64), tile(128), PEER)  # the profiler takes long to start
Found = dict[str, torch.Tensor]
Run = Callable[[], Found]


class SelectiveScan(Study[Cell]):
    """One run of all cells."""

    def __init__(self, budget: float, folder: Path) -> None:
        super().__init__(NAME, budget, folder)
        self.launches: dict[tuple[str, str], dict[str, Any]] = {}
        self.peer = self.library(PEER, MambaSsm)

    def run(self) -> None:
        self.measure_all(cells(), words, seconds=2 * CELL_SECONDS)

    def keep(self) -> dict[str, Any]:
        """The current content of the file."""
        self.result.values |= values_of(self.result.rows, self.result.values.get("copy_gb_per_s"))
        return save(self.result, self.folder)

    def measure(self, cell: Cell) -> None:
        of_pass, seqlen = cell
        layer = draw_layer(batch=BATCH, seqlen=seqlen, heads=HEADS, dstate=DSTATE, device=self.device)
        inputs, dy = layer.scan_inputs(), None
        if of_pass == "forward and backward":
            dy = torch.randn(inputs.x.shape, device=self.device).to(inputs.x.dtype)
        runs, facts = self.verified(cell, layer, inputs, dy)
        outputs = {name: run() for name, run in runs.items()}

        def changed(name: str, found: Found) -> str:
            if name == PEER:  # its gradients are sums in a varying order
                return "" if all(bool(tensor.isfinite().all()) for tensor in found.values()) else "not finite"
            same = all(torch.equal(found[key], tensor) for key, tensor in outputs[name].items())
            return "" if same else "other bits after the timed loop"

        times, untimed, wrong = timed(runs, self.bench, CELL_SECONDS, changed)
        self.result.missing |= {f"{name}, {words(cell)}": why for name, why in (untimed | wrong).items()}
        for name, own in facts.items():
            if name in runs and name not in wrong:
                own["warm_us"], own["warm_runs"] = warm_us(runs[name], WARM_SECONDS)
                if of_pass == "forward" and name in KERNEL_TIMED:
                    own |= self.kernel_time(runs[name])
            self.result.rows.append(row({"pass": of_pass, "seqlen": seqlen}, name, times.get(name), **own))
        if of_pass == "forward" and seqlen in LOOP_LENGTHS:
            self.result.rows.append(row({"pass": of_pass, "seqlen": seqlen}, LOOP, None, wall_us=loop_us(inputs)))

    def kernel_time(self, run: Run) -> dict[str, float]:
        """Kernel time by the source's clock, for the contenders with such a time in the source."""
        us = kernel_us(run, self.bench.device)
        if us:
            return {"kernel_us": us}
        self.result.missing["times of kernels by torch's profiler"] = "it sees no kernel here"
        return {}

    def first_call(self, cell: Cell, name: str, run: Run) -> tuple[Found, dict[str, Any]]:
        """The result of a call, and its launches, which are the same for every length."""
        place = (cell[0], name)
        if place in self.launches:
            return run(), dict(self.launches[place])
        with recorded_launches() as launches, counted_launches() as launched:
            found = run()
        largest: Mapping[str, int | None] = {
            key: max((getattr(one, key) or 0 for one in launches), default=None) for key in ("registers", "spills")
        }
        self.launches[place] = {"launches": len(launched), **largest}
        return found, dict(self.launches[place])

    def verified(
        self, cell: Cell, layer: Layer, inputs: ScanInputs, dy: torch.Tensor | None
    ) -> tuple[dict[str, Run], dict[str, dict[str, Any]]]:
        """The calls with right outputs, and facts about each call."""
        runs: dict[str, Run] = {}
        facts: dict[str, dict[str, Any]] = {}
        judge = Judge(inputs, dy)
        for name, run in ours(cell, inputs, dy):
            try:
                found, facts[name] = self.first_call(cell, name, run)
            except Exception as error:  # any error of its compiler or its launch; the others continue
                refuse_if_lost(self.bench.device, name, error)
                self.result.wrong.append(f"{name}, {words(cell)}: {first_line(error)}")
                continue
            facts[name]["excess"] = max(judge.excess(found).values())
            facts[name]["rms_error"] = max(judge.rms_errors(found).values())
            if facts[name]["excess"] > 1:
                self.result.wrong.append(f"{name}, {words(cell)}: {facts[name]['excess']:.2f} of what rounding allows")
            else:
                runs[name] = run
        if cell[0] == "forward" and {SEQUENTIAL, tile(128)} <= runs.keys():
            for name, kept in kept_bytes(inputs).items():
                facts[name]["kept_bytes"] = kept
        del judge
        if self.peer and cell[0] != "tiles":
            run = peer_run(self.peer, layer, dy)
            try:
                run()  # compiles and tunes itself
                with counted_launches() as launched:
                    found = run()
                facts[PEER] = {"launches": len(launched)}
            except Exception as error:  # any error of the library; the others continue
                refuse_if_lost(self.bench.device, PEER, error)
                self.result.missing[f"{PEER}, {words(cell)}"] = first_line(error)
                return runs, facts
            errors = Judge(layer.scan_inputs(torch.float64), None if dy is None else dy.double()).rms_errors(found)
            facts[PEER]["rms_error"] = max(errors.values())
            if facts[PEER]["rms_error"] <= MOST_RMS_ERROR:
                runs[PEER] = run
            else:
                self.result.missing[f"{PEER}, {words(cell)}"] = f"its errors are {errors}"
        return runs, facts


def words(cell: Cell) -> str:
    return f"{cell[0]}, {cell[1]:,} positions"


def ours(cell: Cell, inputs: ScanInputs, dy: torch.Tensor | None) -> Iterator[tuple[str, Run]]:
    if dy is not None:
        for name, run in both().items():
            yield name, partial(run, inputs, dy)
        return
    kernels = tiles() if cell[0] == "tiles" else forward()
    for name, kernel in kernels.items():
        yield name, partial(_forward, kernel, inputs)


def _forward(kernel: Forward, inputs: ScanInputs) -> Found:
    return {"y": kernel(inputs)}


def peer_run(peer: MambaSsm, layer: Layer, dy: torch.Tensor | None) -> Run:
    if dy is None:
        return lambda: {"y": peer.forward(layer)}
    return partial(peer.forward_and_backward, layer, dy)


def loop_us(inputs: ScanInputs) -> float:
    """Microseconds of one call of a loop over positions, in fp32."""
    tensors = [tensor.float() for tensor in inputs.tensors]
    start, stop = cuda_event(), cuda_event()
    start.record()
    scan(*tensors)
    stop.record()
    stop.synchronize()
    return 1e3 * start.elapsed_time(stop)


def pages(content: Mapping[str, Any], folder: Path) -> None:
    rows, stated = content["rows"], published.load(NAME)
    sections = {"Times": quoted(stated, rows, gpu_of(content)), **report.tables(rows)}
    write_pages(content, folder, sections, drawn(partial(report.paint, rows), (9, 4.2)))


def main() -> int:
    options = options_of(__doc__, seconds=150).parse_args()
    return carried_out(NAME, options, lambda: SelectiveScan(options.budget, options.out), pages)


if __name__ == "__main__":
    end(main)
