"""Shared code of Gluon kernels: names that later versions of Triton changed, aggregates, slots and
phases of rings.

An aggregate holds the arguments of a program's roles, or a program's work, one or more segments.
Each operator has its own for a segment and for all arguments of a role, because the order of its
fields is that of the arguments in machine code.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma
from triton.language.core import _aggregate

STAGES = {"segments": "ticket", "segment_at": "ticket", "chunks": "ticket"}

# Later versions of Triton have other names for these: the barrier of a role's threads, TMA copies,
# and views of shared memory with another layout.
role_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_descriptor = gl.shared_memory_descriptor
reinterpret = (
    _descriptor.reinterpret if hasattr(_descriptor, "reinterpret") else _descriptor._reinterpret
)


@gluon.constexpr_function
def constants(value):
    """`value` with None and whole numbers, also in tuples, as constants."""
    if isinstance(value, gl.tuple):
        return gl.tuple([constants(part) for part in value])
    return gl.constexpr(value) if value is None or isinstance(value, int) else value


def aggregate(cls: type) -> type:
    """A Gluon aggregate with a constructor: its annotated fields, in their order or by name, some
    with defaults.
    """
    kinds = cls.__annotations__
    defaults = {name: getattr(cls, name) for name in kinds if hasattr(cls, name)}

    @gluon.constexpr_function
    def __init__(self, *values, **named):
        for name, value in (defaults | dict(zip(kinds, values, strict=False)) | named).items():
            setattr(
                self, name, gl.constexpr(value) if kinds[name] is gl.constexpr else constants(value)
            )

    cls.__init__ = __init__
    return _aggregate(cls)


# Methods of a segment that is the whole work of its program.  An aggregate cannot inherit them in
# Triton 3.9.


@gluon.jit
def segments(self):  # noqa: ARG001
    return 1


@gluon.jit
def segment_at(self, k):  # noqa: ARG001
    """The program's k-th segment, and the number of the program's chunks before it."""
    return self, 0


@gluon.jit
def chunks(self):
    """Chunks of all segments, without first passes."""
    return self.nchunks


@gluon.constexpr_function
def product_layout(columns, warps):
    """Register layout of a product with `columns` columns and 16 rows per warp."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


@gluon.jit
def begin_product(a, b, layout: gl.constexpr):
    """Start a b (rows, columns) with fp32 sums asynchronously.  The caller waits for it."""
    zero = gl.full([a.shape[0], b.shape[1]], 0.0, gl.float32, layout)
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def tile_indices(ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """Indices of the rows and of the columns of a tile with this layout."""
    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    return o_row, gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def place_in(i, SIZE: gl.constexpr):
    """i % SIZE for i >= 0.

    The result passes through inline assembly, which hides the division from LLVM: compiling
    addresses that depend on a division takes long.
    """
    place = gl.to_tensor(i).to(gl.uint32) % SIZE
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [place], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def phase(i, SIZE: gl.constexpr):
    """The phase of use i of a ring at its barriers."""
    return (gl.to_tensor(i).to(gl.uint32) // SIZE & 1).to(gl.int32)


@gluon.jit
def scalar(buffer):
    """The single number in `buffer`."""
    return gl.reduce(buffer.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0, add)


@gluon.jit
def arrive(barrier):
    """Every thread arrives by itself, so that no warp waits for others.

    This is safe: a warp's accesses to shared memory happen in order, the caller has waited for
    products that read it, and a fence separates stores from the arrival that announces them.
    """
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def masked(v, bits):
    """v where all of `bits` are set, 0 where none is set.  Processes two numbers at a time."""
    return gl.inline_asm_elementwise(
        "and.b32 $0, $1, $2;", "=r,r,r", [v, bits], dtype=v.dtype, is_pure=True, pack=2
    )


# Programs of one launch that wait for each other, through numbers in global memory


@gluon.jit
def load_acquire(ptr):
    """A number, after which what was written before it is visible."""
    code: gl.constexpr = "ld.acquire.gpu.global.b32 $0, [$1];"
    return gl.inline_asm_elementwise(code, "=r,l", [ptr], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def order_async():
    """Later TMA copies come after what this thread has read."""
    code: gl.constexpr = "{ fence.proxy.async; mov.b32 $0, 0; }"
    gl.inline_asm_elementwise(code, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_until_written():
    """Wait until what this thread has stored through TMA is in global memory; `store_wait` waits
    until it is read from shared memory.
    """
    code: gl.constexpr = "{ cp.async.bulk.wait_group 0; fence.proxy.async; mov.b32 $0, 0; }"
    gl.inline_asm_elementwise(code, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
