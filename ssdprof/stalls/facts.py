"""Makes the stall report from what ncu measured: numbers, attributed samples, self-checks and
hints.

The names of ncu's metrics differ by chip and version.  Self-checks are made on every report and
shown with it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
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

_DURATION = ("gpu__time_duration.sum", "gpu__time_duration.avg")
# field of KernelStalls -> the metrics that may have its value; the first one that ncu collected
# counts
_METRICS = {
    "block": ("launch__block_size",),
    "registers": ("launch__registers_per_thread",),
    "spill_requests": ("sass__inst_executed_register_spilling", "derived__local_spilling_requests"),
    "shared_bytes": ("launch__shared_mem_per_block",),
    "waves": ("launch__waves_per_multiprocessor",),
    "occupancy_pct": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "occupancy_limit_pct": ("sm__maximum_warps_per_active_cycle_pct",),
    "duration_us": _DURATION,
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
# resource -> the metric with the number of blocks per SM that the resource allows
_LIMITS = {
    "registers": "launch__occupancy_limit_registers",
    "shared memory": "launch__occupancy_limit_shared_mem",
    "warps": "launch__occupancy_limit_warps",
    "blocks": "launch__occupancy_limit_blocks",
    "barriers": "launch__occupancy_limit_barriers",
}
_SAMPLE_COUNT = "smsp__pcsamp_sample_count"
# its group is a stall reason
_AVERAGE = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
_INTEGERS = {  # fields of KernelStalls whose values are whole numbers
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
_SECTOR_BYTES = 32  # of L2
_TENSOR_OPS = "sm__ops_path_tensor_src_"  # followed by the types of the operands


def analyse(
    reports: Sequence[RawReport],
    launched: Sequence[Launched] = (),
    *,
    missing: str = "",
    **origin: Any,
) -> StallReport:
    """The stall report of ncu's reports.  It depends on the arguments and on this version of
    ssdprof, not on the machine.

    launched: the launches of each implementation.  If there are reports, they are one for each
        implementation, in this order; empty for reports that were made without ssdprof.
    missing: the reason why there are no reports; empty if there are.
    origin: further fields of `StallReport`.
    """
    reports = _named_apart(reports)
    requested = () if missing else launched
    implementations = [""] * len(reports)  # not known: `stalls_of` infers them
    if requested:
        implementations = [call.implementation for call in requested]
    gpu = ""
    kernels: list[KernelStalls] = []
    words: dict[str, str] = {}
    for report, implementation in zip(reports, implementations, strict=True):
        for kernel in report.kernels:
            gpu = gpu or str(kernel.metrics.get("device__attribute_display_name", ""))
            kernels.append(stalls_of(kernel, implementation))
            words |= _operator_stages(kernel).words
    return StallReport(
        ssdprof_version=__version__,
        sources={report.name: report.sha256 for report in reports},
        gpu=gpu,
        kernels=tuple(kernels),
        words=words,
        checks=_checks_of_reports(reports, requested),
        launched=tuple(launched),
        missing=missing,
        **origin,
    )


def _named_apart(reports: Sequence[RawReport]) -> list[RawReport]:
    """The reports, of which none has the name of another, as files of two folders may: the second
    "r.ncu-rep" becomes "r.ncu-rep (another)".
    """
    by_name: dict[str, RawReport] = {}
    for report in reports:
        name = report.name
        while name in by_name:
            name += " (another)"
        by_name[name] = replace(report, name=name)
    return list(by_name.values())


def stalls_of(kernel: RawKernel, implementation: str = "") -> KernelStalls:
    """The results of one launch.

    implementation: empty to infer it from the kernel's name or its source file.
    """
    sources = SourceFiles(kernel.sources)
    operator_stages = _operator_stages(kernel)
    stages, lines, from_neighbours = attribute(kernel, sources, operator_stages)
    facts = numbers(kernel)
    averages = {} if kernel.totals else average_waiting_warps(kernel)
    not_collected = [name for name, value in facts.items() if value in (None, ())]
    # without products there is no type of operands, and no peak of such a type is missing
    if facts["tensor_flops"] == 0:
        not_collected.remove("tensor_peak_tflops")
    if not kernel.totals and not averages:
        not_collected.append("stall reasons")
    if not kernel.points:
        not_collected.append("source lines")
    name = kernel.function
    if not implementation:
        implementation = operator_stages.kernels.get(name, "") or sources.implementation(name)
    count = kernel.number(_SAMPLE_COUNT)
    if count is None:
        count = sum(kernel.totals.values())
    stalls = KernelStalls(
        kernel=name,
        implementation=implementation,
        **facts,
        sample_count=round(count) or None,
        samples=most_first(kernel.totals),
        average=averages,
        stages=stages,
        idle=tuple(stage for stage in stages if is_idle(stage)),
        lines=lines,
        from_neighbours=from_neighbours,
        unlabelled=tuple(sorted(sources.unlabelled)),
        not_collected=tuple(not_collected),
    )
    checks = _checks_of_kernel(kernel, stalls, sources.not_recorded)
    return stalls.model_copy(update={"checks": checks, "hints": hints(stalls)})


def _operator_stages(kernel: RawKernel) -> Stages:
    """The stages of the first operator that has a kernel of this name; for an unknown kernel, the
    stages of all operators.
    """
    all_stages = [operator.stages for operator in operators.records()]
    for stages in all_stages:
        of_libraries = (source["stages"] for source in stages.sources.values())
        if any(kernel.function in names for names in (stages.kernels, *of_libraries)):
            return stages
    return Stages.together(all_stages)


# --- facts


def numbers(kernel: RawKernel) -> dict[str, Any]:
    """The numbers of a launch: field of KernelStalls -> its value; None or () if ncu did not
    collect it.
    """
    grid = [kernel.number(f"launch__grid_dim_{axis}") for axis in "xyz"]
    blocks_per_sm = {
        name: blocks
        for name, metric in _LIMITS.items()
        if (blocks := kernel.number(metric)) is not None
    }
    fewest = min(blocks_per_sm.values(), default=0)
    facts: dict[str, Any] = {name: kernel.number(*metrics) for name, metrics in _METRICS.items()}
    shared = [
        kernel.number(f"launch__shared_mem_per_block_{kind}")
        for kind in ("static", "dynamic", "driver")
    ]
    if facts["shared_bytes"] is None and any(part is not None for part in shared):
        facts["shared_bytes"] = sum(filter(None, shared))
    facts["duration_us"] = _product(facts["duration_us"], 1e-3)  # ncu's value is in nanoseconds
    if facts["issue_pct"] is None:
        facts["issue_pct"] = _product(kernel.number("smsp__issue_active.avg.per_cycle_active"), 100)
    if facts["l2_bytes"] is None:
        facts["l2_bytes"] = _product(kernel.number("lts__t_sectors.sum"), _SECTOR_BYTES)
    tensor_flops, tensor_peak = _tensor_work(kernel, facts["tensor_pct"])
    bandwidth = _product(
        kernel.number("dram__bytes.sum.peak_sustained"),
        kernel.number("dram__cycles_elapsed.avg.per_second"),
    )
    facts |= {
        "grid": None if grid[0] is None else tuple(int(size or 1) for size in grid),
        "limited_by": tuple(name for name, blocks in blocks_per_sm.items() if blocks == fewest),
        "tensor_flops": tensor_flops,
        "fp32_flops": _fp32_flops(kernel),
        "dram_peak_gb_per_s": _product(bandwidth, 1e-9),
        "tensor_peak_tflops": tensor_peak,
    }
    for name in _INTEGERS:
        if facts[name] is not None:
            facts[name] = round(facts[name])
    return facts


def _tensor_work(kernel: RawKernel, pipe_pct: float | None) -> tuple[float | None, float | None]:
    """The work of the tensor cores: (operations, the dense peak in TFLOP/s of the operand type with
    the most operations).  Each is None if it is not known.

    pipe_pct: the percentage of cycles in which the tensor cores worked; None if it is not known.
    """
    flops_of_types: dict[str, float] = {}
    for name in kernel.metrics:
        count = kernel.number(name)
        if name.startswith(_TENSOR_OPS) and name.endswith(".sum") and count is not None:
            flops_of_types[name] = count
    if not flops_of_types:
        return None, None
    flops = sum(flops_of_types.values())
    most_used = max(flops_of_types, key=flops_of_types.__getitem__)
    peak = kernel.number(f"{most_used}.peak_sustained_elapsed.per_second")
    if peak is None:
        peak = _product(
            kernel.number(f"{most_used}.peak_sustained"),
            kernel.number("sm__cycles_elapsed.avg.per_second"),
        )
    shares_pct = [
        kernel.number(f"{name}.pct_of_peak_sustained_elapsed")
        for name, count in flops_of_types.items()
        if count
    ]
    # the operations of each type are a share of its own peak, and pipe_pct counts the cycles of all
    used_pct = sum(filter(None, shares_pct))
    if None in shares_pct or not (peak and used_pct and pipe_pct):
        return flops, None
    # pipe_pct / used_pct is about 1 if ncu's peaks are the dense ones, and about 2 if they are
    # those of sparse operands, which are twice the dense ones
    if pipe_pct / used_pct > 1.5:
        peak /= 2
    return flops, peak * 1e-12


def _fp32_flops(kernel: RawKernel) -> float | None:
    """The fp32 operations outside of the tensor cores, a fused multiply-add counted as two; None if
    ncu did not collect them.
    """
    cycles = kernel.number("smsp__cycles_elapsed.avg", "sm__cycles_elapsed.avg")
    if cycles is None:
        per_ns = _product(kernel.number("smsp__cycles_elapsed.avg.per_second"), 1e-9)
        cycles = _product(per_ns, kernel.number(*_DURATION))
    total = 0.0
    for name, operations in (("fadd", 1), ("fmul", 1), ("ffma", 2)):
        rate = kernel.number(
            f"smsp__sass_thread_inst_executed_op_{name}_pred_on.sum.per_cycle_elapsed"
        )
        if rate is None or cycles is None:
            return None
        total += operations * rate * cycles
    return total


def average_waiting_warps(kernel: RawKernel) -> dict[str, float]:
    """Stall reason -> the warps that wait for it, on average whenever a warp issues, over the whole
    kernel; the largest first, without zeros.

    ncu counted these warps, and did not sample them.
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
    """value * factor; None if one of them is not known."""
    return None if value is None or factor is None else value * factor


