"""Wrong inputs are refused once, by the name of the argument; what is derived from inputs."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from kernel_cases import GDNCase, KDACase, SSDCase, tensors_of

from ssdprof.kernels.chunks import Chunks

SSD = SSDCase(
    batch=2, seqlen=9, heads=4, groups=2, headdim=5, dstate=3, initial_states=True, gate=True
)
GDN = GDNCase(key_heads=2, key_dim=8, value_dim=6)
STATEFUL = [SSD, GDN.but(initial_states=True), KDACase(seqlen=4, key_heads=2, initial_states=True)]


@pytest.mark.parametrize("case", STATEFUL, ids=lambda case: case.inputs().operator)
def test_every_tensor_that_does_not_fit_is_named(case):
    """Another number of dimensions, none of the last one, no floating point, another device;
    missing.
    """
    inputs = case.inputs()
    for name, tensor in tensors_of(inputs).items():
        for wrong, words in (
            (tensor[..., None], rf"^{name} must (be \(|have shape)"),
            (tensor[..., :0], rf"^{name} (is empty|must have shape)"),
            (tensor.int(), rf"^{name} must be .*, not torch.int32"),
            (tensor.to("meta"), rf"\b{name} (is )?on meta"),
        ):
            with pytest.raises(ValueError, match=words):
                case.inputs(**{name: wrong})
    ssd, delta = ("x", "dt", "A", "B", "C"), ("q", "k", "v", "g", "beta")
    for name in ssd if inputs.operator == "ssd" else delta:
        with pytest.raises(ValueError, match=f"^{name} must be a tensor, not None"):
            case.inputs(**{name: None})


zeros = torch.zeros
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (SSD, dict(x=zeros(2, 0, 4, 5)), "x is empty"),
    (SSD, dict(x=zeros(2, 9, 4, 5).double()), "x must be float32"),
    (SSD, dict(x=zeros(2, 9, 4, 5).half()), "B must be torch.float16 as x is"),
    (SSD, dict(x=zeros(2, 9, 0, 5), dt=zeros(2, 9, 0)), r"x is empty: \(2, 9, 0, 5\)"),
    (SSD, dict(B=zeros(2, 9, 3, 3)), r"number of heads \(4\) must be a multiple"),
    (SSD, dict(C=zeros(2, 9, 2, 4)), "C must have shape"),
    (SSD, dict(D=zeros(4, 4)), "D must have shape"),
    (SSD, dict(initial_states=zeros(1, 4, 5, 3)), "initial_states must have shape"),
    (SSD, dict(chunk_size=0), "chunk_size must be a positive integer, not 0"),
    (SSD, dict(chunk_size=64.0), "chunk_size must be a positive integer, not 64.0"),
    (SSD, dict(dt_limit=(1.0, 0.0)), "dt_limit must be"),
    (SSD, dict(dt_limit=(0.0,)), "dt_limit must be"),
    (SSD, dict(dt_limit=(0.0, torch.nan)), "dt_limit must be"),
    (
        SSD,
        dict(dt_limit=(-0.1, 0.1), dt_softplus=False),
        "dt_limit must not let a negative dt pass",
    ),
    (GDN, dict(v=zeros(1, 70, 3, 6)), "must be a multiple of q's"),
    (GDN, dict(chunk_size=48), "chunk_size"),
    (GDN, dict(initial_state=zeros(1, 2, 6, 8)), "V before K"),
    (GDN, dict(q=zeros(1, 0, 2, 8)), "q is empty"),
    (GDN, dict(q=zeros(1, 70, 2, 257)), "q's last dimension is at most 256, not 257"),
    (GDN, dict(v=zeros(1, 70, 2, 257)), "v's last dimension is at most 256, not 257"),
    (GDN, dict(q=zeros(1, 70, 2, 8).double()), "q must be float32"),
    (
        GDN,
        dict(cu_seqlens=torch.tensor([0, 9, 70]), initial_state=zeros(1, 2, 8, 6)),
        "initial_state must have",
    ),
    *(
        (case.but(batch=2), dict(cu_seqlens=torch.tensor([0, 9])), "cu_seqlens needs a batch of 1")
        for case in STATEFUL
    ),
    *(
        (case, dict(cu_seqlens=torch.tensor(given)), f"must be {words}")
        for case in (SSDCase(seqlen=9), GDNCase(seqlen=9))
        for given, words in (
            ([0], r"\(sequences \+"),
            ([[0, 9]], r"\(sequences \+"),
            ([0.0, 9.0], "int32 or int64"),
        )
    ),
]


@pytest.mark.parametrize(("case", "overrides", "message"), REFUSED)
def test_bad_inputs_are_named(case, overrides, message):
    with pytest.raises(ValueError, match=message):
        case.inputs(**overrides)


@pytest.mark.parametrize(
    ("chunk_size", "taken"),
    [
        (1, 16),
        (16, 16),
        (31, 16),
        (96, 64),
        (100, 64),
        (128, 128),
        (256, 256),
        (300, 256),
        (4096, 256),
    ],
)
def test_a_chunk_size_is_rounded_down_to_a_power_of_two_that_kernels_take(chunk_size, taken):
    assert SSD.inputs(chunk_size=chunk_size).power_of_two_chunk == taken


def test_derived_sizes():
    assert (SSD.inputs().sequences, SSD.inputs().heads_per_group) == (2, 2)
    assert SSDCase(lengths=(3, 0, 4)).inputs().sequences == 3


SSD_BIAS = SSD.inputs().dt_bias.repeat(2)[1:5]  # not aligned to 16 bytes
OTHERS: dict[Any, list[Any]] = {
    SSD: [
        SSD.but(seqlen=10).inputs(),
        *(SSD.inputs(**{name: None}) for name in ("D", "z", "dt_bias")),
        SSD.inputs(dt_softplus=False),
        SSD.inputs(dt_limit=(0.0, 1.0)),
        SSD.inputs(chunk_size=64),
        SSD.inputs(A=SSD.inputs().A.double()),
        SSD.inputs(dt=SSD.inputs().dt.contiguous()),
        SSD.inputs(dt_bias=SSD_BIAS),
    ],
    GDN: [
        GDN.but(l2norm=False).inputs(),
        GDN.inputs(scale=2.0),
        GDN.but(seqlen=69).inputs(),
        GDN.inputs(cu_seqlens=torch.tensor([0, 70])),
    ],
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_signature_says_all_but_place_and_content(case):
    assert case.inputs().signature == case.but(seed=5).inputs().signature
    signatures = {one.signature for one in (case.inputs(), *OTHERS[case])}
    assert len(signatures) == 1 + len(OTHERS[case])


@pytest.mark.parametrize(
    "lengths", [(5,), (0,) * 3 + (1,), (32, 0, 64, 33, 0, 0), (1,) * 130], ids=len
)
def test_chunk_table(lengths):
    inputs = SSDCase(lengths=lengths, heads=1).inputs()
    chunks = Chunks.of(inputs)
    expected = []
    counts = []
    for start, stop in pairwise(inputs.cu_seqlens.tolist()):
        cuts = [[begin, min(begin + 32, stop)] for begin in range(start, stop, 32)]
        expected += cuts
        counts.append(len(cuts))
    assert chunks.bounds is not None
    assert chunks.spans[: len(expected)].tolist() == expected
    unused = chunks.spans[len(expected) :]
    assert len(unused) > 0
    assert torch.equal(unused[:, 0], unused[:, 1]), "a chunk that nobody needs is not empty"
    assert chunks.bounds.diff().tolist() == counts
