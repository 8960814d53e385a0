# mypy: ignore-errors
"""What the roles of `fused_hopper.py` have in common: rings in shared memory, barriers, and the segment to work on.

    gates       2 warps   chunk_cumsum: dt and the decays of a chunk, for both lanes
    loads       1 warp    B, C and x of a chunk, by the copy engine
    scores      4 warps   bmm_chunk: C B^T, times each unit's decays; in the first pass it makes the gates
    unit_state  4 warps each, two of them: chunk_state, state_passing and chunk_scan of one lane

They are in `hopper_gates.py`, `hopper_roles.py` (loads, scores) and `hopper_unit.py`.  A unit is a head, or a slice of
64 of a head's P.  A program has two lanes: two units of one group, or, where N is 256, the two halves of N of one unit,
which exchange parts of the output (`hopper_halves.py`).  Roles meet at mbarriers: `full`/`empty` guard a ring of
chunks, `scored`/`unscored` a ring of decayed scores, `told` the gates' word on whether the first pass goes on.

Who fills a ring, and who reads it, may change between the first pass and the second only among roles that have seen
every turn of it: waits are for one of two phases, so that who missed one could take the turn before for this one.

Decays are in log2 units since the chunk's start: a_t = sum_{s <= t} dt_s A log2(e), and a_end for the whole chunk.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate as aggregate

CHUNK = gl.constexpr(64)  # rows of one matrix instruction
SLICE = gl.constexpr(64)  # of P: likewise
ROW, KEY, WEIGHT, ENTERING = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)  # vectors of `gates`

STAGES = {"add": "caller", "scalar": "caller", "load_gate": "caller"}


@aggregate
class Shared:
    """Rings in shared memory.  Vectors hold the 64 numbers of lane 0, then those of lane 1."""

    B: gl.shared_memory_descriptor  # (ring * halves, q, n)
    C: gl.shared_memory_descriptor  # (ring * halves, q, n)
    x: gl.shared_memory_descriptor  # (ring * units, q, 1, p)
    scores: gl.shared_memory_descriptor  # (score ring * units, q, s)
    out: gl.shared_memory_descriptor  # (2, q / halves, 1, p)
    gates: gl.shared_memory_descriptor  # (ring * 4, 2 q): ROW a, KEY a - log2 dt, WEIGHT, ENTERING 2^a
    decay: gl.shared_memory_descriptor  # (ring, 2): 2^a_end; in the first pass, of all that was seen of the segment
    goes_on: gl.shared_memory_descriptor  # (told ring, 1): whether the first pass goes on after a chunk
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    scored: gl.shared_memory_descriptor
    unscored: gl.shared_memory_descriptor
    told: gl.shared_memory_descriptor
    RING: gl.constexpr
    SCORE_RING: gl.constexpr
    TOLD: gl.constexpr  # told ring: ring + 2, so that all have read a word before it is overwritten
    HALVES: gl.constexpr  # of N
    UNITS: gl.constexpr  # of this program

    @gluon.constexpr_function
    def __init__(
        self, B, C, x, scores, out, gates, decay, goes_on, full, empty, scored, unscored, told, RING, SCORE_RING, HALVES
    ):
        self.B, self.C, self.x, self.scores, self.out = B, C, x, scores, out
        self.gates, self.decay, self.goes_on = gates, decay, goes_on
        self.full, self.empty, self.scored, self.unscored, self.told = full, empty, scored, unscored, told
        self.RING, self.SCORE_RING, self.TOLD = gl.constexpr(RING), gl.constexpr(SCORE_RING), gl.constexpr(RING + 2)
        self.HALVES, self.UNITS = gl.constexpr(HALVES), gl.constexpr(2 // HALVES)


@aggregate
class Segment:
    """Which positions and units are this program's."""

    sequence: gl.tensor
    index: gl.tensor  # of the segment in its sequence
    begin: gl.tensor  # row at which the sequence begins, among those of all sequences
    length: gl.tensor  # of the sequence
    first: gl.tensor  # chunk
    nchunks: gl.tensor
    unit: gl.tensor  # the first, if there are two
    last: gl.tensor  # the sequence ends with this segment
    goes_back: gl.tensor  # there is a first pass
    seen_first: gl.tensor  # chunk at which it ends, for it goes backwards
    seen: gl.tensor  # chunks that it has at most

    @gluon.constexpr_function
    def __init__(self, sequence, index, begin, length, first, nchunks, unit, last, goes_back, seen_first, seen):
        self.sequence, self.index, self.begin, self.length = sequence, index, begin, length
        self.first, self.nchunks, self.unit, self.last = first, nchunks, unit, last
        self.goes_back, self.seen_first, self.seen = goes_back, seen_first, seen


# what Triton 3.7 and 3.9 renamed: the barrier of a role's threads, and copies by the copy engine
role_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def scalar(buffer):
    """The one number in `buffer`."""
    return gl.max(buffer.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def load_gate(shared, slot, vector: gl.constexpr, IDX: gl.constexpr, layout: gl.constexpr):
    return shared.gates.index(slot * 4 + vector).slice(IDX * CHUNK, CHUNK).load(layout)
