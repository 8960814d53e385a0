"""The stall report from ncu's raw kernels: facts from metrics, whose names differ by chip and
version; checks; hints.

Self-checks are run on every report and shown with it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ssdprof import __version__, operators
from ssdprof.core.stalls import (
    CheckResult,
    KernelStalls,
    Launched,
    SelfChecks,
    StallReport,
    most_first,
)
from ssdprof.operators.operator import Stages
from ssdprof.stalls.attribute import UNKNOWN, SourceFiles, attribute, is_idle
from ssdprof.stalls.read import CANONICAL, RawKernel, RawReport

# field of KernelStalls -> metrics with its value, best first
_METRICS = {
    "block": ("launch__block_size",),
    "registers": ("launch__registers_per_thread",),
    "spill_requests": ("sass__inst_executed_register_spilling", "derived__local_spilling_requests"),
    "shared_bytes": ("launch__shared_mem_per_block",),
    "waves": ("launch__waves_per_multiprocessor",),
    "occupancy_pct": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "occupancy_limit_pct": ("sm__maximum_warps_per_active_cycle_pct",),
    "duration_us": (_DURATION := ("gpu__time_duration.sum", "gpu__time_duration.avg")),
    "compute_pct": ("sm__throughput.avg.pct_of_peak_sustained_elapsed",),
    "memory_pct": (
        "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
        "gpu__compute_memory_access_throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    "dram_pct": (
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    "l2_pct": ("lts__throughput.avg.pct_of_peak_sustained_elapsed",),
    "issue_pct": ("smsp__issue_active.avg.pct_of_peak_sustained_active",),
    "tensor_pct": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_elapsed",
    ),
    "dram_read_bytes": ("dram__bytes_read.sum",),
    "dram_write_bytes": ("dram__bytes_write.sum",),
    "l2_bytes": ("lts__t_bytes.sum",),
    "l1_hit_pct": ("l1tex__t_sector_hit_rate.pct",),
    "l2_hit_pct": ("lts__t_sector_hit_rate.pct",),
}
_LIMITS = {
    "registers": "launch__occupancy_limit_registers",
    "shared memory": "launch__occupancy_limit_shared_mem",
    "warps": "launch__occupancy_limit_warps",
    "blocks": "launch__occupancy_limit_blocks",
    "barriers": "launch__occupancy_limit_barriers",
}
_SAMPLE_COUNT = "smsp__pcsamp_sample_count"
_AVERAGE = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
_WHOLE = {
    "block",
    "registers",
    "spill_requests",
    "shared_bytes",
    "dram_read_bytes",
    "dram_write_bytes",
    "l2_bytes",
    "tensor_flops",
    "fp32_flops",
}
_SECTOR_BYTES = 32
_TENSOR_OPS = "sm__ops_path_tensor_src_"


def analyse(
    reports: Sequence[RawReport],
    launched: Sequence[Launched] = (),
    *,
    missing: str = "",
    **origin: Any,
) -> StallReport:
    """The stall report.  Depends only on the arguments, not on the machine.

    launched: by each implementation, in the order of its report; empty for reports made without
    ssdprof.
    missing: the reason if there are no reports.  origin: other fields of the stall report.
    """
    requested = () if missing else launched
    names = [call.implementation for call in requested] or [""] * len(reports)
    gpus: list[str] = []
    kernels: list[KernelStalls] = []
    words: dict[str, str] = {}
    for report, implementation in zip(reports, names, strict=True):
        for kernel in report.kernels:
            gpus.append(str(kernel.metrics.get("device__attribute_display_name", "")))
            kernels.append(stalls_of(kernel, implementation))
            words |= _stages(kernel).words
    return StallReport(
        ssdprof_version=__version__,
        sources={report.name: report.sha256 for report in reports},
        gpu=next(filter(None, gpus), ""),
        kernels=tuple(kernels),
        words=words,
        checks=_checks_of_reports(reports, requested),
        launched=tuple(launched),
        missing=missing,
        **origin,
    )


def stalls_of(kernel: RawKernel, implementation: str = "") -> KernelStalls:
    """One launch.  implementation: "": inferred from the kernel's name."""
    sources = SourceFiles(kernel.sources)
    known = _stages(kernel)
    stages, lines, from_neighbours = attribute(kernel, sources, known)
    facts = numbers(kernel)
    averages = {} if kernel.totals else average(kernel)
    absent = [name for name, value in facts.items() if value in (None, ())]
    if facts["tensor_flops"] == 0:  # then the type of its operands is unknown
        absent.remove("tensor_peak_tflops")
    if not kernel.totals and not averages:
        absent.append("stall reasons")
    if not kernel.points:
        absent.append("source lines")
    count = kernel.number(_SAMPLE_COUNT)
    name = kernel.function
    stalls = KernelStalls(
        kernel=name,
        implementation=implementation
        or known.kernels.get(name, "")
        or sources.implementation(name),
        **facts,
        sample_count=round(count) if count is not None else sum(kernel.totals.values()) or None,
        samples=most_first(kernel.totals),
        average=averages,
        stages=stages,
        idle=tuple(stage for stage in stages if is_idle(stage)),
        lines=lines,
        from_neighbours=from_neighbours,
        unlabelled=tuple(sorted(sources.unlabelled)),
        not_collected=tuple(absent),
    )
    checks = _checks_of_kernel(kernel, stalls, sources.not_recorded)
    return stalls.model_copy(update={"checks": checks, "hints": hints(stalls)})


