"""Bytes and FLOPs of known shapes, and the relation of a time to them."""

import cases
import pytest
import torch
from measure.conftest import random_inputs

from ssdprof.core.target import Ceilings, Dims
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.measure.roofline import measure_ceilings
from ssdprof.operators.ssd_oracle import ORACLE, flops

MAMBA2_2_7B = Dims(
    operator="ssd",
    batch=1,
    seqlen=131072,
    chunk_size=256,
    dtype="bf16",
    sizes={"nheads": 80, "headdim": 64, "dstate": 128, "ngroups": 1},
    words="80 heads x 64, state 128, 1 group",
)


def expanded(d: Dims) -> SSDInputs:
    """Tensors of these shapes, expanded from almost no memory."""
    zero = torch.zeros((), dtype=torch.bfloat16)
    nheads, headdim, dstate, ngroups = d.sizes.values()
    tokens = d.batch, d.seqlen
    x = zero.expand(*tokens, nheads, headdim)
    dt = zero.expand(*tokens, nheads)
    B = zero.expand(*tokens, ngroups, dstate)
    return SSDInputs(x=x, dt=dt, A=torch.zeros(nheads), B=B, C=B, chunk_size=d.chunk_size or 0)


def test_mamba2_at_128k_moves_2_77_gb_and_does_0_43_tflop():
    assert ORACLE.dims(expanded(MAMBA2_2_7B)) == MAMBA2_2_7B
    x = 131072 * 80 * 64 * 2
    dt = 131072 * 80 * 2
    B = 131072 * 128 * 2
    moved = ORACLE.cost(expanded(MAMBA2_2_7B))[1]["bytes_moved"]
    assert (
        moved == 2 * x + dt + 2 * B + 80 * 4 + 80 * 64 * 128 * 4 == pytest.approx(2.77e9, rel=2e-3)
    )
    assert flops(MAMBA2_2_7B.sizes, MAMBA2_2_7B.seqlen, 128) == pytest.approx(0.43e12, rel=0.01)


def test_every_optional_input_is_read():
    plain = random_inputs(D=None, dt_bias=None)
    states = torch.zeros(1, 4, 32, 16)
    full = random_inputs(z=plain.x, initial_states=states)
    more = ORACLE.cost(full)[1]["bytes_moved"] - ORACLE.cost(plain)[1]["bytes_moved"]
    assert more == 4 * 4 + 4 * 4 + plain.x.numel() * 2 + states.numel() * 4


def test_flops_count_every_multiplication_and_addition_of_the_causal_half():
    q, h, p, g, n = 16, 4, 8, 2, 32
    sizes = {"nheads": h, "headdim": p, "dstate": n, "ngroups": g}
    pairs = sum(range(1, q + 1))  # position and source, in one chunk
    per_chunk = 2 * pairs * (g * n + h * p) + 2 * 2 * q * h * p * n
    assert flops(sizes, 6 * q, q) == 6 * per_chunk
    assert flops(sizes, 6) == flops(sizes, 6, 16) < flops(sizes, 6, 64)


@pytest.mark.parametrize(
    ("tflops", "floor_us"), [(780.0, 644.3), (200.0, 1774.0)], ids=["memory", "compute"]
)
def test_the_floor_is_the_higher_of_the_two(tflops: float, floor_us: float):
    ceilings = Ceilings(copy_gb_per_s=4300, matmul_tflops=tflops)
    case = cases.case(**ORACLE.cost(expanded(MAMBA2_2_7B))[1], samples=cases.timed(2 * floor_us))
    assert case.floor_us(ceilings) == pytest.approx(floor_us, rel=2e-3)
    assert case.floor_pct(ceilings) == pytest.approx(50, rel=2e-3)
    assert (case.floor_us(None), case.changed(samples=()).floor_pct(ceilings)) == (None, None)


@pytest.mark.gpu
def test_ceilings_are_those_of_a_gpu():
    ceilings = measure_ceilings(torch.device("cuda"))
    assert 100 < ceilings.copy_gb_per_s < 20_000
    assert 10 < ceilings.matmul_tflops < 5_000
