"""SIGKILL at any moment of a run loses at most the case in work; the same command goes on; two runs
never mix.

`PYTHONPATH=.:tests python tests/test_kills.py 200 [SEED]` kills 200 runs.
"""

import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from torchrun import python

from ssdprof.core.case import Case
from ssdprof.core.report import Report
from ssdprof.errors import SsdprofError
from ssdprof.store import reports

LENGTHS = tuple(range(4, 28, 2))
SEQ = ",".join(map(str, LENGTHS))
RUN = f"run mamba2 --prompt random --seq {SEQ} --dtypes exact --impl reference --baseline reference"


def started(out: str, written: int | None = None) -> int:
    """A forked process that runs; written: a pipe that gets a byte after every line of the
    report.
    """
    if pid := os.fork():
        return pid
    from ssdprof.cli import app

    write = reports.Writer._write

    def noted(writer: reports.Writer, line: dict[str, object]):
        write(writer, line)
        os.write(written or 2, b"." if "case" in line else b"")

    reports.Writer._write = noted  # type: ignore[method-assign]
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            app([*RUN.split(), "--out", out], prog_name="ssdprof")
    except SystemExit as error:
        os._exit(int(error.code or 0))
    os._exit(70)


def check_killed(out: str, whole: list[Case], lines: int, after_s: float) -> int:
    """The number of cases that were kept of a run that is killed some time after it wrote some
    lines.
    """
    read, write = os.pipe()
    pid = started(out, write)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        written = len(pipe.read(lines))
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        written += len(pipe.read())
    kept = []
    complete = False
    file = Path(out, "cases.0.jsonl")
    with suppress(SsdprofError):
        report = reports.load(out)[1]
        kept = list(report.cases)
        complete = report.complete
    assert written <= len(kept) <= written + 1
    assert kept == whole[: len(kept)]
    assert complete <= (len(kept) == len(whole))
    began = file.read_bytes() if file.exists() else b""
    two = [started(out) for _ in range(2)]  # one goes on, the other is refused
    ended = sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in two)
    assert ended == ([2, 2] if complete else [0, 2])
    assert file.read_bytes().startswith(began[: began.rfind(b"\n") + 1])
    assert without_times(reports.load(out)[1]) == without_times(reports.load("whole")[1])
    return len(kept)


def without_times(report: Report) -> Report:
    processes = tuple(one.changed(process="", seconds=0, steps={}) for one in report.processes)
    return report.changed(
        id="", created="2026-01-01T00:00:00+00:00", command=(), processes=processes
    )


def main(kills: int, seed: int = 0):
    import tiny_models

    tiny_models.shared("mamba2").save_pretrained("mamba2")
    began = time.monotonic()
    assert os.waitpid(started("whole"), 0)[1] == 0
    took_s = time.monotonic() - began
    whole = list(reports.load("whole")[1].cases)
    two = [started("shared") for _ in range(2)]
    assert sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in two) == [0, 2]
    assert list(reports.load("shared")[1].cases) == whole
    draw = random.Random(seed)
    kept = []
    for number in range(kills):
        lines = draw.choice((0, draw.randrange(len(whole))))  # from the start, or between two cases
        after_s = draw.uniform(0, 2 * took_s / len(whole) if lines else took_s)
        kept.append(check_killed(f"killed-{number}", whole, lines, after_s))
    print(
        f"{kills} kills of runs of {len(whole)} cases in {took_s:.1f} s kept {len(set(kept))} "
        "numbers of cases"
    )


@pytest.mark.slow
def test_a_few_kills(tmp_path):
    done = python(__file__, "4", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.stdout.startswith("4 kills"), done.stderr


if __name__ == "__main__":
    import ssdprof.commands.measuring  # imported once, before the forks  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        main(*map(int, sys.argv[1:]))