# --- self-checks


def _result(holds: bool | None, detail: str, lacking: str = "not collected") -> CheckResult:
    """The result of a self-check.

    holds: whether the condition holds; None if it cannot be checked.
    detail: the evidence, for both results.
    lacking: the reason why it cannot be checked.
    """
    if holds is None:
        return "not checked", lacking
    return "ok" if holds else "failed", detail


def _checks_of_kernel(
    kernel: RawKernel, stalls: KernelStalls, missing_files: set[str]
) -> SelfChecks:
    """The self-checks of one kernel.

    missing_files: the names of source files that are not in ncu's report.
    """
    count = kernel.number(_SAMPLE_COUNT)
    dropped = kernel.number("smsp__pcsamp_dropped_bytes")
    counted = None if count is None or not kernel.totals else round(count)
    total = sum(kernel.totals.values()) if kernel.points else None
    no_bytes_dropped = None if dropped is None else not dropped
    unknown = sum(stalls.stages.get(UNKNOWN, {}).values())
    stages_detail = f"{unknown:,} samples on lines of unknown stage" if unknown else "yes"
    files_detail = "yes"
    if missing_files:
        files_detail = f"not in the report: {', '.join(sorted(missing_files))}"
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
        "every line has a stage": _result(all_known, stages_detail),
        "the source was recorded": _result(all_recorded, files_detail),
        "no sample was dropped": _result(no_bytes_dropped, f"{dropped or 0:,.0f} bytes dropped"),
    }


