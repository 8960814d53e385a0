"""How the portable kernels divide a call into programs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from ssdprof.kernels.gdn.inputs import GDNInputs

_MIN_SEGMENT = 1024  # positions: a shorter segment would spend most of its time on the warm-up
_ENOUGH_CHUNKS = 16  # from this many chunks of 64 per multiprocessor, wide slices of V are faster (H200)
_SHARED_BYTES = {(8, 0): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10}  # most shared memory of a program
_LEAST_SHARED_BYTES = 99 << 10


@dataclass(frozen=True, kw_only=True)
class PortableConfig:
    """Chosen by shapes, dtype and GPU, and by the number of sequences unless the call is batch invariant.

    chunk: positions per chunk: 16, 32, 64 or 128
    segment: chunks per segment; 0: one segment per sequence
    block_k: block of K per product, in both launches, a power of two of at least 16
    block_v: slice of V per program, a power of two of at least 16
    v_rows: the state is held as (V, K), a register operand of both products; otherwise as (K, V)
    num_warps, scan_stages: of the second launch; stages are chunks in flight
    factors_warps, factors_registers: of the first launch; most registers per thread, 0: no limit
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
        cls, inputs: GDNInputs, capability: tuple[int, int], sm_count: int, *, batch_invariant: bool = False
    ) -> PortableConfig:
        """As many programs as multiprocessors, if possible: first by slices of V, then by segments.

        Packed sequences are not cut in a batch-invariant call, because the host does not know their lengths.
        """
        heads, value_dim = inputs.v.shape[2:]
        key_dim = inputs.q.shape[3]
        sequences = 1 if batch_invariant else inputs.sequences
        block_k, block_v = (max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
        uncut = batch_invariant and inputs.cu_seqlens is not None
        chunks = 0 if uncut else triton.cdiv(inputs.v.shape[1], 64)
        chunks_per_sm = sequences * heads * triton.cdiv(value_dim, 128) * chunks / sm_count
        wide = key_dim in (64, 96, 128) and value_dim > 64 and value_dim % 64 == 0 and chunks_per_sm >= _ENOUGH_CHUNKS
        block_k = min(_largest_block_k(capability[0], key_dim, wide=wide), block_k)
        if inputs.q.dtype == torch.float32:
            config = cls(
                chunk=16, block_k=min(32, block_k), block_v=min(32, block_v), v_rows=False, num_warps=4,
                reason="short chunks: a product holds each fp32 operand as two tf32 numbers",
            )  # fmt: skip
        elif wide:
            config = cls(block_k=block_k, reason="slices of 128 of V, a register operand: enough chunks")
        elif key_dim > 128 and capability == (9, 0):
            unmasked = key_dim % block_k == 0 and value_dim % 32 == 0  # masks take registers
            config = cls(
                block_k=block_k, block_v=min(32 if key_dim <= 192 or unmasked else 16, block_v), num_warps=4,
                reason="narrow slices of V, a register operand: two programs on a multiprocessor",
            )  # fmt: skip
        else:
            config = cls(
                block_k=block_k, block_v=min(32 if key_dim <= 192 else 16, block_v), v_rows=False,
                num_warps=2 if block_k == 16 else 4,
                reason="narrow slices of V, for more programs",
            )  # fmt: skip
        if capability == (9, 0) and block_k <= 64 and inputs.q.dtype != torch.float32:
            # three programs per multiprocessor instead of two: 1,153 us instead of 1,366 (H200, 16/32 heads, 64K)
            config = replace(config, factors_registers=168)
        programs = sequences * heads * triton.cdiv(value_dim, config.block_v)
        return replace(
            config,
            segment=0 if uncut else config.segment_for(inputs, sm_count // programs),
            scan_stages=config.stages_that_fit(inputs, _SHARED_BYTES.get(capability, _LEAST_SHARED_BYTES)),
        )

    def segment_for(self, inputs: GDNInputs, segments: int) -> int:
        """Chunks per segment for at most `segments` segments per sequence; 0 if sequences are not cut."""
        chunks = triton.cdiv(inputs.v.shape[1], self.chunk)
        per_segment = max(triton.cdiv(chunks, max(1, segments)), _MIN_SEGMENT // self.chunk)
        return 0 if per_segment >= chunks else int(per_segment)

    def stages_that_fit(self, inputs: GDNInputs, shared_bytes: int) -> int:
        """`scan_stages`, or fewer if shared memory is too small.

        Shared memory also holds one chunk's state, residual and output.  With `v_rows` and slices of at most 32 these
        are in registers.
        """
        size = inputs.q.element_size()
        padded = triton.cdiv(inputs.q.shape[3], self.block_k) * self.block_k
        chunk = size * self.chunk * (3 * padded + self.chunk + self.block_v)  # k, q, state_factor, out_factor, v
        in_registers = self.v_rows and self.block_v <= 32
        beside = 0 if in_registers else self.block_v * (size * padded + (size + 4) * self.chunk)
        return int(min(self.scan_stages, max(1, (shared_bytes - beside) // chunk)))


def _largest_block_k(major: int, key_dim: int, *, wide: bool) -> int:
    """The largest block of K with which the kernels spill no more than the compilation tests allow.

    For major 9 these were the fastest on an H200.  For the others nothing was measured.
    """
    if major not in (9, 10, 11):
        return 32  # products read operands from registers: with 64, the first launch spills
    if key_dim > 128 or (wide and major == 9):
        return 64
    return 128  # wide slices on major 10: for two blocks of K, Triton 3.6 generates a kernel that only traps
