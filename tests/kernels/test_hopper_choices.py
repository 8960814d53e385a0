"""The Hopper kernels' configurations of many calls, by a hash: a change of the code must not change a choice."""

import hashlib
from itertools import product

import pytest
import torch

from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig
from ssdprof.kernels.ssd.inputs import SSDInputs

LENGTHS = (1, 64, 100, 640, 1024, 2048, 4096, 5000, 9000, 16384, 50000, 131072, 1 << 20)
BATCHES = (1, 2, 3, 7, 16, 64, 200)
SM_COUNTS = (78, 132)
SSD_SIZES = tuple(product((2, 8, 24, 80, 264), ((64, 128), (80, 64), (128, 256))))  # heads, (headdim, dstate)
GDN_SIZES = tuple(product((1, 4, 16, 48, 131, 140), (1, 2, 3), (False, True)))  # key heads, values per key, normalise
SSD_FIELDS = (
    "segment", "long_count", "long_segment", "recompute", "shares", "ring", "score_ring", "unit_registers",
    "other_registers", "reason",
)  # fmt: skip
GDN_FIELDS = (
    "segment", "persistent_programs", "truncation_log2", "first_segment_extra", "transition_parts",
    "longest_first_pass", "transition_programs", "fused_inverse", "key_ring", "ring", "state_registers",
    "other_registers", "reason",
)  # fmt: skip


def empty(*shape: int) -> torch.Tensor:
    return torch.empty((1,), device="meta").expand(shape)


def ssd_inputs(size: tuple[int, tuple[int, int]], seqlen: int, batch: int, packed: bool) -> SSDInputs:
    heads, (headdim, dstate) = size
    rows = 1 if packed else batch
    return SSDInputs.unchecked(
        x=empty(rows, seqlen, heads, headdim), B=empty(rows, seqlen, 1, dstate),
        cu_seqlens=empty(batch + 1) if packed else None,
    )  # fmt: skip


def gdn_inputs(size: tuple[int, int, bool], seqlen: int, batch: int, packed: bool) -> GDNInputs:
    heads, group, normalise = size
    rows = 1 if packed else batch
    q, v = empty(rows, seqlen, heads, 128), empty(rows, seqlen, heads * group, 128)
    cu_seqlens = empty(batch + 1) if packed else None
    return GDNInputs.unchecked(q=q, k=q, v=v, cu_seqlens=cu_seqlens, use_qk_l2norm=normalise)


CASES = {
    "ssd": (
        ssd_inputs, SSDHopperConfig, SSD_SIZES, SSD_FIELDS,
        "57e5d324889150b3877ec14308d74e518cec9e35a4d67025eca32e7c6e871c5c",
    ),
    "gdn": (
        gdn_inputs, GDNHopperConfig, GDN_SIZES, GDN_FIELDS,
        "99d5adffa0fc6d4eb701ed7d9ae48334ef4278aed75744a10ff2eee439e2fe8b",
    ),
}  # fmt: skip


@pytest.mark.parametrize("operator", [pytest.param("ssd", marks=pytest.mark.slow), "gdn"])
def test_choices(operator: str) -> None:
    make, config_class, sizes, names, expected = CASES[operator]
    found, count = hashlib.sha256(), 0
    for size, seqlen, batch, packed in product(sizes, LENGTHS, BATCHES, (False, True)):
        inputs = make(size, seqlen, batch, packed)
        for sm_count, batch_invariant in product(SM_COUNTS, (False, True)):
            config = config_class.choose(inputs, sm_count, batch_invariant=batch_invariant)
            found.update(repr([getattr(config, name) for name in names]).encode())
            count += 1
    assert count > 10_000
    assert found.hexdigest() == expected
