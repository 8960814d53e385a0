"""The configurations of the fused SSD kernels that `ssdprof tune` may vary: see
`operators.tuning.Tuning`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import torch
import triton

from ssdprof import operators
from ssdprof.core.base import Count, Size
from ssdprof.kernels import device
from ssdprof.kernels.hopper.schedule import Cut, ceil_div
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.config import HOPPER_CHUNK, SSDPortableConfig, call_key
from ssdprof.kernels.ssd.fused import committed_portable
from ssdprof.kernels.ssd.hopper import config as hopper_config
from ssdprof.kernels.ssd.hopper.config import (
    LONGEST_RECOMPUTED,
    SSDHopperConfig,
    as_exact_as_unfused,
    shared_bytes,
)
from ssdprof.kernels.ssd.hopper.launch import hopper_launch
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.portable import portable_launch
from ssdprof.operators.tuning import CHECKED_POSITIONS, Axis, Tuning, stored_form, varied

SSDConfig = SSDHopperConfig | SSDPortableConfig

_SEGMENT_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)  # of a sequence
_HOPPER_SHARED_BYTES = 227 << 10  # shared memory that a program can have on Hopper
_LARGEST_STATE = 128 * 128  # numbers that a program can hold in registers; more would be spilled


def _hopper_chunk_count(inputs: SSDInputs) -> int:
    """Chunks of the Hopper kernel per sequence."""
    return ceil_div(inputs.length, HOPPER_CHUNK)


def _restricted(axis: Axis, fits: Callable[[Any, SSDInputs], bool]) -> Axis:
    """The axis without the configurations that do not fit the inputs."""

    def fitting(config: Any, inputs: SSDInputs) -> Iterator[Any]:
        return (candidate for candidate in axis(config, inputs) if fits(candidate, inputs))

    return fitting


def _keeps_addresses(config: SSDPortableConfig, inputs: SSDInputs) -> bool:
    """Whether ptxas compiles the kernel correctly.  For matrix products of 64 rows and more whose
    rows have less than 128 bytes it computes wrong addresses (benchmarks/log/ssd.md#row-57).  The
    rows are the positions of a chunk.
    """
    return config.chunk < 64 or config.block_p * inputs.x.element_size() >= 128


# --- the Hopper kernel


def _equal_segments(config: SSDHopperConfig, inputs: SSDInputs) -> Iterator[SSDHopperConfig]:
    """Configurations that cut a sequence into 1 to 64 equal segments, as far as there are so many
    chunks.  The last segment may be shorter.
    """
    for count in _SEGMENT_COUNTS:
        yield _cut(config, Cut(segment=ceil_div(_hopper_chunk_count(inputs), count)))


def _long_first(
    config: SSDHopperConfig,
    inputs: SSDInputs,
    count: int,
    length: float,
    shorter: int,
    *,
    recompute: bool = False,
) -> Iterator[SSDHopperConfig]:
    """The configuration with `count` segments of about `length` chunks, then at most `shorter`
    segments for the remaining chunks; nothing if no chunks remain, or if `length` rounds to 0.
    """
    long = round(length)
    remaining = _hopper_chunk_count(inputs) - count * long
    if long > 0 and remaining > 0:
        segment = ceil_div(remaining, shorter)
        yield _cut(
            config, Cut(long_count=count, long_segment=long, segment=segment, recompute=recompute)
        )


def _long_segments_first(config: SSDHopperConfig, inputs: SSDInputs) -> Iterator[SSDHopperConfig]:
    """Configurations with long segments for most of a sequence, then shorter ones."""
    chunks = _hopper_chunk_count(inputs)
    for count, share, shorter in product((1, 2, 3, 4), (0.5, 0.67, 0.8), (1, 2, 4, 8)):
        yield from _long_first(config, inputs, count, share * chunks / count, shorter)


def _recomputed(config: SSDHopperConfig, inputs: SSDInputs) -> Iterator[SSDHopperConfig]:
    """Configurations in which no segment waits for another one: its first pass covers everything
    before it.  None for sequences of more than `LONGEST_RECOMPUTED` chunks.
    """
    chunks = _hopper_chunk_count(inputs)
    if chunks > LONGEST_RECOMPUTED:
        return
    for count in (2, 3, 4):
        yield _cut(config, Cut(segment=ceil_div(chunks, count), recompute=True))
    for share, shorter in product((0.5, 0.6, 0.7), (1, 2, 3)):
        yield from _long_first(config, inputs, 1, share * chunks, shorter, recompute=True)


def _segments_nearby(config: SSDHopperConfig, inputs: SSDInputs) -> Iterator[SSDHopperConfig]:
    """Configurations with up to three segments more and fewer, and with long segments that are a
    little longer and shorter.  None for a configuration that gives programs equal shares.
    """
    if config.shares:
        return
    chunks = _hopper_chunk_count(inputs)
    remaining = chunks - config.long_count * config.long_segment
    if remaining <= 0:
        return
    shorter = ceil_div(remaining, config.segment)
    for more in range(-3, 4):
        yield replace(config, segment=ceil_div(remaining, max(1, shorter + more)))
    for factor in (0.92, 0.96, 1.04, 1.08):
        length = round(config.long_segment * factor)
        remaining = chunks - config.long_count * length
        if length > 0 and remaining > 0:
            yield replace(config, long_segment=length, segment=ceil_div(remaining, shorter))


def _cut(config: SSDHopperConfig, cut: Cut) -> SSDHopperConfig:
    """The configuration with another cut of sequences."""
    return replace(config, **asdict(cut))


def _is_as_exact(config: SSDHopperConfig, inputs: SSDInputs) -> bool:
    """Whether the outputs are as exact as those of the unfused kernels."""
    return as_exact_as_unfused(config, _hopper_chunk_count(inputs))


def _rings_fit(config: SSDHopperConfig, inputs: SSDInputs) -> bool:
    """Whether the rings of a program fit into shared memory."""
    return shared_bytes(config.ring, config.score_ring, inputs.B.shape[3]) <= _HOPPER_SHARED_BYTES


# --- the portable kernel


def _chunks(config: SSDPortableConfig, inputs: SSDInputs) -> Iterator[SSDPortableConfig]:
    """Configurations with each chunk size.  The limits of a segment keep their lengths in
    positions, rounded down to whole chunks, at least one.
    """
    sizes = [32, 64, 128]
    if inputs.x.dtype == torch.float32:
        sizes = [16, 32, 64]
    for chunk in sizes:
        yield replace(
            config,
            chunk=chunk,
            min_chunks=max(1, config.min_chunks * config.chunk // chunk),
            max_chunks=max(1, config.max_chunks * config.chunk // chunk),
        )


def _slice_fits(config: SSDPortableConfig, inputs: SSDInputs) -> bool:
    """Whether a slice of `block_p` rows of a state is no wider than p, rounded up to a power of two
    of at least 16, and small enough for a program's registers.
    """
    widest = max(16, triton.next_power_of_2(inputs.x.shape[3]))
    return bool(config.block_p <= widest and config.block_p * inputs.B.shape[3] <= _LARGEST_STATE)


def _blocks_of_n(config: SSDPortableConfig, inputs: SSDInputs) -> Iterator[SSDPortableConfig]:
    """Configurations with smaller blocks of n than the configuration has.  Larger ones are left
    out, because their sums are longer, and less exact.
    """
    for block_n in (64, 128):
        if block_n < min(config.block_n, inputs.B.shape[3]):
            yield replace(config, block_n=block_n)


def _stages(config: SSDPortableConfig, _: SSDInputs) -> Iterator[SSDPortableConfig]:
    """Configurations that load more or fewer chunks ahead in the loops of states and outputs."""
    for state_stages, scan_stages in ((2, 1), (2, 2), (3, 2), (3, 3), (4, 2)):
        yield replace(config, state_stages=state_stages, scan_stages=scan_stages)


def _cuts(config: SSDPortableConfig, _: SSDInputs) -> Iterator[SSDPortableConfig]:
    """Configurations with another limit of the number of segments, or of a segment's chunks."""
    for name, least, factors in (
        ("max_segments", 1, (0.5, 2, 4)),
        ("min_chunks", 1, (0.5, 2)),
        ("max_chunks", config.min_chunks, (0.5, 2, 4)),
    ):
        for factor in factors:
            value = max(least, int(getattr(config, name) * factor))
            changed: dict[str, Any] = {name: value}
            yield replace(config, **changed)


# --- the interface of the search

_ON_HOPPER = tuple(
    _restricted(axis, _is_as_exact)
    for axis in (
        _equal_segments,
        _long_segments_first,
        _recomputed,
        _segments_nearby,
        varied(_rings_fit, ring=(2, 3, 4, 5), score_ring=(2, 3)),
    )
)
_ON_PORTABLE = tuple(
    _restricted(axis, _keeps_addresses)
    for axis in (
        varied(num_warps=(2, 4, 8)),
        _chunks,
        varied(_slice_fits, block_p=(16, 32, 64, 128), p_rows=(True, False)),
        _blocks_of_n,
        _stages,
        _cuts,
    )
)


def _committed(inputs: SSDInputs, precision: Precision, kernel: str) -> SSDConfig:
    """`Tuning.committed`."""
    if kernel == "hopper":
        return SSDHopperConfig.choose(inputs, device.sm_count(inputs.x), batch_invariant=False)
    return committed_portable(inputs, precision)


def _run(inputs: SSDInputs, precision: Precision, config: SSDConfig) -> SSDOutput:
    """`Tuning.run`."""
    if isinstance(config, SSDHopperConfig):
        return hopper_launch(inputs, precision, config)(inputs)
    return portable_launch(inputs, precision, config.fitted(inputs))(inputs)


def _check(config: SSDConfig) -> None:
    """`Tuning.check`."""
    if isinstance(config, SSDHopperConfig) and config.long_count and not config.long_segment:
        raise ValueError("a long segment without chunks never ends a sequence")


def _for_short(config: SSDConfig, inputs: SSDInputs) -> SSDConfig:
    """`Tuning.for_short`: one segment if the whole sequence has one, otherwise several.  A
    configuration of the portable kernel is for all lengths, and stays as it is.
    """
    if not isinstance(config, SSDHopperConfig):
        return config
    if config.count(_hopper_chunk_count(inputs)) == 1:
        return replace(
            config, segment=_hopper_chunk_count(TUNING.short(inputs)), long_count=0, long_segment=0
        )
    # the short inputs have at least 16 chunks, or are the whole: long segments take at most half of
    # these 16, and others 5 chunks each
    half = CHECKED_POSITIONS // HOPPER_CHUNK // 2
    longest = max(1, half // (config.long_count or 1))
    return replace(
        config, segment=min(config.segment, 5), long_segment=min(config.long_segment, longest)
    )


def _also_checked(config: SSDConfig, inputs: SSDInputs) -> Sequence[SSDInputs]:
    """`Tuning.also_checked`: the first row of the short inputs, cut into three packed sequences: a
    tuned configuration of the portable kernel also applies to packed sequences.  None for the
    Hopper kernel, which refuses these.
    """
    if isinstance(config, SSDHopperConfig):
        return ()
    short = TUNING.short(inputs)
    length = short.length
    positional = operators.get("ssd").binding.positional(short)
    first_row: dict[str, Any] = {name: tensor[:1] for name, tensor in positional.items()}
    boundaries = torch.tensor(
        [0, length // 5, length // 2, length], dtype=torch.int32, device=short.x.device
    )
    return (replace(short, **first_row, initial_states=None, cu_seqlens=boundaries),)


# A tuned configuration of the kernel "hopper" is for one length, one of "portable" for all lengths
# of a layer.  The registers of the Hopper kernel's roles are no axis: on an H200 no other division
# was faster, and most were slower, by up to 11 % (benchmarks/log/ssd.md).
TUNING: Tuning = Tuning(
    operator="ssd",
    configs={
        "hopper": stored_form(
            SSDHopperConfig,
            segment=Size,
            long_count=Count,
            long_segment=Count,
            recompute=bool,
            shares=Count,
            ring=Size,
            score_ring=Size,
            unit_registers=Size,
            other_registers=Size,
        ),
        "portable": stored_form(
            SSDPortableConfig,
            chunk=Size,
            max_segments=Size,
            min_chunks=Size,
            max_chunks=Size,
            block_p=Size,
            block_n=Size,
            p_rows=bool,
            num_warps=Size,
            state_stages=Size,
            scan_stages=Size,
        ),
    },
    kernel=lambda inputs: "portable" if hopper_config.unsupported(inputs) else "hopper",
    key=call_key,
    committed=_committed,
    axes=lambda config: _ON_HOPPER if isinstance(config, SSDHopperConfig) else _ON_PORTABLE,
    run=_run,
    for_short=_for_short,
    shares_config=lambda kernel: kernel == "portable",
    also_checked=_also_checked,
    check=_check,
)
