"""The document of a stall report, and the changes of stages between two stall reports."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from ssdprof.core import words as fmt
from ssdprof.core.base import distinct, grouped
from ssdprof.core.stalls import KernelStalls, Line, SelfChecks, StallReport, most_first
from ssdprof.report.calls import resources
from ssdprof.report.facts import Fact, gpu, software, when
from ssdprof.report.table import (
    Document,
    Section,
    Table,
    TableRow,
    VerdictLine,
    facts,
    section,
    strings,
    table,
)

READING = (
    "Share: percent of an implementation's busy warp time, that is, of the samples of warps that "
    "do not idle, each kernel weighed by its duration.  Time: that share of the duration; stages "
    "overlap, so removing a stage may save less.  Durations are ncu's: alone on the GPU, caches "
    "cold, not those of a run."
)
STAGES_TITLE = "Stages and stall reasons"  # the title of the section with pictures
# reason, as ncu names it -> what the warp does; not all of them are stalls
REASONS = {
    "selected": "issuing: not a stall",
    "not_selected": "ready, but another warp was chosen: not a stall",
    "long_scoreboard": "waits for memory beyond the SM (L2, DRAM), or at an mbarrier",
    "short_scoreboard": "waits for shared memory, a shuffle or a special function (exp2)",
    "barrier": "waits for other warps at a barrier, or for the tensor cores to finish",
    "wait": "waits out the fixed latency of the instruction before",
    "math_pipe_throttle": "its compute pipe is full",
    "mio_throttle": "the queue to shared memory and special functions is full",
    "lg_throttle": "the queue to global memory is full",
    "tex_throttle": "the queue to the texture unit is full",
    "no_instructions": "its instructions are not in the cache yet",
    "branch_resolving": "waits for a jump's target",
    "dispatch_stall": "the dispatcher held the instruction back",
    "warpgroup_arrive": "waits for registers to be handed to the tensor cores",
    "membar": "waits at a memory fence",
    "sleeping": "sleeps before it looks again",
    "imc_miss": "a constant is not in the cache",
    "drain": "has ended, but its stores have not",
    "misc": "something else",
}
_HINT_PCT = 4.0  # a hint on a stage is shown from this percentage of the group's busy time on
_KERNEL_PCT = 30.0  # a hint on a whole kernel is shown from this percentage of the group's time on
_MOST_HINTS = 6  # on stages
_MOST_LINES = 10  # in a table of the hottest lines
_MOST_REASONS = 7  # that have a column; the others are summed in the column "other"


# --- the kernels of an implementation, weighted by their durations

# reason -> percent of an implementation's busy warp time; their sum is the share of a stage
Share = Mapping[str, float]


def summed(shares: Iterable[Share]) -> Share:
    """The sum of several shares, reason by reason."""
    total: dict[str, float] = {}
    for share in shares:
        for reason, pct in share.items():
            total[reason] = total.get(reason, 0.0) + pct
    return total


class KernelGroup:
    """The kernels of one implementation, weighted by their durations.

    Only kernels with samples in stages that are not idle count in the fields from `stages` to
    `hints`.

    stages: "stage" or "stage.part" -> its share, in the order of the algorithm.
    whole: stage -> its share, with the parts added up.
    all: the sum of all stages, which is 100 %; empty if no kernel counts.
    idle: idle stage -> percentage of all samples.  Idle stages are in none of the shares above.
    lines: (percentage of the busy time, line), the hottest first, without lines of idle stages.
    hints: (kernel, hint), with only the hints that matter for the whole implementation.
    is_sampled: whether any kernel counts.
    duration_us: the summed duration of all kernels; None if ncu did not measure one of them.
    """

    def __init__(
        self, name: str, kernels: Sequence[KernelStalls], words: Mapping[str, str]
    ) -> None:
        """kernels: in the order of their launches.  words: "stage.part" -> the part in words."""
        self.name = name
        self.kernels = kernels
        self.words = words
        self.stages: dict[str, Share] = {}
        self.idle: dict[str, float] = defaultdict(float)
        lines: list[tuple[float, Line]] = []
        weights = _weights(kernels)
        for kernel, weight in weights:
            all_samples = sum(kernel.samples.values())
            per_sample = 100 * weight / kernel.busy_samples
            for stage, samples in kernel.stages.items():
                if stage in kernel.idle:
                    self.idle[stage] += 100 * weight * sum(samples.values()) / all_samples
                else:
                    share = {reason: per_sample * count for reason, count in samples.items()}
                    self.stages[stage] = summed([self.stages.get(stage, {}), share])
            lines += [
                (per_sample * line.total, line)
                for line in kernel.lines
                if line.stage not in kernel.idle
            ]
        whole_stages = dict.fromkeys(stage.split(".")[0] for stage in self.stages)
        self.whole = {stage: summed(self.parts(stage).values()) for stage in whole_stages}
        self.all = summed(self.stages.values())
        self.lines = sorted(lines, key=lambda row: -row[0])
        self.hints = tuple(_hints(weights))
        self.is_sampled = bool(self.stages)
        known = [kernel.duration_us for kernel in kernels if kernel.duration_us is not None]
        self.duration_us = sum(known) if len(known) == len(kernels) else None

    def part(self, stage: str) -> str:
        """The part of "stage.part" in words; of a stage without parts, the stage itself."""
        return self.words.get(stage, stage.split(".", 1)[-1].replace("_", " "))

    def parts(self, stage: str) -> dict[str, Share]:
        """The shares of the parts of a stage, by "stage.part".  Samples of the stage that belong to
        no part are those of "stage".
        """
        return {part: share for part, share in self.stages.items() if part.split(".")[0] == stage}

    def pct(self, stage: str) -> float | None:
        """The percentage of a whole stage, or of "all"; None if the group has no such stage."""
        share = self.all if stage == "all" else self.whole.get(stage)
        return None if share is None else sum(share.values())

    def us(self, pct: float | None) -> float | None:
        """A percentage of the group's duration, in microseconds; None if one of the two is not
        known.
        """
        return None if pct is None or self.duration_us is None else self.duration_us * pct / 100


def kernel_groups(report: StallReport) -> tuple[KernelGroup, ...]:
    """A group for each implementation, and one for each name of kernels that belong to no
    implementation.
    """
    by_name = grouped(report.kernels, lambda kernel: kernel.implementation or kernel.kernel)
    return tuple(KernelGroup(name, kernels, report.words) for name, kernels in by_name.items())


def _hints(weights: Sequence[tuple[KernelStalls, float]]) -> Iterator[tuple[str, str]]:
    """(kernel, hint): at most `_MOST_HINTS` hints on stages, the one about the longest time first,
    then hints on whole kernels.  Hints about too little of the group's time are left out.

    weights: each kernel with its share of the group's time, from 0 to 1.
    """
    of_stages = []
    of_kernels = []
    for kernel, weight in weights:
        for hint, pct in kernel.hints.items():
            if pct is None and 100 * weight >= _KERNEL_PCT:
                of_kernels.append((kernel.kernel, hint))
            elif pct is not None and weight * pct >= _HINT_PCT:
                of_stages.append((weight * pct, kernel.kernel, hint))
    of_stages.sort(key=lambda row: -row[0])
    yield from ((kernel, hint) for _, kernel, hint in of_stages[:_MOST_HINTS])
    yield from of_kernels


def _weights(kernels: Sequence[KernelStalls]) -> list[tuple[KernelStalls, float]]:
    """The kernels with samples in stages that are not idle, each with its share of their time, from
    0 to 1.

    Shares are of the durations, or of the samples if a duration is not known.
    """
    sampled = [kernel for kernel in kernels if kernel.busy_samples]
    sizes = [kernel.duration_us or 0.0 for kernel in sampled]
    if any(kernel.duration_us is None for kernel in sampled):
        sizes = [sum(kernel.samples.values()) for kernel in sampled]
    return [(kernel, size / sum(sizes)) for kernel, size in zip(sampled, sizes, strict=True)]


def changes(base: StallReport | None, new: StallReport | None) -> Iterator[Table]:
    """A table of the stages of each implementation that was profiled in both reports; a table
    without rows if it has no samples or no duration in one of them.  No table without two reports.
    """
    if base is None or new is None:
        return
    before = {group.name: group for group in kernel_groups(base)}
    for group in kernel_groups(new):
        name = group.name
        if name in before:
            yield side_by_side({f"{name} in BASE": before[name], f"{name} in NEW": group})


# --- the document


def compose(report: StallReport) -> Document:
    """The document of a stall report."""
    profiled = kernel_groups(report)
    title = ["ssdprof stalls"]
    if report.layer and report.dims:
        title += [
            report.model.split(",")[0],
            report.layer.name,
            fmt.tokens(report.dims.seqlen),
            str(report.precision),
        ]
    title.append(report.gpu)
    lines = [f"No stalls: {report.missing}"] if report.missing else []
    for group in profiled:
        if group.duration_us is not None:
            kernels = f"{len(group.kernels)} kernels" if len(group.kernels) > 1 else "one kernel"
            lines.append(f"{group.name}: {fmt.duration(group.duration_us)} in {kernels}.")
    origin = {"when": when(report.created), "read from": ", ".join(report.sources)}
    return Document(
        title=", ".join(filter(None, title)),
        version=report.ssdprof_version,
        origin=tuple((label, value) for label, value in origin.items() if value),
        verdict=tuple(VerdictLine(line, not report.missing) for line in lines),
        caveats=tuple(_caveats(report)),
        sections=tuple(_sections(report, profiled)),
    )


def _sections(report: StallReport, profiled: Sequence[KernelGroup]) -> Iterator[Section]:
    """The sections: the kernels, their stages, the hints, the hottest lines and what ran, then the
    details, which are folded.
    """
    if report.missing:
        yield section("Kernel resources", _resources(report))
    yield section("Kernels", _kernels(report))
    comparison = side_by_side({group.name: group for group in profiled})
    yield section(STAGES_TITLE, comparison, *map(by_stage, profiled), reading=READING)
    yield section("Stall reasons", _averages(report))
    hints = chain.from_iterable(group.hints for group in profiled)
    headers = ("kernel", "evidence, and what may help")
    yield section("Hints", facts("What the numbers point to", headers, hints))
    yield section("Hottest lines", *map(_hottest_lines, profiled))
    reasons = distinct(most_first(group.all) for group in profiled)
    meanings = {reason: REASONS.get(reason, REASONS["misc"]) for reason in reasons}
    yield section("What ran", facts("What ran", ("", "ssdprof stalls"), _facts(report)))
    explained = facts("Stall reasons", ("reason", "what the warp does"), meanings.items())
    yield section("What the reasons mean", explained, folded=True)
    yield section("Self-checks", _self_checks(report), folded=True)


def _caveats(report: StallReport) -> Iterator[str]:
    """The caveats: failed self-checks, libraries that were left out, implementations that ran with
    another precision, and source files whose stages are not known.
    """
    all_checks = [("", report.checks)]
    all_checks += [(f" of {kernel.kernel}", kernel.checks) for kernel in report.kernels]
    for of_kernel, checks in all_checks:
        for name, (status, detail) in checks.items():
            if status == "failed":
                yield f"A self-check{of_kernel} failed: {name}: {detail}."
    yield from report.left_out
    for launched in report.launched:
        if launched.precision != report.precision:
            yield (
                f"{launched.implementation} ran with {launched.precision}: it does not have "
                f"{report.precision}."
            )
    kernels_of_files: dict[str, list[str]] = defaultdict(list)
    for kernel in report.kernels:
        for file in kernel.unlabelled:
            kernels_of_files[file].append(kernel.kernel)
    for file, names in kernels_of_files.items():
        instead = "its samples are listed by function, and by line under the hottest lines"
        yield f"The stages of {file} are not known ({fmt.words(dict.fromkeys(names))}): {instead}."


# --- tables


def _resources(report: StallReport) -> Table:
    """The resources that Triton reports for the kernels; shown if ncu measured nothing."""
    rows = []
    for launched in report.launched:
        for launch in launched.launches:
            rows.append(
                {
                    "implementation": launched.implementation,
                    "variant": launched.variant,
                    **resources(launch),
                    "occupancy": fmt.share(launch.warps_pct),
                }
            )
    note = (
        "Registers and spills are per thread, shared memory per block; occupancy is what these "
        "allow."
    )
    title = "Resources of the kernels, from Triton"
    return table(title, rows, ("implementation", "variant", "kernel"), keys=3, note=note)


def _kernels(report: StallReport) -> Table:
    """A row for each launch of a kernel that ncu profiled."""
    note = (
        "Compute, memory: percent of the speed of light.  Issue slots: cycles in which a scheduler "
        "issued.  Registers: at launch, per thread; spills: loads and stores of spilled registers, "
        "by warps."
    )
    not_collected = set(chain.from_iterable(kernel.not_collected for kernel in report.kernels))
    if not_collected:
        note += f"  Not collected: {', '.join(sorted(not_collected))}."
    rows = map(_kernel, report.kernels)
    return table("Kernels", rows, ("kernel", "limited by"), note=note)


def _kernel(kernel: KernelStalls) -> TableRow:
    """What ncu measured during one launch of a kernel."""
    return {
        "kernel": kernel.kernel,
        "duration": fmt.duration(kernel.duration_us),
        "compute": fmt.share(kernel.compute_pct),
        "memory": fmt.share(kernel.memory_pct),
        "DRAM\nread": fmt.size_words(kernel.dram_read_bytes),
        "DRAM\nwritten": fmt.size_words(kernel.dram_write_bytes),
        "L2": fmt.size_words(kernel.l2_bytes),
        "L2\nhits": fmt.share(kernel.l2_hit_pct),
        "issue\nslots": fmt.share(kernel.issue_pct),
        "waves": fmt.MISSING if kernel.waves is None else f"{kernel.waves:.2f}",
        "grid": _grid(kernel),
        "threads": fmt.count(kernel.block),
        "registers": fmt.count(kernel.registers),
        "spills": fmt.count(kernel.spill_requests),
        "shared": fmt.size_words(kernel.shared_bytes),
        "occupancy": fmt.share(kernel.occupancy_pct),
        "possible": fmt.share(kernel.occupancy_limit_pct),
        "limited by": fmt.words(kernel.limited_by) if kernel.limited_by else fmt.MISSING,
    }


def _grid(kernel: KernelStalls) -> str:
    """The grid, without trailing dimensions of size 1: "132x4"; a dash if it is not known."""
    sizes = list(kernel.grid or ())
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes.pop()
    return "x".join(map(fmt.count, sizes)) or fmt.MISSING


def by_stage(group: KernelGroup) -> Table:
    """A row for each stage of a group and one for all of them, with a column for each of the most
    frequent stall reasons and one for the others.

    The parts of a stage follow it, each in a row whose name begins with a dash.
    """
    shown = list(most_first(group.all))[:_MOST_REASONS]

    def row(title: str, share: Share) -> tuple[str, ...]:
        pcts = [share.get(reason, 0.0) for reason in shown]
        whole = sum(share.values())
        other = whole - sum(pcts)
        cells = (f"{pct:.1f}" if pct >= 0.05 else "" for pct in (*pcts, other))
        return title, fmt.share(whole, 1), fmt.duration(group.us(whole)), *cells

    rows = []
    for stage, share in group.whole.items():
        parts = group.parts(stage)
        rows.append(row(stage, share))
        if len(parts) > 1 or stage not in parts:
            for part, of_part in parts.items():
                name = "other" if part == stage else group.part(part)
                rows.append(row(f"– {name}", of_part))
    if rows:
        rows.append(row("all", group.all))
    idle = [f"{group.part(name)} {pct:.1f}%" for name, pct in group.idle.items()]
    note = f"Not a cost and not in the table, of all samples: {fmt.words(idle)}." if idle else ""
    headers = ("stage", "share", "time", *(reason.replace("_", "\n") for reason in shown), "other")
    return strings(f"{group.name}: stages and stall reasons", headers, rows, note=note)


def side_by_side(profiled: Mapping[str, KernelGroup]) -> Table:
    """The time and share of each stage in each group that has samples and a duration; without rows
    if these are fewer than two.

    profiled: name of a group in the headings -> the group.
    """
    sampled = {
        name: group
        for name, group in profiled.items()
        if group.is_sampled and group.duration_us is not None
    }
    if len(sampled) < 2:
        return table("", (), ())
    last: dict[str, int] = {}  # stage -> its largest position in any group
    for group in sampled.values():
        for position, stage in enumerate((*group.whole, "all")):
            last[stage] = max(position, last.get(stage, 0))
    rows = []
    for stage in sorted(last, key=last.__getitem__):
        row = {"stage": stage}
        for name, group in sampled.items():
            pct = group.pct(stage)
            row[f"{name},\ntime"] = fmt.duration(group.us(pct))
            row[f"{name},\nshare"] = fmt.share(pct, 1)
        rows.append(row)
    title = f"Stage by stage: {fmt.words(sampled)}"
    return table(title, rows, ("stage",))


def _averages(report: StallReport) -> Table:
    """A row for each stall reason with a column for each kernel.

    It is for kernels of which ncu counted waiting warps and took no samples.
    """
    kernels = [kernel for kernel in report.kernels if kernel.average]
    averages = [kernel.average for kernel in kernels]
    rows = []
    for reason in dict.fromkeys(chain.from_iterable(averages)):
        pcts = [100 * average.get(reason, 0.0) / sum(average.values()) for average in averages]
        rows.append(
            (reason, *(fmt.share(pct, 1) for pct in pcts), REASONS.get(reason, REASONS["misc"]))
        )
    note = (
        "Percent of the time of all warps, idle ones among them.  The report does not say in which "
        "line or stage."
    )
    headers = ("reason", *(kernel.kernel for kernel in kernels), "what the warp does")
    last = len(headers) - 1
    title = "Stall reasons, without samples"
    return strings(title, headers, rows, (0, last), wraps=last, note=note)


def _hottest_lines(group: KernelGroup) -> Table:
    """The lines with the largest shares of the busy time, and their most frequent reasons."""
    rows = [
        {
            "share": fmt.share(pct, 1),
            "line": f"{line.file}:{line.line}" if line.line else "no line",
            "stage": line.stage,
            "reasons": _reasons(line),
            "source": line.text,
        }
        for pct, line in group.lines[:_MOST_LINES]
    ]
    text_headings = ("line", "stage", "reasons", "source")
    return table(f"{group.name}: the hottest lines", rows, text_headings, keys=2, wraps="source")


def _reasons(line: Line) -> str:
    """The two most frequent reasons of a line: "barrier 62%, selected 9%"."""
    reasons = list(line.samples.items())[:2]  # the most frequent ones are first
    return ", ".join(f"{reason} {100 * count / line.total:.0f}%" for reason, count in reasons)


def _facts(report: StallReport) -> Iterator[Fact]:
    """The facts about the report: the profiled layer, the machine, the command, and ncu's files.

    A report that ssdprof read, and did not profile itself, has no layer and no machine.
    """
    layer = report.layer
    dims = report.dims
    environment = report.environment
    if layer is not None and dims is not None:
        yield "model", report.model
        yield "layer", f"{layer.name} (layer {layer.index})"
        yield (
            "dimensions",
            f"{fmt.plural(dims.batch, 'sequence')} of {fmt.tokens(dims.seqlen)}, {dims}",
        )
        yield "precision", str(report.precision)
        variants = (
            f"{launched.implementation}: {launched.variant}" for launched in report.launched
        )
        yield "variants", ", ".join(variants)
    if environment is None:
        yield "GPU", report.gpu
        yield "versions", f"ssdprof {report.ssdprof_version}, which read the reports"
    else:
        yield from gpu(environment)
        yield "CPU", f"{environment.cpu}, {environment.platform}"
        yield software(environment, ssdprof=report.ssdprof_version, ncu=report.ncu)
        yield "started", report.created
        yield "command", " ".join(report.command)
    yield (
        "reports",
        ", ".join(f"{name} (sha256 {digest[:12]}...)" for name, digest in report.sources.items()),
    )


def _self_checks(report: StallReport) -> Table:
    """The self-checks of the report, then those of each kernel."""
    rows = _checks("report", report.checks)
    for kernel in report.kernels:
        rows += _checks(kernel.kernel, kernel.checks, _sampled(kernel))
    text_headings = ("what", "requirement", "result", "detail")
    return table("Self-checks", rows, text_headings, wraps="requirement")


def _checks(what: str, checks: SelfChecks, passed: str = "") -> list[TableRow]:
    """The rows of self-checks, in which checks with the same result share a row.

    what: the subject of the checks, a kernel or the report.
    passed: stands in place of the details of the checks that hold; empty for these details.
    """
    rows = []
    for status, names in grouped(checks, lambda name: checks[name][0]).items():
        details = "; ".join(dict.fromkeys(checks[name][1] for name in names))
        if status == "ok" and passed:
            details = passed
        rows.append(
            {
                "what": what,
                "requirement": "; ".join(names),
                "result": "NO" if status == "failed" else status,
                "detail": details,
            }
        )
    return rows


def _sampled(kernel: KernelStalls) -> str:
    """The number of a kernel's samples, and the share of those on lines without a stage; empty
    without samples or lines.
    """
    total = sum(kernel.samples.values())
    if not (kernel.lines and total):
        return ""
    from_neighbours = fmt.share(100 * kernel.from_neighbours / total, 1)
    where = (
        "lines without a stage (libraries, helpers, the kernel's head), given to the stage of a "
        "neighbouring line"
    )
    return f"{total:,} samples, {from_neighbours} of them on {where}"
