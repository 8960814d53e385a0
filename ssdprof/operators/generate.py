"""The interface of `ssdprof bench` to an operator: shapes of models, random inputs, and other
libraries' kernels.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias

from typing_extensions import TypeVar

from ssdprof.errors import BadInputError
from ssdprof.kernels.registry import Implementation
from ssdprof.operators.late import deferred, packages, torch
from ssdprof.operators.tensors import dtype_name, dtype_named, exact_fp32

if TYPE_CHECKING:
    from torch import Tensor

    from ssdprof.kernels.inputs import Inputs
    from ssdprof.kernels.precision import Precision

MOST_STEP_TOKENS = 32  # longest sequences, in tokens, on which token-by-token implementations run
SEED = 0  # of random inputs, so that every run has the same; `states` takes the next number
# range of softplus(bias), the gate's step at a raw gate of 0: log-uniform, as newly initialised
# models have it
GATE_STEPS = (1e-3, 1e-1)
I = TypeVar("I", bound="Inputs", default=Any)
InputDType = Literal["bf16", "fp16", "fp32"]
Layout = Literal["contiguous", "views", "transposed"]


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer, and the other numbers from which its inputs are generated.

    name: the model's name, or the sizes as the user typed them.
    words: text such as "80x64, N 128, G 1".
    sizes: all these numbers, by the operator's names for them.
    """

    name: str
    words: str
    sizes: Mapping[str, Any] = field(hash=False)

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The layout of tokens in a call: a batch of sequences of one length, or `packed` sequences of
    random lengths.

    seqlen: length of each sequence, in tokens; of packed sequences the greatest.
    shortest: least length of packed sequences; None: they are not packed.
    state_every: `Inputs.state_every`.
    pool: number of slots of the pool that has the initial states; 0: there is no pool.
    """

    sequences: int
    seqlen: int
    shortest: int | None = None
    state_every: int = 0
    pool: int = 0

    @property
    def packed(self) -> bool:
        """Whether sequences are packed."""
        return self.shortest is not None

    @property
    def is_decoding(self) -> bool:
        """Whether sequences are not packed, and short enough to be computed token by token, as in
        decoding.
        """
        return not self.packed and self.seqlen <= MOST_STEP_TOKENS

    @property
    def has_states(self) -> bool:
        """Whether sequences begin with a state, as in packed calls, in decoding and on a pool."""
        return self.packed or self.is_decoding or self.pool > 0

    def __str__(self) -> str:
        text = f"{self.sequences} x {self.seqlen:,}"
        if self.shortest is not None:
            text = f"{self.sequences} packed x {_brief(self.shortest)}-{_brief(self.seqlen)}"
        if self.state_every == 1:
            text += ", every state"
        elif self.state_every:
            text += f", state every {self.state_every:,}"
        if self.pool:
            text += f", pool of {self.pool:,}"
        return text


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Describes the generated inputs of one case key of a bench.

    dtype: of the inputs that models pass in their own dtype.
    layout: "contiguous" tensors; "views" of a wide projection, as a model passes them; or
        "transposed" tensors, whose neighbouring elements are neighbouring positions.
    ways: the `InputGenerator.ways` in which the inputs differ from the default.
    """

    shape: Shape
    dtype: InputDType
    layout: Layout
    tokens: Tokens
    ways: tuple[str, ...] = ()

    def __str__(self) -> str:  # without the layout, which all cells of a bench share
        return ", ".join((self.shape.name, str(self.tokens), self.dtype, *self.ways))


@dataclass(frozen=True, kw_only=True)
class Library:
    """How to load another library.

    load: (checkout, or None for an installed library) -> the implementation, with its version and
        the precisions at which the library runs.  Raises ImportError.
    hint: what to do after a failed import, or if the checkout is no folder.
    package: what pip installs; empty for a library that exists only as a checkout.
    repository: address of a library that exists only as a checkout; empty for an installed one.
    needs_gpu: whether its kernels run on an NVIDIA GPU only.
    """

    load: Callable[[Path | None], Implementation]
    hint: str
    package: str = ""
    repository: str = ""
    needs_gpu: bool = True


