"""Offsets past 2^31 elements, in outputs and in inputs that are columns of a wide matrix: the same
bits as near 0.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from kernel_cases import BF16, EXACT, SSDCase, assert_bitwise, bounds, rows, sequences
from targets import (
    H200,
    KDA_HOPPER,
    ON_HOPPER,
    SSD_CHOSEN,
    TARGETS,
    Target,
    gdn_hopper_by,
    ssd_hopper,
    targets,
)
from verdict import assert_passes

from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.hopper.schedule import Cut
from ssdprof.kernels.kda.inputs import KDAInputs
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig, program_count, unsupported
from ssdprof.kernels.ssd.inputs import SSDInputs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("much_gpu_memory")]

SMALL = SSDCase(heads=2, headdim=64, dstate=64, dtype=BF16, device="cuda")
TOKENS = ("x", "B", "C", "dt")


def normal_numbers(batch: int, seqlen: int) -> Callable[..., torch.Tensor]:
    """Draws a tensor from the sizes of a token, in bf16 on the GPU."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(batch, seqlen, *shape, dtype=BF16, device="cuda").normal_(
            generator=generator
        )

    return normal


def large(batch: int, seqlen: int, lengths: tuple[int, ...] = ()) -> SSDInputs:
    """mamba2-2.7b's sizes.  Generated in bf16, because `Case` would need five times the memory."""
    normal = normal_numbers(batch, seqlen)
    return SSDInputs(
        x=normal(80, 64),
        dt=normal(80),
        A=-torch.linspace(1, 16, 80, device="cuda"),
        B=normal(1, 128),
        C=normal(1, 128),
        dt_bias=torch.full((80,), -4.0, device="cuda"),
        dt_softplus=True,
        cu_seqlens=bounds(lengths, "cuda") if lengths else None,
    )


def spread(inputs: SSDInputs, row: int, names: tuple[str, ...]) -> SSDInputs:
    """The same values, as columns of one matrix with a row stride of `row` elements and NaN between
    them.
    """
    assert (inputs.x.shape[1] - 1) * row > 2**31
    room = row // len(names) // 64 * 64  # offset of the next tensor's columns, aligned for TMA
    memory = torch.full(
        ((inputs.x.shape[1] - 1) * row + row,), torch.nan, dtype=BF16, device="cuda"
    )
    far = {}
    for i, name in enumerate(names):
        tensor = getattr(inputs, name)
        view = memory[i * room :].as_strided(
            tensor.shape, (memory.numel(), row, *tensor[0, 0].contiguous().stride())
        )
        far[name] = view.copy_(tensor)
    return replace(inputs, **far)


@targets(gpu=(*SSD_CHOSEN, "ssd unfused"))
@pytest.mark.parametrize(
    ("seqlen", "row"), [(5000, 500_032), (70, 1 << 25)], ids=["of chunks", "within a chunk"]
)
def test_columns_of_a_wide_matrix(kernel: Target, seqlen, row):
    inputs = SMALL.but(seqlen=seqlen).inputs()
    names = TOKENS if row < 1 << 25 else ("x", "B", "C")
    assert_bitwise(kernel(spread(inputs, row, names)), kernel(inputs))


@ON_HOPPER
def test_a_first_pass_over_rows_of_dt_that_are_as_far_apart_as_the_kernel_takes():
    """A turn goes back two chunks, by 2^32 - 8192 elements, which is -8192 in 32 bits.  With a row
    stride of 2^24 the step would be 2^31, which equals its negative in 32 bits, so a wrong step
    would equal the right one.
    """
    inputs = SMALL.but(seqlen=300).inputs()
    far = spread(inputs, (1 << 25) - 64, ("dt",))
    assert unsupported(far) == ""
    chosen = SSDHopperConfig.choose(inputs, H200, batch_invariant=False)
    config = replace(chosen, long_count=1, long_segment=4, segment=1, recompute=True)
    assert_bitwise(*(ssd_hopper(config)(one, EXACT) for one in (far, inputs)))


HEADS_FIRST = (SMALL.but(batch=2, seqlen=70, heads=80, dstate=128), (64 * 128, 1 << 25, 128, 1))
HEADDIM_FIRST = (SMALL.but(seqlen=70), (2 * 64, 64, 1 << 26, 1))


@pytest.mark.parametrize(
    ("case", "strides"), [HEADS_FIRST, HEADDIM_FIRST], ids=["heads first", "headdim first"]
)
@targets(gpu=SSD_CHOSEN)
def test_initial_states_that_are_a_slice_of_a_large_cache(kernel: Target, case: SSDCase, strides):
    """NaN lies between and before them, where offsets in 32 bits would point."""
    inputs = case.but(initial_states=True).inputs()
    states = inputs.initial_states.to(BF16)
    before = 2**31
    last = sum((size - 1) * stride for size, stride in zip(states.shape, strides, strict=True))
    assert last > 2**31
    memory = torch.full((before + last + 1,), torch.nan, dtype=BF16, device="cuda")
    far = memory[before:].as_strided(states.shape, strides).copy_(states)
    assert_bitwise(
        kernel(replace(inputs, initial_states=far)), kernel(replace(inputs, initial_states=states))
    )


