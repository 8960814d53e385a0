"""SSD in one launch: the public function, the torch operator and the choice between kernels.

Decode steps, which are sequences of one position, run the recurrent kernel unless they are packed.
`ssd_fused(...)` takes tensors, for use without the rest of ssdprof; the registered implementation
takes `SSDInputs`.
"""

from torch import Tensor

from ssdprof.kernels.choice import Fused, FusedCall, Variant, Work, tensor_function
from ssdprof.kernels.device import capability, sm_count
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, UnsupportedError, override, register
from ssdprof.kernels.ssd import portable
from ssdprof.kernels.ssd.config import SSDPortableConfig, call_key
from ssdprof.kernels.ssd.hopper import config as hopper_config
from ssdprof.kernels.ssd.hopper import launch as hopper
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.launch import Buffers, nbytes
from ssdprof.kernels.ssd.recurrent import blocks_of, recurrent_launch

MAX_DSTATE = 256  # the largest N of every kernel


def ssd_fused(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int = 256,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_states: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    precision: Precision = Precision(),  # noqa: B008
    batch_invariant: bool = False,
) -> SSDOutput:
    """The SSD (Mamba-2) operator, forward only.

        dt_t = clamp(softplus(dt_t + dt_bias), *dt_limit)
        h_t  = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T
        out_t = (h_t C_t + D x_t) * silu(z_t)

    Softplus is applied only with dt_softplus; dt_bias, D and z are optional.

    x, z: (b, l, h, p)    dt: (b, l, h)    A, dt_bias: (h)    B, C: (b, l, g, n)    D: (h) or (h, p)
    initial_states: (b, h, p, n), or (sequences, h, p, n) if packed
    cu_seqlens: (sequences + 1) int32 or int64, non-decreasing, from 0 to l, for sequences packed
        along l; then b = 1.  Empty sequences are allowed.  The host does not read the values, so
        wrong values are not rejected: positions outside all sequences are not written, and for
        sequences that overlap or end past l, memory outside of the tensors may be read and written.
    x, B, C and z share a dtype: fp32, fp16 or bf16.  Any strides are allowed.
    A must be at most 0.  This is not checked; a positive value counts as 0, no decay.
    chunk_size has no effect on the result, because this kernel chooses its own chunks.
    precision: for fp32 inputs, "relaxed" rounds the operands of products to tf32, and keeps
        intermediates in fp32.  One position per sequence is computed in fp32 at every precision,
        unless sequences are packed.
    batch_invariant: a sequence's result is bitwise the same in a batch of any size.  Without it,
        the Hopper kernel divides sequences depending on their number, or not at all, which is
        faster for large batches of short ones.

    Returns out (b, l, h, p) in x's dtype and final_states (sequences, h, p, n) in fp32.  They are
    bitwise the same in every call, and do not depend on the contents of other sequences in the
    batch or pack.  The result of a packed sequence does not depend on the lengths of others either.
    The call does not synchronise with the host.  It may be captured in a CUDA graph, and called
    under torch.compile(fullgraph=True).

    Raises ValueError for inputs that do not fit together, and UnsupportedError for n above
    MAX_DSTATE, for tensors that require a gradient, for a GPU of compute capability below 8.0 and,
    outside Triton's interpreter, for tensors that are not on a GPU.
    Source: Dao and Gu 2024 (arXiv:2405.21060), section 6.
    """
    arguments = dict(
        x=x,
        dt=dt,
        A=A,
        B=B,
        C=C,
        chunk_size=chunk_size,
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        initial_states=initial_states,
        cu_seqlens=cu_seqlens,
    )
    return _function(arguments, precision, batch_invariant=batch_invariant)


# --- the kernels


def _recurrent_unsupported(call: FusedCall) -> str:
    """Why the recurrent kernel should not run a call; "" if it should: for one position of each
    sequence, not packed.

    For one position it is the fastest on an H200, whatever the number of sequences.  Packed
    sequences run a chunked kernel, because the choice of the kernel affects the bits of a
    sequence's result, and must not depend on the lengths of other sequences.
    """
    is_step = call.inputs.cu_seqlens is None and call.inputs.x.shape[1] == 1
    return "" if is_step else "longer or packed sequences"


