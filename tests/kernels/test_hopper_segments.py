"""How the Hopper kernel cuts a sequence into segments.  The decision needs no GPU."""

import json
import math
import time
from dataclasses import fields
from pathlib import Path

import pytest
from test_exactness_gpu import NO_LARGER

from ssdprof.kernels.hopper.schedule import Cut, cut
from ssdprof.kernels.ssd.hopper.config import UNFUSED_CHUNK, SSDCost, rounded_twice

H200 = 132  # multiprocessors
MAMBA2_2_7B = 40  # pairs of heads
COST = SSDCost(n_split=1)
MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "hopper-segments-h200.json"
LENGTHS = (1, 2, 15, 16, 63, 64, 100, 128, 1000, 2048, 4096)  # chunks


@pytest.mark.parametrize("pairs", [1, 8, MAMBA2_2_7B, 64, 132, 400])
def test_segments_are_the_whole_sequence_in_order(pairs: int) -> None:
    for nchunks in LENGTHS:
        segments = cut(nchunks, pairs, H200, COST)
        lengths = segments.lengths(nchunks)
        assert sum(lengths) == nchunks
        assert min(lengths) > 0


def test_long_segments_come_first_where_a_gpu_has_several_waves_of_work() -> None:
    """The first wave is 3 long segments of 40 pairs, on 132 multiprocessors; short segments balance the end."""
    segments = cut(2048, MAMBA2_2_7B, H200, COST)
    assert segments.long_count == 3
    assert segments.long_segment >= 4 * segments.segment
    assert not segments.recompute


def test_a_first_pass_over_all_that_went_before_is_for_short_sequences() -> None:
    assert cut(16, MAMBA2_2_7B, H200, COST).recompute
    assert not cut(256, MAMBA2_2_7B, H200, COST).recompute


@pytest.mark.parametrize("nchunks", LENGTHS)
def test_more_pairs_than_multiprocessors_are_shared_equally_and_fewer_are_not(nchunks: int) -> None:
    assert cut(nchunks, H200, H200, COST).shares == 0
    for pairs in (H200 + 1, 2 * H200, 1000):
        segments = cut(nchunks, pairs, H200, COST)
        assert segments.shares == H200
        assert segments.count(nchunks) == 1


@pytest.mark.parametrize("pairs", [1, 2, 16, MAMBA2_2_7B, 64])
def test_no_cut_rounds_more_than_unfused_does(pairs: int) -> None:
    """Otherwise slow heads of short sequences would be less accurate: 4 chunks in segments of 2, 1 and 1 by 7 %."""
    assert rounded_twice([2, 1, 1]) > rounded_twice([4]) == 0
    for nchunks in range(1, 200):
        lengths = cut(nchunks, pairs, H200, COST).lengths(nchunks)
        assert rounded_twice(lengths) <= rounded_twice(Cut(segment=UNFUSED_CHUNK).lengths(nchunks))


def from_before(lengths: list[int], memory: int) -> float:
    """f of docs/measuring.md: the share of the output's energy from before the segment, for a head whose decay is
    e^(-1 / memory) per position."""
    kept = math.exp(-2 / memory)
    first, before = 0, 0.0
    for length in lengths:
        before += kept * (1 - kept**length) / (1 - kept) * (1 - kept**first) / (1 - kept)
        first += length
    return before / ((first - kept * (1 - kept**first) / (1 - kept)) / (1 - kept))


@pytest.mark.parametrize("n_split", [1, 2])
@pytest.mark.parametrize("pairs", [1, 16, MAMBA2_2_7B, 64])
def test_no_head_is_less_exact_than_unfused_however_long_it_remembers(pairs: int, n_split: int) -> None:
    """In addition to f, each term is rounded once, and the output once."""
    worse = {}
    for nchunks in range(1, 200):
        ours, unfused = (
            [64 * length for length in segments.lengths(nchunks)]
            for segments in (cut(nchunks, pairs, H200, SSDCost(n_split=n_split)), Cut(segment=UNFUSED_CHUNK))
        )
        for memory in (4, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 4096):
            ratio = math.sqrt((2 + from_before(ours, memory)) / (2 + from_before(unfused, memory)))
            if ratio > NO_LARGER:
                worse[nchunks, memory] = round(ratio, 4)
    assert not worse, "by (chunks, positions of memory)"


def test_lengths_of_one_class_are_cut_by_one_simulation() -> None:
    """A server gets prompts of all lengths, and must not simulate for each."""
    for nchunks in range(1025, 2048):
        cut(nchunks, 37, H200, COST)
    start = time.perf_counter()
    for nchunks in range(1025, 2048):
        cut(nchunks, 37, H200, COST)
    assert time.perf_counter() - start < 0.1
    assert len({cut(nchunks, 37, H200, COST) for nchunks in range(1025, 2048)}) <= 17


def test_the_simulated_best_is_close_to_the_measured_best() -> None:
    """Among the cuts that were measured on an H200."""
    losses, of_models = [], []
    for cell in json.loads(MEASURED.read_text())["cells"]:
        measured = {
            Cut(**{field.name: one[field.name] for field in fields(Cut) if field.name in one}): one["device_us"]
            for one in cell["cuts"]
        }
        cost = SSDCost(n_split=cell["halves"])
        best = min(measured, key=lambda one: cost.time(one, cell["nchunks"], cell["pairs"], H200))
        losses.append(measured[best] / min(measured.values()))
        if cell["pairs"] >= 32:
            of_models.append(losses[-1])
    assert len(losses) == 36
    assert len(of_models) == 24
    assert max(of_models) < 1.03
    assert sum(losses) / len(losses) < 1.01
    assert max(losses) < 1.12
