"""The candidates of a search."""

import pytest
import torch
from tuning_fakes import hopper_problem, inputs_of, portable_problem

from ssdprof.kernels.ssd.config import SSDPortableConfig
from ssdprof.kernels.ssd.hopper.config import LONGEST_RECOMPUTED, SSDHopperConfig, as_exact_as_unfused
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.operators.ssd.tuning import TUNING
from ssdprof.operators.ssd.tuning.candidates import Config, axes
from ssdprof.tuning.search import Problem, difference


def tried(problem: Problem) -> list[Config]:
    return [option for axis in axes(problem.committed) for option in axis(problem.committed, problem.inputs[-1])]


def test_segments_from_the_whole_sequence_to_single_chunks() -> None:
    segments = {config.segment for config in tried(hopper_problem()) if isinstance(config, SSDHopperConfig)}
    assert {20, 10, 7, 5, 4, 3, 2, 1} <= segments
    assert max(segments) == 20


def test_no_cut_is_less_exact_than_unfused() -> None:
    configs = [config for config in tried(hopper_problem()) if isinstance(config, SSDHopperConfig)]
    assert all(as_exact_as_unfused(config, 20) for config in configs)


def test_every_cut_is_of_the_whole_sequence() -> None:
    """The short cut that is checked also covers its sequence, and has several segments if the whole cut does."""
    problem = hopper_problem()
    configs = [config for config in tried(problem) if isinstance(config, SSDHopperConfig)]
    assert any(config.long_count for config in configs)
    assert any(config.recompute for config in configs)
    for config in configs:
        assert sum(config.lengths(20)) == 20
        assert min(config.lengths(20)) > 0
        short = TUNING.for_short(config, problem.inputs[-1])
        assert isinstance(short, SSDHopperConfig)
        assert (short.count(16) > 1) == (config.count(20) > 1)
        assert (short.recompute, bool(short.long_count)) == (config.recompute, bool(config.long_count))


def test_long_sequences_are_not_gone_over_from_their_beginning() -> None:
    inputs = inputs_of((LONGEST_RECOMPUTED + 1) * 64)
    committed = SSDHopperConfig(segment=LONGEST_RECOMPUTED + 1)
    configs = [option for axis in axes(committed) for option in axis(committed, inputs)]
    assert not any(config.recompute for config in configs if isinstance(config, SSDHopperConfig))


def test_long_segments_are_made_a_little_longer_and_shorter() -> None:
    committed = SSDHopperConfig(segment=10, long_count=2, long_segment=100)
    nearby = [option for axis in axes(committed) for option in axis(committed, inputs_of(240 * 64))]
    assert {92, 96, 104, 108} <= {config.long_segment for config in nearby if isinstance(config, SSDHopperConfig)}


def test_rings_that_fit_shared_memory() -> None:
    def rings(dstate: int) -> set[tuple[int, int]]:
        config = SSDHopperConfig(segment=4)
        inputs = inputs_of(1280, f"2x64x{dstate}x1")
        return {(one.ring, one.score_ring) for axis in axes(config) for one in axis(config, inputs)}  # type: ignore[union-attr]

    assert rings(128) == {(2, 2), (2, 3), (3, 2), (3, 3)}
    assert (5, 2) in rings(64)


def test_portable_candidates_are_ones_that_the_kernel_takes() -> None:
    for config in tried(portable_problem(1024)):
        assert isinstance(config, SSDPortableConfig)
        assert config.chunk & (config.chunk - 1) == 0
        assert config.chunk >= 16
        assert config.block_p == 16  # all of P
        assert 1 <= config.min_chunks <= config.max_chunks
        assert config.max_segments >= 1


@pytest.mark.parametrize(
    ("headdim", "dtype", "committed"),
    [
        (64, torch.bfloat16, SSDPortableConfig()),
        (64, torch.bfloat16, SSDPortableConfig(chunk=128)),
        (32, torch.bfloat16, SSDPortableConfig(chunk=32, block_p=32)),
        (16, torch.float32, SSDPortableConfig(chunk=16, block_p=16)),
    ],
)
def test_no_portable_candidate_has_rows_whose_addresses_ptxas_loses(
    headdim: int, dtype: torch.dtype, committed: SSDPortableConfig
) -> None:
    """benchmarks/log/ssd.md#row-57.  Neither longer chunks nor a smaller slice of P may lead to such rows."""
    inputs = SSDInputs.unchecked(**vars(inputs_of(1024)) | {"x": torch.zeros(1, 1024, 2, headdim, dtype=dtype)})
    configs = [config for axis in axes(committed) for config in axis(committed, inputs)]
    assert len(configs) > 10
    for config in configs:
        assert isinstance(config, SSDPortableConfig)
        assert config.chunk < 64 or config.block_p * dtype.itemsize >= 128, config


@pytest.mark.parametrize(("committed", "tried"), [(256, (64, 128, 256)), (64, (64,))], ids=str)
def test_no_portable_candidate_makes_longer_sums_over_n(committed: int, tried: tuple[int, ...]) -> None:
    """Longer sums would be less accurate: benchmarks/log/ssd.md#row-60."""
    config = SSDPortableConfig(block_n=committed)
    inputs = inputs_of(1024, "2x64x256x1")
    candidates = [one for axis in axes(config) for one in axis(config, inputs)]
    assert {one.block_n for one in candidates if isinstance(one, SSDPortableConfig)} == set(tried)


def test_a_chunk_of_another_length_leaves_segments_as_long() -> None:
    committed = SSDPortableConfig()
    inputs = inputs_of(1024)
    chunks = {
        config.chunk: config.max_chunks * config.chunk
        for axis in axes(committed)
        for config in axis(committed, inputs)
        if isinstance(config, SSDPortableConfig) and config.chunk != committed.chunk
    }
    assert chunks == {32: 2048, 128: 2048}


def test_a_difference_in_words() -> None:
    committed = SSDHopperConfig(segment=10, reason="the model")
    assert difference(SSDHopperConfig(segment=10), committed) == ""
    assert difference(SSDHopperConfig(segment=4, ring=2), committed) == "segment 4, ring 2"
