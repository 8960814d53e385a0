"""Inputs of both operators for tests of kernels: one description for each; views, neighbours and
comparisons.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.kda.inputs import KDAInputs, RawKDAInputs
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.inputs import SSDInputs

BF16, FP16, FP32 = DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EXACT = Precision()
RELAXED_FP32 = Precision(intermediates="relaxed")
RELAXED = replace(RELAXED_FP32, state_dtype=FP16)
PRECISIONS = tuple(
    replace(precision, state_dtype=dtype) for precision in (EXACT, RELAXED_FP32) for dtype in DTYPES
)
TOKENS = {SSDInputs: ("x", "dt", "B", "C", "z"), GDNInputs: ("q", "k", "v", "g", "beta")}
TOKENS[KDAInputs] = TOKENS[GDNInputs]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes and kinds of inputs.  `lengths`: packed sequences instead of a batch of `seqlen`."""

    batch: int = 1
    seqlen: int = 75
    lengths: tuple[int, ...] = ()
    dtype: torch.dtype = FP32
    initial_states: bool = False
    chunk_size: int = 64
    device: str = "cpu"
    seed: int = 0

    def but(self, **changes):
        return replace(self, **changes)

    def __str__(self) -> str:
        """What differs from the defaults."""
        differing = [
            f"{f.name} {getattr(self, f.name)}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return ", ".join(differing).replace("torch.", "") or "plain"

    @property
    def tokens(self) -> tuple[int, int]:
        return (1, sum(self.lengths)) if self.lengths else (self.batch, self.seqlen)

    @property
    def sequences(self) -> int:
        return len(self.lengths) or self.batch

    def draws(self) -> tuple[torch.Generator, Callable[..., Tensor]]:
        """A generator, and what it draws of the normal distribution."""
        generator = torch.Generator(self.device).manual_seed(self.seed)
        return generator, partial(torch.randn, generator=generator, device=self.device)

    @property
    def bounds(self) -> Tensor | None:
        return bounds(self.lengths, self.device) if self.lengths else None


@dataclass(frozen=True, kw_only=True)
class SSDCase(Case):
    """Generated as a layer is initialised, and views of one projection as in a model.  skip: D: "",
    "(h)" or "(h, p)".
    """

    heads: int = 2
    headdim: int = 16
    dstate: int = 16
    groups: int = 1
    chunk_size: int = 32
    skip: str = "(h)"
    gate: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))

    def inputs(self, **overrides) -> SSDInputs:
        _, normal = self.draws()
        tokens = self.tokens
        h, p, g, n = self.heads, self.headdim, self.groups, self.dstate
        # as in a model, nothing is contiguous: x, B and C are columns of the convolution's output,
        # z and dt of the projection before it
        x, B, C = normal(*tokens, h * p + 2 * g * n).to(self.dtype).split([h * p, g * n, g * n], -1)
        z, dt = normal(*tokens, h * p + h).to(self.dtype).split([h * p, h], -1)
        step = torch.exp(normal(h).abs() * -2 - 2)  # the layer's time step, before the token's part
        tensors = dict(
            x=x.unflatten(-1, (h, p)),
            dt=dt,
            A=-torch.linspace(1, 16, h, device=self.device),
            B=B.unflatten(-1, (g, n)),
            C=C.unflatten(-1, (g, n)),
            D={"": None, "(h)": normal(h), "(h, p)": normal(h, p)}[self.skip],
            z=z.unflatten(-1, (h, p)) if self.gate else None,
            dt_bias=step + torch.log(-torch.expm1(-step)),
            initial_states=normal(self.sequences, h, p, n) if self.initial_states else None,
            cu_seqlens=self.bounds,
        )
        options = dict(chunk_size=self.chunk_size, dt_softplus=True, dt_limit=self.dt_limit)
        return SSDInputs(**(tensors | options | overrides))


