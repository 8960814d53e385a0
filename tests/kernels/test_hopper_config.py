"""How the Hopper kernel cuts a call, which needs no GPU to be decided."""

import torch
from compile_target import compiled
from ssd_cases import Case

from ssdprof.kernels.ssd.hopper_config import HopperConfig, program_count, row_stride, shared_bytes, unsupported

H200 = 132  # multiprocessors
MAMBA2 = dict(heads=80, headdim=1, dstate=16)


def chosen(seqlen: int, batch: int = 1, batch_invariant: bool = False) -> HopperConfig:
    inputs = Case(seqlen=seqlen, batch=batch, **MAMBA2).inputs()
    return HopperConfig.choose(inputs, H200, batch_invariant=batch_invariant)


def test_a_short_sequence_is_one_wave_of_programs_that_hand_nothing_over() -> None:
    """40 pairs of heads: three segments are 120 programs."""
    config = chosen(1024)
    assert config.recompute
    assert config.count(16) == 3


def test_a_batch_that_fills_the_gpu_is_not_cut() -> None:
    assert chosen(1024, batch=32).count(16) == 1
    assert chosen(4096, batch=8).count(64) == 1


def test_batch_invariant_ignores_the_batch() -> None:
    assert chosen(1024, batch=32, batch_invariant=True) == chosen(1024)


def test_packed_sequences_are_cut_by_one_rule() -> None:
    inputs = Case(lengths=(100, 900), **MAMBA2).inputs()
    assert HopperConfig.choose(inputs, H200, batch_invariant=False).segment == 64


def test_inputs_that_are_not_on_a_hopper_gpu_are_not_taken() -> None:
    assert unsupported(Case().inputs()) == "anything but a Hopper GPU"


def test_shared_memory_is_what_the_compiler_takes() -> None:
    """The barriers are all that is not counted."""
    for label, ring, dstate in (
        ("mamba2 bf16 exact", 3, 128),
        ("p 128 n 64 bf16", 3, 64),
        ("n 256 fp16 relaxed", 2, 256),
    ):
        (kernel,) = compiled("test_fused_hopper_compile", 90)[label]
        assert 0 <= kernel.shared_bytes - shared_bytes(ring, 2, dstate) < 1024


def test_with_256_state_dimensions_a_program_owns_one_unit() -> None:
    """falcon-h1-3b has 64 units: 32 heads of two slices each."""
    for dstate, ring, programs in ((128, 3, 32), (256, 2, 64)):
        inputs = Case(seqlen=4096, heads=32, headdim=128, dstate=dstate, dtype=torch.bfloat16).inputs()
        assert program_count(inputs) == programs
        assert HopperConfig.choose(inputs, H200, batch_invariant=False).ring == ring


def test_rows_of_sequences_of_one_position_follow_each_other_by_their_batch_stride() -> None:
    wide = torch.empty(9, 1, 100)[:, :, :64].unflatten(2, (4, 16))
    assert row_stride(wide) == 100
    assert row_stride(wide.expand(9, 3, 4, 16)) == 0
    assert row_stride(torch.empty(9, 3, 100)[:, :, :64]) == 100
