"""Bytes and FLOPs of known shapes, and where a time stands against them."""

from collections.abc import Callable

import pytest
import torch

from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.measure.roofline import dims_of, measure_ceilings, roofline, ssd_bytes, ssd_flops
from ssdprof.schema import Ceilings, SSDDims

MAMBA2_2_7B = SSDDims(
    batch=1, seqlen=131072, nheads=80, headdim=64, dstate=128, ngroups=1, chunk_size=256, dtype="bf16"
)


def expanded(dims: SSDDims) -> SSDInputs:
    """The shapes without the memory."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros((), dtype=torch.bfloat16).expand(shape)

    d = dims
    return SSDInputs(
        x=zeros(d.batch, d.seqlen, d.nheads, d.headdim),
        dt=zeros(d.batch, d.seqlen, d.nheads),
        A=torch.zeros(d.nheads),
        B=zeros(d.batch, d.seqlen, d.ngroups, d.dstate),
        C=zeros(d.batch, d.seqlen, d.ngroups, d.dstate),
        chunk_size=d.chunk_size,
    )


def test_dims_are_read_from_the_inputs() -> None:
    assert dims_of(expanded(MAMBA2_2_7B)) == MAMBA2_2_7B


def test_mamba2_at_128k_moves_2_77_gb() -> None:
    x, dt, B = 131072 * 80 * 64 * 2, 131072 * 80 * 2, 131072 * 128 * 2
    assert ssd_bytes(expanded(MAMBA2_2_7B)) == 2 * x + dt + 2 * B + 80 * 4 + 80 * 64 * 128 * 4
    assert ssd_bytes(expanded(MAMBA2_2_7B)) == pytest.approx(2.77e9, rel=2e-3)


def test_every_optional_input_is_read(make_inputs: Callable[..., SSDInputs]) -> None:
    plain = make_inputs(D=None, dt_bias=None)
    states = torch.zeros(1, 4, 32, 16)
    full = make_inputs(z=plain.x, initial_states=states)
    assert ssd_bytes(full) - ssd_bytes(plain) == 4 * 4 + 4 * 4 + plain.x.numel() * 2 + states.numel() * 4


def test_flops_of_mamba2_at_128k() -> None:
    assert ssd_flops(MAMBA2_2_7B, 128) == pytest.approx(0.43e12, rel=0.01)


def test_flops_count_every_multiplication_and_addition_of_the_causal_half() -> None:
    q, h, p, g, n = 16, 4, 8, 2, 32
    dims = SSDDims(batch=3, seqlen=2 * q, nheads=h, headdim=p, dstate=n, ngroups=g, chunk_size=64, dtype="bf16")
    pairs = sum(range(1, q + 1))  # position and source, in one chunk
    per_chunk = 2 * pairs * (g * n + h * p) + 2 * 2 * q * h * p * n
    assert ssd_flops(dims, q) == 3 * 2 * per_chunk
    assert ssd_flops(dims) == ssd_flops(dims, 16) < ssd_flops(dims, 64)


@pytest.mark.parametrize(("tflops", "bound", "floor_us"), [(780.0, "memory", 644.3), (200.0, "compute", 1774.0)])
def test_the_floor_is_the_higher_of_the_two(tflops: float, bound: str, floor_us: float) -> None:
    result = roofline(expanded(MAMBA2_2_7B), Ceilings(copy_gb_per_s=4300, matmul_tflops=tflops), 2 * floor_us)
    assert result.bound == bound
    assert result.floor_us == pytest.approx(floor_us, rel=2e-3)
    assert result.floor_pct == pytest.approx(50, rel=2e-3)


@pytest.mark.gpu
def test_ceilings_are_those_of_a_gpu() -> None:
    ceilings = measure_ceilings(torch.device("cuda"))
    assert 100 < ceilings.copy_gb_per_s < 20_000
    assert 10 < ceilings.matmul_tflops < 5_000
