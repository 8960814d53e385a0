"""What only the portable kernels of both operators have, in the interpreter: segments, their first
passes, tiles.
"""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import BF16, EXACT, FP16, GDNCase, SSDCase, assert_bitwise, assert_close, bounds
from targets import GDN_TINY, SSD_TINY, TARGETS, gdn_portable, ssd_portable

from ssdprof.kernels import Precision, get
from ssdprof.kernels.gdn import fused as gdn_fused
from ssdprof.kernels.gdn.config import GDNPortableConfig
from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.gdn.reference import gdn_recurrence
from ssdprof.kernels.ssd.config import SSDPortableConfig
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.kernels.ssd.launch import allocated
from ssdprof.kernels.ssd.portable import buffer_sizes, find_segment
from ssdprof.kernels.ssd.reference import ssd_recurrence

# --- SSD


def test_the_first_pass_stops_where_nothing_is_felt():
    """The segments hold 32 positions.  After 16 steps of 2^-16 each, the effect of the chunk before
    is negligible.

    The first pass therefore never reads a NaN in that chunk, and the segments after it contain
    none.
    """
    inputs = SSDCase(seqlen=96, heads=1, dt_limit=(0.7, 0.7)).inputs()
    inputs = replace(inputs, A=torch.full((1,), -16.0), x=inputs.x.contiguous())
    expected = TARGETS["ssd tiny"](inputs)
    inputs.x[0, 5] = torch.nan
    output = TARGETS["ssd tiny"](inputs)
    assert not torch.isfinite(output.out[:, 5:16]).any()
    assert_bitwise(
        (output.out[:, 32:], output.final_states), (expected.out[:, 32:], expected.final_states)
    )


