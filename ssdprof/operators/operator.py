"""The record of an operator: what the jobs need to know about it.

A job uses parts of the record and never compares an operator's name.  `Operator` has the name, the
title, the sizes, the share of one tensor-parallel rank, and these parts:

    stages        the stages of the algorithm, as kernels name them
    binding       how models call the operator, and how a captured call is stored
    oracle        the oracle in blocks, the roundings that a precision allows, and the sizes and the
                  cost of a call
    generated     shapes of models, and random inputs                `generate.py`
    tuning        what `ssdprof tune` may vary                       `tuning.py`
    definitions   the calls that flashinfer-bench defines            `definition.py`
    libraries     how other libraries are loaded                     `generate.py`

The output of every operator is (out, final_states).  out (b, l, h, ...) has the inputs' dtype.
final_states (sequences, h, ...) are in fp32; if `Inputs.state_every` asks for states on the way,
they have a row for each of these.  Reports use these two names for all operators.
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
OutputPair: TypeAlias = "tuple[Tensor, Tensor]"  # out, final_states


# --- stages


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages of the algorithm, as its kernels name them in their STAGES.

    order: stages and their parts ("chunk_scan.previous") in the order of tables.
    words: name of a stage or part -> the same in plain words, where the name does not say it.
    kernels: function name of a bundled kernel -> the implementation that launches it.  If several
        launch it, one of them: `fused` also launches that of `recurrent`, which stands for
        `recurrent`.
    sources: SHA-256 of a file with another library's kernels -> its entry in `stages/`.  An entry
        has `stages`: function -> its stage, or "caller" for a helper that is inlined into several
        stages; `starts`: line -> the stage that begins there, inside a function; and, unless all
        functions are helpers, `implementation`, which launches the kernels.
    """

    order: tuple[str, ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)
    kernels: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, operator: str) -> Stages:
        """Read the stages of the operator of this name from its table in `stages/`."""
        file = Path(__file__).parent / "stages" / f"{operator}.toml"
        table = tomllib.loads(file.read_text("utf-8"))
        implementation_of: dict[str, str] = {}  # function name of a kernel -> what launches it
        for implementation, launched in table["launches"].items():
            implementation_of |= dict.fromkeys(launched, implementation)
        for entry in table["source"]:
            entry["starts"] = {int(line): stage for line, stage in entry.get("starts", {}).items()}
        return cls(
            order=tuple(table["order"]),
            words=_SHARED_STAGE_WORDS | table["words"],
            kernels=implementation_of,
            sources={entry["sha256"]: entry for entry in table["source"]},
        )

    @classmethod
    def together(cls, several: Sequence[Stages]) -> Stages:
        """The stages of several operators, concatenated.  If two have the same part, kernel or file
        in a table, the later entry counts.
        """
        merged = cls()
        for stages in several:
            merged = cls(
                order=(*merged.order, *stages.order),
                words={**merged.words, **stages.words},
                kernels={**merged.kernels, **stages.kernels},
                sources={**merged.sources, **stages.sources},
            )
        return merged


AHEAD = "ahead"  # stage of warps that wait for slower ones; this wait costs no time
LEAST_CHUNK = 16  # positions of the shortest chunk: the edge of a tensor core's tile
_SHARED_STAGE_WORDS = {
    "setup.load": "loading the initial state",
    "setup.store": "storing the final state",
    "waiting.chunk": "for a chunk and its gates",
    AHEAD: "roles that are ahead",
}


# --- binding


# the inputs; whether the call wants final states; a remark for the report, empty if there is none
BoundCall = tuple[Any, bool, str]


