"""Kimi Delta Attention in two launches, in one launch on Hopper GPUs (`hopper/`), or token by token
with GDN's kernel (`../gdn/recurrent.py`).

This file has the two launches and the choice.  The first launch computes, for every chunk and value
head, everything that does not depend on the state.  The second one computes the output, and keeps
the state in registers from chunk to chunk.

G_i is the sum of g from the chunk's start to position i, as a binary log, and S the state that
enters the chunk.  q and k are normalised if the call asks for it.  The decays are inside the sums
over channels d:

    L_ij = beta_i sum_d k_id k_jd 2^(G_id - G_jd)  (i > j)
    P_ij = sum_d q_id k_jd 2^(G_id - G_jd)  (i >= j)
    A = (I + L)^-1                                              decayed_scores, solve_tril
    keys = k 2^G      queries = scale q 2^G                     gate_cumsum
    X = diag(beta) A^T (k 2^(G_end - G))                        state_factor
    W = scale P A diag(beta)                                    out_factor
    Y = V - keys S,   S' = diag(2^G_end) S + X^T Y,   out = queries S + W Y           second launch

From one chunk to the next, two products depend on each other: keys S and X^T Y.  A program of the
second launch computes a slice of V of one head of one sequence.  No program waits for another.

In:      q, k (B, T, H, K) | v (B, T, HV, V) | g (B, T, HV, K) | beta (B, T, HV)
         initial_state (sequences, HV, K, V) | cu_seqlens (sequences + 1)
Between: keys, queries, state_factor X (slots, HV, C, K padded to blocks) in the operands' dtype
         out_factor W (slots, HV, C, C) in the operands' dtype
         ends (slots, HV, K padded) fp32: 2^G_end
Out:     out (B, T, HV, V) in v's dtype | final_states (sequences, HV, K, V) fp32
Grids:   (slots * HV), heads fastest; then (sequences * HV * slices of V), slices fastest, then
         heads.  A slot is the index of a chunk among all chunks.
Oracle: `reference.py`.  Source: Kimi Team 2025 (arXiv:2510.26692); docs/kda-mathematics.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssdprof.kernels import registry
from ssdprof.kernels.choice import Fused, FusedCall, Variant, Work, tensor_function
from ssdprof.kernels.device import sm_count
from ssdprof.kernels.functions import DOT_PRECISION, decay_exp2, ptr_offset
from ssdprof.kernels.gdn.fused import RECURRENT, configured, equals_text, portable_work
from ssdprof.kernels.gdn.inputs import state_strides
from ssdprof.kernels.gdn.portable import (
    FactorShapes,
    first_slot,
    load_rows,
    operand_shapes,
    options_of,
    options_of_factors,
    piece_of_slot,
    store_state,
    take_state,
    two_launches,
    unit_lower_inverse,
    whole_sequence,
)
from ssdprof.kernels.gdn.unfused.stages import L2NORM_EPS
from ssdprof.kernels.inputs import Output, PreparedLaunch
from ssdprof.kernels.kda.hopper.launch import (
    WHOLE_CONFIG,
    KDAHopperConfig,
    flag_count,
    hopper_launch,
    hopper_unsupported,
    whole_is_faster,
    whole_launch,
    whole_unsupported,
    workspace,
)
from ssdprof.kernels.kda.inputs import KDAInputs, RawKDAInputs
from ssdprof.kernels.kda.unfused import (
    add_scores,
    cumulative_log_decays,
    keys_with_keys,
    queries_with_keys,
    score_products,
)
from ssdprof.kernels.launch import Launcher
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.tensors import strides_of, tile_strides

# stages of functions: `stalls/attribute.py`
STAGES = {"_kda_prep_kernel": "setup", "_kda_scan_kernel": "setup"}


@dataclass(frozen=True, kw_only=True)
class KDAPortableConfig:
    """The configuration of the two launches.

    chunk: positions per chunk: 16, 32 or 64.
    prep_block_k, block_k: block of K per matrix product in the first and in the second launch,
        powers of two of at least 16.
    block_v: slice of V per program of the second launch, a power of two of at least 16.
    num_warps, scan_stages: warps of the second launch, and stages of the pipeline that loads its
        chunks ahead.
    prep_warps, prep_registers: warps, and largest number of registers per thread, in the first
        launch; 0: no limit.
    reason: why the sizes were chosen, for reports.
    """

    chunk: int = 64
    prep_block_k: int = 64
    block_k: int = 64
    block_v: int = 32
    num_warps: int = 4
    scan_stages: int = 2
    prep_warps: int = 4
    prep_registers: int = 0
    reason: str = ""

    @classmethod
    def choose(cls, inputs: KDAInputs, *, batch_invariant: bool = False) -> KDAPortableConfig:
        """Chunks of 16 positions for fp32 inputs, and of 32 for others.  Slices of V are at most 32
        wide, or 64 for 16-bit inputs with K up to 128 if the second launch then still has a program
        for each multiprocessor.

        On an H200, 8 sequences of 4K tokens with 32 heads take 2.2 ms in the first launch and 0.55
        ms in the second with chunks of 32, and 4.1 ms and 0.49 ms with chunks of 64.

        batch_invariant: whether the choice must not depend on the number of sequences.
        """
        heads, value_dim = inputs.v.shape[2:]
        padded_k, padded_v = (
            max(16, triton.next_power_of_2(dim)) for dim in (inputs.q.shape[3], value_dim)
        )
        if inputs.q.dtype == torch.float32:
            return cls(
                chunk=16,
                prep_block_k=min(32, padded_k),
                block_k=min(32, padded_k),
                block_v=min(32, padded_v),
                reason="short chunks: a product holds each fp32 operand as two tf32 numbers",
            )
        config = cls(
            chunk=32,
            prep_block_k=min(64, padded_k),
            block_k=padded_k if padded_k <= 128 else 64,
            block_v=min(32, padded_v),
            prep_registers=128,
            scan_stages=3 if padded_k <= 128 else 2,
            reason="narrow slices of V, for more programs",
        )
        states = (1 if batch_invariant else inputs.sequences) * heads
        enough_programs = states * triton.cdiv(value_dim, 64) >= sm_count(inputs.q)
        # for K up to 128, so that a thread has at most 64 numbers of the state
        if enough_programs and padded_v >= 64 and padded_k <= 128:
            config = replace(
                config,
                block_k=min(64, padded_k),
                block_v=64,
                reason="slices of 64 of V: one for each multiprocessor",
            )
        return config


@triton.jit(do_not_specialize=["seqlen", "sequences"])
def _kda_prep_kernel(tensors, strides, seqlen, sequences, scale, S: tl.constexpr):
    """The first launch: computes keys, queries, W, X and 2^G_end of one chunk of one value head,
    CHUNK positions, from BLOCKS blocks of BLOCK_K channels.
    """
    (
        q_ptr,
        k_ptr,
        g_ptr,
        beta_ptr,
        cu_seqlens_ptr,
        keys_ptr,
        queries_ptr,
        state_factor_ptr,
        out_factor_ptr,
        ends_ptr,
    ) = tensors
    q_strides, k_strides, g_strides, beta_strides, cu_seqlens_strides = strides
    # stage setup: this program's chunk and head, and the addresses of its tensors
    slot, i_h = tl.program_id(0) // S.VALUE_HEADS, tl.program_id(0) % S.VALUE_HEADS
    _, i_b, i_c, begin, length = piece_of_slot(
        slot, cu_seqlens_ptr, cu_seqlens_strides, seqlen, sequences, S.CHUNK
    )
    t = i_c * S.CHUNK
    if t >= length:
        return
    BLOCKS: tl.constexpr = S.PADDED // S.BLOCK_K
    WHOLE: tl.constexpr = S.KEY_DIM % S.BLOCK_K == 0
    i_k = i_h // S.VALUES_PER_KEY  # the head of q and k
    o_t, o_k = tl.arange(0, S.CHUNK), tl.arange(0, S.BLOCK_K)
    o_row, m_t = o_t.to(S.OFFSET), o_t < length - t
    q_ptr = tl.multiple_of(q_ptr + ptr_offset((i_b, begin + t, i_k), q_strides[:3]), S.ALIGNMENT)
    k_ptr = tl.multiple_of(k_ptr + ptr_offset((i_b, begin + t, i_k), k_strides[:3]), S.ALIGNMENT)
    g_ptr = tl.multiple_of(g_ptr + ptr_offset((i_b, begin + t, i_h), g_strides[:3]), S.ALIGNMENT)
    beta_ptr += ptr_offset((i_b, begin + t, i_h), beta_strides)
    # index of the slot and head in the tensors that this launch writes
    head_slot = tl.program_id(0).to(tl.int64)

    # stage qk_l2norm: 1 / |q_i| and 1 / |k_i| (CHUNK), or 1
    k_factor = tl.full((S.CHUNK,), 1.0, tl.float32)
    q_factor = tl.full((S.CHUNK,), 1.0, tl.float32)
    if S.L2NORM:
        k_squares, q_squares = tl.zeros((S.CHUNK,), tl.float32), tl.zeros((S.CHUNK,), tl.float32)
        for n in tl.static_range(BLOCKS):
            o_n = n * S.BLOCK_K + o_k
            k = load_rows(k_ptr, k_strides, o_row, m_t, o_n, S.KEY_DIM, S.ALIGNED, WHOLE).to(
                tl.float32
            )
            q = load_rows(q_ptr, q_strides, o_row, m_t, o_n, S.KEY_DIM, S.ALIGNED, WHOLE).to(
                tl.float32
            )
            k_squares += tl.sum(k * k, axis=1)
            q_squares += tl.sum(q * q, axis=1)
        k_factor, q_factor = tl.rsqrt(k_squares + L2NORM_EPS), tl.rsqrt(q_squares + L2NORM_EPS)

    # for each block of channels: G, keys and queries (CHUNK, BLOCK_K), its part of the scores, and
    # the keys decayed to the chunk's end, which stay in registers
    scores = tl.zeros((S.CHUNK, S.CHUNK), tl.float32)
    at_end = ()
    for n in tl.static_range(BLOCKS):
        o_n = n * S.BLOCK_K + o_k
        # stage gate_cumsum
        G = cumulative_log_decays(
            load_rows(g_ptr, g_strides, o_row, m_t, o_n, S.KEY_DIM, S.ALIGNED, WHOLE)
        )
        G_end = tl.sum(tl.where(o_t[:, None] == S.CHUNK - 1, G, 0.0), axis=0)
        k = (
            load_rows(k_ptr, k_strides, o_row, m_t, o_n, S.KEY_DIM, S.ALIGNED, WHOLE).to(tl.float32)
            * k_factor[:, None]
        )
        q = (
            load_rows(q_ptr, q_strides, o_row, m_t, o_n, S.KEY_DIM, S.ALIGNED, WHOLE).to(tl.float32)
            * q_factor[:, None]
        )
        since_start = decay_exp2(G)
        tile = head_slot * (S.CHUNK * S.PADDED) + o_t[:, None] * S.PADDED + o_n[None, :]
        tl.store(keys_ptr + tile, (k * since_start).to(S.OPERAND))
        tl.store(queries_ptr + tile, (q * since_start * scale).to(S.OPERAND))
        tl.store(ends_ptr + head_slot * S.PADDED + o_n, decay_exp2(G_end))
        at_end = at_end + ((k * decay_exp2(G_end[None, :] - G)).to(S.SCORES),)
        # stage decayed_scores
        scores = add_scores(scores, q.to(S.SCORES), k.to(S.SCORES), G, S.PRECISION)

    # stage solve_tril: A = (I + L)^-1 (CHUNK, CHUNK)
    beta = tl.load(beta_ptr + o_t.to(tl.int64) * beta_strides[1], mask=m_t, other=0.0).to(
        tl.float32
    )
    A = unit_lower_inverse(keys_with_keys(scores) * beta[:, None], S.MERGE, S.MERGE_PRECISION).to(
        S.SCORES
    )

    # stage out_factor: W = scale P A diag(beta) (CHUNK, CHUNK)
    W = (
        tl.dot(queries_with_keys(scores).to(S.SCORES), A, input_precision=DOT_PRECISION)
        * (beta * scale)[None, :]
    )
    tile = head_slot * (S.CHUNK * S.CHUNK) + o_t[:, None] * S.CHUNK + o_t[None, :]
    tl.store(out_factor_ptr + tile, tl.where(o_t[:, None] >= o_t[None, :], W, 0.0).to(S.OPERAND))

    # stage state_factor: X = diag(beta) A^T (k 2^(G_end - G)) (CHUNK, BLOCK_K)
    for n in tl.static_range(BLOCKS):
        tile = (
            head_slot * (S.CHUNK * S.PADDED)
            + o_t[:, None] * S.PADDED
            + (n * S.BLOCK_K + o_k)[None, :]
        )
        X = tl.dot(tl.trans(A), at_end[n], input_precision=DOT_PRECISION) * beta[:, None]
        tl.store(state_factor_ptr + tile, X.to(S.OPERAND))


@triton.jit
def add_product(acc, left, rows, OPERAND: tl.constexpr):
    """acc (V, position) + left (V, n) times the transpose of rows (position, n).

    left: the transposed state with rows of keys or queries, or Y with rows of W.
    """
    return tl.dot(left.to(OPERAND), tl.trans(rows), acc, input_precision=DOT_PRECISION)


@triton.jit
def add_products(acc, state, row_ptrs, S: tl.constexpr):
    """acc (V, position) + the product of the state, in blocks (V, BLOCK_K), and keys or queries
    (position, K), whose rows begin at row_ptrs (position, 1).
    """
    for n in tl.static_range(len(state)):
        rows = tl.load(row_ptrs + (n * S.BLOCK_K + tl.arange(0, S.BLOCK_K))[None, :])
        acc = add_product(acc, state[n], rows, S.OPERAND)
    return acc


@triton.jit(do_not_specialize=["seqlen"])
def _kda_scan_kernel(tensors, strides, seqlen, S: tl.constexpr):
    """The second launch: passes the state of a slice of V of one head through the chunks of one
    sequence, and computes the outputs.

    The state is transposed, in blocks (BLOCK_V, BLOCK_K) of K; values and outputs are (BLOCK_V,
    CHUNK).
    """
    (
        v_ptr,
        keys_ptr,
        queries_ptr,
        state_factor_ptr,
        out_factor_ptr,
        ends_ptr,
        initial_states_ptr,
        cu_seqlens_ptr,
        out_ptr,
        final_states_ptr,
    ) = tensors
    v_strides, initial_states_strides, cu_seqlens_strides, out_strides, final_states_strides = (
        strides
    )
    # stage setup: this program's sequence, head and slice of V, and the state that enters
    SLICES: tl.constexpr = (S.VALUE_DIM + S.BLOCK_V - 1) // S.BLOCK_V
    BLOCKS: tl.constexpr = S.PADDED // S.BLOCK_K
    sequence, unit = (
        tl.program_id(0) // (S.VALUE_HEADS * SLICES),
        tl.program_id(0) % (S.VALUE_HEADS * SLICES),
    )
    i_h, first_v = unit // SLICES, (unit % SLICES) * S.BLOCK_V
    i_b, begin, length = whole_sequence(sequence, cu_seqlens_ptr, cu_seqlens_strides, seqlen)
    nchunks = tl.cdiv(length, S.CHUNK)
    # index of the first chunk's slot and the head in the tensors that the first launch wrote
    slot = first_slot(sequence, begin, seqlen, cu_seqlens_ptr is not None, S.CHUNK)
    first_head_slot = slot.to(tl.int64) * S.VALUE_HEADS + i_h

    o_c = tl.arange(0, S.CHUNK)
    o_k, o_v = tl.arange(0, S.BLOCK_K), tl.arange(0, S.BLOCK_V).to(S.OFFSET)
    # indices of tiles (BLOCK_V, BLOCK_K) of the state, and (BLOCK_V, CHUNK) of v and out
    state_k, tile_t, state_v = o_k.to(S.OFFSET)[None, :], o_c.to(S.OFFSET)[None, :], o_v[:, None]
    state = ()
    for _ in tl.static_range(BLOCKS):
        state = state + (tl.zeros((S.BLOCK_V, S.BLOCK_K), tl.float32),)
    # true everywhere if V is a multiple of BLOCK_V, so that no mask is computed
    m_v = (state_v < S.VALUE_DIM - first_v) | (S.VALUE_DIM % S.BLOCK_V == 0)
    v_ptr += ptr_offset((i_b, begin, i_h, first_v), v_strides)
    out_ptr += ptr_offset((i_b, begin, i_h, first_v), out_strides)
    v_tile = state_v * v_strides[3] + tile_t * v_strides[1]
    out_tile = state_v * out_strides[3] + tile_t * out_strides[1]
    if initial_states_ptr is not None:
        initial_ptr = initial_states_ptr + ptr_offset(
            (sequence, i_h, 0, first_v), initial_states_strides
        )
        state = take_state(
            initial_ptr, state_k, state_v, initial_states_strides, m_v, S.KEY_DIM, S.BLOCK_K
        )

    # stage chunk_state: each chunk's v and W, Y = V - keys S, the next state, and the output
    for i_c in tl.range(0, nchunks, num_stages=S.SCAN_STAGES):
        t = tl.cast(i_c, tl.int64) * S.CHUNK
        head_slot = first_head_slot + tl.cast(i_c, tl.int64) * S.VALUE_HEADS
        # offsets of the rows of keys, queries and X of the chunk, (CHUNK, 1)
        rows = head_slot * (S.CHUNK * S.PADDED) + o_c[:, None] * S.PADDED
        m_tile = m_v
        if not S.ALIGNED:
            m_tile = m_v & (tile_t < length - i_c * S.CHUNK)
        v_rows_ptr = tl.multiple_of(v_ptr + t * v_strides[1], S.ALIGNMENT)
        v = tl.load(v_rows_ptr + v_tile, mask=m_tile, other=0.0).to(tl.float32)
        W = tl.load(
            out_factor_ptr + head_slot * (S.CHUNK * S.CHUNK) + o_c[:, None] * S.CHUNK + o_c[None, :]
        )
        # stage chunk_state.residual
        KS, out = tl.zeros_like(v), tl.zeros_like(v)
        KS = add_products(KS, state, keys_ptr + rows, S)
        out = add_products(out, state, queries_ptr + rows, S)
        Y = (v - KS).to(S.OPERAND)
        # stage chunk_state.update
        next_state = ()
        for n in tl.static_range(BLOCKS):
            X = tl.load(state_factor_ptr + rows + (n * S.BLOCK_K + o_k)[None, :])
            end = tl.load(ends_ptr + head_slot * S.PADDED + n * S.BLOCK_K + state_k)
            next_state = next_state + (tl.dot(Y, X, state[n] * end, input_precision=DOT_PRECISION),)
        state = next_state
        # stage chunk_output
        out = add_product(out, Y, W, S.OPERAND)
        tl.store(
            out_ptr + t * out_strides[1] + out_tile, out.to(out_ptr.dtype.element_ty), mask=m_tile
        )

    # stage setup.store
    final_ptr = final_states_ptr + ptr_offset((sequence, i_h, 0, first_v), final_states_strides)
    store_state(final_ptr, state, state_k, state_v, final_states_strides, m_v, S.KEY_DIM, S.BLOCK_K)


def factor_shapes(
    inputs: KDAInputs, precision: Precision, config: KDAPortableConfig
) -> FactorShapes:
    """Shape and dtype of each tensor that the first launch writes for the second, in the order of
    the kernels' arguments.
    """
    widest = max(config.prep_block_k, config.block_k)
    operands = operand_shapes(inputs, precision, config.chunk, widest, key_tiles=3)
    (slots, heads, _, padded), _ = operands[0]  # of keys
    return [*operands, ((slots, heads, padded), torch.float32)]


def portable_launch(
    inputs: KDAInputs, precision: Precision, config: KDAPortableConfig, *, state_v_first: bool
) -> PreparedLaunch:
    """Both launches, prepared for all inputs of one signature.

    state_v_first: whether final states are (sequences, HV, V, K) in memory.
    """
    length, heads, value_dim = inputs.v.shape[1:]
    shapes = factor_shapes(inputs, precision, config)
    final_strides = state_strides(*inputs.states_shape[1:], v_first=state_v_first)
    (slots, *_, padded), operand = shapes[0]  # of keys
    tiled = inputs.q, inputs.k, inputs.g, inputs.v
    common = options_of(inputs, operand, config.chunk, tiled, final_strides) | dict(PADDED=padded)
    prep = portable_prep(inputs, operand, config, common)
    strides = (
        tile_strides(inputs.v),
        strides_of(inputs.initial_state),
        strides_of(inputs.cu_seqlens),
        tile_strides(torch.empty(inputs.v.shape, device="meta")),  # those of out
        final_strides,
    )
    scan = Launcher(
        _kda_scan_kernel,
        (strides, length),
        common
        | dict(
            VALUE_DIM=value_dim,
            BLOCK_K=config.block_k,
            BLOCK_V=config.block_v,
            SCAN_STAGES=config.scan_stages,
            num_warps=config.num_warps,
        ),
    )
    slices = triton.cdiv(value_dim, config.block_v)
    programs = slots * heads, inputs.sequences * slices * heads
    return two_launches(inputs, shapes, final_strides, (prep, scan), programs, ("v",))


def portable_prep(
    inputs: KDAInputs, operand: torch.dtype, config: KDAPortableConfig, common: dict[str, object]
) -> Launcher:
    """The first launch.  common: the compile-time arguments of both launches."""
    strides = (
        *map(tile_strides, (inputs.q, inputs.k, inputs.g)),
        inputs.beta.stride(),
        strides_of(inputs.cu_seqlens) or (0,),
    )
    return Launcher(
        _kda_prep_kernel,
        (strides, inputs.length, inputs.sequences, inputs.scale_or_default),
        common
        | options_of_factors(inputs, operand, config.prep_warps, config.prep_registers)
        | dict(
            VALUES_PER_KEY=inputs.values_per_key,
            BLOCK_K=config.prep_block_k,
            num_stages=1,
            **score_products(operand, is_normalised=bool(inputs.use_qk_l2norm)),
        ),
    )


# --- the choice between kernels


def _hopper_work(call: FusedCall, config: KDAHopperConfig) -> Work:
    """`Variant.work` of the kernel that scans slabs."""
    reason = (
        "one launch: programs that prepare chunks, and programs that scan those of earlier slabs; "
        f"{config.reason}{equals_text(call)}"
    )
    nbytes, _ = workspace(call.inputs)
    return 1, nbytes + 4 * flag_count(call.inputs, config), reason


def _whole_unsupported(call: FusedCall) -> str:
    """`Variant.unsupported` of the kernel for whole sequences.

    Whether it is faster depends on the number of sequences, and its bits differ from those of the
    kernel that scans slabs.  A call with `batch_invariant` therefore never runs it.
    """
    if call.batch_invariant:
        return "batch_invariant"
    if not whole_is_faster(call.inputs, sm_count(call.inputs.q)):
        return "slower than slabs"
    return whole_unsupported(call.inputs)


def _whole_work(call: FusedCall, _config: Any) -> Work:
    """`Variant.work` of the kernel for whole sequences."""
    reason = "one launch: programs for whole sequences and heads fill the GPU"
    return 1, 0, reason + equals_text(call)


def configured_launch(
    inputs: KDAInputs,
    precision: Precision,
    config: KDAPortableConfig | KDAHopperConfig,
    *,
    state_v_first: bool,
) -> PreparedLaunch:
    """The prepared launch of the kernel to which the configuration belongs."""
    if isinstance(config, KDAHopperConfig):
        return hopper_launch(inputs, config, state_v_first=state_v_first)
    return portable_launch(inputs, precision, config, state_v_first=state_v_first)


def _prepare_with_log_gates(variant: Variant, call: FusedCall, config: Any) -> PreparedLaunch:
    """`Variant.prepare` of a kernel that takes no raw gates: each call computes its log gates
    first.
    """
    launch = variant.prepare(replace(call, inputs=call.inputs.with_log_gates()), config)
    return lambda inputs: launch(inputs.with_log_gates())


PORTABLE = Variant(
    name="portable",
    configure=partial(configured, KDAPortableConfig.choose, "portable"),
    prepare=lambda call, config: configured_launch(
        call.inputs, call.precision, config, state_v_first=call.state_v_first
    ),
    work=partial(portable_work, shapes_of=factor_shapes),
)
HOPPER = replace(
    PORTABLE,
    name="hopper",
    unsupported=lambda call: hopper_unsupported(call.inputs),
    configure=partial(configured, KDAHopperConfig.choose, "hopper"),
    work=_hopper_work,
)
WHOLE_SEQUENCES = Variant(
    name="hopper, whole",
    unsupported=_whole_unsupported,
    configure=lambda _call: WHOLE_CONFIG,
    prepare=lambda call, config: whole_launch(
        call.inputs, config, state_v_first=call.state_v_first
    ),
    work=_whole_work,
)
FUSED = Fused(
    "fused",
    (
        replace(RECURRENT, prepare=partial(_prepare_with_log_gates, RECURRENT)),
        WHOLE_SEQUENCES,
        HOPPER,
        replace(PORTABLE, prepare=partial(_prepare_with_log_gates, PORTABLE)),
    ),
    rows=("q", "k", "g", "v"),
)
_function = tensor_function(FUSED, RawKDAInputs)
run, plan = FUSED.run, FUSED.plan
registry.register(registry.Implementation(operator="kda", name="fused", run=run, plan=plan))


# --- as a function of tensors, for use without the rest of ssdprof


def kda_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm: bool = False,
    cu_seqlens: Tensor | None = None,
    precision: Precision = Precision(),  # noqa: B008
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    batch_invariant: bool = False,
) -> Output:
    """Kimi Delta Attention, forward only.

        S~_t  = diag(exp(g_t)) S_{t-1}
        S_t   = S~_t + k_t (beta_t (v_t - S~_t^T k_t))^T
        out_t = S_t^T (scale q_t)

    q, k: (B, T, H, K)    v: (B, T, HV, V), HV a multiple of H    beta: (B, T, HV)
    g: (B, T, HV, K), natural logarithm of the decay of each channel.  A g above 0 counts as 0.
    A_log (HV), with or without dt_bias (HV, K) and lower_bound: g is the output of the model's
        projection, and its gates are those of `RawKDAInputs`; kernels for Hopper GPUs compute them.
    initial_state: (sequences, HV, K, V), or (sequences, HV, V, K) if state_v_first.
    batch_invariant: as in `gdn_fused`.  Without it, one of two kernels runs on Hopper GPUs; the
        choice depends on the sizes, and their bits differ.

    All other arguments, the result, its reproducibility and the errors are those of `gdn_fused`.

    Source: Kimi Team 2025 (arXiv:2510.26692).
    """
    if A_log is None:
        if dt_bias is not None or lower_bound is not None:
            raise ValueError("dt_bias and lower_bound need A_log")
    else:
        if dt_bias is None:
            dt_bias = torch.zeros(g.shape[2:], device=g.device)
        A_log, dt_bias = A_log.contiguous(), dt_bias.contiguous()
    arguments = dict(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        use_qk_l2norm=use_qk_l2norm,
        cu_seqlens=cu_seqlens,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
    )
    return _function(
        arguments, precision, state_v_first=state_v_first, batch_invariant=batch_invariant
    )
