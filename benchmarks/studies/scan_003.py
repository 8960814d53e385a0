"""Measure the selective scan on the GPU here: the kernels of selective_scan.py, forward and
backward.

    python benchmarks/studies/scan_003.py --out DIR [--budget SECONDS]

Writes DIR/scan-003.json after each cell.  mamba_ssm takes part if it can be imported.  Every
contender is compared with the scan in fp64 before it is timed; one of ours that is wrong or fails
has no time, and the exit code is then 1.  Cells for which the budget leaves no time are named.  A
copy in benchmarks/results/ fills the claims (benchmarks/claims.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from selective_scan import (
    PARALLEL,
    ScanInputs,
    ScanLayer,
    draw_layer,
    judge,
    parallel,
    run_both,
    scan,
    sequential,
)
from study import Study, end, options_of, timed

from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.adapters import load_mamba_ssm
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.measure.first_run import (
    counted_launches,
    first_line,
    recorded_launches,
    refuse_if_lost,
)
from ssdprof.measure.timing import elapsed_us
from ssdprof.measure.trace import traced, work

BATCH, HEADS, DSTATE = 16, 8, 64  # the sizes of the source
FORWARD_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
BOTH_LENGTHS = (2048, 4096, 8192, 16384, 32768)
TILES, TILES_LENGTH = (64, 128, 256, 512), 8192
LOOP_LENGTHS = (512, 1024, 2048, 4096)  # for a loop in Python, which takes a second for 8,192
CELL_SECONDS = 0.8  # of sampling by our clock
WARM_SECONDS = 0.15  # of the source's clock, for each contender
WARM_UP, RUNS, LEAST_RUNS, TRACED_RUNS = 100, 500, 5, 10
CLOCKS = ("warm", "device", "call", "kernel")  # warm, kernel: the source's; device, call: ours
BYTES_PER_POSITION = 392  # per head: from the source's GB/s and milliseconds
PEER_CHUNK = 256  # mamba_ssm's default
MOST_RMS_ERROR = 0.02  # five roundings to bf16: mamba_ssm's products take bf16 operands
SEQUENTIAL, NO_STATES, LIBRARY, LOOP = (
    "sequential",
    "parallel, BLOCK_T 128, no states",
    "mamba_ssm",
    "a loop in Python",
)
Pass = Literal["forward", "tiles", "forward and backward"]
Cell = tuple[Pass, int]  # pass, length
Found = dict[str, torch.Tensor]
Run = Callable[[], Found]
Row = Mapping[str, Any]


def cells() -> Iterator[Cell]:
    """Cells of most claims come first; if the time runs out, later cells are not measured."""
    yield from (("forward", seqlen) for seqlen in (32768, 2048, 512, 8192))
    yield ("tiles", TILES_LENGTH)
    yield from (("forward and backward", seqlen) for seqlen in (32768, 2048, 8192))
    yield from (("forward", seqlen) for seqlen in (1024, 4096, 16384))
    yield from (("forward and backward", seqlen) for seqlen in (4096, 16384))


def words(cell: Cell) -> str:
    return f"{cell[0]}, {cell[1]:,} positions"


def tile(block_t: int, warps: int = PARALLEL.num_warps) -> str:
    """The name of the parallel form with these tiles."""
    return f"parallel, BLOCK_T {block_t}" + (
        "" if warps == PARALLEL.num_warps else f", {warps} warps"
    )


KERNEL_TIMED = (tile(64), tile(128), LIBRARY)  # the profiler takes long to start


def _parallel(
    inputs: ScanInputs, block_t: int, warps: int = PARALLEL.num_warps, *, keeps_states: bool = True
) -> Found:
    config = replace(PARALLEL, block_t=block_t, num_warps=warps)
    return {"y": parallel(inputs, keeps_states=keeps_states, config=config)[0]}


def _sequential(inputs: ScanInputs) -> Found:
    return {"y": sequential(inputs)[0]}


def ours(cell: Cell, inputs: ScanInputs, dy: torch.Tensor | None) -> dict[str, Run]:
    """Calls by name.  The states for the gradients are computed too, except for `NO_STATES`.

    tiles: the parallel form with tiles of several sizes, the larger ones also with more warps.
    """
    of_tiles = partial(_parallel, inputs)
    if cell[0] == "tiles":
        wanted = [*((t, PARALLEL.num_warps) for t in TILES), (256, 8), (512, 8)]
        return {tile(t, w): partial(of_tiles, t, w) for t, w in wanted}
    if dy is None:
        return {
            SEQUENTIAL: partial(_sequential, inputs),
            tile(64): partial(of_tiles, 64),
            tile(128): partial(of_tiles, 128),
            NO_STATES: partial(of_tiles, 128, keeps_states=False),
        }
    return {
        SEQUENTIAL: partial(run_both, inputs, dy, form="sequential"),
        tile(128): partial(run_both, inputs, dy, form="parallel"),
    }


class MambaSsm:
    """mamba_ssm's Triton kernels for Mamba-2 on the same scan: heads of one channel, a group of B
    and C for each head.

    Its selective scan (Mamba-1) is a compiled extension; the source compares with these.  Raises
    ImportError if the library, or a package that it needs, is missing.
    """

    def __init__(self) -> None:
        self._forward = load_mamba_ssm()
        self._combined = import_module(
            "mamba_ssm.ops.triton.ssd_combined"
        ).mamba_chunk_scan_combined

    def call(self, layer: ScanLayer, dy: torch.Tensor | None) -> Run:
        """y; with a gradient also dB and dC, and the gradients of x and dt are computed too."""
        return partial(self._y, layer) if dy is None else partial(self._both, layer, dy)

    def _y(self, layer: ScanLayer) -> Found:
        inputs = SSDInputs(
            x=layer.x[..., None],
            dt=layer.dt,
            A=layer.A,
            B=layer.B,
            C=layer.C,
            chunk_size=PEER_CHUNK,
        )
        return {"y": self._forward.run(inputs, Precision(state_dtype=layer.C.dtype)).out[..., 0]}

    def _both(self, layer: ScanLayer, dy: torch.Tensor) -> Found:
        leaves = [
            tensor.detach().requires_grad_() for tensor in (layer.x, layer.dt, layer.B, layer.C)
        ]
        x, dt, B, C = leaves
        y = self._combined(x[..., None], dt, layer.A, B, C, PEER_CHUNK)[..., 0]
        _, _, dB, dC = torch.autograd.grad(y, leaves, dy)
        return {"y": y.detach(), "dB": dB, "dC": dC}


class SelectiveScan(Study[Cell]):
    """One run of all cells."""

    name = "scan-003"

    def __init__(self, budget: float, folder: Path) -> None:
        super().__init__(budget, folder)
        self.launches: dict[tuple[str, str], dict[str, Any]] = {}
        self.mamba_ssm = self.library(LIBRARY, MambaSsm)

    def run(self) -> None:
        self.measure_all(cells(), words, seconds=2 * CELL_SECONDS)

    def values_so_far(self) -> dict[str, float]:
        return values_of(self.rows, self.values.get("copy_gb_per_s"))

    def measure(self, cell: Cell) -> None:
        of_pass, seqlen = cell
        layer = draw_layer(
            batch=BATCH, seqlen=seqlen, heads=HEADS, dstate=DSTATE, device=self.device
        )
        inputs, dy = layer.scan_inputs(), None
        if of_pass == "forward and backward":
            dy = torch.randn(inputs.x.shape, device=self.device).to(inputs.x.dtype)
        runs, facts = self.verified(cell, layer, inputs, dy)
        outputs = {name: run() for name, run in runs.items()}

        def changed(name: str, found: Found) -> str:
            if name == LIBRARY:  # its gradients are sums in a varying order
                return (
                    ""
                    if all(bool(tensor.isfinite().all()) for tensor in found.values())
                    else "not finite"
                )
            same = all(torch.equal(found[key], tensor) for key, tensor in outputs[name].items())
            return "" if same else "other bits after the timed loop"

        times, missing = timed(runs, self.timer, CELL_SECONDS, changed)
        self.missing |= {f"{name}, {words(cell)}": why for name, why in missing.items()}
        for name, own in facts.items():
            if name in runs and name not in missing:
                own["warm_us"], own["warm_runs"] = warm_us(runs[name], WARM_SECONDS)
                if of_pass == "forward" and name in KERNEL_TIMED:
                    own |= self.kernel_time(runs[name])
            self.rows.append(
                {"pass": of_pass, "seqlen": seqlen, "contender": name, **times.get(name, {}), **own}
            )
        if of_pass == "forward" and seqlen in LOOP_LENGTHS:
            self.rows.append(
                {"pass": of_pass, "seqlen": seqlen, "contender": LOOP, "wall_us": loop_us(inputs)}
            )

    def kernel_time(self, run: Run) -> dict[str, float]:
        """Kernel time by the source's clock, for the contenders with such a time in the source."""
        us = kernel_us(run, self.timer.device)
        if us:
            return {"kernel_us": us}
        self.missing["times of kernels by torch's profiler"] = "it sees no kernel here"
        return {}

    def first_call(self, cell: Cell, name: str, run: Run) -> tuple[Found, dict[str, Any]]:
        """The result of a call, and its launches, which are the same for every length."""
        place = (cell[0], name)
        if place in self.launches:
            return run(), dict(self.launches[place])
        with recorded_launches() as launches, counted_launches() as launched:
            found = run()
        largest: Mapping[str, int | None] = {
            key: max((getattr(one, key) or 0 for one in launches), default=None)
            for key in ("registers", "spills")
        }
        self.launches[place] = {"launches": len(launched), **largest}
        return found, dict(self.launches[place])

    def verified(
        self, cell: Cell, layer: ScanLayer, inputs: ScanInputs, dy: torch.Tensor | None
    ) -> tuple[dict[str, Run], dict[str, dict[str, Any]]]:
        """The calls with right outputs, and facts about each call."""
        runs: dict[str, Run] = {}
        facts: dict[str, dict[str, Any]] = {}
        exact = judge(inputs, dy)
        for name, run in ours(cell, inputs, dy).items():
            try:
                found, facts[name] = self.first_call(cell, name, run)
            # any error of its compiler or its launch; the others continue
            except Exception as error:
                refuse_if_lost(self.timer.device, name, error)
                self.wrong.append(f"{name}, {words(cell)}: {first_line(error)}")
                continue
            facts[name]["excess"] = max(exact.excess(found).values())
            facts[name]["rms_error"] = max(exact.rms_errors(found).values())
            if facts[name]["excess"] > 1:
                self.wrong.append(
                    f"{name}, {words(cell)}: {facts[name]['excess']:.2f} of what rounding allows"
                )
            else:
                runs[name] = run
        if cell[0] == "forward" and {SEQUENTIAL, tile(128)} <= runs.keys():
            # what is kept for the gradients
            entering, states = sequential(inputs)[1], parallel(inputs)[1]
            facts[SEQUENTIAL]["kept_bytes"] = entering.nbytes
            facts[tile(128)]["kept_bytes"] = 0 if states is None else states.nbytes
        del exact
        if self.mamba_ssm and cell[0] != "tiles":
            run = self.mamba_ssm.call(layer, dy)
            try:
                run()  # compiles and tunes itself
                with counted_launches() as launched:
                    found = run()
                facts[LIBRARY] = {"launches": len(launched)}
            except Exception as error:  # any error of the library; the others continue
                refuse_if_lost(self.timer.device, LIBRARY, error)
                self.missing[f"{LIBRARY}, {words(cell)}"] = first_line(error)
                return runs, facts
            errors = judge(
                layer.scan_inputs(torch.float64), None if dy is None else dy.double()
            ).rms_errors(found)
            facts[LIBRARY]["rms_error"] = max(errors.values())
            if facts[LIBRARY]["rms_error"] <= MOST_RMS_ERROR:
                runs[LIBRARY] = run
            else:
                self.missing[f"{LIBRARY}, {words(cell)}"] = f"its errors are {errors}"
        return runs, facts


