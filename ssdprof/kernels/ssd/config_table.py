"""The configuration of each SSD kernel, by GPU, dtype and sizes, with reasons.  The first row that fits applies.

A call searches nothing: the library's functions use only these rows, with two exceptions.  A model of the time divides
sequences into segments for the Hopper kernel (`hopper/segments.py`).  Configurations that `ssdprof tune ssd` has found
on a GPU take precedence, if a program loads them (`tuned.py`).

On majors 9, 10 and 11 (H100, H200, B200), matrix instructions read their operands from shared memory.  On majors 8 and
12 (A100, L4, RTX) and on later ones, operands pass through registers.  Measured on an H200: benchmarks/log/ssd.md.
Compiled for others: tests/kernels/test_*_compile.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

FROM_SHARED_MEMORY = (9, 10, 11)  # majors of compute capabilities

Settings = TypeVar("Settings")


@dataclass(frozen=True, kw_only=True)
class CallSizes:
    """The properties of a call that rows compare.  A launcher sets those that its table uses.

    major: of the GPU's compute capability.  wide: fp32 inputs.
    """

    wide: bool
    dstate: int
    headdim: int = 0
    gate: bool = False
    major: int = 0


@dataclass(frozen=True, kw_only=True)
class Row(Generic[Settings]):
    """A configuration for calls on one of `majors`, with equal `wide` and `gate`, and sizes up to headdim and dstate.

    None: any value.
    """

    majors: tuple[int, ...] | None = None
    wide: bool | None = None
    gate: bool | None = None
    headdim: int | None = None
    dstate: int | None = None
    take: Settings
    why: str

    def fits(self, call: CallSizes) -> bool:
        return (
            (self.majors is None or call.major in self.majors)
            and self.wide in (None, call.wide)
            and self.gate in (None, call.gate)
            and (self.headdim is None or call.headdim <= self.headdim)
            and (self.dstate is None or call.dstate <= self.dstate)
        )


def first_fit(table: Sequence[Row[Settings]], call: CallSizes) -> Row[Settings]:
    """The first row that fits.  The last row of each table fits every call."""
    return next(row for row in table if row.fits(call))


# --- the fused kernel for Hopper


@dataclass(frozen=True, kw_only=True)
class Roles:
    """See `HopperConfig`."""

    ring: int
    score_ring: int
    unit_registers: int
    other_registers: int


HOPPER = (
    Row(
        dstate=128,
        take=Roles(ring=3, score_ring=2, unit_registers=192, other_registers=24),
        why="three chunks of B, C and x fill shared memory; what states leave of the registers, the scores need",
    ),
    Row(
        take=Roles(ring=2, score_ring=3, unit_registers=208, other_registers=24),
        why="two chunks, and scores of three, fill shared memory; with fewer registers ptxas serialises products",
    ),
)


# --- the portable fused kernel


@dataclass(frozen=True, kw_only=True)
class Tile:
    """See `PortableConfig`.  block_p, block_n: upper limits."""

    chunk: int
    block_p: int
    p_rows: bool
    num_warps: int
    state_stages: int = 3
    block_n: int = 256


_SHORT = (
    "two tf32 numbers for each operand fill the registers: short chunks, half of P, and N in blocks, "
    "each of which a tensor core sums by itself: it rounds towards zero whenever it adds products"
)
_TWO_PROGRAMS = "64 rows, those of one matrix instruction, in every product; 4 warps, so that two programs share an SM"
_NO_SPILLS = "operands in registers: 8 warps, because 4 would spill"
PORTABLE = (
    Row(wide=True, dstate=128, take=Tile(chunk=32, block_p=32, block_n=64, p_rows=True, num_warps=4), why=_SHORT),
    Row(wide=True, take=Tile(chunk=16, block_p=32, block_n=64, p_rows=True, num_warps=4), why=_SHORT),
    Row(
        majors=FROM_SHARED_MEMORY,
        headdim=32,
        take=Tile(chunk=32, block_p=32, p_rows=True, num_warps=2),
        why="for rows of less than 128 bytes ptxas loses addresses in shared memory: chunks too short for them",
    ),
    Row(
        majors=(9,),
        gate=True,
        dstate=128,
        take=Tile(chunk=64, block_p=64, p_rows=False, num_warps=4, state_stages=2),
        why=_TWO_PROGRAMS + "; two chunks in flight in the first pass, because beside a gate a third makes them spill; "
        "the state as (n, p), which ptxas compiles in three quarters of the time",
    ),
    Row(
        majors=FROM_SHARED_MEMORY,
        dstate=128,
        take=Tile(chunk=64, block_p=64, p_rows=True, num_warps=4),
        why=_TWO_PROGRAMS,
    ),
    Row(
        majors=(9,),
        take=Tile(chunk=64, block_p=64, p_rows=False, num_warps=8, block_n=128),
        why="256 state dimensions fill the registers of 4 warps: 8, and one program on an SM; N in halves, each "
        "of which a stage reads by itself, because whole rows of B and C do not fit beside the state",
    ),
    Row(
        majors=FROM_SHARED_MEMORY,
        take=Tile(chunk=64, block_p=32, p_rows=False, num_warps=4),
        why=_TWO_PROGRAMS + ", and half of P, because 256 state dimensions fill the registers",
    ),
    Row(dstate=128, take=Tile(chunk=64, block_p=64, p_rows=True, num_warps=8), why=_NO_SPILLS),
    Row(
        take=Tile(chunk=32, block_p=32, p_rows=True, num_warps=8),
        why=_NO_SPILLS + "; half of P and of a chunk, because 256 state dimensions fill them",
    ),
)


# --- the unfused kernels.  `chunk_cumsum` and `state_passing` are memory bound and have one configuration each.


@dataclass(frozen=True, kw_only=True)
class StateTile:
    """See `ChunkStateConfig`.  Blocks are upper limits."""

    block_p: int
    block_n: int
    block_q: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, kw_only=True)
class ScoresTile:
    """See `BmmChunkConfig`.  Blocks are upper limits."""

    block: int
    block_n: int


@dataclass(frozen=True, kw_only=True)
class ScanTile:
    """See `ChunkScanConfig`.  Blocks are upper limits."""

    block_q: int
    block_p: int
    block_s: int
    block_n: int
    num_warps: int
    num_stages: int


_LARGE = "fp32 operands are twice as large, and tf32x3 holds each of them twice: smaller tiles, two stages"
_WHOLE_STATE = "one tile holds the whole state where it can: x and B are then read once"
CHUNK_STATE = (
    Row(wide=True, take=StateTile(block_p=64, block_n=64, block_q=32, num_warps=4, num_stages=2), why=_LARGE),
    Row(headdim=64, take=StateTile(block_p=64, block_n=128, block_q=64, num_warps=4, num_stages=3), why=_WHOLE_STATE),
    Row(dstate=64, take=StateTile(block_p=128, block_n=64, block_q=64, num_warps=4, num_stages=3), why=_WHOLE_STATE),
    Row(
        take=StateTile(block_p=128, block_n=128, block_q=64, num_warps=8, num_stages=3),
        why=_WHOLE_STATE + "; accumulators of 128 x 128 need 8 warps",
    ),
)
BMM_CHUNK = (
    Row(wide=True, take=ScoresTile(block=64, block_n=32), why=_LARGE),
    Row(
        take=ScoresTile(block=64, block_n=64),
        why="square tiles of 64: the diagonal wastes little, and short inputs fill the GPU",
    ),
)
_FEW_ROW_BLOCKS = "a whole head, so that no score is computed twice; each block of rows reads the entering state again"
_WOULD_SPILL = "a whole head, so that no score is computed twice; 64 rows, where 128 would spill"
_SLICED = "; more than 128 state dimensions in slices of 32, so that their stages fit an A100's shared memory"
# 16-bit rows have blocks of 16 source positions, or one stage: with 32 and more stages, Triton 3.6 to 3.8 overwrites
# registers of a product's operand while the product may still read them (`tests/kernels/test_operand_races.py`).
CHUNK_SCAN = (
    Row(
        wide=True, take=ScanTile(block_q=64, block_p=64, block_s=32, block_n=32, num_warps=8, num_stages=2), why=_LARGE
    ),
    Row(
        gate=False,
        headdim=64,
        dstate=128,
        take=ScanTile(block_q=128, block_p=64, block_s=16, block_n=128, num_warps=4, num_stages=3),
        why=_FEW_ROW_BLOCKS,
    ),
    Row(
        gate=False,
        headdim=64,
        take=ScanTile(block_q=128, block_p=64, block_s=16, block_n=32, num_warps=4, num_stages=3),
        why=_FEW_ROW_BLOCKS + _SLICED,
    ),
    Row(
        headdim=64,
        dstate=128,
        take=ScanTile(block_q=64, block_p=64, block_s=32, block_n=128, num_warps=4, num_stages=1),
        why=_WOULD_SPILL,
    ),
    Row(
        headdim=64,
        take=ScanTile(block_q=64, block_p=64, block_s=16, block_n=32, num_warps=4, num_stages=3),
        why=_WOULD_SPILL + _SLICED,
    ),
    Row(
        dstate=128,
        take=ScanTile(block_q=64, block_p=128, block_s=32, block_n=128, num_warps=8, num_stages=1),
        why=_WOULD_SPILL,
    ),
    Row(
        take=ScanTile(block_q=64, block_p=128, block_s=16, block_n=32, num_warps=8, num_stages=3),
        why=_WOULD_SPILL + _SLICED,
    ),
)
