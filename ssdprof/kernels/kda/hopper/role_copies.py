"""Roles `loads` and `stores`: they copy tiles through TMA, which reads zeros beyond a sequence's
end, and writes nothing there.

Shared memory: `tiles.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ssdprof.kernels._gluon import async_load, async_store
from ssdprof.kernels.hopper.ring import CHUNK
from ssdprof.kernels.kda.hopper.tiles import (
    DIM,
    HALF,
    KEYS,
    QUERIES,
    THREADS,
    UPDATE,
    VALUES,
    halves_of,
)

# other functions belong to the stage that calls them
STAGES = {
    "load_inputs": "loads", "load_segment": "loads", "store_segment": "chunk_output",
}  # fmt: skip


@gluon.jit
def load_inputs(env, inputs, full, sequence, t, head):
    """q, k and g of the chunk at position t, half of the channels at a time."""
    q_desc, k_desc, g_desc, _, _ = env.inputs
    q_tiles, k_tiles, g_tiles = inputs
    mbarrier.expect(full.index(0), 4 * CHUNK * DIM)
    for half in gl.static_range(2):
        where = [sequence.tile, head // env.S.VALUES_PER_KEY, sequence.row + t, half * HALF]
        async_load(q_desc, where, full.index(0), q_tiles.index(half).reshape([1, 1, CHUNK, HALF]))
        async_load(k_desc, where, full.index(0), k_tiles.index(half).reshape([1, 1, CHUNK, HALF]))
    mbarrier.expect(full.index(1), CHUNK * DIM * env.S.GATE_BYTES)
    for half in gl.static_range(2):
        where = [sequence.tile, head, sequence.row + t, half * HALF]
        g_tile = g_tiles.index(half).reshape([1, 1, CHUNK, HALF])
        async_load(g_desc, where, full.index(1), g_tile)


@gluon.jit
def load_factor(tiles, desc, row, n, WHICH: gl.constexpr):
    """Tile WHICH of the program's n-th chunk, which another program has prepared."""
    at = 4 * n + WHICH
    tiles.wait_empty(at)
    full, halves = tiles.full_at(at), halves_of(tiles.tile(at))
    mbarrier.expect(full, 2 * CHUNK * DIM)
    for half in gl.static_range(2):
        async_load(desc, [row, half * HALF], full, halves.index(half))


@gluon.jit
def load_values(env, tiles, segment, t, row, n):
    """v at position t beside W."""
    at = 4 * n + VALUES
    tiles.wait_empty(at)
    full, halves = tiles.full_at(at), halves_of(tiles.tile(at))
    mbarrier.expect(full, 4 * CHUNK * HALF)
    where = [segment.sequence.tile, segment.head, segment.sequence.row + t, segment.first_v]
    async_load(env.inputs[3], where, full, halves.index(0).reshape([1, 1, CHUNK, HALF]))
    async_load(env.factors[3], [row, 0], full, halves.index(1))


@gluon.jit
def load_segment(env, tiles, segment, n):
    """The tiles of a segment's chunks, of which n come before it in the program."""
    keys_desc, queries_desc, X_desc, _ = env.factors
    for j in range(segment.nchunks):
        row = segment.place(j, env.S.HEADS) * CHUNK
        load_factor(tiles, keys_desc, row, n + j, KEYS)
        load_factor(tiles, queries_desc, row, n + j, QUERIES)
        load_factor(tiles, X_desc, row, n + j, UPDATE)
        load_values(env, tiles, segment, (segment.first + j) * CHUNK, row, n + j)


@gluon.jit
def store_segment(env, tiles, written, segment, n):
    """The outputs of a segment's chunks, and then the memory of v is free."""
    for j in range(segment.nchunks):
        mbarrier.wait(written.index((n + j) % 2), (n + j) // 2 & 1)
        t = segment.sequence.row + (segment.first + j) * CHUNK
        where = [segment.sequence.tile, segment.head, t, segment.first_v]
        out = halves_of(tiles.tile(4 * (n + j) + VALUES)).index(0)
        async_store(env.inputs[4], where, out.reshape([1, 1, CHUNK, HALF]))
        tma.store_wait(0)
        mbarrier.arrive(tiles.empty_at(4 * (n + j) + VALUES), count=THREADS)
