"""Wrong inputs are refused once, by the name of the argument."""

from typing import Any

import pytest
import torch
from ssd_cases import Case

GOOD = Case(batch=2, seqlen=9, heads=4, groups=2, headdim=5, dstate=3, initial_states=True, gate=True)
NOTHING = dict(D=None, z=None, dt_bias=None, initial_states=None)


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (dict(x=zeros(2, 9, 20)), r"x must be \(b, l, h, p\)"),
        (dict(x=zeros(2, 9, 4, 5, dtype=torch.float64)), "x must be float32, float16 or bfloat16"),
        (dict(x=zeros(2, 0, 4, 5)), "x is empty"),
        (dict(x=zeros(2, 9, 0, 5), dt=zeros(2, 9, 0), A=zeros(0), **NOTHING), r"x is empty: \(2, 9, 0, 5\)"),
        (dict(x=zeros(2, 9, 4, 0), **NOTHING), r"x is empty: \(2, 9, 4, 0\)"),
        (dict(B=zeros(2, 9, 2, 0), C=zeros(2, 9, 2, 0), **NOTHING), r"B is empty: \(2, 9, 2, 0\)"),
        (dict(x=zeros(2, 9, 4, 5, dtype=torch.float16)), "B must be torch.float16 as x is"),
        (dict(dt=zeros(2, 9, 4, dtype=torch.int32)), "dt must be float64, float32, float16 or bfloat16"),
        (dict(initial_states=zeros(2, 4, 5, 3, dtype=torch.complex64)), "initial_states must be float64"),
        (dict(dt=zeros(2, 9, 3)), "dt must have shape"),
        (dict(A=zeros(3)), "A must have shape"),
        (dict(B=zeros(2, 9, 3, 3)), r"number of heads \(4\) must be a multiple"),
        (dict(C=zeros(2, 9, 2, 4)), "C must have shape"),
        (dict(D=zeros(4, 4)), "D must have shape"),
        (dict(z=zeros(2, 9, 4, 4)), "z must have shape"),
        (dict(dt_bias=zeros(1)), "dt_bias must have shape"),
        (dict(initial_states=zeros(1, 4, 5, 3)), "initial_states must have shape"),
        (dict(chunk_size=0), "chunk_size must be a positive integer, not 0"),
        (dict(chunk_size=64.0), "chunk_size must be a positive integer, not 64.0"),
        (dict(dt_limit=(1.0, 0.0)), "dt_limit must be"),
        (dict(dt_limit=(-0.1, 0.1), dt_softplus=False), "dt_limit must not let a negative dt pass"),
        (dict(cu_seqlens=torch.tensor([0, 9])), "cu_seqlens needs a batch of 1"),
        (dict(A=zeros(4, device="meta")), "A is on meta, x on cpu"),
    ],
)
def test_bad_inputs_are_named(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GOOD.inputs(**overrides)


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        (torch.tensor([0]), r"must be \(sequences \+ 1\)"),
        (torch.tensor([[0, 9]]), r"must be \(sequences \+ 1\)"),
        (torch.tensor([0.0, 9.0]), "must be int32 or int64"),
    ],
)
def test_bad_bounds_are_named(cu_seqlens: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Case(seqlen=9).inputs(cu_seqlens=cu_seqlens)


@pytest.mark.parametrize(
    ("chunk_size", "taken"),
    [(1, 16), (16, 16), (31, 16), (96, 64), (100, 64), (128, 128), (256, 256), (300, 256), (4096, 256)],
)
def test_a_chunk_size_is_rounded_down_to_a_power_of_two_that_kernels_take(chunk_size: int, taken: int) -> None:
    assert GOOD.inputs(chunk_size=chunk_size).power_of_two_chunk == taken


def test_derived_sizes() -> None:
    assert (GOOD.inputs().sequences, GOOD.inputs().heads_per_group) == (2, 2)
    assert Case(lengths=(3, 0, 4)).inputs().sequences == 3
