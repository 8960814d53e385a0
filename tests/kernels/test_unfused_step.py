"""The unfused steps, in the interpreter, against the fp64 recurrences; they compile for every GPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gdn_cases
import pytest
import ssd_cases
import torch
from compile_target import CAPABILITIES, SHARED_BYTES, compiled, on_meta
from ssd_cases import assert_close

from ssdprof.kernels import get
from ssdprof.kernels.gdn.reference import gdn_recurrence
from ssdprof.kernels.gdn.unfused_step import three_stages
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import UnsupportedError
from ssdprof.kernels.ssd.recurrent import two_stages
from ssdprof.kernels.ssd.reference import ssd_recurrence

EXACT = Precision()
FP32_ROUNDING = 2e-6
BF16, FP32 = torch.bfloat16, torch.float32
SSD = [
    ssd_cases.Case(batch=5, seqlen=1, heads=4, groups=2, initial_states=True),
    ssd_cases.Case(batch=2, seqlen=1, headdim=20, skip="(h, p)", gate=True, initial_states=True),
    ssd_cases.Case(seqlen=1, skip="", dstate=32),
    ssd_cases.Case(batch=2, seqlen=1, dt_limit=(0.05, 0.1), initial_states=True),
]
GDN = [
    gdn_cases.Case(batch=3, length=1, initial_state=True),
    gdn_cases.Case(batch=2, length=1, key_heads=2, values_per_key=3, key_dim=20, value_dim=40, initial_state=True),
    gdn_cases.Case(batch=2, length=1, initial_state=True, l2norm=False, largest_beta=2.0),
    gdn_cases.Case(length=1),
]
LAUNCHES: dict[str, Callable[[], object]] = {
    "ssd bf16": lambda: two_stages(
        on_meta(
            ssd_cases.Case(
                batch=8, seqlen=1, heads=16, headdim=64, dstate=128, initial_states=True, dtype=BF16
            ).inputs()
        )
    ),
    "ssd largest": lambda: two_stages(
        on_meta(ssd_cases.Case(seqlen=1, headdim=128, dstate=256, gate=True, initial_states=True, dtype=FP32).inputs())
    ),
    "gdn bf16": lambda: three_stages(
        on_meta(gdn_cases.Case(batch=8, length=1, key_dim=128, value_dim=128, initial_state=True, dtype=BF16).inputs())
    ),
    "gdn largest": lambda: three_stages(
        on_meta(gdn_cases.Case(length=1, key_dim=256, value_dim=256, initial_state=True, dtype=FP32).inputs())
    ),
}


@pytest.mark.parametrize("case", SSD, ids=str)
def test_ssd_against_the_recurrence(case: ssd_cases.Case) -> None:
    inputs = case.inputs()
    assert_close(get("ssd", "unfused_step").run(inputs, EXACT), ssd_recurrence(inputs), FP32_ROUNDING)


@pytest.mark.parametrize("case", GDN, ids=str)
def test_gdn_against_the_recurrence(case: gdn_cases.Case) -> None:
    inputs = case.inputs()
    assert_close(get("gdn", "unfused_step").run(inputs, EXACT), gdn_recurrence(inputs), FP32_ROUNDING)


@pytest.mark.parametrize("operator", ["ssd", "gdn"])
def test_refuses_by_name_what_is_no_step(operator: str) -> None:
    step = get(operator, "unfused_step")
    cases: Any = ssd_cases.Case if operator == "ssd" else gdn_cases.Case
    length = "seqlen" if operator == "ssd" else "length"
    for case in (cases(**{length: 2}), cases(lengths=(1,))):
        for function in (step.run, step.plan):
            with pytest.raises(UnsupportedError, match="unfused_step: one token of each sequence"):
                function(case.inputs(), EXACT)
    inputs = cases(**{length: 1}).inputs()
    assert step.plan(inputs, EXACT).launches == (2 if operator == "ssd" else 5)
    name = "x" if operator == "ssd" else "q"
    wanting = replace(inputs, **{name: getattr(inputs, name).clone().requires_grad_()})
    with pytest.raises(UnsupportedError, match="unfused_step: forward only"):
        step.run(wanting, EXACT)


@pytest.mark.compiler
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("label", LAUNCHES)
def test_compiles_without_spilling(label: str, capability: int) -> None:
    kernels = compiled("test_unfused_step", capability)[label]
    names = dict.fromkeys(kernel.kernel for kernel in kernels)
    assert list(names) == (
        ["_ssd_step_state_kernel", "_ssd_step_output_kernel"]
        if label.startswith("ssd")
        else ["_gdn_qk_l2norm_kernel", "_gdn_step_write_kernel", "_gdn_step_state_kernel", "_gdn_step_output_kernel"]
    )
    for kernel in kernels:
        assert kernel.spilled_bytes == 0, kernel
        assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel


@pytest.mark.gpu
@pytest.mark.parametrize("operator", ["ssd", "gdn"])
def test_on_a_gpu(operator: str) -> None:
    oracle: Any = ssd_recurrence if operator == "ssd" else gdn_recurrence
    cases: Any = SSD if operator == "ssd" else GDN
    for case in cases:
        inputs = case.inputs()
        tensors = {name: value.cuda() for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
        found = get(operator, "unfused_step").run(replace(inputs, **tensors), EXACT)
        assert_close(found._make(tensor.cpu() for tensor in found), oracle(inputs), 2e-5)
