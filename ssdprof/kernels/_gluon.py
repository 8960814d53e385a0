# mypy: ignore-errors
"""What Gluon kernels share: names that later versions of Triton changed, places and phases of rings, layouts."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

STAGES = {
    "add": "caller",
    "place_in": "caller",
    "phase": "caller",
    "scalar": "caller",
    "arrive": "caller",
    "masked": "caller",
}

# later versions of Triton have other names for these: the barrier of a role's threads, copies by the copy engine, and
# shared memory by another layout
role_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_descriptor = gl.shared_memory_descriptor
reinterpret = _descriptor.reinterpret if hasattr(_descriptor, "reinterpret") else _descriptor._reinterpret


@gluon.constexpr_function
def product_layout(columns, warps):
    """How a product of `columns` columns, and 16 rows for each warp, lies in registers."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def place_in(i, SIZE: gl.constexpr):
    """i % SIZE of an i that is not negative.

    Through assembly, which LLVM does not look into: where addresses depend on a division, it takes long over each.
    """
    place = gl.to_tensor(i).to(gl.uint32) % SIZE
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [place], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def phase(i, SIZE: gl.constexpr):
    """The phase of turn i at the barriers of a ring."""
    return (gl.to_tensor(i).to(gl.uint32) // SIZE & 1).to(gl.int32)


@gluon.jit
def scalar(buffer):
    """The one number in `buffer`."""
    return gl.reduce(buffer.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0, add)


@gluon.jit
def arrive(barrier):
    """By each thread for itself, so that no warp waits for others.

    A warp's accesses to shared memory happen in order, products that read it have been waited for, and between stores
    and the arrival that tells of them is a fence.
    """
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def masked(v, bits):
    """v where all of `bits` are set, 0 where none is; two at a time."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [v, bits], dtype=v.dtype, is_pure=True, pack=2)
