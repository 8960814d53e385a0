"""The sizes of an operator's call."""

from __future__ import annotations

from ssdprof.schema.base import DType, Record


class SSDDims(Record):
    batch: int
    seqlen: int
    nheads: int
    headdim: int
    dstate: int
    ngroups: int
    chunk_size: int
    dtype: DType  # of x, B, C, dt
