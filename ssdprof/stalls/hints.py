"""Hints derived from the numbers.  Every hint names its evidence, and needs collected values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from ssdprof.schema.stalls import Hint, KernelStalls, Line, Stage  # TODO

_MOST = 6
_WORTH_PCT = 5.0  # of the busy samples: a smaller share is not worth a change
_BUSY_MEMORY_PCT = 70.0  # of a memory's bandwidth: above this it counts as full

_MOST_HIT_PCT = 80.0  # of L2: above this, loads wait for L2 and not for DRAM
_FULL_WAVE = 0.8
_LONGEST_QUOTE = 80

_LATE = (
    "Other warps of this program are late with what these wait for: look at {}, or let them run further ahead (a "
    "longer ring)."
)
_PRODUCT = (
    "The tensor cores are at work and nothing else is: put independent work between the start of a product and its "
    "use, or alternate two programs or warp groups around the tensor cores."
)
_DRAM_FULL = "DRAM is full: fewer bytes (smaller types, one pass less, more reuse) is all that helps."
_L2_FULL = "L2 is full: share loads between heads, or read less often."
_L2_LATENCY = (
    "Bound by the latency of L2, not by a bandwidth: fewer re-reads, or more stages in flight if shared memory then "
    "still holds as many programs."
)
_LATENCY = (
    "Bound by the latency of loads, not by a bandwidth: more warps per SM, or more stages in flight if shared memory "
    "then still holds as many programs."
)
_ABOUT_MEMORY = frozenset({_DRAM_FULL, _L2_FULL, _L2_LATENCY, _LATENCY})

# reason -> remedy.  Reasons whose remedy depends on more have a function below.
_ADVICE = {
    "short_scoreboard": "Shared memory, exponentials or shuffles answer too late: issue them earlier, have fewer of "
    "them in the chain, or compute them once for several uses.",
    "barrier": "Warps wait for the slowest of their block: give them equal work, put fewer barriers into the loop, or "
    "let only the warps that share data wait for each other.",
    "wait": "The chain of dependent instructions is the limit, at a fixed latency each: more independent work per warp "
    "or more warps hide it.",
    "math_pipe_throttle": "A compute pipe is full here: this is work, and only less work helps.",
    "mio_throttle": "Too many shared-memory, exponential or shuffle instructions at once: wider accesses, or fewer.",
    "lg_throttle": "Too many small global accesses at once: wider ones, or TMA copies.",
    "no_instructions": "The code does not fit the instruction cache: unroll less, or specialise less.",
    "membar": "A fence waits for writes to arrive: a narrower scope or one fence for several writes.",
    "warpgroup_arrive": "The tensor cores' operands are not ready: prepare registers and fences earlier.",
    "sleeping": "Warps sleep while they poll a flag: the warps that set it are late.",
    "dispatch_stall": "The dispatcher holds instructions back, mostly for register-file conflicts: this is rarely in a "
    "kernel's hand.",
    "branch_resolving": "Short loops and branches: unroll, or use predicates.",
    "imc_miss": "Constants miss their cache: fewer kernel arguments in the inner loop.",
    "drain": "Programs end while their stores are still under way: fewer, larger programs.",
    "tex_throttle": "Too many local or surface accesses at once; registers that spilled count as such.",
}
_WORKING = frozenset({"selected", "not_selected"})  # the warp could issue: no stall


def hints(kernel: KernelStalls, fillers: Mapping[str, tuple[str, ...]] = MappingProxyType({})) -> tuple[Hint, ...]:
    """Hints by stage and reason, the largest first, then those about the whole kernel.

    fillers: stage of waiting -> functions that end the wait.
    """
    found = sorted(_by_stage(kernel, fillers), key=lambda pair: -pair[0])
    return (*(hint for _, hint in found[:_MOST]), *_whole(kernel))


def _by_stage(kernel: KernelStalls, fillers: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[int, Hint]]:
    """(samples, hint) for every stage and reason with enough samples."""
    for stage in kernel.stages:
        if stage.idle:
            continue
        for reason, count in stage.samples.items():
            share = 100 * count / kernel.busy_samples
            if share < _WORTH_PCT or reason in _WORKING:
                continue
            line = _hottest(kernel, stage, reason)
            advice = _advice(kernel, stage, reason, line, fillers.get(stage.name, ()))
            if advice:
                parts = (
                    f"{reason} in {stage.name} is {share:.0f} % of the kernel's busy samples",
                    _where(line, reason, count),
                )
                memory = _memory(kernel) if advice in _ABOUT_MEMORY else ""
                evidence = f"{''.join(parts)}{memory}."
                yield count, Hint(stage=stage.name, share_pct=share, evidence=evidence, advice=advice)


def _advice(kernel: KernelStalls, stage: Stage, reason: str, line: Line | None, late: tuple[str, ...]) -> str:
    text = line.text if line else ""
    if stage.name.startswith("waiting") or "mbarrier.wait" in text:
        names = " and ".join(f"`{name}`" for name in late)
        return _LATE.format(
            f"{names}, which {'fills' if len(late) == 1 else 'fill'} the barrier"
            if late
            else "the roles that fill the barrier"
        )
    if stage.name == "state_passing.wait":
        return (
            "The states of earlier segments are not ready: use shorter segments, or more heads and sequences at once."
        )
    if reason == "barrier" and "mma_wait" in text:
        return _PRODUCT
    if reason == "long_scoreboard":
        return _global_load(kernel)
    return _ADVICE.get(reason, "")


def _global_load(kernel: KernelStalls) -> str:
    speed = kernel.throughput
    if speed.dram_pct is not None and speed.dram_pct >= _BUSY_MEMORY_PCT:
        return _DRAM_FULL
    if speed.l2_pct is not None and speed.l2_pct >= _BUSY_MEMORY_PCT:
        return _L2_FULL
    if speed.l2_hit_pct is not None and speed.l2_hit_pct >= _MOST_HIT_PCT:
        return _L2_LATENCY
    return _LATENCY


def _hottest(kernel: KernelStalls, stage: Stage, reason: str) -> Line | None:
    """The line of the stage with the most samples of the reason."""
    lines = (line for line in kernel.lines if line.stage == stage.name and line.samples.get(reason))
    return max(lines, key=lambda line: line.samples[reason], default=None)


def _where(line: Line | None, reason: str, count: int) -> str:
    if line is None:
        return ""
    text = line.text if len(line.text) <= _LONGEST_QUOTE else f"{line.text[: _LONGEST_QUOTE - 3]}..."
    quoted = f" `{text}`" if text else ""
    return f", {100 * line.samples[reason] / count:.0f} % of them on {line.file}:{line.line}{quoted}"


def _memory(kernel: KernelStalls) -> str:
    speed = kernel.throughput
    known = (("L2 hit rate", speed.l2_hit_pct), ("L2", speed.l2_pct), ("DRAM", speed.dram_pct))
    parts = [f"{name} {value:.0f} %" for name, value in known if value is not None]
    return f"; {', '.join(parts)}" if parts else ""


def _whole(kernel: KernelStalls) -> Iterator[Hint]:
    used, speed = kernel.resources, kernel.throughput
    if used.spill_requests:
        yield Hint(
            stage="",
            evidence=f"{used.spill_requests:,} loads and stores of spilled registers, at {used.registers} registers.",
            advice="Fewer values alive at once, smaller tiles or more warps per tile.",
        )
    if used.occupancy_pct is not None and used.occupancy_pct < 30 and used.limited_by and (speed.issue_pct or 100) < 50:
        yield Hint(
            stage="",
            evidence=f"Occupancy {used.occupancy_pct:.0f} %, limited by {' and '.join(used.limited_by)}; a scheduler "
            f"issues in {speed.issue_pct:.0f} % of the cycles.",
            advice="Few warps hide little latency: it must be hidden inside a warp, by loads in flight and independent "
            "work, or smaller tiles must let more programs in.",
        )
    if used.waves is not None and used.waves < _FULL_WAVE:
        yield Hint(
            stage="",
            evidence=f"The grid fills {100 * used.waves:.0f} % of the GPU once.",
            advice="More programs: split the sequence or the heads further.",
        )
    elif used.waves is not None and 1 < used.waves < 4 and used.waves % 1 and used.waves % 1 < 0.5:
        yield Hint(
            stage="",
            evidence=f"{used.waves:.2f} waves: the last one keeps {100 * (used.waves % 1):.0f} % of the GPU busy.",
            advice="Cut the grid so that the last wave is fuller, or launch persistent programs.",
        )
