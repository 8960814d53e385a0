"""Tables that compare two runs, benches or prefill results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ssdprof.report import format as fmt
from ssdprof.report.tables.table import Note, Table, columns
from ssdprof.schema.comparison import Change, Comparison, Pair
from ssdprof.schema.rows import Row

_KEYS = ("case", "implementation", "intermediates,\nstates")
READING = Note(
    "Ratios are BASE's time over NEW's: above 1, NEW is faster.  In brackets: 95 % intervals of the spread within each "
    "of the two; what differs from run to run, such as clocks and temperature, is not in them."
)
READING_PREFILLS = Note(
    "Call: from an idle GPU to the first token; the ratio is BASE's time over NEW's.  It exists only if GPU, driver, "
    "versions and model are the same.  Speedups are over the baseline with the same surroundings; their ratio, NEW's "
    "over BASE's, compares across machines.  In brackets: 95 % intervals of the spread within each of the two."
)


def speed(pairs: Sequence[Pair]) -> Table | None:
    timed = [pair for pair in pairs if pair.verdict != "not timed" and not pair.row.prefill]
    return _table(
        "Speed of NEW against BASE",
        (
            "verdict", "device time,\nBASE / NEW", "call time,\nBASE / NEW", "speedup,\nNEW / BASE",
            "device,\nBASE", "device,\nNEW", "speedup,\nBASE", "speedup,\nNEW",
        ),
        [
            (
                pair.verdict, ratio(pair.time), ratio(pair.call), ratio(pair.over_baseline),
                *_both(pair, lambda row: fmt.duration(row.timing.device_median_us if row.timing else None)),
                *_both(pair, lambda row: fmt.ratio(row.speedup.device_ratio if row.speedup else None)),
            )
            for pair in timed
        ],
        timed,
        words=1,
    )  # fmt: skip


def prefills(pairs: Sequence[Pair]) -> Table | None:
    """Call times of the whole model, and the implementations' speedups in it."""
    timed = [pair for pair in pairs if pair.verdict != "not timed" and pair.row.prefill]
    return _table(
        "Prefill time of NEW against BASE",
        (
            "kernel", "verdict", "call time,\nBASE / NEW", "speedup,\nNEW / BASE",
            "call,\nBASE", "call,\nNEW", "speedup,\nBASE", "speedup,\nNEW",
        ),
        [
            (
                ", now ".join(dict.fromkeys(_both(pair, lambda row: row.variant or fmt.MISSING))),
                pair.verdict, ratio(pair.call), ratio(pair.over_baseline),
                *_both(pair, lambda row: fmt.duration(row.call[0] if row.call else None)),
                *_both(pair, lambda row: fmt.ratio(row.over_baseline[0] if row.over_baseline else None)),
            )
            for pair in timed
        ],
        timed,
        words=2,
    )  # fmt: skip


def accuracy(pairs: Sequence[Pair]) -> Table | None:
    compared = [pair for pair in pairs if any(row and row.out for row in (pair.base, pair.new))]
    return _table(
        "Accuracy of the output, side by side",
        (
            "match @ 1e-3,\nBASE", "match @ 1e-3,\nNEW", "rms error,\nBASE", "rms error,\nNEW",
            "largest error,\nBASE", "largest error,\nNEW",
        ),
        [
            (
                *_both(pair, lambda row: fmt.percent(row.out.match_pct(1e-3) if row.out else None)),
                *_both(pair, lambda row: fmt.small(row.out.rms_ratio if row.out else None)),
                *_both(pair, lambda row: fmt.small(row.out.max_abs if row.out else None)),
            )
            for pair in compared
        ],
        compared,
    )  # fmt: skip


def answers(pairs: Sequence[Pair]) -> Table | None:
    compared = [pair for pair in pairs if any(row and row.answers for row in (pair.base, pair.new))]
    return _table(
        "Answers of the model, side by side",
        (
            "mean KL [nats],\nBASE", "mean KL [nats],\nNEW", "same top token,\nBASE", "same top token,\nNEW",
            "perplexity,\nBASE", "perplexity,\nNEW",
        ),
        [
            (
                *_both(pair, lambda row: fmt.small(row.answers.kl_mean if row.answers else None)),
                *_both(pair, lambda row: fmt.percent(row.answers.top1_pct if row.answers else None)),
                *_both(pair, lambda row: fmt.small(row.answers.perplexity if row.answers else None)),
            )
            for pair in compared
        ],
        compared,
    )  # fmt: skip


