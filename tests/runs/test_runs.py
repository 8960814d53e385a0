"""Run folders: names, the lock, only complete files, and the latest run."""

import errno
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from report.make import make_case
from ssdprof.runs.record import Recorder, recorded
from ssdprof.schema import EXACT_FP32, CaseResult, CheckpointRef, Environment, LayerRef, RunReport

from ssdprof import files, runs
from ssdprof.errors import BadInputError, ExitCode, MissingCapabilityError

pytestmark = pytest.mark.usefixtures("in_empty_folder")


def make_report(run_id: str = "a-run", **changes: object) -> RunReport:
    """The smallest valid report."""
    fields: dict[str, object] = {
        "ssdprof_version": "0.0.0",
        "run_id": run_id,
        "created": "2026-01-02T03:04:05Z",
        "command": ("ssdprof", "run", "demo"),
        "state": "partial",
        "checkpoint": CheckpointRef(
            requested="demo",
            source="demo",
            repo_id="demo",
            revision=None,
            model_type="granitemoehybrid",
            layers=(),
            layer_count=4,
        ),
        "environment": Environment(gpu=None, cpu="cpu", platform="linux", python="3.11", packages={}),
        "prompts": (),
        "captured_layers": (),
        "segment_length": 64,
        "cases": (),
    }
    return RunReport.model_validate(fields | changes)


def store(name: str) -> None:
    with runs.opened(runs.RUNS / name, "demo") as folder:
        folder.write(make_report(name))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("ibm-granite/granite-4.0-h-small", "granite-4.0-h-small"),
        ("demo", "demo"),
        ("/data/my models/x y/", "x-y"),
        ("../..", "model"),
        ("a/$(rm -rf ~)\n", "rm--rf"),
        ("m" * 300, "m" * 80),
    ],
)
def test_a_folder_is_named_after_the_model_in_harmless_letters(model: str, expected: str) -> None:
    assert files.safe_name(model) == expected


def test_names_sort_by_time_and_never_collide() -> None:
    names = []
    for second in (9, 10, 10):
        with runs.opened(None, "org/m", now=datetime(2026, 1, 2, 3, 4, second, tzinfo=UTC)) as folder:
            folder.write(make_report())
            names.append(folder.path.name)
    assert names == ["20260102-030409-m", "20260102-030410-m", "20260102-030410-m-2"]
    assert names == sorted(names)


def test_a_report_is_read_back_as_it_was_written() -> None:
    store("one")
    path, report = runs.read("one")
    assert path == Path("runs/one")
    assert report == make_report("one")
    assert runs.read("runs/one")[1] == runs.read(Path("runs/one/report.json"))[1] == report


def test_a_remark_on_layers_stands_in_the_notes_once() -> None:
    layers = [LayerRef(index=i, name=f"model.layers.{i}.mixer", operator="gdn") for i in range(2)]
    with runs.opened(runs.RUNS / "a-run", "demo") as folder:
        recorder = Recorder(folder, make_report(notes=("Random weights.",)))
        for layer in layers:
            recorder.captured(layer, "Each key head was taken once.")
        recorder.captured(layers[0])
        recorder.update(state="complete")
    _, report = runs.read("a-run")
    assert report.notes == ("Random weights.", "Each key head was taken once.")
    assert report.captured_layers == tuple(layers)


def test_the_latest_run_is_the_one_written_last() -> None:
    assert runs.latest() is None
    for name in ("b", "a"):
        store(name)
    os.utime(runs.RUNS / "b" / runs.REPORT, ns=(0, 0))
    assert runs.latest() == Path("runs/a")
    assert runs.read(None)[1].run_id == "a"


def test_no_run_at_all_says_how_to_make_one() -> None:
    with pytest.raises(BadInputError, match="no run under") as caught:
        runs.read(None)
    assert "ssdprof run" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ('{"schema_version": 1', "not JSON"),
        ("{}", "no schema_version"),
        (make_report().model_dump_json().replace('"schema_version":2', '"schema_version":99'), "schema version 99"),
        (make_report().model_dump_json().replace('"partial"', '"finished"'), "state"),
    ],
)
def test_a_damaged_report_is_refused_with_the_place(text: str, words: str) -> None:
    store("one")
    Path("runs/one/report.json").write_text(text)
    with pytest.raises(BadInputError, match=words):
        runs.read("one")


def test_a_folder_without_a_report_is_no_run() -> None:
    Path("empty").mkdir()
    with pytest.raises(BadInputError, match="empty is not a run"):
        runs.read("empty")


def test_a_folder_that_holds_a_run_is_not_used_again() -> None:
    store("one")
    before = Path("runs/one/report.json").read_bytes()
    with pytest.raises(BadInputError, match="holds a run already"), runs.opened(Path("runs/one"), "demo"):
        pytest.fail("the folder was handed out")
    assert Path("runs/one/report.json").read_bytes() == before


def test_two_runs_at_once_into_one_folder() -> None:
    """The second run is another process.  It fails, and does not affect the first."""
    second = (
        "import sys; from pathlib import Path; from ssdprof import errors, runs\n"
        "try:\n"
        "    with runs.opened(Path('shared'), 'demo'): print('got it')\n"
        "except errors.BadInputError as error: print(error.message)\n"
    )
    command = [sys.executable, "-c", second]
    with runs.opened(Path("shared"), "demo") as folder:
        held = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "Another run is writing into shared" in held
        folder.write(make_report())
    assert runs.read("shared")[1] == make_report()


