"""The two lanes of the role `units`, which has eight warps, four for each lane.

Tensors of the role hold the rows of both lanes, lane 0 first.  Triton takes the result of
`lane_number` for a uniform scalar, but its value differs between the lanes.  So a load from an
address that depends on it reads the data of this lane's rows, a product reads the operand for these
rows, and a lane continues when the mbarrier of this lane completes.  On the other hand, no
condition around a barrier of all threads, or around an operation that Triton compiles to one, may
depend on the lane number.

With one role per lane, the same code would be compiled twice.  Compiling would take half as long
again, and the kernel would not be faster.

If N is 256, the lanes hold half of N each, of one unit.  The output of every position is a sum over
N, and each lane has a partial sum.  Lane k finishes the positions of the k-th half of a chunk.  It
receives the partial sums of the other lane for these positions, and passes on its partial sums for
the other half, in fp32.

Weights of positions are sums of two 16-bit numbers, which a word of 32 bits holds.  In fp16 the
second number is stored times 2^11 (0x45000000 in fp32), because it would be lost for weights below
2^-14.  Code that reads it multiplies by 0x10001000, a pair of 2^-11.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssdprof.kernels._gluon import product_layout, reinterpret, role_barrier
from ssdprof.kernels.ssd.hopper.rings import SLICE

# lanes per role; tests without a GPU set it to 1, and run each lane by itself
LANES = gl.constexpr(2)
# most of N in one lane: a state of 64 x 128 fills a third of the lane's registers
MAX_WIDTH = gl.constexpr(128)
# layout (lane): one number, which all threads of a lane have
lane_scalar_layout = gl.constexpr(
    gl.DistributedLinearLayout([], [[0]] * 5, [[0], [0], [1]], [], [2])
)
# Layout of `exchange` in shared memory, in the order in which a product's result lies in registers:
# four numbers of a thread, then of the threads of a warp, then of warps.  Bases (p, half of q)
FRAGMENTS = (
    [0, 1],
    [8, 0],
    [0, 2],
    [0, 4],
    [1, 0],
    [2, 0],
    [4, 0],
    [16, 0],
    [32, 0],
    [0, 8],
    [0, 16],
)
half_layout = gl.constexpr(gl.SharedLinearLayout([*FRAGMENTS]))
# the same for the buffers of both halves, (half, p, half of q): the half is the last basis
IN_FIRST_HALF = [[0, *basis] for basis in FRAGMENTS]
halves_layout = gl.constexpr(gl.SharedLinearLayout([*IN_FIRST_HALF, [1, 0, 0]]))

# stages of functions: `stalls/attribute.py`
STAGES = {"lane_number": "setup", "allocate_exchange": "setup"}


@gluon.jit
def lane_number():
    """The lane of a thread of `units`, the role of the program's first threads: thread // 128.

    The assembly is marked as not pure, because otherwise the compiler would recompute it at every
    use, and take long.
    """
    code: gl.constexpr = """{
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        shr.u32 $0, thread, 7;
    }"""
    return gl.inline_asm_elementwise(code, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def first_of(lane):
    """The lane whose rows come first in tensors: 0, or, with one lane per role, this lane."""
    return gl.to_tensor(0) if LANES == 2 else lane


@gluon.jit
def unit_of(shared, lane):
    """Index of the lane's unit among the program's units: 0 if there is only one."""
    return lane if shared.UNITS == 2 else 0


@gluon.jit
def half_of(shared, lane):
    """Index of the lane's half of N; 0 if N is not split."""
    return lane if shared.N_SPLIT == 2 else 0


@gluon.constexpr_function
def lanes_layout(columns):
    """Register layout of products (lane row, column)."""
    return product_layout(columns, 4 * LANES)


