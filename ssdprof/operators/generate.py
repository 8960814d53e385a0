"""The interface of `ssdprof bench` to an operator: shapes of models, random inputs, and other libraries' kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from ssdprof.operators.dtypes import dtype_name, dtype_named
from ssdprof.operators.tensors import LazyModule

if TYPE_CHECKING:
    import torch

    from ssdprof.kernels.registry import Implementation
else:
    torch = LazyModule("torch")

MOST_STEPS = 32  # longest sequences, in tokens, on which token-by-token implementations run
SEED = 0
STEPS = (1e-3, 1e-1)  # of the gate's softplus at a raw gate of 0: log-uniform, as models are initialised
I = TypeVar("I")
InputDType = Literal["bf16", "fp16", "fp32"]
Layout = Literal["contiguous", "views"]


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer, by the operator's own names, and whatever else its inputs are drawn from.

    name: as the user typed it.  words: "80x64, N 128, G 1".
    """

    name: str
    words: str
    sizes: Mapping[str, Any] = field(hash=False)

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A batch of sequences of one length, or `packed` sequences of random lengths up to `seqlen`.

    shortest: least length of packed sequences.
    """

    sequences: int
    seqlen: int
    shortest: int | None = None

    @property
    def packed(self) -> bool:
        return self.shortest is not None

    @property
    def steps(self) -> bool:
        """Whether sequences are short enough to be computed token by token, as in decoding."""
        return not self.packed and self.seqlen <= MOST_STEPS

    @property
    def states(self) -> bool:
        """Whether sequences begin with a state, as in packed calls and in decoding."""
        return self.packed or self.steps

    @property
    def at_most(self) -> int:
        """The number of tokens; packed sequences may have fewer."""
        return self.sequences * self.seqlen

    @property
    def at_least(self) -> int:
        """The number of tokens if every packed sequence has the shortest length."""
        return self.sequences * (self.seqlen if self.shortest is None else self.shortest)

    def __str__(self) -> str:
        if self.shortest is not None:
            return f"{self.sequences} packed x {_brief(self.shortest)}-{_brief(self.seqlen)}"
        return f"{self.sequences} x {self.seqlen:,}"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of a bench.

    layout: contiguous tensors, or views of a wide projection, as a model passes them.
    drawn: the `InputGenerator.ways` in which the inputs differ from the default.
    """

    shape: Shape
    dtype: InputDType
    layout: Layout
    tokens: Tokens
    drawn: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join((self.shape.name, str(self.tokens), self.dtype, *self.drawn))


@dataclass(frozen=True, kw_only=True)
class Library:
    """How to load another library.

    load: (checkout, or None for an installed library) -> it, with its version, and its precisions at the library's
        defaults.  Raises ImportError.
    from_checkout: whether it exists only as a checkout; `where` then names the repository.
    hint: for a failed import.
    needs_gpu: whether its kernels run on an NVIDIA GPU only.
    """

    load: Callable[[Path | None], Implementation]
    hint: str
    from_checkout: bool = False
    where: str = ""
    needs_gpu: bool = True


def installed(
    load: Callable[[], Implementation], version: Callable[[], str], precisions: Callable[[Any], tuple[Any, ...]],
    hint: str,
) -> Library:  # fmt: skip
    """An installed library.  precisions: (name of the inputs' dtype) -> its own."""
    return Library(load=lambda _: replace(load(), version=version(), precisions=precisions), hint=hint)


