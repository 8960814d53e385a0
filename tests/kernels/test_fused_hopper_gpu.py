"""The Hopper kernel against the oracle, with the shortest segments, and the calls that the portable kernel takes."""

from dataclasses import asdict, replace

import pytest
import torch
from ssd_cases import EXACT, PRECISIONS, RELAXED, Case
from test_fused import assert_bitwise

from ssdprof.kernels import Precision, get
from ssdprof.kernels.hopper.schedule import Cut
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig, unsupported
from ssdprof.kernels.ssd.hopper.launch import ssd_fused_hopper
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.measure.accuracy import assert_passes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="not a Hopper GPU"
    ),
]

BF16, FP16 = torch.bfloat16, torch.float16
SMALL = dict(heads=4, headdim=64, dstate=128, dtype=BF16, device="cuda")
WIDE = SMALL | dict(dstate=256)  # two roles with half of N each
SHORT = Cut(segment=2)
CASES = {
    "one position": Case(**SMALL, seqlen=1),
    "less than a chunk": Case(**SMALL, batch=2, seqlen=63),
    "whole chunks": Case(**SMALL, batch=3, seqlen=1024),
    "ragged": Case(**SMALL, batch=2, seqlen=999),
    "groups": Case(**SMALL | dict(heads=8), groups=2, seqlen=777),
    "D (h, p)": Case(**SMALL, seqlen=500, skip="(h, p)"),
    "no D": Case(**SMALL, seqlen=500, skip=""),
    "initial states": Case(**SMALL, batch=2, seqlen=500, initial_states=True),
    "p 128": Case(**SMALL | dict(headdim=128, heads=3), seqlen=777),
    "p 80": Case(**SMALL | dict(headdim=80), seqlen=999),
    "n 64": Case(**SMALL | dict(dstate=64), groups=2, seqlen=900),
    "limits": Case(**SMALL, seqlen=700, dt_limit=(0.01, 0.05)),
    "dt 0": Case(**SMALL, seqlen=700, dt_limit=(0.0, 0.0)),
    "dt huge": Case(**SMALL, seqlen=700, dt_limit=(1e30, 1e30)),
    "packed": Case(**SMALL, lengths=(3, 0, 127, 570, 64, 236, 0), initial_states=True),
    "n 256, one position": Case(**WIDE, seqlen=1),
    "n 256, half a chunk and one": Case(**WIDE, batch=2, seqlen=33),
    "n 256, whole chunks": Case(**WIDE, batch=3, seqlen=1024),
    "n 256, ragged, D (h, p), initial states": Case(**WIDE, batch=2, seqlen=999, skip="(h, p)", initial_states=True),
    "n 256, p 128, an odd number of heads": Case(**WIDE | dict(headdim=128, heads=3), seqlen=777),
    "n 256, p 80, an odd number of heads": Case(**WIDE | dict(headdim=80, heads=3), seqlen=999),
    "n 256, one head per group": Case(**WIDE, groups=4, seqlen=500),
    "n 256, packed": Case(**WIDE, lengths=(3, 0, 127, 570, 64, 236, 0), initial_states=True),
}


def hopper(inputs: SSDInputs, precision: Precision = EXACT, segments: Cut = SHORT) -> SSDOutput:
    assert unsupported(inputs) == ""
    config = SSDHopperConfig.choose(inputs, sm_count=132, batch_invariant=False)
    return ssd_fused_hopper(inputs, precision, config=replace(config, **asdict(segments)))


@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(name: str) -> None:
    inputs = CASES[name].inputs()
    assert_passes(hopper(inputs), inputs, EXACT)


CUTS = {
    "even": Cut(segment=16),
    "long ones first": Cut(long_count=3, long_segment=73, segment=19),
    "a short one first": Cut(long_count=1, long_segment=26, segment=77),
    "none waits": Cut(long_count=1, long_segment=144, segment=56, recompute=True),
}


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("dstate", [128, 256])
def test_several_waves_of_programs(dstate: int, name: str) -> None:
    """Programs and roles must wait for each other's data when memory is slow."""
    inputs = Case(**SMALL | dict(heads=80, dstate=dstate), seqlen=16384).inputs()
    for _ in range(5):
        assert_passes(hopper(inputs, segments=CUTS[name]), inputs, EXACT)


@pytest.mark.parametrize("name", ["ragged", "initial states", "whole chunks", "n 256, whole chunks"])
def test_a_first_pass_over_all_that_went_before(name: str) -> None:
    inputs = CASES[name].inputs()
    segments = Cut(long_count=1, long_segment=4, segment=2, recompute=True)
    assert_passes(hopper(inputs, segments=segments), inputs, EXACT)


