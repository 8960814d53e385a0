"""Candidates: configurations that differ from a given one in one respect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from itertools import product

import torch
import triton

from ssdprof.kernels.hopper.schedule import Cut, ceil_div
from ssdprof.kernels.ssd.config import HOPPER_CHUNK, SSDPortableConfig
from ssdprof.kernels.ssd.hopper.config import LONGEST_RECOMPUTED, SSDHopperConfig, as_exact_as_unfused, shared_bytes
from ssdprof.kernels.ssd.inputs import SSDInputs

Config = SSDHopperConfig | SSDPortableConfig
Axis = Callable[[Config, SSDInputs], Iterable[Config]]

_CUTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)  # segments of a sequence
_HOPPER_SHARED_BYTES = 227 << 10  # per program
_LARGEST_STATE = 128 * 128  # numbers that a program holds in registers; more are spilled


def nchunks(inputs: SSDInputs) -> int:
    """Chunks of the Hopper kernel per sequence."""
    return ceil_div(inputs.length, HOPPER_CHUNK)


def axes(config: Config) -> tuple[Axis, ...]:
    """The axes in search order; each starts from the best candidate of the previous one.

    The registers of the Hopper kernel's roles are not an axis: on an H200 no other division was faster, and most were
    slower, by up to 11 % (benchmarks/log/ssd.md).
    """
    if isinstance(config, SSDHopperConfig):
        return tuple(map(_on_hopper, (_equal_segments, _long_segments_first, _recomputed, _segments_nearby, _rings)))
    return tuple(map(_on_portable, (_warps, _chunks, _blocks_of_p, _blocks_of_n, _stages, _cuts)))


def _on_hopper(axis: Callable[[SSDHopperConfig, SSDInputs], Iterable[SSDHopperConfig]]) -> Axis:
    def checked(config: Config, inputs: SSDInputs) -> Iterable[Config]:
        assert isinstance(config, SSDHopperConfig)
        return (one for one in axis(config, inputs) if as_exact_as_unfused(one, nchunks(inputs)))

    return checked


def _on_portable(axis: Callable[[SSDPortableConfig, SSDInputs], Iterable[SSDPortableConfig]]) -> Axis:
    def checked(config: Config, inputs: SSDInputs) -> Iterable[Config]:
        assert isinstance(config, SSDPortableConfig)
        return (one for one in axis(config, inputs) if _addresses_last(one, inputs))

    return checked


def _addresses_last(config: SSDPortableConfig, inputs: SSDInputs) -> bool:
    """ptxas loses addresses of products of 64 rows and more with less than 128 bytes each: they are wrong, or fault
    (benchmarks/log/ssd.md#row-57)."""
    return config.chunk < 64 or config.block_p * inputs.x.element_size() >= 128


# --- the Hopper kernel


def _equal_segments(config: SSDHopperConfig, inputs: SSDInputs) -> Iterator[SSDHopperConfig]:
    """A sequence cut into 1 to 64 segments."""
    for cuts in _CUTS:
        yield _cut(config, Cut(segment=ceil_div(nchunks(inputs), cuts)))


def _long_segments_first(config: SSDHopperConfig, inputs: SSDInputs) -> Iterator[SSDHopperConfig]:
    """Long segments for most of a sequence, then shorter ones."""
    for count, part, shorter in product((1, 2, 3, 4), (0.5, 0.67, 0.8), (1, 2, 4, 8)):
        length = round(part * nchunks(inputs) / count)
        left = nchunks(inputs) - count * length
        if length > 0 and left > 0:
            yield _cut(config, Cut(long_count=count, long_segment=length, segment=ceil_div(left, shorter)))


def _recomputed(config: SSDHopperConfig, inputs: SSDInputs) -> Iterator[SSDHopperConfig]:
    """Segments that wait for no other one: the first pass of each covers everything before it."""
    if nchunks(inputs) > LONGEST_RECOMPUTED:
        return
    for cuts in (2, 3, 4):
        yield _cut(config, Cut(segment=ceil_div(nchunks(inputs), cuts), recompute=True))
    for part, shorter in product((0.5, 0.6, 0.7), (1, 2, 3)):
        first = round(part * nchunks(inputs))
        left = nchunks(inputs) - first
        if first > 0 and left > 0:
            segment = ceil_div(left, shorter)
            yield _cut(config, Cut(long_count=1, long_segment=first, segment=segment, recompute=True))


def _segments_nearby(config: SSDHopperConfig, inputs: SSDInputs) -> Iterator[SSDHopperConfig]:
    """One to three segments more and fewer; long ones a little longer and shorter."""
    if config.shares:
        return
    left = nchunks(inputs) - config.long_count * config.long_segment
    if left <= 0:
        return
    shorter = ceil_div(left, config.segment)
    for more in range(-3, 4):
        yield replace(config, segment=ceil_div(left, max(1, shorter + more)))
    for factor in (0.92, 0.96, 1.04, 1.08):
        length = round(config.long_segment * factor)
        left = nchunks(inputs) - config.long_count * length
        if length > 0 and left > 0:
            yield replace(config, long_segment=length, segment=ceil_div(left, shorter))


def _cut(config: SSDHopperConfig, segments: Cut) -> SSDHopperConfig:
    return replace(config, **asdict(segments))


def _rings(config: SSDHopperConfig, inputs: SSDInputs) -> Iterator[SSDHopperConfig]:
    """Rings that fit into shared memory."""
    for ring, score_ring in product((2, 3, 4, 5), (2, 3)):
        if shared_bytes(ring, score_ring, inputs.B.shape[3]) <= _HOPPER_SHARED_BYTES:
            yield replace(config, ring=ring, score_ring=score_ring)


# --- the portable kernel


def _warps(config: SSDPortableConfig, _: SSDInputs) -> Iterator[SSDPortableConfig]:
    for num_warps in (2, 4, 8):
        yield replace(config, num_warps=num_warps)


def _chunks(config: SSDPortableConfig, inputs: SSDInputs) -> Iterator[SSDPortableConfig]:
    """Segments keep their lengths in positions."""
    for chunk in (16, 32, 64) if inputs.x.dtype == torch.float32 else (32, 64, 128):
        yield replace(
            config,
            chunk=chunk,
            min_chunks=max(1, config.min_chunks * config.chunk // chunk),
            max_chunks=max(1, config.max_chunks * config.chunk // chunk),
        )


def _blocks_of_p(config: SSDPortableConfig, inputs: SSDInputs) -> Iterator[SSDPortableConfig]:
    widest = max(16, triton.next_power_of_2(inputs.x.shape[3]))
    for block_p, p_rows in product((16, 32, 64, 128), (True, False)):
        if block_p <= widest and block_p * inputs.B.shape[3] <= _LARGEST_STATE:
            yield replace(config, block_p=block_p, p_rows=p_rows)


def _blocks_of_n(config: SSDPortableConfig, inputs: SSDInputs) -> Iterator[SSDPortableConfig]:
    """Sums at most as long as the committed ones, because longer sums are less exact."""
    for block_n in (64, 128):
        if block_n < min(config.block_n, inputs.B.shape[3]):
            yield replace(config, block_n=block_n)


def _stages(config: SSDPortableConfig, _: SSDInputs) -> Iterator[SSDPortableConfig]:
    for state_stages, scan_stages in ((2, 1), (2, 2), (3, 2), (3, 3), (4, 2)):
        yield replace(config, state_stages=state_stages, scan_stages=scan_stages)


def _cuts(config: SSDPortableConfig, _: SSDInputs) -> Iterator[SSDPortableConfig]:
    """More or fewer segments, shorter or longer ones."""
    for times in (0.5, 2, 4):
        yield replace(config, max_segments=max(1, int(config.max_segments * times)))
    for times in (0.5, 2):
        yield replace(config, min_chunks=max(1, int(config.min_chunks * times)))
    for times in (0.5, 2, 4):
        yield replace(config, max_chunks=max(config.min_chunks, int(config.max_chunks * times)))
