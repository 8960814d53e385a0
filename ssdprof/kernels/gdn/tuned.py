"""Configurations that a search has found to be faster on this GPU than those of the committed rule.

There are none until a program calls `use`.  The library reads no file, and without `use` only the committed rule
applies.  The `ssdprof` command loads the configurations that `ssdprof tune gdn` has saved.

A find depends only on the properties on which the committed rule depends: sizes, dtypes, and the numbers of chunks and
of sequences.  A batch-invariant call uses the find for one sequence.  Packed sequences keep the committed
configuration, one rule for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ssdprof.kernels import device
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.gdn.portable.config import PortableConfig
from ssdprof.kernels.precision import Precision

CHUNK = 64  # positions per chunk; finds distinguish lengths by chunks


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Common properties of all calls that share a find.  nchunks: chunks of 64 positions per sequence."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    exact: bool
    l2norm: bool
    sequences: int
    nchunks: int

    @classmethod
    def of(cls, inputs: GDNInputs, precision: Precision, *, batch_invariant: bool = False) -> Calls:
        (key_heads, key_dim), (value_heads, value_dim) = inputs.q.shape[2:], inputs.v.shape[2:]
        return cls(
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            dtype=inputs.q.dtype,
            exact=precision.exact,
            l2norm=bool(inputs.use_qk_l2norm),
            sequences=1 if batch_invariant else inputs.sequences,
            nchunks=-(-inputs.length // CHUNK),
        )


@dataclass(frozen=True, kw_only=True)
class Find:
    """gpu: torch's name of the GPU."""

    gpu: str
    calls: Calls
    config: PortableConfig


_portable: dict[tuple[str, Calls], PortableConfig] = {}
_listeners: list[Callable[[], None]] = []


def use(finds: Iterable[Find]) -> None:
    """Use exactly these finds from now on, in this process.  If two are for the same calls, the later one applies."""
    _portable.clear()
    _portable.update({(find.gpu, find.calls): find.config for find in finds})
    for listener in _listeners:
        listener()


def none() -> None:
    """Use the committed configurations, as at the start."""
    use(())


def when_changed(listener: Callable[[], None]) -> None:
    """Call `listener` after every `use`, for a caller that caches choices based on the finds."""
    _listeners.append(listener)


def portable(inputs: GDNInputs, precision: Precision, *, batch_invariant: bool = False) -> PortableConfig | None:
    """The find for this call of the portable kernel, or None."""
    if not _portable or inputs.cu_seqlens is not None:
        return None
    return _portable.get((device.gpu_name(inputs.q), Calls.of(inputs, precision, batch_invariant=batch_invariant)))