# --- the clocks of the source


def warm_us(run: Callable[[], Any], seconds: float) -> tuple[float, int]:
    """(mean microseconds, number of calls): 100 calls, then 500 back to back between two events,
    caches warm.

    There are fewer of both if they would take longer than `seconds`.
    """
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    share = min(1.0, seconds / ((WARM_UP + RUNS) * (time.perf_counter() - began)))
    for _ in range(max(1, round(share * WARM_UP))):
        run()
    runs = max(LEAST_RUNS, round(share * RUNS))
    return elapsed_us(lambda: [run() for _ in range(runs)]) / runs, runs


def kernel_us(run: Callable[[], Any], device: torch.device) -> float:
    """Total microseconds of a call's kernels by torch's profiler, the mean of several calls; 0 if
    it sees none.
    """
    run()
    return (
        sum(us for *_, us in work(traced(lambda: [run() for _ in range(TRACED_RUNS)], device)))
        / TRACED_RUNS
    )


def loop_us(inputs: ScanInputs) -> float:
    """Microseconds of one call of a loop over positions, in fp32."""
    tensors = [tensor.float() for tensor in inputs.tensors]
    return elapsed_us(lambda: scan(*tensors))


# --- the values for claims


def values_of(rows: Sequence[Row], copy_gb_per_s: float | None) -> dict[str, float]:
    """Values by name: clock, quantity, length (l) or tile (t).  A value that was not measured is
    not included.
    """
    of = {(r["pass"], r["seqlen"], r["contender"]): r for r in rows}
    values: dict[str, float] = {}

    def us(clock: str, *place: Any) -> float | None:
        return of.get(place, {}).get(f"{clock}_us")

    def ratio(name: str, above: tuple[Any, ...], below: tuple[Any, ...]) -> None:
        """Adds the time of `above` divided by that of the other one, by each clock."""
        for clock in CLOCKS:
            times = us(clock, *above), us(clock, *below)
            if times[0] and times[1]:
                values[f"{clock}_{name}"] = times[0] / times[1]

    for length in FORWARD_LENGTHS:
        library, seq, t64, t128 = (
            ("forward", length, name) for name in (LIBRARY, SEQUENTIAL, tile(64), tile(128))
        )
        ratio(f"speedup_l{length}", library, t64)
        ratio(f"speedup_t128_l{length}", library, t128)
        ratio(f"sequential_by_parallel_l{length}", seq, t64)
        for clock in CLOCKS:
            if time_us := us(clock, *t64):
                rate = BYTES_PER_POSITION * BATCH * HEADS * length / time_us / 1e3
                values[f"{clock}_gb_per_s_l{length}"] = rate
                if copy_gb_per_s:
                    values[f"{clock}_copy_share_pct_l{length}"] = 100 * rate / copy_gb_per_s
    for length in BOTH_LENGTHS:
        library, seq, t128 = (
            ("forward and backward", length, name) for name in (LIBRARY, SEQUENTIAL, tile(128))
        )
        ratio(f"both_speedup_l{length}", library, t128)
        ratio(f"both_sequential_by_parallel_l{length}", seq, t128)
        # the backward pass alone: the time of both minus that of the forward pass
        for clock in CLOCKS:
            alone = {}
            for name, contender in (("parallel", tile(128)), ("library", LIBRARY)):
                both, forward = (
                    us(clock, one, length, contender) for one in ("forward and backward", "forward")
                )
                if both and forward and both > forward:
                    alone[name] = both - forward
                    values[f"{clock}_{name}_backward_by_forward_l{length}"] = alone[name] / forward
            if len(alone) == 2:
                values[f"{clock}_backward_speedup_l{length}"] = alone["library"] / alone["parallel"]
    for name, contender in (("library", LIBRARY), ("parallel", tile(64))):
        ratio(f"{name}_2048_by_512", ("forward", 2048, contender), ("forward", 512, contender))
    ratio(
        "both_8192_by_2048",
        *(("forward and backward", length, tile(128)) for length in (8192, 2048)),
    )
    for t in TILES:
        ratio(f"t{t}_by_t128", ("tiles", TILES_LENGTH, tile(t)), ("tiles", TILES_LENGTH, tile(128)))
        spills = of.get(("tiles", TILES_LENGTH, tile(t)), {}).get("spills")
        if spills is not None:
            values[f"spills_t{t}"] = float(spills)
    launches = of.get(("forward", 2048, LIBRARY), {}).get("launches")
    if launches:
        values["library_launches"] = float(launches)
    kept = [
        of.get(("forward", 2048, name), {}).get("kept_bytes") for name in (SEQUENTIAL, tile(128))
    ]
    if kept[0] and kept[1]:
        values["kept_by_sequential_of_parallel"] = kept[0] / kept[1]
    return values


def main() -> int:
    options = options_of(__doc__, seconds=150).parse_args()
    return SelectiveScan(options.budget, options.out).finish()


if __name__ == "__main__":
    end(main)
