"""The workflow docs/ssdprof.yml and the action that it uses, run on this machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ci.play import ROOT, workflow

HERE = Path(__file__).parent
QUICK = "--seq 40 --layers 1 --dtypes exact --states fp32"
FAULTS = {"gpu": ("slower", "slower:3%"), "cpu": ("inexact", "rms:5%")}


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
    used = {name for step in steps() if step.get("uses") == "./" for name in step["with"]}
    assert used == action["inputs"].keys()
