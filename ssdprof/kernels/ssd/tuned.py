"""Configurations that a search has found to be faster on this GPU than those of `config_table.py`.

There are none until a program calls `use`.  The library reads no file, and without `use` only the committed rules
apply.  The `ssdprof` command loads the configurations that `ssdprof tune ssd` has saved.

A find depends only on the sizes on which the committed rule of its kernel depends, so that the kernel keeps its
guarantees:

    hopper    the numbers of chunks and of sequences.  A batch-invariant call uses the find for one sequence.
              Packed sequences keep the committed configuration, one rule for all.
    portable  the layer's sizes and dtypes only, so that a sequence's result is the same in any batch and in any pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ssdprof.kernels import device
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.hopper.config import HopperConfig
from ssdprof.kernels.ssd.hopper.rings import CHUNK
from ssdprof.kernels.ssd.hopper.segments import ceil_div
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.kernels.ssd.portable.config import PortableConfig


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Common properties of all calls of one layer of a model.  exact: intermediates; gate: whether there is a z."""

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
    """gpu: torch's name of the GPU.  sequences: number of sequences, each of `nchunks` chunks of 64 positions."""

    gpu: str
    layer: Layer
    sequences: int
    nchunks: int
    config: HopperConfig


@dataclass(frozen=True, kw_only=True)
class PortableFind:
    """gpu: torch's name of the GPU."""

    gpu: str
    layer: Layer
    config: PortableConfig


Find = HopperFind | PortableFind

_hopper: dict[tuple[str, Layer, int, int], HopperConfig] = {}
_portable: dict[tuple[str, Layer], PortableConfig] = {}
_listeners: list[Callable[[], None]] = []


def use(finds: Iterable[Find]) -> None:
    """Use exactly these finds from now on, in this process.  If two are for the same calls, the later one applies."""
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
    """Use the committed configurations, as at the start."""
    use(())


def when_changed(listener: Callable[[], None]) -> None:
    """Call `listener` after every `use`, for a caller that caches choices based on the finds."""
    _listeners.append(listener)


def hopper(inputs: SSDInputs, precision: Precision, *, batch_invariant: bool) -> HopperConfig | None:
    """The find for this call of the Hopper kernel, or None."""
    if not _hopper or inputs.cu_seqlens is not None:
        return None
    sequences = 1 if batch_invariant else inputs.sequences
    return _hopper.get((device.gpu_name(inputs.x), Layer.of(inputs, precision), sequences, nchunks(inputs)))


def portable(inputs: SSDInputs, precision: Precision) -> PortableConfig | None:
    """The find for this layer in the portable kernel, or None."""
    if not _portable:
        return None
    config = _portable.get((device.gpu_name(inputs.x), Layer.of(inputs, precision)))
    return config and config.fitted(inputs)


def nchunks(inputs: SSDInputs) -> int:
    """Chunks of the Hopper kernel per sequence."""
    return ceil_div(inputs.x.shape[1], CHUNK.value)
