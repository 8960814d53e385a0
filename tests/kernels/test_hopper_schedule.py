"""How the Hopper kernels divide a call into segments and programs.  The decision needs no GPU."""

import math
from dataclasses import asdict, replace

import pytest
import torch
from compile_target import compiled, on_meta
from kernel_cases import FP16, FP32, SSDCase
from targets import slow
from test_exactness import NO_LARGER

from ssdprof.kernels.hopper.schedule import Cut
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.hopper.config import (
    TIMES,
    UNFUSED_CHUNK,
    SSDHopperConfig,
    fastest_cut,
    shared_bytes,
    unsupported,
)
from ssdprof.kernels.ssd.hopper.launch import buffer_sizes
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.kernels.ssd.launch import nbytes as workspace_bytes
from ssdprof.kernels.tensors import row_stride

pytestmark = pytest.mark.slow
H200 = 132  # multiprocessors
MEASURED_LAYER = SSDCase(
    seqlen=4096, batch=2, heads=4, headdim=64, dstate=128, dtype=torch.bfloat16
)


# --- what the kernel takes


def test_inputs_that_are_not_on_a_hopper_gpu_are_not_taken():
    assert unsupported(SSDCase().inputs()) == "anything but a Hopper GPU"


@pytest.fixture
def hopper(monkeypatch) -> SSDInputs:
    """Inputs that pretend to be on a Hopper GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr("ssdprof.kernels.ssd.hopper.config.capability", lambda _tensor: (9, 0))
    return MEASURED_LAYER.but(seqlen=100).inputs()


def test_the_batch_strides_that_the_copy_engine_reads(hopper: SSDInputs):
    """Multiples of 16 bytes.  Sequences may have gaps between them, but may not overlap."""
    assert unsupported(hopper) == ""
    for name in ("x", "B", "C", "dt"):
        tensor = getattr(hopper, name)
        sequence, *within = tensor.stride()
        for apart, refused in ((8, False), (4, name != "dt"), (-sequence, name != "dt")):
            strides = (sequence + apart, *within)
            moved = torch.empty(3 * sequence, dtype=tensor.dtype).as_strided(tensor.shape, strides)
            reason = unsupported(replace(hopper, **{name: moved}))
            assert reason == (
                f"batch stride of {name}, which TMA cannot read" if refused else ""
            ), apart


def test_gates_of_a_chunk_that_are_too_far_apart_are_refused(hopper: SSDInputs):
    """Their offsets have 32 bits."""
    inputs = on_meta(hopper)
    for row, head, refused in (
        (1 << 24, 1, False),
        (1 << 25, 1, True),
        (4, 1 << 28, False),
        (4, 1 << 29, True),
    ):
        dt = torch.empty_strided((2, 100, 4), (0, row, head), device="meta", dtype=torch.bfloat16)
        reason = unsupported(replace(inputs, dt=dt))
        assert reason == ("2^31 elements between the gates of a chunk" if refused else ""), (
            row,
            head,
        )


def test_rows_of_sequences_of_one_position_follow_each_other_by_their_batch_stride():
    wide = torch.empty(9, 1, 100)[:, :, :64].unflatten(2, (4, 16))
    assert row_stride(wide) == 100
    assert row_stride(wide.expand(9, 3, 4, 16)) == 0
    assert row_stride(torch.empty(9, 3, 100)[:, :, :64]) == 100


# --- memory


@pytest.mark.compiler
def test_shared_memory_is_what_the_compiler_takes():
    """Only the barriers are not counted."""
    for label, ring, score_ring, dstate in (
        ("mamba2 bf16 exact", 3, 2, 128),
        ("p 128 n 64 bf16", 3, 2, 64),
        ("n 256 fp16 relaxed", 2, 3, 256),
    ):
        (kernel,) = compiled("compile_cases", 90, "SSD_HOPPER")[label]
        assert 0 <= kernel.shared_bytes - shared_bytes(ring, score_ring, dstate) < 1024


SLOT = 64 * 128  # elements of a state
WORKSPACES = [
    # a state and flags for each segment but the last
    (Cut(segment=64), FP32, 0),
    (Cut(segment=16), FP32, 2 * 3 * 4 * (4 * SLOT + 32) + 32),
    (Cut(segment=16), FP16, 2 * 3 * 4 * (2 * SLOT + 32) + 32),
    # a state in fp32 and flags for each share
    *((Cut(segment=64, shares=3), dtype, 3 * 2 * (4 * SLOT + 32) + 32) for dtype in (FP32, FP16)),
    # a program for each of the four pairs of heads
    *((Cut(segment=64, shares=shares), FP32, 0) for shares in (4, 9)),
]


@pytest.mark.parametrize(("segments", "state_dtype", "nbytes"), WORKSPACES)
def test_the_workspace(segments: Cut, state_dtype, nbytes):
    """Plus the ticket."""
    inputs = MEASURED_LAYER.inputs()
    config = replace(
        SSDHopperConfig.choose(inputs, H200, batch_invariant=False), **asdict(segments)
    )
    assert (
        workspace_bytes(buffer_sizes(inputs, Precision(state_dtype=state_dtype), config)) == nbytes
    )


# --- the cut of a sequence

MAMBA2_2_7B = 40  # pairs of heads
LENGTHS = (1, 2, 15, 16, 63, 64, 100, 128, 1000, 2048, 4096)  # chunks


@pytest.mark.parametrize("pairs", [1, 8, MAMBA2_2_7B, 64, 132, 400])
def test_segments_are_the_whole_sequence_in_order(pairs):
    for nchunks in LENGTHS:
        segments = fastest_cut(nchunks, pairs, H200, n_split=1)
        lengths = segments.lengths(nchunks)
        assert sum(lengths) == nchunks
        assert min(lengths) > 0


def from_before(lengths: list[int], memory: int) -> float:
    """f of docs/kernels.md: the share of the output's energy from before the segment, for a
    head whose decay is e^(-1 / memory) per position.
    """
    kept = math.exp(-2 / memory)
    first = 0
    before = 0.0
    for length in lengths:
        before += kept * (1 - kept**length) / (1 - kept) * (1 - kept**first) / (1 - kept)
        first += length
    return before / ((first - kept * (1 - kept**first) / (1 - kept)) / (1 - kept))


@pytest.mark.parametrize("n_split", [1, 2])
@pytest.mark.parametrize("pairs", [1, 16, *slow(MAMBA2_2_7B, 64)])
def test_no_head_is_less_exact_than_unfused_however_long_it_remembers(pairs, n_split):
    """In addition to f, each term is rounded once, and the output once."""
    worse = {}
    for nchunks in range(1, 200):
        ours, unfused = (
            [64 * length for length in segments.lengths(nchunks)]
            for segments in (
                fastest_cut(nchunks, pairs, H200, n_split=n_split),
                Cut(segment=UNFUSED_CHUNK),
            )
        )
        for memory in (4, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 4096):
            ratio = math.sqrt((2 + from_before(ours, memory)) / (2 + from_before(unfused, memory)))
            if ratio > NO_LARGER:
                worse[nchunks, memory] = round(ratio, 4)
    assert not worse, "by (chunks, positions of memory)"


def test_lengths_of_one_class_are_cut_by_one_simulation(monkeypatch):
    """A server gets prompts of all lengths, and must not simulate for each, nor ever again."""
    simulated = []
    plain = TIMES[1]

    def noted(cut: Cut, nchunks: int, *of: int) -> float:
        simulated.append(nchunks)
        return plain(cut, nchunks, *of)

    monkeypatch.setitem(TIMES, 1, noted)
    cuts, again = (
        [fastest_cut(nchunks, 37, H200, n_split=1) for nchunks in range(1025, 2048)]
        for _ in range(2)
    )
    assert cuts == again
    assert len(simulated) <= 17 * simulated.count(2048)