@dataclass(frozen=True, kw_only=True)
class CallBinding(Generic[I]):
    """How models call the operator, and how a captured call is stored.

    function: name of the global in a modeling file that a mixer calls for a prompt.
    step: name of the global that a mixer calls for one token with a cached state.  A capture takes
        the inputs of such a call, and lets the model compute it.  Empty: the model has none.
    bind: (mixer, *args, **kwargs) of a call of `function` -> the inputs, without a copy; whether
        the call wants final states; a sentence for the report if the inputs differ from the call or
        from the config.  Raises ValueError or TypeError for a call that the inputs cannot express.
    bind_step: as `bind`, for a call of `step`; None: steps cannot be captured.
    recorded: name of a FlashInfer function -> a function that converts a recorded call of it:
        (arguments by name, returned tensors) -> the packed inputs, and the output, which is None if
        the call returned no final states.  Raises ValueError or TypeError for arguments that the
        inputs cannot express, and KeyError if one is missing.
    refused: keyword arguments of production kernels that change the result and that the inputs
        cannot express.  A call that passes one, other than None and False, is refused before
        `bind`.
    always_a_pair: whether the function returns (out, None), and not out alone, if the caller wants
        no final states.
    views: tensors (b, l, heads, width) that a production model writes side by side, in this order.
    per_position: the other tensors (b, l, ...).  All remaining tensors belong to the whole call.
    always_fp32: tensors that a model computes in fp32 whatever its own dtype.
    gate_bytes: (bytes of a number in the model's dtype, sizes of the layer) -> bytes of the
        `per_position` tensors that models pass, for one head and position.
    replacement: (inputs) -> their output.  It computes the operator in the model during a capture.
    """

    function: str
    step: str = ""
    bind: Callable[..., BoundCall]
    bind_step: Callable[..., BoundCall] | None = None
    recorded: Mapping[
        str, Callable[[dict[str, Any], Sequence[Tensor]], tuple[I, OutputPair | None]]
    ] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    always_a_pair: bool = False
    views: tuple[str, ...]
    per_position: tuple[str, ...]
    always_fp32: tuple[str, ...] = ()
    gate_bytes: Callable[[int, Mapping[str, int]], int]
    replacement: Callable[[I], OutputPair]

    def positional(self, inputs: I) -> dict[str, Tensor]:
        """The tensors (b, l, ...) by name, `views` first, without those that are None."""
        tensors = inputs.tensors
        return {
            name: tensors[name] for name in (*self.views, *self.per_position) if name in tensors
        }

    def activations(self, inputs: I) -> dict[str, Tensor]:
        """The tensors (b, l, ...) that the model computed in its own dtype, that of the first of
        `views`, by name.
        """
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

    blocks: (inputs, block=length) -> the fp64 oracle in blocks of at most `length` positions, which
        is a multiple of `chunk_size`.  Blocks come in order, sequence after sequence, and every
        sequence has at least one.
    gate: (inputs, span, chunk) -> the gate of the span, in chunks of `chunk` positions; without the
        last argument in chunks of `chunk_size`.
    chunks: (inputs, rounded, span, gate) -> out of the span in one precision: see `Rounded`.
    bytes_per_position: (inputs) -> bytes of working memory for each position of a block, of the
        oracle and the rounded form together.
    chunk_size: (inputs) -> positions of a chunk of the rounded form.  In its sequence, a span
        begins at a multiple of it.
    words: (sizes) -> the same as text for people.
    flops: (sizes, positions) -> the least number of multiplications and additions of a chunked
        kernel; a recurrent one does a little less.
    """

    blocks: Callable[..., Iterable[Block]]
    gate: Callable[..., rounding.Gate]
    chunks: Callable[[I, rounding.Rounded, rounding.Span, rounding.Gate], Tensor]
    bytes_per_position: Callable[[I], int]
    chunk_size: Callable[[I], int]
    words: Callable[[dict[str, int]], str]
    flops: Callable[[Mapping[str, int], int], int]

    def forms(self, inputs: Inputs) -> OutputPair:
        """Empty out and final_states on the meta device, in the shapes and dtypes of an output."""
        out = torch.empty(inputs.values.shape, dtype=inputs.values.dtype, device="meta")
        return out, torch.empty(inputs.final_shape, dtype=torch.float32, device="meta")

    def fitting_chunk(self, inputs: I, length: int) -> int:
        """The chunk for a span of `length` positions: `chunk_size`, or less for a shorter span: the
        least power of two from `LEAST_CHUNK` on that holds it.  A shorter span is one chunk of
        either size, with the same result.
        """
        return min(self.chunk_size(inputs), max(LEAST_CHUNK, 1 << (length - 1).bit_length()))

    def shorter_chunks(self, inputs: I) -> tuple[int, ...]:
        """Chunk sizes besides `chunk_size` that kernels also use: a half and a quarter of it, those
        of them that are at least `LEAST_CHUNK` and less than the longest sequence, which they cut
        into several chunks.
        """
        size = self.chunk_size(inputs)
        longest = max(span.length for span in oracle.spans_of(inputs))
        return tuple(chunk for chunk in (size // 2, size // 4) if LEAST_CHUNK <= chunk < longest)

    def rounded(self, inputs: Inputs, precision: kernels.Precision) -> rounding.Rounded:
        """The operator with every rounding that the precision allows."""
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
        """The sizes of a call, and its least work: `bytes_moved` and `flops`.  The bytes are those
        of every input, read once, and of out and the fp32 final states, written once.  Each
        sequence reads one slot of a pool.
        """
        tensors = inputs.tensors
        # which slots are read does not matter for the bytes
        if "state_indices" in tensors:
            tensors[inputs.STATES] = tensors[inputs.STATES][: inputs.sequences]
        bytes_read = sum(tensor.nbytes for tensor in tensors.values())
        bytes_written = sum(form.nbytes for form in self.forms(inputs))
        dims = self.dims(inputs)
        return dims, {
            "bytes_moved": bytes_read + bytes_written,
            "flops": self.flops(dims.sizes, dims.batch * dims.seqlen),
        }


# --- the record


@dataclass(frozen=True, kw_only=True)
class Operator(Generic[I]):
    """One operator.  A part that is None is not implemented.  The top of this file explains the
    parts that are not listed here.

    name: the operator's name in stored records and on the command line.
    title: the operator's name for people.
    layers: what layers with the operator are called: "Mamba-2" for "a Mamba-2 layer".
    load_inputs: () -> the type that implementations take.
    mixer_sizes: name of a size of a checkpoint's layer -> the attribute of transformers' mixers
        that has it.
    words: format string for these sizes; its names are those of `mixer_sizes`.
    load_tuning: () -> what `ssdprof tune` may vary.
    load_definitions: () -> the calls that flashinfer-bench defines.
    refusal: (sizes by the names of `Dims`, ranks) -> a clause that says why so many tensor-parallel
        ranks cannot divide the heads; empty if they can.
    divided: tensor of which each rank has a part -> the dimension of its heads or groups.
    baseline: the implementation that others are compared with.
    served: text that names the libraries that vLLM and SGLang choose on Hopper by default.
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
        """The type that implementations take."""
        return self.load_inputs()

    @property
    def tunable(self) -> Tuning:
        """What `ssdprof tune` may vary.  Raises BadInputError if it does not tune the operator."""
        if self.load_tuning is None:
            raise BadInputError(
                f"ssdprof does not tune kernels of {self.layers} layers ({self.name}) yet."
            )
        return self.load_tuning()

    def first_rank(self, inputs: I, ranks: int) -> I:
        """The inputs of the first of `ranks` tensor-parallel ranks, as views: the first heads with
        their groups.  A rank has at least one group.  `refusal` must have accepted the ranks.
        """
        tensors = inputs.tensors
        parts = {
            name: tensors[name].narrow(dim, 0, max(1, tensors[name].shape[dim] // ranks))
            for name, dim in self.divided.items()
            if name in tensors
        }
        return replace(inputs, **parts)

    def repeated(self, inputs: I, span: rounding.Span, count: int) -> tuple[I, rounding.Span]:
        """Inputs of the span alone in which all heads are repeated `count` times, side by side, and
        the span's place in them: the whole of row 0.  For a count of 1 both are returned as they
        are.  For other counts, `divided` must name every tensor with heads, and the inputs are not
        checked: `cu_seqlens` and `state_every` are still those of the whole call.
        """
        if count == 1:
            return inputs, span
        tensors = inputs.tensors
        for name, tensor in self.binding.positional(inputs).items():
            tensors[name] = tensor[span.batch : span.batch + 1, span.start : span.stop]
        if inputs.initial is not None:
            tensors[inputs.STATES] = inputs.initial[span.sequence][None]
        wide = {
            name: torch.cat([tensors[name]] * count, dim)
            for name, dim in self.divided.items()
            if name in tensors
        }
        if inputs.initial is not None:  # a row for each sequence: the span keeps its number
            states = wide[inputs.STATES]
            wide[inputs.STATES] = states.expand(inputs.sequences, *states.shape[1:])
        whole = replace(span, batch=0, start=0, stop=span.length)
        return type(inputs).unchecked(**vars(inputs) | wide | {"state_indices": None}), whole


def from_call(kind: type[I], **arguments: Any) -> I:
    """Inputs of the type `kind` from the arguments of a mixer's call.  Arguments that are no fields
    of `kind` are dropped: those in `CallBinding.refused` were refused before, and the others have
    no effect on the operator.
    """
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in arguments.items() if name in names})


