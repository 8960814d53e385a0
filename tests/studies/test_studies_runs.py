"""The studies from the command line to their files, on a CPU: small cells, in the interpreter, without a clock."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import inter_chunk
import pytest
import scan_002
import scan_003
import study
import torch
from fakes import RAN, FakeTimer
from recorded import RESULTS

from ssdprof import cli
from ssdprof.core.case import Launch
from ssdprof.environment import machine
from ssdprof.environment.toolchain import find_ncu
from ssdprof.errors import ExitCode, MissingCapabilityError
from ssdprof.stalls.read import RawKernel

STUDIES: dict[ModuleType, type[study.Study[Any]]] = {scan_002: scan_002.StatePassing, scan_003: scan_003.SelectiveScan}
BROKEN = {scan_002: scan_002.PROPOSED, scan_003: scan_003.SEQUENTIAL}
ENVIRONMENT = machine.collect()  # before torch is patched to have a GPU
TIMES = {"device_us": 2.0, "device_low_us": 1.0, "device_high_us": 3.0, "call_us": 4.0}
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are interpreted here")


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
    runs: Mapping[str, Callable[[], Any]], _timer: Any, _seconds: float, wrong: Callable[[str, Any], str]
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


def stored_in(folder: Path) -> dict[str, Any]:
    (file,) = folder.iterdir()
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def test_from_the_command_line_to_the_file(runner: Any, tmp_path: Path) -> None:
    assert runner.main() == 0
    stored = stored_in(tmp_path)
    assert {"created", "command", "environment", "seconds", "values"} <= stored.keys()
    rows = [r for r in stored["rows"] if "excess" in r]
    assert all(r["device_us"] == 2.0 and r["excess"] <= 1 for r in rows)
    if runner is scan_002:
        assert {r["contender"] for r in rows if not r["rank"]} == set(scan_002.diagonal(16))
        assert {r["same_bits"] for r in rows if r["contender"] == scan_002.PROPOSED} == {True}
        assert stored["missing"].keys() == {scan_002.COUNTED, scan_002.PEER}
        assert stored["missing"][scan_002.COUNTED] == "No ncu here. Install it."
    else:
        both = {r["contender"] for r in rows if r["pass"] == "forward and backward"}
        assert both == {scan_003.SEQUENTIAL, scan_003.tile(128)}
        assert stored["missing"].keys() == {"mamba_ssm", "times of kernels by torch's profiler"}


@pytest.mark.parametrize("fails", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_contender_that_is_wrong_or_fails_has_no_time_and_takes_no_other_with_it(
    runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, fails: bool
) -> None:
    name = BROKEN[runner]

    def broken(inputs: Any = None) -> Any:
        if fails:
            raise RuntimeError("out of resources\nand a page more")
        return torch.zeros_like(inputs.states) if runner is scan_002 else {"y": torch.zeros(1, 5, 1)}

    made = scan_002.diagonal if runner is scan_002 else scan_003.ours
    monkeypatch.setattr(runner, made.__name__, lambda *given: made(*given) | {name: broken})
    if runner is scan_003:
        monkeypatch.setattr(runner, "cells", lambda: [("forward", 5)])
    assert runner.main() == 1
    assert f"wrong: {name}" in capsys.readouterr().err
    stored = stored_in(tmp_path)
    (wrong,) = stored["wrong"]
    assert wrong.startswith(name)
    assert wrong.endswith("out of resources" if fails else "of what rounding allows")
    first = [r for r in stored["rows"] if r.get("rank") == 0 or r.get("pass") == "forward"]
    others = {r["contender"] for r in first} - {name, scan_003.LOOP}
    assert {r["contender"] for r in first if "device_us" in r} == others


class KilledError(BaseException):
    """The runner cannot handle a SIGKILL."""


# the loop over cells is that of both studies
EITHER = pytest.mark.parametrize("runner", [scan_003], indirect=True, ids=["either study"])


@EITHER
@pytest.mark.parametrize(
    ("error", "code", "why"),
    [
        (KeyboardInterrupt(), cli.INTERRUPTED, "the run was interrupted"),
        (ValueError("no such thing"), cli.INTERNAL_ERROR, "no such thing"),
        (KilledError(), None, ""),
    ],
)
def test_a_run_that_ends_early_keeps_the_cells_before(
    runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int | None, why: str
) -> None:
    measure = STUDIES[runner].measure

    def breaks_at_the_second(self: Any, cell: Any) -> None:
        if self.rows:
            raise error
        measure(self, cell)

    monkeypatch.setattr(STUDIES[runner], "measure", breaks_at_the_second)
    if code is None:
        with pytest.raises(KilledError):
            runner.main()
    else:
        assert runner.main() == code
    stored = stored_in(tmp_path)
    assert stored["rows"]
    assert stored["missing"].get("what comes after", "") == why


@EITHER
def test_cells_without_time_left_are_named(runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["scan.py", "--out", str(tmp_path), "--budget", "0"])
    assert runner.main() == 0
    stored = stored_in(tmp_path)
    assert stored["rows"] == []
    assert sum("the budget of 0 s was spent" in why for why in stored["missing"].values()) == 2


def test_without_a_gpu_a_study_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        study.end(lambda: 0)
    assert ended.value.code == ExitCode.MISSING_CAPABILITY
    assert capsys.readouterr().err == "Error: The study needs an NVIDIA GPU. Run it on a machine that has one.\n"


@interpreted
@pytest.mark.parametrize("right", [True, False])
def test_the_state_pass_of_mamba_ssm(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def passed_on(states: torch.Tensor, log_decay: torch.Tensor, out_dtype: torch.dtype) -> Any:
        """Replaces mamba_ssm's state pass: the states that enter chunks, and the last one in fp32."""
        state = torch.zeros_like(states[:, 0], dtype=torch.float32)
        entering = []
        for c in range(states.shape[1]):
            entering.append(state.to(out_dtype))
            state = state * log_decay[:, :, c, None].exp() + states[:, c].float()
        return torch.stack(entering, dim=1), state if right else states[:, 0]

    @contextmanager
    def two_launches() -> Iterator[list[Launch]]:
        yield [Launch(kernel="_kernel", config={})] * 2

    fake = ModuleType("mamba_ssm.ops.triton.ssd_state_passing")
    fake._state_passing_fwd = passed_on  # type: ignore[attr-defined]
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(scan_002, "recorded_launches", two_launches)
    monkeypatch.setattr(scan_002, "counted_launches", two_launches)
    inputs = inter_chunk.draw(batch=2, chunks=4, heads=3, dim=8)
    run, known = scan_002.StatePassing(60, Path()).peer_call({"dim": 8, "chunks": 4, "rank": 0}, inputs)
    assert (run is not None) == right
    assert (known["excess"] <= 1) == right


