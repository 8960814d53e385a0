"""The cases of a layer's replay, in groups with a common baseline and in batches that fit in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ssdprof.schema import DType, PrecisionRecord

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One implementation at one precision."""

    implementation: str
    precision: PrecisionRecord

    @property
    def label(self) -> str:
        """ "unfused exact, fp16 states"."""
        return f"{self.implementation} {self.precision}"


Group = tuple[Case, ...]  # the baseline first, then the cases compared with it


def groups_of(
    precisions: Sequence[PrecisionRecord],
    implementations: Sequence[str],
    baseline: str,
    fixed: Mapping[str, Sequence[PrecisionRecord]] = {},
) -> tuple[Group, ...]:
    """One group for each state dtype, because only cases with equal state dtypes are compared.

    Its baseline is `baseline` with exact intermediates, requested or not.
    fixed: implementations with precisions of their own.  If the baseline is one of them and lacks the states of a
        group, it runs at the first of its own precisions, and such groups are merged.
    """
    wanted = [(name, one) for one in precisions for name in implementations if name not in fixed]
    wanted += [(name, one) for name in implementations for one in fixed.get(name, ())]
    cases = [Case(implementation=name, precision=precision) for name, precision in wanted]
    own = fixed.get(baseline)

    def first(state_dtype: DType) -> Case:
        exact = PrecisionRecord(intermediates="exact", state_dtype=state_dtype)
        return Case(implementation=baseline, precision=exact if own is None or exact in own else own[0])

    groups: dict[Case, list[Case]] = {first(one.state_dtype): [] for one in precisions}
    for case in cases:
        groups.setdefault(first(case.precision.state_dtype), []).append(case)
    return tuple(tuple(dict.fromkeys([baseline_case, *others])) for baseline_case, others in groups.items())


def batches_of(groups: Iterable[tuple[T, ...]], capacity: int) -> list[list[T]]:
    """Cases whose outputs are in memory together: at most `capacity` (at least 2), each with its group's baseline.

    groups: each begins with its baseline.

    The cases of a batch share a pass over the oracle, so groups that fit together share a batch.  A group that does not
    fit is split, and its baseline is in every part.
    """
    capacity = max(2, capacity)
    batches: list[list[T]] = []
    current: list[T] = []
    for group in groups:
        if len(current) + len(group) > capacity and current:
            batches.append(current)
            current = []
        if len(group) <= capacity:
            current = [*current, *group]
            continue
        baseline, *others = group
        step = capacity - 1
        batches += [[baseline, *others[i : i + step]] for i in range(0, len(others), step)]
    return [*batches, current] if current else batches
