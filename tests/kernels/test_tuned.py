"""Tuned configurations: which calls use them, and the kernels' guarantees with them."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from kernel_cases import BF16, EXACT, FP16, RELAXED, SSDCase

from ssdprof.kernels.choice import FusedCall
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import CallKey, key_of_calls, override, use_overrides
from ssdprof.kernels.ssd import fused
from ssdprof.kernels.ssd.config import SSDPortableConfig, call_key
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig
from ssdprof.kernels.ssd.inputs import SSDInputs

CASE = SSDCase(seqlen=1024, dtype=BF16)
FOUND = SSDHopperConfig(segment=3, reason="found")


@pytest.fixture(autouse=True)
def gpu(monkeypatch) -> Iterator[None]:
    """Nothing is left behind."""
    monkeypatch.setattr(fused, "sm_count", lambda _: 132)
    yield
    use_overrides("ssd", {})


def key_of(case: SSDCase) -> CallKey:
    return call_key(case.inputs(), EXACT, "hopper")


def hopper(
    case: SSDCase, precision: Precision = EXACT, *, batch_invariant: bool = False
) -> SSDHopperConfig:
    return fused.hopper_cut(
        FusedCall(inputs=case.inputs(), precision=precision, batch_invariant=batch_invariant)
    )


def test_a_find_is_for_its_own_calls_and_gpu_only():
    use_overrides("ssd", {key_of_calls(**dict(key_of(CASE)) | {"gpu": "NVIDIA H100"}): FOUND})
    assert hopper(CASE) != FOUND
    use_overrides("ssd", {key_of(CASE): FOUND})
    assert hopper(CASE) == hopper(CASE.but(seqlen=1000)) == FOUND  # the same number of chunks
    for other in (
        dict(seqlen=1025),
        dict(batch=2),
        dict(heads=4),
        dict(headdim=128),
        dict(dstate=64),
        dict(groups=2),
        dict(dtype=FP16),
        dict(gate=True),
        dict(lengths=(512, 512)),
    ):
        assert hopper(CASE.but(**other)) != FOUND, other
    assert hopper(CASE, RELAXED) != FOUND
    assert hopper(CASE, Precision(state_dtype=FP16)) == FOUND


def test_a_batch_invariant_call_takes_what_is_for_one_sequence():
    batch = CASE.but(batch=4)
    one = SSDHopperConfig(segment=2)
    four = SSDHopperConfig(segment=16)
    use_overrides("ssd", {key_of(CASE): one, key_of(batch): four})
    assert hopper(batch) == four
    assert hopper(batch, batch_invariant=True) == hopper(CASE) == one


def test_packed_sequences_are_cut_by_the_committed_rule():
    """Even if the number of sequences and the total number of chunks match a call that was
    tuned.
    """
    packed = CASE.but(lengths=(600, 424))
    pair = CASE.but(batch=2)
    use_overrides("ssd", {key_of(pair): FOUND, key_of(CASE): FOUND})
    assert hopper(pair) == FOUND
    assert all(hopper(packed, batch_invariant=invariant) != FOUND for invariant in (False, True))


def test_overrides_are_replaced_and_leave_another_operators_alone():
    theirs = key_of_calls(**dict(key_of(CASE)) | {"operator": "gdn"})
    use_overrides("gdn", {theirs: FOUND})
    use_overrides("ssd", {key_of(CASE): FOUND})
    use_overrides("ssd", {key_of(CASE): SSDHopperConfig(segment=5)})
    assert hopper(CASE) == SSDHopperConfig(segment=5)
    use_overrides("ssd", {})
    assert (override(key_of(CASE)), override(theirs)) == (None, FOUND)
    use_overrides("gdn", {})


def use_portable(inputs: SSDInputs, **fields):
    config = replace(
        SSDPortableConfig.choose(inputs, (9, 0), EXACT), reason="tuned on this GPU, today", **fields
    )
    use_overrides("ssd", {call_key(inputs, EXACT, "portable"): config})


def test_a_plan_says_that_it_is_tuned_and_its_run_is():
    """A call that was prepared before `use_overrides` is prepared again."""
    inputs = CASE.but(seqlen=200).inputs()
    before = fused.run(inputs)
    assert "tuned" not in fused.plan(inputs).reason
    use_portable(inputs, chunk=16, max_chunks=2, min_chunks=1)
    plan = fused.plan(inputs)
    assert "tuned on this GPU, today" in plan.reason
    assert plan.config["chunk"] == 16
    assert not torch.equal(before.out, fused.run(inputs).out)
    use_overrides("ssd", {})
    assert torch.equal(before.out, fused.run(inputs).out)


def test_a_portable_chunk_is_no_longer_than_a_sequence():
    use_portable(CASE.inputs(), chunk=64, min_chunks=2, max_chunks=8)
    config = fused.portable_config(FusedCall(inputs=CASE.but(seqlen=20).inputs(), precision=EXACT))
    assert (config.chunk, config.min_chunks, config.max_chunks) == (32, 4, 16)
