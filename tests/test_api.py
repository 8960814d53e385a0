"""The Python functions: options are those of the commands, and tensors of one's own are compared
like a layer's.
"""

import inspect
from pathlib import Path

import pytest
import torch
from cases import EXACT_FP32, bench, cell, report
from generated_inputs import generated
from typer.testing import CliRunner

import ssdprof
from ssdprof.cli import app
from ssdprof.core.target import Placement
from ssdprof.errors import BadInputError, SsdprofError
from ssdprof.jobs import options
from ssdprof.jobs.target import captures_of
from ssdprof.kernels import registry
from ssdprof.kernels.kda.inputs import RawKDAInputs
from ssdprof.kernels.precision import Precision
from ssdprof.progress import Watcher


def test_a_function_that_is_not_there():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ssdprof.nothing  # noqa: B018


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> ssdprof.Results:
    folder = tmp_path_factory.mktemp("runs") / "run"
    return ssdprof.run(
        "demo", seq=40, layers="first:1", dtypes="exact", gate=["rms:2", "match:50%"], out=folder
    )


def test_a_run_is_that_of_its_command_line(ran: ssdprof.Results):
    assert ran.passed
    typed = "ssdprof run demo --seq 40 --layers first:1 --dtypes exact "
    assert " ".join(ran.report.command).startswith(typed)
    assert [gate.text for gate in ran.report.conditions] == ["rms:2", "match:50%"]
    assert ran.path
    assert ssdprof.load(ran.path).report == ran.report
    assert repr(ran).splitlines()[0] == "ssdprof: demo, 40 tokens, no GPU"
    assert repr(ran).splitlines()[-1].startswith("In short: fused is accurate enough")


def test_a_notebook_shows_a_page_of_its_own(ran: ssdprof.Results):
    shown = ran._repr_html_()
    assert shown.startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
    assert "<h1>" not in shown


def test_a_data_frame_has_the_rows_of_the_csv(ran: ssdprof.Results):
    pytest.importorskip("pandas")
    frame = ran.to_pandas()
    assert list(frame["implementation"]) == ["unfused", "fused"]
    assert frame["output, rms error [relative]"].between(1e-4, 1e-2).all()


@pytest.mark.parametrize(
    ("file", "begins"), [("x.html", "<!DOCTYPE"), ("x.json", "{"), ("x", "## "), ("x.csv", "rep")]
)
def test_the_suffix_is_the_format(ran: ssdprof.Results, tmp_path, file, begins):
    assert ran.export(tmp_path / file).read_text().startswith(begins)
    with pytest.raises(BadInputError, match="exists"):
        ran.export(tmp_path / file)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"seqq": 4}, "run() has no option 'seqq'."),
        ({"json": True}, "run() has no option 'json'."),
        ({"dtypes": "both"}, "'both' is not one of 'exact', 'relaxed', 'all'."),
        ({"seq": 0}, "'0' is not a possible number of tokens."),
        ({"batch": "x"}, "Invalid value for '--batch': "),
    ],
)
def test_a_wrong_option_is_refused_at_once(given, words):
    with pytest.raises(BadInputError) as caught:
        ssdprof.run("demo", **given)
    assert words in caught.value.message
    assert "Input" not in caught.value.message  # pydantic's word


@pytest.mark.parametrize("name", ["run", "answers", "prefill", "bench"])
def test_help_shows_the_options_of_the_command(name):
    kind = getattr(options, f"{name.capitalize()}Options")
    of_command = {"json", "full", "dry_run", "prefill", "stalls"}
    typed = {python for python, _, _ in options.flags(kind)} - of_command
    shown = inspect.signature(getattr(ssdprof, name)).parameters
    assert set(shown) - typed == {"operator" if name == "bench" else "model", "watcher"}


def test_a_run_that_stored_captures_stands_for_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/one/captures")
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    asked = (captures_of(model) for model in ("one", "runs/one", "runs/one/captures", "two"))
    assert list(asked) == [folder, folder, folder, None]


# --- one case again


def test_a_case_runs_again_by_its_command(ran: ssdprof.Results):
    case = ran.cases[-1]
    shown = CliRunner().invoke(app, ["case", case.id, str(ran.path)])
    command = (
        "ssdprof run demo --gate rms:2 --gate match:50% --impl fused --dtypes exact "
        "--states fp32 --layers 0 --seq 40"
    )
    assert shown.stdout.splitlines() == [f"{case.id}  {case.name}", "passed", command]
    missing = CliRunner().invoke(app, ["case", "nothing", str(ran.path)])
    assert (missing.exit_code, case.id in missing.stderr) == (2, True)


