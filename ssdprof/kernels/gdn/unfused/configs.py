"""Block sizes and warps of each unfused kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

LEAF = 16  # rows of the blocks that are inverted by substitution: the least that a matrix product takes


def _block(dim: int, most: int) -> int:
    """A power of two from 16 to `most`, no larger than `dim` needs."""
    return max(16, min(int(triton.next_power_of_2(dim)), most))


@dataclass(frozen=True, kw_only=True)
class GateCumsumConfig:
    """block_h: heads per program.  g has heads innermost: 8 of them in fp32 fill a 32-byte sector."""

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
        return cls(block_k=_block(key_dim, 32 if operand == torch.float32 else 128))


@dataclass(frozen=True, kw_only=True)
class SolveTrilConfig:
    num_warps: int = 2


@dataclass(frozen=True, kw_only=True)
class RecomputeWUConfig:
    block_k: int
    block_v: int
    num_warps: int = 4
    num_stages: int = 2

    @classmethod
    def choose(cls, *, key_dim: int, value_dim: int, operand: torch.dtype) -> RecomputeWUConfig:
        most = 32 if operand == torch.float32 else 64
        return cls(block_k=_block(key_dim, most), block_v=_block(value_dim, most))


@dataclass(frozen=True, kw_only=True)
class ChunkStateConfig:
    """block_v: rows of the transposed state per program; 64 are what four warps of a Hopper GPU multiply at once."""

    block_v: int
    num_warps: int = 4
    num_stages: int = 2

    @classmethod
    def choose(cls, *, key_dim: int, value_dim: int, operand: torch.dtype) -> ChunkStateConfig:
        if operand == torch.float32:
            return cls(block_v=16, num_warps=8, num_stages=2 if key_dim <= 128 else 1)
        if key_dim <= 128:
            return cls(block_v=_block(value_dim, 64), num_stages=3)
        return cls(block_v=_block(value_dim, 32), num_warps=8)


@dataclass(frozen=True, kw_only=True)
class ChunkOutputConfig:
    block_k: int
    block_v: int
    num_warps: int = 4
    num_stages: int = 2

    @classmethod
    def choose(cls, *, key_dim: int, value_dim: int, operand: torch.dtype) -> ChunkOutputConfig:
        if operand == torch.float32:
            return cls(block_k=_block(key_dim, 32), block_v=_block(value_dim, 32), num_warps=8)
        block_v = _block(value_dim, 128)
        return cls(block_k=_block(key_dim, 64), block_v=block_v, num_warps=8 if block_v == 128 else 4)
