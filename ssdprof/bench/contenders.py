"""Who takes part: implementations of ours and of other libraries, each at the precisions that are asked of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssdprof import kernels, schema
from ssdprof.errors import BadInputError, MissingCapabilityError
from ssdprof.kernels.registry import Implementation
from ssdprof.measure.call import Call, call_of
from ssdprof.operators.drawing import Cell, Peer
from ssdprof.operators.operator import Operator

ALWAYS = ("unfused", "fused")
BY_TOKEN = "recurrent"  # takes part where sequences are a few tokens long
_FP32_STATES = schema.PrecisionRecord(intermediates="exact", state_dtype="fp32")


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One implementation at one precision.

    chunk_sizes: the ones to choose the fastest from; empty if the implementation chunks as it likes.
    ours: judged by ssdprof's own rule.  Another library also tunes itself in its first call.
    """

    implementation: Implementation
    precision: schema.PrecisionRecord
    chunk_sizes: tuple[int, ...]
    ours: bool

    @property
    def name(self) -> str:
        return self.implementation.name

    def entries(self, operator: Operator[Any], inputs: Any) -> list[Entry]:
        """The contender on these inputs, at each of its chunk sizes."""
        found = []
        for size in self.chunk_sizes or (None,):
            own = inputs if size is None else operator.drawing.with_chunk_size(inputs, size)
            label = f"{self.name} {self.precision}{'' if size is None else f', chunk {size}'}"
            call = call_of(self.implementation, own, self.precision, label=label, widens=not self.ours)
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
        """The same for the same entry on other inputs."""
        return self.contender, self.chunk_size


def peer_names(operator: Operator[Any], words: str, checkout: Path | None) -> tuple[str, ...]:
    """ "mamba_ssm,published" -> names, each once.  A checkout asks for the peers that come from one.

    Raises BadInputError for an unknown name, and for a peer without the checkout that it comes from.
    """
    peers = operator.drawing.peers
    names = dict.fromkeys(word.strip() for word in words.split(",") if word.strip())
    if checkout is not None:
        names |= dict.fromkeys(name for name, peer in peers.items() if peer.from_checkout)
    for name in names:
        if name not in peers:
            raise BadInputError(f"--against does not know {name!r}.", f"Known are {', '.join(peers) or 'none'}.")
        if peers[name].from_checkout and checkout is None:
            raise BadInputError(
                f"The {name} kernel is in no package.", f"Give a checkout of {peers[name].where} with --published."
            )
    return tuple(names)


def load_peers(operator: Operator[Any], names: Iterable[str], checkout: Path | None) -> tuple[Peer, ...]:
    """The libraries of `peer_names`.  MissingCapabilityError for one that cannot be imported."""
    return tuple(_load(operator, name, checkout) for name in names)


def _load(operator: Operator[Any], name: str, checkout: Path | None) -> Peer:
    source = operator.drawing.peers[name]
    try:
        return source.load(checkout)
    except ImportError as error:
        raise MissingCapabilityError(f"{name} cannot be imported: {error}.", source.hint) from error


def alternatives(operator: Operator[Any], words: str) -> tuple[Implementation, ...]:
    """ "fused_portable" -> the operator's alternatives of these names, each once.  Raises BadInputError."""
    known = operator.drawing.alternatives
    names = tuple(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
    for name in names:
        if name not in known:
            raise BadInputError(f"--also does not know {name!r}.", f"{_known(operator, known)}.")
    return tuple(known[name] for name in names)


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
    peers: Sequence[Peer],
    chunk_sizes: tuple[int, ...],
    also: Sequence[Implementation] = (),
) -> tuple[Contender, ...]:
    """The peers, the baseline with exact intermediates and the wanted state dtypes, and the others of ours as wanted.

    Where the cell's sequences are a few tokens long, also what goes token by token: once, for it knows no precision.
    also: `alternatives`, once each: with exact intermediates and fp32 states.

    Raises BadInputError if the operator lacks one of ours.
    """
    known = kernels.names(operator.name)
    missing = [name for name in ALWAYS if name not in known]
    if missing:
        raise BadInputError(f"There is no {missing[0]!r} implementation of {operator.name} to be timed.")
    exact = tuple(dict.fromkeys(one.model_copy(update={"intermediates": "exact"}) for one in wanted))
    ours = [(name, precision) for name in ALWAYS for precision in (exact if name == operator.baseline else wanted)]
    if cell.tokens.steps and BY_TOKEN in known:
        ours.append((BY_TOKEN, _FP32_STATES))

    def contender(implementation: Implementation, precision: schema.PrecisionRecord, *, ours: bool) -> Contender:
        chunks_itself = implementation.name in operator.drawing.chunks_itself
        sizes = () if chunks_itself else chunk_sizes
        return Contender(implementation=implementation, precision=precision, chunk_sizes=sizes, ours=ours)

    return (
        *(
            contender(peer.implementation, precision, ours=False)
            for peer in peers
            for precision in peer.precisions(cell.dtype)
        ),
        *(contender(kernels.get(operator.name, name), precision, ours=True) for name, precision in ours),
        *(contender(implementation, _FP32_STATES, ours=True) for implementation in also),
    )
