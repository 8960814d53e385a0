"""One Triton kernel per operator, token by token: the example of docs/your-own-kernel.md."""

import torch
import triton
import triton.language as tl
from torch.nn.functional import softplus

from ssdprof.kernels import GDNInputs, SSDInputs, UnsupportedError


@triton.jit
def ssd_scan(
    x, dt, decay, B, C, D, out, states, length, heads, groups, P: tl.constexpr, N: tl.constexpr
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p, n = tl.arange(0, P), tl.arange(0, N)
    state = tl.zeros((P, N), tl.float32)
    for position in range(length):
        token = row * length + position
        step, group = token * heads + head, token * groups + head // (heads // groups)
        x_t = tl.load(x + step * P + p).to(tl.float32)
        B_t, C_t = (
            tl.load(B + group * N + n).to(tl.float32),
            tl.load(C + group * N + n).to(tl.float32),
        )
        state = state * tl.load(decay + step) + (tl.load(dt + step) * x_t)[:, None] * B_t[None, :]
        out_t = tl.sum(state * C_t[None, :], axis=1) + tl.load(D + head) * x_t
        tl.store(out + step * P + p, out_t.to(out.dtype.element_ty))
    tl.store(states + ((row * heads + head) * P + p[:, None]) * N + n[None, :], state)


def my_ssd(inputs: SSDInputs):
    (b, l, h, p), (g, n) = inputs.x.shape, inputs.B.shape[2:]
    if any(given is not None for given in (inputs.z, inputs.initial_states, inputs.cu_seqlens)):
        raise UnsupportedError("my_ssd: no gate, no initial states, no packed sequences")
    if p & (p - 1) or n & (n - 1) or (inputs.D is not None and inputs.D.ndim == 2):
        raise UnsupportedError("my_ssd: P and N must be powers of two, and D one number per head")
    dt = inputs.dt.float() if inputs.dt_bias is None else inputs.dt.float() + inputs.dt_bias.float()
    dt = (softplus(dt) if inputs.dt_softplus else dt).clamp(*inputs.dt_limit).contiguous()
    D = torch.zeros_like(inputs.A) if inputs.D is None else inputs.D
    x, B, C, D, decay = (
        t.contiguous() for t in (inputs.x, inputs.B, inputs.C, D.float(), (dt * inputs.A).exp())
    )
    out, states = torch.empty_like(x), torch.empty(b, h, p, n, device=x.device)
    ssd_scan[(b, h)](x, dt, decay, B, C, D, out, states, l, h, g, P=p, N=n)
    return out, states


@triton.jit
def gdn_scan(q, k, v, decay, beta, out, states, length, heads, K: tl.constexpr, V: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, j = tl.arange(0, K), tl.arange(0, V)
    place = states + ((row * heads + head) * K + i[:, None]) * V + j[None, :]
    state = tl.load(place)
    for position in range(length):
        step = (row * length + position) * heads + head
        q_t, k_t, v_t = (
            tl.load(q + step * K + i),
            tl.load(k + step * K + i),
            tl.load(v + step * V + j),
        )
        state = state * tl.load(decay + step)
        write = tl.load(beta + step) * (v_t - tl.sum(state * k_t[:, None], axis=0))
        state = state + k_t[:, None] * write[None, :]
        tl.store(out + step * V + j, tl.sum(state * q_t[:, None], axis=0).to(out.dtype.element_ty))
    tl.store(place, state)


def gdn_operands(inputs: GDNInputs):
    """q, k, v, decay and beta in fp32, contiguous, with a q and k for each value head."""
    q, k, v, beta = (t.float() for t in (inputs.q, inputs.k, inputs.v, inputs.beta))
    if inputs.use_qk_l2norm:
        q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
    q, k = (
        t.repeat_interleave(inputs.values_per_key, dim=2) for t in (q * inputs.scale_or_default, k)
    )
    decay = inputs.g.float().clamp(max=0).exp()
    return tuple(t.contiguous() for t in (q, k, v, decay, beta))


def my_gdn(inputs: GDNInputs):
    (b, l, heads, v_dim), k_dim = inputs.v.shape, inputs.k.shape[3]
    if inputs.cu_seqlens is not None or k_dim & (k_dim - 1) or v_dim & (v_dim - 1):
        raise UnsupportedError("my_gdn: no packed sequences; K and V must be powers of two")
    q, k, v, decay, beta = gdn_operands(inputs)
    states = torch.zeros(inputs.states_shape, device=v.device)
    if inputs.initial_state is not None:
        states.copy_(inputs.initial_state)
    out = torch.empty(b, l, heads, v_dim, dtype=inputs.v.dtype, device=v.device)
    gdn_scan[(b, heads)](q, k, v, decay, beta, out, states, l, heads, K=k_dim, V=v_dim)
    return out, states


@triton.jit
def gdn_step(
    q, k, v, decay, beta, pool, reads, writes, out, length, heads, stride,
    K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    read, write = tl.load(reads + row).to(tl.int64), tl.load(writes + row).to(tl.int64)
    i, j = tl.arange(0, K), tl.arange(0, V)
    place = pool + (head * K + i[:, None]) * V + j[None, :]
    state = tl.zeros((K, V), tl.float32)
    if read >= 0:
        state = tl.load(place + read * stride).to(tl.float32)
    for position in range(length):
        step = (row * length + position) * heads + head
        q_t, k_t = tl.load(q + step * K + i), tl.load(k + step * K + i)
        state = state * tl.load(decay + step)
        u = tl.load(v + step * V + j) - tl.sum(state * k_t[:, None], axis=0)
        state = state + k_t[:, None] * (tl.load(beta + step) * u)[None, :]
        tl.store(out + step * V + j, tl.sum(state * q_t[:, None], axis=0).to(out.dtype.element_ty))
    if write >= 0:
        tl.store(place + write * stride, state.to(pool.dtype.element_ty))


def my_gdn_step(inputs: GDNInputs):
    (b, l, heads, v_dim), k_dim, pool = inputs.v.shape, inputs.k.shape[3], inputs.initial_state
    reads, writes = inputs.state_indices, inputs.write_indices
    writes = reads if writes is None else writes
    if inputs.cu_seqlens is not None or inputs.accepted is not None or writes.ndim > 1:
        raise UnsupportedError("my_gdn_step: no packed sequences and no drafted tokens")
    if not pool[0].is_contiguous() or k_dim & (k_dim - 1) or v_dim & (v_dim - 1):
        raise UnsupportedError("my_gdn_step: slots without gaps; K and V must be powers of two")
    q, k, v, decay, beta = gdn_operands(inputs)
    reads, writes = reads.contiguous(), writes.contiguous()
    out = torch.empty(b, l, heads, v_dim, dtype=inputs.v.dtype, device=v.device)
    gdn_step[(b, heads)](
        q, k, v, decay, beta, pool, reads, writes, out, l, heads, pool.stride(0), K=k_dim, V=v_dim
    )
    return out, pool


my_gdn_step.in_place = True  # every call of it has a pool, which it writes and returns
