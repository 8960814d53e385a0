# mypy: ignore-errors
"""Shared memory of `hopper_kernel.py`: ring buffers and mbarriers of all roles.

    gates       2 warps   chunk_cumsum: computes dt and the decays of a chunk, for both lanes
    loads       1 warp    loads B, C and x of a chunk through TMA, the Tensor Memory Accelerator
    stores      1 warp    stores the outputs of a chunk through TMA
    scores      4 warps   bmm_chunk: computes C B^T times each unit's decays; in the first pass it computes the gates
    units       8 warps   chunk_state, state_passing and chunk_scan, four warps per lane

Each role is in a file `role_*.py`; `units` is in `role_states.py` and `first_pass.py`.  A unit is a head, or a slice of
64 of a head's P.  A program has two lanes (`lanes.py`): two units of one group, or, if N is 256, the two halves of N of
one unit, which exchange parts of the output (`halves.py`).  Weights of positions are in `weights.py`, the work of a
program in `assignment.py`, and states that segments publish in `look_back.py`.

Mbarriers synchronise the roles.  `full`/`empty` guard a ring of chunks, `scored`/`unscored` a ring of decayed scores,
`written`/`unwritten` the output of each lane, and `told` the flags that continue the first pass.

The first pass has its own rings and barriers, because other roles take part in it.  Each of its turns processes one
chunk, or two if N is 256.  A wait distinguishes only two phases, so a role that skipped one round of a ring would
mistake the previous round for it.  Chunk i of the second pass uses the barriers of i % RING.  The slots of its rows and
x depend on where the first pass ended (`places_of`), so that its first chunks are copied while the first pass ends.

STAGES maps functions to stages.  Inside a function, a line `# stage ...` names the stage that follows, for readers and
for `ssdprof stalls` (docs/reading-stalls.md).

Decays are in log2 units since the chunk's start: a_t = sum_{s <= t} dt_s A log2(e), and a_end for the whole chunk.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from ssdprof.kernels._gluon import async_load as async_load
from ssdprof.kernels._gluon import async_store as async_store
from ssdprof.kernels._gluon import reinterpret as reinterpret
from ssdprof.kernels._gluon import role_barrier as role_barrier

CHUNK = gl.constexpr(64)  # positions per chunk: rows of one matrix instruction
SLICE = gl.constexpr(64)  # slice of P: rows of one matrix instruction
COLUMNS = gl.constexpr(64)  # 16-bit columns of a block that TMA writes to shared memory; wider tiles have several
FLAG_STRIDE = gl.constexpr(8)  # int32 per flag: a 32-byte sector
ROW, KEY, WEIGHT, ENTERING = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)  # vectors of `gates`

STAGES = {
    "allocate": "setup",
    "begin_barriers": "setup",
    "rows_of": "caller",
    "places_of": "caller",
    "add": "caller",
    "place_in": "caller",
    "phase": "caller",
    "scalar": "caller",
    "lane_of": "caller",
}


@aggregate
class FirstPass:
    """Rings of the first pass: of chunks, of weights, and of words, one per turn.  Vectors as in `Shared`."""

    weights: gl.shared_memory_descriptor  # (weight_places, 2 q): weights of a chunk
    decay: gl.shared_memory_descriptor  # (weight_places, 2): decay of all chunks read so far
    goes_on: gl.shared_memory_descriptor  # (words, 1): whether another turn follows this one
    full: gl.shared_memory_descriptor  # per slot of the chunk ring
    empty: gl.shared_memory_descriptor  # per slot of the chunk ring
    told: gl.shared_memory_descriptor  # per word
    RING: gl.constexpr  # slots of the chunk ring
    TURN: gl.constexpr  # chunks per turn
    WORDS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, weights, decay, goes_on, full, empty, told, RING, TURN):
        self.weights, self.decay, self.goes_on = weights, decay, goes_on
        self.full, self.empty, self.told = full, empty, told
        self.RING, self.TURN, self.WORDS = gl.constexpr(RING), gl.constexpr(TURN), gl.constexpr(word_places(RING, TURN))


@aggregate
class Shared:
    """Rings in shared memory.  A vector holds the 64 numbers of lane 0, then those of lane 1."""

    first: FirstPass
    rows: gl.shared_memory_descriptor  # (slots * halves, q, n): B or C of a chunk
    x: gl.shared_memory_descriptor  # (slots * units, q, p)
    scores: gl.shared_memory_descriptor  # (score ring * units, q, s)
    out: gl.shared_memory_descriptor  # (2, q / halves, p)
    gates: gl.shared_memory_descriptor  # (ring * 4, 2 q): ROW a, KEY a - log2 dt, WEIGHT in two parts, ENTERING 2^a
    decay: gl.shared_memory_descriptor  # (ring, 2): 2^a_end
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    scored: gl.shared_memory_descriptor
    unscored: gl.shared_memory_descriptor
    written: gl.shared_memory_descriptor
    unwritten: gl.shared_memory_descriptor
    RING: gl.constexpr
    SCORE_RING: gl.constexpr
    HALVES: gl.constexpr  # 2 if the lanes hold half of N each, else 1
    UNITS: gl.constexpr  # units per program

    @gluon.constexpr_function
    def __init__(
        self, first, rows, x, scores, out, gates, decay, full, empty, scored, unscored, written, unwritten,
        RING, SCORE_RING, HALVES,
    ):  # fmt: skip
        self.first, self.rows, self.x, self.scores, self.out = first, rows, x, scores, out
        self.gates, self.decay = gates, decay
        self.full, self.empty, self.scored, self.unscored = full, empty, scored, unscored
        self.written, self.unwritten = written, unwritten
        self.RING, self.SCORE_RING = gl.constexpr(RING), gl.constexpr(SCORE_RING)
        self.HALVES, self.UNITS = gl.constexpr(HALVES), gl.constexpr(2 // HALVES)


@gluon.constexpr_function
def for_dtype(code, dtype):
    """Replace DTYPE in assembly by its PTX name.  Keep lines with prefix `f16:` or `bf16:` for that dtype only."""
    name = "bf16" if dtype == gl.bfloat16 else "f16"
    lines = [line.strip().removeprefix(f"{name}:") for line in code.replace("DTYPE", name).splitlines()]
    return "\n".join(line for line in lines if not line.startswith(("f16:", "bf16:")))


@gluon.constexpr_function
def product_layout(columns, warps):
    """Register layout of a product with `columns` columns and 16 rows per warp."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


