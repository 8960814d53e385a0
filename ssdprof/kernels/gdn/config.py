"""The configurations of the portable and of the unfused GDN kernels, and the dtypes of the unfused
ones.

The unfused kernels' block sizes and warps for 16-bit operands were the fastest of a sweep on an
H200, with 16 key heads, 32 value heads, K = V = 128, and one sequence of 8K and of 64K positions.
Other dimensions use the same values, limited to the dimension, where no comment below gives others.

Dtypes of the unfused kernels:

    what                                            exact                 relaxed
    system: k k^T, beta, decays, and their product  fp32                  fp32
    inverse: blocks of 16 rows                      fp32                  fp32
    inverse: products between these blocks          tf32; fp32: tf32x3    tf32
    operands: q, k (normalised, if the call asks),
        inverse, w, u, v_new, state, scores         inputs' dtype         16 bit
    decays, beta times decay, q k^T, and their
        products before they become an operand      fp32                  16 bit
    sums                                            fp32                  fp32
    state from chunk to chunk                       `state_dtype`         `state_dtype`

16 bit is the inputs' dtype, and bfloat16 for fp32 inputs.  fp32 operands are multiplied as two tf32
numbers each.  The exact column has the dtypes of the Triton kernels of flash-linear-attention,
which also store w, u, v_new and the states that enter chunks in the operands' dtype.  The system is
in fp32 at every precision, except that k is rounded as an operand, because collinear keys amplify
its errors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from ssdprof.kernels.device import gpu_name
from ssdprof.kernels.functions import TL_DTYPE
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import CallKey, key_of_calls

# positions: calls whose sequences have equally many chunks of this size share a tuned configuration
CALL_CHUNK = 64
_MIN_SEGMENT = 1024  # positions: a shorter segment would spend most of its time on the warm-up
# from this many chunks of CALL_CHUNK positions per multiprocessor, counted for each head and slice
# of 128 of V, wide slices of V are faster (H200)
_ENOUGH_CHUNKS = 16
# most bytes of shared memory of a program, by compute capability (CUDA's programming guide); other
# GPUs from capability 8.0 on, the oldest that run the portable kernel, have at least
# _LEAST_SHARED_BYTES
_SHARED_BYTES = {(8, 0): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10}
_LEAST_SHARED_BYTES = 99 << 10
# rows of the blocks that are inverted by substitution: the fewest rows of an operand of a product
LEAF = 16
# multiprocessors of an H200 or an H100 SXM.  With at most one program on each, the latency of a
# program determines the time of the launch.
_MULTIPROCESSORS = 132


def call_key(
    inputs: GDNInputs,
    precision: Precision,
    kernel: str = "portable",
    *,
    batch_invariant: bool = False,
) -> CallKey:
    """The key of the calls that share a tuned configuration, for the portable kernels of GDN and
    for those of Kimi Delta Attention.

    Calls with equal keys have equal sizes, dtypes of q, and numbers of sequences and of chunks of
    CALL_CHUNK positions.  So the committed rule gives them the same tiles; for fp32 inputs its
    segments may differ, because they consist of shorter chunks.  A batch-invariant call has the key
    of one sequence of its length.  Packed sequences keep the committed configuration and need no
    key.

    kernel: the name of the kernel that is configured, such as "portable".
    """
    return key_of_calls(
        gpu=gpu_name(inputs.q),
        operator=inputs.operator,
        kernel=kernel,
        dtype=inputs.q.dtype,
        exact=precision.exact,
        l2norm=bool(inputs.use_qk_l2norm),
        sequences=1 if batch_invariant else inputs.sequences,
        nchunks=-(-inputs.length // CALL_CHUNK),
        **inputs.sizes,
    )


# --- dtypes


def operand_dtype(dtype: torch.dtype, precision: Precision) -> torch.dtype:
    """The dtype of operands of matrix products, except those inside the inverse, and of the
    workspace except gates and system.

    dtype: that of the inputs.
    """
    return dtype if precision.exact else precision.intermediate_dtype(dtype)


def intermediate(dtype: torch.dtype, precision: Precision) -> tl.dtype:
    """Triton's dtype of decays, of q k^T and of their products.  dtype: that of the inputs."""
    return TL_DTYPE[precision.intermediate_dtype(dtype)]