def _stages(kernel: RawKernel) -> Stages:
    """The stages of the operator with a kernel of this name; for an unknown kernel those of all
    operators.
    """
    every = [operator.stages for operator in operators.records()]
    for stages in every:
        of_libraries = (source["stages"] for source in stages.sources.values())
        if any(kernel.function in names for names in (stages.kernels, *of_libraries)):
            return stages
    return Stages.together(every)


# --- facts


def numbers(kernel: RawKernel) -> dict[str, Any]:
    """The resources and the speed of a launch, by the fields of KernelStalls; None or () if not
    collected.
    """
    grid = [kernel.number(f"launch__grid_dim_{axis}") for axis in "xyz"]
    limits = {
        name: limit
        for name, metric in _LIMITS.items()
        if (limit := kernel.number(metric)) is not None
    }
    facts: dict[str, Any] = {name: kernel.number(*metrics) for name, metrics in _METRICS.items()}
    shared = [
        kernel.number(f"launch__shared_mem_per_block_{kind}")
        for kind in ("static", "dynamic", "driver")
    ]
    if facts["shared_bytes"] is None and any(part is not None for part in shared):
        facts["shared_bytes"] = sum(filter(None, shared))
    facts["duration_us"] = _product(facts["duration_us"], 1e-3)
    if facts["issue_pct"] is None:
        facts["issue_pct"] = _product(kernel.number("smsp__issue_active.avg.per_cycle_active"), 100)
    if facts["l2_bytes"] is None:
        facts["l2_bytes"] = _product(kernel.number("lts__t_sectors.sum"), _SECTOR_BYTES)
    tensor_flops, tensor_peak = _tensor(kernel, facts["tensor_pct"])
    bandwidth = _product(
        kernel.number("dram__bytes.sum.peak_sustained"),
        kernel.number("dram__cycles_elapsed.avg.per_second"),
    )
    facts |= {
        "grid": None if grid[0] is None else tuple(int(size or 1) for size in grid),
        "limited_by": tuple(
            name for name, limit in limits.items() if limit == min(limits.values())
        ),
        "tensor_flops": tensor_flops,
        "fp32_flops": _fp32(kernel),
        "dram_peak_gb_per_s": _product(bandwidth, 1e-9),
        "tensor_peak_tflops": tensor_peak,
    }
    for name in _WHOLE:
        if facts[name] is not None:
            facts[name] = round(facts[name])
    return facts


def _tensor(kernel: RawKernel, pipe_pct: float | None) -> tuple[float | None, float | None]:
    """(operations on the tensor cores, their dense peak in TFLOP/s for the operand type that was
    used most).
    """
    kinds = {
        name.removesuffix(".sum"): count
        for name in kernel.metrics
        if name.startswith(_TENSOR_OPS)
        and name.endswith(".sum")
        and (count := kernel.number(name)) is not None
    }
    if not kinds:
        return None, None
    flops = sum(kinds.values())
    most = max(kinds, key=kinds.__getitem__)
    peak = kernel.number(f"{most}.sum.peak_sustained_elapsed.per_second")
    if peak is None:
        per_cycle = kernel.number(f"{most}.sum.peak_sustained")
        peak = _product(per_cycle, kernel.number("sm__cycles_elapsed.avg.per_second"))
    share_pct = kernel.number(f"{most}.sum.pct_of_peak_sustained_elapsed")
    if not (peak and share_pct and pipe_pct):
        return flops, None
    return flops, peak / (2 if pipe_pct / share_pct > 1.5 else 1) * 1e-12


