"""A whole operator in one file: a gated running sum.

    s_t = exp(a_t) s_{t-1} + x_t,   out_t = s_t,   with a_t <= 0

x, out: (b, l, h, p)   a: (b, l, h)   s: (b, h, p)

docs/adding-an-operator.md walks through this file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ssdprof.core.subject import Dims
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, register
from ssdprof.operators import tensors
from ssdprof.operators.dtypes import dtype_name, dtype_named
from ssdprof.operators.generate import Cell, InputGenerator
from ssdprof.operators.operator import BoundCall, CallBinding, Cost, Form, Operator, OracleSpec, Outline, Output, Span

CHUNK = 16  # positions after which the state is stored


@dataclass(frozen=True, kw_only=True)
class ToyInputs:
    """x: (b, l, h, p).  a: (b, l, h), the natural logarithm of the gate, <= 0."""

    x: torch.Tensor
    a: torch.Tensor


# --- implementations


def running_sum(inputs: ToyInputs, precision: Precision) -> Output:
    """Position after position, in fp32; the state is stored in the precision's dtype after every chunk."""
    state = torch.zeros_like(inputs.x[:, 0], dtype=torch.float32)
    out = torch.empty_like(inputs.x)
    for t in range(inputs.x.shape[1]):
        state = state * inputs.a[:, t, :, None].float().exp() + inputs.x[:, t].float()
        out[:, t] = state
        if (t + 1) % CHUNK == 0:
            state = state.to(precision.state_dtype).float()
    return out, state


def register_implementations() -> None:
    for name in ("unfused", "fused"):
        plan = Plan(variant="torch", launches=0, reason="a loop")
        register(Implementation(operator="toy", name=name, run=running_sum, plan=lambda *_, plan=plan: plan))


# --- the oracle


@dataclass(frozen=True, kw_only=True)
class Block:
    sequence: int
    batch: int
    start: int
    stop: int
    last: bool
    out: torch.Tensor
    state: torch.Tensor


def blocks(inputs: ToyInputs, length: int) -> Iterator[Block]:
    """The oracle: the recurrence in fp64."""
    batch, seqlen = inputs.x.shape[:2]
    for row in range(batch):
        state = torch.zeros_like(inputs.x[row, 0], dtype=torch.float64)
        for start in range(0, seqlen, length):
            stop = min(start + length, seqlen)
            out = []
            for t in range(start, stop):
                state = state * inputs.a[row, t, :, None].double().exp() + inputs.x[row, t].double()
                out.append(state)
            yield Block(
                sequence=row, batch=row, start=start, stop=stop, last=stop == seqlen, out=torch.stack(out), state=state
            )


@dataclass(frozen=True)
class Gate:
    exponents: torch.Tensor  # (l, h)

    def largest_exponent(self) -> torch.Tensor:
        return self.exponents.abs().amax(0)


class Rounded:
    """The recurrence in fp32, with the state rounded after every chunk and the output to the inputs' dtype."""

    def __init__(self, inputs: ToyInputs, precision: Precision) -> None:
        self._inputs, self._precision = inputs, precision
        self._sequence: int | None = None
        self._state = torch.empty(0)

    def advance(self, span: Span, _gate: Gate) -> Output:
        if span.sequence != self._sequence:
            self._sequence, self._state = span.sequence, torch.zeros_like(self._inputs.x[0, 0], dtype=torch.float32)
        piece = ToyInputs(
            x=self._inputs.x[span.batch, span.start : span.stop][None],
            a=self._inputs.a[span.batch, span.start : span.stop][None],
        )
        out = []
        for t in range(span.stop - span.start):
            self._state = self._state * piece.a[0, t, :, None].float().exp() + piece.x[0, t].float()
            out.append(self._state.to(self._inputs.x.dtype))
            if (t + 1) % CHUNK == 0:
                self._state = self._state.to(self._precision.state_dtype).float()
        return torch.stack(out), self._state


def forms(inputs: ToyInputs) -> tuple[Form, Form]:
    batch, _, heads, width = inputs.x.shape
    return (
        Form(shape=tuple(inputs.x.shape), dtype=inputs.x.dtype),
        Form(shape=(batch, heads, width), dtype=torch.float32),
    )


ORACLE = OracleSpec(
    forms=forms,
    blocks=blocks,
    gate=lambda inputs, span: Gate(inputs.a[span.batch, span.start : span.stop].float()),
    rounded=Rounded,
    bytes_per_position=lambda inputs: 64 * inputs.x.shape[2] * inputs.x.shape[3],
    chunk_size=lambda _: CHUNK,
)


# --- a mixer would call `toy_scan(x, a)`


def bind(_mixer: object, x: torch.Tensor, a: torch.Tensor, **_dropped: object) -> BoundCall:
    return BoundCall(ToyInputs(x=x, a=a), wants_final_state=True)


BINDING = CallBinding(
    function="toy_scan",
    bind=bind,
    views=("x",),
    per_position=("a",),
    gate_bytes=lambda item: item,
    replacement=lambda inputs: running_sum(inputs, Precision()),
)


# --- cost


def dims(inputs: ToyInputs) -> Dims:
    batch, seqlen, heads, width = inputs.x.shape
    return Dims(
        operator="toy",
        batch=batch,
        seqlen=seqlen,
        chunk_size=None,
        dtype=dtype_name(inputs.x.dtype),
        sizes={"heads": heads, "width": width},
        words=f"{heads} heads x {width}",
    )


COST = Cost(
    dims=dims,
    bytes_moved=lambda inputs: tensors.nbytes(inputs) + sum(form.nbytes for form in forms(inputs)),
    flops=lambda dims: 2 * dims.batch * dims.seqlen * dims.sizes["heads"] * dims.sizes["width"],
)


# --- bench


@dataclass(frozen=True, kw_only=True)
class ToyShape:
    name: str
    heads: int
    width: int

    def __str__(self) -> str:
        return f"{self.heads}x{self.width}"


def parse(text: str) -> ToyShape | None:
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    return match and ToyShape(name=text, heads=int(match[1]), width=int(match[2]))


def draw(cell: Cell, device: torch.device) -> ToyInputs:
    assert isinstance(cell.shape, ToyShape)
    sizes = (cell.tokens.sequences, cell.tokens.seqlen, cell.shape.heads)
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(*sizes, cell.shape.width, device=device, generator=generator)
    return ToyInputs(x=x.to(dtype_named(cell.dtype)), a=-torch.rand(*sizes, device=device, generator=generator))


GENERATOR = InputGenerator(
    shapes={"toy-1b": ToyShape(name="toy-1b", heads=2, width=8)},
    parse=parse,
    grammar="heads x width, such as 2x8",
    draw=draw,
)


OPERATOR = Operator(
    outline=Outline(name="toy", title="A gated running sum", layers="toy"),
    load_inputs=lambda: ToyInputs,
    binding=BINDING,
    oracle=ORACLE,
    cost=COST,
    generator=GENERATOR,
)
