"""Wrong inputs are refused once, by the name of the argument; what is derived from inputs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from kernel_cases import FP16, GDNCase, KDACase, SSDCase

from ssdprof.kernels.chunks import Chunks

SSD = SSDCase(batch=2, seqlen=9, heads=4, groups=2, headdim=5, dstate=3, initial_states=True, gate=True)
NOTHING = dict(D=None, z=None, dt_bias=None, initial_states=None)
GDN = GDNCase(key_heads=2, key_dim=8, value_dim=6)
FP64 = torch.float64


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


OF_SSD: list[tuple[dict[str, Any], str]] = [
    (dict(x=zeros(2, 9, 20)), r"x must be \(b, l, h, p\)"),
    (dict(x=zeros(2, 9, 4, 5, dtype=FP64)), "x must be float32, float16 or bfloat16"),
    (dict(x=zeros(2, 0, 4, 5)), "x is empty"),
    (dict(x=zeros(2, 9, 0, 5), dt=zeros(2, 9, 0), A=zeros(0), **NOTHING), r"x is empty: \(2, 9, 0, 5\)"),
    (dict(x=zeros(2, 9, 4, 0), **NOTHING), r"x is empty: \(2, 9, 4, 0\)"),
    (dict(B=zeros(2, 9, 2, 0), C=zeros(2, 9, 2, 0), **NOTHING), r"B is empty: \(2, 9, 2, 0\)"),
    (dict(x=zeros(2, 9, 4, 5, dtype=FP16)), "B must be torch.float16 as x is"),
    (dict(dt=zeros(2, 9, 4, dtype=torch.int32)), "dt must be float64, float32, float16 or bfloat16"),
    (dict(initial_states=zeros(2, 4, 5, 3, dtype=torch.complex64)), "initial_states must be float64"),
    (dict(dt=zeros(2, 9, 3)), "dt must have shape"), (dict(A=zeros(3)), "A must have shape"),
    (dict(B=zeros(2, 9, 3, 3)), r"number of heads \(4\) must be a multiple"),
    (dict(C=zeros(2, 9, 2, 4)), "C must have shape"), (dict(D=zeros(4, 4)), "D must have shape"),
    (dict(z=zeros(2, 9, 4, 4)), "z must have shape"), (dict(dt_bias=zeros(1)), "dt_bias must have shape"),
    (dict(initial_states=zeros(1, 4, 5, 3)), "initial_states must have shape"),
    (dict(chunk_size=0), "chunk_size must be a positive integer, not 0"),
    (dict(chunk_size=64.0), "chunk_size must be a positive integer, not 64.0"),
    (dict(dt_limit=(1.0, 0.0)), "dt_limit must be"), (dict(dt_limit=(0.0, float("nan"))), "dt_limit must be"),
    (dict(dt_limit=(-0.1, 0.1), dt_softplus=False), "dt_limit must not let a negative dt pass"),
    (dict(cu_seqlens=torch.tensor([0, 9])), "cu_seqlens needs a batch of 1"),
    (dict(A=zeros(4, device="meta")), "A is on meta, x on cpu"),
]  # fmt: skip
OF_GDN: list[tuple[dict[str, Any], str]] = [
    (dict(q=zeros(1, 70, 8)), "q must be"), (dict(k=zeros(1, 70, 2, 9)), "k must have shape"),
    (dict(v=zeros(1, 70, 3, 6)), "must be a multiple of q's"),
    (dict(v=zeros(1, 70, 2, 6, dtype=FP16)), "v must be torch.float32"), (dict(g=zeros(1, 69, 2)), "g must have shape"),
    (dict(initial_state=zeros(1, 2, 8, 8)), "initial_state must have shape"),
    (dict(initial_state=zeros(1, 2, 6, 8)), "K comes before V"),
    (dict(initial_state=zeros(8)), r"initial_state must have shape .*, not \(8,\)"),
    (dict(beta=None), "beta must be a tensor, not None"),
    (dict(initial_state=zeros(1, 2, 8, 6, dtype=torch.int32)), "initial_state must be float64"),
    (dict(chunk_size=48), "chunk_size"), (dict(q=zeros(1, 0, 2, 8)), r"q is empty: \(1, 0, 2, 8\)"),
    (dict(v=zeros(1, 70, 0, 6)), "v is empty"),
    (dict(q=zeros(1, 70, 2, 257)), "q's last dimension is at most 256, not 257"),
    (dict(v=zeros(1, 70, 2, 257)), "v's last dimension is at most 256, not 257"),
    (dict(q=zeros(1, 70, 2, 8, dtype=FP64)), "q must be float32"),
    (dict(cu_seqlens=torch.tensor([0, 9, 70]), initial_state=zeros(1, 2, 8, 6)), "initial_state must have"),
    (dict(beta=zeros(1, 70, 2, device="meta")), "beta is on meta"),
]  # fmt: skip
OF_KDA = [(dict(g=zeros(1, 4, 2)), "g must have"), (dict(g=zeros(1, 4, 2, 15)), "g must have")]
OF_KDA += [(dict(beta=zeros(1, 4, 2, 16)), "beta must have shape")]
BOUNDS = [(torch.tensor([0]), r"must be \(sequences \+ 1\)"), (torch.tensor([[0, 9]]), r"must be \(sequences \+ 1\)")]
BOUNDS += [(torch.tensor([0.0, 9.0]), "must be int32 or int64")]


@pytest.mark.parametrize(
    ("case", "overrides", "message"),
    [
        *((SSD, *one) for one in OF_SSD),
        *((GDN, *one) for one in OF_GDN),
        *((KDACase(seqlen=4, key_heads=2), *one) for one in OF_KDA),
        (GDN.but(batch=2), dict(cu_seqlens=torch.tensor([0, 70])), "cu_seqlens needs a batch of 1"),
        *(
            (case, dict(cu_seqlens=one), words)
            for case in (SSDCase(seqlen=9), GDNCase(seqlen=9))
            for one, words in BOUNDS
        ),
    ],
)
def test_bad_inputs_are_named(case: Any, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        case.inputs(**overrides)


@pytest.mark.parametrize(
    ("chunk_size", "taken"),
    [(1, 16), (16, 16), (31, 16), (96, 64), (100, 64), (128, 128), (256, 256), (300, 256), (4096, 256)],
)
def test_a_chunk_size_is_rounded_down_to_a_power_of_two_that_kernels_take(chunk_size: int, taken: int) -> None:
    assert SSD.inputs(chunk_size=chunk_size).power_of_two_chunk == taken


def test_derived_sizes() -> None:
    assert (SSD.inputs().sequences, SSD.inputs().heads_per_group) == (2, 2)
    assert SSDCase(lengths=(3, 0, 4)).inputs().sequences == 3


SSD_BIAS = SSD.inputs().dt_bias.repeat(2)[1:5]  # not aligned to 16 bytes
OTHERS: dict[Any, list[Any]] = {
    SSD: [
        SSD.but(seqlen=10).inputs(), *(SSD.inputs(**{name: None}) for name in ("D", "z", "dt_bias")),
        SSD.inputs(dt_softplus=False), SSD.inputs(dt_limit=(0.0, 1.0)), SSD.inputs(chunk_size=64),
        SSD.inputs(A=SSD.inputs().A.double()), SSD.inputs(dt=SSD.inputs().dt.contiguous()),
        SSD.inputs(dt_bias=SSD_BIAS),
    ],
    GDN: [
        GDN.but(l2norm=False).inputs(), GDN.inputs(scale=2.0), GDN.but(seqlen=69).inputs(),
        GDN.inputs(cu_seqlens=torch.tensor([0, 70])),
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_a_signature_says_all_but_place_and_content(case: Any) -> None:
    assert case.inputs().signature == case.but(seed=5).inputs().signature
    signatures = {one.signature for one in (case.inputs(), *OTHERS[case])}
    assert len(signatures) == 1 + len(OTHERS[case])


@pytest.mark.parametrize("lengths", [(5,), (0,) * 3 + (1,), (32, 0, 64, 33, 0, 0), (1,) * 130], ids=len)
def test_chunk_table(lengths: tuple[int, ...]) -> None:
    inputs = SSDCase(lengths=lengths, heads=1).inputs()
    chunks, expected, counts = Chunks.of(inputs), [], []
    for start, stop in pairwise(inputs.cu_seqlens.tolist()):
        cuts = [[begin, min(begin + 32, stop)] for begin in range(start, stop, 32)]
        expected += cuts
        counts.append(len(cuts))
    assert chunks.spans is not None
    assert chunks.bounds is not None
    assert chunks.spans[: len(expected)].tolist() == expected
    unused = chunks.spans[len(expected) :]
    assert len(unused) > 0
    assert torch.equal(unused[:, 0], unused[:, 1]), "a chunk that nobody needs is not empty"
    assert chunks.bounds.diff().tolist() == counts