def _adds_up(samples: Iterable[Mapping[str, int]], expected: int | None) -> CheckResult:
    """Whether there are as many samples as expected.  expected: None if it is not known."""
    if expected is None:
        return _result(None, "")
    count = sum(sum(counts.values()) for counts in samples)
    difference = expected - count
    if difference == 0:
        return _result(True, f"{count:,} of {expected:,}")
    kind = "missing" if difference > 0 else "too many"
    return _result(False, f"{count:,} of {expected:,}; {abs(difference):,} {kind}")


def _reasons_add_up(kernel: RawKernel) -> CheckResult:
    """Whether the samples of the instructions add up to those of the kernel for each reason."""
    by_reason: Counter[str] = Counter()
    for point in kernel.points:
        by_reason.update(point.samples)
    differences = [
        f"{reason} {by_reason[reason]:,} of {total:,}"
        for reason, total in kernel.totals.items()
        if by_reason[reason] != total
    ]
    holds = not differences if kernel.points and kernel.totals else None
    detail = "; ".join(differences) or f"{len(kernel.totals)} reasons"
    return _result(holds, detail)


def _checks_of_reports(reports: Sequence[RawReport], requested: Sequence[Launched]) -> SelfChecks:
    """The self-checks of ncu's files: whether each is complete, and whether only the requested
    launches were profiled.  None without files.

    requested: the launches of each report, in the same order; empty if they are not known.
    """
    checks: SelfChecks = {}
    for report in reports:
        detail = "does not end at the end of a block"
        if report.whole:
            detail = "ends at the end of its last block"
        checks[f"{report.name} is complete"] = _result(report.whole, detail, "no way to tell")
    if reports and not requested:
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
    faults: list[str] = []
    if absent := requested - set(profiled):
        faults.append(f"not profiled: {', '.join(sorted(absent))}")
    if others := set(profiled) - requested:
        faults.append(f"not requested: {', '.join(sorted(others))}")
    if profiled.total() != launched.launch_count:
        faults.append(f"{profiled.total()} launches instead of {launched.launch_count}")
    detail = f"{profiled.total()} of {launched.launch_count}; compiled before"
    return _result(not faults, "; ".join(faults) or detail)