def test_a_lock_dies_with_its_process() -> None:
    crash = (
        "import os; from pathlib import Path; from ssdprof import runs\n"
        "with runs.opened(Path('crashed'), 'demo'): os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", crash], check=False).returncode == -9
    with runs.opened(Path("crashed"), "demo") as folder:
        folder.write(make_report())
    assert runs.read("crashed")[1] == make_report()


def test_a_run_that_wrote_nothing_leaves_no_folder() -> None:
    with pytest.raises(RuntimeError), runs.opened(None, "demo") as folder:
        raise RuntimeError("before the first layer")
    assert not folder.path.exists()
    assert runs.latest() is None


def test_a_full_disk_leaves_the_report_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with runs.opened(Path("r"), "demo") as folder:
        folder.write(make_report("first"))
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(MissingCapabilityError, match="disk is full") as caught:
            folder.write(make_report("second"))
    assert caught.value.exit_code == ExitCode.MISSING_CAPABILITY
    assert runs.read("r")[1].run_id == "first"
    assert sorted(entry.name for entry in Path("r").iterdir()) == [".lock", "report.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
def test_a_device_is_written_to_and_not_replaced() -> None:
    with pytest.raises(MissingCapabilityError, match="disk is full"):
        files.write_text(Path("/dev/full"), "text", replace=False)
    assert Path("/dev/full").is_char_device()


def test_a_file_is_overwritten_only_when_told() -> None:
    file = Path("report.md")
    files.write_text(file, "one", replace=False)
    with pytest.raises(BadInputError, match=r"report\.md exists") as caught:
        files.write_text(file, "two", replace=False)
    assert "--force" in caught.value.hint
    assert file.read_text() == "one"
    files.write_text(file, "two")
    assert file.read_text() == "two"


def test_a_link_is_followed() -> None:
    Path("real.md").write_text("one")
    Path("link.md").symlink_to("real.md")
    files.write_text(Path("link.md"), "two")
    assert Path("link.md").is_symlink()
    assert Path("real.md").read_text() == "two"


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(BadInputError, match="no folder nowhere"):
        files.write_text(Path("nowhere/report.md"), "text")


def test_an_unwritable_folder_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", denied)
    with (
        pytest.raises(MissingCapabilityError, match=r"cannot be written: permission denied\."),
        runs.opened(Path("r"), "demo"),
    ):
        pytest.fail("the folder was handed out")


class Silent:
    """A watcher without output."""

    def say(self, text: str) -> None:
        """Does nothing."""

    def step(self, text: str, total: int | None = None, *, unit: str = "") -> Any:
        raise AssertionError(f"no step of {text}, {total} {unit}")


def run_that_ends(ended_by: Any, *cases: CaseResult) -> None:
    """A run that ends with `ended_by` after it has finished these cases."""
    with runs.opened(None, "demo") as folder, recorded(Recorder(folder, make_report()), Silent()) as recorder:
        recorder.update(segment_length=32)
        for case in cases:
            recorder.finished(case)
        assert (folder.path / "report.json").exists() == bool(cases)
        raise ended_by


@pytest.mark.parametrize("ended_by", [KeyboardInterrupt(), MissingCapabilityError("no memory")])
def test_a_run_that_ended_before_its_first_case_does_not_become_the_latest(ended_by: BaseException) -> None:
    store("before")
    with pytest.raises(type(ended_by)):
        run_that_ends(ended_by)
    assert runs.latest() == runs.RUNS / "before"


def test_a_run_is_on_disk_from_its_first_case_on() -> None:
    case = make_case(3, 1024, "unfused", EXACT_FP32)
    with pytest.raises(KeyboardInterrupt, match="1 case of 0 layers"):
        run_that_ends(KeyboardInterrupt(), case)
    _, report = runs.read(None)
    assert (report.state, report.cases) == ("partial", (case,))


def test_a_write_that_takes_long_is_not_repeated_for_every_case_and_the_last_one_is_kept() -> None:
    """A report of thousands of chunks is large, and every write writes the whole report."""
    case = make_case(3, 1024, "unfused", EXACT_FP32)
    written = []

    class Slow(runs.RunFolder):
        def write(self, report: RunReport) -> None:
            time.sleep(0.06)
            written.append(len(report.cases))
            super().write(report)

    def replay(out: str, ended_by: BaseException | None = None) -> RunReport:
        draft = make_report(cases=(), state="partial")
        with (
            runs.opened(Path(out), "demo") as folder,
            recorded(Recorder(Slow(folder.path), draft), Silent()) as recorder,
        ):
            for _ in range(20):
                recorder.finished(case)
            if ended_by:
                raise ended_by
        return runs.read(out)[1]

    with pytest.raises(KeyboardInterrupt, match="20 cases"):
        replay("a", KeyboardInterrupt())
    assert written == [1, 20]
    assert len(runs.read("a")[1].cases) == 20
    report = replay("b")
    assert (report.state, len(report.cases)) == ("complete", 20)
