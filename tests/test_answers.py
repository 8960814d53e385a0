"""`ssdprof answers` on the demo models: it distinguishes exact and relaxed, and a broken kernel
fails the gate.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from cases import task_of
from command_line import DEMOS, Answer, ending, passing

from ssdprof.core.case import Answers, Case
from ssdprof.core.report import Report
from ssdprof.kernels import registry
from ssdprof.measure.accuracy import oracle_output
from ssdprof.store import reports

pytestmark = pytest.mark.usefixtures("in_empty_folder")

ONE_PRECISION = "--dtypes exact --states fp32"
SEQ = "--seq 70"  # chunks of 64 in demo-gdn


Register = Callable[[str, str, Callable[[Any, Any], Any]], None]


@pytest.fixture
def register(exact_kernels: None) -> Register:
    """Adds an implementation until the test ends."""

    def add(operator: str, name: str, run: Callable[[Any, Any], Any]) -> None:
        made = replace(registry.get(operator, "reference"), name=name, run=run)
        registry._implementations[operator, name] = made

    return add


def swapped_heads(inputs: Any, _precision: Any) -> Any:
    out, states = oracle_output(inputs)
    order = [1, 0, *range(2, out.shape[2])]
    return out[:, :, order], states[:, order]


def without_decay(inputs: Any, _precision: Any) -> Any:
    """In one chunk nothing decays."""
    if hasattr(inputs, "g"):
        g = inputs.g.clone()
        g[:, :32] = 0
        return oracle_output(replace(inputs, g=g))
    return oracle_output(replace(inputs, A=torch.zeros_like(inputs.A)))


def latest(kind: str = "answers") -> Report:
    return reports.load(None, kind)[1]


def kl(case: Case) -> float:
    """Of all positions."""
    return task_of(case, Answers).bands[0].kl_mean


@pytest.mark.parametrize("model", DEMOS)
def test_relaxed_bf16_is_farther_than_exact(model: str):
    words = "--implementations unfused --layers 0 --gate kl:1e-10"
    answer = ending(1, f"answers {model} {SEQ} {words}")
    assert "unfused (relaxed, bf16 states) at 70 tokens: kl:1e-10: " in answer.shown
    assert "GATE FAILED: kl:1e-10: " in answer.err
    report = latest()
    found = {str(case.precision): kl(case) for case in report.cases if case.is_gated}
    assert list(found) == ["exact, fp32 states", "relaxed, bf16 states"]  # the default
    assert found["exact, fp32 states"] < 1e-11 < 1e-10 < found["relaxed, bf16 states"]
    noise = [case for case in report.cases if task_of(case, Answers).change]
    assert len(noise) == 2
    assert all(0 < kl(case) < 1e-11 for case in noise)
    assert {
        (task_of(case, Answers).reference, task_of(case, Answers).weights)
        for case in report.of_answers
    } == {("fp64 oracle", "fp32")}


@pytest.mark.parametrize(("model", "operator"), [("demo", "ssd"), ("demo-gdn", "gdn")])
@pytest.mark.parametrize("broken", [swapped_heads, without_decay])
def test_a_broken_kernel_fails_the_gate(register: Register, model: str, operator: str, broken: Any):
    register(operator, "broken", broken)
    words = f"answers {model} {SEQ} {ONE_PRECISION} --implementations unfused,broken --gate kl:1e-4"
    text = ending(1, f"{words} --generate 2").shown
    assert "FAILED: the answers of broken (exact, fp32 states) at 70 tokens: kl:1e-4: " in text
    assert "FAILED: the answers of unfused" not in text
    ending(1, "export")


def test_the_layer_to_blame_comes_first(register: Register):
    seen = []

    def broken_in_one(inputs: Any, precision: Any) -> Any:
        seen.append(1)
        return swapped_heads(inputs, precision)

    register("gdn", "broken", broken_in_one)
    words = f"answers demo-gdn {SEQ} {ONE_PRECISION} --implementations unfused,broken --per-layer"
    shown = passing(f"{words} --layers 0,1 --json").out  # no limit was given
    alone = [
        (case.implementation, task_of(case, Answers).alone, kl(case) > 1e-3)
        for case in Report.model_validate_json(shown).cases
        if task_of(case, Answers).alone is not None
    ]
    assert alone == [
        (name, layer, name == "broken") for layer in (0, 1) for name in ("unfused", "broken")
    ]
    assert len(seen) == 2 + 2  # both together, then each separately
    assert "One layer at a time" in Answer("export").out


def test_what_an_implementation_raises_is_in_its_case(register: Register):
    def refuse(_inputs: Any, _precision: Any) -> Any:
        raise registry.UnsupportedError("not today")

    def zeros_over_zeros(inputs: Any, _precision: Any) -> Any:
        out, states = oracle_output(inputs)
        return out / 0 * 0, states

    register("ssd", "shy", refuse)
    register("ssd", "nan", zeros_over_zeros)
    ending(1, f"answers demo {SEQ} {ONE_PRECISION} --implementations shy,nan,unfused")
    gated = [case for case in latest().cases if case.is_gated]
    assert [case.result for case in gated] == ["refused", "nonfinite", "passed"]
    assert gated[0].reason == "not today"


def test_an_interruption_keeps_what_there_is(register: Register):
    def interrupted(_inputs: Any, _precision: Any) -> Any:
        raise KeyboardInterrupt

    register("ssd", "slow", interrupted)
    words = f"answers demo {SEQ} {ONE_PRECISION} --implementations unfused,slow --out runs/kept"
    told = ending(130, words).err
    assert "marked as partial: 3 cases of answers" in told
    report = latest()
    assert (report.complete, len(report.cases)) == (False, 3)
    register("ssd", "slow", lambda inputs, _precision: oracle_output(inputs))
    assert "runs/kept has 3 cases, and goes on" in passing(words).err
    assert (latest().complete, len(latest().cases), latest().cases[:3]) == (True, 4, report.cases)


@pytest.mark.usefixtures("exact_kernels")
def test_run_compares_answers_too():
    shown = passing(f"run demo --seq 40 --layers 1 {ONE_PRECISION} --answers").shown
    report = latest("run")
    assert len(report.of_calls) == 2
    assert {
        (task_of(case, Answers).layers, task_of(case, Answers).weights)
        for case in report.of_answers
    } == {((1,), "bf16")}
    assert "Answers at 40 tokens" in shown


@pytest.mark.parametrize(("weights", "item"), [("own", 2), ("auto", 4)])
def test_a_dry_run_counts_weights_in_the_dtype_that_they_are_loaded_in(
    tmp_path: Path, weights: str, item: int
):
    """Without a GPU that is fp32, unless the user selects the model's dtype."""
    tiny_models.build("mamba2", torch.bfloat16).save_pretrained(tmp_path)
    words = f"--prompt random --weights {weights} --dry-run --json"
    plan = json.loads(passing(f"answers {tmp_path} {words}").out)
    elements = sum(one.numel() for one in tiny_models.shared("mamba2").parameters())
    assert plan["weight_bytes"] == item * elements
    assert [part["bytes"] for part in plan["placement"]["allocated"].values()] == [item * elements]
