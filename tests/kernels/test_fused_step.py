"""`ssd_fused` for one position of each sequence: the recurrent kernel runs, with all options."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ssd_cases import DTYPES, EXACT, PRECISIONS, RELAXED, Case

from ssdprof.kernels import Precision, get, ssd_fused, ssd_recurrent
from ssdprof.kernels.registry import UnsupportedError
from ssdprof.kernels.ssd import fused
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.portable import _fused_kernel
from ssdprof.kernels.ssd.recurrent import _ssd_recurrent_kernel
from ssdprof.measure.accuracy import assert_passes

OPTIONS = ("D", "z", "dt_bias", "initial_states", "cu_seqlens", "dt_softplus", "dt_limit", "chunk_size")
STEP = Case(batch=3, seqlen=1, heads=4, groups=2, initial_states=True, dtype=torch.bfloat16)
CASES = {
    "plain": STEP,
    "no initial states": replace(STEP, initial_states=False),
    "gate, D (h, p), P 20": replace(STEP, gate=True, skip="(h, p)", headdim=20),
    "limits, no D": replace(STEP, dt_limit=(0.01, 0.2), skip=""),
    "N 256": replace(STEP, dstate=256),
    "fp32": replace(STEP, dtype=torch.float32),
}


def run(inputs: SSDInputs, precision: Precision = EXACT, *, batch_invariant: bool = False) -> SSDOutput:
    return fused.run(inputs, precision, batch_invariant=batch_invariant)


def assert_same(ours: SSDOutput, theirs: SSDOutput) -> None:
    for name, a, b in zip(SSDOutput._fields, ours, theirs, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), name
        assert torch.equal(a, b), name


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    fused.forget_launches()


def kernels() -> list[object]:
    """The kernels of the kept launches, in the order of their preparation."""
    return [launch.launcher.kernel for launch in fused._launches._kept.values()]


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(
            name, precision, marks=() if precision == EXACT or name == "no initial states" else pytest.mark.slow
        )
        for name in CASES
        for precision in PRECISIONS
    ],
    ids=str,
)
def test_is_the_recurrent_kernel(name: str, precision: Precision) -> None:
    inputs = CASES[name].inputs()
    for batch_invariant in (False, True):
        assert_same(run(inputs, precision, batch_invariant=batch_invariant), ssd_recurrent(inputs))
    assert kernels() == [_ssd_recurrent_kernel] * 2


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_within_the_budget_of_every_precision(dtype: torch.dtype, precision: Precision) -> None:
    inputs = replace(STEP, dtype=dtype, gate=True).inputs()
    assert_passes(run(inputs, precision), inputs, precision)


@pytest.mark.parametrize("case", [replace(STEP, seqlen=2), Case(lengths=(1, 1, 1)), Case(lengths=(1,))], ids=str)
def test_longer_and_packed_sequences_take_a_chunked_kernel(case: Case) -> None:
    inputs = case.inputs()
    run(inputs)
    assert kernels() == [_fused_kernel]
    assert get("ssd", "fused").plan(inputs, EXACT).variant == "interpreter"


def test_signatures_of_one_and_of_two_positions_are_kept_apart() -> None:
    one, two = STEP.inputs(), replace(STEP, seqlen=2).inputs()
    first = run(one), run(two)
    for _ in range(2):
        assert_same(run(one), first[0])
        assert_same(run(two), first[1])
    assert kernels() == [_ssd_recurrent_kernel, _fused_kernel]


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_row_of_a_batch_is_what_it_is_alone(batch_invariant: bool) -> None:
    inputs = STEP.inputs()
    whole = run(inputs, batch_invariant=batch_invariant)
    for row in range(3):
        own = {name: getattr(inputs, name)[row : row + 1] for name in ("x", "dt", "B", "C", "initial_states")}
        alone = run(replace(inputs, **own), batch_invariant=batch_invariant)
        assert torch.equal(alone.out[0], whole.out[row])
        assert torch.equal(alone.final_states[0], whole.final_states[row])


def test_a_packed_position_is_the_same_whatever_the_others_lengths() -> None:
    """A pack of one position runs the same kernel as a longer pack that contains it."""
    long = Case(lengths=(1, 40), initial_states=True, dtype=torch.bfloat16).inputs()
    assert long.cu_seqlens is not None
    assert long.initial_states is not None
    tokens = {name: getattr(long, name)[:, :1] for name in ("x", "dt", "B", "C")}
    short = replace(long, **tokens, initial_states=long.initial_states[:1], cu_seqlens=long.cu_seqlens[:2])
    whole, alone = run(long, batch_invariant=True), run(short, batch_invariant=True)
    assert torch.equal(alone.out[:, :1], whole.out[:, :1])
    assert torch.equal(alone.final_states[0], whole.final_states[0])


def test_the_plan_names_the_kernel_and_the_precision_that_has_the_same_bits() -> None:
    plan = get("ssd", "fused").plan
    exact, relaxed = plan(STEP.inputs(), EXACT), plan(STEP.inputs(), RELAXED)
    assert (exact.variant, exact.launches, exact.workspace_bytes) == ("recurrent", 1, 0)
    assert "the same as" not in exact.reason
    assert relaxed.reason.endswith("; the same as exact with fp32 states")
    assert relaxed.config == exact.config == get("ssd", "recurrent").plan(STEP.inputs(), EXACT).config


def test_the_torch_operator_and_a_full_graph() -> None:
    inputs = STEP.inputs()
    low, high = inputs.dt_limit
    arguments = (
        inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C, inputs.chunk_size, inputs.D, inputs.z, inputs.dt_bias,
        inputs.dt_softplus, low, high, inputs.initial_states, inputs.cu_seqlens, "relaxed", torch.bfloat16,
    )  # fmt: skip
    operator = torch.ops.ssdprof.ssd_fused.default
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
    expected = ssd_recurrent(inputs)
    assert_same(SSDOutput(*operator(*arguments)), expected)

    options = {name: getattr(inputs, name) for name in OPTIONS}

    def layer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(ssd_fused(x, inputs.dt, inputs.A, inputs.B, inputs.C, **options))  # type: ignore[return-value]

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same(SSDOutput(*compiled(inputs.x)), expected)


def test_refusals_are_those_of_fused() -> None:
    with pytest.raises(UnsupportedError, match="fused: dstate is at most 256, not 257"):
        run(replace(STEP, dstate=257).inputs())
    inputs = STEP.inputs()
    with pytest.raises(ValueError, match="dt must have shape"):
        ssd_fused(inputs.x, inputs.dt[:1], inputs.A, inputs.B, inputs.C)
    inputs.x.requires_grad_()
    with pytest.raises(UnsupportedError, match="fused: forward only"):
        ssd_fused(inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C)