def _fp32(kernel: RawKernel) -> float | None:
    """Additions, multiplications and twice the fused ones, by ordinary threads."""
    cycles = kernel.number("smsp__cycles_elapsed.avg", "sm__cycles_elapsed.avg")
    total = 0.0
    if cycles is None:
        per_ns = _product(kernel.number("smsp__cycles_elapsed.avg.per_second"), 1e-9)
        cycles = _product(per_ns, kernel.number(*_DURATION))
    for name, operations in (("fadd", 1), ("fmul", 1), ("ffma", 2)):
        rate = kernel.number(
            f"smsp__sass_thread_inst_executed_op_{name}_pred_on.sum.per_cycle_elapsed"
        )
        if rate is None or cycles is None:
            return None
        total += operations * rate * cycles
    return total


def average(kernel: RawKernel) -> dict[str, float]:
    """Stall reason -> warps that wait for it while one issues, of the whole kernel: counted, not
    sampled.
    """
    waiting: dict[str, float] = {}
    for name in kernel.metrics:
        match = _AVERAGE.fullmatch(name)
        value = kernel.number(name)
        if match and value:
            reason = CANONICAL.get(match[1], match[1])
            waiting[reason] = waiting.get(reason, 0.0) + value
    return most_first(waiting)


def _product(value: float | None, factor: float | None) -> float | None:
    return None if value is None or factor is None else value * factor


# --- self-checks


def _result(holds: bool | None, detail: str, lacking: str = "not collected") -> CheckResult:
    """The result of a self-check.  holds: None if it cannot be checked; `lacking` is the reason."""
    if holds is None:
        return "not checked", lacking
    return "ok" if holds else "failed", detail


def _checks_of_kernel(
    kernel: RawKernel, stalls: KernelStalls, missing_files: set[str]
) -> SelfChecks:
    """What the counters of one kernel say of it, one check after another."""
    count = kernel.number(_SAMPLE_COUNT)
    dropped = kernel.number("smsp__pcsamp_dropped_bytes")
    counted = None if count is None or not kernel.totals else round(count)
    total = sum(kernel.totals.values()) if kernel.points else None
    no_bytes_dropped = None if dropped is None else not dropped
    unknown = sum(stalls.stages.get(UNKNOWN, {}).values())
    lost = f"{unknown:,} samples on lines of unknown stage" if unknown else "yes"
    recorded = "yes"
    if missing_files:
        recorded = f"not in the report: {', '.join(sorted(missing_files))}"
    of_lines = [line.samples for line in stalls.lines]
    all_known = all_recorded = None
    if kernel.points:
        all_known = unknown == 0
        all_recorded = not missing_files
    return {
        "reasons add up to the samples": _adds_up([kernel.totals], counted),
        "lines add up to the kernel": _adds_up(of_lines, total),
        "stages add up to the kernel": _adds_up(stalls.stages.values(), total),
        "every reason adds up over the lines": _reasons_add_up(kernel),
        "every line has a stage": _result(all_known, lost),
        "the source was recorded": _result(all_recorded, recorded),
        "no sample was dropped": _result(no_bytes_dropped, f"{dropped or 0:,.0f} bytes dropped"),
    }


def _adds_up(samples: Iterable[Mapping[str, int]], expected: int | None) -> CheckResult:
    """Whether there are as many samples as expected."""
    if expected is None:
        return _result(None, "")
    count = sum(sum(counts.values()) for counts in samples)
    missing = "" if count == expected else f"; {expected - count:,} missing"
    return _result(count == expected, f"{count:,} of {expected:,}{missing}")


def _reasons_add_up(kernel: RawKernel) -> CheckResult:
    """Whether the samples of the instructions are those of the kernel, reason by reason."""
    by_reason = sum((Counter(point.samples) for point in kernel.points), Counter[str]())
    off = [
        f"{reason} {by_reason[reason]:,} of {total:,}"
        for reason, total in kernel.totals.items()
        if by_reason[reason] != total
    ]
    holds = not off if kernel.points and kernel.totals else None
    detail = "; ".join(off) or f"{len(kernel.totals)} reasons"
    return _result(holds, detail)


