# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The state after each chunk, by an associative scan over tiles of chunks.

    (a, s) then (b, t)  ->  (a b, b s + t)        with decays a, b and summands s, t

The state that enters a tile is decayed and added to the tile's scan; the last state of a tile enters the next one.
The order of sums differs from the recurrence's: the bits are the same in every call, but not those of a loop.

In:   states (b, c, h, k, v) | decay (b, c, h, k) fp32
Out:  out (b, c, h, k, v), of the dtype of states
Grid: (b * h * kv-blocks).  One program owns a block of one head's state and walks over tiles of BLOCK_C chunks.
Oracle: `reference.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inter_chunk.inputs import InterChunkInputs
from inter_chunk.loop import metadata
from ssdprof.kernels.functions import ptr_offset
from ssdprof.kernels.launch import launch


@dataclass(frozen=True, kw_only=True)
class AssociativeConfig:
    """block: elements of a state per program; block_c: chunks per scan.  Threads hold decays and sums in fp32."""

    block: int = 64
    block_c: int = 32
    num_warps: int = 4


@triton.jit
def _then(first_decay, first_added, second_decay, second_added):
    return first_decay * second_decay, first_added * second_decay + second_added


@triton.jit(launch_metadata=metadata, do_not_specialize=["nheads", "nchunks"])
def _associative_kernel(
    states_ptr, decay_ptr, out_ptr,
    states_strides, decay_strides, out_strides,
    nheads, nchunks,
    K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # --- the program's part of a state
    BLOCKS: tl.constexpr = (K * V + BLOCK - 1) // BLOCK
    i_bh = tl.program_id(0) // BLOCKS
    i_b, i_h = i_bh // nheads, i_bh % nheads
    o_kv = ((tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK))[None, :]
    o_k, o_v = o_kv // V, o_kv % V
    o_tile = tl.arange(0, BLOCK_C)[:, None]

    # --- tile after tile; chunks past the end add nothing and decay nothing
    entering = tl.zeros((1, BLOCK), dtype=tl.float32)
    for first in range(0, nchunks, BLOCK_C):
        o_c = first + o_tile
        m = (o_c < nchunks) & (o_kv < K * V)
        b_states = tl.load(states_ptr + ptr_offset((i_b, o_c, i_h, o_k, o_v), states_strides), mask=m, other=0.0)
        b_decay = tl.load(decay_ptr + ptr_offset((i_b, o_c, i_h, o_k), decay_strides), mask=m, other=1.0)
        decays, added = tl.associative_scan((b_decay, b_states.to(tl.float32)), 0, _then)
        state = entering * decays + added  # [BLOCK_C, BLOCK]
        stored = state.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + ptr_offset((i_b, o_c, i_h, o_k, o_v), out_strides), stored, mask=m)
        entering = tl.sum(tl.where(o_tile == BLOCK_C - 1, state, 0.0), 0)[None, :]


def associative(inputs: InterChunkInputs, *, config: AssociativeConfig | None = None) -> torch.Tensor:
    """Returns out."""
    config = config or AssociativeConfig()
    if inputs.rank:
        raise ValueError("associative: diagonal transitions only")
    batch, nchunks, nheads, k, v = inputs.states.shape
    out = torch.empty_like(inputs.states)
    launch(
        _associative_kernel,
        batch * nheads * triton.cdiv(k * v, config.block),
        (inputs.states, inputs.decay, out),
        (inputs.states.stride(), inputs.decay.stride(), out.stride(), nheads, nchunks),
        K=k, V=v, BLOCK=config.block, BLOCK_C=min(config.block_c, triton.next_power_of_2(nchunks)),
        num_warps=config.num_warps,
    )  # fmt: skip
    return out