def installed_library(
    package: str,
    load: Callable[[], Implementation],
    precisions: Callable[[InputDType], tuple[Precision, ...]],
    *,
    version: Callable[[], str] | None = None,
    needs_gpu: bool = True,
) -> Library:
    """An installed library.

    package: what pip installs.
    load: () -> the implementation.  Raises ImportError.
    precisions: (name of the inputs' dtype) -> the precisions of the library.
    version: () -> the version in reports; None: that of the package.
    needs_gpu: see `Library`.
    """

    def load_installed(_checkout: Path | None) -> Implementation:
        version_text = version() if version else packages.package_version(package)
        return replace(load(), version=version_text, precisions=precisions)

    return Library(
        load=load_installed,
        hint=f"pip install {package}, or leave it out.",
        package=package,
        needs_gpu=needs_gpu,
    )


def of_servers(
    load: str, precisions: Callable[[InputDType], tuple[Precision, ...]], *arguments: str
) -> dict[str, Library]:
    """Two kernels of each of vLLM and SGLang, by name: "vllm" for prompts, at these precisions, and
    "vllm_step" for steps on a pool, with fp32 states.

    load: "module:function" in `ssdprof.kernels`; the function takes such a name, then `arguments`.
    """
    libraries = {}
    for package in ("vllm", "sglang"):
        step = f"{package}_step"
        load_prompts = deferred(load, package, *arguments)
        libraries[package] = installed_library(package, load_prompts, precisions)
        libraries[step] = installed_library(package, deferred(load, step, *arguments), exact_fp32)
    return libraries


def model(load: str, *arguments: str) -> Library:
    """The torch function of transformers that computes the operator.

    load: "module:function" in `ssdprof.kernels`, called with `arguments`.
    """

    def version() -> str:
        return f"transformers {packages.package_version('transformers')}"

    return installed_library(
        "transformers", deferred(load, *arguments), exact_fp32, version=version, needs_gpu=False
    )


@dataclass(frozen=True)
class Trait(Generic[I]):
    """A special property of edge inputs.

    name: text such as "g above 0".
    apply: changes the generated tensors in place and returns None, or returns other inputs.
    rule: what a kernel must do with such inputs; empty if the formulas say it.
    """

    name: str
    apply: Callable[[I], I | None]
    rule: str = ""


@dataclass(frozen=True)
class EdgeInputs(Generic[I]):
    """Random inputs with traits.

    draw: () -> inputs without the traits: new tensors with the same values at every call.
    traits: in the order in which they are applied.
    """

    draw: Callable[[], I]
    traits: Sequence[Trait[I]]

    def make(self, left_out: Trait[I] | None = None) -> I:
        """The inputs with all traits, or with all but `left_out`."""
        inputs = self.draw()
        for trait in self.traits:
            if trait is not left_out:
                inputs = trait.apply(inputs) or inputs
        return inputs

    def restricted(self, accepts: Callable[[I], bool]) -> EdgeInputs[I]:
        """The same inputs without the traits because of which they are not accepted.  If they are
        not even accepted without traits, none is left.
        """
        accepted = EdgeInputs(self.draw, ())
        for trait in self.traits:
            longer = EdgeInputs(self.draw, (*accepted.traits, trait))
            if accepts(longer.make()):
                accepted = longer
        return accepted


@dataclass(frozen=True, kw_only=True)
class KnownOutputs:
    """Those outputs of one sequence that follow from the inputs in closed form, for some heads.

    kind: text that tells these heads from others, such as "windows of 16 tokens".
    batch, positions (n), heads (h): indices of the outputs in `out`.  A sequence that is too short
        has none: n is 0.
    expected: the outputs, (n, h, V) in fp64.
    """

    kind: str
    batch: int
    positions: Tensor
    heads: Tensor
    expected: Tensor


# (inputs, those of their outputs that are known).  These outputs consist of what earlier tokens
# wrote, although a bound from the decays alone would say that this history has no influence.
History: TypeAlias = "tuple[I, Sequence[KnownOutputs]]"


