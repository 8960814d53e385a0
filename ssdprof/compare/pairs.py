"""Which case of NEW is which case of BASE, and what may be said of the two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ssdprof.compare.changes import Measured, change, mean
from ssdprof.compare.read import Subject
from ssdprof.schema import Environment, PrecisionRecord
from ssdprof.schema.comparison import Change, Difference, Pair, Total, TotalBy
from ssdprof.schema.rows import Row


def differences(base: Environment, new: Environment) -> tuple[Difference, ...]:
    """What keeps absolute times from being compared.  Without a GPU there are none to compare."""
    if base.gpu is None or new.gpu is None:
        return ()
    pairs = {
        "GPU": (base.gpu.name, new.gpu.name),
        "driver": (base.gpu.driver, new.gpu.driver),
        "Triton": (base.packages.get("triton", "unknown"), new.packages.get("triton", "unknown")),
    }
    return tuple(Difference(what=what, base=one, new=other) for what, (one, other) in pairs.items() if one != other)


def pairs(base: Subject, new: Subject, machine: Sequence[Difference], smallest: float) -> tuple[Pair, ...]:
    """Cases by name, in the order of NEW; those that are only in BASE come last."""
    before = {row.name: row for row in base.rows}
    now = {row.name: row for row in new.rows}
    found = [_pair(before.get(name), row, base, new, machine, smallest) for name, row in now.items()]
    return (*found, *(Pair(base=row, new=None) for name, row in before.items() if name not in now))


def _pair(
    base: Row | None, new: Row, one: Subject, other: Subject, machine: Sequence[Difference], smallest: float
) -> Pair:
    if base is None:
        return Pair(base=None, new=new)
    if base.shape != new.shape:
        shape = f"other shape: {base.shape}, now {new.shape}"
        return Pair(base=base, new=new, incomparable=(shape,), other_inputs=shape)
    before, now = one.inputs.get(base.tokens), other.inputs.get(new.tokens)
    return Pair(
        base=base,
        new=new,
        time=None if machine else _ratio(_device(base), _device(new), smallest),
        call=None if machine else _ratio(_call(base), _call(new), smallest),
        over_baseline=_over_baseline(base, new, smallest),
        incomparable=tuple(map(str, machine)),
        other_inputs="" if before == now else f"other inputs: {before}, now {now}",
    )


def totals(found: Sequence[Pair], kind: str, smallest: float) -> Iterator[Total]:
    """Every implementation and precision: the layers of a prompt together, or the lengths of a bench's shape."""
    groups: dict[tuple[str, str, PrecisionRecord, TotalBy], list[Change]] = {}
    for pair in found:
        if pair.judged_by is not None:
            row = pair.row
            where = row.tokens if kind == "run" else row.where
            by: TotalBy = "device time" if pair.time else "speedup"
            groups.setdefault((where, row.implementation, row.precision, by), []).append(pair.judged_by)
    for (where, implementation, precision, by), changes in groups.items():
        yield Total(
            where=where,
            implementation=implementation,
            precision=precision,
            cases=len(changes),
            by=by,
            change=mean(changes, smallest),
        )


def _over_baseline(base: Row, new: Row, smallest: float) -> Change | None:
    """None unless both are over the same baseline."""
    if base.speedup is None or new.speedup is None or base.speedup.baseline != new.speedup.baseline:
        return None
    before = (base.speedup.device_ratio, base.speedup.device_interval)
    now = (new.speedup.device_ratio, new.speedup.device_interval)
    return change(now, before, smallest)


def _ratio(base: Measured | None, new: Measured | None, smallest: float) -> Change | None:
    return change(base, new, smallest) if base and new else None


def _device(row: Row) -> Measured | None:
    return (row.timing.device_median_us, row.timing.device_interval_us) if row.timing else None


def _call(row: Row) -> Measured | None:
    return (row.timing.call_median_us, row.timing.call_interval_us) if row.timing else None
