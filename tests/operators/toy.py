"""A whole operator in one file: a gated running sum.

    s_t = exp(a_t) s_{t-1} + x_t,   out_t = s_t,   with a_t <= 0

x, out: (b, l, h, p)   a: (b, l, h)   s: (b, h, p)

docs/architecture.md walks through this file.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.oracle import Block
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, register
from ssdprof.operators.generate import Cell, InputGenerator
from ssdprof.operators.operator import BoundCall, CallBinding, Operator, OracleSpec, OutputPair
from ssdprof.operators.rounding import Gate, Rounded, Span
from ssdprof.operators.tensors import dtype_named

CHUNK = 16  # positions after which the state is stored


@dataclass(frozen=True, kw_only=True)
class ToyInputs(Inputs):
    """x: (b, l, h, p).  a: (b, l, h), the natural logarithm of the gate, <= 0."""

    operator: ClassVar[str] = "toy"
    FIRST: ClassVar[str] = "x"
    VALUES: ClassVar[str] = "x"
    x: Tensor
    a: Tensor

    @property
    def states_shape(self) -> tuple[int, ...]:
        return self.x.shape[0], *self.x.shape[2:]

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(("heads", "width"), self.x.shape[2:], strict=True))


# --- implementations


def running_sum(inputs: ToyInputs, precision: Precision) -> OutputPair:
    """Position after position, in fp32; the state is stored in the precision's dtype after every
    chunk.
    """
    state = torch.zeros_like(inputs.x[:, 0], dtype=torch.float32)
    out = torch.empty_like(inputs.x)
    for t in range(inputs.x.shape[1]):
        state = state * inputs.a[:, t, :, None].float().exp() + inputs.x[:, t].float()
        out[:, t] = state
        if (t + 1) % CHUNK == 0:
            state = state.to(precision.state_dtype).float()
    return out, state


def register_implementations():
    for name in ("unfused", "fused"):
        plan = Plan(variant="torch", launches=0, reason="a loop")
        register(
            Implementation(
                operator="toy", name=name, run=running_sum, plan=lambda *_, plan=plan: plan
            )
        )


# --- the oracle


def blocks(inputs: ToyInputs, *, block: int) -> Iterator[Block]:
    """The oracle: the recurrence in fp64."""
    batch, seqlen = inputs.x.shape[:2]
    for row in range(batch):
        state = torch.zeros_like(inputs.x[row, 0], dtype=torch.float64)
        for start in range(0, seqlen, block):
            stop = min(start + block, seqlen)
            out = []
            for t in range(start, stop):
                state = state * inputs.a[row, t, :, None].double().exp() + inputs.x[row, t].double()
                out.append(state)
            span = Span(sequence=row, batch=row, start=start, stop=stop)
            yield span, torch.stack(out), state, row if stop == seqlen else None


def chunks(inputs: ToyInputs, low: Rounded, span: Span, _gate: Gate) -> Tensor:
    """The recurrence in fp32, with the state rounded after every chunk and the output to the
    inputs' dtype.
    """
    out = []
    for t in range(span.start, span.stop):
        low.state = (
            low.state * inputs.a[span.batch, t, :, None].float().exp()
            + inputs.x[span.batch, t].float()
        )
        out.append(low.state.to(inputs.x.dtype))
        if (t + 1) % CHUNK == 0:
            low.state = low.stored(low.state)
    return torch.stack(out)


ORACLE = OracleSpec(
    blocks=blocks,
    gate=lambda inputs, span, _chunk=CHUNK: Gate(
        exponents=inputs.a[span.batch, span.start : span.stop].float().T[None]
    ),
    chunks=chunks,
    bytes_per_position=lambda inputs: 64 * inputs.x.shape[2] * inputs.x.shape[3],
    chunk_size=lambda _: CHUNK,
    words="{heads} heads x {width}".format_map,
    flops=lambda sizes, positions: 2 * positions * sizes["heads"] * sizes["width"],
)


# --- a mixer would call `toy_scan(x, a)`


def bind(_mixer, x: Tensor, a: Tensor, **_dropped) -> BoundCall:
    return ToyInputs(x=x, a=a), True, ""


BINDING = CallBinding(
    function="toy_scan",
    bind=bind,
    views=("x",),
    per_position=("a",),
    gate_bytes=lambda item, _sizes: item,
    replacement=lambda inputs: running_sum(inputs, Precision()),
)


# --- bench


def draw(cell: Cell, device: torch.device) -> ToyInputs:
    sizes = (cell.tokens.sequences, cell.tokens.seqlen, cell.shape.sizes["heads"])
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(*sizes, cell.shape.sizes["width"], device=device, generator=generator)
    return ToyInputs(
        x=x.to(dtype_named(cell.dtype)), a=-torch.rand(*sizes, device=device, generator=generator)
    )


GENERATOR = InputGenerator(
    form="{heads}x{width}",
    order="heads x width",
    words="{heads}x{width}",
    models={"toy-1b": (2, 8)},
    draw=draw,
)


OPERATOR = Operator(
    name="toy",
    title="A gated running sum",
    layers="toy",
    load_inputs=lambda: ToyInputs,
    binding=BINDING,
    oracle=ORACLE,
    generated=GENERATOR,
)
