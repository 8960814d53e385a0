"""An operator's record.  Each stage uses the part that it needs, and no operator's name.

    itself      name, title, sizes, and the share of one tensor-parallel rank
    stages      of its algorithm, as kernels name them
    binding     how models call the operator, and how a captured call is stored
    oracle      the oracle in pieces, the roundings that a precision allows, sizes and cost of a
                call
    generated   shapes of models, and random inputs                  `generate.py`
    tuning      what `ssdprof tune` may vary                         `tuning.py`

Every operator's output is (out, final_states): out (b, l, h, ...) in the inputs' dtype,
final_states (sequences, h, ...) in fp32, or with a row for each state that `Inputs.state_every`
asks for.  Reports call them by these names whatever the operator's own names are.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias

from typing_extensions import TypeVar

from ssdprof import kernels
from ssdprof.core.target import Dims
from ssdprof.errors import BadInputError
from ssdprof.kernels import registry
from ssdprof.operators.generate import InputGenerator, Library
from ssdprof.operators.late import lazy, precision, rounding, torch
from ssdprof.operators.tensors import dtype_name

if TYPE_CHECKING:
    from torch import Tensor

    from ssdprof.kernels import oracle
    from ssdprof.kernels.inputs import Inputs
    from ssdprof.kernels.oracle import Block
    from ssdprof.operators.definition import Definition
    from ssdprof.operators.tuning import Tuning
else:
    oracle = lazy("ssdprof.kernels.oracle")

I = TypeVar("I", bound="Inputs", default=Any)
Output: TypeAlias = "tuple[Tensor, Tensor]"  # out, final_states


# --- stages


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages of the algorithm, as its kernels name them in their STAGES.

    order: stages and their parts ("chunk_scan.previous") in the order of tables.
    words: a part's name in plain words.
    kernels: function name of each bundled kernel -> the implementation that launches it.
    sources: entries of `stages/` by the SHA-256 of a file of another library's kernels:
        `implementation` that launches them, and, of each function, `stages`: its stage, or "caller"
        for a helper that is inlined into others' stages; `starts`: line -> the stage that begins
        there, inside the function.
    """

    order: tuple[str, ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)
    kernels: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, operator: str) -> Stages:
        """The stages of an operator, from its table."""
        file = Path(__file__).parent / "stages" / f"{operator}.toml"
        table = tomllib.loads(file.read_text("utf-8"))
        kernels: dict[str, str] = {}
        for implementation, launched in table["launches"].items():
            kernels |= dict.fromkeys(launched, implementation)
        for entry in table["source"]:
            entry["starts"] = {int(line): stage for line, stage in entry.get("starts", {}).items()}
        return cls(
            order=tuple(table["order"]),
            words=_WORDS | table["words"],
            kernels=kernels,
            sources={entry["sha256"]: entry for entry in table["source"]},
        )

    @classmethod
    def together(cls, several: Sequence[Stages]) -> Stages:
        """The stages of several operators, concatenated."""
        merged = cls()
        for stages in several:
            merged = cls(
                order=(*merged.order, *stages.order),
                words={**merged.words, **stages.words},
                kernels={**merged.kernels, **stages.kernels},
                sources={**merged.sources, **stages.sources},
            )
        return merged


AHEAD = "ahead"  # the stage of warps that wait because they are ahead, which costs no time
LEAST_CHUNK = 16  # the edge of a tensor core's tile
_WORDS = {
    "setup.load": "loading the initial state",
    "setup.store": "storing the final state",
    "waiting.chunk": "for a chunk and its gates",
    AHEAD: "roles that are ahead",
}


# --- binding


BoundCall = tuple[Any, bool, str]  # inputs; whether the call wants final states; a remark


