"""Compares stalls by stage if both runs have them."""

from __future__ import annotations

from collections.abc import Iterator

from ssdprof.report.stall_groups import KernelGroup, groups
from ssdprof.schema.comparison import StageChange
from ssdprof.schema.stalls import StallReport


def changes(base: StallReport | None, new: StallReport | None) -> Iterator[StageChange]:
    """Stages of the implementations that were profiled in both."""
    if base is None or new is None:
        return
    before = {group.name: group for group in groups(base) if group.is_sampled}
    for group in groups(new):
        if group.is_sampled and group.name in before:
            yield from _of_group(before[group.name], group)


def _of_group(base: KernelGroup, new: KernelGroup) -> Iterator[StageChange]:
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
