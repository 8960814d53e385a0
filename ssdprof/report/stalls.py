"""A report on stalls: its tables and pictures; and the changes of stages between two of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ssdprof.core import words as fmt
from ssdprof.core.base import grouped
from ssdprof.core.case import Launch
from ssdprof.core.stalls import KernelStalls, Launched, Line, SelfChecks, StallReport
from ssdprof.report.facts import Fact, gpu, software
from ssdprof.report.table import (
    Column,
    Document,
    Section,
    Table,
    VerdictLine,
    facts,
    section,
    strings,
    table,
    text,
)

READING = (
    "Percent of a design's busy warp time: samples of warps, without those that idle, a kernel "
    "weighed by its "
    "duration.  The time is that share of the duration; stages overlap, so removing "
    "a stage may save less.  Durations are ncu's: alone on the GPU, caches cold, not those of a "
    "run."
)
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
_UNKNOWN = "a reason that this version does not know"
_HINT_PCT = 4.0  # least share of the busy time that a hint on a stage is about
_KERNEL_PCT = 30.0  # the same of a hint on a whole kernel
_MOST_HINTS = 6
_HOTTEST = 10
_MOST_REASONS = 7
_LONGEST_LINE = 76


# --- the kernels of an implementation, weighted by their durations

# stall reason -> percent of an implementation's busy time; the stage's is their sum
Share = Mapping[str, float]


def most(share: Share) -> list[tuple[str, float]]:
    """Reasons, the largest first."""
    return sorted(share.items(), key=lambda item: (-item[1], item[0]))


def summed(shares: Iterable[Share]) -> Share:
    total: dict[str, float] = {}
    for reason, pct in (pair for share in shares for pair in share.items()):
        total[reason] = total.get(reason, 0.0) + pct
    return total


class KernelGroup:
    """The kernels of one implementation, weighted by their durations.

    stages: in the algorithm's order, "stage" or "stage.part"; whole: with their parts added up;
    all: their sum, 100 %.
    idle: in percent of all samples.
    hints: each with its kernel, the largest first; only those with enough effect on the whole.
    words: of parts of stages.
    lines: those that are not idle, each with its percent of the busy time, the hottest first.
    """

    def __init__(
        self, name: str, kernels: Sequence[KernelStalls], words: Mapping[str, str]
    ) -> None:
        self.name, self.kernels, self.words = name, kernels, words
        stages: dict[str, list[Share]] = defaultdict(list)
        self.idle: dict[str, float] = defaultdict(float)
        lines: list[tuple[float, Line]] = []
        weights = _weights(kernels)
        for kernel, weight in weights:
            each = 100 * weight / kernel.busy_samples
            for stage, samples in kernel.stages.items():
                if stage in kernel.idle:
                    self.idle[stage] += (
                        100 * weight * sum(samples.values()) / sum(kernel.samples.values())
                    )
                else:
                    stages[stage].append(
                        {reason: each * count for reason, count in samples.items()}
                    )
            lines += [
                (each * line.total, line) for line in kernel.lines if line.stage not in kernel.idle
            ]
        self.stages = {stage: summed(shares) for stage, shares in stages.items()}
        names = dict.fromkeys(name.split(".")[0] for name in self.stages)
        self.whole = {name: summed(self.parts(name).values()) for name in names}
        self.all = summed(self.stages.values())
        self.lines = sorted(lines, key=lambda one: -one[0])
        self.hints = tuple(_hints(weights))
        self.is_sampled = bool(self.stages)
        known = [kernel.duration_us for kernel in kernels if kernel.duration_us is not None]
        self.duration_us = sum(known) if len(known) == len(kernels) else None

    def part(self, stage: str) -> str:
        """The name of a part of a stage, as text."""
        return self.words.get(stage, stage.split(".", 1)[-1].replace("_", " "))

    def parts(self, stage: str) -> dict[str, Share]:
        return {part: share for part, share in self.stages.items() if part.split(".")[0] == stage}

    def us(self, pct: float | None) -> float | None:
        return None if pct is None or self.duration_us is None else self.duration_us * pct / 100


def kernel_groups(report: StallReport) -> tuple[KernelGroup, ...]:
    """One group for each implementation, and one for each kernel of no implementation."""
    found = grouped(report.kernels, lambda kernel: kernel.implementation or kernel.kernel)
    return tuple(KernelGroup(name, kernels, report.words) for name, kernels in found.items())


def _hints(weights: Sequence[tuple[KernelStalls, float]]) -> Iterator[tuple[str, str]]:
    """Hints on stages with enough of the group's time, then hints on kernels with much of it."""
    every = [
        (weight, one.kernel, hint, pct)
        for one, weight in weights
        for hint, pct in one.hints.items()
    ]
    of_stages = [
        (weight * pct, kernel, hint) for weight, kernel, hint, pct in every if pct is not None
    ]
    ranked = sorted((one for one in of_stages if one[0] >= _HINT_PCT), key=lambda one: -one[0])
    yield from ((kernel, hint) for _, kernel, hint in ranked[:_MOST_HINTS])
    yield from (
        (kernel, hint)
        for weight, kernel, hint, pct in every
        if pct is None and 100 * weight >= _KERNEL_PCT
    )


