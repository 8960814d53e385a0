"""What `ssdprof bench` asks of an operator: shapes of models, inputs drawn for them, and other libraries' kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from ssdprof.operators.shapes import Shape, Shapes
from ssdprof.schema import PrecisionRecord

if TYPE_CHECKING:  # words of the command line are checked before torch is imported
    import torch

    from ssdprof.kernels.registry import Implementation

MOST_STEPS = 32  # tokens of a sequence up to which implementations that go token by token take part
I = TypeVar("I")
InputDType = Literal["bf16", "fp16", "fp32"]
Layout = Literal["contiguous", "views"]


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Sequences of one length side by side, or `packed` ones of drawn lengths up to `seqlen` behind each other.

    shortest: of packed sequences.
    """

    sequences: int
    seqlen: int
    shortest: int | None = None

    @property
    def packed(self) -> bool:
        return self.shortest is not None

    @property
    def steps(self) -> bool:
        """Whether sequences are so short that a model computes them token by token, as in decoding."""
        return not self.packed and self.seqlen <= MOST_STEPS

    @property
    def states(self) -> bool:
        """Whether sequences begin with a state, as packed ones and those of decoding do."""
        return self.packed or self.steps

    @property
    def at_most(self) -> int:
        """Tokens in all; packed ones may be fewer."""
        return self.sequences * self.seqlen

    @property
    def at_least(self) -> int:
        """Tokens in all, if every packed sequence is of the shortest length."""
        return self.sequences * (self.seqlen if self.shortest is None else self.shortest)

    def __str__(self) -> str:
        if self.shortest is not None:
            return f"{self.sequences} packed x {_brief(self.shortest)}-{_brief(self.seqlen)}"
        return f"{self.sequences} x {self.seqlen:,}"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One thing to measure.

    layout: contiguous tensors, or views of a wide projection, as a model passes them.
    drawn: in which of `Drawing.ways` the inputs differ from the usual ones.
    """

    shape: Shape
    dtype: InputDType
    layout: Layout
    tokens: Tokens
    drawn: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join((self.shape.name, str(self.tokens), self.dtype, *self.drawn))


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another library.  precisions: those that it has for inputs of a dtype, at the library's own defaults."""

    implementation: Implementation
    version: str
    precisions: Callable[[InputDType], tuple[PrecisionRecord, ...]]


@dataclass(frozen=True, kw_only=True)
class PeerSource:
    """Where a peer comes from.

    load: of a checkout, None where it is installed.  Raises ImportError.
    from_checkout: whether it is in no package; `where` then says what to check out.
    hint: what to do when it cannot be imported.
    needs_gpu: whether its kernels run on an NVIDIA GPU only.
    """

    load: Callable[[Path | None], Peer]
    hint: str
    from_checkout: bool = False
    where: str = ""
    needs_gpu: bool = True


@dataclass(frozen=True, kw_only=True)
class Drawing(Shapes, Generic[I]):
    """draw: inputs distributed as those of a trained layer, the same at every call.

    ways: in which inputs can be drawn otherwise: a word for the user, and what it changes.
    chunk_sizes: of implementations that take theirs from the inputs; empty if the operator has none.
    with_chunk_size: the same inputs with another chunk size.
    chunks_itself: names of implementations that chunk as they like.
    alternatives: forms of ours that take part only when they are named, such as a kernel that is not chosen.
    peers: other libraries by name.
    """

    draw: Callable[[Cell, torch.device], I]
    ways: Mapping[str, str] = field(default_factory=dict)
    chunk_sizes: tuple[int, ...] = ()
    with_chunk_size: Callable[[I, int], I] = lambda inputs, _: inputs
    chunks_itself: frozenset[str] = frozenset({"fused", "recurrent"})
    alternatives: Mapping[str, Implementation] = field(default_factory=dict)
    peers: Mapping[str, PeerSource] = field(default_factory=dict)


def boundaries(tokens: Tokens, seed: int) -> list[int]:
    """Where sequences begin and end; lengths of packed ones are uniform between the shortest and the longest."""
    import torch

    lengths = [tokens.seqlen] * tokens.sequences
    if tokens.shortest is not None:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(tokens.shortest, tokens.seqlen + 1, (tokens.sequences,), generator=generator)
        lengths = [int(length) for length in drawn]
    return [0, *accumulate(lengths)]


def _brief(length: int) -> str:
    """As a user writes it: "4k"."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)