def test_times_are_those_of_calls_that_stay_right() -> None:
    def run(name: str) -> Any:
        RAN.append((name, 2.0))
        return (torch.zeros(1),)

    runs = {name: partial(run, name) for name in ("right", "wrong")}
    times, missing = study.timed(runs, FakeTimer(), 0.01, lambda key, _: "" if key == "right" else f"{key} is wrong")
    assert times == {"right": {"device_us": 2.0, "device_low_us": 2.0, "device_high_us": 2.0, "call_us": 12.0}}
    assert missing["wrong"].endswith("wrong is wrong")


@pytest.mark.parametrize("name", ["scan-002", "scan-003"])
def test_the_recorded_rows_have_the_recorded_values(name: str) -> None:
    stored = json.loads((RESULTS / f"{name}-h200.json").read_text(encoding="utf-8"))
    expected, rows = stored["values"], stored["rows"]
    copy_gb_per_s = expected.pop("copy_gb_per_s")
    if name == "scan-002":
        found = scan_002.values_of(rows, stored["counters"])
        assert not [one for one in scan_002.values_of([r for r in rows if r["chunks"] != 8], []) if "_g8" in one]
    else:
        found = scan_003.values_of(rows, copy_gb_per_s)
        assert scan_003.values_of([], copy_gb_per_s) == {}
    assert found == pytest.approx(expected, rel=1e-12)


def test_counters_are_added_up_over_the_launches_of_a_call() -> None:
    def launch(sectors: int) -> RawKernel:
        metrics = {scan_002.L2_READS: sectors, "dram__bytes_read.sum": 10, "launch__registers_per_thread": 32}
        return RawKernel(function="_one_chunk_kernel", metrics=metrics)

    call = {"contender": "one", "chunks": 2, "dim": 64}
    watched = [call | {"kernels": ["k"] * count} for count in (2, 1)]
    first, second = scan_002.records(watched, [launch(5), launch(6), launch(7)])
    assert (first["l2_read_sectors"], first["dram_read_bytes"], second["l2_read_sectors"]) == (11, 20, 7)
    assert first["registers"] == 32
    assert "dram_write_bytes" not in first  # not collected


@pytest.mark.gpu
@pytest.mark.parametrize("module", STUDIES, ids=lambda module: module.__name__)
def test_a_study_in_a_short_time(module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["scan.py", "--out", str(tmp_path), "--budget", "10"])
    monkeypatch.setattr(scan_002, "NCU_SECONDS", 5)
    assert module.main() == 0
    stored = stored_in(tmp_path)
    assert stored["rows"]
    assert all(r["device_us"] > 0 for r in stored["rows"] if "device_us" in r)


@pytest.mark.gpu
@pytest.mark.ncu
@pytest.mark.skipif(find_ncu() is None, reason="needs Nsight Compute")
def test_what_ncu_counts_is_what_a_kernel_must_read() -> None:
    names = {
        scan_002.BASELINE: ["_loop_kernel"], scan_002.PROPOSED: ["_loop_kernel"],
        "one launch a chunk": ["_one_chunk_kernel"] * 8,
    }  # fmt: skip
    watched = [{"contender": name, "chunks": 8, "dim": 64, "kernels": kernels} for name, kernels in names.items()]
    back, kept, launches = scan_002.count(watched, timeout_s=120)
    states = 4 * 8 * 16 * 64 * 64 * 2 / 32  # sectors
    assert kept["l2_read_sectors"] == pytest.approx(states, rel=0.1)
    for record in (back, launches):  # except for the first chunk, the state before is read too
        assert record["l2_read_sectors"] == pytest.approx(states * (2 - 1 / 8), rel=0.1)
    assert 0 < kept["occupancy_pct"] <= 100
