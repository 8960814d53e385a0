"""How the Hopper kernel divides a call.  The decision needs no GPU."""

from dataclasses import asdict, replace

import pytest
import torch
from compile_target import compiled, on_meta
from ssd_cases import Case

from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.hopper.config import HopperConfig, program_count, shared_bytes, unsupported
from ssdprof.kernels.ssd.hopper.launch import buffer_sizes
from ssdprof.kernels.ssd.hopper.segments import Segments
from ssdprof.kernels.tensors import row_stride

H200 = 132  # multiprocessors
MAMBA2 = dict(heads=80, headdim=1, dstate=16)


def chosen(seqlen: int, batch: int = 1, batch_invariant: bool = False) -> HopperConfig:
    inputs = Case(seqlen=seqlen, batch=batch, **MAMBA2).inputs()
    return HopperConfig.choose(inputs, H200, batch_invariant=batch_invariant)


def test_a_short_sequence_is_one_wave_of_programs_of_which_none_waits_for_another() -> None:
    """40 pairs of heads: three segments are 120 programs."""
    config = chosen(1024)
    assert config.recompute
    assert config.count(16) == 3


def test_of_a_batch_that_fills_the_gpu_every_multiprocessor_has_an_equal_share() -> None:
    for seqlen, batch in ((1024, 32), (4096, 8), (4096, 4)):
        config = chosen(seqlen, batch)
        assert config.shares == H200
        assert config.count(seqlen // 64) == 1
        assert "equal shares" in config.reason


def test_batch_invariant_ignores_the_batch() -> None:
    assert chosen(1024, batch=32, batch_invariant=True) == chosen(1024)


def test_packed_sequences_are_cut_by_one_rule() -> None:
    inputs = Case(lengths=(100, 900), **MAMBA2).inputs()
    assert HopperConfig.choose(inputs, H200, batch_invariant=False).segment == 64


def test_packed_sequences_of_few_heads_are_cut_into_more_segments() -> None:
    """One shard of a model on eight GPUs.  The number and the lengths of the sequences have no effect."""
    for lengths in ((100, 900), (4096,), (64,) * 9):
        inputs = Case(lengths=lengths, **MAMBA2 | {"heads": 10}).inputs()
        assert HopperConfig.choose(inputs, H200, batch_invariant=False).segment == 8


def test_inputs_that_are_not_on_a_hopper_gpu_are_not_taken() -> None:
    assert unsupported(Case().inputs()) == "anything but a Hopper GPU"


def test_the_batch_strides_that_the_copy_engine_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiples of 16 bytes.  Sequences may have gaps between them, but may not overlap."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr("ssdprof.kernels.ssd.hopper.config.capability", lambda _tensor: (9, 0))
    inputs = Case(batch=2, seqlen=100, heads=4, headdim=64, dstate=128, dtype=torch.bfloat16).inputs()
    assert unsupported(inputs) == ""
    for name in ("x", "B", "C", "dt"):
        tensor = getattr(inputs, name)
        sequence, *within = tensor.stride()
        for apart, refused in ((8, False), (4, name != "dt"), (-sequence, name != "dt")):
            strides = (sequence + apart, *within)
            moved = torch.empty(3 * sequence, dtype=tensor.dtype).as_strided(tensor.shape, strides)
            reason = unsupported(replace(inputs, **{name: moved}))
            assert reason == (f"batch stride of {name}, which TMA cannot read" if refused else ""), apart


def test_gates_of_a_chunk_that_are_too_far_apart_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their offsets have 32 bits."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr("ssdprof.kernels.ssd.hopper.config.capability", lambda _tensor: (9, 0))
    inputs = on_meta(Case(seqlen=100, heads=4, headdim=64, dstate=128, dtype=torch.bfloat16).inputs())
    for row, head, refused in ((1 << 24, 1, False), (1 << 25, 1, True), (4, 1 << 28, False), (4, 1 << 29, True)):
        dt = torch.empty_strided((1, 100, 4), (0, row, head), device="meta", dtype=torch.bfloat16)
        reason = unsupported(replace(inputs, dt=dt))
        assert reason == ("2^31 elements between the gates of a chunk" if refused else ""), (row, head)


@pytest.mark.compiler
def test_shared_memory_is_what_the_compiler_takes() -> None:
    """Only the barriers are not counted."""
    for label, ring, score_ring, dstate in (
        ("mamba2 bf16 exact", 3, 2, 128),
        ("p 128 n 64 bf16", 3, 2, 64),
        ("n 256 fp16 relaxed", 2, 3, 256),
    ):
        (kernel,) = compiled("test_fused_hopper_compile", 90)[label]
        assert 0 <= kernel.shared_bytes - shared_bytes(ring, score_ring, dstate) < 1024


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


def test_the_workspace_is_a_state_and_flags_for_each_segment_but_the_last() -> None:
    inputs = Case(seqlen=4096, batch=2, heads=4, headdim=64, dstate=128, dtype=torch.bfloat16).inputs()
    config = replace(HopperConfig.choose(inputs, H200, batch_invariant=False), **asdict(Segments(segment=16)))
    for state_dtype in (torch.float32, torch.float16):
        sizes = buffer_sizes(inputs, Precision(state_dtype=state_dtype), config)
        of_a_slot = 4 * (64 * 128 * state_dtype.itemsize + 32)
        assert sizes.workspace_bytes == 2 * 3 * of_a_slot + 32  # plus the ticket
    whole = replace(config, segment=64)
    assert buffer_sizes(inputs, Precision(), whole).workspace_bytes == 0


def test_the_workspace_of_shares_is_a_state_in_fp32_for_each_and_flags() -> None:
    """Four pairs of heads."""
    inputs = Case(seqlen=4096, batch=2, heads=4, headdim=64, dstate=128, dtype=torch.bfloat16).inputs()
    config = replace(HopperConfig.choose(inputs, H200, batch_invariant=False), **asdict(Segments(segment=64, shares=3)))
    for state_dtype in (torch.float32, torch.float16):
        sizes = buffer_sizes(inputs, Precision(state_dtype=state_dtype), config)
        assert sizes.workspace_bytes == 3 * 2 * (64 * 128 * 4 + 32) + 32
    for segments in (Segments(segment=64, shares=4), Segments(segment=64, shares=9)):  # a program for each pair
        assert buffer_sizes(inputs, Precision(), replace(config, **asdict(segments))).workspace_bytes == 0
