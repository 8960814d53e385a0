"""The recorded rows of the studies, and the studies in a short time on a GPU."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import scan_002
import scan_003
import study
from recorded import RESULTS

STUDIES: dict[ModuleType, type[study.Study[Any]]] = {
    scan_002: scan_002.StatePassing,
    scan_003: scan_003.SelectiveScan,
}


@pytest.mark.parametrize("name", ["scan-002", "scan-003"])
def test_the_recorded_rows_have_the_recorded_values(name: str):
    stored = json.loads((RESULTS / f"{name}-h200.json").read_text())
    expected = stored["values"]
    rows = stored["rows"]
    copy_gb_per_s = expected.pop("copy_gb_per_s")
    if name == "scan-002":
        found = scan_002.values_of(rows, stored["counters"])
        assert not [
            one
            for one in scan_002.values_of([r for r in rows if r["chunks"] != 8], [])
            if "_g8" in one
        ]
    else:
        found = scan_003.values_of(rows, copy_gb_per_s)
        assert scan_003.values_of([], copy_gb_per_s) == {}
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("module", STUDIES, ids=lambda module: module.__name__)
def test_a_study_in_a_short_time(module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("sys.argv", ["scan.py", "--out", str(tmp_path), "--budget", "10"])
    monkeypatch.setattr(scan_002, "NCU_SECONDS", 5)
    assert module.main() == 0
    (file,) = tmp_path.iterdir()
    stored = json.loads(file.read_text())
    assert stored["rows"]
    assert all(r["device_us"] > 0 for r in stored["rows"] if "device_us" in r)