def _weights(kernels: Sequence[KernelStalls]) -> list[tuple[KernelStalls, float]]:
    """Each sampled kernel's share of the whole: by duration, else by samples."""
    sampled = [kernel for kernel in kernels if kernel.busy_samples]
    timed = all(kernel.duration_us is not None for kernel in sampled)
    sizes = [(one.duration_us or 0.0) if timed else sum(one.samples.values()) for one in sampled]
    return [(kernel, size / sum(sizes)) for kernel, size in zip(sampled, sizes, strict=True)]


# implementation, stage, its share in percent in BASE and NEW, its µs in both, by ncu; None: missing
# in that report
StageChange = tuple[str, str, float | None, float | None, float | None, float | None]


def changes(base: StallReport | None, new: StallReport | None) -> Iterator[StageChange]:
    """Stages of the implementations that were profiled in both."""
    if base is None or new is None:
        return
    known = {group.name: group for group in kernel_groups(base) if group.is_sampled}
    for group in kernel_groups(new):
        if group.is_sampled and group.name in known:
            before, now = known[group.name].whole, group.whole
            for stage in dict.fromkeys((*now, *before)):
                pcts = [sum(one[stage].values()) if stage in one else None for one in (before, now)]
                us = known[group.name].us(pcts[0]), group.us(pcts[1])
                yield group.name, stage, pcts[0], pcts[1], *us


# --- the document


def compose(report: StallReport) -> Document:
    """The whole report."""
    found = kernel_groups(report)
    parts = ["ssdprof stalls"]
    if report.layer and report.dims:
        parts += [
            report.model.split(",")[0],
            report.layer.name,
            fmt.tokens(report.dims.seqlen),
            str(report.precision),
        ]
    lines = [f"No stalls: {report.missing}"] if report.missing else []
    for group in found:
        if group.duration_us is not None:
            kernels = f"{len(group.kernels)} kernels" if len(group.kernels) > 1 else "one kernel"
            lines.append(f"{group.name}: {fmt.duration(group.duration_us)} in {kernels}.")
    return Document(
        title=", ".join(filter(None, (*parts, report.gpu))),
        version=report.ssdprof_version,
        verdict=tuple(VerdictLine(line, True) for line in lines),
        caveats=tuple(_caveats(report)),
        sections=tuple(_sections(report, found)),
    )


def _sections(report: StallReport, found: Sequence[KernelGroup]) -> Iterator[Section]:
    absent = sorted({name for kernel in report.kernels for name in kernel.not_collected})
    note = (
        "Compute, memory: percent of the speed of light.  Issue slots: cycles in which a "
        "scheduler issued.  Registers: "
        "at launch, per thread; spills: loads and stores of spilled registers, by warps."
    )
    missing = f"  Not collected: {', '.join(absent)}." if absent else ""
    rows = [(one, launch) for one in report.launched for launch in one.launches if report.missing]
    per = (
        "Registers and spills are per thread, shared memory per block; occupancy is what these "
        "allow."
    )
    yield section(
        "Kernel resources",
        table("Resources of the kernels, from Triton", _LAUNCHED, rows, keys=3, note=per),
    )
    yield section("Kernels", table("Kernels", _KERNELS, report.kernels, note=note + missing))
    yield section(
        "Stages and stall reasons", side_by_side(found), *map(by_stage, found), reading=READING
    )
    yield section("Stall reasons", _averages(report))
    hints = [hint for group in found for hint in group.hints]
    yield section(
        "Hints",
        facts("What the numbers point to", ("kernel", "evidence, and what may help"), hints),
    )
    lines = (
        table(f"{one.name}: the hottest lines", _LINES, one.lines[:_HOTTEST], keys=2)
        for one in found
    )
    yield section("Hottest lines", *lines)
    seen = dict.fromkeys(reason for group in found for reason, _ in most(group.all))
    meanings = facts(
        "Stall reasons", ("reason", "what the warp does"), ((one, meaning(one)) for one in seen)
    )
    yield section("What the reasons mean", meanings, folded=True)
    checks = list(_checks("report", report.checks))
    checks += [
        row for one in report.kernels for row in _checks(one.kernel, one.checks, _sampled(one))
    ]
    headers = ("what", "requirement", "result", "detail")
    yield section(
        "Self-checks", strings("Self-checks", headers, checks, "llll", wraps=1), folded=True
    )
    ran = facts("What was profiled", ("", "ssdprof stalls"), _facts(report))
    yield section("What was profiled", ran, folded=True)