@dataclass(frozen=True, kw_only=True)
class GDNCase(Case):
    """collinear: share of a common vector in every key.  gate: mean of -g.  l2norm: q and k are
    normalised inside.
    """

    seqlen: int = 70
    key_heads: int = 1
    values_per_key: int = 1
    key_dim: int = 16
    value_dim: int = 16
    gate: float = 0.3
    largest_beta: float = 1.0
    collinear: float = 0.0
    l2norm: bool = True

    def inputs(self, **overrides) -> GDNInputs:
        generator, normal = self.draws()
        tokens = self.tokens
        keys = self.key_heads
        heads = self.key_heads * self.values_per_key
        key = normal(keys, self.key_dim)
        q = normal(*tokens, keys, self.key_dim)
        k = normal(*tokens, keys, self.key_dim)
        k = self.collinear * key + (1 - self.collinear) * k
        if not self.l2norm:
            q, k = (torch.nn.functional.normalize(tensor, dim=-1) for tensor in (q, k))
        state = (
            normal(self.sequences, heads, self.key_dim, self.value_dim)
            if self.initial_states
            else None
        )
        g = -2 * self.gate * torch.rand(*tokens, heads, generator=generator, device=self.device)
        tensors = dict(
            q=q.to(self.dtype),
            k=k.to(self.dtype),
            v=normal(*tokens, heads, self.value_dim).to(self.dtype),
            g=g,
            beta=(self.largest_beta * normal(*tokens, heads).sigmoid()).to(self.dtype),
            initial_state=state,
            cu_seqlens=None if self.bounds is None else self.bounds.long(),
        )
        options = dict(use_qk_l2norm=self.l2norm, chunk_size=self.chunk_size)
        return GDNInputs(**(tensors | options | overrides))


@dataclass(frozen=True, kw_only=True)
class KDACase(GDNCase):
    """gates: "generated", each channel uniform up to 2 `gate`; "saturated", far below what fp32
    holds in places; "bound",
    -5 in every position; "none"; "cuts", some -inf; "one channel", of which one is kept and the
      others are forgotten; "raw" and "raw, bounded", in `dtype`, with rates of 1/50, 1 and 3.
    """

    gates: str = "generated"

    def inputs(self, **overrides) -> KDAInputs:
        plain = super().inputs()
        generator = torch.Generator(self.device).manual_seed(self.seed + 1)
        shape = (*plain.v.shape[:3], self.key_dim)
        if self.gates.startswith("raw"):
            normal = partial(torch.randn, generator=generator, device=self.device)
            gate = dict(
                g=(3 * normal(shape)).to(self.dtype),
                A_log=torch.tensor([-4.0, 0.0, 1.1] * shape[2], device=self.device)[: shape[2]],
                dt_bias=normal(shape[2:]),
                lower_bound=-5.0 if self.gates == "raw, bounded" else None,
            )
            return RawKDAInputs(**vars(plain) | gate | overrides)
        g = -2 * self.gate * torch.rand(shape, generator=generator, device=self.device)
        g = {
            "generated": lambda: g,
            "saturated": lambda: torch.where(g > -self.gate, g, 1000 * g),
            "bound": lambda: torch.full_like(g, -5.0),
            "none": lambda: torch.zeros_like(g),
            "cuts": lambda: torch.where(g > -0.04 * self.gate, -torch.inf, 0.1 * g),
            "one channel": lambda: torch.where(
                torch.arange(self.key_dim, device=self.device) == 3, 0.0, -20.0 + 0 * g
            ),
        }[self.gates]()
        return KDAInputs(**vars(plain) | dict(g=g) | overrides)


def bounds(lengths: tuple[int, ...], device: str = "cpu") -> Tensor:
    """cu_seqlens."""
    return torch.tensor([0, *accumulate(lengths)], device=device, dtype=torch.int32)


# --- the same operation on both operators' inputs


