"""Tuned configurations: which calls use them, and the kernels' guarantees with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import EXACT, RELAXED, SSDCase

from ssdprof.kernels.choice import FusedCall
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import CallKey, override, use_overrides
from ssdprof.kernels.ssd import fused
from ssdprof.kernels.ssd.config import SSDPortableConfig, call_key
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig
from ssdprof.kernels.ssd.inputs import SSDInputs

CASE = SSDCase(seqlen=1024, dtype=torch.bfloat16)
FOUND = SSDHopperConfig(segment=3, reason="found")


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    use_overrides("ssd", {})


def key_of(case: SSDCase) -> CallKey:
    return call_key(case.inputs(), EXACT, "hopper")


def hopper(case: SSDCase, precision: Precision = EXACT, *, batch_invariant: bool = False) -> SSDHopperConfig:
    return fused.hopper_cut(FusedCall(inputs=case.inputs(), precision=precision, batch_invariant=batch_invariant))


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "sm_count", lambda _: 132)


def test_a_find_is_for_its_own_calls_only() -> None:
    assert hopper(CASE) != FOUND
    use_overrides("ssd", {key_of(CASE): FOUND})
    assert hopper(CASE) == FOUND
    assert hopper(replace(CASE, seqlen=1000)) == FOUND  # the same number of chunks
    for other in (
        {"seqlen": 1025},
        {"batch": 2},
        {"heads": 4},
        {"headdim": 128},
        {"dstate": 64},
        {"groups": 2},
        {"dtype": torch.float16},
        {"gate": True},
        {"lengths": (512, 512)},
    ):
        assert hopper(replace(CASE, **other)) != FOUND, other
    assert hopper(CASE, RELAXED) != FOUND
    assert hopper(CASE, Precision(state_dtype=torch.float16)) == FOUND


def test_a_find_of_another_gpu_is_not_taken() -> None:
    use_overrides("ssd", {replace(key_of(CASE), gpu="NVIDIA H100"): FOUND})
    assert hopper(CASE) != FOUND


def test_a_batch_invariant_call_takes_what_is_for_one_sequence() -> None:
    batch = replace(CASE, batch=4)
    one, four = SSDHopperConfig(segment=2), SSDHopperConfig(segment=16)
    use_overrides("ssd", {key_of(CASE): one, key_of(batch): four})
    assert hopper(batch) == four
    assert hopper(batch, batch_invariant=True) == hopper(CASE) == one


def test_packed_sequences_are_cut_by_the_committed_rule() -> None:
    """Even if the number of sequences and the total number of chunks match a call that was tuned."""
    packed = replace(CASE, lengths=(600, 424))
    use_overrides("ssd", {key_of(replace(CASE, batch=2)): FOUND, key_of(CASE): FOUND})
    assert hopper(replace(CASE, batch=2)) == FOUND
    assert hopper(packed) != FOUND
    assert hopper(packed, batch_invariant=True) != FOUND


def test_overrides_are_replaced_and_leave_another_operators_alone() -> None:
    theirs = replace(key_of(CASE), operator="gdn")
    use_overrides("gdn", {theirs: FOUND})
    use_overrides("ssd", {key_of(CASE): FOUND})
    use_overrides("ssd", {key_of(CASE): SSDHopperConfig(segment=5)})
    assert hopper(CASE) == SSDHopperConfig(segment=5)
    use_overrides("ssd", {})
    assert override(key_of(CASE)) is None
    assert override(theirs) == FOUND
    use_overrides("gdn", {})


def use_portable(inputs: SSDInputs, **fields: Any) -> None:
    config = replace(SSDPortableConfig.choose(inputs, (9, 0)), reason="tuned on this GPU, today", **fields)
    use_overrides("ssd", {call_key(inputs, EXACT, "portable"): config})


def test_a_plan_says_that_it_is_tuned_and_its_run_is() -> None:
    """A call that was prepared before `use_overrides` is prepared again."""
    inputs = replace(CASE, seqlen=200).inputs()
    before = fused.run(inputs)
    assert "tuned" not in fused.plan(inputs).reason
    use_portable(inputs, chunk=16, max_chunks=2, min_chunks=1)
    plan = fused.plan(inputs)
    assert "tuned on this GPU, today" in plan.reason
    assert plan.config["chunk"] == 16
    other_chunks = fused.run(inputs)
    assert not torch.equal(before.out, other_chunks.out)
    use_overrides("ssd", {})
    assert torch.equal(before.out, fused.run(inputs).out)


def test_a_portable_find_keeps_a_sequence_apart_from_its_neighbours() -> None:
    """The same bits alone, in a batch, and in a pack after a sequence of another length."""
    alone = replace(CASE, seqlen=150).inputs()
    use_portable(alone, chunk=32, max_segments=2, min_chunks=1, max_chunks=2, num_warps=8)
    assert fused.plan(alone).config["max_segments"] == 2
    expected = fused.run(alone)

    twice = {name: torch.cat([getattr(alone, name).flip(1), getattr(alone, name)]) for name in ("x", "dt", "B", "C")}
    in_a_batch = fused.run(replace(alone, **twice))
    assert torch.equal(in_a_batch.out[1:], expected.out)
    assert torch.equal(in_a_batch.final_states[1:], expected.final_states)

    behind = {
        name: torch.cat([getattr(alone, name)[:, :70].flip(1), getattr(alone, name)], 1)
        for name in ("x", "dt", "B", "C")
    }
    boundaries = torch.tensor([0, 70, 220], dtype=torch.int32)
    in_a_pack = fused.run(replace(alone, **behind, cu_seqlens=boundaries))
    assert torch.equal(in_a_pack.out[:, 70:], expected.out)
    assert torch.equal(in_a_pack.final_states[1:], expected.final_states)


def test_a_portable_chunk_is_no_longer_than_a_sequence() -> None:
    inputs = replace(CASE, seqlen=20).inputs()
    use_portable(CASE.inputs(), chunk=64, min_chunks=2, max_chunks=8)
    config = fused.portable_config(FusedCall(inputs=inputs, precision=EXACT))
    assert (config.chunk, config.min_chunks, config.max_chunks) == (32, 4, 16)