@dataclass(frozen=True, kw_only=True)
class CallBinding(Generic[I]):
    """How models call the operator, and how a captured call is stored.

    function: the global of a modeling file that a mixer calls for a prompt.
    step: the global that it calls instead for one token with a cached state; the model still
        computes it.  Empty: there is none.
    bind: (mixer, *args, **kwargs) of a call of `function` -> the inputs, without a copy, whether it
        wants final states, and a sentence for the report if the inputs differ from the call or the
        config.  Raises ValueError or TypeError for a call that the inputs cannot express.
    bind_step: the same of a call of `step`; None: steps cannot be captured.
    recorded: function of FlashInfer -> (the arguments by name, the returned tensors) of a recorded
        call -> the inputs, packed, and the output; None without final states.  Raises ValueError or
        TypeError for what is no such call.
    refused: arguments of production kernels that change the result and that the inputs cannot
    express.
    always_a_pair: whether the function returns (out, None), and not out alone, where no final state
    is wanted.
    views: tensors (b, l, heads, width) that a production model writes side by side, in this order.
    per_position: the other tensors (b, l, ...).  What is in neither belongs to the whole call.
    always_fp32: those that a model computes in fp32 whatever its own dtype.
    gate_bytes: of what is in `per_position`, for one head and position, by the bytes of a number of
        the model's dtype and the sizes of the layer.
    replacement: what computes the operator in the model while its inputs are taken.
    """

    function: str
    step: str = ""
    bind: Callable[..., BoundCall]
    bind_step: Callable[..., BoundCall] | None = None
    recorded: Mapping[
        str, Callable[[dict[str, Any], Sequence[Tensor]], tuple[I, Output | None]]
    ] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    always_a_pair: bool = False
    views: tuple[str, ...]
    per_position: tuple[str, ...]
    always_fp32: tuple[str, ...] = ()
    gate_bytes: Callable[[int, Mapping[str, int]], int]
    replacement: Callable[[I], Output]

    def positional(self, inputs: I) -> dict[str, Tensor]:
        """The tensors (b, l, ...)."""
        tensors = inputs.tensors
        return {
            name: tensors[name] for name in (*self.views, *self.per_position) if name in tensors
        }

    def activations(self, inputs: I) -> dict[str, Tensor]:
        """The tensors that the model computed in its own dtype, by name."""
        tensors = self.positional(inputs)
        dtype = tensors[self.views[0]].dtype
        return {
            name: tensor
            for name, tensor in tensors.items()
            if name not in self.always_fp32 and tensor.dtype == dtype
        }


# --- oracle


