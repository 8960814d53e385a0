"""Ask, on the GPU here, how often a verdict is wrong, how often a real difference is found, and what it costs.

    PYTHONPATH=. python benchmarks/verdicts.py benchmarks/results/verdicts-h200.json

same:      a kernel against itself; any verdict but "no difference" is false.
different: a kernel with a short wait against the same with a longer one, which makes its device time 3 % longer when
           it is replayed, and its call time 3 % longer when it is called.  (3 % more tokens do not: segments and
           waves of programs are whole.)
layer:     the seconds that a layer takes, judged and sampled, against the method before: one recording, A B A B, until
           every median is known to half a per cent.

Writes FILE, JSON, and beside it the same as a Markdown table.  The comparisons go through shapes, lengths and
implementations in a random order; --seconds ends them early, and then the result says how many there were.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cache, partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ssdprof import __version__, environment, kernels, operators
from ssdprof.bench.shapes import parse_shapes
from ssdprof.environment.machine import kernels_hash
from ssdprof.kernels.precision import Precision
from ssdprof.measure.call import Run
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.timing import CudaBench, time_in_turns
from ssdprof.operators.drawing import Cell, Tokens
from ssdprof.operators.operator import Output
from ssdprof.pipeline.replay import ReplayOptions, replay_layer
from ssdprof.schema import LayerRef, PrecisionRecord, Speedup

OPERATOR = "ssd"
CHUNK_SIZE = 256  # of unfused
SHAPES = ("mamba2-2.7b", "granite-4.0-h-small", "nemotron-3-nano")
LENGTHS = (1024, 4096, 16384, 65536)
IMPLEMENTATIONS = ("unfused", "fused")
DIFFERENCE = 0.03
SHORT_WAIT = 1000  # cycles
SHORT_WAIT_US = 1.0
LAYERS = (
    PrecisionRecord(intermediates="exact", state_dtype="fp32"),
    PrecisionRecord(intermediates="relaxed", state_dtype="fp32"),
)
Row = dict[str, Any]
Place = tuple[str, int, str]  # shape, tokens, implementation


@cache
def inputs_of(shape: str, seqlen: int) -> Any:
    drawing = operators.get(OPERATOR).drawing
    cell = Cell(
        shape=parse_shapes(drawing, shape)[0],
        dtype="bf16",
        layout="contiguous",
        tokens=Tokens(sequences=1, seqlen=seqlen),
    )
    return drawing.with_chunk_size(drawing.draw(cell, torch.device("cuda")), CHUNK_SIZE)


@cache
def run_of(place: Place) -> Run:
    """A call, compiled."""
    shape, seqlen, implementation = place
    call: Run = partial(kernels.get(OPERATOR, implementation).run, inputs_of(shape, seqlen), Precision())
    call()
    return call


def waiting(call: Run, *, cycles: int, host_us: float) -> Run:
    """The call with a wait: on the GPU after it, when it is recorded and replayed; on the host before it, when it is
    called.  The GPU is idle when a call is timed, so that a wait before the first launch delays all that follows,
    whether the host or the GPU decides how long the call takes."""

    def run() -> Output:
        if torch.cuda.is_current_stream_capturing():
            output = call()
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            return output
        end = time.perf_counter_ns() + int(1000 * host_us)
        while time.perf_counter_ns() < end:
            pass
        return call()

    return run


def compare(bench: CudaBench, place: Place, runs: tuple[Run, Run], seed: int) -> Row:
    """How many times as fast as the second the first is, and what it took to know."""
    plan = SamplingPlan(seed=seed)
    began = time.monotonic()
    session = time_in_turns(dict(zip("ab", runs, strict=True)), bench, plan, check=lambda _key, _output: "")
    seconds = time.monotonic() - began
    first, second = (session.sampled[key] for key in "ab")
    speedup = first.speedup(second, "b", plan.smallest_difference)
    return {
        **named(place),
        **{kind: told(speedup, kind) for kind in ("device", "call")},
        "seconds": round(seconds, 3),
        "recordings": len(first.device),
        "replays": sum(map(len, first.device)),
        "calls": sum(map(len, first.call)),
    }


def named(place: Place) -> Row:
    shape, seqlen, implementation = place
    return {"shape": shape, "tokens": seqlen, "implementation": implementation}


def told(speedup: Speedup, kind: str) -> Row:
    """A ratio, its interval and its verdict; kind: "device" or "call"."""
    ratio, interval, verdict = {
        "device": (speedup.device_ratio, speedup.device_interval, speedup.verdict),
        "call": (speedup.call_ratio, speedup.call_interval, speedup.call_verdict),
    }[kind]
    return {"ratio": round(ratio, 5), "interval": [round(interval.low, 5), round(interval.high, 5)], "verdict": verdict}


def same(bench: CudaBench, place: Place, seed: int) -> Row:
    return compare(bench, place, (run_of(place), run_of(place)), seed)


def different(bench: CudaBench, place: Place, seed: int) -> Row:
    call, (cycles, host_us) = run_of(place), longer_waits(bench, place)
    short = waiting(call, cycles=SHORT_WAIT, host_us=SHORT_WAIT_US)
    return compare(bench, place, (short, waiting(call, cycles=cycles, host_us=host_us)), seed)


@cache
def longer_waits(bench: CudaBench, place: Place) -> tuple[int, float]:
    """The waits, in cycles and in microseconds, that make device time and call time longer by DIFFERENCE."""
    short = waiting(run_of(place), cycles=SHORT_WAIT, host_us=SHORT_WAIT_US)
    recording = bench.record(short)
    device_us, call_us = median_of(lambda: bench.device_us(recording)), median_of(lambda: bench.call_us(short))
    cycles = int(1500 * device_us)  # about as long again, for a clock of 1.5 GHz
    twice = bench.record(waiting(run_of(place), cycles=SHORT_WAIT + cycles, host_us=SHORT_WAIT_US))
    cycles_per_us = cycles / (median_of(lambda: bench.device_us(twice)) - device_us)
    return SHORT_WAIT + round(DIFFERENCE * device_us * cycles_per_us), SHORT_WAIT_US + DIFFERENCE * call_us


def median_of(sample: Callable[[], float], count: int = 15) -> float:
    return float(np.median([sample() for _ in range(count)]))


def layer(bench: CudaBench, shape: str, seqlen: int) -> Row:
    """Seconds of wall clock for a layer's three cases with fp32 states: judged, sampled as before, sampled now."""
    inputs = inputs_of(shape, seqlen)
    options = ReplayOptions(precisions=LAYERS, timed=False)
    where = LayerRef(index=0, name="layer", operator=OPERATOR)
    runs: dict[str, Run] = {
        "unfused": run_of((shape, seqlen, "unfused")),
        **{
            precision.intermediates: partial(
                kernels.get(OPERATOR, "fused").run, inputs, Precision(intermediates=precision.intermediates)
            )
            for precision in LAYERS
        },
    }
    replay_layer(where, inputs, options)  # compiles
    judged = took(lambda: replay_layer(where, inputs, options))
    before = took(lambda: sample_as_before(runs, bench))
    now = took(lambda: time_in_turns(runs, bench, SamplingPlan(), check=lambda _key, _output: ""))
    row = {"shape": shape, "tokens": seqlen, "judged_s": judged, "before_s": before, "now_s": now}
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}