@pytest.mark.parametrize("p_rows", [True, False], ids=["p rows", "n rows"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_nothing_is_rounded_on_the_way_into_the_state(dtype, p_rows):
    """Rounding x times its weight would cost 0.4 of a unit roundoff.  A sequence of this length has
    no first pass.
    """
    inputs = SSDCase(seqlen=256, initial_states=True, dtype=dtype, chunk_size=256, skip="").inputs()
    states = ssd_portable(replace(SSDPortableConfig(), p_rows=p_rows))(
        inputs, EXACT
    ).final_states.double()
    exact = ssd_recurrence(inputs).final_states
    assert (states - exact).norm() < torch.finfo(dtype).eps / 32 * exact.norm()


@given(
    lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=12).filter(any),
    max_segments=st.integers(1, 9),
    min_chunks=st.integers(1, 8),
    more_chunks=st.integers(0, 8),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_grid_is_large_enough(
    lengths: list[int], max_segments: int, min_chunks: int, more_chunks: int
):
    config = SSDPortableConfig(
        chunk=16,
        max_segments=max_segments,
        min_chunks=min_chunks,
        max_chunks=min_chunks + more_chunks,
    )
    chunks = [triton.cdiv(length, 16) for length in lengths]
    needed = sum(max(1, triton.cdiv(count, config.segment_chunks(count))) for count in chunks)
    x = torch.zeros(1, 1, 1, 1).expand(1, sum(lengths), 1, 1)
    inputs = SSDInputs(
        x=x, dt=x[..., 0], A=torch.zeros(1), B=x, C=x, cu_seqlens=bounds(tuple(lengths))
    )
    assert needed <= config.segment_count(inputs)
    if any(count > config.segment_chunks(count) for count in chunks):
        assert config.handover(inputs)


@triton.jit
def _segments_kernel(
    cu_seqlens_ptr,
    table_ptr,
    sequences,
    EVERY: tl.constexpr,
    CHUNK: tl.constexpr,
    RULE: tl.constexpr,
):
    row = tl.program_id(0)
    sequence, segment, begin, length = find_segment(
        row * EVERY, cu_seqlens_ptr, 1, sequences, CHUNK, RULE
    )
    tl.store(table_ptr + 4 * row, sequence)
    tl.store(table_ptr + 4 * row + 1, segment)
    tl.store(table_ptr + 4 * row + 2, begin.to(tl.int32))
    tl.store(table_ptr + 4 * row + 3, length)


@pytest.mark.parametrize(("sequences", "every"), [(6, 1), (200, 29)])
def test_segments_of_packed_sequences(sequences, every):
    """200 sequences: more than one iteration reads.  Some are empty."""
    lengths = tuple((7 * i * i) % 61 for i in range(sequences))
    begins = bounds(lengths)
    expected = []
    for i, length in enumerate(lengths):
        count = triton.cdiv(length, 16)
        for segment in range(max(1, triton.cdiv(count, SSD_TINY.segment_chunks(count)))):
            expected.append([i, segment, int(begins[i]), length])
    rows = -(-len(expected) // every)
    table = torch.full((rows + 1, 4), -7, dtype=torch.int32)
    rule = (SSD_TINY.max_segments, SSD_TINY.min_chunks, SSD_TINY.max_chunks)
    _segments_kernel[(rows + 1,)](begins, table, sequences, EVERY=every, CHUNK=16, RULE=rule)
    assert table[:-1].tolist() == expected[::every]
    assert table[-1, 0] == -1


def test_plan_says_what_is_allocated():
    inputs = SSDCase(seqlen=600, headdim=8).inputs()
    precision = Precision(state_dtype=FP16)
    plan = get("ssd", "fused").plan(inputs, precision)
    gates = (2 * 2 * 600 + 32) * 4
    states = 2 * 8 * 16 * 2
    sync = (32 + 8 * 2) * 4
    scores = 19 * 32 * 32 * 4
    assert (plan.variant, plan.launches) == ("interpreter", 3)
    assert plan.workspace_bytes == gates + states + sync + scores
    workspace = allocated(
        buffer_sizes(inputs, precision, SSDPortableConfig.choose(inputs, (9, 0), precision)),
        inputs.device,
    )
    assert sum(tensor.nbytes for tensor in workspace.values()) == plan.workspace_bytes
    short = get("ssd", "fused").plan(SSDCase(seqlen=200).inputs(), EXACT)
    assert (short.launches, short.workspace_bytes) == (2, (2 * 2 * 200 + 32 + 7 * 32 * 32) * 4)


# --- GDN


@pytest.mark.parametrize("chunk", [16, 32, 64, 128])
def test_the_inverse_of_collinear_keys(chunk):
    """beta near 2 and nearly collinear keys: the powers of the system are huge, its inverse is
    not.
    """
    case = GDNCase(seqlen=256, key_dim=32, collinear=0.95, gate=0.001)
    inputs = case.inputs(beta=torch.full((1, 256, 1), 1.95))
    config = GDNPortableConfig(chunk=chunk, block_k=32, block_v=16, v_rows=False)
    assert_close(gdn_portable(config)(inputs, EXACT), gdn_recurrence(inputs), 3e-4)


def test_keys_that_are_not_normalised():
    """Longer keys enlarge a state.  A first pass must begin before a chunk whose bound is not
    negligible.
    """
    inputs = GDNCase(seqlen=96, gate=3.0, key_dim=16).inputs()
    inputs = replace(inputs, use_qk_l2norm=False, k=inputs.k * 0.6)
    assert_close(TARGETS["gdn tiny, cut"](inputs), gdn_recurrence(inputs), 1e-4)


def test_segments_forget_but_not_too_early():
    """A decay of 2^-3 per chunk: eight chunks to forget.  A segment is shorter than that."""
    inputs = GDNCase(seqlen=16 * 24).inputs(g=torch.full((1, 16 * 24, 1), -3 * 0.6931 / 16))
    whole, cut = (
        gdn_portable(one)(inputs, EXACT) for one in (GDN_TINY, replace(GDN_TINY, segment=2))
    )
    assert_close(cut, whole, 1e-6)
    # the first pass begins after the start of the sequence
    assert not torch.equal(cut.out, whole.out)


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("heads", [32, 160])
def test_the_length_of_a_pack_decides_nothing_if_batch_invariant(heads, l2norm):
    """Otherwise segments or tiles would differ between a sequence in a pack and the sequence
    alone.
    """
    hopper = []
    portable = []
    for sequences, seqlen in ((1, 64), (1, 4000), (2, 8000), (64, 160_000)):
        empty = torch.empty(1, seqlen, 1, 1, device="meta", dtype=BF16)
        q, v = (empty.expand(1, seqlen, count, 128) for count in (heads // 2, heads))
        inputs = GDNInputs.unchecked(
            q=q,
            k=q,
            v=v,
            g=v[..., 0],
            beta=v[..., 0],
            use_qk_l2norm=l2norm,
            cu_seqlens=torch.empty(sequences + 1, device="meta", dtype=torch.int32),
        )
        config = GDNHopperConfig.choose(inputs, 132, batch_invariant=True)
        assert 64 * config.segment >= seqlen
        hopper.append(replace(config, segment=0))
        portable.append(GDNPortableConfig.choose(inputs, (9, 0), 132, batch_invariant=True))
    assert len(set(hopper)) == len(set(portable)) == 1
    assert portable[0].segment == 0


@pytest.mark.parametrize("lengths", [(10, 10), (1, 1, 30), (1,)])
def test_short_packs_do_not_run_the_recurrent_kernel_if_batch_invariant(lengths):
    assert (
        gdn_fused.plan(GDNCase(lengths=lengths).inputs(), batch_invariant=True).variant
        != "recurrent"
    )