# --- hints: each names its evidence, which must have been collected

_MOST_HINTS = 6  # hints on stages of a kernel
_WORTH_PCT = 5.0  # a smaller percentage of the busy samples is not worth a change
_BUSY_MEMORY_PCT = 70.0  # from this percentage of its bandwidth on, a memory counts as full
_MOST_HIT_PCT = 80.0  # from this hit rate of L2 on, loads wait for L2 and not for DRAM
_FULL_WAVE = 0.8  # a grid whose blocks take less than this share of the GPU's places is too small

# Stall reason -> remedy.  `_advice` has the reasons whose remedy depends on something else, too.
ADVICE = {
    "short_scoreboard": (
        "Shared memory, exponentials or shuffles answer too late: issue them earlier, have fewer "
        "of them in the chain, or compute them once for several uses."
    ),
    "barrier": (
        "Warps wait for the slowest of their block: give them equal work, put fewer barriers into "
        "the loop, or let only the warps that share data wait for each other."
    ),
    "wait": (
        "The chain of dependent instructions is the limit, at a fixed latency each: more "
        "independent work per warp or more warps hide it."
    ),
    "math_pipe_throttle": "A compute pipe is full here: this is work, and only less work helps.",
    "mio_throttle": (
        "Too many shared-memory, exponential or shuffle instructions at once: wider accesses, or "
        "fewer."
    ),
    "lg_throttle": (
        "Too many small global or local accesses at once: wider ones, or TMA copies.  Registers "
        "that spilled count as local."
    ),
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
    "dispatch_stall": (
        "The dispatcher holds instructions back, mostly for register-file conflicts: this is "
        "rarely in a kernel's hand."
    ),
    "branch_resolving": "Short loops and branches: unroll, or use predicates.",
    "imc_miss": "Constants miss their cache: fewer kernel arguments in the inner loop.",
    "drain": "Programs end while their stores are still under way: fewer, larger programs.",
    "tex_throttle": "Too many texture or surface accesses at once: fewer, or global ones.",
}


