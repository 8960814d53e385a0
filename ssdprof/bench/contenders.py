"""Who takes part: implementations of ours and of other libraries, each at the precisions that are asked of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from ssdprof import kernels, schema
from ssdprof.bench.grid import InputDType
from ssdprof.errors import BadInputError, MissingCapabilityError
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan
from ssdprof.kernels.ssd.adapters import mamba_ssm, published
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.measure.dtypes import dtype_named

PEERS = ("mamba_ssm", "published")
CHUNK_SIZES = (128, 256)  # those that callers of these libraries give


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another library.  precisions: those that it has for inputs of a dtype, at the library's own defaults."""

    implementation: Implementation
    version: str
    precisions: Callable[[InputDType], tuple[schema.Precision, ...]]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One implementation at one precision.

    chunk_sizes: the ones to choose the fastest from; empty if the implementation chunks as it likes.
    ours: judged by ssdprof's own rule.  Another library also tunes itself in its first call.
    """

    implementation: Implementation
    precision: schema.Precision
    chunk_sizes: tuple[int, ...]
    ours: bool

    @property
    def name(self) -> str:
        return self.implementation.name

    def entries(self, inputs: SSDInputs) -> list[Entry]:
        """The contender on these inputs, at each of its chunk sizes."""
        if not self.chunk_sizes:
            return [Entry(self, inputs, None)]
        return [Entry(self, replace(inputs, chunk_size=size), size) for size in self.chunk_sizes]


@dataclass(frozen=True, eq=False)
class Entry:
    """A contender's call."""

    contender: Contender
    inputs: SSDInputs
    chunk_size: int | None

    @property
    def label(self) -> str:
        chunk = "" if self.chunk_size is None else f", chunk {self.chunk_size}"
        return f"{self.contender.name} {self.contender.precision}{chunk}"

    @property
    def precision(self) -> Precision:
        wanted = self.contender.precision
        return Precision(intermediates=wanted.intermediates, state_dtype=dtype_named(wanted.state_dtype))

    def run(self) -> SSDOutput:
        output: SSDOutput = self.contender.implementation.run(self.inputs, self.precision)
        return output

    def plan(self) -> Plan:
        return self.contender.implementation.plan(self.inputs, self.precision)


def widened(output: SSDOutput) -> SSDOutput:
    """final_states in fp32, as outputs are judged."""
    return SSDOutput(output.out, output.final_states.to(torch.float32))


def peer_names(words: str, checkout: Path | None) -> tuple[str, ...]:
    """ "mamba_ssm,published" -> names, each once.  A checkout of the published kernel asks for it too.

    Raises BadInputError for an unknown name, and for the published kernel without a checkout.
    """
    names = dict.fromkeys(word.strip() for word in words.split(",") if word.strip())
    if checkout is not None:
        names["published"] = None
    for name in names:
        if name not in PEERS:
            raise BadInputError(f"--against does not know {name!r}.", f"Known are {' and '.join(PEERS)}.")
    if "published" in names and checkout is None:
        raise BadInputError(
            "The published kernel is in no package.",
            "Give a checkout of github.com/RishiAstra/mamba with --published.",
        )
    return tuple(names)


def load_peers(names: Iterable[str], checkout: Path | None) -> tuple[Peer, ...]:
    """The libraries of `peer_names`.  MissingCapabilityError for one that cannot be imported."""
    return tuple(_load(name, checkout) for name in names)


def _load(name: str, checkout: Path | None) -> Peer:
    try:
        if checkout is not None and name == "published":
            return Peer(
                implementation=published.load(checkout),
                version=published.version(checkout),
                precisions=_published_precisions,
            )
        return Peer(
            implementation=mamba_ssm.load(),
            version=mamba_ssm.version(),
            precisions=lambda dtype: (schema.Precision(intermediates="exact", state_dtype=dtype),),
        )
    except ImportError as error:
        hints = {
            "mamba_ssm": "pip install mamba-ssm, or leave it out of --against.",
            "published": "--published wants a checkout of github.com/RishiAstra/mamba.",
        }
        raise MissingCapabilityError(f"{name} cannot be imported: {error}.", hints[name]) from error


def _published_precisions(dtype: InputDType) -> tuple[schema.Precision, ...]:
    high = schema.Precision(intermediates="exact", state_dtype="fp32")
    medium = schema.Precision(intermediates="relaxed", state_dtype="fp16")
    return (high, medium) if dtype == "fp16" else (high,)


def line_up(
    dtype: InputDType,
    wanted: Sequence[schema.Precision],
    peers: Sequence[Peer],
    chunk_sizes: tuple[int, ...] = CHUNK_SIZES,
) -> tuple[Contender, ...]:
    """The peers, `unfused` with exact intermediates and the wanted state dtypes, and `fused` as wanted."""
    exact = [precision.model_copy(update={"intermediates": "exact"}) for precision in wanted]
    return (
        *(
            Contender(implementation=peer.implementation, precision=precision, chunk_sizes=chunk_sizes, ours=False)
            for peer in peers
            for precision in peer.precisions(dtype)
        ),
        *(
            Contender(
                implementation=kernels.get("ssd", "unfused"), precision=precision, chunk_sizes=chunk_sizes, ours=True
            )
            for precision in dict.fromkeys(exact)
        ),
        *(
            Contender(implementation=kernels.get("ssd", "fused"), precision=precision, chunk_sizes=(), ours=True)
            for precision in wanted
        ),
    )


def precisions_for(
    dtype: InputDType,
    intermediates: Literal["exact", "relaxed", "all"],
    states: Sequence[schema.DType] | None,
) -> tuple[schema.Precision, ...]:
    """Every pair of intermediates and state dtype.  states None: fp32 with exact, the inputs' dtype with relaxed."""
    kinds: tuple[schema.Intermediates, ...] = ("exact", "relaxed") if intermediates == "all" else (intermediates,)
    return tuple(
        schema.Precision(intermediates=kind, state_dtype=state)
        for kind in kinds
        for state in states or ("fp32" if kind == "exact" else dtype,)
    )
