"""Configurations that were found faster on this GPU than the committed rule's, for the calls of the search.

Empty until a program fills it with `use`: the library reads no file, and without `use` the committed rule alone
decides.  The `ssdprof` command fills it with what `ssdprof tune gdn` has saved.

A find depends on what the committed rule depends on and on nothing else: sizes, dtypes, the number of chunks and that
of sequences.  A batch-invariant call takes what was found for one sequence.  Packed sequences keep the committed
configuration: one rule for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ssdprof.kernels import _gpu
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.gdn.portable.config import PortableConfig
from ssdprof.kernels.precision import Precision

CHUNK = 64  # positions in which lengths are told apart


@dataclass(frozen=True, kw_only=True)
class Calls:
    """What all calls that share a find have in common.  nchunks: of 64 positions, in each of the sequences."""

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
    """gpu: torch's name of it."""

    gpu: str
    calls: Calls
    config: PortableConfig


_portable: dict[tuple[str, Calls], PortableConfig] = {}
_listeners: list[Callable[[], None]] = []


def use(finds: Iterable[Find]) -> None:
    """From now on, in this process, take these and no others.  If two are for the same calls, the later one counts."""
    _portable.clear()
    _portable.update({(find.gpu, find.calls): find.config for find in finds})
    for listener in _listeners:
        listener()


def none() -> None:
    """Take the committed configurations, as at the start."""
    use(())


def when_changed(listener: Callable[[], None]) -> None:
    """Call `listener` after every `use`: for a caller that keeps what it has chosen from the finds."""
    _listeners.append(listener)


def portable(inputs: GDNInputs, precision: Precision, *, batch_invariant: bool = False) -> PortableConfig | None:
    """What was found for this call of the portable kernel, if anything was."""
    if not _portable or inputs.cu_seqlens is not None:
        return None
    return _portable.get((_gpu.name(inputs.q), Calls.of(inputs, precision, batch_invariant=batch_invariant)))
