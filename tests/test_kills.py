"""SIGKILL at any moment of a run loses at most the case in work, and two runs never mix in one folder.

`PYTHONPATH=.:tests python tests/test_kills.py 200` kills 200 runs.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ssdprof.core.case import Case
from ssdprof.errors import SsdprofError
from ssdprof.store import reports

LENGTHS = tuple(range(4, 28, 2))
RUN = ("run", "mamba2", "--prompt", "random", "--seq", ",".join(map(str, LENGTHS)), "--dtypes", "exact")
RUN += ("--impl", "reference", "--baseline", "reference", "--out")


def started(out: str, written: int | None = None) -> int:
    """A forked process that runs; written: a pipe that gets a byte after every line of the report."""
    if pid := os.fork():
        return pid
    from ssdprof.cli import app

    write = reports.Writer._write

    def noted(writer: reports.Writer, line: dict[str, object]) -> None:
        write(writer, line)
        os.write(written or 2, b"." if "case" in line else b"")

    reports.Writer._write = noted  # type: ignore[method-assign]
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            app([*RUN, out], prog_name="ssdprof")
    except SystemExit as error:
        os._exit(int(error.code or 0))
    os._exit(70)


def check_killed(out: str, whole: list[Case], after_s: float) -> int:
    """The number of cases that were kept of a run that is killed after a time."""
    read, write = os.pipe()
    pid = started(out, write)
    os.close(write)
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with os.fdopen(read, "rb") as pipe:
        written = len(pipe.read())
    try:
        report = reports.load(out)[1]
    except SsdprofError:
        assert written == 0
        return 0
    kept = list(report.cases)
    assert written <= len(kept) <= written + 1
    assert kept == whole[: len(kept)]
    assert report.complete <= (len(kept) == len(whole))
    before = {file.name: file.read_bytes() for file in Path(out).iterdir()}
    assert os.waitstatus_to_exitcode(os.waitpid(started(out), 0)[1]) == 2  # it holds a run
    assert before == {file.name: file.read_bytes() for file in Path(out).iterdir()}
    return len(kept)


def main(kills: int) -> None:
    import tiny_models

    tiny_models.shared("mamba2").save_pretrained("mamba2")
    began = time.monotonic()
    assert os.waitpid(started("whole"), 0)[1] == 0
    took_s, whole = time.monotonic() - began, list(reports.load("whole")[1].cases)
    two = [started("shared") for _ in range(2)]
    assert sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in two) == [0, 2]
    assert list(reports.load("shared")[1].cases) == whole
    draw = random.Random(0)
    kept = [check_killed(f"killed-{number}", whole, draw.uniform(0, took_s)) for number in range(kills)]
    print(f"{kills} kills of runs of {len(whole)} cases in {took_s:.1f} s kept {len(set(kept))} numbers of cases")


def test_a_few_kills(tmp_path: Path) -> None:
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "4"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | paths, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("4 kills"), done.stderr


if __name__ == "__main__":
    import ssdprof.commands.model  # imported once, before the forks  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        main(int(sys.argv[1]))
