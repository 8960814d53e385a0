"""Compares stalls by stage if both runs have them."""

from __future__ import annotations

from collections.abc import Iterator

from ssdprof.report.stall_groups import Design, designs
from ssdprof.schema.comparison import StageChange
from ssdprof.schema.stalls import StallReport


def changes(base: StallReport | None, new: StallReport | None) -> Iterator[StageChange]:
    """Stages of the implementations that were profiled in both."""
    if base is None or new is None:
        return
    before = {design.name: design for design in designs(base) if design.is_sampled}
    for design in designs(new):
        if design.is_sampled and design.name in before:
            yield from _of_design(before[design.name], design)


def _of_design(base: Design, new: Design) -> Iterator[StageChange]:
    before, now = base.whole(), new.whole()
    for stage in dict.fromkeys((*now, *before)):
        one, other = before.get(stage), now.get(stage)
        yield StageChange(
            implementation=new.name,
            stage=stage,
            base_pct=one.pct if one else None,
            new_pct=other.pct if other else None,
            base_us=base.us(one) if one else None,
            new_us=new.us(other) if other else None,
        )
