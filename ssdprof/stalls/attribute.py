"""Attributes samples to source lines, and lines to stages.

An instruction has one source line.  In reports that ssdprof records it is the innermost of those that led there that
has a stage (`call_sites.py`); in others it is that of the innermost function that was inlined.  If that line has no
stage (a library, a helper, a header), the instruction gets the stage of the one before it in the program that has one,
else of the one after it: compilers keep instructions of a line together.  The number of such samples is reported.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ssdprof.operators.outline import Stages
from ssdprof.schema.stalls import Line, Stage  # TODO
from ssdprof.stalls.raw import Point, RawKernel, base_name
from ssdprof.stalls.sources import Sources
from ssdprof.stalls.stages import IDLE_WARPS, UNKNOWN, Place

_BLOCK_BARRIER = "barrier"
_Key = tuple[str, int, str, str, str]  # file, line, instruction if there is no line, function, stage


@dataclass(frozen=True)
class Attribution:
    """lines: hottest first.  from_neighbours: number of samples with the stage of a neighbour."""

    stages: tuple[Stage, ...]
    lines: tuple[Line, ...]
    from_neighbours: int


def attribute(kernel: RawKernel, sources: Sources, known: Stages = Stages()) -> Attribution:  # noqa: B008
    """Every sample of the kernel's points, once by stage and once by line and stage.

    known: the stages of its operator, which give the order.
    """
    places = [sources.place(point.file, point.line) for point in kernel.points]
    launched = sources.kernel(kernel.function)
    specialized = launched is not None and launched.specialized
    by_stage: dict[str, Counter[str]] = defaultdict(Counter)
    by_line: dict[_Key, Counter[str]] = defaultdict(Counter)
    from_neighbours = 0
    for point, place, stage in zip(kernel.points, places, _stages(places), strict=True):
        idle, busy = _split(point, specialized and place.header)
        for name, samples in ((IDLE_WARPS, idle), (stage, busy)):
            if samples:
                by_stage[name].update(samples)
                key = (point.file, point.line, "" if point.line else point.sass, place.function, name)
                by_line[key].update(samples)
        if place.stage is None:
            from_neighbours += sum(busy.values())
    return Attribution(
        stages=tuple(
            Stage(name=name, samples=_ordered(by_stage[name]), idle=_is_idle(name, known))
            for name in sorted(by_stage, key=lambda name: _stage_order(name, by_stage[name].total(), known))
        ),
        lines=_lines(by_line, sources),
        from_neighbours=from_neighbours,
    )


def _stages(places: Sequence[Place]) -> list[str]:
    """The stage of each place: its own, or its neighbour's if it has none."""
    found: list[str] = []
    before: str | None = None
    for place in places:
        before = place.stage or before
        found.append(before or "")
    after = next((stage for stage in found if stage), UNKNOWN)
    return [stage or after for stage in found]


def _split(point: Point, is_compilers: bool) -> tuple[dict[str, int], dict[str, int]]:
    """(idle, busy) samples.  In the header of a kernel with warp roles, the only block-wide barriers are those at which
    warps wait for a role, and for the end of the other roles."""
    if not is_compilers:
        return {}, dict(point.samples)
    idle = {reason: count for reason, count in point.samples.items() if reason == _BLOCK_BARRIER}
    return idle, {reason: count for reason, count in point.samples.items() if reason not in idle}


def _lines(found: Mapping[_Key, Counter[str]], sources: Sources) -> tuple[Line, ...]:
    lines = [
        Line(
            file=base_name(file),
            line=line,
            function=function,
            stage=stage,
            text=sources.text(file, line) or sass,
            samples=_ordered(samples),
        )
        for (file, line, sass, function, stage), samples in found.items()
    ]
    return tuple(sorted(lines, key=lambda line: (-line.total, line.file, line.line, line.stage, line.text)))


def _is_idle(name: str, known: Stages) -> bool:
    return name == IDLE_WARPS or name in known.ahead


def _stage_order(name: str, total: int, known: Stages) -> tuple[int, int, str]:
    """Stages in the order of the algorithm, then others by size, then idle ones."""
    order = (*known.order, IDLE_WARPS)
    if name in order:
        return (order.index(name) + (len(order) if _is_idle(name, known) else 0), 0, name)
    return (len(order), -total, name)


def _ordered(samples: Counter[str]) -> dict[str, int]:
    return {reason: count for reason, count in sorted(samples.items(), key=lambda item: (-item[1], item[0])) if count}
