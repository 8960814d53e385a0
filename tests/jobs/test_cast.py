"""`run --dtype`: which tensors change their dtype, and what the reports say about it."""

from dataclasses import replace

import pytest
import torch
from cases import accuracies
from command_line import passing
from kernels.kernel_cases import GDNCase, SSDCase

from ssdprof import operators
from ssdprof.capture.layers import token_major
from ssdprof.core.base import states_of
from ssdprof.core.pairs import compare
from ssdprof.jobs.replay import cast_inputs
from ssdprof.kernels.inputs import Inputs
from ssdprof.store.reports import load

BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32


def dtypes(inputs: Inputs) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in inputs.tensors.items()}


def test_activations_of_ssd_are_cast_and_parameters_and_states_are_not():
    inputs = SSDCase(dtype=BF16, gate=True, initial_states=True).inputs()
    inputs = token_major(replace(inputs, dt=inputs.tensors["dt"].to(BF16)))
    found, remark = cast_inputs(operators.get(inputs.operator), inputs, "fp16")
    before = dtypes(inputs)
    after = dtypes(found)
    assert {name for name in after if after[name] != before[name]} == {"x", "B", "C", "z", "dt"}
    assert {after[name] for name in ("x", "B", "C", "z", "dt")} == {FP16}
    for name, tensor in found.tensors.items():
        assert tensor.stride() == inputs.tensors[name].stride(), name
        assert torch.equal(tensor, inputs.tensors[name].to(tensor.dtype)), name
    assert remark == ""
    assert cast_inputs(operators.get(inputs.operator), inputs, None) == (inputs, "")
    assert (
        dtypes(
            cast_inputs(
                operators.get("ssd"), replace(inputs, dt=inputs.tensors["dt"].float()), "fp16"
            )[0]
        )["dt"]
        == FP32
    ), "the model's own"


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_decay_of_gdn_stays_in_fp32_even_where_everything_is(dtype):
    inputs = GDNCase(dtype=dtype).inputs()
    inputs = replace(inputs, beta=inputs.beta.to(dtype), g=inputs.g.float())
    after = dtypes(cast_inputs(operators.get(inputs.operator), inputs, "fp16")[0])
    assert {name for name, dtype in after.items() if dtype == FP16} == {"q", "k", "v", "beta"}
    assert after["g"] == FP32


def test_what_the_other_dtype_does_not_hold_is_counted():
    inputs = SSDCase(dtype=BF16).inputs()
    x = inputs.x.clone()
    x[0, :2, 0, 0], x[0, 2, 0, 0] = 1e5, 1e-9
    found, remark = cast_inputs(operators.get("ssd"), replace(inputs, x=x), "fp16")
    assert (
        remark == "The cast to fp16 changed some elements: 2 of x became infinite; 1 of x became 0."
    )
    assert found.values[0, :3, 0, 0].tolist() == [float("inf"), float("inf"), 0.0]


FAST = "--seq 24 --layers first:1 --dtypes relaxed"


@pytest.mark.usefixtures("in_empty_folder")
def test_a_cast_run_says_so_and_is_not_compared_with_one_that_is_not():
    plain = passing(f"run demo {FAST} --out plain --save-captures --states fp16")
    source = load("plain")[1].cases[0].dims.dtype
    assert load("plain")[1].cast is None
    assert "cast from" not in plain.out
    cast = passing(f"run demo {FAST} --out cast --dtype fp16 --full")
    _, report = load("cast")
    assert report.cast == (source, "fp16")
    assert {case.dims.dtype for case in report.cases} == {"fp16"}
    assert {states_of(case.precision) for case in report.cases} == {"fp16"}
    assert {precision.partition(", ")[2] for _, _, precision in report.requested} == {"fp16 states"}
    # in the heading, the caveats and the list of runs
    assert cast.shown.count(f"cast from {source} to fp16") >= 3
    first, second = ((name, load(name)[1]) for name in ("plain", "cast"))
    pairs = [
        pair
        for pair in compare(first, second, smallest_difference=0.01).pairs
        if pair.base and pair.new
    ]
    assert {pair.case.implementation for pair in pairs} == {"unfused", "fused"}
    assert not [pair for pair in pairs if not (pair.incomparable and pair.other_inputs)]

    passing(f"run demo {FAST} --out again --dtype {source}")
    assert load("again")[1].cast is None, "nothing was cast"
    passing("run plain/captures --dtype fp16 --dtypes relaxed --out stored")
    _, replayed = load("stored")
    assert replayed.cast == report.cast
    assert accuracies(replayed) == accuracies(report)