def meaning(reason: str) -> str:
    return REASONS.get(reason, _UNKNOWN)


def _caveats(report: StallReport) -> Iterator[str]:
    """Failed self-checks, implementations without the requested precision or left out, files of
    unknown stages.
    """
    for what, checks in (
        ("", report.checks),
        *((f" of {one.kernel}", one.checks) for one in report.kernels),
    ):
        for name, (status, detail) in checks.items():
            if status == "failed":
                yield f"A self-check{what} failed: {name}: {detail}."
    yield from report.left_out
    for one in report.launched:
        if one.precision != report.precision:
            yield (
                f"{one.implementation} ran with {one.precision}: it does not have "
                f"{report.precision}."
            )
    unlabelled = [(file, kernel.kernel) for kernel in report.kernels for file in kernel.unlabelled]
    for file, own in grouped(unlabelled, lambda one: one[0]).items():
        kernels = dict.fromkeys(kernel for _, kernel in own)
        listed = "its samples are listed by function, and by line under the hottest lines"
        yield f"The stages of {file} are not known ({fmt.words(kernels)}): {listed}."


# --- tables


def _grid(one: KernelStalls) -> str:
    sizes = list(one.grid or ())
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes.pop()
    return "x".join(map(fmt.count, sizes)) or fmt.MISSING


_KERNELS: tuple[Column[KernelStalls], ...] = (
    text("kernel", lambda one: one.kernel),
    Column("duration", lambda one: fmt.duration(one.duration_us)),
    Column("compute", lambda one: fmt.share(one.compute_pct)),
    Column("memory", lambda one: fmt.share(one.memory_pct)),
    Column("DRAM\nread", lambda one: fmt.size_words(one.dram_read_bytes)),
    Column("DRAM\nwritten", lambda one: fmt.size_words(one.dram_write_bytes)),
    Column("L2", lambda one: fmt.size_words(one.l2_bytes)),
    Column("L2\nhits", lambda one: fmt.share(one.l2_hit_pct)),
    Column("issue\nslots", lambda one: fmt.share(one.issue_pct)),
    Column("waves", lambda one: fmt.MISSING if one.waves is None else f"{one.waves:.2f}"),
    Column("grid", _grid),
    Column("threads", lambda one: fmt.count(one.block)),
    Column("registers", lambda one: fmt.count(one.registers)),
    Column("spills", lambda one: fmt.count(one.spill_requests)),
    Column("shared", lambda one: fmt.size_words(one.shared_bytes)),
    Column("occupancy", lambda one: fmt.share(one.occupancy_pct)),
    Column("possible", lambda one: fmt.share(one.occupancy_limit_pct)),
    text("limited by", lambda one: fmt.words(one.limited_by) if one.limited_by else fmt.MISSING),
)


def by_stage(group: KernelGroup) -> Table | None:
    """Stage x reason for one group, with the parts of a stage under their sum."""
    shown = [reason for reason, _ in most(group.all)[:_MOST_REASONS]]

    def row(title: str, share: Share) -> tuple[str, ...]:
        cells, pct = [share.get(reason, 0.0) for reason in shown], sum(share.values())
        some = (f"{own:.1f}" if own >= 0.05 else "" for own in (*cells, pct - sum(cells)))
        return title, fmt.share(pct, 1), fmt.duration(group.us(pct)), *some

    rows = []
    for name, share in group.whole.items():
        parts = group.parts(name)
        rows.append(row(name, share))
        if len(parts) > 1 or name not in parts:
            rows += [
                row(f"– {group.part(part) if part != name else 'other'}", found)
                for part, found in parts.items()
            ]
    rows += [row("all", group.all)] if rows else []
    idle = [f"{group.part(name)} {pct:.1f}%" for name, pct in group.idle.items()]
    note = f"Not a cost and not in the table, of all samples: {fmt.words(idle)}." if idle else ""
    headers = ("stage", "share", "time", *(reason.replace("_", "\n") for reason in shown), "other")
    return strings(
        f"{group.name}: stages and stall reasons",
        headers,
        rows,
        f"l{'r' * (len(shown) + 3)}",
        note=note,
    )