def took(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.monotonic()
    work()
    torch.cuda.synchronize()
    return time.monotonic() - began


def sample_as_before(runs: dict[str, Run], bench: CudaBench) -> None:
    """5 rounds of warm-up, then 20 to 640 until the 95 % bootstrap interval of every median is within half a per cent,
    looked at whenever their number has doubled, or after 3 seconds."""
    recordings = {key: bench.record(run) for key, run in runs.items()}
    samplers = [
        sampler
        for key, run in runs.items()
        for sampler in (partial(bench.call_us, run), partial(bench.device_us, recordings[key]))
    ]
    gc.collect()
    for _ in range(5):
        for sampler in samplers:
            sampler()
    rounds: list[list[float]] = []
    end = time.monotonic() + 3
    look_at = 20
    while len(rounds) < 640 and (len(rounds) < 20 or time.monotonic() < end):
        rounds.append([sampler() for sampler in samplers])
        if len(rounds) == look_at:
            look_at *= 2
            if all(bootstrap_half_width(np.array(series)) <= 0.005 for series in zip(*rounds, strict=True)):
                break


def bootstrap_half_width(samples: np.ndarray) -> float:
    chosen = np.random.default_rng(0).integers(0, len(samples), (2000, len(samples)))
    low, high = np.percentile(np.median(samples[chosen], axis=1), [2.5, 97.5])
    return float((high - low) / (high + low))


# --- what is done, and what is written


def measure(counts: dict[str, int], seconds: float) -> dict[str, list[Row]]:
    bench = CudaBench(torch.device("cuda"))
    end = time.monotonic() + seconds
    found: dict[str, list[Row]] = {"layer": [], "same": [], "different": []}
    for seqlen in LENGTHS:
        found["layer"].append(layer(bench, SHAPES[0], seqlen))
        print(found["layer"][-1], file=sys.stderr, flush=True)
    wanted, began = list(jobs(counts)), time.monotonic()
    for number, (kind, place) in enumerate(wanted):
        if time.monotonic() > end:
            print("The time is up.", file=sys.stderr)
            break
        row = {"same": same, "different": different}[kind](bench, place, number)
        found[kind].append(row)
        if number % 20 == 19:
            now = time.monotonic()
            needed = (now - began) / (number + 1) * (len(wanted) - number - 1)
            said = f"{number + 1} of {len(wanted)}; {end - now:.0f} s left, the others need about {needed:.0f} s"
            print(said, kind, row, file=sys.stderr, flush=True)
    return found


def jobs(counts: dict[str, int]) -> Iterator[tuple[str, Place]]:
    """Both kinds mixed, each spread evenly over shapes, lengths and implementations."""
    draw = random.Random(0)
    places = list(product(SHAPES, LENGTHS, IMPLEMENTATIONS))
    wanted = []
    for kind, count in counts.items():
        draw.shuffle(places)
        wanted += [(kind, place) for place, _ in zip(cycle(list(places)), range(count), strict=False)]
    draw.shuffle(wanted)
    yield from wanted


def summary(found: dict[str, list[Row]]) -> list[tuple[str, str, str, str]]:
    """What was asked, of which time, what must hold, what came out."""
    rows = []
    for time_of in ("device", "call"):
        verdicts = Counter(row[time_of]["verdict"] for row in found["same"])
        false, total = verdicts.total() - verdicts["no difference"], verdicts.total()
        rows.append(("the same kernel: false verdicts", time_of, "<= 5%", share(false, total)))
    for time_of in ("device", "call"):
        hits = sum(row[time_of]["verdict"] == "faster" for row in found["different"])
        rows.append(("3% longer: found", time_of, ">= 95%", share(hits, len(found["different"]))))
    for row in found["layer"]:
        judged, before, now = row["judged_s"], row["before_s"], row["now_s"]
        said = (
            f"{(judged + now) / (judged + before):.2f}x ({judged:.2f} s of judging, then {now:.2f} s of sampling, "
            f"before {before:.2f} s: {now / before:.2f}x)"
        )
        rows.append((f"time for a layer, {row['tokens']:,} tokens", "", "<= 1.5x", said))
    for kind, title in (("same", "a comparison of a kernel with itself"), ("different", "a comparison, 3% longer")):
        seconds = [row["seconds"] for row in found[kind]] or [0.0]
        rows.append((title, "", "", f"{np.mean(seconds):.2f} s, at most {max(seconds):.2f} s"))
    return rows


def share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.1f}%)" if whole else "none compared"