@pytest.mark.parametrize(
    ("typed", "changes", "expected"),
    [
        (
            "run org/m --seq 1k,128k --out x --baseline fla",
            {},
            "run org/m --baseline fla {0} {1} --layers 9 --seq 131072",
        ),
        ("run captures", {"placement": None}, "run captures {0} {1} --layers 9"),
        (
            "run org/m --impl=fused=there,unfused",
            {},
            "run org/m {0}=there {1} --layers 9 --seq 131072",
        ),
    ],
)
def test_the_words_of_a_case(typed, changes, expected):
    placement = Placement(kind="one-gpu", device="cuda:0", allocated={}, predicted_peak_bytes=None)
    found = report(layers=(9,), precisions=(EXACT_FP32,)).changed(
        **{"command": ("ssdprof", *typed.split()), "placement": placement} | changes
    )
    words = expected.format("--impl fused", "--dtypes exact --states fp32")
    assert " ".join(found.again(found.cases[-1])) == f"ssdprof {words}"


def test_the_words_of_a_drawn_case():
    found = bench(*cell()).changed(
        command=("ssdprof", "bench", "ssd", "--cells", "8x4k", "--seq", "1k", "--json")
    )
    words = (
        "ssdprof bench ssd --json --impl fused --dtypes exact --states fp32 --shape "
        "mamba2-2.7b --dtype bf16"
    )
    assert " ".join(found.again(found.cases[-1])) == f"{words} --seq 1024 --batch 1"
    assert found.changed(command=()).again(found.cases[-1]) == ()


# --- tensors of one's own


@pytest.fixture(scope="module")
def inputs():
    return generated("ssd", "2x16x16x1", 70, dtype="fp32", layout="contiguous")


def right(inputs):
    return registry.get("ssd", "unfused").run(inputs, Precision())


def test_a_function_is_judged_on_given_tensors(inputs, tmp_path, capsys):
    def wrong(inputs):
        out, states = right(inputs)
        return out * 1.01, states

    def overwrites(inputs):
        output = right(inputs)
        inputs.x.zero_()
        return output

    def raises(_inputs):
        raise ValueError("no such size")

    before = inputs.x.clone()
    found = ssdprof.compare(inputs, [right, wrong, overwrites, raises, "fused"], laws="quick")
    assert "given tensors: testing laws\n" in capsys.readouterr().err
    quick = "; no law was tested"  # because the interpreter runs it
    alone = ssdprof.compare(inputs, [right], laws="quick", watcher=Watcher())
    assert quick in " ".join(repr(alone).split())
    assert capsys.readouterr().err == ""
    results = {case.implementation: case.result for case in found.cases}
    assert results == {
        "unfused": "passed",
        "right": "passed",
        "wrong": "inaccurate",
        "overwrites": "failed",
        "raises": "failed",
        "fused": "passed",
    }
    assert torch.equal(inputs.x, before), "functions get copies"
    why = {case.implementation: case.why for case in found.cases}
    assert "it changes its inputs: x" in why["overwrites"]
    assert (
        f"ValueError: no such size (test_api.py:{raises.__code__.co_firstlineno + 1} in raises)"
        in why["raises"]
    )
    assert not found.passed
    assert ssdprof.load(found.export(tmp_path / "report.json")).report == found.report
    assert "ssdprof: given tensors, 70 tokens, no GPU" in repr(found)


def test_what_cannot_be_compared_is_refused(inputs):
    for message, kernels, changes in (
        ("no implementation 'nothing'", ["nothing"], {}),
        ("mamba_ssm", ["mamba_ssm"], {}),
        ("Two implementations are named right", [right, right], {}),
        ("^implementations must be", [], {}),
        ("^implementations must be", "fused", {}),
        ("^implementations has 'int'", [1], {}),
        ("^inputs is 'RawKDAInputs'", [right], {"inputs": RawKDAInputs.unchecked()}),
        ("--laws", [right], {"laws": None}),
        ("^smallest_difference is", [right], {"smallest_difference": 0.01}),
    ):
        with pytest.raises(SsdprofError, match=message):
            ssdprof.compare(**{"inputs": inputs, "implementations": kernels} | changes)
