"""Measure the inter-chunk state pass on the GPU here: the kernels of inter_chunk.py.

    python benchmarks/studies/scan_002.py --out DIR [--budget SECONDS] [--without-ncu]

Writes DIR/scan-002.json after each cell.  Every contender is compared with the recurrence in fp64
before it is timed; one that is wrong or fails has no time, and the exit code is then 1.  Cells and
counters for which the budget leaves no time are named.  A copy in benchmarks/results/ fills the
claims (benchmarks/claims.py).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from inter_chunk import (
    ROWS,
    InterChunkInputs,
    Kernel,
    associative,
    chained,
    draw,
    judge,
    look_back,
    loop,
    low_rank,
    one_launch_a_chunk,
)
from study import Judge, Study, end, options_of, timed

from ssdprof.core.case import Launch
from ssdprof.errors import MissingCapabilityError, SsdprofError
from ssdprof.kernels.adapters import Tunings
from ssdprof.measure.first_run import (
    counted_launches,
    first_line,
    recorded_launches,
    refuse_if_lost,
)
from ssdprof.stalls import facts as ncu_facts
from ssdprof.stalls import ncu, read
from ssdprof.stalls.read import RawKernel

BATCH, HEADS = 4, 16
DIMS, CHUNKS, RANKS, RANK_CHUNKS = (64, 128), (8, 16, 32, 64, 128), (1, 2, 4, 8, 16), 64
BASELINE, PROPOSED, NOT_AHEAD = "read back", "registers", "registers, no loads ahead"
LIBRARY = "mamba_ssm's state pass"
PRODUCTS = ("columns", "tensor cores")
ROUNDED = (PROPOSED, NOT_AHEAD, "chained", "one launch a chunk")
OTHERS = (
    "one launch a chunk",
    "chained",
    "associative",
    "look-back",
    "registers, a row a program",
    "registers, a head a program",
    "registers, fp32",
    LIBRARY,
)
MOST_WATCHED_LAUNCHES = 32  # per call: ncu replays each a dozen times
NCU_SECONDS, CELL_SECONDS = 40, 0.8
COUNTED = "L2 sectors, DRAM bytes and achieved occupancy"
SECTIONS = ("LaunchStats", "Occupancy", "SpeedOfLight", "MemoryWorkloadAnalysis_Tables")
L2_READS = "lts__t_sectors_srcunit_tex_op_read.sum"  # sectors of 32 bytes that SMs read from L2
Cell = dict[str, int]  # dim: of a state, chunks, rank: 0 for a diagonal transition
Row = Mapping[str, Any]


def cells() -> Iterator[Cell]:
    """Cells of the criteria come first; if the time runs out, later cells are not measured."""
    for dim in DIMS:
        yield from (
            {"dim": dim, "chunks": chunks, "rank": 0} for chunks in sorted(CHUNKS, reverse=True)
        )
        yield from ({"dim": dim, "chunks": RANK_CHUNKS, "rank": rank} for rank in RANKS)


def diagonal(dim: int) -> dict[str, Kernel]:
    """For states of dim x dim.  Contenders before `registers, fp32` round the state in every
    iteration.
    """
    registers = partial(loop, resident=True, rounded=True)
    return {
        BASELINE: partial(loop, resident=False, num_stages=1),
        "one launch a chunk": one_launch_a_chunk,
        "chained": chained,
        NOT_AHEAD: partial(registers, num_stages=1),
        PROPOSED: registers,
        "registers, a row a program": partial(registers, rows=1, num_warps=1),
        "registers, a head a program": partial(registers, rows=dim, num_stages=3),
        "registers, fp32": partial(loop, resident=True),
        "associative": associative,
        "look-back": look_back,
    }


def of_rank(dim: int) -> dict[str, Kernel]:
    """For states of dim x dim and a transition of low rank."""
    kernels: dict[str, Kernel] = {}
    for products in PRODUCTS:
        run = partial(
            low_rank, tensor_cores=products == "tensor cores", num_warps=4 if dim <= 64 else 8
        )
        kernels[f"{BASELINE}, {products}"] = partial(run, resident=False, num_stages=1)
        kernels[f"{PROPOSED}, {products}"] = partial(run, resident=True, rounded=True)
    return kernels


def baseline_of(name: str) -> str:
    """The contender that reads its state back, with the same products."""
    products = next((kind for kind in PRODUCTS if name.endswith(f", {kind}")), "")
    return f"{BASELINE}, {products}" if products else BASELINE


class MambaSsm:
    """The state pass of mamba_ssm, the third of its five kernels: a decay for each chunk and head.

    Raises ImportError if the library, or a package that it needs, is missing.
    """

    def __init__(self) -> None:
        module = import_module("mamba_ssm.ops.triton.ssd_state_passing")
        self._forward = module._state_passing_fwd
        Tunings([module])  # compiles its configurations in parallel

    def run(self, inputs: InterChunkInputs) -> torch.Tensor:
        """The state after each chunk, for inputs whose rows have one decay.  It tunes itself in the
        first call.
        """
        log_decay = inputs.decay[..., 0].log().transpose(1, 2).contiguous()
        entering, last = self._forward(
            inputs.states.flatten(3), log_decay, out_dtype=inputs.states.dtype
        )
        return torch.cat([entering[:, 1:], last[:, None].to(entering.dtype)], dim=1).view_as(
            inputs.states
        )

    def call(self, inputs: InterChunkInputs) -> Callable[[], torch.Tensor]:
        """Its call alone, for the clock."""
        states, log_decay = (
            inputs.states.flatten(3),
            inputs.decay[..., 0].log().transpose(1, 2).contiguous(),
        )
        return lambda: self._forward(states, log_decay, out_dtype=states.dtype)[0]


class StatePassing(Study[Cell]):
    """One run of all cells, then one of ncu."""

    name = "scan-002"

    def __init__(self, budget: float, folder: Path, *, with_ncu: bool = True) -> None:
        super().__init__(budget, folder)
        self.with_ncu = with_ncu
        self.watched: list[dict[str, Any]] = []
        self.more["counters"] = []
        self.mamba_ssm = self.library(LIBRARY, MambaSsm)

    def run(self) -> None:
        reserved = NCU_SECONDS if self.with_ncu else 0
        self.measure_all(cells(), "the cell {}".format, seconds=CELL_SECONDS + reserved)
        try:
            if self.with_ncu:
                self.more["counters"] = count(
                    self.watched, timeout_s=max(self.budget - self.seconds, 20.0)
                )
            else:
                self.missing[COUNTED] = "not asked for"
        except SsdprofError as error:
            self.missing[COUNTED] = f"{error.message} {error.hint}"

    def values_so_far(self) -> dict[str, float]:
        return values_of(self.rows, self.more["counters"])

    def measure(self, cell: Cell) -> None:
        inputs = draw(
            batch=BATCH,
            chunks=cell["chunks"],
            heads=HEADS,
            dim=cell["dim"],
            rank=cell["rank"],
            device=self.device,
        )
        exact, kernels = judge(inputs), (of_rank if cell["rank"] else diagonal)(cell["dim"])
        found, counts, facts, outputs = {}, {}, {}, {}
        with recorded_launches() as launches:  # one compiled kernel for each contender
            for name, kernel in kernels.items():
                try:
                    with counted_launches() as launched:
                        found[name] = kernel(inputs)
                # any error of its compiler or its launch; the others continue
                except Exception as error:
                    refuse_if_lost(self.timer.device, name, error)
                    self.wrong.append(f"{name} at {cell}: {first_line(error)}")
                    continue
                counts[name] = len(launched)
        for (name, out), launch in zip(found.items(), launches, strict=True):
            facts[name] = facts_of(launch, counts[name], exact, out)
            if facts[name]["excess"] > 1:
                self.wrong.append(
                    f"{name} at {cell}: {facts[name]['excess']:.2f} of what rounding allows"
                )
                continue
            outputs[name] = out
            self.watch(cell, name, [launch.kernel] * counts[name])
        for name, out in outputs.items():
            base = outputs.get(baseline_of(name))
            facts[name]["same_bits"] = base is not None and torch.equal(out, base)
        floor_us = inputs.least_bytes() / self.values["copy_gb_per_s"] / 1e3

        runs: dict[str, Callable[[], torch.Tensor]] = {
            name: partial(kernels[name], inputs) for name in outputs
        }
        run, known = self.library_call(cell, inputs)
        facts |= {LIBRARY: known} if known else {}
        runs |= {LIBRARY: run} if run else {}
        firsts = {name: run() for name, run in runs.items()}

        def changed(name: str, out: torch.Tensor) -> str:
            return "" if torch.equal(out, firsts[name]) else "other bits after the timed loop"

        times, missing = timed(runs, self.timer, CELL_SECONDS, changed)
        self.missing |= {f"{name} at {cell}": why for name, why in missing.items()}
        for name, own in facts.items():
            self.rows.append(
                {**cell, "contender": name, **times.get(name, {}), **own, "floor_us": floor_us}
            )

    def library_call(
        self, cell: Cell, inputs: InterChunkInputs
    ) -> tuple[Callable[[], torch.Tensor] | None, dict[str, Any]]:
        """A call on the same states, with one decay for each chunk and head, and facts about it.

        None if the library is missing, wrong, or raises an error; the others continue.
        """
        if self.mamba_ssm is None or cell["rank"]:
            return None, {}
        own = replace(inputs, decay=inputs.decay[..., :1].expand_as(inputs.decay))
        try:
            self.mamba_ssm.run(own)  # tunes itself
            with recorded_launches() as launches, counted_launches() as launched:
                out = self.mamba_ssm.run(own)
        except Exception as error:
            refuse_if_lost(self.timer.device, LIBRARY, error)
            self.missing[f"{LIBRARY} at {cell}"] = first_line(error)
            return None, {}
        known = facts_of(launches[0], len(launched), judge(own), out)
        if known["excess"] > 1:
            self.missing[f"{LIBRARY} at {cell}"] = "its output is not right"
            return None, known
        return self.mamba_ssm.call(own), known

    def watch(self, cell: Cell, name: str, kernels: list[str]) -> None:
        """Adds a call for ncu: every contender at one size, those of the criteria at their
        sizes.
        """
        criteria = cell["chunks"] in (32, 64, 128) and name in (BASELINE, NOT_AHEAD, PROPOSED)
        wanted = (cell["dim"] == 64 and (criteria or cell["chunks"] == 32)) or (
            cell["chunks"] == 64 and criteria
        )
        if wanted and not cell["rank"] and len(kernels) <= MOST_WATCHED_LAUNCHES:
            self.watched.append(
                {
                    "contender": name,
                    "chunks": cell["chunks"],
                    "dim": cell["dim"],
                    "kernels": kernels,
                }
            )


def facts_of(launch: Launch, count: int, exact: Judge, out: torch.Tensor) -> dict[str, Any]:
    """Facts about a contender in addition to its time."""
    return {
        "launches": count,
        **launch.model_dump(include={"registers", "spills", "shared_bytes"}),
        "excess": exact.excess({"out": out})["out"],
        "rms_error": exact.rms_errors({"out": out})["out"],
    }


# --- ncu


def count(watched: Sequence[Mapping[str, Any]], timeout_s: float) -> list[dict[str, Any]]:
    """ncu's counters of each call, summed over its launches.

    Raises MissingCapabilityError if ncu is missing, or has no permission to count.
    """
    program, _ = ncu.find()
    names = [name for one in watched for name in one["kernels"]]
    with tempfile.TemporaryDirectory(prefix="ssdprof-") as folder:
        plan, report = Path(folder) / "plan.json", Path(folder) / "scan-002.ncu-rep"
        plan.write_text(json.dumps(watched), encoding="utf-8")
        target = (sys.executable, __file__, "--play", str(plan))
        command = ncu.command(program, report, names, len(names), target, SECTIONS)
        output = ncu.run(command, timeout_s=timeout_s, environ=ncu.clean_environment(os.environ))
        if not report.is_file():
            raise ncu.explain(output, 0)
        kernels = read.read(report).kernels
    if [kernel.function for kernel in kernels] != names:
        raise MissingCapabilityError(
            (
                f"ncu profiled {len(kernels)} launches in another order than the {len(names)} that "
                "were made."
            ),
            "Does another process use the GPU?",
        )
    return records(watched, kernels)


def play(plan: Path) -> None:
    """What ncu profiles: every call of the plan once, inside one range."""
    drawn = cache(partial(draw, batch=BATCH, heads=HEADS, device="cuda"))
    calls = []
    for one in json.loads(plan.read_text(encoding="utf-8")):
        calls.append(
            partial(
                diagonal(one["dim"])[one["contender"]], drawn(chunks=one["chunks"], dim=one["dim"])
            )
        )
        calls[-1]()  # compiles
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_push(ncu.RANGE)  # type: ignore[no-untyped-call]
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def records(
    watched: Sequence[Mapping[str, Any]], kernels: Sequence[RawKernel]
) -> list[dict[str, Any]]:
    found, left = [], list(kernels)
    for one in watched:
        own, left = left[: len(one["kernels"])], left[len(one["kernels"]) :]
        sums: defaultdict[str, float] = defaultdict(float)
        for kernel in own:
            facts = ncu_facts.numbers(kernel)
            counted = {
                name: facts[name] for name in ("dram_read_bytes", "dram_write_bytes", "l2_bytes")
            }
            counted |= {"l2_read_sectors": kernel.number(L2_READS), "ncu_us": facts["duration_us"]}
            for name, value in counted.items():
                sums[name] += float("nan") if value is None else value
        used = ncu_facts.numbers(own[0])
        found.append(
            {
                "contender": one["contender"],
                "chunks": one["chunks"],
                "dim": one["dim"],
                **{
                    name: value for name, value in sums.items() if value == value
                },  # NaN: not collected
                **{
                    name: used[name]
                    for name in (
                        "occupancy_pct",
                        "occupancy_limit_pct",
                        "registers",
                        "shared_bytes",
                    )
                },
                "limited_by": list(used["limited_by"]),
            }
        )
    return found


# --- the values for claims


def values_of(rows: Sequence[Row], counters: Sequence[Row]) -> dict[str, float]:
    """Values by name: quantity and cell (d: rows and columns of a state, g: chunks, r: rank).

    counters: ncu's counters, empty without them.  A value that was not measured is not included.
    """
    values: dict[str, float] = {}
    times = [r for r in rows if "device_us" in r]
    for dim in DIMS:
        for chunks in CHUNKS:
            _speeds(values, _of(times, dim=dim, chunks=chunks, rank=0), dim, f"d{dim}_g{chunks}")
            _counted(values, _of(counters, dim=dim, chunks=chunks), f"d{dim}_g{chunks}")
        for rank in RANKS:
            _rank_speeds(
                values, _of(times, dim=dim, chunks=RANK_CHUNKS, rank=rank), f"d{dim}_r{rank}"
            )
            both = [
                values.get(f"speedup_d{dim}_{place}") for place in (f"r{rank}", f"g{RANK_CHUNKS}")
            ]
            if both[0] and both[1]:
                values[f"gain_over_diagonal_d{dim}_r{rank}"] = both[0] / both[1]
    speedups = {chunks: values.get(f"speedup_d64_g{chunks}") for chunks in CHUNKS}
    if None not in speedups.values():
        values["least_chunks_faster_d64"] = float(
            min((g for g, s in speedups.items() if s and s > 1), default=0)
        )
    for name, contenders in (
        ("rounded_same_bits", ROUNDED),
        ("fp32_same_bits", ("registers, fp32",)),
    ):
        same = [r["same_bits"] for r in rows if r["contender"] in contenders and "same_bits" in r]
        if same:
            values[name] = float(all(same))
    return values


def _of(rows: Sequence[Row], **cell: int) -> dict[str, Row]:
    """The rows of one cell, by contender."""
    return {r["contender"]: r for r in rows if all(r[key] == value for key, value in cell.items())}


def _speeds(values: dict[str, float], of: Mapping[str, Row], dim: int, place: str) -> None:
    """Values of one cell with a diagonal transition.  X_by_registers: time of X over that of the
    proposed kernel.
    """
    if not {BASELINE, PROPOSED, NOT_AHEAD} <= of.keys():
        return
    base, ours, bare = (of[name]["device_us"] for name in (BASELINE, PROPOSED, NOT_AHEAD))
    floor = of[PROPOSED]["floor_us"]
    values |= {
        f"speedup_{place}": base / ours,
        f"time_saved_pct_{place}": 100 * (1 - ours / base),
        f"time_ratio_{place}": ours / base,
        f"speedup_by_residency_{place}": base / bare,
        f"speedup_by_loads_ahead_{place}": bare / ours,
        f"floor_pct_{place}": 100 * floor / ours,
        f"shared_bytes_per_head_{place}": float(-(-dim // ROWS) * of[PROPOSED]["shared_bytes"]),
    }
    if bare > floor:
        values[f"hidden_pct_{place}"] = 100 * (bare - ours) / (bare - floor)
    for name in OTHERS:
        if name in of:
            word = name.replace(", ", "_").replace(" ", "_").replace("-", "_").replace("'", "_")
            values[f"{word}_by_registers_{place}"] = of[name]["device_us"] / ours


def _rank_speeds(values: dict[str, float], of: Mapping[str, Row], place: str) -> None:
    """Compares the faster kind of products of each contender."""
    bases, ours = (
        [of.get(f"{name}, {kind}") for kind in PRODUCTS] for name in (BASELINE, PROPOSED)
    )
    if not all((*bases, *ours)):
        return
    base, fast = (
        min((r for r in some if r), key=lambda r: r["device_us"]) for some in (bases, ours)
    )
    values[f"speedup_{place}"] = base["device_us"] / fast["device_us"]
    values[f"registers_{place}"], values[f"spills_{place}"] = (
        float(fast["registers"]),
        float(fast["spills"]),
    )
    columns, cores = (r["device_us"] for r in ours if r)
    values[f"tensor_core_speedup_{place}"] = columns / cores


def _counted(values: dict[str, float], of: Mapping[str, Row], place: str) -> None:
    """Values of one cell that ncu profiled."""
    if not {BASELINE, PROPOSED} <= of.keys():
        return
    base, ours = of[BASELINE], of[PROPOSED]
    for value, keys in (
        ("l2_reads", ("l2_read_sectors",)),
        ("l2_bytes", ("l2_bytes",)),
        ("dram", ("dram_read_bytes", "dram_write_bytes")),
    ):
        if all(key in record for key in keys for record in (base, ours)):
            ratio = sum(ours[key] for key in keys) / sum(base[key] for key in keys)
            values[f"{value}_ratio_{place}"], values[f"{value}_saved_pct_{place}"] = (
                ratio,
                100 * (1 - ratio),
            )
    if ours["occupancy_pct"] is not None:
        values[f"occupancy_pct_{place}"] = ours["occupancy_pct"]


def main() -> int:
    parser = options_of(__doc__, seconds=180)
    parser.add_argument("--without-ncu", action="store_true")
    options = parser.parse_args()
    with torch.no_grad():
        return StatePassing(options.budget, options.out, with_ncu=not options.without_ncu).finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--play"]:
        with torch.no_grad():
            play(Path(sys.argv[2]))
    else:
        end(main)
