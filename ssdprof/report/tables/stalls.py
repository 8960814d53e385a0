"""Tables of stalls: kernels, stages, reasons and lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from ssdprof.report import format as fmt
from ssdprof.report import stall_words as words
from ssdprof.report.stall_groups import KernelGroup, StageShare
from ssdprof.report.tables.table import Note, Table, columns
from ssdprof.schema import Launch
from ssdprof.schema.stalls import KernelStalls, Line, StallReport

_HOTTEST = 10
_MOST_REASONS = 7
_LONGEST_LINE = 76
_UNKNOWN = "a reason that this version does not know"
READING = Note(
    "Percent of a design's busy warp time: samples of warps, without those that idle, a kernel weighed by its "
    "duration.  The time in µs is that share of the duration; stages overlap, so removing "
    "a stage may save less.  Durations are ncu's: alone on the GPU, caches cold, not those of a run."
)


def kernels(report: StallReport) -> Table | None:
    """The resources and the speed of each launch."""
    if not report.kernels:
        return None
    return Table(
        title="Kernels",
        headers=(
            "kernel", "duration", "compute", "memory", "DRAM\nread", "DRAM\nwritten", "L2", "L2\nhits", "issue\nslots",
            "waves",
        ),
        rows=tuple(_speed(kernel) for kernel in report.kernels),
        align=columns(1, 9),
        note="Compute, memory: percent of the speed of light.  Issue slots: cycles in which a scheduler issued."
        + _absent(report),
    )  # fmt: skip


def resources(report: StallReport) -> Table | None:
    """Occupancy, and what limits it."""
    if not report.kernels:
        return None
    rows = []
    for used in report.kernels:
        rows.append(
            (
                used.kernel,
                "x".join(str(size) for size in _grid(used.grid)) if used.grid else fmt.MISSING,
                fmt.count(used.block),
                fmt.count(used.registers),
                fmt.count(used.spill_requests),
                fmt.size(used.shared_bytes),
                fmt.share(used.occupancy_pct),
                fmt.share(used.occupancy_limit_pct),
                fmt.words(used.limited_by) if used.limited_by else fmt.MISSING,
            )
        )
    return Table(
        title="Occupancy and what limits it",
        headers=("kernel", "grid", "threads", "registers", "spills", "shared", "achieved", "possible", "limited by"),
        rows=tuple(rows),
        align=(*columns(1, 7), "left"),
        note="Registers are those at launch, per thread; spills are loads and stores of spilled registers, by warps.",
    )


def by_stage(group: KernelGroup) -> Table | None:
    """Stage x reason for one group, with the parts of a stage under their sum."""
    if not group.is_sampled:
        return None
    shown = [reason for reason, _ in group.all().most[:_MOST_REASONS]]
    rows = []
    for name, share in group.whole().items():
        parts = {part: found for part, found in group.stages.items() if part.split(".")[0] == name}
        rows.append((name, *_cells(group, share, shown)))
        if len(parts) > 1 or name not in parts:
            for part, found in parts.items():
                title = group.part(part) if part != name else "other"
                rows.append((f"– {title}", *_cells(group, found, shown)))
    rows.append(("all", *_cells(group, group.all(), shown)))
    return Table(
        title=f"{group.name}: stages and stall reasons",
        headers=("stage", "share", "time", *(reason.replace("_", "\n", 1) for reason in shown), "other"),
        rows=tuple(rows),
        align=columns(1, len(shown) + 3),
        note=_idle(group),
        keys=1,
    )


def side_by_side(found: Sequence[KernelGroup]) -> Table | None:
    """The time of each stage in each group."""
    sampled = [group for group in found if group.is_sampled and group.duration_us is not None]
    if len(sampled) < 2:
        return None
    wholes = [group.whole() for group in sampled]
    names = dict.fromkeys(name for whole in wholes for name in whole)
    order = sorted(names, key=lambda name: max(list(whole).index(name) for whole in wholes if name in whole))
    rows = [(name, *_pair(sampled, [whole.get(name) for whole in wholes])) for name in order]
    rows.append(("all", *_pair(sampled, [StageShare(100.0) for _ in sampled])))
    return Table(
        title=f"Stage by stage: {fmt.words(group.name for group in sampled)}",
        headers=("stage", *(f"{group.name},\n{unit}" for group in sampled for unit in ("time", "share"))),
        rows=tuple(rows),
        align=columns(1, 2 * len(sampled)),
    )


def reasons(group: KernelGroup) -> Table | None:
    """Every reason with its meaning."""
    if not group.is_sampled:
        return None
    return Table(
        title=f"{group.name}: stall reasons",
        headers=("reason", "share", "what the warp does"),
        rows=tuple(
            (reason, fmt.share(pct, 1), words.REASONS.get(reason, _UNKNOWN)) for reason, pct in group.all().most
        ),
        align=("left", "right", "left"),
        wraps=2,
    )


def averages(report: StallReport) -> Table | None:
    """Stall reasons of kernels without samples."""
    found = [kernel for kernel in report.kernels if kernel.average]
    if not found:
        return None
    names = dict.fromkeys(reason for kernel in found for reason in kernel.average)
    return Table(
        title="Stall reasons, without samples",
        headers=("reason", *(kernel.kernel for kernel in found), "what the warp does"),
        rows=tuple(
            (reason, *(_average(kernel, reason) for kernel in found), words.REASONS.get(reason, _UNKNOWN))
            for reason in names
        ),
        align=("left", *columns(0, len(found)), "left"),
        note="Percent of all warps' time, idle ones among them; which line or stage, the report does not say.",
        wraps=len(found) + 1,
    )


def hottest(group: KernelGroup) -> Table | None:
    """The ten lines with the largest share of the busy time."""
    if not group.lines:
        return None
    return Table(
        title=f"{group.name}: the hottest lines",
        headers=("share", "line", "stage", "waits for", "source"),
        rows=tuple((fmt.share(pct, 1), *_line(line)) for pct, line in group.lines[:_HOTTEST]),
        align=("right", "left", "left", "left", "left"),
        keys=2,
        wraps=4,
    )


def hints(found: Sequence[KernelGroup]) -> Table | None:
    """Evidence and advice."""
    rows = [(kernel.kernel, hint) for group in found for kernel, hint in group.hints]
    if not rows:
        return None
    return Table(
        title="What the numbers point to",
        headers=("kernel", "evidence, and what may help"),
        rows=tuple(rows),
        align=("left", "left"),
        wraps=1,
    )


def launched(report: StallReport) -> Table | None:
    """The resources that Triton reports, if there are no stalls."""
    rows = [
        (one.implementation, one.variant, launch.kernel, *_known(launch), fmt.share(occupancy))
        for one in report.launched
        for launch, occupancy in zip_longest(one.launches, one.occupancy_pct)
    ]
    if not rows:
        return None
    return Table(
        title="Resources of the kernels, from Triton",
        headers=("implementation", "variant", "kernel", "registers", "spills", "shared", "occupancy"),
        rows=tuple(rows),
        align=columns(3, 4),
        note="Registers and spills are per thread, shared memory per block; occupancy is what these allow.",
        keys=3,
    )


def _average(kernel: KernelStalls, reason: str) -> str:
    return fmt.share(100 * kernel.average.get(reason, 0.0) / sum(kernel.average.values()), 1)


def _line(line: Line) -> tuple[str, str, str, str]:
    waits = (f"{reason} {100 * count / line.total:.0f}%" for reason, count in list(line.samples.items())[:2])
    text = line.text if len(line.text) <= _LONGEST_LINE else f"{line.text[: _LONGEST_LINE - 3]}..."
    return f"{line.file}:{line.line}" if line.line else "no line", line.stage, ", ".join(waits), text


def _speed(speed: KernelStalls) -> tuple[str, ...]:
    return (
        speed.kernel,
        fmt.duration(speed.duration_us),
        fmt.share(speed.compute_pct),
        fmt.share(speed.memory_pct),
        fmt.size(speed.dram_read_bytes),
        fmt.size(speed.dram_write_bytes),
        fmt.size(speed.l2_bytes),
        fmt.share(speed.l2_hit_pct),
        fmt.share(speed.issue_pct),
        fmt.MISSING if speed.waves is None else f"{speed.waves:.2f}",
    )


def _cells(group: KernelGroup, share: StageShare, shown: Sequence[str]) -> tuple[str, ...]:
    rest = share.pct - sum(share.reasons.get(reason, 0.0) for reason in shown)
    return (
        fmt.share(share.pct, 1),
        fmt.duration(group.us(share)),
        *(_some(share.reasons.get(reason, 0.0)) for reason in shown),
        _some(rest),
    )


def _some(pct: float) -> str:
    return f"{pct:.1f}" if pct >= 0.05 else ""


def _pair(found: Sequence[KernelGroup], shares: Iterable[StageShare | None]) -> tuple[str, ...]:
    cells: list[str] = []
    for group, share in zip(found, shares, strict=True):
        cells += (
            (fmt.MISSING, fmt.MISSING) if share is None else (fmt.duration(group.us(share)), fmt.share(share.pct, 1))
        )
    return tuple(cells)


def _idle(group: KernelGroup) -> str:
    if not group.idle:
        return ""
    parts = (f"{group.part(name)} {pct:.1f}%" for name, pct in group.idle.items())
    return f"Not a cost and not in the table, of all samples: {fmt.words(parts)}."


def _grid(grid: tuple[int, int, int]) -> tuple[int, ...]:
    """The grid without trailing ones."""
    sizes = list(grid)
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes.pop()
    return tuple(sizes)


def _known(launch: Launch) -> tuple[str, str, str]:
    return fmt.count(launch.registers), fmt.count(launch.spills), fmt.size(launch.shared_bytes)


def _absent(report: StallReport) -> str:
    absent = sorted({name for kernel in report.kernels for name in kernel.not_collected})
    return f"  Not collected: {', '.join(absent)}." if absent else ""