def no_edges(_like: Inputs) -> Sequence[Sequence[EdgeInputs[Any]]]:
    """The default of `InputGenerator.edges`: an operator without edge inputs."""
    return ()


@dataclass(frozen=True, kw_only=True)
class InputGenerator(Generic[I]):
    """How inputs of an operator are generated for a bench, and for the tests of laws.

    form: how a user writes sizes, with the operator's names of the sizes: "{heads}x{width}".
    order: the same for people: "heads x P".
    words: format string for `Shape.words`.
    models: name of a model -> its sizes in the order of `form`, then of `others`; the first model
        is the default.
    others: other numbers from which inputs are generated -> the value if a model has none.
    divides: names of two sizes of which the first must divide the second; None: there are none.
    largest: size -> its largest value that is measured.
    draw: (cell, device) -> random inputs with gates as in new models, the same at every call.
    edges: (inputs) -> kinds of edge inputs in the dtype of `inputs`.  A kind is a sequence of
        inputs: the first has most features, later ones have fewer, for kernels that refuse some.
    histories: (inputs, numbers of heads) -> kinds of histories: first one in the shape of the
        inputs, then long ones with each number of heads.  A kind is a sequence of histories with
        ever fewer features, for kernels that refuse some: packed with initial states, then not
        packed, then without initial states.  None for an operator in which the sum of a head's
        gates bounds what is left of its state, so that the amplified history suffices.
    ways: word of --draw -> what it changes in the drawn inputs.
    chunk_sizes: those that a bench measures by default, of implementations that take theirs from
        the inputs; empty: a bench leaves the chunk size as `draw` sets it.
    chunks_itself: names of implementations that choose their own chunk size.
    alternatives: names of other forms of bundled implementations, which run only when a user names
        them.
    """

    form: str
    order: str
    words: str
    models: Mapping[str, tuple[int, ...]]
    others: Mapping[str, int] = field(default_factory=dict)
    divides: tuple[str, str] | None = None
    largest: Mapping[str, int] = field(default_factory=dict)
    draw: Callable[[Cell, torch.device], I]
    edges: Callable[[I], Sequence[Sequence[EdgeInputs[I]]]] = no_edges
    histories: Callable[[I, Sequence[int]], Iterator[Iterator[History[I]]]] | None = None
    ways: Mapping[str, str] = field(default_factory=dict)
    chunk_sizes: tuple[int, ...] = ()
    chunks_itself: frozenset[str] = frozenset({"fused", "recurrent"})
    alternatives: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sizes in `form`, then those of `others`."""
        return (*re.findall(r"{(\w+)}", self.form), *self.others)

    def shape(self, name: str, *values: int) -> Shape:
        """A shape of these sizes, in the order of `names`.  Those of `others` may be left out."""
        sizes = {**self.others, **dict(zip(self.names, values, strict=False))}
        return Shape(name, self.words.format(**sizes), sizes)

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of models, by the model's name."""
        return {model: self.shape(model, *values) for model, values in self.models.items()}

    @property
    def grammar(self) -> str:
        """How sizes are written: "heads x P x N x groups, such as 80x64x128x1"."""
        first = next(iter(self.shapes.values()))
        return f"{self.order}, such as {self.form.format(**first.sizes)}"

    def parse(self, text: str) -> Shape | None:
        """The shape that a user writes as `form` says, each size with up to five digits; None for
        text of another form.

        Raises BadInputError for sizes that are impossible or too large.
        """
        match = re.fullmatch(re.sub(r"{\w+}", r"(\\d{1,5})", self.form), text)
        if match is None:
            return None
        shape = self.shape(text, *map(int, match.groups()))
        sizes = shape.sizes
        # name of a size in `form` -> what `order` calls it
        titles = dict(zip(self.names, re.split(" [x/] ", self.order), strict=False))
        hint = f"Order: {self.order}."
        is_possible = all(sizes[name] for name in titles)
        rule = ""
        if self.divides is not None:
            divisor, multiple = self.divides
            rule = f", and {titles[divisor]} must divide {titles[multiple]}"
            is_possible = is_possible and sizes[multiple] % sizes[divisor] == 0
        if not is_possible:
            raise BadInputError(f"{text} is impossible: sizes must be positive{rule}.", hint)
        if any(sizes[name] > most for name, most in self.largest.items()):
            limits = ", ".join(
                f"{titles[name]} is at most {most}" for name, most in self.largest.items()
            )
            raise BadInputError(f"{text} is not measured: {limits}.", hint)
        return shape