def hopper_cut(call: FusedCall) -> SSDHopperConfig:
    """The division of the call into programs on a Hopper GPU: the tuned or the committed one.
    Packed sequences always have the committed one.
    """
    inputs, batch_invariant = call.inputs, call.batch_invariant
    tuned = None
    if inputs.cu_seqlens is None:
        tuned = override(
            call_key(inputs, call.precision, "hopper", batch_invariant=batch_invariant)
        )
    return tuned or SSDHopperConfig.choose(
        inputs, sm_count(inputs.x), batch_invariant=batch_invariant
    )


def portable_config(call: FusedCall) -> SSDPortableConfig:
    """The tuned configuration of the portable kernel, or the committed one, for the sizes of the
    call.
    """
    tuned: SSDPortableConfig | None = override(call_key(call.inputs, call.precision, "portable"))
    if tuned:
        return tuned.fitted(call.inputs)
    return committed_portable(call.inputs, call.precision)


def committed_portable(inputs: SSDInputs, precision: Precision) -> SSDPortableConfig:
    """The configuration of the portable kernel without tuning, for the inputs' GPU."""
    # the interpreter, which has no limit of registers, uses Hopper's configuration
    gpu_capability = capability(inputs.x) if inputs.x.is_cuda else (9, 0)
    return SSDPortableConfig.choose(inputs, gpu_capability, precision)


def _work(buffers: Buffers, *reasons: str, scores_first: bool = False) -> Work:
    """The number of launches, the bytes of the workspace, and the reason of a plan, which begins
    with a phrase for each launch.

    scores_first: a launch of its own computes C B^T
    """
    phrases = ["one launch"]
    if scores_first:
        phrases.append("one for C B^T")
    if "sync" in buffers:
        phrases.append("one to zero the flags")
    return len(phrases), nbytes(buffers), "; ".join([", and ".join(phrases), *reasons])


RECURRENT = Variant(
    name="recurrent",
    unsupported=_recurrent_unsupported,
    configure=lambda call: blocks_of(call.inputs),
    prepare=lambda call, _blocks: recurrent_launch(call.inputs),
    work=lambda call, _blocks: (
        1,
        0,
        "one launch, position by position: sequences are one position long"
        + call.precision.equals_exact_text,
    ),
)
HOPPER = Variant(
    name="hopper",
    unsupported=lambda call: hopper_config.unsupported(call.inputs),
    configure=hopper_cut,
    prepare=lambda call, config: hopper.hopper_launch(call.inputs, call.precision, config),
    work=lambda call, config: _work(
        hopper.buffer_sizes(call.inputs, call.precision, config), config.reason
    ),
)
PORTABLE = Variant(
    name="portable",
    configure=portable_config,
    prepare=lambda call, config: portable.portable_launch(call.inputs, call.precision, config),
    work=lambda call, config: _work(
        portable.buffer_sizes(call.inputs, call.precision, config),
        config.reason,
        f"the Hopper kernel does not take {hopper_config.unsupported(call.inputs)}",
        scores_first=portable.scores_shape(call.inputs, config) is not None,
    ),
)


def _refuse(inputs: SSDInputs) -> None:
    """Raises UnsupportedError for inputs that no variant supports."""
    if inputs.B.shape[3] > MAX_DSTATE:
        raise UnsupportedError(f"fused: dstate is at most {MAX_DSTATE}, not {inputs.B.shape[3]}")


FUSED: Fused = Fused("fused", (RECURRENT, HOPPER, PORTABLE), rows=("x", "B", "C"), refuse=_refuse)
_function = tensor_function(FUSED, SSDInputs)
run, plan = FUSED.run, FUSED.plan
register(Implementation(operator="ssd", name="fused", run=run, plan=plan))
