"""Kimi Delta Attention for Hopper in one launch: some programs prepare chunks, others pass the
state through prepared chunks.

A slot is the index of a chunk among the chunks of all sequences.  Slots are cut into slabs of
`slab` slots.  A program either prepares one chunk of one head (`prep.py`), or scans the chunks of a
slab for 64 columns of V of one head (`scan.py`).  Prepared chunks go through global memory.  Two
programs of either kind share a multiprocessor, so that scans, which often wait for products, run
beside programs that prepare later slabs.

Programs come in groups.  Group g has

    slab * HV        programs that prepare slab g, heads fastest
    HV * V / 64      programs that scan slab g - behind

A scan waits until its slab is prepared.  If a sequence continues from an earlier slab, the scan
also waits until that slab's scan has left the state in `final_states`.  It only waits for programs
with lower numbers, which a GPU starts first, so that the running program with the lowest number
never waits.  The cuts of sequences have no effect on bits.

In:      q, k (B, T, H, K) | v (B, T, HV, V) | g (B, T, HV, K) | beta (B, T, HV)
         initial_state (sequences, HV, K, V) | cu_seqlens (sequences + 1)
         for raw gates A_log (HV), dt_bias (HV, K)
Between: keys, queries, X (slots, HV, 64, K) | W (slots, HV, 64, 64), all in q's dtype
         ends (slots, HV, K) fp32
         sync int32, zeroed: for each slab and head, the number of programs that have prepared it;
         then for each slab, head and slice of V, whether it is scanned
Out:     out (B, T, HV, V) | final_states (sequences, HV, K, V) fp32, any strides
Grid:    ((slabs + behind) * programs of a group)
Equations: `../fused.py`.  Oracle: `../reference.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssdprof.kernels._gluon import aggregate, load_acquire, order_async, role_barrier
from ssdprof.kernels.gdn.hopper.assignment import packed_sequence, sequence_at
from ssdprof.kernels.hopper.ring import CHUNK
from ssdprof.kernels.kda.hopper.prep import (
    allocate_inputs,
    load_inputs,
    prepare_chunk,
    vector_layout,
)
from ssdprof.kernels.kda.hopper.scan import KDASegment, scan_segment
from ssdprof.kernels.kda.hopper.tiles import DIM, HALF, allocate_tiles, load_segment, store_segment

# stages of functions (`stalls/attribute.py`); others belong to the stage that calls them
STAGES = {
    "wait_for": "waiting.chunk", "slab_sequences": "ticket", "chunk_of": "ticket",
    "segment_at": "ticket", "prepare": "setup", "idle": "setup", "scan": "setup",
    "loads": "loads", "stores": "chunk_output", "_kda_hopper_kernel": "setup",
}  # fmt: skip


@aggregate
class KDAEnv:
    """The arguments that all roles share."""

    tensor_descs: gl.tuple  # descriptors of q, k, g, v and out
    factor_descs: gl.tuple  # descriptors of keys, queries, X and W
    beta_ptr: gl.tensor
    ends_ptr: gl.tensor
    initial_ptr: gl.tensor | gl.constexpr
    final_ptr: gl.tensor
    A_log_ptr: gl.tensor | gl.constexpr
    dt_bias_ptr: gl.tensor | gl.constexpr
    cu_seqlens_ptr: gl.tensor | gl.constexpr
    prepared_ptr: gl.tensor  # for each slab and head: number of programs that have prepared it
    scanned_ptr: gl.tensor  # for each slab, head and slice of V: whether it is scanned
    beta_strides: gl.tuple
    cu_stride: gl.tensor | gl.constexpr
    seqlen: gl.tensor
    sequences: gl.tensor
    slab_size: gl.tensor  # slots of a slab
    slab: gl.tensor  # number of the slab that the program prepares or scans
    number: gl.tensor  # number of the program among those of its kind and slab
    scale: gl.tensor
    S: gl.constexpr  # compile-time arguments

    @gluon.jit
    def sequence_at(self, i):
        """Sequence i."""
        return sequence_at(i, self.seqlen, self.cu_seqlens_ptr, self.cu_stride)

    @gluon.jit
    def sequence_of(self, slot):
        """Index of the sequence to which a slot belongs."""
        if self.cu_seqlens_ptr is None:
            return slot // gl.cdiv(self.seqlen, CHUNK)
        else:
            return packed_sequence(slot, self.sequences, self.cu_seqlens_ptr, self.cu_stride)

    @gluon.jit
    def slots(self):
        """The first slot of the program's slab, and the slot after its last.

        If sequences are not packed, each sequence begins with a new slab, and the slabs of all
        sequences come in turn, so that the sequences are scanned at the same time.
        """
        if self.cu_seqlens_ptr is None:
            chunks = gl.cdiv(self.seqlen, CHUNK)  # of a sequence
            first = self.slab // self.sequences * self.slab_size  # chunk of the sequence
            begin = self.slab % self.sequences * chunks  # the sequence's first slot
            return begin + first, begin + gl.minimum(first + self.slab_size, chunks)
        else:
            first, slots = self.slab * self.slab_size, self.seqlen // CHUNK + self.sequences
            return first, gl.minimum(first + self.slab_size, slots)

    @gluon.jit
    def slab_sequences(self):
        """The first sequence that has slots in the slab, and the one after the last."""
        first, end = self.slots()
        return self.sequence_of(first), self.sequence_of(end - 1) + 1

    @gluon.jit
    def before(self):
        """The distance between the numbers of a slab and of the slab before it in its sequence."""
        if self.cu_seqlens_ptr is None:
            return self.sequences
        else:
            return gl.to_tensor(1)

    @gluon.jit
    def prepared_at(self, head):
        """The address at which programs count that have prepared the slab for a head."""
        return self.prepared_ptr + self.slab * self.S.HEADS + head

    @gluon.jit
    def scanned_at(self, slab):
        """The address of the flag that this program's head and columns of V of a slab are
        scanned.
        """
        return self.scanned_ptr + slab * (self.S.HEADS * self.S.SLICES) + self.number

    @gluon.jit
    def segment_at(self, i):
        """The part of sequence i in the slab, for the head and the columns of V that the program
        scans.  If the sequence is empty, or ends before the slab, the part has no chunks.
        """
        sequence = self.sequence_at(gl.to_tensor(i))
        first, end = self.slots()
        # from slots to chunks of the sequence
        first = gl.maximum(first - sequence.slot, 0)
        end = gl.minimum(end - sequence.slot, gl.cdiv(sequence.length, CHUNK))
        head, first_v = self.number // self.S.SLICES, self.number % self.S.SLICES * HALF
        return KDASegment(sequence, head, first_v, first, gl.maximum(end - first, 0))


@gluon.jit
def wait_for(flag_ptr, count):
    """Wait until `count` programs have added 1 to a counter, or 1 program to a flag.  Afterwards
    this thread, and TMA copies that it starts, can read what these programs wrote before.
    """
    seen = gl.to_tensor(0)
    while seen < count:
        seen = load_acquire(flag_ptr)
    order_async()


@gluon.jit
def wait_for_slab(env):
    """Wait until the slab is prepared for the head that the program scans."""
    first, end = env.slots()
    wait_for(env.prepared_at(env.number // env.S.SLICES), end - first)


@gluon.jit
def chunk_of(env):
    """The slot, the head, the sequence and the first position of the chunk that the program
    prepares, and whether this chunk exists.
    """
    first, end = env.slots()
    slot, head = first + env.number // env.S.HEADS, env.number % env.S.HEADS
    sequence = env.sequence_at(env.sequence_of(gl.minimum(slot, end - 1)))
    t = (slot - sequence.slot) * CHUNK
    return slot, head, sequence, t, (slot < end) & (t < sequence.length)


@gluon.jit
def prepare(env, tiles, full):
    """Role: prepares a chunk of a slab.  There is such a program for each slot and head.

    tiles, full: of `allocate_inputs`, which `load_inputs` has begun to fill.
    """
    slot, head, sequence, t, exists = chunk_of(env)
    if exists:
        prepare_chunk(env, tiles, full, sequence, t, slot * env.S.HEADS + head, head)
    role_barrier()  # all threads have stored before one of them adds to the counter
    # even if the chunk does not exist, because `wait_for_slab` waits for all slots of the slab
    if slot < env.slots()[1]:
        gl.atomic_add(env.prepared_at(head), 1, sem="release")


@gluon.jit
def idle():
    """Role without work: `warp_specialize` gives `prepare` more registers only if there is a second
    role.
    """


@gluon.jit
def scan(env, ring, written):
    """Role: scans the sequences that have slots in a slab, for 64 columns of V of one head.

    ring, written: of `allocate_tiles`, here and in the other roles of the program.  n counts the
    program's chunks.
    """
    ends = gl.allocate_shared_memory(gl.float32, [2, DIM], vector_layout)
    wait_for_slab(env)
    n, sequences = gl.to_tensor(0), env.slab_sequences()
    for i in range(sequences[0], sequences[1]):
        segment = env.segment_at(i)
        # without chunks: for an empty sequence, whose initial state is its final state
        if (segment.nchunks > 0) | (segment.first == 0):
            if segment.first > 0:
                wait_for(env.scanned_at(env.slab - env.before()), 1)
            scan_segment(env, ring, written, segment, ends, n)
            n += segment.nchunks
    gl.atomic_add(env.scanned_at(env.slab), 1, sem="release")


@gluon.jit
def loads(env, ring):
    """Role: loads the tiles of `scan` through TMA."""
    wait_for_slab(env)
    n, sequences = gl.to_tensor(0), env.slab_sequences()
    for i in range(sequences[0], sequences[1]):
        segment = env.segment_at(i)
        load_segment(env, ring, segment, n)
        n += segment.nchunks


@gluon.jit
def stores(env, ring, written):
    """Role: stores the outputs of `scan` through TMA."""
    n, sequences = gl.to_tensor(0), env.slab_sequences()
    for i in range(sequences[0], sequences[1]):
        segment = env.segment_at(i)
        store_segment(env, ring, written, segment, n)
        n += segment.nchunks


@gluon.jit(do_not_specialize=["seqlen", "sequences", "slabs", "slab_size", "behind"])
def _kda_hopper_kernel(
    q_desc, k_desc, g_desc, v_desc, keys_desc, queries_desc, X_desc, W_desc, out_desc, tensors,
    strides, seqlen, sequences, slabs, slab_size, behind, scale, S: gl.constexpr,
):  # fmt: skip
    """A program prepares one chunk of a slab, or scans the chunks of an earlier slab."""
    beta_ptr, cu_seqlens_ptr, A_log_ptr, dt_bias_ptr, ends_ptr, initial_ptr, sync_ptr, final_ptr = (
        tensors
    )
    beta_strides, cu_strides = strides
    # a group of programs: first those that prepare a slab, then those that scan an earlier one
    preparing = slab_size * S.HEADS
    group_size = preparing + S.HEADS * S.SLICES
    group, number = gl.program_id(0) // group_size, gl.program_id(0) % group_size
    prepares = number < preparing
    slab = gl.where(prepares, group, group - behind)
    # the first groups have no slab to scan, the last ones none to prepare
    if (slab >= 0) & (slab < slabs):
        env = KDAEnv(
            (q_desc, k_desc, g_desc, v_desc, out_desc),
            (keys_desc, queries_desc, X_desc, W_desc),
            beta_ptr,
            ends_ptr,
            initial_ptr,
            final_ptr,
            A_log_ptr,
            dt_bias_ptr,
            cu_seqlens_ptr,
            sync_ptr,
            sync_ptr + slabs * S.HEADS,
            beta_strides,
            cu_strides[0],
            seqlen,
            sequences,
            slab_size,
            slab,
            gl.where(prepares, number, number - preparing),
            scale,
            S,
        )
        if prepares:
            inputs, full = allocate_inputs(q_desc.dtype, g_desc.dtype)
            _, head, sequence, t, exists = chunk_of(env)
            if exists:
                load_inputs(env, inputs, full, sequence, t, head)
            # the last two lists: warps, and registers of a thread, of the roles after the first
            gl.warp_specialize([(prepare, (env, inputs, full)), (idle, ())], [1], [24])
        else:
            ring, written = allocate_tiles(q_desc.dtype)
            gl.warp_specialize(
                [
                    (scan, (env, ring, written)),
                    (loads, (env, ring)),
                    (stores, (env, ring, written)),
                ],
                [1, 1],
                [24, 24],
            )