def markdown(result: dict[str, Any], rows: list[tuple[str, str, str, str]]) -> str:
    machine = result["environment"]
    gpu, packages = machine["gpu"], machine["packages"]
    lines = ["# Verdicts", "", "| what | time | must be | is |", "|:--|:--|:--|:--|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += [
        "",
        f"{gpu['name']}, driver {gpu['driver']}, CUDA {gpu['cuda']}, torch {packages['torch']}, Triton "
        f"{packages['triton']}, Python {machine['python']}; {result['created']}; {result['seconds']:.0f} s; "
        f"`{result['command']}`.  A difference counts from {SamplingPlan().smallest_difference:.0%}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--same", type=int, default=200, help="comparisons of a kernel with itself")
    parser.add_argument("--different", type=int, default=100, help="comparisons with a true difference")
    parser.add_argument("--seconds", type=float, default=240, help="after which no comparison is begun")
    options = parser.parse_args()
    began = time.monotonic()
    found = measure({"same": options.same, "different": options.different}, options.seconds)
    result: dict[str, Any] = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python benchmarks/verdicts.py {' '.join(sys.argv[1:])}",
        "ssdprof_version": __version__,
        "kernels": kernels_hash(OPERATOR),
        "environment": environment.collect().model_dump(mode="json"),
        "seconds": time.monotonic() - began,
        "difference": DIFFERENCE,
        **found,
    }
    text = markdown(result, summary(found))
    options.file.write_text(json.dumps(result, indent=1) + "\n")
    options.file.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
