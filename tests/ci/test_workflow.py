"""The workflow docs/ssdprof.yml and the action that it uses, run on this machine."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import yaml
from ci.play import ROOT, workflow

from ssdprof.core import statistics

HERE = Path(__file__).parent
QUICK = "--seq 40 --layers 1 --dtypes exact --states fp32"
FAULTS = {"gpu": ("slower", "time:base+3%"), "cpu": ("inexact", "rms:5%")}


def play(job: str, folder: Path, **environment: str) -> str:
    fault, metric = FAULTS[job]
    ended = subprocess.run(
        [str(HERE / "workflow.sh"), job, fault, metric],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("job", FAULTS)
def test_a_regression_fails_the_job_and_nothing_else_does(job: str, tmp_path: Path) -> None:
    fake = {"FAKE_TIMES": "1"} if job == "gpu" else {}
    log = play(job, tmp_path, PLAY_OPTIONS=f"{QUICK} --max-rms-ratio 1.5", **fake)
    assert log.endswith("#### as it should be\n")


@pytest.mark.slow
def test_every_line_of_the_page_runs_in_an_empty_repository(tmp_path: Path) -> None:
    """With a wheel, in an environment that sees this one's libraries but not this package."""
    page = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.M | re.S)
    lines = [line for language, block in blocks if not language for line in block.splitlines()]
    assert lines[0].startswith("pip install ")

    def run(line: str) -> str:
        found = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        found |= {"PATH": f"{tmp_path / 'venv' / 'bin'}:{found['PATH']}", "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1"}
        found |= {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        ended = subprocess.run(line, shell=True, cwd=folder, env=found, capture_output=True, text=True, check=False)
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
    assert "PASSED: no case violates rms:5% or match:-0.1." in printed[-3]
    head = run("git describe --always --abbrev=10").strip()
    assert re.search(rf"compared cases?  ▁+\n(.*\n)+{head} +second ", printed[-1]), printed[-1]
    assert run(f"'{site.parents[2]}/bin/python' -c 'import ssdprof; print(ssdprof.__file__)'").startswith(str(site))


SPREADS = (0.0, 0.005, 0.01, 0.02)  # from run to run
PERCENT = (3, 5)


def test_the_page_says_how_often_an_unchanged_case_fails() -> None:
    """Two runs of one time, with the scatter of each recorded comparison of a kernel with itself."""
    stored = json.loads((ROOT / "benchmarks" / "results" / "verdicts-h100.json").read_text())["same"]
    rng, shares = np.random.default_rng(0), []
    for spread in SPREADS:
        alarms = []
        for one in stored * 30:
            low, high = one["device"]["interval"]
            count = one["recordings"]
            scatter = math.log(high / low) / 2 / statistics._T[count - 2] * math.sqrt(count)
            base, new = (
                statistics.median([[math.exp(x)] for x in rng.normal(rng.normal(0, spread), scatter, count)])
                for _ in range(2)
            )
            ratio = statistics.quotient(base, new)
            alarms.append([ratio.verdict(limit / 100) == "slower" for limit in PERCENT])
        shares.append([100 * fmean(column) for column in zip(*alarms, strict=True)])
    page = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*? % \| ([\d.]+) % \| ([\d.]+) % \|$", page, re.M)
    for said, found in zip(zip(*rows, strict=True), zip(*shares, strict=True), strict=True):
        assert max(found[:2]) < 0.1
        expected = [0.0, *(pytest.approx(share, abs=1 if share > 5 else 0.3) for share in found[2:])]
        assert list(map(float, said)) == expected


@pytest.mark.gpu
def test_a_slower_kernel_fails_the_job_on_a_gpu(tmp_path: Path) -> None:
    play("gpu", tmp_path, PLAY_OPTIONS="--seq 16k --layers 1 --dtypes exact --states fp32")


def steps() -> list[dict[str, Any]]:
    jobs = workflow(ROOT / "docs" / "ssdprof.yml")["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def test_no_input_is_part_of_a_script() -> None:
    """An expression inside `run` would allow a branch's name to run commands; `env` passes values safely."""
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    for step in [*action["runs"]["steps"], *steps()]:
        assert "${{" not in step.get("run", "")


def test_the_action_is_documented() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    for entry in [*action["inputs"].values(), *action["outputs"].values()]:
        assert entry["description"]
    used = {name for step in steps() if "ssdprof" in step["uses"] for name in step["with"]}
    assert used == action["inputs"].keys()
