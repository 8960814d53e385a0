"""Resolves the implementations of a run, with a sentence for each unavailable one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ssdprof import operators
from ssdprof.core.base import DType
from ssdprof.core.subject import LayerRef
from ssdprof.operators.named import Named, Roster
from ssdprof.pipeline import limits
from ssdprof.pipeline.request import STEPS, ReplayRequest
from ssdprof.schema import Asked, Participant  # TODO


@dataclass(frozen=True, kw_only=True)
class Lineup:
    """roster: resolves names.  found: the resolved names of each operator, the baseline last."""

    roster: Roster
    found: tuple[Named, ...]

    @property
    def baseline(self) -> str:
        """Its name in reports."""
        return self.found[-1].name

    @property
    def absent(self) -> tuple[str, ...]:
        """A sentence for each unavailable implementation."""
        return tuple(dict.fromkeys(one.absent for one in self.found if one.absent))

    @property
    def present(self) -> tuple[str, ...]:
        """Names of the available implementations; the baseline only if it was named among them."""
        return tuple(dict.fromkeys(one.name for one in self.found[:-1] if one.implementation is not None))

    @property
    def answering(self) -> tuple[str, ...]:
        """Names for the comparison of a model's answers: all except libraries."""
        return tuple(dict.fromkeys(one.name for one in self.found[:-1] if one.kind != "library"))

    def asked(self, request: ReplayRequest, layers: tuple[LayerRef, ...], dtype: DType, *, decode: bool) -> Asked:
        """The record of what a run of these layers in this dtype is to compare.  decode: it has decode steps."""
        cast = request.cast_from(dtype)
        dtype = cast.to if cast else dtype
        wanted = request.precisions(dtype)
        compared = {one.name: one for one in self.found[:-1] if one.implementation is not None}
        return Asked(
            implementations=tuple(name for name, one in compared.items() if one.kind == "bundled"),
            precisions=wanted,
            layers=layers,
            others=tuple(
                Participant(name=name, kind=one.kind, source=one.source, precisions=one.precisions(dtype, wanted))
                for name, one in compared.items()
                if one.kind != "bundled"
            ),
            steps=STEPS if decode else None,
            tensor_parallel=request.tensor_parallel,
            cast=cast,
        )


def line_up(names: Sequence[str], baseline: str, layers: Iterable[LayerRef]) -> Lineup:
    """Resolve the names for the operators of the layers.

    Raises BadInputError for an unknown name and an own kernel that cannot be imported, MissingCapabilityError if the
    baseline is unavailable, or all that would be compared with it.
    """
    roster = Roster(limits.device())
    records = [operators.get(name) for name in dict.fromkeys(layer.operator for layer in layers)]
    found = [roster.get(record, word) for record in records for word in names]
    baselines = [roster.get(record, baseline) for record in records]
    compared = [one for one in found if one.name != baselines[0].name]
    needed = baselines if any(one.implementation for one in compared) else [*baselines, *compared]
    for one in needed:
        _ = one.present
    return Lineup(roster=roster, found=(*found, baselines[0]))