@gluon.constexpr_function
def apart(layout):
    """A linear layout (lane row, column) of two lanes as a layout (lane, row, column) of the same
    elements.
    """
    rows = layout.shape[0] // 2

    def split(bases):
        return [[row // rows, row % rows, column] for row, column in bases]

    return gl.DistributedLinearLayout(
        split(layout.reg_bases),
        split(layout.lane_bases),
        split(layout.warp_bases),
        split(layout.block_bases),
        [2, rows, layout.shape[1]],
    )


@gluon.jit
def load_tiles(tile, layout: gl.constexpr):
    """Load `tile` (row, column), which is another one in each lane, as (lane row, column)."""
    columns: gl.constexpr = tile.shape[1]
    rows: gl.constexpr = LANES * SLICE
    lanes: gl.constexpr = apart(gl.to_linear_layout(layout, [rows, columns]))
    of_lane = tile.load(gl.SliceLayout(0, lanes))[None, :, :]
    both, _ = gl.broadcast(of_lane, gl.full([LANES, SLICE, columns], 0, tile.dtype, lanes))
    return gl.convert_layout(both.reshape([rows, columns]), layout)


@gluon.jit
def load_transposed(shared, slot, lane, layout: gl.constexpr):
    """Load x^T (lane p, q) of the lanes' units from slot `slot` of the ring `x`."""
    tile = shared.x.index(slot * shared.UNITS + unit_of(shared, lane))
    return load_tiles(tile.permute((1, 0)), layout)


@gluon.constexpr_function
def grouped(shape, rows):
    """The shape with its first dimension split into groups of `rows`."""
    return [shape[0] // rows, rows, *shape[1:]]


@gluon.jit
def tiles_of(tiles, lane, layout: gl.constexpr):
    """View two tiles (2, row, column), one per lane, as (lane, row, column) with this layout."""
    groups = reinterpret(tiles, tiles.dtype, grouped(tiles.shape, LANES), layout)
    return groups.index(first_of(lane))


@gluon.jit
def store_tiles(tiles, value):
    """Store `value` (lane row, column) in `tiles` (lane, row, column)."""
    tiles.store(value.reshape([LANES, value.shape[0] // LANES, value.shape[1]]))


@gluon.jit
def allocate_exchange(P: gl.constexpr, Q: gl.constexpr):
    """A buffer (half, p, q / 2) for the partial sums that each half passes to the other."""
    return gl.allocate_shared_memory(gl.float32, [2, P, Q // 2], half_layout)


@gluon.jit
def halves_of(v, layout: gl.constexpr):
    """Split v (half p, q) into its first and its second half of positions, which lane 0 and lane 1
    finish, each (half p, q / 2).
    """
    P: gl.constexpr = v.shape[0]
    Q: gl.constexpr = v.shape[1]
    first, second = gl.split(v.reshape([P, 2, Q // 2]).permute((0, 2, 1)))
    return gl.convert_layout(first, layout), gl.convert_layout(second, layout)


@gluon.jit
def own_positions(x, half, layout: gl.constexpr):
    """The positions of x^T (half p, q), 16-bit numbers, that each half finishes: (half p, q / 2).

    The assembly selects two numbers at a time; ptxas would unpack them.
    """
    code: gl.constexpr = """{
        .reg .pred second;
        setp.ne.b32 second, $3, 0;
        selp.b32 $0, $2, $1, second;
    }"""
    first, second = halves_of(x, layout)
    return gl.inline_asm_elementwise(
        code, "=r,r,r,r,r", [first, second, half], dtype=x.dtype, is_pure=True, pack=2
    )


@gluon.jit
def give_part(exchange, part, half, layout: gl.constexpr):
    """Return the partial sums for the positions that each half finishes, (half p, q / 2), and store
    those for the other positions in `exchange`, for the other half.

    part: the partial sums of each half of N for all positions, (half p, q).  half: this lane's
    """
    first, second = halves_of(part, layout)
    tiles = tiles_of(exchange, half, halves_layout)
    store_tiles(tiles, gl.where(half == 1, first, second))
    return gl.where(half == 1, second, first)


@gluon.jit
def take_part(exchange, half, layout: gl.constexpr):
    """The partial sums of the other half for the positions that each half finishes: (half p, q /
    2).
    """
    role_barrier()  # both lanes have stored their partial sums
    part = load_tiles(exchange.index(1 - half), layout)
    role_barrier()  # both lanes have loaded them, so that the buffer may be overwritten
    return part


# --- weights of positions, and their products with x; `role_gates.py` computes them


@gluon.constexpr_function
def for_dtype(code, dtype):
    """Assembly for a dtype: DTYPE is replaced by the dtype's name in PTX, and lines with the prefix
    `f16:` or `bf16:` are for that dtype only.
    """
    name = "bf16" if dtype == gl.bfloat16 else "f16"
    lines = [
        line.strip().removeprefix(f"{name}:") for line in code.replace("DTYPE", name).splitlines()
    ]
    return "\n".join(line for line in lines if not line.startswith(("f16:", "bf16:")))


@gluon.jit
def two_parts(v, dtype: gl.constexpr):
    """Each number of v in fp32 as a sum of two numbers of `dtype`: the nearest one in the low half
    of a word of 32 bits, and the rest in the high half.  The words have the type fp32.
    """
    code: gl.constexpr = for_dtype(
        """{
            .reg .b16 near, rest;
            .reg .f32 wide, scale;
            cvt.rn.DTYPE.f32 near, $1;
            cvt.f32.DTYPE wide, near;
            sub.rn.f32 wide, $1, wide;
     f16:   mov.b32 scale, 0x45000000;
     f16:   mul.rn.f32 wide, wide, scale;
            cvt.rn.DTYPE.f32 rest, wide;
            mov.b32 $0, {near, rest};
        }""",
        dtype,
    )
    return gl.inline_asm_elementwise(code, "=f,f", [v], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def weighted(x, weight, WHOLE: gl.constexpr):
    """x^T (lane p, q) times a weight per position (q), rounded to x's dtype.

    weight: of `two_parts`.  WHOLE: multiply by both parts, otherwise only by the first one

    prmt joins the low halves of two words with 0x5410, their first parts, and the high halves with
    0x7632, their second parts.
    """
    if WHOLE:
        code: gl.constexpr = for_dtype(
            """{
                .reg .b32 near, rest, scale;
                prmt.b32 near, $2, $3, 0x5410;
                prmt.b32 rest, $2, $3, 0x7632;
                mul.rn.DTYPEx2 rest, $1, rest;
         f16:   mov.b32 scale, 0x10001000;
         f16:   mul.rn.f16x2 rest, rest, scale;
                fma.rn.DTYPEx2 $0, $1, near, rest;
            }""",
            x.dtype,
        )
    else:
        code: gl.constexpr = for_dtype(
            """{
                .reg .b32 near;
                prmt.b32 near, $2, $3, 0x5410;
                mul.rn.DTYPEx2 $0, $1, near;
            }""",
            x.dtype,
        )
    return gl.inline_asm_elementwise(
        code, "=r,r,f,f", [x, weight[None, :]], dtype=x.dtype, is_pure=True, pack=2
    )


@gluon.jit
def rounded_off(x, weight, product):
    """x * weight - product: the rounding error of `product`, which is x times the first part of the
    weight (`weighted` without WHOLE).

    x * near - product has no more digits than x, so that it is exact, and only the sum with
    x * rest is rounded.  The numbers of prmt are those in `weighted`.
    """
    code: gl.constexpr = for_dtype(
        """{
            .reg .b32 near, rest, lost, scale;
            prmt.b32 near, $2, $3, 0x5410;
            prmt.b32 rest, $2, $3, 0x7632;
            neg.DTYPEx2 lost, $4;
            fma.rn.DTYPEx2 lost, $1, near, lost;
     bf16:  fma.rn.bf16x2 $0, $1, rest, lost;
     f16:   mul.rn.f16x2 rest, $1, rest;
     f16:   mov.b32 scale, 0x10001000;
     f16:   fma.rn.f16x2 $0, rest, scale, lost;
        }""",
        x.dtype,
    )
    args = [x, weight[None, :], product]
    return gl.inline_asm_elementwise(code, "=r,r,f,f,r", args, dtype=x.dtype, is_pure=True, pack=2)
