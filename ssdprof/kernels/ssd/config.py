"""Configurations of SSD kernels: tables of rows by GPU, dtype and sizes, with reasons.  The first
row that fits a call applies.

Not in these tables are the recurrent kernels (`recurrent.py`), and the division of sequences into
segments for the Hopper kernel, which a model of the time chooses (`hopper/config.py`).

Configurations that `ssdprof tune ssd` has found take precedence, if a program loads them
(`registry.use_overrides`).  Each is for the calls of one `call_key`.

On majors 9, 10 and 11 of compute capabilities (H100, H200, B200), matrix instructions read their
operands from shared memory.  On majors 8 and 12 (A100, L4, RTX) and on later ones, operands pass
through registers.  The rows were measured on an H200 (benchmarks/log/ssd.md), and are compiled for
other GPUs by tests/kernels/test_compile.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from ssdprof.kernels.device import gpu_name
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import CallKey, key_of_calls
from ssdprof.kernels.ssd.inputs import SSDInputs

FROM_SHARED_MEMORY = (9, 10, 11)  # majors of compute capabilities
HOPPER_CHUNK = 64  # positions per chunk of the Hopper kernel
# least and most positions of a segment of the portable kernel, unless the sequence is shorter
_MIN_SEGMENT, _MAX_SEGMENT = 256, 2048

ConfigRow = tuple[dict[str, Any], Any, str]  # limits of a call, its configuration, the reason
ConfigTable = Sequence[ConfigRow]  # the last row fits every call


def _row(*, take: Any, why: str, **limits: Any) -> ConfigRow:
    """A row of a table of configurations.

    take: the configuration of calls within the limits.  why: its reason
    limits: `majors`, the majors of compute capabilities; `fp32` (inputs are fp32), `exact` (exact
        intermediates) and `gate` (with z), True or False; the largest `headdim` and `dstate`.  A
        limit that is not given holds for all calls
    """
    return limits, take, why


def first_fit(
    table: ConfigTable,
    *,
    fp32: bool,
    dstate: int,
    headdim: int = 0,
    gate: bool = False,
    major: int = 0,
    exact: bool = True,
) -> ConfigRow:
    """The first row whose limits a call fits.  Properties that no row of the table limits may be
    left out.

    fp32, exact, gate: see `_row`.  major: of the GPU's compute capability
    """
    switches = dict(fp32=fp32, exact=exact, gate=gate)
    sizes = dict(headdim=headdim, dstate=dstate)

    def fits(limits: dict[str, Any]) -> bool:
        return (
            major in limits.get("majors", (major,))
            and all(limits.get(name, value) == value for name, value in switches.items())
            and all(limits.get(name, value) >= value for name, value in sizes.items())
        )

    return next(row for row in table if fits(row[0]))


def whole_block(size: int) -> int:
    """The smallest block that holds all of N, or of P: a power of two of at least 16."""
    return max(16, int(triton.next_power_of_2(size)))


def call_key(
    inputs: SSDInputs, precision: Precision, kernel: str, *, batch_invariant: bool = False
) -> CallKey:
    """The key of the calls of a kernel that share a tuned configuration.  They agree in the GPU's
    name, the sizes of the layer, the dtype of x, whether there is z, and whether intermediates are
    exact; and in this, by kernel:

    hopper    the numbers of chunks and of sequences.  A batch-invariant call has the key of one
              sequence.  Packed sequences keep the committed configuration and need no key.
    portable  nothing else: length and number of sequences are not in the key, so that a sequence's
              result is the same in any batch and in any pack.
    """
    sizes = inputs.sizes | {"gate": inputs.z is not None}
    if kernel == "hopper":
        sizes |= dict(
            sequences=1 if batch_invariant else inputs.sequences,
            nchunks=-(-inputs.length // HOPPER_CHUNK),
        )
    return key_of_calls(
        gpu=gpu_name(inputs.x),
        operator="ssd",
        kernel=kernel,
        dtype=inputs.x.dtype,
        exact=precision.exact,
        **sizes,
    )


# --- the fused kernel for Hopper: rings and registers of `SSDHopperConfig`

HOPPER: ConfigTable = (
    _row(
        dstate=128,
        take=dict(ring=3, score_ring=2, unit_registers=192, other_registers=24),
        why=(
            "three chunks of B, C and x fill shared memory; the scores need the registers that "
            "the states leave"
        ),
    ),
    _row(
        take=dict(ring=2, score_ring=3, unit_registers=208, other_registers=24),
        why=(
            "two chunks, and the scores of three, fill shared memory; with fewer registers, ptxas "
            "serialises products"
        ),
    ),
)


# --- the portable fused kernel


@dataclass(frozen=True, kw_only=True)
class SSDPortableConfig:
    """The division of a call into programs, and tiles.

    The choice depends on the shape of one sequence, dtype, precision and GPU, never on the number
    of sequences, so that a sequence's result does not depend on other sequences.

    chunk: positions per chunk, a power of two of at least 16
    max_segments, min_chunks, max_chunks: the chunks of a segment are those of the sequence divided
        by max_segments, rounded up, but at least min_chunks and at most max_chunks.  More segments
        let more programs work on one sequence; fewer segments spend less time on first passes
    block_p: slice of P per program, a power of two of at least 16
    block_n: block of N per product, a power of two of at least 16
    p_rows: the state is held as (p, n); otherwise as (n, p)
    num_warps: warps per program
    state_stages, scan_stages: stages of the loops of the first and of the second pass: the chunk
        that is computed, and chunks whose loads have begun
    reason: for reports
    """

    chunk: int = 64
    max_segments: int = 8
    min_chunks: int = 4
    max_chunks: int = 32
    block_p: int = 64
    block_n: int = 256
    p_rows: bool = True
    num_warps: int = 4
    state_stages: int = 3
    scan_stages: int = 2
    reason: str = ""

    @classmethod
    def choose(
        cls, inputs: SSDInputs, capability: tuple[int, int], precision: Precision
    ) -> SSDPortableConfig:
        """The first row of `PORTABLE` that fits, limited to the sizes of the call.

        capability: compute capability of the GPU

        In 4 warps, a state of 64 x 128 fp32 numbers takes 64 of the 255 registers of each thread.
        The scores and the output of a chunk of 64 positions take 64 more.
        """
        headdim = inputs.x.shape[3]
        dstate = inputs.B.shape[3]
        fp32 = inputs.x.dtype == torch.float32
        _, take, why = first_fit(
            PORTABLE,
            major=capability[0],
            fp32=fp32,
            exact=precision.exact,
            headdim=headdim,
            dstate=dstate,
        )
        config: SSDPortableConfig = replace(
            take,
            min_chunks=_MIN_SEGMENT // take.chunk,
            max_chunks=_MAX_SEGMENT // take.chunk,
            block_p=min(whole_block(headdim), take.block_p),
            block_n=min(whole_block(dstate), take.block_n),
            reason=why,
        )
        return config.fitted(inputs)

    def fitted(self, inputs: SSDInputs) -> SSDPortableConfig:
        """This configuration with a shorter chunk if all sequences are shorter than one chunk.
        Segments keep their lengths in positions.  Packed sequences, whose lengths are on the
        device, keep the chunk.
        """
        if inputs.cu_seqlens is not None or inputs.x.shape[1] >= self.chunk:
            return self
        chunk = max(16, triton.next_power_of_2(inputs.x.shape[1]))
        ratio = self.chunk // chunk
        return replace(
            self,
            chunk=chunk,
            min_chunks=self.min_chunks * ratio,
            max_chunks=self.max_chunks * ratio,
        )

    def programs_per_segment(self, inputs: SSDInputs) -> int:
        """Programs per segment: one for each slice of P of each head."""
        nheads, headdim = inputs.x.shape[2:]
        return int(nheads * triton.cdiv(headdim, self.block_p))

    def segment_chunks(self, nchunks: int) -> int:
        """Chunks per segment of a sequence of `nchunks`."""
        return int(
            min(max(triton.cdiv(nchunks, self.max_segments), self.min_chunks), self.max_chunks)
        )

    def handover(self, inputs: SSDInputs) -> bool:
        """Whether a sequence may have more than one segment; of packed sequences, whether one as
        long as all of them would.
        """
        nchunks = triton.cdiv(inputs.x.shape[1], self.chunk)
        return bool(nchunks > self.segment_chunks(nchunks))

    def segment_count(self, inputs: SSDInputs) -> int:
        """The number of segments of all sequences; an upper bound for packed sequences, whose
        lengths are on the device.
        """
        length = inputs.x.shape[1]
        if inputs.cu_seqlens is None:
            nchunks = triton.cdiv(length, self.chunk)
            return int(inputs.sequences * triton.cdiv(nchunks, self.segment_chunks(nchunks)))
        # a sequence of L positions has at most 1 + L / (chunk * min_chunks) segments, and at most
        # max_segments + L / (chunk * max_chunks)
        return min(
            inputs.sequences + length // (self.chunk * self.min_chunks),
            inputs.sequences * self.max_segments + length // (self.chunk * self.max_chunks),
        )


# reasons of several rows
_TWO_TF32 = (
    "two tf32 numbers for each operand fill the registers: short chunks, half of P, and N in "
    "blocks, each of which a tensor core sums by itself: it rounds towards zero whenever it adds "
    "products"
)
_TWO_PROGRAMS = (
    "64 rows, those of one matrix instruction, in every product; 4 warps, so that "
    "two programs share an SM"
)
_NO_SPILLS = "operands in registers: 8 warps, because 4 would spill"
_ONE_TF32 = (
    "one tf32 number for each operand: short chunks and half of P, so that two programs share an SM"
)
PORTABLE: ConfigTable = (
    _row(
        fp32=True,
        exact=False,
        dstate=64,
        take=SSDPortableConfig(chunk=32, block_p=32, scan_stages=1),
        why=_ONE_TF32 + "; with one stage in the second pass three do",
    ),
    _row(
        fp32=True,
        exact=False,
        take=SSDPortableConfig(chunk=32, block_p=32, block_n=64),
        why=_ONE_TF32,
    ),
    _row(
        fp32=True,
        dstate=128,
        take=SSDPortableConfig(chunk=32, block_p=32, block_n=64),
        why=_TWO_TF32,
    ),
    _row(fp32=True, take=SSDPortableConfig(chunk=16, block_p=32, block_n=64), why=_TWO_TF32),
    _row(
        majors=FROM_SHARED_MEMORY,
        headdim=32,
        take=SSDPortableConfig(chunk=32, block_p=32, num_warps=2),
        why=(
            "rows of x below 128 bytes: in products that read such operands from shared memory, "
            "ptxas overwrites the register that holds their address; chunks of 32 are too short "
            "for such products"
        ),
    ),
    _row(majors=FROM_SHARED_MEMORY, dstate=128, take=SSDPortableConfig(), why=_TWO_PROGRAMS),
    _row(
        majors=(9,),
        take=SSDPortableConfig(p_rows=False, num_warps=8, block_n=128),
        why=(
            "256 state dimensions fill the registers of 4 warps: 8 warps, and one program on an "
            "SM; N in halves, each of which a stage reads by itself, because whole rows of B and C "
            "do not fit beside the state"
        ),
    ),
    _row(
        majors=FROM_SHARED_MEMORY,
        take=SSDPortableConfig(block_p=32, p_rows=False),
        why=_TWO_PROGRAMS + ", and half of P, because 256 state dimensions fill the registers",
    ),
    _row(dstate=128, take=SSDPortableConfig(num_warps=8), why=_NO_SPILLS),
    _row(
        take=SSDPortableConfig(chunk=32, block_p=32, num_warps=8),
        why=_NO_SPILLS + "; half of P and of a chunk, because 256 state dimensions fill them",
    ),
)


# --- the unfused kernels: block sizes and launch options by stage
#
# Blocks are of heads (h), P, N, positions (q) and source positions (s) of a chunk.  `chunk_cumsum`
# and `state_passing` are limited by the bandwidth of memory, and have one row each.

_LARGE = "fp32 operands are twice as large, and tf32x3 holds each of them twice: smaller tiles"
_WHOLE_STATE = "one tile holds the whole state where it can: x and B are then read once"
CHUNK_STATE: ConfigTable = (
    _row(
        fp32=True,
        take=dict(block_p=64, block_n=64, block_q=32, num_warps=4, num_stages=2),
        why=_LARGE,
    ),
    _row(
        headdim=64,
        take=dict(block_p=64, block_n=128, block_q=64, num_warps=4, num_stages=3),
        why=_WHOLE_STATE,
    ),
    _row(
        dstate=64,
        take=dict(block_p=128, block_n=64, block_q=64, num_warps=4, num_stages=3),
        why=_WHOLE_STATE,
    ),
    _row(
        take=dict(block_p=128, block_n=128, block_q=64, num_warps=8, num_stages=3),
        why=_WHOLE_STATE + "; accumulators of 128 x 128 need 8 warps",
    ),
)
BMM_CHUNK: ConfigTable = (
    _row(
        fp32=True,
        take=dict(block_q=64, block_s=64, block_n=32, num_warps=4, num_stages=3),
        why=_LARGE,
    ),
    _row(
        take=dict(block_q=64, block_s=64, block_n=64, num_warps=4, num_stages=3),
        why="square tiles of 64: the diagonal wastes little, and short inputs fill the GPU",
    ),
)


_FEW_ROW_BLOCKS = (
    "a whole head, so that no score is computed twice; 128 rows, because each block of rows reads "
    "the entering state again"
)
_WOULD_SPILL = "a whole head, so that no score is computed twice; 64 rows, where 128 would spill"
_SLICED = (
    "; more than 128 state dimensions in slices of 32, so that their stages fit an A100's "
    "shared memory"
)
# The configurations for 16-bit inputs have blocks of 16 source positions, or a single stage.  With
# blocks of 32 source positions and more than one stage, Triton 3.6 to 3.8 overwrites registers of a
# product's operand while the product may still read them (`tests/kernels/operand_races.py`).
CHUNK_SCAN: ConfigTable = (
    _row(
        fp32=True,
        take=dict(block_q=64, block_p=64, block_s=32, block_n=32, num_warps=8, num_stages=2),
        why=_LARGE,
    ),
    _row(
        gate=False,
        headdim=64,
        dstate=128,
        take=dict(block_q=128, block_p=64, block_s=16, block_n=128, num_warps=4, num_stages=3),
        why=_FEW_ROW_BLOCKS,
    ),
    _row(
        gate=False,
        headdim=64,
        take=dict(block_q=128, block_p=64, block_s=16, block_n=32, num_warps=4, num_stages=3),
        why=_FEW_ROW_BLOCKS + _SLICED,
    ),
    _row(
        headdim=64,
        dstate=128,
        take=dict(block_q=64, block_p=64, block_s=32, block_n=128, num_warps=4, num_stages=1),
        why=_WOULD_SPILL,
    ),
    _row(
        headdim=64,
        take=dict(block_q=64, block_p=64, block_s=16, block_n=32, num_warps=4, num_stages=3),
        why=_WOULD_SPILL + _SLICED,
    ),
    _row(
        dstate=128,
        take=dict(block_q=64, block_p=128, block_s=32, block_n=128, num_warps=8, num_stages=1),
        why=_WOULD_SPILL,
    ),
    _row(
        take=dict(block_q=64, block_p=128, block_s=16, block_n=32, num_warps=8, num_stages=3),
        why=_WOULD_SPILL + _SLICED,
    ),
)
UNFUSED: Mapping[str, ConfigTable] = {
    # heads are innermost in dt_raw: 16 of them, in 16 bit, fill a sector of 32 bytes
    "chunk_cumsum": (_row(take=dict(block_h=16, num_warps=4), why="one sector"),),
    "chunk_state": CHUNK_STATE,
    # a thread has 4 fp32 numbers of the state, one access of 16 bytes; each iteration depends on
    # the one before it, so states are loaded ahead, in four stages
    "state_passing": (
        _row(take=dict(block=512, num_warps=4, num_stages=4), why="one access per thread"),
    ),
    "bmm_chunk": BMM_CHUNK,
    "chunk_scan": CHUNK_SCAN,
}


def unfused_blocks(
    stage: str,
    dtype: torch.dtype = torch.float32,
    *,
    chunk: int = 0,
    headdim: int = 0,
    dstate: int = 0,
    gate: bool = False,
) -> dict[str, int]:
    """The configuration of a stage in `UNFUSED`, with blocks of P, N and positions limited to the
    sizes of the call.  `chunk_cumsum` and `state_passing`, which have no such blocks, need only the
    stage.

    dtype: of x.  chunk: positions per chunk.  gate: whether the call has z
    """
    fp32 = dtype == torch.float32
    _, take, _ = first_fit(UNFUSED[stage], fp32=fp32, headdim=headdim, dstate=dstate, gate=gate)
    limits = {
        "block_p": whole_block(headdim),
        "block_n": whole_block(dstate),
        "block_q": chunk,
        "block_s": chunk,
    }
    return {name: min(limits.get(name, value), value) for name, value in take.items()}
