"""The studies from the command line to their files, on a CPU: small cells, in the interpreter,
without a clock.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import scan_002
import scan_003
import study
import torch
from recorded import RESULTS

from ssdprof.core.case import Launch
from ssdprof.environment import machine
from ssdprof.errors import MissingCapabilityError

STUDIES: dict[ModuleType, type[study.Study[Any]]] = {
    scan_002: scan_002.StatePassing,
    scan_003: scan_003.SelectiveScan,
}
ENVIRONMENT = machine.collect()  # before torch is patched to have a GPU
TIMES = {"device_us": 2.0, "device_low_us": 1.0, "device_high_us": 3.0, "call_us": 4.0}


class Launches:
    """One kernel for every call in the block."""

    def __init__(self) -> None:
        self._calls = 0

    @contextmanager
    def counted(self) -> Iterator[list[Any]]:
        yield [None]
        self._calls += 1  # a failed call is not counted

    @contextmanager
    def recorded(self) -> Iterator[list[Launch]]:
        found: list[Launch] = []
        before = self._calls
        yield found
        launch = Launch(kernel="_kernel", config={}, registers=32, spills=0, shared_bytes=64)
        found += [launch] * (self._calls - before)


def timed(
    runs: Mapping[str, Callable[[], Any]],
    _timer: Any,
    _seconds: float,
    wrong: Callable[[str, Any], str],
) -> tuple[dict[str, study.Times], dict[str, str]]:
    reasons = {name: reason for name, run in runs.items() if (reason := wrong(name, run()))}
    return {name: TIMES for name in runs if name not in reasons}, reasons


def no_counters(*_: Any, **__: Any) -> None:
    raise MissingCapabilityError("No ncu here.", "Install it.")


@pytest.fixture(params=STUDIES, ids=lambda module: module.__name__)
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    if torch.cuda.is_available():
        pytest.skip("the kernels are interpreted here")
    module: Any = request.param
    monkeypatch.setattr("sys.argv", ["scan.py", "--out", str(tmp_path), "--budget", "9999"])
    monkeypatch.setattr(study.Study, "device", "cpu")
    monkeypatch.setattr(study, "CudaTimer", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(study, "measure_ceilings", lambda _: SimpleNamespace(copy_gb_per_s=4000.0))
    monkeypatch.setattr("study.machine.collect", lambda: ENVIRONMENT)
    launches = Launches()
    monkeypatch.setattr(module, "recorded_launches", launches.recorded)
    monkeypatch.setattr(module, "counted_launches", launches.counted)
    monkeypatch.setattr(module, "timed", timed)
    for name, size in (("BATCH", 1), ("HEADS", 1), ("DSTATE", 4)):
        monkeypatch.setattr(module, name, size, raising=False)
    if module is scan_002:
        cells = [{"dim": 16, "chunks": 3, "rank": 0}, {"dim": 16, "chunks": 3, "rank": 2}]
        monkeypatch.setattr(module, "cells", lambda: cells)
        monkeypatch.setattr(module, "count", no_counters)
    else:
        monkeypatch.setattr(module, "cells", lambda: [("forward", 5), ("forward and backward", 5)])
        monkeypatch.setattr(module, "warm_us", lambda *_: (7.0, 1))
        monkeypatch.setattr(module, "kernel_us", lambda *_: 0.0)
    return module


@pytest.mark.parametrize("fails", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_from_the_command_line_to_the_file(
    runner: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    fails: bool,
) -> None:
    """A contender that is wrong or fails has no time, and takes no other with it."""

    def broken(inputs: Any = None) -> Any:
        if fails:
            raise RuntimeError("out of resources\nand a page more")
        return (
            torch.zeros_like(inputs.states) if runner is scan_002 else {"y": torch.zeros(1, 5, 1)}
        )

    made: Any = scan_002.diagonal if runner is scan_002 else scan_003.ours
    monkeypatch.setattr(runner, made.__name__, lambda *given: made(*given) | {"broken": broken})
    assert runner.main() == 1
    assert "wrong: broken" in capsys.readouterr().err
    (file,) = tmp_path.iterdir()
    stored = json.loads(file.read_text(encoding="utf-8"))
    assert {"created", "command", "environment", "seconds", "values"} <= stored.keys()
    assert stored["wrong"][0].startswith("broken")
    assert stored["wrong"][0].endswith("out of resources" if fails else "of what rounding allows")
    rows = [r for r in stored["rows"] if "excess" in r]
    assert all(
        r["device_us"] == 2.0 and r["excess"] <= 1 for r in rows if r["contender"] != "broken"
    )
    assert not [r for r in stored["rows"] if r["contender"] == "broken" and "device_us" in r]
    if runner is scan_002:
        assert {r["contender"] for r in rows if not r["rank"]} - {"broken"} == set(made(16))
        assert {r["same_bits"] for r in rows if r["contender"] == scan_002.PROPOSED} == {True}
        assert stored["missing"].keys() == {scan_002.COUNTED, scan_002.LIBRARY}
        assert stored["missing"][scan_002.COUNTED] == "No ncu here. Install it."
    else:
        both = {r["contender"] for r in rows if r["pass"] == "forward and backward"} - {"broken"}
        assert both == {scan_003.SEQUENTIAL, scan_003.tile(128)}
        assert stored["missing"].keys() == {"mamba_ssm", "times of kernels by torch's profiler"}


@pytest.mark.parametrize("name", ["scan-002", "scan-003"])
def test_the_recorded_rows_have_the_recorded_values(name: str) -> None:
    stored = json.loads((RESULTS / f"{name}-h200.json").read_text(encoding="utf-8"))
    expected, rows = stored["values"], stored["rows"]
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
def test_a_study_in_a_short_time(
    module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["scan.py", "--out", str(tmp_path), "--budget", "10"])
    monkeypatch.setattr(scan_002, "NCU_SECONDS", 5)
    assert module.main() == 0
    (file,) = tmp_path.iterdir()
    stored = json.loads(file.read_text(encoding="utf-8"))
    assert stored["rows"]
    assert all(r["device_us"] > 0 for r in stored["rows"] if "device_us" in r)