def resources(pairs: Sequence[Pair]) -> Table | None:
    known = [pair for pair in pairs if any(row and (row.launches or row.memory) for row in (pair.base, pair.new))]
    return _table(
        "Kernels and memory",
        (
            "kernel,\nBASE", "kernel,\nNEW", "configuration", "kernels,\nBASE", "kernels,\nNEW",
            "extra memory,\nBASE", "extra memory,\nNEW",
        ),
        [
            (
                *_both(pair, lambda row: row.variant or fmt.MISSING), _configuration(pair),
                *_both(pair, lambda row: fmt.count(row.kernels)),
                *_both(pair, lambda row: fmt.size(row.memory.workspace_bytes if row.memory else None)),
            )
            for pair in known
        ],
        known,
        words=3,
    )  # fmt: skip


def _configuration(pair: Pair) -> str:
    assert pair.base is not None
    assert pair.new is not None
    before, now = ([(launch.kernel, launch.config) for launch in row.launches] for row in (pair.base, pair.new))
    return "the same" if before == now else "another"


def stalls(comparison: Comparison) -> Table | None:
    if not comparison.stalls:
        return None
    return Table(
        title="Busy warp samples of each stage, by ncu",
        headers=("implementation", "stage", "share,\nBASE", "share,\nNEW", "time,\nBASE", "time,\nNEW"),
        rows=tuple(
            (
                one.implementation,
                one.stage,
                fmt.share(one.base_pct, 1),
                fmt.share(one.new_pct, 1),
                fmt.duration(one.base_us),
                fmt.duration(one.new_us),
            )
            for one in comparison.stalls
        ),
        align=columns(2, 4),
        note="Times under ncu cannot be compared with those of a run.",
        keys=2,
    )


def unpaired(pairs: Sequence[Pair]) -> Table | None:
    left = [pair for pair in pairs if pair.verdict.startswith(("only", "not")) and not _untimed(pair)]
    rows = [(pair.verdict, "; ".join(pair.incomparable) or _statuses(pair)) for pair in left]
    return _table("Cases without a verdict on speed", ("why", "more"), rows, left, words=2)


def _untimed(pair: Pair) -> bool:
    """Whether a case passed in both runs and was timed in neither."""
    return pair.verdict == "not timed" and all(row and row.status == "passed" for row in (pair.base, pair.new))


def _statuses(pair: Pair) -> str:
    found = {name: row.status for name, row in (("BASE", pair.base), ("NEW", pair.new)) if row}
    return ", ".join(f"{name} {status}" for name, status in found.items())


def facts(comparison: Comparison) -> Table:
    sides = (comparison.base, comparison.new)
    rows = {
        "what": [f"{side.kind}: {side.subject}" for side in sides],
        "started": [side.created for side in sides],
        "GPU": [side.environment.gpu.name if side.environment.gpu else "none" for side in sides],
        "driver": [side.environment.gpu.driver if side.environment.gpu else fmt.MISSING for side in sides],
        "ssdprof": [side.ssdprof_version for side in sides],
        "Triton": [side.environment.packages.get("triton", fmt.MISSING) for side in sides],
        "PyTorch": [side.environment.packages.get("torch", fmt.MISSING) for side in sides],
        "transformers": [side.environment.packages.get("transformers", fmt.MISSING) for side in sides],
    }
    return Table(
        title="What ran",
        headers=("", f"BASE: {sides[0].name}", f"NEW: {sides[1].name}"),
        rows=tuple((name, *values) for name, values in rows.items()),
        align=columns(3, 0),
    )


def _table(
    title: str, headers: Sequence[str], cells: Sequence[tuple[str, ...]], pairs: Sequence[Pair], *, words: int = 0
) -> Table | None:
    """A row for each pair.  words: number of text columns after the names; the others are numbers."""
    if not pairs:
        return None
    return Table(
        title=title,
        headers=(*_KEYS, *headers),
        rows=tuple((*_names(pair.row), *own) for pair, own in zip(pairs, cells, strict=True)),
        align=columns(len(_KEYS) + words, len(headers) - words),
        keys=len(_KEYS),
    )


def _names(row: Row) -> tuple[str, str, str]:
    return row.place, row.implementation, row.precision.short


def _both(pair: Pair, cell: Callable[[Row], str]) -> tuple[str, str]:
    assert pair.base is not None
    assert pair.new is not None
    return cell(pair.base), cell(pair.new)


def ratio(change: Change | None) -> str:
    return fmt.speedup(change.ratio, change.interval) if change else fmt.MISSING
