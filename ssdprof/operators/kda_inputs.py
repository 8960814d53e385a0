"""Random inputs of KDA, edge inputs, and inputs whose outputs are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

from ssdprof import kernels
from ssdprof.operators import gdn_inputs, generate
from ssdprof.operators.generate import Cell, EdgeInputs, History, KnownOutputs, Trait
from ssdprof.operators.late import lazy, torch
from ssdprof.operators.tensors import dtype_named

if TYPE_CHECKING:
    from torch import Tensor

    from ssdprof.kernels import oracle
else:
    oracle = lazy("ssdprof.kernels.oracle")

BOUND = -5.0  # least g of a bounded gate
BOUNDED, SATURATED, LOW_GATES = "bounded", "saturated", "low-gates"
WAYS = {
    gdn_inputs.NORMALISED: "q and k are normalised before the call and not inside",
    BOUNDED: "bounded gates that forget, g = -5 sigmoid(a)",
    SATURATED: (
        "every fourth value head forgets most channels at every token: g is -46 in the mean"
    ),
    LOW_GATES: "g in the model's dtype, as in bailing_hybrid",
}


def gates(cell: Cell, generator: torch.Generator) -> torch.Tensor:
    """g (B, T, HV, K) in fp32: -A softplus(a + dt_bias) with a ~ N(0, 1), an A for each head and a
    dt_bias for each channel, unless `WAYS` says otherwise.
    """
    sizes = cell.shape.sizes
    rows, length, _ = generate.extents(cell)
    heads, key_dim = sizes["value_heads"], sizes["key_dim"]
    dt_bias = generate.gate_bias(heads * key_dim, generator).view(heads, key_dim)
    A = generate.uniform(heads, gdn_inputs.SLOWEST, gdn_inputs.FASTEST, generator)[:, None]
    g = torch.randn(rows, length, heads, key_dim, device=generator.device, generator=generator)
    if BOUNDED not in cell.ways:
        g.add_(dt_bias)
    if SATURATED in cell.ways:
        g[..., ::4, :] += 10
    if BOUNDED in cell.ways:
        g.sigmoid_().mul_(BOUND)
    else:
        g = torch.nn.functional.softplus(g).mul_(-A)
    return g.to(dtype_named(cell.dtype)) if LOW_GATES in cell.ways else g


draw = partial(gdn_inputs.draw, kind="KDAInputs", gates=gates)


def edges(like: kernels.GDNInputs) -> list[list[EdgeInputs[kernels.GDNInputs]]]:
    """`InputGenerator.edges`: those of GDN with a gate for each channel.  The first of each kind
    also has channels that forget everything; that of the kind WHOLE_CHUNKS also has `DECAYED_STATE`
    and `G_AS_Q`.
    """
    kinds = gdn_inputs.edges(like, draw)
    for lengths, forms in zip_longest(generate.EDGES, kinds):  # the last kind is none of EDGES
        traits = (*forms[0].traits, FORGETTING_CHANNELS)
        if lengths == generate.WHOLE_CHUNKS:
            traits = (*traits, DECAYED_STATE, G_AS_Q)
        forms[0] = replace(forms[0], traits=traits)
    return kinds


def forgetting_channels(inputs: kernels.GDNInputs) -> None:
    """Every third channel of heads 1 and 2 forgets everything at every eleventh position."""
    inputs.g[:, ::11, 1:3, ::3] = -torch.inf


def decayed_state(inputs: kernels.GDNInputs) -> None:
    """Change head 5 so that its initial state is large compared with what is written, and decays to
    exp(-32) = 2^-46 of it in the first 32 positions.
    """
    if inputs.initial_state is not None:
        inputs.initial_state[:, 5] *= 2.0**8
    inputs.v[:, :, 5] *= 2.0**-8
    inputs.g[:, :32, 5] = -1


def low_gates(inputs: kernels.GDNInputs) -> kernels.GDNInputs:
    """The inputs with g in the dtype of q."""
    return replace(inputs, g=inputs.g.to(inputs.q.dtype))


DECAYED_STATE: Trait[kernels.GDNInputs] = Trait(
    "a state that decays in all channels", decayed_state, "what is left of it is read"
)
G_AS_Q: Trait[kernels.GDNInputs] = Trait("g in the dtype of q", low_gates, "g is summed in fp32")
FORGETTING_CHANNELS: Trait[kernels.GDNInputs] = Trait(
    "g of -inf in some channels", forgetting_channels, "exp(-inf) is 0, and never NaN"
)


# --- the law of turning keys: outputs that are known in closed form.  They consist of history,
# although a bound from the decays alone would say that nothing is left of it.  `turning_keys` has
# the formulas

# tokens of a window -> number of keys that turn the state in it
WINDOWS = {16: 7, 64: 11, 256: 11, 1024: 11}
# the first token of a window keeps this share of the state for its key, and writes this share of v
KEPT, WRITTEN = 15 / 16, 1 / 16
LONG = (2779, 1317)  # tokens of two packed sequences; their sum, 4,096, is the length of a row
RESOLUTION = 2.0**-60  # a window's influence on a later output is left out if it is smaller


def histories(
    like: kernels.GDNInputs, heads: Sequence[int]
) -> Iterator[Iterator[History[kernels.GDNInputs]]]:
    """`InputGenerator.histories`: `turning_keys` in the shape of `like`, then in 4,096 tokens with
    each number of heads; none at all if no two windows of a length fit in the longest sequence of
    `like`.

    A call has at most as many kinds of windows as key heads.  In the shape of `like` the longest
    kinds are left out then; in 4,096 tokens they get calls of their own.
    """
    longest = max(span.length for span in oracle.spans_of(like))
    fitting = [window for window in WINDOWS if 2 * window <= longest]
    if not fitting:
        return
    yield _short_history(like, fitting)
    for count in heads:
        for start in range(0, len(WINDOWS), count):
            yield _long_histories(like, count, [*WINDOWS][start : start + count])


def _short_history(
    like: kernels.GDNInputs, windows: Sequence[int]
) -> Iterator[History[kernels.GDNInputs]]:
    """`turning_keys` in the shape of `like`.  A generator computes it only when it is needed: it
    takes as much memory as `like`.
    """
    yield turning_keys(like, windows)


def _long_histories(
    like: kernels.GDNInputs, heads: int, windows: Sequence[int]
) -> Iterator[History[kernels.GDNInputs]]:
    """`turning_keys` of `LONG` tokens.  Several heads come first in a pack with initial states,
    then in a row with an initial state.  The last history, for one head the only one, is a row
    without.
    """
    key_dim = like.q.shape[3]
    value_dim = like.v.shape[3]
    device = like.v.device
    shape = gdn_inputs.GENERATOR.shape("turning keys", heads, heads, key_dim, value_dim)
    row = draw(generate.edge_cell(shape, like.v, (sum(LONG),)), device)
    row = replace(row, use_qk_l2norm=like.use_qk_l2norm, g=row.g.to(like.g.dtype))
    if heads > 1:
        states = generate.states(len(LONG), heads, key_dim, value_dim, device=device)
        bounds = generate.edge_bounds(LONG, device)
        yield turning_keys(replace(row, cu_seqlens=bounds, initial_state=states), windows)
        yield turning_keys(replace(row, initial_state=states[:1]), windows)
    yield turning_keys(row, windows)


def turning_keys(like: kernels.GDNInputs, windows: Sequence[int]) -> History[kernels.GDNInputs]:
    """Inputs in which the gates of every channel sum to -20 in each window, although most of the
    state is kept: keys turn the state from one half of the channels to the other half before the
    first half decays.

    like: has the shapes, dtypes and scale, and says whether there are initial states.
    windows: lengths of windows in tokens, keys of `WINDOWS`; the key heads take them in turn, and
        those for which no head is left are ignored.

    x and y are unit vectors in the two halves of the channels.  They change places after every
    window.  A window has these tokens:

        token               key                                     beta    g
        first               x                                       1/16    0
        next four           random                                  0       -5 on y's half
        m-th of n turning   cos(m a) y - sin(m a) x, a = pi/2/(n+1) 1       0
        last four           random                                  0       -5 on x's half
        others              random                                  0       0

    v is 0 at turning keys, and q = y.  With v_i at the first token of window i, the output at the
    last token of that window is

        out = scale M_i,   M_i = cos(a)^(n+1) (15/16 M_(i-1) + v_i / 16)

    M_(-1) is 0 without an initial state; with one, the initial state is x M_(-1)^T.  Only whole
    windows have known outputs, and a sequence without one has none.
    """
    device = like.v.device
    key_heads = like.q.shape[2]
    generator = torch.Generator(device).manual_seed(generate.SEED)
    normal = partial(torch.randn, device=device, generator=generator)
    inputs = replace(
        like,
        q=torch.zeros_like(like.q),
        k=torch.zeros_like(like.k),
        v=torch.empty_like(like.v).normal_(generator=generator),
        g=torch.zeros_like(like.g),
        beta=torch.zeros_like(like.beta),
    )
    if like.initial is not None:
        inputs = inputs.after(torch.zeros_like(like.initial, dtype=torch.float32))
    known: list[KnownOutputs] = []
    for kind, window in enumerate(windows[:key_heads]):
        heads = torch.arange(kind, key_heads, len(windows), device=device)
        known += _turn(inputs, window, heads, normal)
    return inputs, known


def _turn(
    inputs: kernels.GDNInputs, window: int, key_heads: Tensor, normal: Callable[..., Tensor]
) -> Iterator[KnownOutputs]:
    """Write windows of one length for some key heads and their value heads into the inputs, and
    yield the known outputs of each sequence.

    The halves of the channels, the signs of x and y, and initial states are random.

    normal: (*shape) -> random numbers ~ N(0, 1).
    """
    per_key = inputs.values_per_key
    device = inputs.v.device
    heads = (key_heads[:, None] * per_key + torch.arange(per_key, device=device)).flatten()
    sizes = (len(key_heads), inputs.q.shape[3])
    in_x = normal(*sizes).argsort(-1) < sizes[1] // 2  # the channels of x's half
    signs = normal(*sizes).sign()
    x, y = (torch.nn.functional.normalize(signs * half, dim=-1) for half in (in_x, ~in_x))
    q, k, g, beta = _two_windows(window, x, y, normal)
    turns = WINDOWS[window] + 1
    turned = math.cos(math.pi / 2 / turns) ** turns  # the share of a state that all turns keep
    for span in oracle.spans_of(inputs):
        rows = slice(span.start, span.stop)
        tokens = torch.arange(span.length, device=device) % (2 * window)
        for tensor, values in ((inputs.q, q), (inputs.k, k)):
            tensor[span.batch, rows, key_heads] = values[tokens].to(tensor.dtype)
        for tensor, values in ((inputs.g, g), (inputs.beta, beta)):
            values = values.repeat_interleave(per_key, 1)
            tensor[span.batch, rows, heads] = values[tokens].to(tensor.dtype)
        is_turning = beta[tokens, :1, None] == 1
        inputs.v[span.batch, rows, heads] *= (~is_turning).to(inputs.v.dtype)
        first = span.start + window * torch.arange(span.length // window, device=device)
        terms = turned * WRITTEN * inputs.v[span.batch, first][:, heads].double()
        if inputs.initial_state is not None:
            memory = normal(len(heads), inputs.v.shape[3])
            directions = x.repeat_interleave(per_key, 0)
            inputs.initial_state[span.sequence, heads] = directions[..., None] * memory[:, None]
            terms[:1] += turned * KEPT * memory.double()
        yield KnownOutputs(
            kind=f"windows of {window:,} tokens",
            batch=span.batch,
            positions=first + window - 1,
            heads=heads,
            expected=inputs.scale_or_default * decaying_sums(terms, turned * KEPT),
        )


def _two_windows(
    window: int, x: Tensor, y: Tensor, normal: Callable[..., Tensor]
) -> tuple[Tensor, ...]:
    """q, k, g (2 window, H, K) and beta (2 window, H) of two consecutive windows, the second with x
    and y (H, K) exchanged.
    """
    turning = WINDOWS[window]
    # tokens from one turning key to the next; the first token and twice four others have none
    distance = (window - 9) // turning
    windows = []
    for before, after in ((x, y), (y, x)):
        k = torch.nn.functional.normalize(normal(window, *x.shape), dim=-1)
        g = torch.zeros_like(k)
        beta = torch.zeros_like(k[..., 0])
        k[0], beta[0] = before, WRITTEN
        for m in range(1, turning + 1):
            angle = m * math.pi / 2 / (turning + 1)
            token = 5 + distance * (m - 1)
            k[token] = math.cos(angle) * after - math.sin(angle) * before
            beta[token] = 1
        g[1:5], g[-4:] = BOUND * (after != 0), BOUND * (before != 0)
        windows.append((after.expand_as(k), k, g, beta))
    return tuple(torch.cat(pair) for pair in zip(*windows, strict=True))


def decaying_sums(terms: Tensor, ratio: float) -> Tensor:
    """The sum over j = 0 to i of ratio^j terms[i - j], for each i of terms (n, ...).

    Each pass doubles the number of terms that are summed.  Terms with ratio^j below `RESOLUTION`
    may be left out.
    """
    step = 1
    while step < len(terms) and ratio**step > RESOLUTION:
        terms = torch.cat([terms[:step], terms[step:] + ratio**step * terms[:-step]])
        step *= 2
    return terms
