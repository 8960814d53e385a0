"""The five stages together, in Triton's interpreter: against the oracle, and against themselves."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from ssd_cases import DTYPES, EXACT, PRECISIONS, RELAXED, Case, assert_close, cut, sequences

from ssdprof.kernels import SSDInputs, UnsupportedError, get
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.inputs import SSDOutput
from ssdprof.kernels.ssd.unfused import run as run_unfused
from ssdprof.measure.accuracy import assert_passes

FP32_ROUNDING = 2e-6

CASES = [
    Case(),
    Case(seqlen=1),
    Case(seqlen=15, chunk_size=16, initial_states=True),
    Case(seqlen=64, skip=""),
    Case(batch=2, seqlen=33, heads=4, headdim=20, dstate=24, groups=2, chunk_size=16, initial_states=True),
    Case(seqlen=150, heads=3, groups=3, chunk_size=128, gate=True, skip="(h, p)", dt_limit=(0.02, 0.2)),
    Case(seqlen=300, heads=1, chunk_size=256),
    Case(lengths=(0, 33, 1, 0, 32, 9, 0), initial_states=True, gate=True),
]


def ordinary(**options: Any) -> SSDInputs:
    return Case(**options).inputs()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_passes(case: Case) -> None:
    inputs = case.inputs()
    assert_passes(run_unfused(inputs), inputs, EXACT)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda p: f"{p.intermediates}-{p.state_dtype}")
def test_passes_at_every_precision(dtype: torch.dtype, precision: Precision) -> None:
    inputs = ordinary(dtype=dtype, seqlen=50, initial_states=True)
    assert_passes(run_unfused(inputs, precision), inputs, precision)


def test_state_dtype_is_where_states_are_rounded() -> None:
    """fp32 states between chunks must not be rounded to 16 bit, for any dtype of the inputs."""
    inputs = ordinary(dtype=torch.float32)
    exact, rounded = run_unfused(inputs), run_unfused(inputs, replace(EXACT, state_dtype=torch.bfloat16))
    first_chunk = slice(0, inputs.chunk_size)
    assert torch.equal(exact.out[:, first_chunk], rounded.out[:, first_chunk])
    assert not torch.equal(exact.out, rounded.out)


def test_any_strides() -> None:
    inputs = ordinary(batch=2, seqlen=40, gate=True, initial_states=True, skip="(h, p)")

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        """The same values with the axes in reverse order in memory, every other element."""
        room = torch.zeros(*(2 * size for size in reversed(tensor.shape)), dtype=tensor.dtype)
        view = room.permute(*reversed(range(tensor.ndim)))[tuple(slice(None, None, 2) for _ in tensor.shape)]
        return view.copy_(tensor)

    tensors = {name: value for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    strided = replace(inputs, **{name: moved(tensor) for name, tensor in tensors.items()})
    assert not strided.x.is_contiguous()
    assert not strided.A.is_contiguous()
    ours, theirs = run_unfused(strided), run_unfused(inputs)
    assert torch.equal(ours.out, theirs.out)
    assert torch.equal(ours.final_states, theirs.final_states)


def test_two_segments_with_a_carried_state_are_one() -> None:
    inputs = ordinary(seqlen=90)
    first = run_unfused(cut(inputs, 0, 41))
    second = run_unfused(cut(inputs, 41, 90, initial_states=first.final_states))
    out = torch.cat([first.out, second.out], 1)
    assert_close(SSDOutput(out, second.final_states), run_unfused(inputs), FP32_ROUNDING)


def test_a_permuted_batch_gives_the_permuted_result() -> None:
    inputs = ordinary(batch=3, seqlen=40)
    order = torch.tensor([2, 0, 1])
    permuted = replace(inputs, **{name: getattr(inputs, name)[order] for name in ("x", "dt", "B", "C")})
    whole, moved = run_unfused(inputs), run_unfused(permuted)
    assert torch.equal(moved.out, whole.out[order])
    assert torch.equal(moved.final_states, whole.final_states[order])


def test_packed_sequences_are_bitwise_what_they_are_alone() -> None:
    inputs = ordinary(lengths=(40, 0, 1, 31), initial_states=True)
    packed = run_unfused(inputs)
    alone = [run_unfused(one) for one in sequences(inputs)]
    assert torch.equal(packed.out, torch.cat([output.out for output in alone], 1))
    assert torch.equal(packed.final_states[[0, 2, 3]], torch.cat([output.final_states for output in alone]))
    assert inputs.initial_states is not None
    assert torch.equal(packed.final_states[1], inputs.initial_states[1])


def test_int64_bounds_and_strided_bounds() -> None:
    inputs = ordinary(lengths=(20, 30))
    expected = run_unfused(inputs)
    for bounds in (torch.tensor([0, 20, 50]), torch.tensor([0, 9, 20, 9, 50, 9], dtype=torch.int32)[::2]):
        assert torch.equal(run_unfused(replace(inputs, cu_seqlens=bounds)).out, expected.out)


@pytest.mark.parametrize("precision", [EXACT, RELAXED], ids=["exact", "relaxed"])
@pytest.mark.parametrize(("dt", "A"), [(0.0, -1.0), (1e4, -16.0), (1e30, -16.0), (0.5, 0.0), (1e-38, -1e-38)])
def test_extreme_decays_stay_finite_and_right(precision: Precision, dt: float, A: float) -> None:
    """No decay, full decay, or exp underflows: cumulative sums may be 0, tiny or 1e31."""
    inputs = ordinary(seqlen=40, initial_states=True)
    inputs = replace(inputs, dt_bias=None, dt_softplus=False, A=torch.full_like(inputs.A, A))
    inputs.dt.fill_(dt)
    inputs.x.mul_(1e-30 if dt > 1e10 else 1)
    assert_passes(run_unfused(inputs, precision), inputs, precision)


def test_one_huge_step_resets_the_state() -> None:
    inputs = replace(ordinary(seqlen=40, skip=""), dt_bias=None, dt_softplus=False)
    inputs.dt.fill_(0.01)
    inputs.dt[:, 20] = 100.0
    output = run_unfused(inputs)
    after = run_unfused(cut(inputs, 20, 40))
    assert_close(SSDOutput(output.out[:, 20:], output.final_states), after, 1e-3)  # sums of 2300 leave 4 digits


@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C", "D", "dt_bias", "initial_states", "z"])
def test_nan_is_not_swallowed(name: str) -> None:
    inputs = ordinary(seqlen=40, initial_states=True, gate=True, dt_limit=(0.0, 0.1))
    getattr(inputs, name).fill_(torch.nan)
    assert not torch.isfinite(run_unfused(inputs).out).any()


def test_repeated_runs_agree_in_every_bit() -> None:
    inputs = ordinary(lengths=(40, 3))
    assert torch.equal(run_unfused(inputs).out, run_unfused(inputs).out)


@pytest.mark.parametrize(
    ("options", "message"),
    [(dict(headdim=129), "headdim is at most 128, not 129"), (dict(dstate=257), "dstate is at most 256, not 257")],
)
def test_what_it_does_not_do_it_refuses_by_name(options: dict[str, int], message: str) -> None:
    implementation = get("ssd", "unfused")
    inputs = ordinary(**options)
    for call in (implementation.run, implementation.plan):
        with pytest.raises(UnsupportedError, match=f"unfused: {message}"):
            call(inputs, EXACT)


def test_a_gradient_is_refused_not_dropped() -> None:
    inputs = replace(ordinary(), D=torch.ones(2, requires_grad=True))
    with pytest.raises(UnsupportedError, match="forward only"):
        run_unfused(inputs)


@pytest.mark.parametrize("case", [Case(seqlen=20), Case(lengths=(3, 4))], ids=["batch", "packed"])
def test_the_plan_counts_the_launches(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = case.inputs()
    kernels: list[str] = []
    run = triton.runtime.interpreter.InterpretedFunction.run

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernels.append(self.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(triton.runtime.interpreter.InterpretedFunction, "run", counting)
    run_unfused(inputs)
    assert get("ssd", "unfused").plan(inputs, EXACT).launches == len(kernels)