def hints(kernel: KernelStalls) -> dict[str, float | None]:
    """The hints on a kernel: on a stall reason in a stage, the most frequent first, then on the
    whole kernel.  See `KernelStalls.hints`.
    """
    shares: dict[str, float] = {}
    for stage, samples in kernel.stages.items():
        if stage in kernel.idle:
            continue
        for reason, count in samples.items():
            share = 100 * count / kernel.busy_samples
            if share < _WORTH_PCT:
                continue
            of_stage = [line for line in kernel.lines if line.stage == stage]
            hottest = max(of_stage, key=lambda line: line.samples.get(reason, 0))
            if advice := _advice(kernel, stage, reason, hottest.text):
                quote = f" `{hottest.text}`" if hottest.text else ""
                share_of_line = 100 * hottest.samples.get(reason, 0) / count
                hint = (
                    f"{reason} in {stage} is {share:.0f} % of the kernel's busy samples, "
                    f"{share_of_line:.0f} % of them on {hottest.file}:{hottest.line}{quote}{advice}"
                )
                shares[hint] = share
    most_frequent = sorted(shares, key=shares.__getitem__, reverse=True)[:_MOST_HINTS]
    return {hint: shares[hint] for hint in most_frequent} | dict.fromkeys(_whole(kernel))


def _advice(kernel: KernelStalls, stage: str, reason: str, text: str) -> str:
    """The end of a hint: what may help against a stall reason in a stage; empty if the reason is no
    stall, or nothing is known to help.

    text: the line that has most of these samples.
    """
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
    """The end of a hint on warps that wait for global memory: which memory is full, or else what
    may hide its latency.
    """
    known = (("L2 hit rate", kernel.l2_hit_pct), ("L2", kernel.l2_pct), ("DRAM", kernel.dram_pct))
    memory = ", ".join(f"{name} {value:.0f} %" for name, value in known if value is not None)
    evidence = f"; {memory}." if memory else "."
    if (kernel.dram_pct or 0) >= _BUSY_MEMORY_PCT:
        return (
            f"{evidence}  DRAM is full: fewer bytes (smaller types, one pass less, more reuse) is "
            "all that helps."
        )
    if (kernel.l2_pct or 0) >= _BUSY_MEMORY_PCT:
        return f"{evidence}  L2 is full: share loads between heads, or read less often."
    cause = "the latency of loads, not by a bandwidth: more warps per SM"
    if (kernel.l2_hit_pct or 0) >= _MOST_HIT_PCT:
        cause = "the latency of L2, not by a bandwidth: fewer re-reads"
    return (
        f"{evidence}  Bound by {cause}, or more stages in flight if shared memory then still holds "
        "as many programs."
    )


def _whole(kernel: KernelStalls) -> Iterator[str]:
    """The hints on the whole kernel: spilled registers, occupancy, and the last wave of blocks."""
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
        yield (
            f"The grid fills {100 * waves:.0f} % of the GPU once.  More programs: split the "
            "sequence or the heads further."
        )
    elif waves is not None and 1 < waves < 4 and 0 < waves % 1 < 0.5:
        yield (
            f"{waves:.2f} waves: the last one keeps {100 * (waves % 1):.0f} % of the GPU busy.  "
            "Cut the grid so that the last wave is fuller, or launch persistent programs."
        )