# --- states that are kept on the way


def pieces(inputs: I, positional: Mapping[str, Tensor]) -> list[I]:
    """Cut inputs that ask for states on the way (`Inputs.state_every`) into calls, each of which
    ends at the next positions after which they ask for states, or at the end.

    Every call has the initial states of the whole; `in_pieces` replaces them.  Packed sequences
    want a state after each token: call t has token t of every sequence that is longer than t, and
    nothing of the others.  For these, the function reads the lengths on the host.

    positional: the tensors (b, l, ...), from `CallBinding.positional`.
    """
    every, bounds = inputs.state_every, inputs.cu_seqlens

    def piece(cut: slice | Tensor, **changes: Tensor) -> I:
        tokens = {name: tensor[:, cut] for name, tensor in positional.items()}
        return replace(inputs, state_every=0, **tokens, **changes)

    if bounds is None:
        return [piece(slice(start, start + every)) for start in range(0, inputs.length, every)]
    calls = []
    for step in range(int(bounds.diff().max())):
        is_long = bounds.diff() > step
        cu_seqlens = torch.nn.functional.pad(is_long.cumsum(0), (1, 0)).to(bounds.dtype)
        calls.append(piece((bounds[:-1] + step)[is_long], cu_seqlens=cu_seqlens))
    return calls


