"""Candidates: configurations of the portable kernel that differ from a given one in one respect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product

import torch
import triton

from ssdprof.kernels.gdn.config import GDNPortableConfig
from ssdprof.kernels.gdn.inputs import GDNInputs

Axis = Callable[[GDNPortableConfig, GDNInputs], Iterable[GDNPortableConfig]]

_CUTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # segments of a sequence
_SHORTEST = 4  # chunks of a segment
_LARGEST_STATE = 256 * 128  # numbers that a program holds in registers; more are spilled


def axes() -> tuple[Axis, ...]:
    """The axes in search order; each starts from the best candidate of the previous one."""
    return (_slices, _segments, _warps, _stages, _blocks_of_k, _chunks, _factors)


def _slices(config: GDNPortableConfig, inputs: GDNInputs) -> Iterator[GDNPortableConfig]:
    """How much of V a program holds, and in which orientation."""
    key_dim, widest = inputs.q.shape[3], _block(inputs.v.shape[3])
    for block_v, v_rows in product((16, 32, 64, 128), (True, False)):
        if block_v <= widest and block_v * _block(key_dim) <= _LARGEST_STATE:
            yield replace(config, block_v=block_v, v_rows=v_rows)


def _segments(config: GDNPortableConfig, inputs: GDNInputs) -> Iterator[GDNPortableConfig]:
    """A sequence cut into 1 to 32 segments."""
    chunks = triton.cdiv(inputs.length, config.chunk)
    for cuts in _CUTS:
        segment = triton.cdiv(chunks, cuts)
        if cuts == 1 or segment >= _SHORTEST:
            yield replace(config, segment=0 if cuts == 1 else segment)


def _warps(config: GDNPortableConfig, _: GDNInputs) -> Iterator[GDNPortableConfig]:
    for num_warps in (2, 4, 8):
        yield replace(config, num_warps=num_warps)


def _stages(config: GDNPortableConfig, _: GDNInputs) -> Iterator[GDNPortableConfig]:
    for scan_stages in (1, 2, 3, 4):
        yield replace(config, scan_stages=scan_stages)


def _blocks_of_k(config: GDNPortableConfig, inputs: GDNInputs) -> Iterator[GDNPortableConfig]:
    for block_k in (32, 64, 128):
        if block_k <= _block(inputs.q.shape[3]):
            yield replace(config, block_k=block_k)


def _chunks(config: GDNPortableConfig, inputs: GDNInputs) -> Iterator[GDNPortableConfig]:
    """Segments keep their lengths in positions."""
    for chunk in (16, 32) if inputs.q.dtype == torch.float32 else (32, 64, 128):
        yield replace(config, chunk=chunk, segment=triton.cdiv(config.segment * config.chunk, chunk))


def _factors(config: GDNPortableConfig, _: GDNInputs) -> Iterator[GDNPortableConfig]:
    """Warps and registers of the first launch."""
    for warps, registers in product((2, 4, 8), (0, 128, 168)):
        yield replace(config, factors_warps=warps, factors_registers=registers)


def _block(size: int) -> int:
    """The smallest power of two that holds it, at least 16."""
    return max(16, int(triton.next_power_of_2(size)))
