"""The part of an operator's record that the command line and reports of stalls need.  Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages of the algorithm, as its kernels name them in their STAGES.

    order: of stages, and of their parts ("chunk_scan.previous"), in tables.
    words: a part's name in plain words.
    ahead: stages whose warps have nothing to do because they are ahead: no cost.
    kernels: function name of each bundled kernel -> the implementation that launches it.
    """

    order: tuple[str, ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)
    ahead: frozenset[str] = frozenset()
    kernels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outline:
    """name: in stored records and on the command line.  title: for people.  layers: "Mamba-2", "a Mamba-2 layer"."""

    name: str
    title: str
    layers: str
    stages: Stages = field(default_factory=Stages)