# --- for the operators' own generators


def models_of(operator: str) -> dict[str, tuple[int, ...]]:
    """Name of a model -> the sizes of its layers, from `models.toml`."""
    table = tomllib.loads((Path(__file__).parent / "models.toml").read_text("utf-8"))
    return {model: tuple(sizes) for model, sizes in table[operator].items()}


Lengths = tuple[int, ...]  # in tokens, of each sequence; sequences of unequal lengths are packed
INCOMPLETE_CHUNKS: Lengths = (321, 321)  # no multiples of a chunk
PACK_WITH_INT64_BOUNDS: Lengths = (303, 0, 17, 1)
WHOLE_CHUNKS: Lengths = (256, 256)
# Lengths of the kinds of edge inputs.  The second kind is a decode step.  The two packs have the
# same sequences in reverse order, one of them empty.
EDGES = (INCOMPLETE_CHUNKS, (1, 1), (1, 17, 0, 303), PACK_WITH_INT64_BOUNDS, WHOLE_CHUNKS)


def extents(cell: Cell) -> tuple[int, int, list[int] | None]:
    """(b, l, boundaries): the sizes b and l of the tensors, and the boundaries of packed sequences
    in tokens, from 0; None if sequences are not packed.
    """
    tokens = cell.tokens
    if tokens.shortest is None:
        return tokens.sequences, tokens.seqlen, None
    bounds = boundaries(tokens, SEED)
    return 1, bounds[-1], bounds


def cu_seqlens(cell: Cell, device: torch.device) -> Tensor | None:
    """The boundaries of packed sequences, (sequences + 1) in int32; None unless they are packed."""
    _, _, bounds = extents(cell)
    return None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=device)


def boundaries(tokens: Tokens, seed: int) -> list[int]:
    """Boundaries of the sequences in tokens, from 0: (sequences + 1) numbers.  The lengths of
    packed sequences are random, uniform from the shortest to the longest.
    """
    lengths = [tokens.seqlen] * tokens.sequences
    if tokens.shortest is not None:
        generator = torch.Generator().manual_seed(seed)
        random_lengths = torch.randint(
            tokens.shortest, tokens.seqlen + 1, (tokens.sequences,), generator=generator
        )
        lengths = [int(length) for length in random_lengths]
    return [0, *accumulate(lengths)]


