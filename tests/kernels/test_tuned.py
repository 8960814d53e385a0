"""Tuned configurations: which calls use them, and the kernels' guarantees with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from ssd_cases import EXACT, RELAXED, Case

from ssdprof.kernels import device
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd import fused, tuned
from ssdprof.kernels.ssd.hopper.config import HopperConfig
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.kernels.ssd.portable.config import PortableConfig

CASE = Case(seqlen=1024, dtype=torch.bfloat16)
FOUND = HopperConfig(segment=3, reason="found")


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    tuned.none()


def hopper_find(inputs: SSDInputs, precision: Precision = EXACT, **fields: Any) -> tuned.HopperFind:
    find = tuned.HopperFind(
        gpu=device.gpu_name(inputs.x),
        layer=tuned.Layer.of(inputs, precision),
        sequences=inputs.sequences,
        nchunks=tuned.nchunks(inputs),
        config=FOUND,
    )
    return replace(find, **fields)


def hopper(case: Case, precision: Precision = EXACT, *, batch_invariant: bool = False) -> HopperConfig | None:
    return tuned.hopper(case.inputs(), precision, batch_invariant=batch_invariant)


def test_without_use_nothing_is_tuned() -> None:
    assert hopper(CASE) is None
    assert tuned.portable(CASE.inputs(), EXACT) is None


def test_a_find_is_for_its_own_calls_only() -> None:
    tuned.use([hopper_find(CASE.inputs())])
    assert hopper(CASE) == FOUND
    assert hopper(replace(CASE, seqlen=1000)) == FOUND  # the same number of chunks
    for other in (
        {"seqlen": 1025},
        {"batch": 2},
        {"heads": 4},
        {"headdim": 32},
        {"dstate": 32},
        {"groups": 2},
        {"dtype": torch.float16},
        {"gate": True},
        {"lengths": (512, 512)},
    ):
        assert hopper(replace(CASE, **other)) is None, other
    assert hopper(CASE, RELAXED) is None
    assert hopper(CASE, Precision(state_dtype=torch.float16)) == FOUND


def test_a_find_of_another_gpu_is_not_taken() -> None:
    tuned.use([hopper_find(CASE.inputs(), gpu="NVIDIA H100")])
    assert hopper(CASE) is None


def test_a_batch_invariant_call_takes_what_is_for_one_sequence() -> None:
    batch = replace(CASE, batch=4)
    one, four = HopperConfig(segment=2), HopperConfig(segment=16)
    tuned.use([hopper_find(CASE.inputs(), config=one), hopper_find(batch.inputs(), config=four)])
    assert hopper(batch) == four
    assert hopper(batch, batch_invariant=True) == hopper(CASE) == one


def test_packed_sequences_are_cut_by_the_committed_rule() -> None:
    """Even if the number of sequences and the total number of chunks match a call that was tuned."""
    packed = replace(CASE, lengths=(600, 424))
    tuned.use([hopper_find(replace(CASE, batch=2).inputs()), hopper_find(CASE.inputs())])
    assert hopper(replace(CASE, batch=2)) == FOUND
    assert hopper(packed) is None
    assert hopper(packed, batch_invariant=True) is None


def test_use_replaces_and_none_forgets() -> None:
    tuned.use([hopper_find(CASE.inputs())])
    tuned.use([hopper_find(CASE.inputs(), config=HopperConfig(segment=5))])
    assert hopper(CASE) == HopperConfig(segment=5)
    tuned.none()
    assert hopper(CASE) is None


def portable_find(inputs: SSDInputs, **fields: Any) -> tuned.PortableFind:
    config = replace(PortableConfig.choose(inputs, (9, 0)), reason="tuned on this GPU, today", **fields)
    return tuned.PortableFind(gpu=device.gpu_name(inputs.x), layer=tuned.Layer.of(inputs, EXACT), config=config)


def test_a_plan_says_that_it_is_tuned_and_its_run_is() -> None:
    """A call that was prepared before `tuned.use` is prepared again."""
    inputs = replace(CASE, seqlen=200).inputs()
    before = fused.run(inputs)
    assert "tuned" not in fused.plan(inputs).reason
    tuned.use([portable_find(inputs, chunk=16, max_chunks=2, min_chunks=1)])
    plan = fused.plan(inputs)
    assert "tuned on this GPU, today" in plan.reason
    assert plan.config["chunk"] == 16
    other_chunks = fused.run(inputs)
    assert not torch.equal(before.out, other_chunks.out)
    tuned.none()
    assert torch.equal(before.out, fused.run(inputs).out)


def test_a_portable_find_keeps_a_sequence_apart_from_its_neighbours() -> None:
    """The same bits alone, in a batch, and in a pack after a sequence of another length."""
    alone = replace(CASE, seqlen=150).inputs()
    tuned.use([portable_find(alone, chunk=32, max_segments=2, min_chunks=1, max_chunks=2, num_warps=8)])
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
    tuned.use([portable_find(CASE.inputs(), chunk=64, min_chunks=2, max_chunks=8)])
    config = tuned.portable(inputs, EXACT)
    assert config is not None
    assert (config.chunk, config.min_chunks, config.max_chunks) == (32, 4, 16)
