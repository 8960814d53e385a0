"""The workflow docs/ssdprof.yml and the action that it uses, run on this machine."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml

from ssdprof.core import statistics

ROOT = Path(__file__).parents[2]
QUICK = "--seq 40 --layers 1 --dtypes exact --states fp32 --gate rms:1.5"
FAULTS = {"gpu": ("slower", "time:base+3%"), "cpu": ("inexact", "rms:base+5%")}
ROW = "layer 1, .* tokens, fused, exact, fp32 states"
SHELL = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c"]


class Played(NamedTuple):
    passed: bool
    log: str
    summary: str
    reports: Path
    artifact: Path
    outputs: dict[str, str]


def yaml_of(file: str) -> dict[str, Any]:
    loaded = yaml.safe_load((ROOT / file).read_text())
    return loaded


def filled(text: str, inputs: dict[str, str], outputs: dict[str, dict[str, str]]) -> str:
    """A text with the values of its expressions: inputs.NAME and steps.ID.outputs.NAME."""

    def value(match: re.Match[str]) -> str:
        group, name, *rest = match[1].split(".")
        return (
            {"inputs": inputs}[group][name]
            if not rest
            else {"steps": outputs}[group][name][rest[1]]
        )

    return re.sub(r"\$\{\{ (.+?) \}\}", value, text)


def play(job: str, folder: Path, options: str, **environment: str) -> Played:
    """The action with the inputs of a job of the workflow, in GitHub's shell.  options: instead of
    the job's.
    """
    (with_,) = (
        step["with"]
        for step in yaml_of("docs/ssdprof.yml")["jobs"][job]["steps"]
        if "ssdprof" in step["uses"]
    )
    action = yaml_of("action.yml")
    inputs = (
        {name: one.get("default", "") for name, one in action["inputs"].items()}
        | with_
        | {"options": options}
    )
    reports = folder / inputs["reports"]
    artifact = folder / "artifact"
    summary = folder / "summary"
    for old in (reports, artifact):
        shutil.rmtree(old, ignore_errors=True)
    summary.write_text("")
    path = f"{Path(__file__).parent / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    github = {
        "GITHUB_STEP_SUMMARY": str(summary),
        "GITHUB_ACTIONS": "true",
        "PATH": path,
        "PYTHONPATH": str(ROOT),
    }
    outputs = {}
    failed = False
    log = ""
    for step in action["runs"]["steps"]:
        if failed and step.get("if") != "always()":
            continue
        if "uses" in step:
            assert step["uses"].startswith("actions/upload-artifact@")
            shutil.copytree(reports, artifact)
            continue
        output = folder / "output"
        output.write_text("")
        own = {name: filled(value, inputs, outputs) for name, value in step.get("env", {}).items()}
        ended = subprocess.run(
            [*SHELL, step["run"]],
            cwd=folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ
            | github
            | own
            | environment
            | {"GITHUB_OUTPUT": str(output), "NO_COLOR": "1"},
        )
        log += ended.stdout
        failed = failed or ended.returncode != 0
        outputs[step.get("id", "")] = dict(
            line.split("=", 1) for line in output.read_text().splitlines()
        )
    told = {
        name: next(
            filter(None, (outputs.get(step, {}).get(name, "") for step in ("export", "run"))), ""
        )
        for name, declared in action["outputs"].items()
        if declared["value"]
        == f"${{{{ steps.export.outputs.{name} || steps.run.outputs.{name} }}}}"
    }
    return Played(not failed, log, summary.read_text(), reports, artifact, told)


def check_job(job: str, folder: Path, options: str, **environment: str):
    """On the main branch, on a pull request that changes nothing, and on one whose fused kernel got
    worse.
    """
    fault, metric = FAULTS[job]
    baseline = {"cpu": "ssdprof-baseline.json", "gpu": "ssdprof-gpu.json"}[job]
    main = play(job, folder, options, **environment)
    assert main.passed, main.log
    told = f"Nothing was compared. Commit {main.reports.name}/baseline.json as {baseline}."
    assert f"\n::notice title=ssdprof::{told}" in main.log
    assert {"run", "report.html", "junit.xml", "baseline.json"} <= {
        one.name for one in main.artifact.iterdir()
    }
    assert main.summary.startswith("## ssdprof: demo")
    assert main.summary.count("\n") <= 40
    shutil.copy(main.reports / "baseline.json", folder / baseline)
    unchanged = play(job, folder, options, **environment)
    assert unchanged.passed, unchanged.log
    assert re.search(f"PASSED: no case violates .*{re.escape(metric)}", unchanged.log)
    assert unchanged.summary.count("\n") <= 80
    worse = play(job, folder, options, PLANTED=fault, **environment)
    assert not worse.passed, worse.log
    for begins in (
        "FAILED: " + metric,
        "::error title=ssdprof compare::" + metric.replace("%", "%25"),
    ):
        assert re.search(f"^{re.escape(begins)}: {ROW}: ", worse.log, re.M), worse.log
    assert re.search(f"FAILED: {re.escape(metric)}: {ROW}", worse.summary)
    assert (worse.artifact / "compare.txt").stat().st_size  # attached although the job failed
    # no verdict of a run is on speed alone
    assert ("\nThe run did not pass" in worse.log) == (fault == "inexact")
    assert "\nThe comparison with the baseline did not pass" in worse.log


def test_a_run_that_ends_early_fills_the_outputs_and_an_annotation(tmp_path):
    played = play("cpu", tmp_path, "--layers 99")
    assert not played.passed
    reason = "error: Layer 99 has no SSD, GDN or KDA operator; the model has 4: 0, 1, 3, 4."
    assert played.outputs == {"passed": "false", "verdict": reason}
    assert f"::error title=ssdprof run::{reason}" in played.log


@pytest.mark.slow
@pytest.mark.parametrize("job", FAULTS)
def test_a_regression_fails_the_job_and_nothing_else_does(job, tmp_path):
    fake = {"FAKE_TIMES": "1"} if job == "gpu" else {}
    check_job(job, tmp_path, QUICK, **fake)


@pytest.mark.slow
def test_every_line_of_the_page_runs_in_an_empty_repository(tmp_path):
    """With a wheel, in an environment that sees this one's libraries but not this package."""
    page = (ROOT / "docs" / "ci.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.M | re.S)
    lines = [line for language, block in blocks if not language for line in block.splitlines()]
    assert lines[0].startswith("pip install ")

    def run(line: str) -> str:
        found = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        found |= {
            "PATH": f"{tmp_path / 'venv' / 'bin'}:{found['PATH']}",
            "PIP_NO_DEPS": "1",
            "PIP_NO_INDEX": "1",
        }
        found |= {
            f"GIT_{who}_{what}": "a@b.c"
            for who in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        }
        ended = subprocess.run(
            line, shell=True, cwd=folder, env=found, capture_output=True, text=True
        )
        assert ended.returncode == 0, f"{line}\n{ended.stdout}\n{ended.stderr}"
        return ended.stdout

    folder = tmp_path / "repository"
    folder.mkdir()
    run("git init -q")
    run(f"'{sys.executable}' -m pip wheel --quiet --no-build-isolation -w . '{ROOT}'")
    run(f"'{sys.executable}' -m venv ../venv")
    (site,) = (tmp_path / "venv").glob("lib/*/site-packages")
    libraries = [one for one in sys.path if one.endswith("-packages")]
    (site / "libraries.pth").write_text("\n".join(libraries))
    printed = [run(line) for line in lines]
    assert "PASSED: no case violates rms:base+5% or match:base-0.1." in printed[-3]
    head = run("git describe --always --abbrev=10").strip()
    assert re.search(rf"compared cases?\n(.*\n)+{head} +second ", printed[-1]), printed[-1]
    assert run(
        f"'{site.parents[2]}/bin/python' -c 'import ssdprof; print(ssdprof.__file__)'"
    ).startswith(str(site))


SPREADS = (0.0, 0.005, 0.01, 0.02)  # from run to run
PERCENT = (3, 5)


@pytest.mark.slow
def test_the_page_says_how_often_an_unchanged_case_fails():
    """Two runs of one time, with the scatter of each recorded comparison of a kernel with
    itself.
    """
    stored = json.loads((ROOT / "benchmarks" / "results" / "verdicts-h100.json").read_text())[
        "same"
    ]
    rng = np.random.default_rng(0)
    shares = []
    for spread in SPREADS:
        alarms = []
        for one in stored * 30:
            low, high = one["device"]["interval"]
            count = one["recordings"]
            scatter = math.log(high / low) / 2 / statistics._T[count - 2] * math.sqrt(count)
            base, new = (
                statistics.median(
                    [[math.exp(x)] for x in rng.normal(rng.normal(0, spread), scatter, count)]
                )
                for _ in range(2)
            )
            ratio = statistics.quotient(base, new)
            alarms.append([ratio.verdict(limit / 100) == "slower" for limit in PERCENT])
        shares.append([100 * fmean(column) for column in zip(*alarms, strict=True)])
    page = (ROOT / "docs" / "ci.md").read_text()
    rows = re.findall(r"^\| .*? % \| ([\d.]+) % \| ([\d.]+) % \|$", page, re.M)
    for said, found in zip(zip(*rows, strict=True), zip(*shares, strict=True), strict=True):
        assert max(found[:2]) < 0.1
        expected = [
            0.0,
            *(pytest.approx(share, abs=1 if share > 5 else 0.3) for share in found[2:]),
        ]
        assert list(map(float, said)) == expected


@pytest.mark.gpu
def test_a_slower_kernel_fails_the_job_on_a_gpu(tmp_path):
    check_job("gpu", tmp_path, "--seq 16k --layers 1 --dtypes exact --states fp32")


def test_no_input_is_part_of_a_script():
    """An expression inside `run` would allow a branch's name to run commands; `env` passes values
    safely.
    """
    for step in yaml_of("action.yml")["runs"]["steps"]:
        assert "${{" not in step.get("run", "")
        assert "run" not in step or step["shell"] == "bash"


def test_the_action_is_documented():
    action = yaml_of("action.yml")
    for entry in [*action["inputs"].values(), *action["outputs"].values()]:
        assert entry["description"]
    jobs = yaml_of("docs/ssdprof.yml")["jobs"].values()
    used = {
        name
        for job in jobs
        for step in job["steps"]
        if "ssdprof" in step["uses"]
        for name in step["with"]
    }
    assert used == action["inputs"].keys()