@gluon.constexpr_function
def weight_places(ring, turn):
    """Slots for weights of the first pass, if its chunk ring has `ring` slots.

    The weights of two chunks are computed at once, as soon as the chunk ring has room for one turn.  There are enough
    slots that they do not overwrite unread weights.
    """
    return (ring + 3 - turn) // 2 * 2


@gluon.constexpr_function
def word_places(ring, turn):
    """Slots for the flags that continue the first pass: two more than turns, so that no unread flag is overwritten."""
    return ring // turn + 2


@gluon.jit
def allocate(
    dtype: gl.constexpr, WIDTH: gl.constexpr, HALVES: gl.constexpr, RING: gl.constexpr, SCORE_RING: gl.constexpr
):
    """Allocate all rings, for tiles of `dtype` and WIDTH of N per lane.  The barriers are not initialised yet."""
    UNITS: gl.constexpr = 2 // HALVES
    FIRST_RING: gl.constexpr = RING * HALVES  # the first pass loads no C: with two halves, twice as many chunks fit
    WEIGHTS: gl.constexpr = weight_places(FIRST_RING, HALVES)
    WORDS: gl.constexpr = word_places(FIRST_RING, HALVES)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], dtype)
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, WIDTH], dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK // HALVES, SLICE], dtype)
    first = FirstPass(
        weights=gl.allocate_shared_memory(gl.float32, [WEIGHTS, 2 * CHUNK], vector),
        decay=gl.allocate_shared_memory(gl.float32, [WEIGHTS, 2], vector),
        goes_on=gl.allocate_shared_memory(gl.int32, [WORDS, 1], vector),
        full=gl.allocate_shared_memory(gl.int64, [FIRST_RING, 1], barrier),
        empty=gl.allocate_shared_memory(gl.int64, [FIRST_RING, 1], barrier),
        told=gl.allocate_shared_memory(gl.int64, [WORDS, 1], barrier),
        RING=FIRST_RING,
        TURN=HALVES,
    )
    return Shared(
        first=first,
        rows=gl.allocate_shared_memory(dtype, [2 * RING * HALVES, CHUNK, WIDTH], wide),
        x=gl.allocate_shared_memory(dtype, [FIRST_RING * UNITS, CHUNK, SLICE], square),
        scores=gl.allocate_shared_memory(dtype, [SCORE_RING * UNITS, CHUNK, CHUNK], square),
        out=gl.allocate_shared_memory(dtype, [2, CHUNK // HALVES, SLICE], narrow),
        gates=gl.allocate_shared_memory(gl.float32, [RING * 4, 2 * CHUNK], vector),
        decay=gl.allocate_shared_memory(gl.float32, [RING, 2], vector),
        full=gl.allocate_shared_memory(gl.int64, [RING, 1], barrier),
        empty=gl.allocate_shared_memory(gl.int64, [RING, 1], barrier),
        scored=gl.allocate_shared_memory(gl.int64, [SCORE_RING, 1], barrier),
        unscored=gl.allocate_shared_memory(gl.int64, [SCORE_RING, 1], barrier),
        written=gl.allocate_shared_memory(gl.int64, [2, 1], barrier),
        unwritten=gl.allocate_shared_memory(gl.int64, [2, 1], barrier),
        RING=RING,
        SCORE_RING=SCORE_RING,
        HALVES=HALVES,
    )


@gluon.jit
def begin_barriers(shared, THREADS: gl.constexpr, FIRST_PASS: gl.constexpr):
    """Initialise the barriers with their arrival counts: all THREADS of a lane arrive, in other roles one thread."""
    first = shared.first
    for i in gl.static_range(2):
        mbarrier.init(shared.written.index(i), count=THREADS)
        mbarrier.init(shared.unwritten.index(i), count=1)
    for i in gl.static_range(shared.RING):
        mbarrier.init(shared.full.index(i), count=2)  # gates, loads
        mbarrier.init(shared.empty.index(i), count=1 + 2 * THREADS)  # scores, both lanes
    for i in gl.static_range(shared.SCORE_RING):
        mbarrier.init(shared.scored.index(i), count=1)
        mbarrier.init(shared.unscored.index(i), count=2 * THREADS)
    if FIRST_PASS:  # otherwise their memory has another use
        for i in gl.static_range(first.RING):
            # loads arrive; for the first chunk of a turn, scores arrive too
            mbarrier.init(first.full.index(i), count=1 if i % first.TURN > 0 else 2)
            mbarrier.init(first.empty.index(i), count=2 * THREADS)  # both lanes
        for i in gl.static_range(first.WORDS):
            mbarrier.init(first.told.index(i), count=1)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def rows_of(shared, place, half):
    """B or C (q, n) of a chunk, or half of its n."""
    return shared.rows.index(place * shared.HALVES + half)


@gluon.jit
def place_in(i, SIZE: gl.constexpr):
    """i % SIZE for i >= 0, without instructions for signs.

    The result passes through inline assembly, which hides the division from LLVM: compiling addresses that depend on a
    division takes long.
    """
    place = gl.to_tensor(i).to(gl.uint32) % SIZE
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [place], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def phase(i, SIZE: gl.constexpr):
    """The phase of use i of a ring at its barriers."""
    return (gl.to_tensor(i).to(gl.uint32) // SIZE & 1).to(gl.int32)


@gluon.jit
def places_of(shared, seen, i):
    """Slots of B, C and x of chunk i of the second pass, after a first pass of `seen` chunks.

    C is beyond the slots of the first pass.  With two halves, the first pass uses all slots, and C is in that after B.
    """
    x = place_in(seen + place_in(i, shared.RING), shared.first.RING)
    B = place_in(seen + i * shared.HALVES, shared.first.RING)
    return B, B + (shared.RING if shared.HALVES == 1 else 1), x


@gluon.jit
def scalar(buffer):
    """The single number in `buffer`."""
    return gl.reduce(buffer.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0, add)


@gluon.jit
def lane_of(vectors, row, lane):
    """The lane's half of row `row`."""
    halves = reinterpret(vectors, vectors.dtype, [2 * vectors.shape[0], vectors.shape[1] // 2], vectors.layout)
    return halves.index(2 * row + lane)