def _checks_of_reports(reports: Sequence[RawReport], requested: Sequence[Launched]) -> SelfChecks:
    """Checks of the files, and that only the requested launches, if they are known, were
    profiled.
    """
    checks: SelfChecks = {}
    for report in reports:
        end = "its last block" if report.whole else "a block"
        detail = f"{'ends' if report.whole else 'does not end'} at the end of {end}"
        checks[f"{report.name} is complete"] = _result(report.whole, detail, "no way to tell")
    if not requested:
        lacking = "the report does not say which kernels were requested"
        checks["only the wanted launches were profiled"] = _result(None, "", lacking)
    for report, launched in zip(reports, requested, strict=False):
        name = f"only the wanted launches of {launched.implementation} were profiled"
        checks[name] = _only_requested(report, launched)
    return checks


def _only_requested(report: RawReport, launched: Launched) -> CheckResult:
    """Whether the launches of a call, and no others, were profiled."""
    profiled = Counter(kernel.function for kernel in report.kernels)
    requested = {launch.kernel for launch in launched.launches}
    wrong: list[str] = []
    if absent := requested - set(profiled):
        wrong.append(f"not profiled: {', '.join(sorted(absent))}")
    if others := set(profiled) - requested:
        wrong.append(f"not requested: {', '.join(sorted(others))}")
    if profiled.total() != launched.launch_count:
        wrong.append(f"{profiled.total()} launches instead of {launched.launch_count}")
    detail = f"{profiled.total()} of {launched.launch_count}; compiled before"
    return _result(not wrong, "; ".join(wrong) or detail)


# --- hints: each names its evidence, and needs collected values

_MOST = 6
_WORTH_PCT = 5.0  # of the busy samples: a smaller share is not worth a change
_BUSY_MEMORY_PCT = 70.0  # of a memory's bandwidth: above this it counts as full
_MOST_HIT_PCT = 80.0  # of L2: above this, loads wait for L2 and not for DRAM
_FULL_WAVE = 0.8

# reason -> remedy.  Reasons whose remedy depends on more are in `_advice`.
ADVICE = {
    "short_scoreboard": "Shared memory, exponentials or shuffles answer too late: issue them "
    "earlier, have fewer of them in the chain, or compute them once for several uses.",
    "barrier": "Warps wait for the slowest of their block: give them equal work, put fewer "
    "barriers into the loop, or let only the warps that share data wait for each other.",
    "wait": "The chain of dependent instructions is the limit, at a fixed latency each: more "
    "independent work per warp or more warps hide it.",
    "math_pipe_throttle": "A compute pipe is full here: this is work, and only less work helps.",
    "mio_throttle": (
        "Too many shared-memory, exponential or shuffle instructions at once: wider accesses, or "
        "fewer."
    ),
    "lg_throttle": "Too many small global accesses at once: wider ones, or TMA copies.",
    "no_instructions": (
        "The code does not fit the instruction cache: unroll less, or specialise less."
    ),
    "membar": (
        "A fence waits for writes to arrive: a narrower scope or one fence for several writes."
    ),
    "warpgroup_arrive": (
        "The tensor cores' operands are not ready: prepare registers and fences earlier."
    ),
    "sleeping": "Warps sleep while they poll a flag: the warps that set it are late.",
    "dispatch_stall": "The dispatcher holds instructions back, mostly for register-file "
    "conflicts: this is rarely in a kernel's hand.",
    "branch_resolving": "Short loops and branches: unroll, or use predicates.",
    "imc_miss": "Constants miss their cache: fewer kernel arguments in the inner loop.",
    "drain": "Programs end while their stores are still under way: fewer, larger programs.",
    "tex_throttle": (
        "Too many local or surface accesses at once; registers that spilled count as such."
    ),
}


