"""`answers` as a job: its reference, and the noise below which nothing can be told apart."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import task_of
from fakes import inputs

from ssdprof import operators
from ssdprof.capture.intercept import OperatorCall
from ssdprof.core.case import Answers
from ssdprof.core.conditions import parse_gate
from ssdprof.core.outcome import broken
from ssdprof.core.report import Report
from ssdprof.jobs import answers as job
from ssdprof.jobs.options import AnswersOptions
from ssdprof.jobs.target import answers
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.operators.decode_states import parse_state_format
from ssdprof.progress import Watcher
from ssdprof.store.reports import load

pytestmark = pytest.mark.usefixtures("in_empty_folder", "exact_kernels")


def answered(seqlen: int = 24, **wanted: Any) -> Report:
    asked = AnswersOptions(
        model="demo",
        prompt="random",
        seqlens=(seqlen,),
        layers="first:1",
        intermediates="exact",
        states=("fp32",),
        **({"weights": "fp32"} | wanted),
    )
    folder, report = job.answers(*answers(asked), Watcher())
    assert load(folder)[1] == report
    return report


def answers_in(report: Report) -> list[Answers]:
    return [task_of(case, Answers) for case in report.of_answers]


def reference(report: Report) -> tuple[str, str]:
    """Its name and the remark on it, the same in all cases."""
    (found,) = {(one.reference, one.remark) for one in answers_in(report)}
    return found


def test_noise_comes_first_and_gates_do_not_judge_it():
    report = answered(generate=2, conditions=(parse_gate("kl:1e-30"),))
    assert (report.kind, report.complete, report.baseline) == ("answers", True, "unfused")
    assert [
        (case.implementation, task_of(case, Answers).change, case.is_gated) for case in report.cases
    ] == [
        ("unfused", "last bit of its inputs moved", False),
        ("unfused", "in chunks of half the length", False),
        ("unfused", "", True),
        ("fused", "", True),
    ]
    assert {case.result for case in report.cases} == {"passed"}
    assert reference(report) == ("fp64 oracle", "")
    moved, _, same, _ = answers_in(report)
    assert moved.bands[0].kl_mean > same.bands[0].kl_mean == 0
    assert (same.generated, same.first_difference) == (2, None)
    assert broken(report) == ()


def test_the_baseline_is_the_reference_if_it_is_named_or_the_oracle_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
):
    named = answered(implementations=("fused",), reference="unfused")
    assert reference(named) == ("unfused exact, fp32 states", "--reference names it.")
    monkeypatch.setattr(job, "PIECE", 8)
    assert reference(answered(implementations=("fused",)))[0] == "fp64 oracle"
    monkeypatch.setattr(job, "LONGEST_S", 0.0)
    name, remark = reference(answered(implementations=("fused",)))
    assert name == "unfused exact, fp32 states"
    assert remark.startswith("The fp64 oracle would take about 0 min, estimated from 8 tokens")
    assert reference(answered(seqlen=16, implementations=("fused",)))[0] == "fp64 oracle", (
        "too short to matter"
    )
    assert reference(answered(implementations=("fused",), reference="oracle"))[0] == "fp64 oracle"


def seen_by(noise: Any, given: SSDInputs) -> SSDInputs:
    """The inputs that an operator gets."""
    seen = []
    mixer = SimpleNamespace(operator="ssd")
    call = OperatorCall(
        mixer=mixer,
        operator=operators.get("ssd"),
        inputs=given,
        wants_final_state=True,
        remark="",
        original=lambda: None,
    )
    noise(lambda call: seen.append(call.inputs))(call)
    return seen[0]


@pytest.mark.parametrize(("chunk", "halved"), [(64, 32), (32, 16), (16, 16)])
def test_noise_of_other_chunks(chunk: int, halved: int):
    assert seen_by(job.in_other_chunks, replace(inputs(), chunk_size=chunk)).chunk_size == halved


def test_noise_of_the_last_bit_is_half_of_each_sign_and_leaves_zeros():
    given = inputs()
    given.x[0, 3] = 0
    found = seen_by(job.with_moved_bits, given)
    for name in ("x", "B", "C"):
        before = getattr(given, name).float()
        after = getattr(found, name).float()
        changed = before != 0
        assert torch.equal(after != before, changed)
        # a unit in the last place of bf16
        assert ((after - before)[changed] / before[changed]).abs().max() <= 2**-7
        assert 0.4 < (after > before)[changed].float().mean() < 0.6
    assert found.dt is given.dt
    assert found.A is given.A


def halved(states: torch.Tensor) -> torch.Tensor:
    return states / 2


def test_formats_of_states_are_rows_after_the_implementations():
    """int8 with its error is within the noise, and what keeps less is farther away."""
    names = ("fp32", "int8-carried", "int8", "test_answers_job:halved")
    formats = tuple(map(parse_state_format, names))
    report = answered(64, implementations=("fused",), decode_states=formats)
    decoded = [case for case in report.cases if case.implementation == "recurrent"]
    assert [case.precision for case in decoded] == [f"exact, {name} states" for name in names]
    assert report.cases[-4:] == tuple(decoded)
    noise, *divergences = (case.band.kl_mean for case in (report.cases[0], *decoded) if case.band)
    assert divergences == sorted(divergences)
    assert divergences[1] < 3 * noise < divergences[2]
