# mypy: ignore-errors
"""Shared code of Gluon kernels: names that later versions of Triton changed, slots and phases of rings, layouts."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

STAGES = {
    "add": "caller", "place_in": "caller", "phase": "caller", "scalar": "caller", "arrive": "caller",
    "masked": "caller",
}  # fmt: skip

# Later versions of Triton have other names for these: the barrier of a role's threads, TMA copies, and views of shared
# memory with another layout.
role_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_descriptor = gl.shared_memory_descriptor
reinterpret = _descriptor.reinterpret if hasattr(_descriptor, "reinterpret") else _descriptor._reinterpret


@gluon.constexpr_function
def product_layout(columns, warps):
    """Register layout of a product with `columns` columns and 16 rows per warp."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def place_in(i, SIZE: gl.constexpr):
    """i % SIZE for i >= 0.

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
def scalar(buffer):
    """The single number in `buffer`."""
    return gl.reduce(buffer.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0, add)


@gluon.jit
def arrive(barrier):
    """Every thread arrives by itself, so that no warp waits for others.

    This is safe: a warp's accesses to shared memory happen in order, the caller has waited for products that read it,
    and a fence separates stores from the arrival that announces them.
    """
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def masked(v, bits):
    """v where all of `bits` are set, 0 where none is set.  Processes two numbers at a time."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [v, bits], dtype=v.dtype, is_pure=True, pack=2)
