"""Pairs the cases of NEW and BASE, and decides which values can be compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ssdprof.compare.changes import change, mean
from ssdprof.compare.read import Subject
from ssdprof.schema import Environment, PrecisionRecord
from ssdprof.schema.comparison import Change, Difference, Pair, Total, TotalBy, TotalOver
from ssdprof.schema.rows import Measured, Row


def differences(base: Environment, new: Environment) -> tuple[Difference, ...]:
    """The differences that prevent a comparison of absolute times.  Empty without a GPU, which gives no times."""
    if base.gpu is None or new.gpu is None:
        return ()
    before, now = (
        {"GPU": gpu.name, "driver": gpu.driver, "Triton": environment.packages.get("triton", "unknown")}
        for gpu, environment in ((base.gpu, base), (new.gpu, new))
    )
    return _different(before, now)


def _different(base: Mapping[str, str], new: Mapping[str, str]) -> tuple[Difference, ...]:
    return tuple(
        Difference(what=what, base=base.get(what, "none"), new=new.get(what, "none"))
        for what in dict.fromkeys((*base, *new))
        if base.get(what) != new.get(what)
    )


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
    if base.prefill and new.prefill:
        return _prefills(base, new, machine, smallest)
    if base.shape != new.shape:
        shape = f"other shape: {base.shape}, now {new.shape}"
        return Pair(base=base, new=new, incomparable=(shape,), other_inputs=shape)
    before, now = one.inputs.get(base.prompt), other.inputs.get(new.prompt)
    return Pair(
        base=base,
        new=new,
        time=None if machine else _ratio(base.time, new.time, smallest),
        call=None if machine else _ratio(base.call, new.call, smallest),
        over_baseline=_over_baseline(base, new, smallest),
        incomparable=tuple(map(str, machine)),
        other_inputs="" if before == now else f"other inputs: {before}, now {now}",
    )


def _prefills(base: Row, new: Row, machine: Sequence[Difference], smallest: float) -> Pair:
    """Pairs of prefills.  Times depend on the whole model but not on the inputs, and no errors are compared."""
    assert base.prefill is not None
    assert new.prefill is not None
    if base.shape != new.shape:
        return Pair(base=base, new=new, incomparable=(f"other model: {base.shape}, now {new.shape}",))
    differ = (*machine, *_different(base.prefill.needs, new.prefill.needs))
    ratio = None if differ else _ratio(base.call, new.call, smallest)
    return Pair(
        base=base,
        new=new,
        time=ratio,
        call=ratio,
        over_baseline=_over_baseline(base, new, smallest),
        incomparable=tuple(map(str, differ)),
    )


def totals(found: Sequence[Pair], kind: str, smallest: float) -> Iterator[Total]:
    """Every implementation and precision: the layers of a prompt together, or the chunks or decode steps of all layers,
    or the lengths of a bench's shape or of the prefills with the same surroundings."""
    groups: dict[tuple[str, TotalOver, str, PrecisionRecord, TotalBy], list[Change]] = {}
    for pair in found:
        if pair.judged_by is not None:
            row = pair.row
            over: TotalOver = "length"
            if kind == "run" and not row.prefill:
                over = "layer" if row.calls == row.tokens else "call"
            where = row.where if over == "length" else row.calls
            by: TotalBy = "speedup" if not pair.time else "call time" if row.prefill else "device time"
            groups.setdefault((where, over, row.implementation, row.precision, by), []).append(pair.judged_by)
    for (where, over, implementation, precision, by), changes in groups.items():
        yield Total(
            where=where,
            over=over,
            implementation=implementation,
            precision=precision,
            cases=len(changes),
            by=by,
            change=mean(changes, smallest),
        )


def _over_baseline(base: Row, new: Row, smallest: float) -> Change | None:
    """None unless both speedups are over the same baseline."""
    if base.baseline != new.baseline:
        return None
    return _ratio(new.over_baseline, base.over_baseline, smallest)


def _ratio(above: Measured | None, below: Measured | None, smallest: float) -> Change | None:
    return change(above, below, smallest) if above and below else None