def tensors_of(inputs) -> dict[str, Tensor]:
    return {name: value for name, value in vars(inputs).items() if isinstance(value, Tensor)}


def tokens_of(inputs) -> tuple[str, ...]:
    """Names of the tensors with a value for each position."""
    return tuple(name for name in TOKENS[type(inputs)] if getattr(inputs, name) is not None)


def with_state(inputs, state: Tensor | None):
    return replace(inputs, **{inputs.STATES: state})


def changed(inputs, change, *names: str):
    """These tensors, or all of tokens, after a function."""
    return replace(
        inputs, **{name: change(getattr(inputs, name)) for name in names or tokens_of(inputs)}
    )


def moved(inputs):
    return changed(inputs, lambda tensor: tensor.cuda(), *tensors_of(inputs))


def cut(inputs, start: int, stop: int | None, **overrides):
    """Positions start..stop of every row."""
    pieces = {name: getattr(inputs, name)[:, start:stop] for name in tokens_of(inputs)}
    return replace(inputs, **pieces | overrides)


def rows(inputs, which):
    """Rows of a batch, with their initial states."""
    names = [*tokens_of(inputs), *(() if inputs.initial is None else (inputs.STATES,))]
    return changed(inputs, lambda tensor: tensor[which], *names)


def sequences(inputs, *, packed: bool = False) -> dict[int, Any]:
    """Number -> a packed sequence that is not empty, as a call of its own; `packed`: as a pack of
    one sequence.
    """
    state = inputs.initial
    alone = {}
    for i, (start, stop) in enumerate(pairwise(inputs.cu_seqlens.tolist())):
        if start < stop:
            pack = bounds((stop - start,), str(inputs.cu_seqlens.device)) if packed else None
            initial = {} if state is None else {inputs.STATES: state[i : i + 1]}
            alone[i] = cut(inputs, start, stop, cu_seqlens=pack, **initial)
    return alone


def spoilt(inputs, value: float, place, *names: str):
    """With `value` at this place of these tensors, or of all tensors of tokens."""

    def spoil(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[place] = value
        return tensor

    return changed(inputs, spoil, *names)


def with_steps(inputs: SSDInputs, step: float | Tensor, A: float | None = None) -> SSDInputs:
    """These steps, a number in fp32, without softplus and bias."""
    dt = torch.full_like(inputs.dt, step, dtype=FP32) if isinstance(step, float) else step
    A_of_heads = inputs.A if A is None else torch.full_like(inputs.A, A)
    return replace(inputs, dt=dt, A=A_of_heads, dt_bias=None, dt_softplus=False)


# --- comparisons


def assert_bitwise(output, expected):
    for name, a, b in zip(("out", "final_states"), output, expected, strict=True):
        assert torch.isfinite(a).all(), f"{name} is not finite"
        assert torch.equal(a, b), name


def head_errors(output, exact) -> tuple[Tensor, Tensor]:
    """RMS error of each head's output and final states, relative to its RMS."""
    of_tensors = []
    for a, b, head in zip(output, exact, (2, 1), strict=True):
        over = [axis for axis in range(4) if axis != head]
        error = (a.double() - b).square().mean(over).sqrt()
        b = b.double().square().mean(over).sqrt()
        of_tensors.append(error / b.clamp_min(1e-30))
    return of_tensors[0], of_tensors[1]


def assert_no_less_exact(output, other, exact):
    """No head has an error that is more than 1 % larger than the other output's."""
    both = (head_errors(each, exact) for each in (output, other))
    for name, errors, others in zip(("out", "final_states"), *both, strict=True):
        assert (errors <= 1.01 * others).all(), f"{name}: {(errors / others).tolist()}"


def assert_close(output, exact, limit: float):
    """The error of every head."""
    for name, errors in zip(("out", "final_states"), head_errors(output, exact), strict=True):
        assert (errors <= limit).all(), f"{name}: {errors.tolist()}"