def inverse_products(operand: torch.dtype) -> str:
    """`input_precision` of the products with which the inverse joins its fp32 blocks.

    operand: dtype of operands (`operand_dtype`).  For 16 bit the result is "tf32", whose errors are
        at most those of 16-bit operands.
    """
    return "tf32x3" if operand == torch.float32 else "tf32"


# --- the portable kernel


@dataclass(frozen=True, kw_only=True)
class GDNPortableConfig:
    """The division of a call into programs, and the tiles of both launches.

    chunk: positions per chunk: 16, 32, 64 or 128
    segment: chunks per segment; 0: one segment per sequence
    block_k: block of K per matrix product, in both launches, a power of two of at least 16
    block_v: slice of V per program, a power of two of at least 16
    v_rows: the state is held as (V, K), a register operand of both products; otherwise as (K, V)
    num_warps: warps per program of the second launch
    scan_stages: stages of the loop of the second launch: chunks that are being loaded or used
    factors_warps: warps per program of the first launch
    factors_registers: most registers per thread of the first launch; 0: no limit
    reason: for reports
    """

    chunk: int = 64
    segment: int = 0
    block_k: int = 64
    block_v: int = 128
    v_rows: bool = True
    num_warps: int = 8
    scan_stages: int = 3
    factors_warps: int = 4
    factors_registers: int = 0
    reason: str = ""

    @classmethod
    def choose(
        cls,
        inputs: GDNInputs,
        capability: tuple[int, int],
        sm_count: int,
        *,
        batch_invariant: bool = False,
    ) -> GDNPortableConfig:
        """Narrow slices of V, unless there are enough chunks for wide ones; then segments, if there
        are at least twice as many multiprocessors as programs with whole sequences.

        The choice depends on shapes, dtype and GPU, and on the number of sequences unless the call
        is batch invariant.

        The host does not know the lengths of packed sequences.  So the segments of a pack are as
        long as if each sequence had all positions; in a batch-invariant call it is not cut.
        """
        heads, value_dim = inputs.v.shape[2:]
        sequences = 1 if batch_invariant else inputs.sequences
        rows = 1 if batch_invariant else inputs.v.shape[0]  # a pack is one row
        uncut = batch_invariant and inputs.cu_seqlens is not None
        # Chunks of one row.  For a pack that is not cut, 0 gives the tiles of a short sequence: the
        # length of the pack depends on its other sequences.
        chunks = 0 if uncut else triton.cdiv(inputs.length, CALL_CHUNK)
        wide_slices = heads * triton.cdiv(value_dim, 128)
        many_chunks = rows * chunks * wide_slices / sm_count >= _ENOUGH_CHUNKS
        config = cls._tiles(inputs, capability, many_chunks=many_chunks)
        programs = sequences * heads * triton.cdiv(value_dim, config.block_v)
        return replace(
            config,
            segment=0 if uncut else config.segment_for(inputs, sm_count // programs),
            scan_stages=config.stages_that_fit(
                inputs, _SHARED_BYTES.get(capability, _LEAST_SHARED_BYTES)
            ),
        )

    @classmethod
    def _tiles(
        cls, inputs: GDNInputs, capability: tuple[int, int], *, many_chunks: bool
    ) -> GDNPortableConfig:
        """Chunk, blocks, warps and registers for the sizes and the dtype of a call on a GPU.

        many_chunks: whether there are enough chunks for slices of 128 of V.
        """
        key_dim, value_dim = inputs.q.shape[3], inputs.v.shape[3]
        block_k, block_v = (max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
        # of these V, at most a quarter of slices of 128 is padding
        wide = key_dim in (64, 96, 128) and value_dim > 64 and value_dim % 64 == 0 and many_chunks
        block_k = min(_largest_block_k(capability[0], key_dim, wide=wide), block_k)
        narrow = 32 if key_dim <= 192 else 16  # columns of a slice of V for which registers suffice
        if inputs.q.dtype == torch.float32:
            config = cls(
                chunk=16,
                block_k=min(32, block_k),
                block_v=min(32, block_v),
                v_rows=False,
                num_warps=4,
                reason="short chunks: a product holds each fp32 operand as two tf32 numbers",
            )
        elif wide:
            config = cls(
                block_k=block_k, reason="slices of 128 of V, a register operand: enough chunks"
            )
        elif key_dim > 128 and capability == (9, 0):
            if key_dim % block_k == 0 and value_dim % 32 == 0:
                narrow = 32  # without masks, which take registers
            config = cls(
                block_k=block_k,
                block_v=min(narrow, block_v),
                num_warps=4,
                reason="narrow slices of V, a register operand: two programs on a multiprocessor",
            )
        else:
            config = cls(
                block_k=block_k,
                block_v=min(narrow, block_v),
                v_rows=False,
                num_warps=2 if block_k == 16 else 4,
                reason="narrow slices of V, for more programs",
            )
        if capability == (9, 0) and block_k <= 64 and inputs.q.dtype != torch.float32:
            # three programs of the first launch per multiprocessor instead of two: it takes 1,153
            # us instead of 1,366 (H200, bf16, 16/32 heads, 64K)
            config = replace(config, factors_registers=168)
        return config

    def segment_for(self, inputs: GDNInputs, segments: int) -> int:
        """Chunks per segment for at most `segments` segments per sequence, and at least
        _MIN_SEGMENT positions; 0 if sequences are not cut.  segments: 0 counts as 1
        """
        chunks = triton.cdiv(inputs.length, self.chunk)
        per_segment = max(triton.cdiv(chunks, max(1, segments)), _MIN_SEGMENT // self.chunk)
        return 0 if per_segment >= chunks else int(per_segment)

    def stages_that_fit(self, inputs: GDNInputs, shared_bytes: int) -> int:
        """`scan_stages`, or fewer, but at least one, if shared memory is too small.

        shared_bytes: shared memory of a program.  Besides the stages it holds one chunk's state,
            residual and output.  With `v_rows` and slices of at most 32 these are in registers.
            For relaxed fp32 inputs, whose factors have 16 bits, the result may be less than fits.
        """
        itemsize = inputs.q.element_size()
        padded = triton.cdiv(inputs.q.shape[3], self.block_k) * self.block_k
        # rows of k, q and state_factor, of out_factor, and of v
        stage_bytes = itemsize * self.chunk * (3 * padded + self.chunk + self.block_v)
        other_bytes = 0
        if not (self.v_rows and self.block_v <= 32):
            # the state and the residual as operands, and the output in fp32
            other_bytes = self.block_v * (itemsize * padded + (itemsize + 4) * self.chunk)
        stages = max(1, (shared_bytes - other_bytes) // stage_bytes)
        return int(min(self.scan_stages, stages))


def _largest_block_k(major: int, key_dim: int, *, wide: bool) -> int:
    """The largest block of K with which the kernels spill no more than the compilation tests allow.

    major: of the compute capability.  For 9 these blocks were the fastest on an H200.  For the
        others nothing was measured.
    wide: whether slices of V have 128 columns.
    """
    if major not in (9, 10, 11):
        return 32  # products read their operands from registers: with 64, the first launch spills
    # Wide slices on major 10 keep 128, so that K, at most 128, is one block: for two blocks, Triton
    # 3.6 generates a kernel that only traps.
    if key_dim > 128 or (wide and major == 9):
        return 64
    return 128


# --- the unfused kernels


def block(dim: int, most: int) -> int:
    """The smallest power of two that holds `dim`, limited to 16 .. `most`."""
    return max(16, min(int(triton.next_power_of_2(dim)), most))


# Options of two stages, for all calls.
# Heads are innermost in g, and 8 of them in fp32 fill a 32-byte sector.
GATE_CUMSUM = {"BLOCK_H": 8, "num_warps": 4}
# With one warp no step of the substitution waits for another warp: 1.6 times as fast as with two.
SOLVE_TRIL = {"num_warps": 1}


def options(num_warps: int = 4, num_stages: int = 2, **blocks: int) -> dict[str, int]:
    """Block sizes, whose names are in capitals, and launch options of a stage's kernel, by name."""
    return blocks | {"num_warps": num_warps, "num_stages": num_stages}


def qk_l2norm_options(key_dim: int) -> dict[str, int]:
    """Rows per program, for 4096 elements with K rounded up to a power of two, and warps."""
    return {"BLOCK_ROWS": 4096 // int(triton.next_power_of_2(key_dim)), "num_warps": 4}


def unfused_options(inputs: GDNInputs, precision: Precision) -> dict[str, dict[str, int]]:
    """Block sizes, in capitals, and launch options of each of the six stages, by its name."""
    is_fp32 = operand_dtype(inputs.v.dtype, precision) == torch.float32
    # all of K in one block, up to these columns; with 128, eight warps load enough at the same time
    block_k = block(inputs.q.shape[3], 32 if is_fp32 else 128)
    return {
        "gate_cumsum": GATE_CUMSUM,
        "scaled_dot_kkt": options(BLOCK_K=block_k, num_warps=8 if block_k == 128 else 4),
        "solve_tril": SOLVE_TRIL,
    } | (_fp32_options(inputs) if is_fp32 else _16_bit_options(inputs))


def _fp32_options(inputs: GDNInputs) -> dict[str, dict[str, int]]:
    """Options of the last three stages with fp32 operands."""
    key_dim, value_dim = inputs.q.shape[3], inputs.v.shape[3]
    w_u = options(BLOCK_K=block(key_dim, 32), BLOCK_V=block(value_dim, 32))
    output = w_u | {"num_warps": 8}
    if min(key_dim, value_dim) <= 32:
        # Triton unrolls a loop with one iteration, here over blocks of K or of V.  Triton 3.6 then
        # miscompiles some tf32x3 products of warp groups: they read a wrong address in shared
        # memory, or have the precision of a single tf32 product (seen on an H200).  With two warps,
        # Triton uses mma.sync instead.
        w_u = output = options(BLOCK_K=16, BLOCK_V=16, num_warps=2)
    state = options(BLOCK_V=16, num_warps=8, num_stages=2 if key_dim <= 128 else 1)
    return {"recompute_w_u": w_u, "chunk_state": state, "chunk_output": output}


def _16_bit_options(inputs: GDNInputs) -> dict[str, dict[str, int]]:
    """Options of the last three stages with 16-bit operands.

    recompute_w_u and chunk_output take K in blocks of up to 64.

    recompute_w_u: three stages, so that the next two blocks are loaded during a product.
    chunk_state: a program has BLOCK_V rows of the transposed state, and processes its chunks one
        after the other.  Few states are therefore cut into narrow slices, and loads run three
        chunks ahead.  Many states are cut into slices of 64, which read w and k half as often and
        are the rows of one matrix instruction of four warps on a Hopper GPU.  If K is above 128,
        slices are always narrow, and eight warps hold their state.
    chunk_output: up to 128 of V, so that q k^T is computed once if V is at most 128.  With the four
        warps that `options` gives, two programs share a multiprocessor.
    """
    key_dim, value_dim = inputs.q.shape[3], inputs.v.shape[3]
    narrow = block(value_dim, 32)
    # with up to this many slices of each state, there is at most one program on a multiprocessor
    most_slices = _MULTIPROCESSORS // (inputs.sequences * inputs.v.shape[2])
    if key_dim > 128:
        state = options(BLOCK_V=narrow, num_warps=8)
    elif triton.cdiv(value_dim, narrow) <= most_slices:
        state = options(BLOCK_V=narrow, num_stages=4)
    else:
        state = options(BLOCK_V=block(value_dim, 64), num_stages=3)
    block_k = block(key_dim, 64)
    return {
        "recompute_w_u": options(BLOCK_K=block_k, BLOCK_V=block(value_dim, 64), num_stages=3),
        "chunk_state": state,
        "chunk_output": options(BLOCK_K=block_k, BLOCK_V=block(value_dim, 128)),
    }
