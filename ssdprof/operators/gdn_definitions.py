"""GDN as flashinfer-bench defines it: with raw gates a and b, and states (n, HV, V, K)."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ssdprof.kernels import GDNInputs
from ssdprof.kernels.oracle import initial_states, spans_of
from ssdprof.operators.definition import Definition, Values, states_in, unwritten
from ssdprof.operators.operator import OutputPair

PER_TOKEN = ("q", "k", "v", "a", "b")


def read(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float = 0.0,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm: bool = False,
) -> GDNInputs:
    """Packed inputs of GDN from the inputs of a definition: packed sequences (tokens, ...), or,
    without cu_seqlens, n sequences of one length (n, T, ...).

    state: (n, HV, V, K).
    a, b (..., HV): raw gates.  g is -exp(A_log) softplus(a + dt_bias), and beta is sigmoid(b).
    scale: factor of q; 0 stands for the default.

    Raises ValueError for tensors that do not fit each other.
    """
    if cu_seqlens is None:
        cu_seqlens = torch.arange(len(q) + 1, device=q.device) * q.shape[1]
        q, k, v, a, b = (tensor.flatten(0, 1) for tensor in (q, k, v, a, b))
    g = -A_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias.float())
    return GDNInputs(
        q=q[None],
        k=k[None],
        v=v[None],
        g=g[None],
        beta=b.float().sigmoid()[None],
        initial_state=state.mT,
        scale=scale or None,
        use_qk_l2norm=bool(use_qk_l2norm),
        cu_seqlens=cu_seqlens,
    )


def read_verified(
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    intermediate_states_buffer: Tensor | None = None,  # noqa: ARG001
    **others: Any,
) -> GDNInputs:
    """Packed inputs of GDN from the inputs of a definition that verifies drafted tokens.

    Each sequence begins with the state in its slot of the pool `initial_state`.  The buffer, to
    which a kernel writes states, is ignored.  others: inputs that `read` takes.

    Raises ValueError as `read` does, and for a slot outside of the pool.
    """
    return read(state=states_in(initial_state, initial_state_indices), **others)


def write(inputs: GDNInputs) -> Values:
    """The inputs of a definition, with the tokens of all sequences packed.

    A definition knows no norm inside the call, so q and k are normalised here.  The raw gates are
    the inverse softplus of -g, and the logit of beta, both in fp64 and rounded to the dtype of q;
    A_log and dt_bias are 0.  A g above 0 counts as 0.

    Raises ValueError if a beta is not between 0 and 1, or if K and V differ.
    """
    beta = inputs.beta.double()
    g = inputs.g.double().clamp(max=0)
    if not bool(((beta >= 0) & (beta <= 1)).all()):
        raise ValueError("beta is not between 0 and 1")
    if inputs.q.shape[3] != inputs.v.shape[3]:
        raise ValueError("K and V differ")
    values = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    if inputs.use_qk_l2norm:
        for name in ("q", "k"):
            squares = values[name].double().square().sum(-1, keepdim=True)
            values[name] = values[name] * (squares + 1e-6).rsqrt()
    values |= {"a": (-g.expm1()).log() - g, "b": beta.logit()}
    ends = [span.batch * inputs.length + span.stop for span in spans_of(inputs)]
    return {
        **{name: values[name].flatten(0, 1).to(inputs.q.dtype) for name in PER_TOKEN},
        "state": initial_states(inputs, torch.float32).mT,
        "A_log": torch.zeros(inputs.v.shape[2]),
        "dt_bias": torch.zeros(inputs.v.shape[2]),
        "cu_seqlens": torch.tensor([0, *ends]),
        "scale": torch.tensor(inputs.scale_or_default),
    }


def write_step(inputs: GDNInputs) -> Values:
    """The inputs of a definition of one decode step, with tokens (n, 1, ...), and cu_seqlens, which
    such a definition does not have.  Raises ValueError as `write` does, and unless every sequence
    has one token.
    """
    if any(span.length != 1 for span in spans_of(inputs)):
        raise ValueError("a sequence has no token, or several")
    values = write(inputs)
    for name in PER_TOKEN:
        values[name] = values[name][:, None]
    return values


def finish(inputs: Values, out: Tensor, final_states: Tensor) -> OutputPair:
    """`Definition.finish`: out in the shape of v, and states (n, HV, V, K)."""
    return out.reshape(inputs["v"].shape), final_states.mT.contiguous()


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float,
    cu_seqlens: Tensor | None = None,
) -> OutputPair:
    """The reference of the definitions: token by token, in fp64.

    q, k (tokens, H, K), v (tokens, HV, V), a, b (tokens, HV), state (n, HV, V, K).  Without
    cu_seqlens there is one token of each sequence: (n, 1, ...).
    A_log, dt_bias (HV): g is -exp(A_log) softplus(a + dt_bias), and beta is sigmoid(b).
    scale: factor of q.
    cu_seqlens (n + 1): where the sequences begin and end.

    Returns out, with the shape and dtype of v, and the final states, (n, HV, V, K) in fp32.  The
    tensors of the caller stay as they are.
    """
    heads = v.shape[-2]
    state = state.to(torch.float64, copy=True)
    g = -A_log.double().exp() * torch.nn.functional.softplus(a.double() + dt_bias.double())
    out = torch.empty_like(v)
    bounds = range(len(v) + 1) if cu_seqlens is None else cu_seqlens.tolist()

    def columns(tensor: Tensor, token: int) -> Tensor:
        """One token's vectors of all value heads, (HV, K or V, 1)."""
        vectors = tensor[token].double().reshape(-1, tensor.shape[-1], 1)
        return vectors.repeat_interleave(heads // tensor.shape[-2], 0)

    for n, (start, stop) in enumerate(pairwise(bounds)):
        for t in range(start, stop):
            query, key, value = (columns(tensor, t) for tensor in (q, k, v))
            decay = g[t].exp().reshape(heads, 1, 1)
            beta = b[t].double().sigmoid().reshape(heads, 1, 1)
            state[n] *= decay
            state[n] += beta * (value - state[n] @ key) @ key.mT
            out[t] = (scale * state[n] @ query).reshape(v.shape[1:])
    return out, state.float()


def _axes(*tokens: str, sequences: str, **packed: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """`Definition.inputs`: the name of each input -> its axes.

    tokens: the axes of tokens.  sequences: the axis of sequences.  packed: further inputs that only
    definitions of packed sequences have, with their axes.
    """
    heads = ("num_v_heads",)
    return {  # head_size is both K and V
        "q": (*tokens, "num_q_heads", "head_size"),
        "k": (*tokens, "num_k_heads", "head_size"),
        "v": (*tokens, *heads, "head_size"),
        "state": (sequences, *heads, "head_size", "head_size"),
        "A_log": heads,
        "a": (*tokens, *heads),
        "dt_bias": heads,
        "b": (*tokens, *heads),
        **packed,
        "scale": (),
    }


_SIZES = "_qk{num_q_heads}_v{num_v_heads}_d{head_size}_k_last"
_PREFILL = Definition(
    name=f"gdn_prefill{_SIZES}",
    tokens=("total_seq_len",),
    sequences="num_seqs",
    read=read,
    inputs=_axes("total_seq_len", sequences="num_seqs", cu_seqlens=("len_cu_seqlens",)),
    outputs={"output": "v", "new_state": "state"},
    write=write,
    finish=finish,
    reference=gated_delta_rule,
)
_STEP = replace(
    _PREFILL,
    name=f"gdn_decode{_SIZES}",
    tokens=("batch_size", "seq_len"),
    sequences="batch_size",
    inputs=_axes("batch_size", "seq_len", sequences="batch_size"),
    write=write_step,
)
_VERIFIED = replace(_STEP, name=f"gdn_mtp{_SIZES}", read=read_verified, write=unwritten)
# A captured call is written as the first of these kinds whose `write` takes it.  If none does, the
# user reads why the last one does not.
DEFINITIONS = (_VERIFIED, _STEP, _PREFILL)
