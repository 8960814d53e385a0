"""The table of chunks of packed sequences."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from kernel_cases import SSDCase

from ssdprof.kernels.chunks import Chunks


@pytest.mark.parametrize("lengths", [(5,), (0,) * 3 + (1,), (32, 0, 64, 33, 0, 0), (1,) * 130], ids=len)
def test_chunk_table(lengths: tuple[int, ...]) -> None:
    inputs = SSDCase(lengths=lengths, heads=1).inputs()
    chunks, expected, counts = Chunks.of(inputs), [], []
    for start, stop in pairwise(inputs.cu_seqlens.tolist()):
        cuts = [[begin, min(begin + 32, stop)] for begin in range(start, stop, 32)]
        expected += cuts
        counts.append(len(cuts))
    assert chunks.spans is not None
    assert chunks.bounds is not None
    assert chunks.spans[: len(expected)].tolist() == expected
    unused = chunks.spans[len(expected) :]
    assert len(unused) > 0
    assert torch.equal(unused[:, 0], unused[:, 1]), "a chunk that nobody needs is not empty"
    assert chunks.bounds.diff().tolist() == counts
