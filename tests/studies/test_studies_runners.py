"""The runners from the command line to their files, on a CPU: small cells, in the interpreter, without a clock."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scan_002
import scan_003
import study
import torch
from inter_chunk.contenders import PROPOSED
from inter_chunk.contenders import diagonal as diagonal_contenders
from inter_chunk.inputs import draw
from selective_scan.contenders import SEQUENTIAL, tile

from ssdprof import cli
from ssdprof.environment import machine
from ssdprof.errors import BadInputError, ExitCode, MissingCapabilityError
from ssdprof.measure.bench import Recording
from ssdprof.schema import Launch

STUDIES: dict[ModuleType, type[study.Study[Any]]] = {scan_002: scan_002.StatePassing, scan_003: scan_003.SelectiveScan}
ENVIRONMENT = machine.collect()  # before torch is patched to have a GPU
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are interpreted here")


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
    runs: Mapping[str, Callable[[], Any]], _bench: Any, _seconds: float, wrong: Callable[[str, Any], str]
) -> tuple[dict[str, study.Time], dict[str, str], dict[str, str]]:
    reasons = {name: reason for name, run in runs.items() if (reason := wrong(name, run()))}
    time = study.Time(device_us=2.0, device_low_us=1.0, device_high_us=3.0, call_us=4.0)
    return {name: time for name in runs if name not in reasons}, {}, reasons


def no_counters(*_: Any, **__: Any) -> None:
    raise MissingCapabilityError("No ncu here.", "Install it.")


@pytest.fixture(params=[scan_002, scan_003])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr("sys.argv", ["scan.py", "--out", str(tmp_path), "--budget", "9999"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    module: Any = request.param
    monkeypatch.setattr(study.Study, "device", "cpu")
    monkeypatch.setattr(study, "CudaBench", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(study, "measure_ceilings", lambda _: SimpleNamespace(copy_gb_per_s=4000.0))
    launches = Launches()
    monkeypatch.setattr(module, "recorded_launches", launches.recorded)
    monkeypatch.setattr(module, "counted_launches", launches.counted)
    monkeypatch.setattr(module, "timed", timed)
    monkeypatch.setattr("study_result.machine.collect", lambda: ENVIRONMENT)
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
    (file,) = folder.glob("*.json")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def test_from_the_command_line_to_the_files(runner: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main() == 0
    stored = stored_in(tmp_path)
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".md", ".svg"}
    rows = [r for r in stored["rows"] if "excess" in r]
    assert all(r["device_us"] == 2.0 and r["excess"] <= 1 for r in rows)
    if runner is scan_002:
        assert {r["contender"] for r in rows if not r["rank"]} == set(diagonal_contenders(16))
        assert {r["same_bits"] for r in rows if r["contender"] == PROPOSED} == {True}
        assert stored["missing"].keys() == {scan_002.COUNTED, "mamba_ssm's state pass"}
        assert stored["missing"][scan_002.COUNTED] == "No ncu here. Install it."
    else:
        assert {r["contender"] for r in rows if r["pass"] == "forward and backward"} == {SEQUENTIAL, tile(128)}
        assert stored["missing"].keys() == {"mamba_ssm", "times of kernels by torch's profiler"}
    assert "## Claims" in capsys.readouterr().out


def passed_on(
    states: torch.Tensor, log_decay: torch.Tensor, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces mamba_ssm's state pass: the states that enter chunks, and the last one in fp32."""
    state = torch.zeros_like(states[:, 0], dtype=torch.float32)
    entering = []
    for c in range(states.shape[1]):
        entering.append(state.to(out_dtype))
        state = state * log_decay[:, :, c, None].exp() + states[:, c].float()
    return torch.stack(entering, dim=1), state


