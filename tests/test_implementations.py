"""`--impl` and `--baseline`: a user's kernel and other libraries in `run` and `accuracy`, as a user
calls them.
"""

import ctypes
import os
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Answer, ending, latest, passing
from documented_kernels import DOCUMENT, write_example
from fakes import inputs
from torchrun import python

import ssdprof
from ssdprof import operators
from ssdprof.commands.terminal import only_data_on_stdout
from ssdprof.core.base import BETWEEN_CALLS, REPEATS
from ssdprof.core.case import Case
from ssdprof.core.outcome import Outcome
from ssdprof.core.report import Report
from ssdprof.kernels import UnsupportedError, registry
from ssdprof.kernels.precision import Precision
from ssdprof.measure import isolate, probes
from ssdprof.measure.accuracy import oracle_output
from ssdprof.measure.isolate import IsolatedFirstCall
from ssdprof.measure.laws import LAWS
from ssdprof.operators.generate import Library
from ssdprof.operators.implementations import resolve
from ssdprof.operators.ssd import LIBRARIES
from ssdprof.report.statements import CONSEQUENCES

BAD = Path(__file__).parent / "measure" / "bad_kernels.py"
SEQ = "--seq 40"
SHORT = f"{SEQ} --layers 0 --dtypes exact"


@pytest.fixture(autouse=True)
def here(users_folder: Path, exact_kernels: None, small_guards: None) -> Path:
    """A folder with bad kernels that Python imports from."""
    (users_folder / "bad_kernels.py").write_text(BAD.read_text())
    return users_folder


@pytest.fixture
def not_isolated(monkeypatch):
    """Nothing is called in a separate process; these tests judge the results afterwards."""
    monkeypatch.setattr(isolate, "_tried", lambda *_: ("ran", ""))

    def here(trial, names, keep, **_: bool):
        return [probes.try_law(trial, name, keep) for name in names]

    monkeypatch.setattr(probes, "_tested_elsewhere", here)


@pytest.fixture
def judged_once(not_isolated: None, monkeypatch):
    """Nor are laws tested: the output of one call is judged."""
    monkeypatch.setattr("ssdprof.measure.probes.Prober.probe", lambda *_, **__: ())


def cases() -> dict[str, Case]:
    """The cases of the latest run."""
    return {case.implementation: case for case in latest().cases}


# --- the user's own kernel


