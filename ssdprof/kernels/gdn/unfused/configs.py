"""Block sizes and warps of each unfused kernel.

The values for 16-bit operands were the fastest of a sweep on an H200, with 16 key heads, 32 value heads, K = V = 128,
and one sequence of 8K and of 64K positions.  Other dimensions use the same values, limited to the dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

LEAF = 16  # rows of the blocks that are inverted by substitution: the minimum of a matrix product
_ONE_PROGRAM_EACH = 132  # multiprocessors of an H100 or H200: up to one program each, a program's latency counts


def _block(dim: int, most: int) -> int:
    """The smallest power of two that holds `dim`, limited to 16 .. `most`."""
    return max(16, min(int(triton.next_power_of_2(dim)), most))


def _unrolled(key_dim: int, value_dim: int) -> bool:
    """Whether Triton unrolls a loop over blocks of 32 of K or V, because there is only one block.

    Triton 3.6 then miscompiles some tf32x3 products of warp groups: they read a wrong address in shared memory, or have
    the precision of a single tf32 product (seen on an H200).  With two warps, Triton uses mma.sync instead.
    """
    return min(key_dim, value_dim) <= 32


@dataclass(frozen=True, kw_only=True)
class GateCumsumConfig:
    """block_h: heads per program.  Heads are innermost in g, and 8 of them in fp32 fill a 32-byte sector."""

    block_h: int = 8
    num_warps: int = 4


@dataclass(frozen=True, kw_only=True)
class QkL2NormConfig:
    block_rows: int
    num_warps: int = 4

    @classmethod
    def choose(cls, *, key_dim: int) -> QkL2NormConfig:
        """4096 elements per program."""
        return cls(block_rows=4096 // int(triton.next_power_of_2(key_dim)))


@dataclass(frozen=True, kw_only=True)
class ScaledDotKktConfig:
    block_k: int
    num_warps: int = 4
    num_stages: int = 2

    @classmethod
    def choose(cls, *, key_dim: int, operand: torch.dtype) -> ScaledDotKktConfig:
        """All of K at once if possible: this gives eight warps enough to load."""
        block_k = _block(key_dim, 32 if operand == torch.float32 else 128)
        return cls(block_k=block_k, num_warps=8 if block_k == 128 else 4)


@dataclass(frozen=True, kw_only=True)
class SolveTrilConfig:
    """One warp, so that no step of the substitution waits for another warp: 1.6 times as fast as with two."""

    num_warps: int = 1


@dataclass(frozen=True, kw_only=True)
class RecomputeWUConfig:
    block_k: int
    block_v: int
    num_warps: int = 4
    num_stages: int = 3

    @classmethod
    def choose(cls, *, key_dim: int, value_dim: int, operand: torch.dtype) -> RecomputeWUConfig:
        """Three stages, so that the next two blocks are loaded during a product."""
        if operand == torch.float32:
            if _unrolled(key_dim, value_dim):
                return cls(block_k=16, block_v=16, num_warps=2, num_stages=2)
            return cls(block_k=_block(key_dim, 32), block_v=_block(value_dim, 32), num_stages=2)
        return cls(block_k=_block(key_dim, 64), block_v=_block(value_dim, 64))


@dataclass(frozen=True, kw_only=True)
class ChunkStateConfig:
    """block_v: rows of the transposed state per program."""

    block_v: int
    num_warps: int = 4
    num_stages: int = 2

    @classmethod
    def choose(cls, *, key_dim: int, value_dim: int, operand: torch.dtype, states: int) -> ChunkStateConfig:
        """states: sequences times value heads.

        A program processes its chunks one after the other.  So few states are cut into narrow slices, and loads run
        three chunks ahead.  Many states are cut into slices of 64, which read w and k half as often and are the rows of
        one matrix instruction of four warps on a Hopper GPU.
        """
        if operand == torch.float32:
            return cls(block_v=16, num_warps=8, num_stages=2 if key_dim <= 128 else 1)
        if key_dim > 128:
            return cls(block_v=_block(value_dim, 32), num_warps=8)
        narrow = _block(value_dim, 32)
        if states * triton.cdiv(value_dim, narrow) <= _ONE_PROGRAM_EACH:
            return cls(block_v=narrow, num_stages=4)
        return cls(block_v=_block(value_dim, 64), num_stages=3)


@dataclass(frozen=True, kw_only=True)
class ChunkOutputConfig:
    block_k: int
    block_v: int
    num_warps: int = 4
    num_stages: int = 2

    @classmethod
    def choose(cls, *, key_dim: int, value_dim: int, operand: torch.dtype) -> ChunkOutputConfig:
        """Up to 128 of V, so that q k^T is computed once.  Four warps, so that two programs share a multiprocessor."""
        if operand == torch.float32:
            if _unrolled(key_dim, value_dim):
                return cls(block_k=16, block_v=16, num_warps=2)
            return cls(block_k=_block(key_dim, 32), block_v=_block(value_dim, 32), num_warps=8)
        return cls(block_k=_block(key_dim, 64), block_v=_block(value_dim, 128))
