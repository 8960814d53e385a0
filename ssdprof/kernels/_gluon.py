"""Shared code of Gluon kernels: names that later versions of Triton changed, aggregates, slots and
phases of rings, and waiting through global memory.

An aggregate is a struct of kernel values.  Kernels have aggregates for the arguments of a program's
roles and for a program's work, which is one or more segments.  Each operator defines its own,
because the order of the fields is that of the arguments in machine code.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma
from triton.language.core import _aggregate

# stages of functions: `stalls/attribute.py`
STAGES = {"segments": "ticket", "segment_at": "ticket", "chunks": "ticket"}

# Functions that later versions of Triton renamed: the barrier of a role's threads, TMA copies, and
# views of shared memory in another layout
role_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_descriptor = gl.shared_memory_descriptor
reinterpret = (
    _descriptor.reinterpret if hasattr(_descriptor, "reinterpret") else _descriptor._reinterpret
)


@gluon.constexpr_function
def constants(value):
    """The value, in which None, integers and bools, also those in tuples, have become compile-time
    constants.
    """
    if isinstance(value, gl.tuple):
        return gl.tuple([constants(part) for part in value])
    return gl.constexpr(value) if value is None or isinstance(value, int) else value


def aggregate(cls: type) -> type:
    """Decorates a class as a Gluon aggregate, whose constructor takes the annotated fields in order
    or by name.  Fields may have defaults.  Values of fields annotated as `gl.constexpr`, and None
    and integers in any field, become compile-time constants.
    """
    kinds = cls.__annotations__
    defaults = {name: getattr(cls, name) for name in kinds if hasattr(cls, name)}

    @gluon.constexpr_function
    def __init__(self, *values, **by_name):
        # not strict: fields after the positional ones are given by name, or have defaults
        fields = defaults | dict(zip(kinds, values, strict=False)) | by_name
        for name, value in fields.items():
            is_constant = kinds[name] is gl.constexpr
            setattr(self, name, gl.constexpr(value) if is_constant else constants(value))

    cls.__init__ = __init__
    return _aggregate(cls)


# Methods of an aggregate for the work of a program that has a single segment.  They are functions
# here, because an aggregate cannot inherit methods in Triton 3.9.


@gluon.jit
def segments(self):  # noqa: ARG001
    """The number of the program's segments."""
    return 1


@gluon.jit
def segment_at(self, k):  # noqa: ARG001
    """The program's k-th segment, and the number of the program's chunks before it."""
    return self, 0


@gluon.jit
def chunks(self):
    """The number of chunks of all segments; first passes over them do not count."""
    return self.nchunks


@gluon.constexpr_function
def product_layout(columns, warps):
    """Register layout of the result of an asynchronous matrix product (`warpgroup_mma`) with 16
    rows per warp, computed `columns` columns at a time.
    """
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


@gluon.jit
def begin_product(a, b, layout: gl.constexpr):
    """Start the matrix product a b (rows, columns) with fp32 sums.  It is asynchronous: the caller
    waits for it.
    """
    zero = gl.full([a.shape[0], b.shape[1]], 0.0, gl.float32, layout)
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def tile_indices(ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """Indices of the rows (ROWS) and of the columns (COLUMNS) of a tile with this layout."""
    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    return o_row, gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))


@gluon.jit
def add(a, b):
    """The combination of a sum that `gl.reduce` computes."""
    return a + b


@gluon.jit
def place_in(i, SIZE: gl.constexpr):
    """i % SIZE for i >= 0: the slot of use i in a ring of SIZE slots.

    The result passes through inline assembly, which hides the division from LLVM, because LLVM
    takes long to compile addresses that depend on a division.
    """
    place = gl.to_tensor(i).to(gl.uint32) % SIZE
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [place], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def phase(i, SIZE: gl.constexpr):
    """The phase, 0 or 1, at which the barriers of a ring of SIZE slots are for use i."""
    return (gl.to_tensor(i).to(gl.uint32) // SIZE & 1).to(gl.int32)


@gluon.jit
def scalar(buffer):
    """The only number of a buffer (1) in shared memory, as a scalar."""
    return gl.reduce(buffer.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0, add)


@gluon.jit
def arrive(barrier):
    """Have every thread arrive at an mbarrier by itself, so that no warp waits for others.

    The arrival orders the thread's earlier accesses to shared memory before later accesses of the
    threads that wait: a warp's accesses happen in order, the caller has waited for the products
    that read shared memory, and it has a fence between its stores and the arrival.
    """
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def masked(v, bits):
    """The numbers v, of 16 bits, where all of `bits` (int16) are set, and 0 where none is.  An
    instruction masks two numbers.
    """
    return gl.inline_asm_elementwise(
        "and.b32 $0, $1, $2;", "=r,r,r", [v, bits], dtype=v.dtype, is_pure=True, pack=2
    )


# Programs of one launch wait for each other through numbers in global memory


@gluon.jit
def load_acquire(ptr):
    """Load an int32 from global memory with acquire order: if another program stored it with
    release order, everything that the program stored before is visible to this thread.
    """
    code: gl.constexpr = "ld.acquire.gpu.global.b32 $0, [$1];"
    return gl.inline_asm_elementwise(code, "=r,l", [ptr], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def order_async():
    """A fence that orders this thread's earlier accesses before its later TMA copies."""
    code: gl.constexpr = "{ fence.proxy.async; mov.b32 $0, 0; }"
    gl.inline_asm_elementwise(code, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_until_written():
    """Wait until this thread's TMA stores are in global memory.  Triton's `store_wait` only waits
    until they have read shared memory.
    """
    code: gl.constexpr = "{ cp.async.bulk.wait_group 0; fence.proxy.async; mov.b32 $0, 0; }"
    gl.inline_asm_elementwise(code, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
