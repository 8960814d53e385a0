"""The part of an operator's record that the command line and reports of stalls need.  Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ssdprof.operators.known_sources import KnownSource


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages of the algorithm, as its kernels name them in their STAGES.

    order: stages and their parts ("chunk_scan.previous") in the order of tables.
    words: a part's name in plain words.
    ahead: stages whose warps wait because they are ahead, which costs no time.
    kernels: function name of each bundled kernel -> the implementation that launches it.
    sources: files of other libraries' kernels whose stages are known, by their hash.
    """

    order: tuple[str, ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)
    ahead: frozenset[str] = frozenset()
    kernels: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, KnownSource] = field(default_factory=dict)

    @classmethod
    def together(cls, several: Sequence[Stages]) -> Stages:
        """The stages of several operators, concatenated."""
        return cls(
            order=tuple(name for stages in several for name in stages.order),
            words={part: words for stages in several for part, words in stages.words.items()},
            ahead=frozenset().union(*(stages.ahead for stages in several)),
            kernels={kernel: name for stages in several for kernel, name in stages.kernels.items()},
            sources={sha256: source for stages in several for sha256, source in stages.sources.items()},
        )


@dataclass(frozen=True, kw_only=True)
class Outline:
    """name: in stored records and on the command line.  title: for people.  layers: "Mamba-2", "a Mamba-2 layer".

    mixer_sizes: sizes of a checkpoint's layer, name -> attribute of its mixers in transformers.  words: of these sizes.
    largest: those sizes beyond which no bundled implementation runs.
    """

    name: str
    title: str
    layers: str
    mixer_sizes: Mapping[str, str] = field(default_factory=dict)
    words: str = ""
    largest: Mapping[str, int] = field(default_factory=dict)
    stages: Stages = field(default_factory=Stages)
