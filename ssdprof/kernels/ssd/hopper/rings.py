# mypy: ignore-errors
"""What the roles of `hopper_kernel.py` have in common: rings in shared memory, and barriers.

    gates       2 warps   chunk_cumsum: dt and the decays of a chunk, for both lanes
    loads       1 warp    B, C and x of a chunk, by the copy engine
    stores      1 warp    the outputs of a chunk, likewise
    scores      4 warps   bmm_chunk: C B^T, times each unit's decays; in the first pass it makes the gates
    units       8 warps   chunk_state, state_passing and chunk_scan, four warps for each lane

Each is in a file `role_*.py` (the units in `role_states.py` and `first_pass.py`); how two lanes share a role is in
`lanes.py`, how positions are weighted in `weights.py`, what a program has to do in `assignment.py`, and what segments
leave for others in `look_back.py`.  A unit is a head, or a slice of 64 of a head's P.  A program has two lanes: two
units of one group, or, where N is 256, the two halves of N of one unit, which exchange parts of the output
(`halves.py`).
Roles meet at mbarriers: `full`/`empty` guard a ring of chunks, `scored`/`unscored` a ring of decayed scores,
`written`/`unwritten` each lane's output, `told` the word on whether the first pass goes on.

The first pass has rings and barriers of its own, for other roles take part in it.  It takes turns of one chunk, or of
two where N is 256.  Waits are for one of two phases: who missed a turn of a ring would take the one before for it.
Chunk i of the second pass has the barriers of i % RING; where its rows and x are depends on where the first pass ended
(`places_of`), so that the first ones are copied while it ends.

Functions belong to the stages in STAGES; in a function a line `# stage ...` says which stage follows, to readers and to
`ssdprof stalls` (docs/reading-stalls.md).

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

CHUNK = gl.constexpr(64)  # rows of one matrix instruction
SLICE = gl.constexpr(64)  # of P: likewise
COLUMNS = gl.constexpr(64)  # 16-bit numbers that the copy engine puts side by side: more lie in blocks of so many
FLAG_STRIDE = gl.constexpr(8)  # int32 per flag: a 32-byte sector each
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
    """Its rings: of chunks, of turns, and of words.  Vectors as in `Shared`."""

    weights: gl.shared_memory_descriptor  # (weight_places, 2 q): of chunks
    decay: gl.shared_memory_descriptor  # (weight_places, 2): of all that was seen of the segment
    goes_on: gl.shared_memory_descriptor  # (words, 1): whether there is another turn after this one
    full: gl.shared_memory_descriptor  # chunks
    empty: gl.shared_memory_descriptor  # chunks
    told: gl.shared_memory_descriptor  # words
    RING: gl.constexpr  # chunks
    TURN: gl.constexpr  # chunks that are worked on at once
    WORDS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, weights, decay, goes_on, full, empty, told, RING, TURN):
        self.weights, self.decay, self.goes_on = weights, decay, goes_on
        self.full, self.empty, self.told = full, empty, told
        self.RING, self.TURN, self.WORDS = gl.constexpr(RING), gl.constexpr(TURN), gl.constexpr(word_places(RING, TURN))


@aggregate
class Shared:
    """Rings in shared memory.  Vectors hold the 64 numbers of lane 0, then those of lane 1."""

    first: FirstPass
    rows: gl.shared_memory_descriptor  # (places * halves, q, n): B or C of a chunk
    x: gl.shared_memory_descriptor  # (places * units, q, p)
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
    HALVES: gl.constexpr  # of N
    UNITS: gl.constexpr  # of this program

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
    """Assembly with DTYPE as PTX calls it.  Lines that begin with `f16:` or `bf16:` are for that one only."""
    name = "bf16" if dtype == gl.bfloat16 else "f16"
    lines = [line.strip().removeprefix(f"{name}:") for line in code.replace("DTYPE", name).splitlines()]
    return "\n".join(line for line in lines if not line.startswith(("f16:", "bf16:")))


@gluon.constexpr_function
def product_layout(columns, warps):
    """How a product of `columns` columns, and 16 rows for each warp, lies in registers."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


@gluon.constexpr_function
def weight_places(ring, turn):
    """How many chunks' weights there are places for, beside the first pass's ring of chunks.

    They are made by twos, when there is a place in the ring for a turn of them: the others must not overwrite what has
    not been read.
    """
    return (ring + 3 - turn) // 2 * 2


@gluon.constexpr_function
def word_places(ring, turn):
    """Places for the flags that continue the first pass: two more than turns, so that no flag is overwritten unread."""
    return ring // turn + 2


@gluon.jit
def allocate(
    dtype: gl.constexpr, WIDTH: gl.constexpr, HALVES: gl.constexpr, RING: gl.constexpr, SCORE_RING: gl.constexpr
):
    """All rings, for numbers of `dtype` and states with WIDTH of N in a lane; barriers are not to be used yet."""
    UNITS: gl.constexpr = 2 // HALVES
    FIRST_RING: gl.constexpr = RING * HALVES  # without C there is room for as many halves
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
    """Says who arrives at each: THREADS of a lane each for itself, of other roles one for all."""
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
    if FIRST_PASS:  # else their memory is used for something else
        for i in gl.static_range(first.RING):
            # by loads; in a turn's first by scores, too
            mbarrier.init(first.full.index(i), count=1 if i % first.TURN > 0 else 2)
            mbarrier.init(first.empty.index(i), count=2 * THREADS)  # both lanes
        for i in gl.static_range(first.WORDS):
            mbarrier.init(first.told.index(i), count=1)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def rows_of(shared, place, half):
    """B or C (q, n) of a chunk, or a half of its n."""
    return shared.rows.index(place * shared.HALVES + half)


@gluon.jit
def place_in(i, SIZE: gl.constexpr):
    """i % SIZE of what is not negative, without what signs take.

    Through assembly, which LLVM does not look into: where addresses depend on a division, it takes long over each.
    """
    place = gl.to_tensor(i).to(gl.uint32) % SIZE
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [place], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def phase(i, SIZE: gl.constexpr):
    """The phase of turn i at the barriers of a ring."""
    return (gl.to_tensor(i).to(gl.uint32) // SIZE & 1).to(gl.int32)


@gluon.jit
def places_of(shared, seen, i):
    """Where chunk i of the second pass has B, C and x, after a first pass over `seen` chunks.

    C is past the places of the first pass or, if that has all, in the one after B.
    """
    x = place_in(seen + place_in(i, shared.RING), shared.first.RING)
    B = place_in(seen + i * shared.HALVES, shared.first.RING)
    return B, B + (shared.RING if shared.HALVES == 1 else 1), x


@gluon.jit
def scalar(buffer):
    """The one number in `buffer`."""
    return gl.reduce(buffer.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0, add)


@gluon.jit
def lane_of(vectors, row, lane):
    """The half of row `row` that is a lane's."""
    halves = reinterpret(vectors, vectors.dtype, [2 * vectors.shape[0], vectors.shape[1] // 2], vectors.layout)
    return halves.index(2 * row + lane)
