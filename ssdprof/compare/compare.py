"""BASE and NEW -> Comparison, and its JSON."""

from __future__ import annotations

from collections.abc import Sequence

from ssdprof.compare import conditions, pairs, stages
from ssdprof.compare.read import Subject
from ssdprof.errors import BadInputError
from ssdprof.schema.comparison import Comparison


def compare(
    base: Subject, new: Subject, *, smallest_difference: float, fail_if: Sequence[conditions.Asked] = ()
) -> Comparison:
    """smallest_difference: the smallest relative difference of two times that counts.

    Raises BadInputError if the two are of different kinds.
    """
    if base.side.kind != new.side.kind:
        raise BadInputError(
            f"BASE is a {base.side.kind} and NEW is a {new.side.kind}.",
            "Compare two runs, two benches, or two results of ssdprof prefill.",
        )
    machine = pairs.differences(base.side.environment, new.side.environment)
    found = pairs.pairs(base, new, machine, smallest_difference)
    return Comparison(
        base=base.side,
        new=new.side,
        smallest_difference=smallest_difference,
        machine=machine,
        pairs=found,
        totals=tuple(pairs.totals(found, new.side.kind, smallest_difference)),
        stalls=tuple(stages.changes(base.stalls, new.stalls)),
        conditions=tuple(conditions.judge(one, found, new.side.unfinished) for one in fail_if),
    )


def dump(comparison: Comparison) -> str:
    """One JSON document; `ssdprof schemas comparison-v1` prints its schema."""
    return comparison.model_dump_json(indent=1)