@pytest.mark.parametrize("name", ["dt", "z"])
def test_columns_that_are_further_apart_than_any_projection(name):
    """Which kernel takes them does not matter here."""
    inputs = SMALL.but(seqlen=70, gate=name == "z").inputs()
    assert_passes(TARGETS["ssd fused"](spread(inputs, 1 << 26, (name,))), inputs, EXACT)


@targets(gpu=(*SSD_CHOSEN, "ssd unfused"))
def test_a_sequence_whose_output_starts_past_2_to_the_31(kernel: Target):
    """In chunks of 128 the states of the unfused pipeline are past it too."""
    inputs = replace(large(1, 420_300, (420_000, 300)), chunk_size=128)
    assert inputs.x[0, :420_000].numel() > 2**31
    whole = kernel(inputs)
    alone = kernel(sequences(inputs, packed=True)[1])
    assert_bitwise((whole.out[:, 420_000:], whole.final_states[1:]), alone)


@targets(gpu=SSD_CHOSEN)
def test_a_row_of_a_batch_whose_offset_passes_2_to_the_31(kernel: Target):
    inputs = large(2, 430_000)
    assert inputs.x[0].numel() > 2**31
    whole = kernel(inputs)
    last = kernel(rows(inputs, slice(1, None)))
    assert_bitwise((whole.out[1:], whole.final_states[1:]), last)


@ON_HOPPER
def test_equal_shares_of_a_batch_that_passes_2_to_the_31():
    """2^31 in x, out, initial and final states.  All pairs of heads of the last two sequences are
    divided.
    """
    inputs = large(3301, 130)
    initial = torch.empty(inputs.states_shape, dtype=BF16, device="cuda")
    inputs = replace(
        inputs, initial_states=initial.normal_(generator=torch.Generator("cuda").manual_seed(1))
    )
    assert min(inputs.x[:-2].numel(), initial[:-2].numel()) > 2**31
    assert inputs.sequences * program_count(inputs) % H200 == program_count(inputs)
    ours = TARGETS["ssd hopper, by default"](inputs)
    chosen = SSDHopperConfig.choose(inputs, H200, batch_invariant=True)
    config = replace(chosen, **vars(Cut(segment=3)))
    assert_bitwise(
        (ours.out[-2:], ours.final_states[-2:]),
        ssd_hopper(config)(rows(inputs, slice(-2, None)), EXACT),
    )


# --- GDN and KDA


@targets(gpu=("gdn parts", *KDA_HOPPER))
def test_sequences_of_the_delta_rule_2_to_the_31_elements_apart(kernel: Target):
    if kernel.operator == "gdn":
        config = GDNHopperConfig(segment=8, transition_parts=2, longest_first_pass=7)
        kernel = replace(kernel, run=gdn_hopper_by(config))
    inputs = kernel.case(batch=2, seqlen=26, gate=1e-4).inputs()
    apart = 2**31 + 64
    far = {}
    for name in ("q", "k", "v", "g", "beta"):
        tensor = getattr(inputs, name)
        memory = torch.zeros(apart + tensor[0].numel(), dtype=tensor.dtype, device="cuda")
        far[name] = memory.as_strided(tensor.shape, (apart, *tensor.stride()[1:])).copy_(tensor)
    assert_bitwise(kernel(replace(inputs, **far)), kernel(inputs))


@targets(gpu=("gdn unfused", *KDA_HOPPER))
def test_tensors_of_the_delta_rule_beyond_two_to_the_31_elements(kernel: Target):
    """With 2^31 elements in v and in every workspace, the pack's last sequence has the result that
    it has alone.
    """
    heads = 8
    tokens = (1 << 31) // (8 * 128) + 5000
    last = 3000
    normal = normal_numbers(1, tokens)
    channels = (128,) if kernel.operator == "kda" else ()
    inputs = (KDAInputs if channels else GDNInputs)(
        q=normal(1, 128),
        k=normal(1, 128),
        v=normal(heads, 128),
        g=-normal(heads, *channels).abs(),
        beta=normal(heads).sigmoid(),
        cu_seqlens=bounds((tokens - last, last), "cuda"),
        use_qk_l2norm=True,
    )
    whole = kernel(inputs)
    alone = kernel(sequences(inputs)[1])
    assert torch.equal(whole.out[:, -last:], alone.out)
    assert torch.equal(whole.final_states[1:], alone.final_states)
