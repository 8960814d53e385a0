"""Shared memory of `hopper_kernel.py`: ring buffers and mbarriers of all roles.

    units       8 warps   chunk_state, state_passing and chunk_scan, four warps per lane
    scores      4 warps   bmm_chunk: computes C B^T times each unit's decays; in the first pass
                          chunk_cumsum: computes the weights of positions
    gates       2 warps   chunk_cumsum: computes dt and the decays of a chunk, for both lanes
    loads       1 warp    loads B, C and x of a chunk through TMA, the Tensor Memory Accelerator
    stores      1 warp    stores the outputs of a chunk through TMA

The role `units` is in `role_states.py`, `gates` and `scores` are in `role_gates.py`, and `loads`
and `stores` in `role_copies.py`.  A unit is a head, or a slice of 64 of a head's P.  A program has
two lanes (`lanes.py`): two units of one group, or, if N is 256, the two halves of N of one unit,
which exchange parts of the output.

Mbarriers synchronise the roles.  `full` and `empty` guard a ring of chunks, `scored` and `unscored`
a ring of decayed scores, `written` and `unwritten` the output of each lane, and `continue_barrier`
the flags that continue the first pass.

The first pass has separate rings and barriers, because other roles take part in it.  Each of its
turns processes one chunk, or two if N is 256.  A wait distinguishes only two phases, so a role that
skipped one round of a ring would mistake the previous round for it.

The program's n-th chunk of the second pass uses the barriers of n % DEPTH.  The slots of its rows
and x depend on where the first pass ended (`slots_of`), so that the first chunks of the second
pass are copied while the first pass ends.

STAGES maps functions to stages.  Inside a function, a line `# stage ...` names the stage that
follows, for readers and for `ssdprof stalls` (docs/reading-stalls.md).

Decays are in log2 units since the chunk's start: a_t = sum_{s <= t} dt_s A log2(e), and a_end for
the whole chunk.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ssdprof.kernels._gluon import aggregate, place_in, reinterpret
from ssdprof.kernels.hopper.ring import CHUNK, barriers, begin_pairs

SLICE = gl.constexpr(64)  # rows of P in a slice, which is a unit: those of one matrix instruction
# 16-bit columns of a block that TMA writes to shared memory; wider tiles have several
COLUMNS = gl.constexpr(64)
THREADS = gl.constexpr(128)  # threads per lane
FLAG_STRIDE = gl.constexpr(8)  # int32 per flag: a 32-byte sector
# indices of the four vectors of a chunk in `gates`, which `Shared` describes
ROW, KEY, WEIGHT, ENTERING = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)

STAGES = {"allocate": "setup", "begin_barriers": "setup"}


@aggregate
class FirstPass:
    """Rings of the first pass: of chunks, whose tiles are in `Shared`, of their weights, and of
    flags.  A vector holds the numbers of lane 0, then those of lane 1, as in `Shared`.
    """

    # (weight_slots, 2 q): weights of a chunk's positions in the state after the first pass, in two
    # parts (`two_parts`)
    weights: gl.shared_memory_descriptor
    decay: gl.shared_memory_descriptor  # (weight_slots, 2): decay of all chunks read so far
    # (flag_slots, 1) int32: the flag of a turn is not zero if another turn follows it
    continue_flag: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # mbarriers, per slot of the chunk ring
    empty: gl.shared_memory_descriptor  # mbarriers, per slot of the chunk ring
    continue_barrier: gl.shared_memory_descriptor  # mbarriers, per slot of `continue_flag`
    DEPTH: gl.constexpr  # slots of the chunk ring
    TURN: gl.constexpr  # chunks per turn
    FLAG_SLOTS: gl.constexpr  # slots of `continue_flag`


@aggregate
class Shared:
    """Rings in shared memory.  A vector holds the 64 numbers of lane 0, then those of lane 1."""

    first: FirstPass
    rows: gl.shared_memory_descriptor  # (slots * n_split, q, n): B or C of a chunk
    x: gl.shared_memory_descriptor  # (slots * units, q, p)
    scores: gl.shared_memory_descriptor  # (score depth * units, q, s)
    out: gl.shared_memory_descriptor  # (2, q / n_split, p)
    # (depth * 4, 2 q): ROW a; KEY a - log2 dt; WEIGHT 2^(a_end - a) dt, the weight of a position in
    # the state that leaves the chunk, in two parts (`two_parts`); ENTERING 2^a, the decay of the
    # state that enters it
    gates: gl.shared_memory_descriptor
    decay: gl.shared_memory_descriptor  # (depth, 2): 2^a_end
    # mbarriers of each slot, in pairs: the slot can be read, and it can be written again
    full: gl.shared_memory_descriptor  # a chunk's tiles and vectors
    empty: gl.shared_memory_descriptor
    scored: gl.shared_memory_descriptor  # `scores`
    unscored: gl.shared_memory_descriptor
    written: gl.shared_memory_descriptor  # `out`
    unwritten: gl.shared_memory_descriptor
    DEPTH: gl.constexpr  # slots for chunks
    SCORE_DEPTH: gl.constexpr  # slots for scores
    N_SPLIT: gl.constexpr  # 2 if the lanes hold half of N each, else 1
    UNITS: gl.constexpr  # units per program


@gluon.constexpr_function
def weight_slots(depth, turn):
    """The number of slots for weights of the first pass, with which no unread weights are
    overwritten: depth - turn + 2, rounded up to whole pairs.

    depth: slots of its chunk ring.  turn: chunks of a turn

    `store_two_weights` stores the weights of two chunks at once, as soon as the chunk ring has room
    for a turn.  At most depth - turn earlier chunks are unread then.  They and the new pair need
    depth - turn + 2 slots, and a pair of which one chunk is unread keeps both of its slots.
    """
    return (depth + 3 - turn) // 2 * 2


@gluon.constexpr_function
def flag_slots(depth, turn):
    """The number of slots for the flags that continue the first pass, with which no unread flag is
    overwritten: two more than the turns for which the chunk ring has room.

    depth, turn: see `weight_slots`

    `store_two_weights` writes its first flag before it waits for room.  If a turn is one chunk, it
    has last waited for room for the turn two before.  At most depth - 1 turns before that one are
    unread; they, that turn, the next one and the new one need depth + 2 slots.  If a turn is two
    chunks, it has waited for room for the preceding turn, and one slot less would do.
    """
    return depth // turn + 2


@gluon.jit
def allocate(dtype: gl.constexpr, S: gl.constexpr):
    """Allocate all rings, with tiles of `dtype`.  The barriers are not initialised yet."""
    N_SPLIT: gl.constexpr = S.N_SPLIT
    DEPTH: gl.constexpr = S.DEPTH
    SCORE_DEPTH: gl.constexpr = S.SCORE_DEPTH
    UNITS: gl.constexpr = 2 // N_SPLIT
    WIDTH: gl.constexpr = S.DSTATE // N_SPLIT  # of N per lane
    # if N is split, the first pass, which loads no C, also uses the slots of C: room for twice as
    # many chunks
    FIRST_DEPTH: gl.constexpr = DEPTH * N_SPLIT
    WEIGHT_SLOTS: gl.constexpr = weight_slots(FIRST_DEPTH, N_SPLIT)
    FLAG_SLOTS: gl.constexpr = flag_slots(FIRST_DEPTH, N_SPLIT)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], dtype)
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, WIDTH], dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK // N_SPLIT, SLICE], dtype)
    first = FirstPass(
        weights=gl.allocate_shared_memory(gl.float32, [WEIGHT_SLOTS, 2 * CHUNK], vector),
        decay=gl.allocate_shared_memory(gl.float32, [WEIGHT_SLOTS, 2], vector),
        continue_flag=gl.allocate_shared_memory(gl.int32, [FLAG_SLOTS, 1], vector),
        full=barriers(FIRST_DEPTH),
        empty=barriers(FIRST_DEPTH),
        continue_barrier=barriers(FLAG_SLOTS),
        DEPTH=FIRST_DEPTH,
        TURN=N_SPLIT,
        FLAG_SLOTS=FLAG_SLOTS,
    )
    return Shared(
        first=first,
        rows=gl.allocate_shared_memory(dtype, [2 * DEPTH * N_SPLIT, CHUNK, WIDTH], wide),
        x=gl.allocate_shared_memory(dtype, [FIRST_DEPTH * UNITS, CHUNK, SLICE], square),
        scores=gl.allocate_shared_memory(dtype, [SCORE_DEPTH * UNITS, CHUNK, CHUNK], square),
        out=gl.allocate_shared_memory(dtype, [2, CHUNK // N_SPLIT, SLICE], narrow),
        gates=gl.allocate_shared_memory(gl.float32, [DEPTH * 4, 2 * CHUNK], vector),
        decay=gl.allocate_shared_memory(gl.float32, [DEPTH, 2], vector),
        full=barriers(DEPTH),
        empty=barriers(DEPTH),
        scored=barriers(SCORE_DEPTH),
        unscored=barriers(SCORE_DEPTH),
        written=barriers(2),
        unwritten=barriers(2),
        DEPTH=DEPTH,
        SCORE_DEPTH=SCORE_DEPTH,
        N_SPLIT=N_SPLIT,
        UNITS=UNITS,
    )


@gluon.jit
def begin_barriers(shared, FIRST_PASS: gl.constexpr):
    """Initialise the barriers with their arrival counts: of the role `units`, all THREADS of a lane
    arrive, of other roles one thread.

    FIRST_PASS: whether the kernel has one.  Otherwise the memory of its barriers has another use
    """
    first = shared.first
    begin_pairs(shared.written, shared.unwritten, 2, THREADS, 1)
    # `gates` and `loads` fill a slot; `scores` and both lanes empty it
    begin_pairs(shared.full, shared.empty, shared.DEPTH, 2, 1 + 2 * THREADS)
    begin_pairs(shared.scored, shared.unscored, shared.SCORE_DEPTH, 1, 2 * THREADS)
    if FIRST_PASS:
        for i in gl.static_range(first.DEPTH):
            # `loads` fills a slot; for the first chunk of a turn, `scores` arrives too
            mbarrier.init(first.full.index(i), count=1 if i % first.TURN > 0 else 2)
            mbarrier.init(first.empty.index(i), count=2 * THREADS)  # both lanes
        for i in gl.static_range(first.FLAG_SLOTS):
            mbarrier.init(first.continue_barrier.index(i), count=1)


@gluon.jit
def rows_of(shared, slot, half):
    """B or C (q, n) of a chunk in a slot of `rows`: all of n, with half 0, or, if N is split, the
    given half of n.
    """
    return shared.rows.index(slot * shared.N_SPLIT + half)


@gluon.jit
def slots_of(shared, seen, n):
    """(slot of B, slot of C, slot of x) of the program's n-th chunk of the second pass, after a
    first pass of `seen` chunks.

    C lies beyond the slots of the first pass.  If N is split, the first pass uses all slots, and C
    lies in the slot after B.
    """
    x_slot = place_in(seen + place_in(n, shared.DEPTH), shared.first.DEPTH)
    B_slot = place_in(seen + n * shared.N_SPLIT, shared.first.DEPTH)
    return B_slot, B_slot + (shared.DEPTH if shared.N_SPLIT == 1 else 1), x_slot


@gluon.jit
def lane_of(vectors, row, lane):
    """The numbers of one lane in vector `row` of a ring of vectors."""
    halves = reinterpret(
        vectors, vectors.dtype, [2 * vectors.shape[0], vectors.shape[1] // 2], vectors.layout
    )
    return halves.index(2 * row + lane)
