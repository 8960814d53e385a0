"""GDN's Hopper kernels against the oracle in fp64, in short segments, with heads that forget and heads that do not."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from gdn_hopper_cases import GDNCase
from sanitizer_target import on_the_gpu

from ssdprof.kernels import get
from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig, unsupported
from ssdprof.kernels.gdn.hopper.launch import GDNHopperLaunch, gdn_fused_hopper
from ssdprof.kernels.gdn.hopper.slices import SlicedLaunch
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.gdn.reference import gdn_chunked
from ssdprof.kernels.precision import Precision
from ssdprof.measure.accuracy import assert_passes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="not a Hopper GPU"
    ),
]

FP16 = torch.float16
MANY = GDNCase(key_heads=16, heads=32)
FEW = GDNCase(key_heads=2, heads=4, initial_state=True)
CUT = GDNHopperConfig(segment=8)
PARTS = GDNHopperConfig(segment=8, transition_parts=2, longest_first_pass=7)
CASES: dict[str, tuple[GDNCase, GDNHopperConfig | None]] = {
    "as chosen, 1024": (replace(MANY, seqlen=1024), None),
    "as chosen, ragged batch": (replace(MANY, batch=8, seqlen=300), None),
    "as chosen, 16384": (replace(FEW, seqlen=16384, gate=-1e-4), None),
    "longer first segments": (
        replace(MANY, batch=2, seqlen=4000, gate=-0.05),
        replace(CUT, segment=16, first_segment_extra=True),
    ),
    "longer first segments, no gate": (replace(FEW, seqlen=2000, gate=0.0), replace(CUT, first_segment_extra=True)),
    "one position": (replace(FEW, seqlen=1), CUT),
    "no gate, first passes over all": (replace(FEW, seqlen=2000, gate=0.0), CUT),
    "no gate": (replace(FEW, seqlen=4000, gate=0.0), PARTS),
    "slow": (replace(FEW, batch=2, seqlen=4096, gate=-1e-4), PARTS),
    "forgets within some chunks": (replace(FEW, seqlen=4096, gate=-0.05), PARTS),
    "fast": (replace(FEW, seqlen=4096, gate=-4.0), PARTS),
    "beta up to 2": (replace(FEW, seqlen=2048, beta=2.0, gate=-0.01), PARTS),
    "four heads a key head": (replace(FEW, seqlen=1024, heads=8), CUT),
    "normalised": (replace(FEW, seqlen=2048, normalise=True, gate=-1e-3), PARTS),
    "fp16": (replace(FEW, seqlen=2048, normalise=True, dtype=FP16, gate=0.0), PARTS),
    "packed": (replace(FEW, lengths=(5, 0, 295, 1024, 76, 0, 1600), gate=-1e-3), replace(PARTS, segment=10)),
    "packed, first passes over all": (replace(FEW, lengths=(5, 0, 295, 1024, 76, 0, 1600), gate=-1e-3), CUT),
    "more places": (replace(FEW, seqlen=1024), replace(CUT, key_ring=3)),
    "programs that stay": (replace(MANY, batch=12, seqlen=500), replace(CUT, persistent_programs=132)),
}


def run(inputs: GDNInputs, config: GDNHopperConfig | None = None) -> GDNOutput:
    assert unsupported(inputs) == ""
    chosen = GDNHopperConfig.choose(inputs, 132, batch_invariant=False)
    return gdn_fused_hopper(inputs, config=config or chosen)


def head_errors(ours: torch.Tensor, exact: torch.Tensor, head_dim: int) -> torch.Tensor:
    """RMS error of each head, relative to its RMS."""
    dims = [dim for dim in range(ours.ndim) if dim != head_dim]
    return (ours.double() - exact).square().mean(dims).sqrt() / exact.square().mean(dims).sqrt()


def assert_right(result: GDNOutput, inputs: GDNInputs) -> None:
    exact = gdn_chunked(inputs, torch.float64)
    limit = 6e-4 if inputs.q.dtype == FP16 else 4.5e-3
    assert head_errors(result.out, exact.out, 2).max() < limit
    assert head_errors(result.final_states, exact.final_states, 1).max() < limit


def assert_same(a: GDNOutput, b: GDNOutput) -> None:
    assert all(map(torch.equal, a, b))


@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(name: str) -> None:
    """Each head is judged separately; memory that no kernel has written holds NaN (`conftest.py`)."""
    case, config = CASES[name]
    inputs = on_the_gpu(case.inputs())
    assert_right(run(inputs, config), inputs)


@pytest.mark.parametrize("name", ["no gate", "slow", "packed", "beta up to 2", "fp16"])
def test_parts_add_no_error(name: str) -> None:
    """Compared with first passes over all chunks before, whose states are those of a single segment."""
    case, config = CASES[name]
    assert config is not None
    inputs = on_the_gpu(case.inputs())
    exact = gdn_chunked(inputs, torch.float64).out
    ours, whole = (head_errors(run(inputs, one).out, exact, 2) for one in (config, replace(config, transition_parts=0)))
    assert (ours < 1.02 * whole).all()


@pytest.mark.parametrize("name", ["lab", "slow", "ungated", "fast", "beta 2", "collinear keys", "normalised inside"])
def test_no_head_is_less_exact_than_unfused(name: str) -> None:
    """The RMS error against fp64 is at most 1 % larger, with the configuration that `gdn_fused` chooses.

    A fast head's final state depends on its last few tokens, and its error on few roundings.  That case therefore has
    many sequences.
    """
    changes: dict[str, Any] = {
        "slow": dict(gate=-1e-4), "ungated": dict(gate=0.0), "beta 2": dict(beta=2.0),
        "fast": dict(gate=-4.0, batch=128, seqlen=128),
        "collinear keys": dict(gate=-1e-3), "normalised inside": dict(normalise=True, gate=-1e-3),
    }.get(name, {})  # fmt: skip
    inputs = on_the_gpu(replace(FEW, **(dict(seqlen=16384, heads=8) | changes)).inputs())
    if name == "collinear keys":
        k = inputs.k[:, :1].float() + 0.1 * inputs.k.float()
        inputs = replace(inputs, k=(k / k.norm(dim=-1, keepdim=True)).to(inputs.k.dtype))
    assert get("gdn", "fused").plan(inputs, Precision()).variant == "hopper"
    assert_as_exact_as_unfused(inputs)


def assert_as_exact_as_unfused(inputs: GDNInputs) -> None:
    exact = gdn_chunked(inputs, torch.float64)
    ours, theirs = (get("gdn", which).run(inputs, Precision()) for which in ("fused", "unfused"))
    for a, b, reference, head_dim in zip(ours, theirs, exact, (2, 1), strict=True):
        assert (head_errors(a, reference, head_dim) <= 1.01 * head_errors(b, reference, head_dim)).all()


def test_final_states_with_v_before_k_have_the_same_bits() -> None:
    inputs = on_the_gpu(replace(FEW, seqlen=1000).inputs())
    first = run(inputs, CUT)
    other = GDNHopperLaunch(inputs, CUT, state_v_first=True)(inputs)
    assert other.final_states.mT.is_contiguous()
    assert_same(first, other)


@pytest.mark.parametrize("config", [CUT, PARTS], ids=["first passes", "parts"])
def test_bitwise_the_same_in_every_call(config: GDNHopperConfig) -> None:
    inputs = on_the_gpu(replace(MANY, seqlen=4096, gate=-1e-3).inputs())
    config = replace(config, segment=16)
    first = run(inputs, config)
    for _ in range(20):
        assert_same(run(inputs, config), first)


def test_a_cut_changes_no_bit_if_the_whole_past_is_seen() -> None:
    inputs = on_the_gpu(replace(FEW, seqlen=2000).inputs())
    one, cut = (run(inputs, GDNHopperConfig(segment=segment, truncation_log2=float("-inf"))) for segment in (32, 5))
    assert_same(one, cut)


def test_a_head_does_not_depend_on_the_others() -> None:
    inputs = on_the_gpu(replace(FEW, seqlen=4096, gate=-1e-4).inputs())
    g = inputs.g.clone()
    g[..., 1:] = -5.0
    ours, other = run(inputs, PARTS), run(replace(inputs, g=g), PARTS)
    assert torch.equal(ours.out[:, :, 0], other.out[:, :, 0])
    assert torch.equal(ours.final_states[:, 0], other.final_states[:, 0])


@pytest.mark.parametrize("gate", [-0.1, -1e-4])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_nan_stays_in_its_heads_and_sequence(name: str, gate: float) -> None:
    inputs = on_the_gpu(GDNCase(batch=2, seqlen=2048, key_heads=2, heads=4, gate=gate).inputs())
    poisoned = getattr(inputs, name).clone()
    poisoned[1, 700, 0] = torch.nan
    clean, result = (run(one, PARTS) for one in (inputs, replace(inputs, **{name: poisoned})))
    assert result.out[1, 700, 0].isnan().any()
    assert torch.equal(result.out[0], clean.out[0])
    assert torch.equal(result.out[1, :, 2:], clean.out[1, :, 2:])  # value heads of another key head
    assert torch.equal(result.out[1, :640], clean.out[1, :640])


@pytest.mark.parametrize("config", [CUT, PARTS], ids=["first passes", "parts"])
def test_in_a_graph(config: GDNHopperConfig) -> None:
    inputs = on_the_gpu(replace(FEW, seqlen=3000, gate=-1e-3).inputs())
    launch = GDNHopperLaunch(inputs, config)
    expected = launch(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = launch(inputs)
    for _ in range(3):
        for tensor in result:
            tensor.fill_(torch.nan)
        graph.replay()
        assert_same(result, expected)


def test_beside_another_stream_that_fills_the_gpu() -> None:
    inputs = on_the_gpu(replace(MANY, seqlen=8192, gate=-1e-4).inputs())
    config = GDNHopperConfig(segment=32, transition_parts=2, longest_first_pass=31)
    alone = run(inputs, config)
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    ours, theirs = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(theirs):
        for _ in range(50):
            matrix @ matrix
    with torch.cuda.stream(ours):
        outputs = [run(inputs, config) for _ in range(5)]
    torch.cuda.synchronize()
    for output in outputs:
        assert_same(output, alone)


def test_strides_past_32_bits(much_gpu_memory: None) -> None:  # noqa: ARG001
    """Sequences 2^31 elements apart."""
    inputs = on_the_gpu(GDNCase(batch=2, seqlen=640, heads=4, gate=-1e-4).inputs())
    apart = 2**31 + 64
    moved = {}
    for name in ("q", "k", "v", "g", "beta"):
        tensor = getattr(inputs, name)
        memory = torch.zeros(apart + tensor[0].numel(), dtype=tensor.dtype, device="cuda")
        moved[name] = memory.as_strided(tensor.shape, (apart, *tensor.stride()[1:])).copy_(tensor)
    assert_same(run(replace(inputs, **moved), PARTS), run(inputs, PARTS))


def test_views_of_a_wider_tensor() -> None:
    inputs = on_the_gpu(replace(FEW, batch=3, seqlen=900, initial_state=False, gate=-1e-3).inputs())
    expected = run(inputs, PARTS)
    moved = {}
    for name in ("q", "k", "v", "g", "beta"):
        tensor = getattr(inputs, name)
        wide = torch.full((3, 1000, *tensor.shape[2:]), torch.nan, dtype=tensor.dtype, device="cuda")
        moved[name] = wide[:, 50:950].copy_(tensor)
    assert_same(run(replace(inputs, **moved), PARTS), expected)


# --- K and V other than 128

SLICES = GDNCase(key_heads=4, heads=4, key_dim=96, value_dim=192, initial_state=True, seqlen=2048, beta=2.0)
SLICED = {
    "olmo": SLICES,
    "normalised, fp16": replace(SLICES, normalise=True, dtype=torch.float16),
    "no gate": replace(SLICES, gate=0.0),
    "slow": replace(SLICES, gate=-1e-4, seqlen=4096),
    "ragged batch": replace(SLICES, batch=3, seqlen=1000),
    "packed": replace(SLICES, lengths=(5, 0, 295, 1024, 76, 0, 1600), gate=-1e-3),
    "one slice": GDNCase(key_heads=2, heads=4, key_dim=72, value_dim=120, seqlen=700),
    "V 256": GDNCase(key_heads=2, heads=2, value_dim=256, seqlen=700, initial_state=True),
}


@pytest.mark.parametrize("name", SLICED)
def test_slices_against_the_oracle(name: str) -> None:
    inputs = on_the_gpu(SLICED[name].inputs())
    plan = get("gdn", "fused").plan(inputs, Precision())
    assert plan.variant == "hopper"
    assert "padded to 128" in plan.reason
    result = get("gdn", "fused").run(inputs, Precision())
    assert_passes(result, inputs, Precision())
    assert_passes(SlicedLaunch(inputs, GDNHopperConfig(segment=8))(inputs), inputs, Precision())
    assert_same(result, get("gdn", "fused").run(inputs, Precision()))


@pytest.mark.parametrize("name", ["olmo", "no gate", "slow"])
def test_no_head_of_slices_is_less_exact_than_unfused(name: str) -> None:
    assert_as_exact_as_unfused(on_the_gpu(replace(SLICED[name], seqlen=8192).inputs()))