def in_pieces(
    implementation: registry.Implementation,
    calls: Sequence[Inputs],
    precision: kernels.Precision,
    *,
    is_cut: bool = True,
) -> OutputPair:
    """Run the calls, at least one, one after the other, each from the states that the previous one
    left, and join their outputs.  Waits for nothing on the device.

    If the first call begins with slots of a pool, and the implementation reads no pool, it gets
    copies of these states.

    is_cut: whether `pieces` made the calls; otherwise there is only one, and its output is returned
        as it is.
    """
    outputs: list[OutputPair] = []
    for inputs in calls:
        if outputs:
            inputs = inputs.after(outputs[-1][1])
        elif inputs.state_indices is not None and not implementation.pools:
            inputs = inputs.after(inputs.initial)
        outputs.append(implementation.run(inputs, precision))
    bounds = [inputs.cu_seqlens for inputs in calls if inputs.cu_seqlens is not None]
    if len(outputs) == 1 and not (bounds and is_cut):
        return outputs[0]
    outs, finals = zip(*outputs, strict=True)
    out, states = torch.cat(outs, 1), torch.stack(finals, 1).flatten(0, 1)
    # Each call of packed sequences has at most one token of a sequence.  `out` has these tokens
    # step by step, and must have them sequence by sequence.  `states` has a row for every step of
    # every sequence, also for steps without a token.
    if bounds:
        exists = torch.stack(bounds).diff()  # (steps, sequences): 1 where the sequence has a token
        by_sequence = exists.T.flatten()
        # the sort is stable: indices of existing tokens come first, in order
        rows = by_sequence.argsort(descending=True, stable=True)[: out.shape[1]]
        # the place of each existing token in `out`, counted from 1
        numbers = exists.flatten().cumsum(0).view_as(exists)
        tokens = numbers.T.flatten()[rows] - 1
        out, states = out[:, tokens], states[rows]
    return out, states


def drafted(inputs: I, binding: CallBinding[I], count: int) -> I:
    """Inputs of a verification of drafted tokens: the last `count` positions of every sequence of a
    batch, which ask for a state after each position.  Their initial states are those that
    `binding.replacement` computes from the positions before them.

    inputs: not packed, longer than `count`, and without `state_every`.
    """
    positional = binding.positional(inputs)

    def part(cut: slice) -> I:
        return replace(inputs, **{name: tensor[:, cut] for name, tensor in positional.items()})

    _, states = binding.replacement(part(slice(None, -count)))
    return replace(part(slice(-count, None)).after(states), state_every=1)


# --- our kernels in a model


def computed(chunked: Callable[..., OutputPair], inputs: Inputs) -> OutputPair:
    """The output of `fused`, or of `unfused` if `fused` refuses the inputs or the operator has no
    `fused`, with exact intermediates and fp32 states.  For inputs that are not on an NVIDIA GPU,
    the output of the operator's `chunked` form in fp32, with out in the dtype of the values.

    Raises BadInputError with the reason of each refusal if neither of them runs the inputs.
    """
    if inputs.device.type != "cuda":
        out, final_states = chunked(inputs, dtype=torch.float32)
        return out.to(inputs.values.dtype), final_states
    refusals = []
    with torch.cuda.device(inputs.device):
        for name in ("fused", "unfused"):
            if name not in kernels.names(inputs.operator):
                continue
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
