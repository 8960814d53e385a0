"""GDN in six launches, one per stage of the algorithm: the baseline.  Further launches normalise q
and k, and write the table of chunks of packed sequences.

`gdn_unfused(...)` takes tensors; the registered implementation, `run`, takes `GDNInputs`.  By
default, dtypes are those of the unfused Triton kernels of flash-linear-attention (`../config.py`).
"""

import torch
from torch import Tensor

from ssdprof.kernels.chunks import Chunks
from ssdprof.kernels.device import INTERPRETED, refuse_device, refuse_gradient
from ssdprof.kernels.gdn import config
from ssdprof.kernels.gdn.config import operand_dtype
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.gdn.unfused import stages
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, UnsupportedError, register

MAX_CHUNK_SIZE = 64  # positions: one warp holds the inverse (C, C) of a chunk in registers


def gdn_unfused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm: bool = False,
    chunk_size: int = 64,
    cu_seqlens: Tensor | None = None,
    precision: Precision = Precision(),  # noqa: B008
) -> GDNOutput:
    """The gated delta rule in six launches, forward only.  Arguments are those of `GDNInputs`, and
    the result is that of `run`.

    Raises ValueError for inputs that do not fit together, and UnsupportedError for unsupported
    ones.
    """
    inputs = GDNInputs(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=initial_state,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
        chunk_size=chunk_size,
        cu_seqlens=cu_seqlens,
    )
    return run(inputs, precision)


def run(inputs: GDNInputs, precision: Precision = Precision()) -> GDNOutput:  # noqa: B008
    """Output in v's dtype, final states (sequences, HV, K, V) in fp32.

    Raises UnsupportedError for chunks above MAX_CHUNK_SIZE, for inputs that require a gradient,
    and, outside Triton's interpreter, for tensors that are not on a GPU.
    """
    refuse_unsupported(inputs)
    with torch.cuda.device(inputs.q.get_device()):  # no effect for -1, the CPU
        return six_stages(inputs, precision)


def six_stages(inputs: GDNInputs, precision: Precision) -> GDNOutput:
    """`run` without checks, on the current device."""
    inputs = normalised(inputs, precision)
    chunks = Chunks.of(inputs)
    options = config.unfused_options(inputs, precision)["chunk_state"]
    g_cumsum_log2 = stages.gate_cumsum(inputs, chunks)
    L = stages.scaled_dot_kkt(inputs, g_cumsum_log2, chunks, precision)
    A = stages.solve_tril(inputs, L, chunks, precision)
    del L  # w and u can reuse its memory
    w, u = stages.recompute_w_u(inputs, A, g_cumsum_log2, chunks, precision)
    del A
    prev_states, v_new, final_states = stages.chunk_state(
        inputs, inputs.k, w, u, g_cumsum_log2, chunks, precision, options
    )
    del w, u
    out = stages.chunk_output(inputs, prev_states, v_new, g_cumsum_log2, chunks, precision)
    return GDNOutput(out, final_states)


def normalised(inputs: GDNInputs, precision: Precision) -> GDNInputs:
    """The inputs with q and k normalised and in the operands' dtype, if the call asks for it;
    otherwise unchanged.  `use_qk_l2norm` stays as it is: the stages do not read it.
    """
    if not inputs.use_qk_l2norm:
        return inputs
    operand = operand_dtype(inputs.q.dtype, precision)
    q = stages.qk_l2norm(inputs.q, dtype=operand)
    k = stages.qk_l2norm(inputs.k, dtype=operand)
    return inputs.unchecked(**vars(inputs) | {"q": q, "k": k})


def plan(inputs: GDNInputs, precision: Precision = Precision()) -> Plan:  # noqa: B008
    """The launches, configurations and workspace of a call.  Allocates and launches nothing."""
    refuse_unsupported(inputs)
    return plan_stages(inputs, precision, config.unfused_options(inputs, precision))


def plan_stages(inputs: GDNInputs, precision: Precision, chosen: dict[str, dict[str, int]]) -> Plan:
    """The plan of the six stages of GDN, or of Kimi Delta Attention with its decay for each
    channel.

    chosen: block sizes and launch options, by stage.

    The workspace is the peak of memory, without the small table of chunks of packed sequences: some
    tensors live throughout, and others only from one stage to a later one.
    """
    batch, key_dim = inputs.q.shape[0], inputs.q.shape[3]
    heads, value_dim = inputs.v.shape[2:]
    itemsize = operand_dtype(inputs.q.dtype, precision).itemsize
    size = inputs.chunk_size
    launches = 6
    reasons = ["six stages, one launch each"]
    if inputs.cu_seqlens is not None:
        launches += 1
        reasons.append("one for the chunk table")
    if inputs.use_qk_l2norm:
        launches += 2
        reasons.append("two to normalise q and k")
    chunks = batch * inputs.chunk_count * heads  # of all heads
    # numbers in each tensor
    systems = chunks * size * size  # of L, and of A
    w = chunks * size * key_dim
    u = v_new = chunks * size * value_dim
    states = chunks * key_dim * value_dim
    cumulative_gates = chunks * size  # fp32
    # in the operands' dtype: q and k after normalisation
    throughout = inputs.q.numel() + inputs.k.numel() if inputs.use_qk_l2norm else 0
    if inputs.g.ndim == 4:
        w *= 2  # and k, decayed to the chunk's end
        cumulative_gates *= key_dim
        throughout += systems  # scores
    # L, in fp32, and A; or A, w and u; or w, u, v_new and the states
    most_bytes = max(
        (4 + itemsize) * systems, itemsize * (systems + w + u), itemsize * (w + u + v_new + states)
    )
    settings = {"chunk_size": size}
    for stage, options in chosen.items():
        settings |= {f"{stage}.{name.lower()}": value for name, value in options.items()}
    return Plan(
        variant="interpreter" if INTERPRETED else "portable",
        launches=launches,
        config=settings,
        workspace_bytes=most_bytes + 4 * cumulative_gates + itemsize * throughout,
        reason=", and ".join(reasons),
    )


def refuse_unsupported(inputs: GDNInputs) -> None:
    """Raises UnsupportedError for chunks above MAX_CHUNK_SIZE, inputs that require a gradient, and,
    outside of the interpreter, tensors that are not on a GPU.
    """
    if inputs.chunk_size > MAX_CHUNK_SIZE:
        raise UnsupportedError(
            f"unfused: chunk_size is at most {MAX_CHUNK_SIZE}, not {inputs.chunk_size}"
        )
    refuse_gradient("unfused", vars(inputs).values())
    refuse_device("unfused", inputs.q, oldest=(0, 0))


register(Implementation(operator="gdn", name="unfused", run=run, plan=plan))