@dataclass(frozen=True, kw_only=True)
class InputGenerator(Generic[I]):
    """shapes: of models, by the name of a model that has them; the first is the default.

    parse: sizes as a user writes them -> Shape; None for text of another form.  Raises BadInputError for impossible
        sizes.
    grammar: how sizes are written: "heads x P x N x groups, such as 80x64x128x1".
    draw: random inputs with gates as models are initialised, the same at every call.
    edges: (inputs) -> random ones of their dtype with every feature of the operator, then with fewer.
    ways: other ways to draw inputs: a word of --draw, and what it changes.
    chunk_sizes: for implementations that take it from the inputs; empty if the operator has none.
    with_chunk_size: the same inputs with another chunk size.
    chunks_itself: names of implementations that choose their own chunk size.
    alternatives: names of other forms of our implementations, which run only when they are named.
    libraries: other libraries by name.
    """

    shapes: Mapping[str, Shape]
    parse: Callable[[str], Shape | None]
    grammar: str
    draw: Callable[[Cell, torch.device], I]
    edges: Callable[[I], Iterator[I]] = lambda _: iter(())
    ways: Mapping[str, str] = field(default_factory=dict)
    chunk_sizes: tuple[int, ...] = ()
    with_chunk_size: Callable[[I, int], I] = lambda inputs, _: inputs
    chunks_itself: frozenset[str] = frozenset({"fused", "recurrent"})
    alternatives: tuple[str, ...] = ()
    libraries: Mapping[str, Library] = field(default_factory=dict)


# --- for the operators' own generators


def shapes(words: str, names: Sequence[str], by_model: Mapping[str, tuple[int, ...]]) -> dict[str, Shape]:
    """words: of the sizes, such as "{nheads}x{headdim}".  by_model: their values in the order of `names`."""
    found = {model: dict(zip(names, values, strict=False)) for model, values in by_model.items()}
    return {model: Shape(model, words.format(**sizes), sizes) for model, sizes in found.items()}


def positions(cell: Cell) -> tuple[int, int, list[int] | None]:
    """Rows and positions of the tensors, and the boundaries of packed sequences."""
    tokens = cell.tokens
    if tokens.shortest is None:
        return tokens.sequences, tokens.seqlen, None
    bounds = boundaries(tokens, SEED)
    return 1, bounds[-1], bounds


def boundaries(tokens: Tokens, seed: int) -> list[int]:
    """Boundaries of the sequences; lengths of packed ones are uniform between the shortest and the longest."""
    lengths = [tokens.seqlen] * tokens.sequences
    if tokens.shortest is not None:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(tokens.shortest, tokens.seqlen + 1, (tokens.sequences,), generator=generator)
        lengths = [int(length) for length in drawn]
    return [0, *accumulate(lengths)]


def uniform(count: int, low: float, high: float, generator: torch.Generator) -> torch.Tensor:
    """(count) in fp32."""
    return low + (high - low) * torch.rand(count, device=generator.device, generator=generator)


def gate_bias(count: int, generator: torch.Generator) -> torch.Tensor:
    """(count): softplus of it is log-uniform in `STEPS`."""
    step = uniform(count, math.log(STEPS[0]), math.log(STEPS[1]), generator).exp()
    return step + torch.log(-torch.expm1(-step))  # the inverse softplus


def edge_cell(shape: Shape, like: torch.Tensor) -> Cell:
    """Two sequences of 321 positions, which is no multiple of a chunk, in the dtype of `like`."""
    dtype: Any = dtype_name(like.dtype)
    return Cell(shape=shape, dtype=dtype, layout="contiguous", tokens=Tokens(sequences=2, seqlen=321))


def states(*shape: int, device: torch.device) -> torch.Tensor:
    """Initial states ~ N(0, 1) in fp32."""
    return torch.randn(*shape, device=device, generator=torch.Generator(device).manual_seed(SEED + 1))


def empty(sizes: Sequence[tuple[int, ...]], cell: Cell, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Uninitialised tensors, of these sizes at each position; as views, they are slices of one tensor."""
    rows, length, _ = positions(cell)
    new = partial(torch.empty, rows, length, dtype=dtype_named(cell.dtype), device=device)
    if cell.layout == "contiguous":
        return tuple(new(*size) for size in sizes)
    widths = [math.prod(size) for size in sizes]
    parts = torch.split(new(sum(widths)), widths, -1)
    return tuple(part.view(rows, length, *size) for part, size in zip(parts, sizes, strict=True))


def _brief(length: int) -> str:
    """As a user writes it: "4k"."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)