def side_by_side(found: Sequence[KernelGroup]) -> Table | None:
    """The time of each stage in each group."""
    sampled = [group for group in found if group.is_sampled and group.duration_us is not None]
    if len(sampled) < 2:
        return None
    wholes = [{**group.whole, "all": group.all} for group in sampled]

    def of_group(group: KernelGroup, whole: Mapping[str, Share]) -> tuple[Column[str], ...]:
        def pct(stage: str) -> float | None:
            return sum(whole[stage].values()) if stage in whole else None

        time: Column[str] = Column(
            f"{group.name},\ntime", lambda stage: fmt.duration(group.us(pct(stage)))
        )
        return time, Column(f"{group.name},\nshare", lambda stage: fmt.share(pct(stage), 1))

    names = dict.fromkeys(name for whole in wholes for name in whole)
    order = sorted(
        names, key=lambda name: max(list(whole).index(name) for whole in wholes if name in whole)
    )
    columns = (one for pair in map(of_group, sampled, wholes) for one in pair)
    title = f"Stage by stage: {fmt.words(group.name for group in sampled)}"
    return table(title, (text("stage", str), *columns), order)


def _averages(report: StallReport) -> Table | None:
    def share(kernel: KernelStalls) -> Column[str]:
        whole = sum(kernel.average.values())
        return Column(
            kernel.kernel,
            lambda reason: fmt.share(100 * kernel.average.get(reason, 0.0) / whole, 1),
        )

    shares = [share(kernel) for kernel in report.kernels if kernel.average]
    reasons = dict.fromkeys(reason for kernel in report.kernels for reason in kernel.average)
    note = (
        "Percent of all warps' time, idle ones among them; which line or stage, the report "
        "does not say."
    )
    columns: tuple[Column[str], ...] = (
        text("reason", str),
        *shares,
        text("what the warp does", meaning, wraps=True),
    )
    return table("Stall reasons, without samples", columns, reasons, note=note)


def _waits(line: Line) -> str:
    return ", ".join(
        f"{reason} {100 * count / line.total:.0f}%"
        for reason, count in list(line.samples.items())[:2]
    )


_LINES: tuple[Column[tuple[float, Line]], ...] = (
    Column("share", lambda row: fmt.share(row[0], 1)),
    text("line", lambda row: f"{row[1].file}:{row[1].line}" if row[1].line else "no line"),
    text("stage", lambda row: row[1].stage),
    text("waits for", lambda row: _waits(row[1])),
    text("source", lambda row: fmt.cut(row[1].text, _LONGEST_LINE), wraps=True),
)
_LAUNCHED: tuple[Column[tuple[Launched, Launch]], ...] = (
    text("implementation", lambda row: row[0].implementation),
    text("variant", lambda row: row[0].variant),
    text("kernel", lambda row: row[1].kernel),
    Column("registers", lambda row: fmt.count(row[1].registers)),
    Column("spills", lambda row: fmt.count(row[1].spills)),
    Column("shared", lambda row: fmt.size_words(row[1].shared_bytes)),
    Column("occupancy", lambda row: fmt.share(row[1].warps_pct)),
)


def _facts(report: StallReport) -> Iterator[Fact]:
    """The profiled layer, the machine and the command; for a report made elsewhere, its files."""
    layer, dims, environment = report.layer, report.dims, report.environment
    if layer is not None and dims is not None:
        yield "model", report.model
        yield "layer", f"{layer.name} (layer {layer.index})"
        yield (
            "dimensions",
            f"{fmt.plural(dims.batch, 'sequence')} of {fmt.tokens(dims.seqlen)}, {dims}",
        )
        yield "precision", str(report.precision)
        yield (
            "variants",
            ", ".join(f"{one.implementation}: {one.variant}" for one in report.launched),
        )
    if environment is None:
        yield "GPU", report.gpu
        yield "versions", f"ssdprof {report.ssdprof_version}, which read it"
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


def _checks(what: str, checks: SelfChecks, passed: str = "") -> Iterator[tuple[str, str, str, str]]:
    """The checks with the same result share a row.  passed: a remark on those that passed."""
    for status, names in grouped(checks, lambda name: checks[name][0]).items():
        detail = (
            passed
            if status == "ok" and passed
            else "; ".join(dict.fromkeys(checks[name][1] for name in names))
        )
        yield what, "; ".join(names), "NO" if status == "failed" else status, detail


def _sampled(kernel: KernelStalls) -> str:
    """What the samples of a kernel are of."""
    total = sum(kernel.samples.values())
    lost = fmt.share(100 * kernel.from_neighbours / total, 1) if total else ""
    where = (
        "lines without a stage (libraries, helpers, the kernel's head), attributed by neighbourhood"
    )
    return f"{total:,} samples, {lost} of them on {where}" if kernel.lines and total else ""
