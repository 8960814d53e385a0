"""Runs a job of a GitHub Actions workflow on this machine, with the features that docs/ssdprof.yml needs.

play.py WORKFLOW JOB [--options WORDS]

Steps run in the current folder, one after the other, in GitHub's shell; an action named ssdprof is that of action.yml.
$STORE/artifacts receives uploads.  --options replaces that input of the action, so that a test is fast.  Exit code 1 if
a step failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
_SKIPPED = ("actions/checkout",)  # the code is checked out
_EXPRESSION = re.compile(r"\$\{\{\s*(.+?)\s*\}\}")
Context = dict[str, dict[str, str]]


def workflow(file: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return loaded


def filled(text: object, context: Context) -> str:
    """Text with its expressions replaced.  Raises KeyError for an unknown expression."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if found := re.fullmatch(r"steps\.([\w-]+)\.outputs\.([\w-]+)", name):
            return context[f"steps.{found[1]}"][found[2]]
        group, _, key = name.partition(".")
        return context[group][key]

    return _EXPRESSION.sub(value, str(text))


class Job:
    """failed: names of the steps that failed, including those of the action."""

    def __init__(self, store: Path, options: str | None) -> None:
        self.store, self.options = store, options
        self.failed: list[str] = []

    def play(self, steps: list[dict[str, Any]], context: Context) -> None:
        for step in steps:
            name = step.get("name", step.get("uses", "a step"))
            condition = step.get("if")
            assert condition in (None, "always()"), f"the condition {condition} is not played"
            if self.failed and condition is None:
                print(f"== {name}: skipped", flush=True)
                continue
            print(f"== {name}", flush=True)
            if not self.step(step, context):
                print(f"== {name}: failed", flush=True)
                self.failed.append(name)

    def step(self, step: dict[str, Any], context: Context) -> bool:
        inputs = {key: filled(value, context) for key, value in step.get("with", {}).items()}
        match step.get("uses", "").split("@")[0]:
            case "":
                return self.run(step, context)
            case "OWNER/ssdprof":
                return self.action(inputs)
            case "actions/upload-artifact":
                shutil.copytree(inputs["path"], self.store / "artifacts" / inputs["name"], dirs_exist_ok=True)
            case other:
                assert other in _SKIPPED, f"{other} is not played"
        return True

    def run(self, step: dict[str, Any], context: Context) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            script, output, summary = (Path(folder, name) for name in ("script.sh", "output", "summary"))
            script.write_text(step["run"], encoding="utf-8")
            for file in (output, summary):
                file.touch()
            own = {name: filled(value, context) for name, value in step.get("env", {}).items()}
            github = {"GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": str(summary), "GITHUB_ACTIONS": "true"}
            shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)]
            ended = subprocess.run(shell, env=os.environ | own | github, check=False)
            with (self.store / "summary.md").open("a", encoding="utf-8") as kept:
                kept.write(summary.read_text(encoding="utf-8"))
            if "id" in step:
                lines = output.read_text(encoding="utf-8").splitlines()
                context[f"steps.{step['id']}"] = dict(line.split("=", 1) for line in lines)
            return ended.returncode == 0

    def action(self, inputs: Mapping[str, str]) -> bool:
        action = workflow(ROOT / "action.yml")
        unknown = inputs.keys() - action["inputs"].keys()
        assert not unknown, f"action.yml has no input {unknown}"
        given = {name: one.get("default", "") for name, one in action["inputs"].items()} | dict(inputs)
        if self.options is not None:
            given["options"] = self.options
        context: Context = {"inputs": given}
        before = len(self.failed)
        assert all(step["shell"] == "bash" for step in action["runs"]["steps"] if "run" in step)
        self.play(action["runs"]["steps"], context)
        if len(self.failed) > before:
            return False
        for name, one in action["outputs"].items():
            print(f"output {name}: {filled(one['value'], context)}", flush=True)
        return True


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("workflow", type=Path)
    parser.add_argument("job")
    parser.add_argument("--options")
    asked = parser.parse_args()
    job = Job(Path(os.environ["STORE"]), asked.options)
    job.play(workflow(asked.workflow)["jobs"][asked.job]["steps"], {})
    return 1 if job.failed else 0


if __name__ == "__main__":
    sys.exit(main())
