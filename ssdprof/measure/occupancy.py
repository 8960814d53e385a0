"""How many blocks of a kernel an SM holds at once.  Source: CUDA C++ Programming Guide, technical specifications per
compute capability; allocation units as in the CUDA occupancy calculator."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ssdprof.schema import Launch, Record

_REGISTERS = 65_536  # of an SM, from compute capability 8.0 to 12.x
_REGISTER_UNIT = 256  # per warp
_SHARED_UNIT = 128
_RESERVED_SHARED = 1024  # of each block, for the system
_MOST_BLOCKS = {(8, 0): 32, (8, 6): 16, (8, 7): 16, (8, 9): 24, (9, 0): 32, (10, 0): 32, (10, 3): 32, (12, 0): 24}
_WARP = 32


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The resources of an SM."""

    warps: int
    blocks: int
    shared_bytes: int
    registers: int = _REGISTERS

    @classmethod
    def of(cls, device: torch.device) -> Limits | None:
        """None for a GPU whose number of resident blocks is not known here."""
        properties = torch.cuda.get_device_properties(device)
        blocks = _MOST_BLOCKS.get((properties.major, properties.minor))
        if blocks is None:
            return None
        return cls(
            warps=properties.max_threads_per_multi_processor // _WARP,
            blocks=blocks,
            shared_bytes=properties.shared_memory_per_multiprocessor,
        )


class Occupancy(Record):
    """warps_pct: resident warps as a share of the most that an SM holds."""

    blocks_per_sm: int
    warps_per_sm: int
    warps_pct: float


def occupancy(launch: Launch, limits: Limits) -> Occupancy | None:
    """By registers, shared memory and warps of the launch; None if the launch does not record them."""
    warps = launch.config.get("num_warps")
    if not isinstance(warps, int) or launch.registers is None or launch.shared_bytes is None:
        return None
    registers = _up(launch.registers * _WARP, _REGISTER_UNIT) * warps
    shared = _up(launch.shared_bytes, _SHARED_UNIT) + _RESERVED_SHARED
    blocks = min(
        limits.blocks,
        limits.warps // warps,
        limits.shared_bytes // shared,
        limits.registers // registers if registers else limits.blocks,
    )
    resident = blocks * warps
    return Occupancy(blocks_per_sm=blocks, warps_per_sm=resident, warps_pct=100 * resident / limits.warps)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
