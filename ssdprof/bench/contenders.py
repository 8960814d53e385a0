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
OURS = (*ALWAYS, BY_TOKEN)
_FP32_THROUGHOUT = schema.PrecisionRecord(intermediates="exact", state_dtype="fp32")


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


def line_up(
    operator: Operator[Any],
    cell: Cell,
    wanted: Sequence[schema.PrecisionRecord],
    peers: Sequence[Peer],
    chunk_sizes: tuple[int, ...],
) -> tuple[Contender, ...]:
    """The peers, the baseline with exact intermediates and the wanted state dtypes, and the others of ours as wanted.

    Where the cell's sequences are a few tokens long, also what goes token by token: once, for it knows no precision.

    Raises BadInputError if the operator lacks one of ours.
    """
    known = kernels.names(operator.name)
    missing = [name for name in ALWAYS if name not in known]
    if missing:
        raise BadInputError(f"There is no {missing[0]!r} implementation of {operator.name} to be timed.")
    exact = tuple(dict.fromkeys(one.model_copy(update={"intermediates": "exact"}) for one in wanted))
    ours = [(name, precision) for name in ALWAYS for precision in (exact if name == operator.baseline else wanted)]
    if cell.tokens.steps and BY_TOKEN in known:
        ours.append((BY_TOKEN, _FP32_THROUGHOUT))
    return (
        *(
            Contender(implementation=peer.implementation, precision=precision, chunk_sizes=chunk_sizes, ours=False)
            for peer in peers
            for precision in peer.precisions(cell.dtype)
        ),
        *(
            Contender(
                implementation=kernels.get(operator.name, name),
                precision=precision,
                chunk_sizes=() if name in operator.drawing.chunks_itself else chunk_sizes,
                ours=True,
            )
            for name, precision in ours
        ),
    )
