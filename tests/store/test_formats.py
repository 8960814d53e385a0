"""What is stored says its version, and another one is refused in one clear sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import cases
import pytest

from ssdprof.capture import manifest
from ssdprof.core.target import Gpu
from ssdprof.errors import BadInputError
from ssdprof.jobs import stall_files
from ssdprof.store import reports, tuned

GPU = Gpu.model_validate(cases.environment().gpu)


def of_report(folder: Path) -> object:
    return reports.load(folder)


def of_captures(folder: Path) -> object:
    return manifest.read_manifest(folder)


def of_stalls(folder: Path) -> object:
    return stall_files.load(folder / "stalls.json")


@pytest.mark.parametrize(
    ("file", "key", "load"),
    [
        ("run.json", "version", of_report),
        ("report.json", "version", of_report),
        (manifest.MANIFEST, "version", of_captures),
        ("stalls.json", "stalls_version", of_stalls),
    ],
)
def test_another_version_is_refused(
    file: str, key: str, load: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / file).write_text(json.dumps({key: 99, "checkpoint": {}}))
    with pytest.raises(BadInputError) as caught:
        load(tmp_path)
    assert "version 99; this ssdprof reads" in caught.value.message
    assert caught.value.hint


def test_tuned_configurations_of_another_version_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tuned.file_of(GPU)
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"version": 99, "kind": "ssdprof tuned"}))
    finds, why = tuned.load(GPU)
    assert finds is None
    assert why.endswith("has version 99; this ssdprof reads 4")
