"""Random inputs of SSD, and edge inputs."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ssdprof import kernels
from ssdprof.operators import generate
from ssdprof.operators.generate import Cell, EdgeInputs, InputGenerator, Trait
from ssdprof.operators.late import torch

if TYPE_CHECKING:
    from ssdprof.kernels import SSDInputs

SLOWEST, FASTEST = -1.0, -16.0  # range of A in new models
EDGE_LIMITS = (0.01, 5.0)  # limits of dt in edge inputs
# added to dt_bias: dt becomes about 28 times as large, 1.5 in the mean, and a chunk's decay
# underflows
LARGE_STEP = 4.5
USUAL_CHUNK_SIZES = (128, 256)  # usual values for unfused kernels


def draw(cell: Cell, device: torch.device) -> SSDInputs:
    """Random inputs: x, dt before its softplus, B, C and D ~ N(0, 1); A uniform; dt_bias the
    inverse softplus of a log-uniform step.

    As "views", x, B and C are slices of one tensor, and dt is a slice of the input projection, as a
    model passes them.  As "transposed", dt is contiguous.  Packed sequences, decode steps and
    sequences on a pool have initial states ~ N(0, 1), too.
    """
    h, p, n, g = (cell.shape.sizes[name] for name in GENERATOR.names)
    generator = torch.Generator(device).manual_seed(generate.SEED)
    normal = partial(torch.randn, dtype=torch.float32, device=device, generator=generator)
    dt_bias = generate.gate_bias(h, generator)
    x, B, C = generate.empty([(h, p), (g, n), (g, n)], cell, device)
    # a model's input projection holds z, x, B, C and dt side by side: dt is a view of its end
    before_dt = 2 * h * p + 2 * g * n if cell.layout == "views" else 0
    (projected,) = generate.empty([(before_dt + h,)], replace(cell, layout="contiguous"), device)
    dt = projected[..., before_dt:]
    for tensor in (x, B, C, dt):
        tensor.normal_(generator=generator)
    states, slots = None, None
    if cell.tokens.has_states:
        states = normal(cell.tokens.sequences, h, p, n)
        if cell.tokens.pool:
            states, slots = generate.pool(states, cell.tokens.pool)
    return kernels.SSDInputs(
        x=x,
        dt=dt,
        A=generate.uniform(h, FASTEST, SLOWEST, generator),
        B=B,
        C=C,
        chunk_size=USUAL_CHUNK_SIZES[0],
        D=normal(h),
        dt_bias=dt_bias,
        dt_softplus=True,
        initial_states=states,
        state_indices=slots,
        cu_seqlens=generate.cu_seqlens(cell, device),
        state_every=cell.tokens.state_every,
    )


# --- edge inputs


def edges(like: SSDInputs) -> list[list[EdgeInputs[SSDInputs]]]:
    """`InputGenerator.edges`: `_forms` for each of `generate.EDGES`, then a kind with one entry,
    whose dt has no bias, no softplus and no upper limit.
    """
    kinds = [_forms(like, lengths) for lengths in generate.EDGES]
    plain = _forms(like, (320, 320))[-1]  # without initial states
    return [*kinds, [replace(plain, traits=(STEPS_AS_THEY_ARE,))]]


def _forms(like: SSDInputs, lengths: generate.Lengths) -> list[EdgeInputs[SSDInputs]]:
    """The edge inputs of one kind: P = N, two groups, initial states, and the traits `SPECIAL` and
    `generate.traits_of`; without these traits; the same with P of `like` and one group; and these
    without initial states.  All have N of `like`.
    """
    n = like.B.shape[3]

    def generated(heads: int, width: int, groups: int) -> SSDInputs:
        shape = GENERATOR.shape("edges", heads, width, n, groups)
        inputs = draw(generate.edge_cell(shape, like.x, lengths), like.device)
        return generate.as_edge(inputs, like, lengths)

    draws = (
        partial(generated, 6, n, 2),
        partial(generated, 4, n, 2),
        partial(generated, 4, like.x.shape[3], 1),
    )
    return generate.edge_forms(draws, (), (*SPECIAL, *generate.traits_of(lengths)))


def large_steps(inputs: SSDInputs) -> None:
    """Large time steps in head 1: see `LARGE_STEP`."""
    assert inputs.dt_bias is not None
    inputs.dt_bias[1] += LARGE_STEP


def without_values(inputs: SSDInputs) -> None:
    """x = 0 in head 0 at positions 100 to 103, as far as a row has them."""
    inputs.x[:, 100:104, 0] = 0


def with_skip_of_channels(inputs: SSDInputs) -> SSDInputs:
    """The inputs with D (h, p), a number for every channel."""
    return replace(inputs, D=generate.states(*inputs.x.shape[2:], device=inputs.device))


def with_gate(inputs: SSDInputs) -> SSDInputs:
    """The inputs with a gate z that is a view of a wider tensor."""
    *sizes, p = inputs.x.shape
    wide = generate.states(*sizes, 2 * p, device=inputs.device).to(inputs.x.dtype)
    return replace(inputs, z=wide[..., p:])


def with_limits(inputs: SSDInputs) -> SSDInputs:
    """The inputs with limits of dt; without them, many steps would be below the lower one."""
    return replace(inputs, dt_limit=EDGE_LIMITS)


def steps_as_they_are(inputs: SSDInputs) -> SSDInputs:
    """The inputs with positive dt, no bias, no softplus, and a lower limit only."""
    dt = torch.nn.functional.softplus(inputs.dt.float() - 3).to(inputs.dt.dtype)
    limits = (0.02, math.inf)
    return replace(inputs, dt=dt, dt_bias=None, dt_softplus=False, dt_limit=limits)


STEPS_AS_THEY_ARE: Trait[SSDInputs] = Trait(
    "no bias and no softplus of dt",
    steps_as_they_are,
    "dt is taken as it is, but is at least its limit",
)
SPECIAL = (
    Trait("large steps in a head", large_steps, "exp is taken of a difference of sums of dt A"),
    Trait("x of 0", without_values),
    Trait("D of every channel", with_skip_of_channels),
    Trait("a gate z", with_gate),
    Trait("limits of dt that bind", with_limits, "dt is limited after its bias and softplus"),
)


# --- shapes

SIZE_WORDS = "{nheads}x{headdim}, N {dstate}, G {ngroups}"
GENERATOR: InputGenerator[SSDInputs] = InputGenerator(
    form="{nheads}x{headdim}x{dstate}x{ngroups}",
    order="heads x P x N x groups",
    words=SIZE_WORDS,
    models=generate.models_of("ssd"),
    divides=("ngroups", "nheads"),
    largest={"dstate": 256},
    draw=draw,
    edges=edges,
    chunk_sizes=USUAL_CHUNK_SIZES,
    chunks_itself=frozenset({"fused", "recurrent", "recurrent_in_place", "selective_state_update"}),
    alternatives=("recurrent_in_place",),
)