def uniform(count: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    """(count) random numbers, uniform between `low` and `high`, in fp32."""
    return low + (high - low) * torch.rand(count, device=generator.device, generator=generator)


def gate_bias(count: int, generator: torch.Generator) -> Tensor:
    """(count) biases whose softplus is log-uniform in `GATE_STEPS`, in fp32."""
    step = uniform(count, math.log(GATE_STEPS[0]), math.log(GATE_STEPS[1]), generator).exp()
    return step + torch.log(-torch.expm1(-step))  # the inverse softplus


def edge_cell(shape: Shape, like: Tensor, lengths: Lengths) -> Cell:
    """The cell of edge inputs: views, in the dtype of `like`.  Packed sequences are drawn as one
    sequence, and get their boundaries from `as_edge`.
    """
    dtype: Any = dtype_name(like.dtype)
    if is_packed(lengths):
        tokens = Tokens(sequences=1, seqlen=sum(lengths))
    else:
        tokens = Tokens(sequences=len(lengths), seqlen=lengths[0])
    return Cell(shape=shape, dtype=dtype, layout="views", tokens=tokens)


def edge_bounds(lengths: Lengths, device: torch.device) -> Tensor | None:
    """The boundaries of sequences of these lengths, in int32; None unless they are packed."""
    if not is_packed(lengths):
        return None
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def edge_forms(
    draws: Sequence[Callable[[], I]], always: Sequence[Trait[I]], special: Sequence[Trait[I]]
) -> list[EdgeInputs[I]]:
    """The four edge inputs of one kind: with the traits `always`, `special` and initial states;
    without `special`; the same in the model's sizes; and these without initial states.

    draws: three functions that draw inputs: in sizes for the special traits; in other sizes than
        the model's; in the model's sizes.
    """
    draw_special, draw_plain, draw_like_model = draws
    with_states = (*always, INITIAL)
    return [
        EdgeInputs(draw_special, (*with_states, *special)),
        EdgeInputs(draw_plain, with_states),
        EdgeInputs(draw_like_model, with_states),
        EdgeInputs(draw_like_model, always),
    ]


def as_edge(inputs: I, like: Any, lengths: Lengths) -> I:
    """Inputs that were drawn in an `edge_cell` as sequences of these lengths, without initial
    states, in the chunk size of `like`.
    """
    bounds = edge_bounds(lengths, like.device)
    return replace(inputs, chunk_size=like.chunk_size, cu_seqlens=bounds, **{like.STATES: None})


def with_initial_states(inputs: Any) -> Any:
    """The inputs with random initial states, transposed in memory."""
    sequences, heads, rows, columns = inputs.states_shape
    return inputs.after(states(sequences, heads, columns, rows, device=inputs.device).mT)


INITIAL: Trait[Any] = Trait("initial states", with_initial_states)


def with_int64_bounds(inputs: Any) -> Any:
    """The inputs with cu_seqlens in int64."""
    return replace(inputs, cu_seqlens=inputs.cu_seqlens.long())


def traits_of(lengths: Lengths) -> list[Trait[Any]]:
    """Traits of edge inputs of these lengths: one of the two packs has boundaries in int64."""
    if lengths != PACK_WITH_INT64_BOUNDS:
        return []
    rule = "cu_seqlens are int32 or int64"
    return [Trait("cu_seqlens in int64", with_int64_bounds, rule)]


def is_packed(lengths: Lengths) -> bool:
    """Whether sequences of these lengths are packed: only if the lengths differ."""
    return len(set(lengths)) > 1


def states(*shape: int, device: torch.device) -> Tensor:
    """A tensor ~ N(0, 1) in fp32, such as initial states: the same for every call with this
    shape.
    """
    return torch.randn(
        *shape, device=device, generator=torch.Generator(device).manual_seed(SEED + 1)
    )


def pool(initial: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Put initial states (n, ...) into a pool of `count` slots, at least n, in random order.  The
    other slots are NaN.

    Returns the pool (count, ...), and the slot of each state, (n) in int32.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(SEED))
    slots = order[: len(initial)].to(initial.device)
    unused = initial.new_full((count, *initial.shape[1:]), math.nan)
    return unused.index_copy_(0, slots, initial), slots.int()


def empty(sizes: Sequence[tuple[int, ...]], cell: Cell, device: torch.device) -> tuple[Tensor, ...]:
    """Uninitialised tensors (b, l, *size), one for each size, in the dtype and the layout of the
    cell.

    "views" are slices of one tensor.  "transposed" tensors are slices of one tensor whose
    neighbouring elements are neighbouring positions.
    """
    rows, length, _ = extents(cell)
    new = partial(torch.empty, rows, length, dtype=dtype_named(cell.dtype), device=device)
    if cell.layout == "contiguous":
        return tuple(new(*size) for size in sizes)
    widths = [math.prod(size) for size in sizes]
    whole = new(sum(widths))  # (b, l, sum of the widths), of which each tensor is a slice
    if cell.layout == "transposed":
        whole = whole.view(rows, sum(widths), length).mT
    parts = torch.split(whole, widths, -1)
    return tuple(part.reshape(rows, length, *size) for part, size in zip(parts, sizes, strict=True))


def _brief(length: int) -> str:
    """A number of tokens, at least 1, as a user writes it: "4k" for 4096."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)