@dataclass(frozen=True, kw_only=True)
class OracleSpec(Generic[I]):
    """The oracle, the roundings that a precision allows (docs/measuring.md), and the least work of
    a call.

    blocks: (inputs, length) -> the fp64 oracle in blocks of at most `length` positions, a multiple
        of `chunk_size`; in order, sequence after sequence, at least one for each.
    gate: of a span, with chunks of `chunk_size` or another given size.  chunks: out of a span in
        one precision: see `Rounded`.
    bytes_per_position: of a block's working memory, oracle and rounded form together.
    chunk_size: of the rounded form: spans begin at multiples of it.
    words: of sizes.
    flops: the least number of multiplications and additions, by sizes and positions.
    """

    blocks: Callable[[I, int], Iterable[Block]]
    gate: Callable[..., rounding.Gate]
    chunks: Callable[[I, rounding.Rounded, rounding.Span, rounding.Gate], Tensor]
    bytes_per_position: Callable[[I], int]
    chunk_size: Callable[[I], int]
    words: Callable[[dict[str, int]], str]
    flops: Callable[[Mapping[str, int], int], int]

    def forms(self, inputs: Inputs) -> Output:
        """Empty out and final_states on the meta device, which have the shapes and dtypes of an
        output.  Final states are fp32.
        """
        values = torch.empty(inputs.values.shape, dtype=inputs.values.dtype, device="meta")
        return values, torch.empty(inputs.final_shape, dtype=torch.float32, device="meta")

    def fitting_chunk(self, inputs: I, length: int) -> int:
        """The chunk of a span: `chunk_size`, or less for few positions, which gives the same."""
        return min(self.chunk_size(inputs), max(LEAST_CHUNK, 1 << (length - 1).bit_length()))

    def shorter_chunks(self, inputs: I) -> tuple[int, ...]:
        """A half and a quarter of `chunk_size`, the sizes that kernels take besides; only those
        that divide a sequence.
        """
        size = self.chunk_size(inputs)
        longest = self.fitting_chunk(inputs, max(span.length for span in oracle.spans_of(inputs)))
        return tuple(part for part in (size // 2, size // 4) if LEAST_CHUNK <= part < longest)

    def rounded(self, inputs: Inputs, precision: kernels.Precision) -> rounding.Rounded:
        """The same operator with every rounding that the precision allows."""
        return rounding.Rounded(inputs, precision, self.chunks)

    def dims(self, inputs: I) -> Dims:
        """The sizes of a call."""
        first = next(iter(inputs.tensors.values()))
        sizes = inputs.sizes
        return Dims(
            operator=inputs.operator,
            batch=first.shape[0],
            seqlen=first.shape[1],
            chunk_size=getattr(inputs, "chunk_size", None),
            dtype=dtype_name(first.dtype),
            sizes=sizes,
            words=self.words(sizes),
        )

    def cost(self, inputs: I) -> tuple[Dims, dict[str, int]]:
        """The sizes of a call, and its least work: every input read once, out and the fp32 final
        states written once, and `flops`.
        """
        tensors = inputs.tensors
        if "state_indices" in tensors:  # of a pool, a slot for each sequence is read
            tensors[inputs.LINEAR[1]] = tensors[inputs.LINEAR[1]][: inputs.sequences]
        read = sum(tensor.nbytes for tensor in tensors.values())
        moved = read + sum(form.nbytes for form in self.forms(inputs))
        dims = self.dims(inputs)
        return dims, {
            "bytes_moved": moved,
            "flops": self.flops(dims.sizes, dims.batch * dims.seqlen),
        }


# --- the record


@dataclass(frozen=True, kw_only=True)
class Operator(Generic[I]):
    """A part that is None is not implemented.

    name: in stored records and on the command line.  title: for people.  layers: "Mamba-2", "a
    Mamba-2 layer".
    load_inputs: the type that implementations take.
    mixer_sizes: sizes of a checkpoint's layer, name -> attribute of its mixers in transformers.
    words: of these sizes.
    load_definitions: the calls that flashinfer-bench defines.
    refusal: (sizes by the names of `Dims`, ranks) -> why tensor-parallel ranks cannot divide the
        heads, in a sentence; empty if they can.
    divided: the tensors of which each rank has a part -> the dimension of their heads or groups.
    baseline: the implementation that others are compared with.
    served: which libraries vLLM and SGLang choose on Hopper, by default.
    libraries: other libraries by name.
    """

    name: str
    title: str
    layers: str
    load_inputs: Callable[[], type[I]]
    binding: CallBinding[I]
    oracle: OracleSpec[I]
    generated: InputGenerator[I]
    mixer_sizes: Mapping[str, str] = field(default_factory=dict)
    words: str = ""
    stages: Stages = field(default_factory=Stages)
    load_tuning: Callable[[], Tuning] | None = None
    load_definitions: Callable[[], Sequence[Definition[I]]] = tuple
    refusal: Callable[[Mapping[str, int], int], str] | None = None
    divided: Mapping[str, int] = field(default_factory=dict)
    baseline: str = "unfused"
    served: str = ""
    libraries: Mapping[str, Library] = field(default_factory=dict)

    @property
    def inputs(self) -> type[I]:
        return self.load_inputs()

    @property
    def tunable(self) -> Tuning:
        """The interface of `tune`.  BadInputError if there is none."""
        if self.load_tuning is None:
            raise BadInputError(
                f"ssdprof does not tune kernels of {self.layers} layers ({self.name}) yet."
            )
        return self.load_tuning()

    def first_rank(self, inputs: I, ranks: int) -> I:
        """What the first of several tensor-parallel ranks computes, as views: the first heads with
        their groups.

        A single group is on every rank.
        """

        def first(tensor: Tensor | None, dim: int) -> Tensor | None:
            return (
                None
                if tensor is None
                else tensor.narrow(dim, 0, max(1, tensor.shape[dim] // ranks))
            )

        return replace(
            inputs,
            **{name: first(getattr(inputs, name), dim) for name, dim in self.divided.items()},
        )

    def repeated(self, inputs: I, span: rounding.Span, count: int) -> tuple[I, rounding.Span]:
        """The inputs of a span with each head `count` times, all heads and then all again; and
        where the span is in them.  The given ones for 1.
        """
        if count == 1:
            return inputs, span
        tensors = inputs.tensors
        for name, tensor in self.binding.positional(inputs).items():
            tensors[name] = tensor[span.batch : span.batch + 1, span.start : span.stop]
        if inputs.initial is not None:
            tensors[inputs.LINEAR[1]] = inputs.initial[span.sequence][None]
        wide = {
            name: torch.cat([tensors[name]] * count, dim)
            for name, dim in self.divided.items()
            if name in tensors
        }
        if inputs.initial is not None:
            states = wide[inputs.LINEAR[1]]
            wide[inputs.LINEAR[1]] = states.expand(inputs.sequences, *states.shape[1:])
        whole = replace(span, batch=0, start=0, stop=span.length)
        return type(inputs).unchecked(**vars(inputs) | wide | {"state_indices": None}), whole


def from_call(kind: type[I], **given: Any) -> I:
    """The inputs from a call's arguments.  Those of a mixer's forward that are no fields have no
    effect on the operator, and are dropped.
    """
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in given.items() if name in names})


# --- states that are kept on the way


def pieces(inputs: I, given: Mapping[str, Tensor]) -> list[I]:
    """The inputs of a call for each state that `inputs.state_every` asks for, all with the initial
    states of the whole.  A pack wants a state after each token: call t has token t of every
    sequence that is so long.  Reads the lengths on the host.

    given: `CallBinding.positional`.
    """
    every, bounds = inputs.state_every, inputs.cu_seqlens

    def piece(cut: slice | Tensor, **changes: Tensor) -> I:
        tokens = {name: tensor[:, cut] for name, tensor in given.items()}
        return replace(inputs, state_every=0, **tokens, **changes)

    if bounds is None:
        return [piece(slice(start, start + every)) for start in range(0, inputs.length, every)]
    several = []
    for step in range(int(bounds.diff().max())):
        is_long = bounds.diff() > step
        cu_seqlens = torch.nn.functional.pad(is_long.cumsum(0), (1, 0)).to(bounds.dtype)
        several.append(piece((bounds[:-1] + step)[is_long], cu_seqlens=cu_seqlens))
    return several


def in_pieces(
    implementation: registry.Implementation,
    several: Sequence[Inputs],
    precision: kernels.Precision,
    *,
    is_cut: bool = True,
) -> Output:
    """The calls, each with the states that the one before left, and their outputs joined; the first
    with copies of the initial states unless it reads a pool.  Waits for nothing on the device.

    is_cut: by `pieces`; else there is one call.
    """
    outputs: list[Output] = []
    for inputs in several:
        if outputs or not (inputs.state_indices is None or implementation.pools):
            inputs = inputs.after(outputs[-1][1] if outputs else inputs.initial)
        outputs.append(implementation.run(inputs, precision))
    bounds = [inputs.cu_seqlens for inputs in several if inputs.cu_seqlens is not None]
    if len(outputs) == 1 and not (bounds and is_cut):
        return outputs[0]
    outs, finals = zip(*outputs, strict=True)
    out, states = torch.cat(outs, 1), torch.stack(finals, 1).flatten(0, 1)
    if bounds:  # from step by step to sequence by sequence
        exists = torch.stack(bounds).diff()  # (steps, sequences)
        rows = exists.T.flatten().argsort(descending=True, stable=True)[: out.shape[1]]
        tokens = exists.flatten().cumsum(0).view_as(exists).T.flatten()[rows] - 1
        out, states = out[:, tokens], states[rows]
    return out, states


def drafted(inputs: I, binding: CallBinding[I], count: int) -> I:
    """The last `count` positions of every sequence of a batch, after the states of those before,
    with the state after each.
    """
    before, last = (
        replace(
            inputs, **{name: tensor[:, cut] for name, tensor in binding.positional(inputs).items()}
        )
        for cut in (slice(None, -count), slice(-count, None))
    )
    return replace(last.after(binding.replacement(before)[1]), state_every=1)


# --- our kernels in a model


def computed(inputs: Inputs, chunked: Callable[..., Output]) -> Output:
    """The output of the first of our kernels that supports the inputs, with exact intermediates and
    fp32 states; without a GPU, of the chunked form in fp32.

    Raises BadInputError with the reason of each refusal.
    """
    if inputs.device.type != "cuda":
        out, final_states = chunked(inputs, dtype=torch.float32)
        return out.to(inputs.values.dtype), final_states
    refusals = []
    with torch.cuda.device(inputs.device):
        for name in [
            word for word in ("fused", "unfused") if word in kernels.names(inputs.operator)
        ]:
            try:
                out, final_states = kernels.get(inputs.operator, name).run(
                    inputs, precision.Precision()
                )
            except registry.UnsupportedError as error:
                refusals.append(f"{name}: {error}")
            else:
                return out, final_states
    title = inputs.operator.upper()
    raise BadInputError(
        f"No {title} implementation runs this model's layers ({'; '.join(refusals)})."
    )
