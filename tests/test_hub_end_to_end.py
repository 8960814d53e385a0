"""The whole command line in a separate process, with the real hub client and a hub on this
machine.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from minihub import TOKEN, MiniHub

from ssdprof.checkpoint.names import DEMO_FOLDERS
from ssdprof.core.target import CheckpointRef
from ssdprof.store import reports

DEMO = DEMO_FOLDERS["demo"]
SHORT = ["--seq", "24", "--layers", "0", "--dtypes", "exact", "--states", "fp32"]

Call = Callable[..., subprocess.CompletedProcess[str]]


def latest() -> CheckpointRef:
    """The model of the latest run."""
    model = reports.load(None)[1].model
    assert model
    return model


@pytest.fixture(scope="module")
def hub() -> Iterator[MiniHub]:
    """Serves the demo model under other names."""
    with MiniHub() as server:
        server.publish("org/demo", DEMO)
        server.publish("org/gated", DEMO, gated=True)
        server.publish("org/private", DEMO, private=True)
        yield server


@pytest.fixture
def ssdprof(hub: MiniHub, tmp_path, monkeypatch) -> Call:
    """Calls the command line with an empty cache and no token."""
    monkeypatch.chdir(tmp_path)
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("HF_", "HUGGING_FACE"))
    }

    def call(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "ssdprof", *words],
            env=inherited
            | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub"), "NO_COLOR": "1"}
            | environment,
            capture_output=True,
            text=True,
        )

    return call


@pytest.mark.slow
def test_a_repo_is_run_and_its_commit_recorded(ssdprof: Call):
    dry = ssdprof("run", "org/demo", *SHORT, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "model.safetensors" in dry.stdout
    done = ssdprof("run", "org/demo", *SHORT)
    assert done.returncode == 0, done.stderr
    assert "Downloading" in done.stderr
    model = latest()
    assert (model.source, model.repo_id) == ("hub", "org/demo")
    assert len(model.revision or "") == 40
    offline = ssdprof("run", "org/demo", *SHORT, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert latest() == model


@pytest.mark.slow
def test_a_prompt_that_is_too_short_costs_no_download_of_weights(
    hub: MiniHub, ssdprof: Call, tmp_path
):
    (tmp_path / "short.txt").write_text("a few words")
    hub.log.clear()
    for dry in ((), ("--dry-run",)):
        failed = ssdprof("run", "org/demo", *SHORT, "--prompt-file", "short.txt", *dry)
        assert failed.returncode == 2
        assert "The prompt file short.txt is too short" in failed.stderr
        assert bool(failed.stdout) == bool(dry)
    assert "tokenizer.json" in hub.downloads()
    weights = [request for request in hub.log if request.path.endswith("model.safetensors")]
    assert all(request.range for request in weights if request.method == "GET")  # only the header


@pytest.mark.slow
@pytest.mark.parametrize("repo", ["org/private", "org/gated"])
def test_a_token_opens_it_and_stays_out_of_the_report(ssdprof: Call, repo):
    done = ssdprof("run", repo, *SHORT, HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    folder, _ = reports.load(None)
    kept = "".join(file.read_text() for file in folder.iterdir())
    assert TOKEN not in kept + done.stdout + done.stderr
