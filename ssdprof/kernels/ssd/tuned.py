"""Configurations that were found faster on this GPU than those of `config_table.py`, for the calls of the search.

Empty until a program fills it with `use`: the library reads no file, and without `use` the committed rules alone
decide.  The `ssdprof` command fills it with what `ssdprof tune ssd` has saved.

A find may depend on the same sizes as the committed rule for its kernel and on nothing else, so that the kernel's
promises hold:

    hopper    the number of chunks and of sequences.  A batch-invariant call takes what was found for one sequence.
              Packed sequences keep the committed configuration: one rule for all.
    portable  the layer's sizes and dtypes alone: a sequence's result is the same in any batch and in any pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ssdprof.kernels import _gpu
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.hopper.config import HopperConfig
from ssdprof.kernels.ssd.hopper.rings import CHUNK
from ssdprof.kernels.ssd.hopper.segments import ceil_div
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.kernels.ssd.portable.config import PortableConfig


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What all calls of one layer of a model have in common.  exact: intermediates; gate: whether there is a z."""

    nheads: int
    headdim: int
    dstate: int
    ngroups: int
    dtype: torch.dtype
    exact: bool
    gate: bool

    @classmethod
    def of(cls, inputs: SSDInputs, precision: Precision) -> Layer:
        nheads, headdim = inputs.x.shape[2:]
        ngroups, dstate = inputs.B.shape[2:]
        return cls(
            nheads=nheads,
            headdim=headdim,
            dstate=dstate,
            ngroups=ngroups,
            dtype=inputs.x.dtype,
            exact=precision.exact,
            gate=inputs.z is not None,
        )


@dataclass(frozen=True, kw_only=True)
class HopperFind:
    """gpu: torch's name of it.  sequences: of `nchunks` chunks of 64 positions each."""

    gpu: str
    layer: Layer
    sequences: int
    nchunks: int
    config: HopperConfig


@dataclass(frozen=True, kw_only=True)
class PortableFind:
    """gpu: torch's name of it."""

    gpu: str
    layer: Layer
    config: PortableConfig


Find = HopperFind | PortableFind

_hopper: dict[tuple[str, Layer, int, int], HopperConfig] = {}
_portable: dict[tuple[str, Layer], PortableConfig] = {}
_listeners: list[Callable[[], None]] = []


def use(finds: Iterable[Find]) -> None:
    """From now on, in this process, take these and no others.  If two are for the same calls, the later one counts."""
    _hopper.clear()
    _portable.clear()
    for find in finds:
        if isinstance(find, HopperFind):
            _hopper[find.gpu, find.layer, find.sequences, find.nchunks] = find.config
        else:
            _portable[find.gpu, find.layer] = find.config
    for listener in _listeners:
        listener()


def none() -> None:
    """Take the committed configurations, as at the start."""
    use(())


def when_changed(listener: Callable[[], None]) -> None:
    """Call `listener` after every `use`: for a caller that keeps what it has chosen from the finds."""
    _listeners.append(listener)


def hopper(inputs: SSDInputs, precision: Precision, *, batch_invariant: bool) -> HopperConfig | None:
    """What was found for this call of the Hopper kernel, if anything was."""
    if not _hopper or inputs.cu_seqlens is not None:
        return None
    sequences = 1 if batch_invariant else inputs.sequences
    return _hopper.get((_gpu.name(inputs.x), Layer.of(inputs, precision), sequences, nchunks(inputs)))


def portable(inputs: SSDInputs, precision: Precision) -> PortableConfig | None:
    """What was found for this layer in the portable kernel, if anything was."""
    if not _portable:
        return None
    config = _portable.get((_gpu.name(inputs.x), Layer.of(inputs, precision)))
    return config and config.fitted(inputs)


def nchunks(inputs: SSDInputs) -> int:
    """Chunks of the Hopper kernel in one sequence."""
    return ceil_div(inputs.x.shape[1], CHUNK.value)