@pytest.mark.parametrize("precision", [EXACT, RELAXED], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(**SMALL | dict(heads=80), batch=7, seqlen=3000, initial_states=True),
        Case(**SMALL | dict(heads=24, dstate=64), groups=4, batch=13, seqlen=1, skip="(h, p)"),
        Case(**SMALL | dict(heads=16, headdim=80), groups=2, batch=40, seqlen=100),
        Case(**WIDE | dict(heads=32, headdim=128), batch=5, seqlen=1000, initial_states=True),
    ],
    ids=str,
)
def test_in_equal_shares_to_the_last_bit_as_if_no_sequence_were_divided(case: Case, precision: Precision) -> None:
    """States pass between shares in fp32, with exact and relaxed intermediates.  On all multiprocessors and on few."""
    inputs = case.inputs()
    nchunks = -(-case.seqlen // 64)
    whole = hopper(inputs, precision, Cut(segment=nchunks))
    assert_passes(whole, inputs, precision)
    for shares in (132, 131, 7, 1):
        for _ in range(3):
            assert_bitwise(hopper(inputs, precision, Cut(segment=nchunks, shares=shares)), whole)


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("dstate", [128, 256])
def test_precisions(dstate: int, dtype: torch.dtype, precision: Precision) -> None:
    inputs = Case(**SMALL | dict(dtype=dtype, dstate=dstate), seqlen=1500, initial_states=True).inputs()
    assert_passes(hopper(inputs, precision), inputs, precision)


@pytest.mark.parametrize("dtype", [torch.float32, FP16, BF16], ids=str)
def test_dt_of_another_dtype_than_x(dtype: torch.dtype) -> None:
    for x_dtype in (FP16, BF16):
        inputs = Case(**SMALL | dict(dtype=x_dtype), seqlen=1500).inputs()
        inputs = replace(inputs, dt=inputs.dt.to(dtype))
        assert_passes(hopper(inputs), inputs, EXACT)


def test_sequences_that_lie_apart() -> None:
    """As in a buffer for longer sequences."""
    whole = Case(**SMALL | dict(dtype=BF16), batch=3, seqlen=1500).inputs()
    inputs = replace(whole, **{name: getattr(whole, name)[:, 7:1400] for name in ("x", "dt", "B", "C")})
    assert unsupported(inputs) == ""
    assert_passes(hopper(inputs), inputs, EXACT)


def test_dt_in_64_bits_goes_to_the_portable_kernel() -> None:
    inputs = Case(**SMALL, seqlen=200).inputs()
    inputs = replace(inputs, dt=inputs.dt.double())
    plan = get("ssd", "fused").plan(inputs, EXACT)
    assert plan.variant == "portable"
    assert "dt" in plan.reason
    assert_passes(get("ssd", "fused").run(inputs, EXACT), inputs, EXACT)


def test_every_model_size_that_it_is_for_reaches_it() -> None:
    sizes = [
        (80, 64, 128, 1),
        (128, 64, 128, 1),
        (64, 64, 128, 8),
        (48, 64, 128, 1),
        (128, 80, 128, 8),
        (80, 64, 64, 1),
        (32, 128, 256, 1),
        (24, 64, 256, 1),
    ]
    for heads, headdim, dstate, groups in sizes:
        case = Case(seqlen=300, heads=heads, headdim=headdim, dstate=dstate, groups=groups, dtype=BF16, device="cuda")
        assert get("ssd", "fused").plan(case.inputs(), EXACT).variant == "hopper"


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (Case(**SMALL | dict(dtype=torch.float32)), "fp32"),
        (Case(**SMALL, gate=True), "gate"),
        (Case(**SMALL | dict(dstate=32)), "dstate 32"),
        (Case(**SMALL, groups=4), "heads per group"),
    ],
    ids=["fp32", "z", "n 32", "one head per group"],
)
def test_what_it_leaves_to_the_portable_kernel(case: Case, why: str) -> None:
    inputs = case.inputs()
    plan = get("ssd", "fused").plan(inputs, EXACT)
    assert plan.variant == "portable"
    assert why in plan.reason
    assert_passes(get("ssd", "fused").run(inputs, EXACT), inputs, EXACT)


def test_columns_that_the_copy_engine_cannot_read_go_to_the_portable_kernel() -> None:
    inputs = Case(**SMALL, seqlen=200).inputs()
    shifted = torch.empty(200 * 4 * 64 + 1, dtype=BF16, device="cuda")[1:].view(1, 200, 4, 64).copy_(inputs.x)
    assert "alignment of x" in unsupported(replace(inputs, x=shifted))


@pytest.mark.parametrize("dstate", [128, 256])
def test_neighbours_do_not_meet(dstate: int) -> None:
    case = Case(**SMALL | dict(dstate=dstate), lengths=(100, 570, 64, 236), initial_states=True)
    inputs, spoilt = case.inputs(), case.inputs()
    for tensor in (spoilt.x, spoilt.dt, spoilt.B, spoilt.C):
        tensor[:, :100] = torch.nan
        tensor[:, 670:734] = torch.inf
    ours, theirs = hopper(inputs), hopper(spoilt)
    for i, (start, stop) in ((1, (100, 670)), (3, (734, 970))):
        assert_bitwise(
            SSDOutput(theirs.out[:, start:stop], theirs.final_states[i]),
            SSDOutput(ours.out[:, start:stop], ours.final_states[i]),
        )
    assert theirs.out[:, :100].isnan().all()


@pytest.mark.parametrize("precision", [EXACT, RELAXED], ids=str)
@pytest.mark.parametrize("dstate", [128, 256])
def test_bitwise_the_same_in_every_call(dstate: int, precision: Precision) -> None:
    inputs = Case(**SMALL | dict(heads=80, dstate=dstate), seqlen=16384).inputs()
    first = hopper(inputs, precision)
    for _ in range(20):
        assert_bitwise(hopper(inputs, precision), first)


@pytest.mark.parametrize("dstate", [128, 256])
def test_long_memory_is_carried_through_every_segment(dstate: int) -> None:
    """The decay is slow, so that the first position affects the last."""
    inputs = Case(**SMALL | dict(dstate=dstate), seqlen=8192, dt_limit=(1e-6, 1e-5)).inputs()
    assert_passes(hopper(inputs), inputs, EXACT)
