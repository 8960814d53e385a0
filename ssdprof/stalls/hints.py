"""Hints derived from the numbers.  Every hint names its evidence, and needs collected values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ssdprof.core.stalls import KernelStalls
from ssdprof.core.words import cut

_MOST = 6
_WORTH_PCT = 5.0  # of the busy samples: a smaller share is not worth a change
_BUSY_MEMORY_PCT = 70.0  # of a memory's bandwidth: above this it counts as full
_MOST_HIT_PCT = 80.0  # of L2: above this, loads wait for L2 and not for DRAM
_FULL_WAVE = 0.8
_LONGEST_QUOTE = 80

# reason -> remedy.  Reasons whose remedy depends on more are in `_advice`.
ADVICE = {
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


def hints(kernel: KernelStalls, fillers: Mapping[str, tuple[str, ...]]) -> dict[str, float | None]:
    """Hints by stage and reason, the largest first, then those about the whole kernel: see `KernelStalls`.

    fillers: stage of waiting -> functions that end the wait.
    """
    found: list[tuple[int, str, float]] = []
    for stage, samples in kernel.stages.items():
        for reason, count in () if stage in kernel.idle else samples.items():
            share = 100 * count / kernel.busy_samples
            if share < _WORTH_PCT:
                continue
            of_stage = (line for line in kernel.lines if line.stage == stage)
            samples_of, line = max(((one.samples.get(reason, 0), one) for one in of_stage), key=lambda pair: pair[0])
            advice = _advice(kernel, stage, reason, line.text, fillers.get(stage, ()))
            if advice:
                quote = cut(line.text, _LONGEST_QUOTE)
                evidence = f"{reason} in {stage} is {share:.0f} % of the kernel's busy samples"
                where = f"{100 * samples_of / count:.0f} % of them on {line.file}:{line.line}"
                found.append((count, f"{evidence}, {where}{f' `{quote}`' if quote else ''}{advice}", share))
    found.sort(key=lambda hint: -hint[0])
    return {text: share for _, text, share in found[:_MOST]} | dict.fromkeys(_whole(kernel))


def _advice(kernel: KernelStalls, stage: str, reason: str, text: str, late: tuple[str, ...]) -> str:
    """The end of a hint, or "".  text: of the hottest line.  late: functions that end the wait."""
    if reason in ("selected", "not_selected"):  # the warp could issue: no stall
        return ""
    if stage.startswith("waiting") or "mbarrier.wait" in text:
        names = " and ".join(f"`{name}`" for name in late)
        who = f"{names}, which fill{'s' * (len(late) == 1)} the barrier" if late else "the roles that fill the barrier"
        return (
            f".  Other warps of this program are late with what these wait for: look at {who}, or let them run further "
            "ahead (a longer ring)."
        )
    if stage == "state_passing.wait":
        return (
            ".  The states of earlier segments are not ready: use shorter segments, or more heads and sequences at "
            "once."
        )
    if reason == "barrier" and "mma_wait" in text:
        return (
            ".  The tensor cores are at work and nothing else is: put independent work between the start of a product "
            "and its use, or alternate two programs or warp groups around the tensor cores."
        )
    if reason == "long_scoreboard":
        return _global_load(kernel)
    return f".  {ADVICE[reason]}" if reason in ADVICE else ""


def _global_load(kernel: KernelStalls) -> str:
    known = (("L2 hit rate", kernel.l2_hit_pct), ("L2", kernel.l2_pct), ("DRAM", kernel.dram_pct))
    memory = "".join(f"{name} {value:.0f} %, " for name, value in known if value is not None)
    evidence = f"; {memory.removesuffix(', ')}." if memory else "."
    if (kernel.dram_pct or 0) >= _BUSY_MEMORY_PCT:
        return f"{evidence}  DRAM is full: fewer bytes (smaller types, one pass less, more reuse) is all that helps."
    if (kernel.l2_pct or 0) >= _BUSY_MEMORY_PCT:
        return f"{evidence}  L2 is full: share loads between heads, or read less often."
    rest = "more stages in flight if shared memory then still holds as many programs."
    if (kernel.l2_hit_pct or 0) >= _MOST_HIT_PCT:
        return f"{evidence}  Bound by the latency of L2, not by a bandwidth: fewer re-reads, or {rest}"
    return f"{evidence}  Bound by the latency of loads, not by a bandwidth: more warps per SM, or {rest}"


def _whole(kernel: KernelStalls) -> Iterator[str]:
    waves, occupancy, issue = kernel.waves, kernel.occupancy_pct, kernel.issue_pct
    if kernel.spill_requests:
        yield (
            f"{kernel.spill_requests:,} loads and stores of spilled registers, at {kernel.registers} registers.  Fewer "
            "values alive at once, smaller tiles or more warps per tile."
        )
    if occupancy is not None and occupancy < 30 and kernel.limited_by and issue is not None and 0 < issue < 50:
        yield (
            f"Occupancy {occupancy:.0f} %, limited by {' and '.join(kernel.limited_by)}; a scheduler issues in "
            f"{issue:.0f} % of the cycles.  Few warps hide little latency: it must be hidden inside a warp, by loads "
            "in flight and independent work, or smaller tiles must let more programs in."
        )
    if waves is not None and waves < _FULL_WAVE:
        full = f"The grid fills {100 * waves:.0f} % of the GPU once."
        yield f"{full}  More programs: split the sequence or the heads further."
    elif waves is not None and 1 < waves < 4 and 0 < waves % 1 < 0.5:
        last = f"{waves:.2f} waves: the last one keeps {100 * (waves % 1):.0f} % of the GPU busy."
        yield f"{last}  Cut the grid so that the last wave is fuller, or launch persistent programs."
