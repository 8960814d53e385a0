"""The contenders of a bench: ssdprof's implementations and other libraries, each at its precisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ssdprof import kernels, schema
from ssdprof.errors import BadInputError
from ssdprof.measure.call import Call
from ssdprof.measure.caller import Caller
from ssdprof.measure.rehearsal import Rehearsals
from ssdprof.operators.drawing import Cell
from ssdprof.operators.named import Named, resolve
from ssdprof.operators.operator import Operator

BY_TOKEN = "recurrent"  # runs if sequences have only a few tokens


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One implementation at one precision.

    chunk_sizes: the fastest of these is used; empty if the implementation chooses its own.
    rehearsals: the first calls of users' kernels.
    """

    named: Named
    precision: schema.PrecisionRecord
    chunk_sizes: tuple[int, ...]
    rehearsals: Rehearsals = field(default_factory=Rehearsals, compare=False)

    @property
    def name(self) -> str:
        return self.named.name

    @property
    def ours(self) -> bool:
        """Whether ssdprof's error budget applies.  Another library also tunes itself in its first call."""
        return self.named.kind != "library"

    def entries(self, operator: Operator[Any], inputs: Any) -> list[Entry]:
        """The contender on these inputs, at each of its chunk sizes."""
        found = []
        for size in self.chunk_sizes or (None,):
            own = inputs if size is None else operator.drawing.with_chunk_size(inputs, size)
            label = f"{self.name} {self.precision}{'' if size is None else f', chunk {size}'}"
            call = Caller(self.named, own, self.rehearsals).call(self.precision, label=label)
            found.append(Entry(self, size, call))
        return found


@dataclass(frozen=True, eq=False)
class Entry:
    """A contender's call."""

    contender: Contender
    chunk_size: int | None
    call: Call

    @property
    def key(self) -> tuple[Contender, int | None]:
        """Equal for the same entry on other inputs."""
        return self.contender, self.chunk_size


def ways(operator: Operator[Any], words: str) -> tuple[str, ...]:
    """ "normalised,quarter-ungated" -> the words, each once, in the operator's order.  Raises BadInputError."""
    known = operator.drawing.ways
    wanted = {word.strip() for word in words.split(",") if word.strip()}
    for word in sorted(wanted - known.keys()):
        meanings = [f"{name} ({meaning})" for name, meaning in known.items()]
        raise BadInputError(f"--draw does not know {word!r}.", f"{_known(operator, meanings)}.")
    return tuple(word for word in known if word in wanted)


def _known(operator: Operator[Any], names: Iterable[str]) -> str:
    return f"For {operator.name} there are: {', '.join(names) or 'none'}"


def line_up(
    operator: Operator[Any],
    cell: Cell,
    wanted: Sequence[schema.PrecisionRecord],
    named: Sequence[Named],
    chunk_sizes: tuple[int, ...],
    rehearsals: Rehearsals | None = None,
) -> tuple[Contender, ...]:
    """Other libraries, then the others, each at its own precisions or at the wanted ones.

    named: all of them are there.  The baseline of the operator runs with exact intermediates only, and with the wanted
    state dtypes.  Alternative forms run once, with exact intermediates and fp32 states.  So do implementations
    that go token by token; if the cell's sequences have a few tokens, they take part even if they are not named.
    """
    exact = tuple(dict.fromkeys(one.model_copy(update={"intermediates": "exact"}) for one in wanted))
    once = {BY_TOKEN, *operator.drawing.alternatives}
    everyone = sorted(named, key=lambda one: one.kind != "library")
    if cell.tokens.steps and BY_TOKEN in kernels.names(operator.name):
        everyone.append(resolve(operator, BY_TOKEN))

    def precisions(one: Named) -> Sequence[schema.PrecisionRecord]:
        if one.kind != "bundled":
            return one.precisions(cell.dtype, tuple(wanted))
        if one.name in once:
            return (schema.EXACT_FP32,)
        return exact if one.name == operator.baseline else wanted

    def contender(one: Named, precision: schema.PrecisionRecord) -> Contender:
        chunks_itself = one.kind == "own" or one.name in operator.drawing.chunks_itself
        return Contender(
            named=one,
            precision=precision,
            chunk_sizes=() if chunks_itself else chunk_sizes,
            rehearsals=rehearsals or Rehearsals(),
        )

    return tuple(
        contender(one, precision)
        for one in {one.name: one for one in everyone}.values()
        for precision in precisions(one)
    )