def hints(kernel: KernelStalls) -> dict[str, float | None]:
    """Hints by stage and reason, the largest first, then those about the whole kernel: see
    `KernelStalls`.
    """
    by_count: list[tuple[int, str, float]] = []
    for stage, samples in kernel.stages.items():
        for reason, count in () if stage in kernel.idle else samples.items():
            share = 100 * count / kernel.busy_samples
            if share < _WORTH_PCT:
                continue
            of_stage = [line for line in kernel.lines if line.stage == stage]
            hottest = max(of_stage, key=lambda line: line.samples.get(reason, 0))
            if advice := _advice(kernel, stage, reason, hottest.text):
                quote = f" `{hottest.text}`" if hottest.text else ""
                part = 100 * hottest.samples.get(reason, 0) / count
                hint = (
                    f"{reason} in {stage} is {share:.0f} % of the kernel's busy samples, "
                    f"{part:.0f} % of them on {hottest.file}:{hottest.line}{quote}{advice}"
                )
                by_count.append((count, hint, share))
    by_count.sort(key=lambda hint: -hint[0])
    return {text: share for _, text, share in by_count[:_MOST]} | dict.fromkeys(_whole(kernel))


def _advice(kernel: KernelStalls, stage: str, reason: str, text: str) -> str:
    """The end of a hint, or "".  text: of the hottest line."""
    if reason in ("selected", "not_selected"):  # the warp could issue: no stall
        return ""
    if stage.startswith("waiting") or "mbarrier.wait" in text:
        return (
            ".  Other warps of this program are late with what these wait for: look at the roles "
            "that fill the barrier, or let them run further ahead (a longer ring)."
        )
    if stage == "state_passing.wait":
        return (
            ".  The states of earlier segments are not ready: use shorter segments, or more heads "
            "and sequences at once."
        )
    if reason == "barrier" and "mma_wait" in text:
        return (
            ".  The tensor cores are at work and nothing else is: put independent work between the "
            "start of a product and its use, or alternate two programs or warp groups around the "
            "tensor cores."
        )
    if reason == "long_scoreboard":
        return _global_load(kernel)
    return f".  {ADVICE[reason]}" if reason in ADVICE else ""


def _global_load(kernel: KernelStalls) -> str:
    """The end of a hint on warps that wait for global memory: which memory limits, if one does."""
    known = (("L2 hit rate", kernel.l2_hit_pct), ("L2", kernel.l2_pct), ("DRAM", kernel.dram_pct))
    memory = "".join(f"{name} {value:.0f} %, " for name, value in known if value is not None)
    evidence = f"; {memory.removesuffix(', ')}." if memory else "."
    if (kernel.dram_pct or 0) >= _BUSY_MEMORY_PCT:
        return (
            f"{evidence}  DRAM is full: fewer bytes (smaller types, one pass less, more reuse) is "
            "all that helps."
        )
    if (kernel.l2_pct or 0) >= _BUSY_MEMORY_PCT:
        return f"{evidence}  L2 is full: share loads between heads, or read less often."
    rest = "more stages in flight if shared memory then still holds as many programs."
    if (kernel.l2_hit_pct or 0) >= _MOST_HIT_PCT:
        return (
            f"{evidence}  Bound by the latency of L2, not by a bandwidth: fewer re-reads, or {rest}"
        )
    return (
        f"{evidence}  Bound by the latency of loads, not by a bandwidth: more warps per SM, or "
        f"{rest}"
    )


def _whole(kernel: KernelStalls) -> Iterator[str]:
    """Hints about the whole kernel: spilled registers, occupancy, the last wave of blocks."""
    waves = kernel.waves
    occupancy = kernel.occupancy_pct
    issue = kernel.issue_pct
    if kernel.spill_requests:
        yield (
            f"{kernel.spill_requests:,} loads and stores of spilled registers, at "
            f"{kernel.registers} registers.  Fewer values alive at once, smaller tiles or more "
            "warps per tile."
        )
    if (
        occupancy is not None
        and occupancy < 30
        and kernel.limited_by
        and issue is not None
        and 0 < issue < 50
    ):
        yield (
            f"Occupancy {occupancy:.0f} %, limited by {' and '.join(kernel.limited_by)}; a "
            f"scheduler issues in {issue:.0f} % of the cycles.  Few warps hide little latency: it "
            "must be hidden inside a warp, by loads in flight and independent work, or smaller "
            "tiles must let more programs in."
        )
    if waves is not None and waves < _FULL_WAVE:
        full = f"The grid fills {100 * waves:.0f} % of the GPU once."
        yield f"{full}  More programs: split the sequence or the heads further."
    elif waves is not None and 1 < waves < 4 and 0 < waves % 1 < 0.5:
        last = f"{waves:.2f} waves: the last one keeps {100 * (waves % 1):.0f} % of the GPU busy."
        yield (
            f"{last}  Cut the grid so that the last wave is fuller, or launch persistent programs."
        )
