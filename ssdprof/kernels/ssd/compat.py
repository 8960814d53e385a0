"""The fused kernel with the signature of mamba_ssm's `mamba_chunk_scan_combined`, to be used by
changing one import.
"""

import torch
from torch import Tensor

from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import UnsupportedError
from ssdprof.kernels.ssd.fused import ssd_fused


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """out (b, l, h, p), or (out, final_states (b, h, p, n) fp32) if return_final_states.  Shapes as
    in `ssd_fused`.

    A must be at most 0.  This is not checked; a positive value counts as 0, no decay.
    state_dtype: None means fp32, which costs nothing here; mamba_ssm uses C's dtype.
    chunk_size: has no effect on the result.

    Raises what `ssd_fused` raises, and UnsupportedError for seq_idx, cu_seqlens and
    return_varlen_states, which describe packed sequences in mamba_ssm.  For these, call
    `ssd_fused(cu_seqlens=...)`, with one initial and one final state per sequence.
    """
    arguments_for_packs = {
        "seq_idx": seq_idx is not None,
        "cu_seqlens": cu_seqlens is not None,
        "return_varlen_states": return_varlen_states,
    }
    for name, is_given in arguments_for_packs.items():
        if is_given:
            raise UnsupportedError(
                f"fused: no {name}; for packed sequences call ssd_fused(..., cu_seqlens=...)"
            )
    out, final_states = ssd_fused(
        x,
        dt,
        A,
        B,
        C,
        chunk_size=chunk_size,
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        initial_states=initial_states,
        precision=Precision(state_dtype=state_dtype or torch.float32),
    )
    return (out, final_states) if return_final_states else out