@pytest.mark.parametrize(
    ("model", "function"),
    [("demo", "my_ssd"), pytest.param("demo-gdn", "my_gdn", marks=pytest.mark.slow)],
)
@pytest.mark.usefixtures("not_isolated")
def test_the_example_of_the_documents(here: Path, model, function):
    write_example(here)
    shown = passing(f"run {model} {SHORT} --impl unfused,my_kernels:{function}").shown
    assert "PASSED: all 2 cases are within the error budget" in shown
    case = cases()[f"my_kernels:{function}"]
    assert (case.result, case.why) == ("passed", "")
    assert [accuracy.tensor for accuracy in case.accuracy if not accuracy.reason] == [
        "out",
        "final_states",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("not_isolated")
def test_the_example_with_a_pool_keeps_its_laws_and_runs_in_decode_steps_alone(here: Path):
    write_example(here)
    passing("run demo-gdn --seq 16 --layers 0 --decode 1 --impl my_kernels:my_gdn_step")
    steps = [case for case in latest().cases if case.implementation == "my_kernels:my_gdn_step"]
    assert {case.call and case.call.kind for case in steps} == {"decode"}
    assert {case.result for case in steps} == {"passed"}
    held = {probe.name for case in steps for probe in case.probes if probe.holds == "yes"}
    assert BETWEEN_CALLS + "padded rows touch nothing" in held
    assert BETWEEN_CALLS + "a shared prefix" in held


def test_every_command_of_the_document_takes_the_example():
    """The commands use the names of the example."""
    named = re.findall(r"my_kernels:(\w+)", DOCUMENT.read_text())
    assert set(named) == set(
        re.findall(r"^def (my_\w+)", DOCUMENT.with_name("my_kernels.py").read_text(), re.M)
    )


@pytest.mark.parametrize(
    ("function", "status", "reason"),
    [
        (
            "wrong_head",
            "inaccurate",
            r"out, head 1: max\|ours - oracle\| is \S+, its budget \S+; the largest",
        ),
        ("refusing", "refused", "refusing: not on a Tuesday"),
    ],
)
@pytest.mark.usefixtures("judged_once")
def test_a_bad_kernel_fails_the_run_and_is_named(function, status, reason):
    name = f"bad_kernels:{function}"
    shown = ending(1, f"run demo {SHORT} --impl unfused,{name}").shown
    assert name in shown
    found = cases()
    assert (found[name].result, found["unfused"].result) == (status, "passed")
    assert re.match(reason, found[name].why)
    assert found[name].time_us is None
    assert re.search(reason.replace(r"\|", r"\\\|"), Answer("export").shown)


@pytest.mark.slow
@pytest.mark.usefixtures("not_isolated")
def test_the_tensors_of_a_failure_come_with_a_script_that_needs_no_model(here: Path, capsys):
    """Of the captured call, and of a call that broke a law."""
    (here / "peeking.py").write_text(
        "from ssdprof.measure.accuracy import oracle_output\n"
        "def peeking(inputs):\n    out, states = oracle_output(inputs)\n"
        "    out[:, :-1] += 1e-4 * out[:, 1:]\n    return out, states\n"
    )
    ending(1, f"run demo {SHORT} --impl unfused,bad_kernels:wrong_head,peeking:peeking")
    found = cases()
    for name, file in (("bad_kernels:wrong_head", ""), ("peeking:peeking", "-causality")):
        passing("case", found[name].id, "--save failing")
        script = here / "failing" / f"{found[name].id}{file}.py"
        assert found[name].name in script.read_text()
        capsys.readouterr()
        runpy.run_path(str(script))
        _, kept, *_, again, _ = capsys.readouterr().out.splitlines()
        assert kept.startswith("kept: out, largest error ")
        assert kept.removeprefix("kept") == again.removeprefix("now"), "the error comes again"
        assert float(kept.split()[4]) > 0.1
    (here / "peeking.py").write_text("import os\ndef peeking(inputs): os._exit(7)")
    ended = python(str(script))
    assert ended.returncode == 7
    assert ended.stdout.endswith("now: if this is the last line, the call ended this process\n")
    refused = ending(2, "case", found["unfused"].id, "--save failing").err
    assert "kept no tensors of layer 0, 40 tokens, unfused" in refused
    assert found["peeking:peeking"].id in refused
    wrong = found["bad_kernels:wrong_head"]
    x = ssdprof.load_call(here / "failing" / f"{wrong.id}.safetensors").inputs.tensors["x"]
    assert not x.is_contiguous(), "a view, as in the call"


@pytest.mark.usefixtures("judged_once")
@pytest.mark.parametrize("command", ["run", "answers"])
def test_what_a_kernel_prints_is_no_data(here: Path, command, capfd):
    """Neither during the import of its module nor during its call."""
    (here / "my_kernels.py").write_text(
        "from ssdprof.measure.accuracy import oracle_output\n"
        "print('imported')\n"
        "def talking(inputs):\n    print('called')\n    return oracle_output(inputs)\n"
    )
    words = SHORT if command == "run" else SEQ
    answer = Answer(f"{command} demo", words, "--impl unfused,my_kernels:talking --json")
    assert Report.model_validate_json(answer.out).complete
    assert {"imported", "called"} <= set(f"{answer.err} {capfd.readouterr().err}".split())


def test_what_c_code_prints_is_no_data(capfd):
    with only_data_on_stdout():
        ctypes.CDLL(None).puts(b"of the C library")  # stays in the buffer until a flush
        os.write(1, b"of a system call\n")
    print("data")
    found = capfd.readouterr()
    assert found.out == "data\n"
    assert set(found.err.splitlines()) == {"of the C library", "of a system call"}


def test_first_call_is_the_limit_of_the_other_process(monkeypatch):
    monkeypatch.setattr(isolate, "_tried", lambda *given: ("failed", f"it had {given[-1]:g} s"))
    shown = ending(1, f"run demo {SHORT} --impl unfused,bad_kernels:good --first-call 7").shown
    assert "bad_kernels:good (exact, fp32 states): it had 7 s" in shown
    assert cases()["unfused"].result == "passed"


@pytest.mark.usefixtures("judged_once")
def test_a_kernel_with_a_precision_is_judged_at_each():
    words = "run demo --seq 40 --layers 0 --impl bad_kernels:precise,bad_kernels:good"
    shown = ending(1, words).shown
    assert (
        "REFUSED: bad_kernels:precise (relaxed, bf16 states) in layer 0: precise: exact "
        "intermediates only."
    ) in shown
    found = [
        (case.implementation, case.kind, case.version) for case in latest().cases if case.baseline
    ]
    assert found.count(("bad_kernels:precise", "own", "bad_kernels:precise")) == 2
    assert found.count(("bad_kernels:good", "own", "bad_kernels:good")) == 1
    passing(words, "--dtypes exact")


# --- other libraries


EXACT_BF16 = Precision(state_dtype=torch.bfloat16)


def library(
    monkeypatch, name: str, run: Callable[[Any], Any] = oracle_output, *, needs_gpu: bool = False
):
    """A stand-in for a library, with bf16 states like `mamba_ssm`."""

    of = dict(name=name, run=lambda inputs, _precision: run(inputs), kind="library", version="9.9")
    made = replace(registry.get("ssd", "reference"), **of, precisions=lambda _dtype: (EXACT_BF16,))
    monkeypatch.setitem(
        LIBRARIES,
        name,
        Library(load=lambda _checkout: made, hint="pip install it.", needs_gpu=needs_gpu),
    )


def forgetful(inputs):
    """It computes packed sequences without their initial states."""
    if getattr(inputs, "cu_seqlens", None) is not None:
        inputs = inputs.after(None)
    return narrow(inputs)


def narrow(inputs):
    out, states = oracle_output(inputs)
    return out, states.bfloat16()


def sloppy(inputs):
    """One element is wrong."""
    out, states = oracle_output(inputs)
    out[0, 3, 0, 0] += out.abs().max() / 10
    return out, states


def doubled(inputs):
    out, states = oracle_output(inputs)
    return out * 2, states


def refuse(_inputs):
    raise UnsupportedError("shy: no chunks of 256")


@pytest.mark.usefixtures("judged_once")
def test_a_library_is_a_column_at_its_own_precision(monkeypatch):
    library(monkeypatch, "other", narrow)
    shown = passing(f"run demo {SHORT} --impl unfused,fused,other --full").shown
    case = cases()["other"]
    assert (case.result, case.precision) == ("passed", "exact, bf16 states")
    assert case.accuracy[0].vs_baseline.against == "unfused exact, bf16 states"
    assert "other" in shown.partition("Accuracy of the output at 40 tokens")[2]
    assert "another library other, 9.9, at exact, bf16 states" in shown


@pytest.mark.usefixtures("judged_once")
def test_libraries_that_cannot_take_part_are_a_sentence_each(monkeypatch):
    library(monkeypatch, "shy", refuse)
    library(monkeypatch, "gpu_only", needs_gpu=True)
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    shown = passing(f"run demo {SHORT} --impl unfused,fused,shy,gpu_only,mamba_ssm --full").shown
    assert "Not compared: " in shown
    if not torch.cuda.is_available():
        assert "gpu_only needs an NVIDIA GPU, and this machine has none" in shown
    assert "mamba_ssm cannot be imported" in shown
    assert "Without a time: shy (exact, bf16 states) in layer 0: shy: no chunks of 256." in shown
    assert Outcome(latest()).passed


@pytest.mark.usefixtures("judged_once")
def test_a_wrong_library_fails_the_run_and_an_inexact_one_is_told(monkeypatch):
    library(monkeypatch, "sloppy", sloppy)
    library(monkeypatch, "wrong", doubled)
    shown = passing(f"run demo {SHORT} --impl fused,sloppy").shown
    assert "oracle, except for sloppy (exact, bf16 states) in layer 0, which is close" in shown
    shown = ending(1, f"run demo {SHORT} --impl fused,sloppy,wrong --full").shown
    found = cases()
    assert (found["sloppy"].result, found["wrong"].result) == ("passed", "inaccurate")
    assert found["sloppy"].accuracy_faults.startswith("out, head 0: max|ours - oracle| is ")
    assert "Outside the error budget, but passed because it is another library's: sloppy" in shown
    assert "FAILED: 1 of 5 cases: wrong (exact, bf16 states) inaccurate in layer 0" in shown
    shown = Answer("accuracy --impl sloppy").shown
    assert (
        "sloppy may not be used at exact, bf16 states: outside the error budget in layer 0."
        in shown
    )


@pytest.mark.usefixtures("not_isolated")
def test_a_law_that_a_named_library_breaks_fails_the_run_and_its_consequence_is_told(monkeypatch):
    library(monkeypatch, "forgetful", forgetful)
    shown = ending(1, f"run demo {SHORT} --impl fused,forgetful").shown
    (case,) = (case for case in latest().cases if case.implementation == "forgetful")
    assert (case.result, case.named, case.accuracy[0].reason) == ("inaccurate", True, "")
    assert [law.name for law in case.broken_laws] == ["edge inputs"]
    assert "forgetful is not safe here: some inputs that a model may pass are computed" in shown
    company = case.changed(named=False)
    assert (company.result, company.broken_laws) == ("passed", ())
    assert Outcome(latest().changed(cases=(company,), requested=())).failed == ()


def test_every_law_has_a_consequence_for_a_user():
    assert set(LAWS) - {REPEATS} <= set(CONSEQUENCES)


@pytest.mark.slow
def test_a_named_library_makes_its_first_call_in_another_process():
    """Which finds it by the word that the user typed."""
    model = resolve(operators.get("ssd"), "model")
    assert not model.isolated, "it only came along"
    named = replace(model, named=True)
    assert named.isolated
    assert IsolatedFirstCall().verdict(named, inputs(), Precision()) == ("ran", "")


@pytest.mark.usefixtures("judged_once")
def test_all_are_compared_with_a_library_as_baseline(monkeypatch):
    library(monkeypatch, "other", narrow)
    words = "--seq 40 --layers 0 --impl unfused,fused --baseline other --full"
    shown = passing("run demo", words).shown
    report = latest()
    assert report.baseline == "other"
    against = {
        (case.implementation, str(case.precision)): case.accuracy[0].vs_baseline.against
        for case in report.cases
        if case.accuracy[0].vs_baseline
    }
    assert len(against) == 4
    assert set(against.values()) == {"other exact, bf16 states"}
    assert "Compared with other" in shown
    assert "baseline other, which the others are compared with" in shown
    assert "unfused ssdprof's own kernels with one launch per stage fused" in shown


# --- accuracy


@pytest.mark.usefixtures("judged_once")
def test_accuracy_shows_the_named_implementations_of_the_run():
    ending(1, f"run demo {SHORT} --impl unfused,fused,bad_kernels:nan")
    shown = ending(1, "accuracy").shown
    assert "bad_kernels:nan" in shown.partition("Accuracy of the output at 40 tokens")[2]
    shown = passing("accuracy --impl fused").shown
    assert "fused interpreter" in shown
    assert "bad_kernels:nan" not in shown
    told = ending(2, "accuracy --impl fussed").err
    assert "has no implementation 'fussed'. hint: Did you mean fused?" in told
