"""The workflow of a release, whose steps that need no network run here."""

import os
import subprocess
import tomllib

import pytest
from ci.test_workflow import ROOT, SHELL, yaml_of

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_it_publishes_only_what_was_tested_and_attested():
    jobs = yaml_of(".github/workflows/release.yml")["jobs"]
    assert (jobs["test"]["needs"], jobs["publish"]["needs"]) == ("build", "test")
    assert jobs["test"]["strategy"]["matrix"]["file"] == ["*.whl", "*.tar.gz"]
    uses = [step["uses"].partition("@")[0] for step in jobs["publish"]["steps"]]
    assert uses.index("actions/attest-build-provenance") < uses.index("pypa/gh-action-pypi-publish")
    writing = {name for name, job in jobs.items() if "write" in job.get("permissions", {}).values()}
    assert writing == {"publish"}


@pytest.mark.parametrize(("tag", "fits"), [(f"v{VERSION}", True), ("v99.0.0", False)])
def test_a_tag_that_is_not_the_version_is_refused(tag: str, fits: bool):
    steps = yaml_of(".github/workflows/release.yml")["jobs"]["build"]["steps"]
    (check,) = (step["run"] for step in steps if step.get("name") == "The tag is the version")
    done = subprocess.run([*SHELL, check], cwd=ROOT, env=os.environ | {"GITHUB_REF_NAME": tag})
    assert (done.returncode == 0) == fits


def test_documents_name_this_versions_wheel_and_promise_no_registry():
    for file in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = file.read_text()
        assert "pip install ssdprof\n" not in text, file
        assert text.count("ssdprof-") >= text.count("-py3-none-any.whl"), file
        for wheel in text.split("-py3-none-any.whl")[:-1]:
            assert wheel.endswith(f"ssdprof-{VERSION}"), file
