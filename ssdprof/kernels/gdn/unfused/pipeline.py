"""GDN in six launches, one per stage of the algorithm: the baseline.

`gdn_unfused(...)` takes tensors; the registered implementation, `run`, takes `GDNInputs`.  By
default, dtypes are those of the unfused Triton kernels of flash-linear-attention (`config.py`).
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

MAX_CHUNK_SIZE = 64


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
    """The gated delta rule in six launches, forward only.  Arguments and result are those of
    `GDNInputs`.

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
    """Output in v's dtype, final states in fp32.

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
    """The inputs with q and k as they enter products."""
    if not inputs.use_qk_l2norm:
        return inputs
    operand = operand_dtype(inputs.q.dtype, precision)
    unit = {name: stages.qk_l2norm(getattr(inputs, name), dtype=operand) for name in ("q", "k")}
    return inputs.unchecked(**vars(inputs) | unit)


def plan(inputs: GDNInputs, precision: Precision = Precision()) -> Plan:  # noqa: B008
    """The launches, configurations and workspace of a call.  Allocates and launches nothing."""
    refuse_unsupported(inputs)
    return plan_stages(inputs, precision, config.unfused_options(inputs, precision))


def plan_stages(inputs: GDNInputs, precision: Precision, chosen: dict[str, dict[str, int]]) -> Plan:
    """The plan of six stages with these options, also with a decay for each channel."""
    batch, length, key_heads, key_dim = inputs.q.shape
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
    chunks = batch * inputs.chunk_count * heads
    keys = key_dim
    gates = 1
    squares = chunks * size * size
    unit = 2 * batch * length * key_heads * key_dim if inputs.use_qk_l2norm else 0
    if inputs.g.ndim == 4:  # also k decayed to the chunk's end, gates of channels, scores
        keys = 2 * key_dim
        gates = key_dim
        unit = unit + squares
    w_u = chunks * size * (keys + value_dim)
    v_new = chunks * size * value_dim
    states = chunks * key_dim * value_dim
    # peak memory: L and A; or A, w and u; or w, u, v_new and the states
    most = max(
        (4 + itemsize) * squares, itemsize * (squares + w_u), itemsize * (w_u + v_new + states)
    )
    return Plan(
        variant="interpreter" if INTERPRETED else "portable",
        launches=launches,
        config={"chunk_size": size}
        | {
            f"{stage}.{key.lower()}": value
            for stage, options in chosen.items()
            for key, value in options.items()
        },
        workspace_bytes=most + 4 * chunks * size * gates + itemsize * unit,
        reason=", and ".join(reasons),
    )


def refuse_unsupported(inputs: GDNInputs) -> None:
    """UnsupportedError for long chunks, inputs that require a gradient, and, outside the
    interpreter, no GPU.
    """
    if inputs.chunk_size > MAX_CHUNK_SIZE:
        raise UnsupportedError(
            f"unfused: chunk_size is at most {MAX_CHUNK_SIZE}, not {inputs.chunk_size}"
        )
    refuse_gradient("unfused", vars(inputs).values())
    refuse_device("unfused", inputs.q, oldest=(0, 0))


register(Implementation(operator="gdn", name="unfused", run=run, plan=plan))