@pytest.mark.parametrize("right", [True, False])
def test_the_state_pass_of_mamba_ssm(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw(batch=2, chunks=4, heads=3, dim=8)
    fake = ModuleType("mamba_ssm.ops.triton.ssd_state_passing")
    fake._state_passing_fwd = passed_on if right else lambda states, *_, **__: (states, states[:, 0])  # type: ignore[attr-defined]
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(scan_002, "recorded_launches", two_launches)
    monkeypatch.setattr(scan_002, "counted_launches", two_launches)
    run, known = scan_002.StatePassing(60, Path()).peer_call({"dim": 8, "chunks": 4, "rank": 0}, inputs)
    assert (run is not None) == right
    assert (known["excess"] <= 1) == right


@contextmanager
def two_launches() -> Iterator[list[Launch]]:
    yield [Launch(kernel="_kernel", config={})] * 2


class FakeBench:
    """A call takes 4 us, and a replay 2 us."""

    device = torch.device("cpu")

    def relocate(self, _generator: np.random.Generator) -> None:
        """Does nothing: there is no memory to move."""

    def record(self, run: Callable[[], Any]) -> Recording:
        return Recording(graph=None, output=run())

    def call_us(self, _run: Callable[[], Any]) -> float:
        return 4.0

    def device_us(self, _recording: Recording) -> float:
        return 2.0


def test_times_are_those_of_calls_that_stay_right() -> None:
    runs = {"right": lambda: "right", "wrong": lambda: "wrong"}
    times, untimed, wrong = study.timed(
        runs, FakeBench(), 0.01, lambda key, output: "" if output == "right" else f"{key} is wrong"
    )
    expected = study.Time(device_us=2.0, device_low_us=2.0, device_high_us=2.0, call_us=4.0)
    assert times == {"right": expected}
    assert untimed == {}
    assert wrong["wrong"].endswith("wrong is wrong")


def test_a_contender_that_is_wrong_has_no_time(
    runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if runner is scan_002:
        broken = {**diagonal_contenders(16), PROPOSED: lambda inputs: torch.zeros_like(inputs.states)}
        monkeypatch.setattr(runner, "diagonal", lambda _: broken)
    else:
        broken = {**runner.forward(), SEQUENTIAL: lambda inputs: torch.zeros_like(inputs.x)}
        monkeypatch.setattr(runner, "forward", lambda: broken)
    assert runner.main() == 1
    name = PROPOSED if runner is scan_002 else SEQUENTIAL
    assert f"wrong: {name}" in capsys.readouterr().err
    assert stored_in(tmp_path)["wrong"][0].startswith(name)
    of_broken = [r for r in stored_in(tmp_path)["rows"] if r["contender"] == name]
    assert "device_us" not in of_broken[0]
    assert of_broken[0]["excess"] > 1


def test_an_interrupted_run_keeps_what_it_has(runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = STUDIES[runner].measure

    def stop_at_the_second(self: Any, cell: Any) -> None:
        if self.result.rows:
            raise KeyboardInterrupt
        measure(self, cell)

    monkeypatch.setattr(STUDIES[runner], "measure", stop_at_the_second)
    assert runner.main() == study.INTERRUPTED
    stored = stored_in(tmp_path)
    assert stored["rows"]
    assert stored["missing"]["what comes after"] == "the run was interrupted"


def test_a_contender_that_fails_takes_no_other_with_it(
    runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_inputs: Any) -> torch.Tensor:
        raise RuntimeError("out of resources\nand a page more")

    if runner is scan_002:
        broken = {**diagonal_contenders(16), PROPOSED: fails}
        monkeypatch.setattr(runner, "diagonal", lambda _: broken)
    else:
        broken = {**runner.forward(), SEQUENTIAL: fails}
        monkeypatch.setattr(runner, "forward", lambda: broken)
    assert runner.main() == 1
    stored, name = stored_in(tmp_path), PROPOSED if runner is scan_002 else SEQUENTIAL
    (wrong,) = stored["wrong"]
    assert wrong.startswith(name)
    assert wrong.endswith("out of resources")
    first = [r for r in stored["rows"] if r.get("rank") == 0 or r.get("pass") == "forward"]
    assert {r["contender"] for r in first if "device_us" in r} == broken.keys() - {name}


def test_a_run_that_breaks_off_keeps_the_cells_before(
    runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = STUDIES[runner].measure

    def breaks_at_the_second(self: Any, cell: Any) -> None:
        if self.result.rows:
            raise ValueError("no such thing")
        measure(self, cell)

    monkeypatch.setattr(STUDIES[runner], "measure", breaks_at_the_second)
    assert runner.main() == cli.INTERNAL_ERROR
    stored = stored_in(tmp_path)
    assert stored["rows"]
    assert stored["missing"]["what comes after"] == "no such thing"
    assert "Traceback" in capsys.readouterr().err
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".md", ".svg"}


def test_a_killed_run_leaves_its_cells_and_their_pages_can_be_made(
    runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = STUDIES[runner].measure

    class Killed(BaseException):
        """The runner cannot handle a SIGKILL."""

    def killed_at_the_second(self: Any, cell: Any) -> None:
        if self.result.rows:
            raise Killed
        measure(self, cell)

    monkeypatch.setattr(STUDIES[runner], "measure", killed_at_the_second)
    with pytest.raises(Killed):
        runner.main()
    (file,) = tmp_path.iterdir()
    rows = stored_in(tmp_path)["rows"]
    assert rows
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["scan.py", "--from", str(file)])
    assert runner.main() == 0
    page = file.with_suffix(".md").read_text(encoding="utf-8")
    assert rows[0]["contender"] in page
    assert file.with_suffix(".svg").is_file()


def test_cells_without_time_left_are_named(runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["scan.py", "--out", str(tmp_path), "--budget", "0"])
    assert runner.main() == 0
    stored = stored_in(tmp_path)
    assert stored["rows"] == []
    assert sum("the budget of 0 s was spent" in why for why in stored["missing"].values()) == 2
    assert {claim["verdict"] for claim in stored["claims"]} == {"not measured"}


def test_an_error_is_a_sentence_and_an_exit_code(
    runner: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        study.end(runner.main)
    assert ended.value.code == ExitCode.MISSING_CAPABILITY
    assert capsys.readouterr().err == "Error: The study needs an NVIDIA GPU. Run it on a machine that has one.\n"


def test_a_result_without_rows_is_refused(runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.json"
    content = {"study": runner.NAME, "environment": {}, "values": {}, "missing": {}}
    file.write_text(json.dumps(content), encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["scan.py", "--from", str(file)])
    with pytest.raises(BadInputError, match="has no rows"):
        runner.main()
