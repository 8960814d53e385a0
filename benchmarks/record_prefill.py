"""Record prefill times of whole models with random weights, on the GPU here.

    python benchmarks/record_prefill.py FOLDER [--budget SECONDS] [--only NAME ...] [--scratch DIR]

Makes the checkpoints of `RUNS` in DIR, all at once (27 GB, removed again), runs `ssdprof prefill` on each against every
library that is installed, one after the other, and keeps its report in FOLDER/<run>.  The runs share the
budget, the most important ones first; results name the runs that did not fit.  A run that hangs is stopped, and
its results so far are kept.  No network is needed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
TO_START_S = 12  # for a run's imports; its own budget begins after them
TO_STOP_S = 20  # from a run's limit to its interrupt, and from that to the kill
LEAST_S = 30  # a run with less time does not begin
TO_NOTICE_S = 5  # time for a command to end after the user interrupts both processes


@dataclass(frozen=True, kw_only=True)
class Run:
    """limit_s: seconds of wall clock that are reserved for this run.  seconds: seconds of sampling for each length and
    origin of the convolution and the norm: the model's, then the bundled ones."""

    name: str
    seq: str
    peers: tuple[str, ...]
    seconds: float = 4
    limit_s: float


SSD_PEERS, GDN_PEERS = ("mamba_ssm",), ("fla", "flash_qla", "flashinfer")
RUNS = (
    Run(name="mamba2-2.7b", seq="1k,16k,128k", peers=SSD_PEERS, limit_s=130),
    Run(name="granite-4.0-h-1b", seq="1k,16k,128k", peers=SSD_PEERS, limit_s=90),
    Run(name="qwen3.5-9b", seq="16k,128k", peers=GDN_PEERS, limit_s=150),
)


def make_checkpoints(names: Sequence[str], scratch: Path) -> list[str]:
    """Make all checkpoints in parallel.  Returns the names of those that succeeded."""
    script = HERE / "make_random_checkpoint.py"
    making = {
        name: subprocess.Popen([sys.executable, script, name, scratch / name, "--device", "cuda"]) for name in names
    }
    return [name for name, process in making.items() if process.wait() == 0]


def allowance(run: Run, later: Sequence[Run], left_s: float) -> float:
    """Seconds for the run: its limit plus the time that later runs do not need, at most the remaining time."""
    return min(left_s, max(run.limit_s, left_s - sum(one.limit_s for one in later)))


def command(run: Run, checkpoint: Path, out: Path, allowed_s: float) -> list[str]:
    peers = ",".join(name for name in run.peers if find_spec(name) is not None)
    words = [
        sys.executable, "-m", "ssdprof", "prefill", checkpoint, "--seq", run.seq, "--batch", "1",
        "--conv-and-norm", "bundled", "--seconds", f"{run.seconds:g}",
        "--budget", f"{allowed_s - TO_START_S:.0f}", "--out", out, "--no-tuned",
        *(["--against", peers] if peers else []),
    ]  # fmt: skip
    return list(map(str, words))


def run_within(words: Sequence[str], seconds: float, *, to_stop_s: float = TO_STOP_S) -> int:
    """The command's exit code.  Its stdout goes to stderr.

    It is interrupted `to_stop_s` after its limit, and killed after the same time again.
    Raises KeyboardInterrupt if the user interrupts this process, after the command has ended.
    """
    process = subprocess.Popen(words, env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdout=sys.stderr)
    try:
        return _end(process, seconds + to_stop_s, to_stop_s)
    except KeyboardInterrupt:
        _end(process, TO_NOTICE_S, to_stop_s)  # Ctrl-C reaches both; a signal to only this process does not
        raise


def _end(process: subprocess.Popen[bytes], seconds: float, to_stop_s: float) -> int:
    """Waits, then interrupts, then kills."""
    for wait_s, then in ((seconds, signal.SIGINT), (to_stop_s, signal.SIGKILL)):
        try:
            return process.wait(wait_s)
        except subprocess.TimeoutExpired:
            process.send_signal(then)
    return process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the results")
    parser.add_argument("--budget", type=float, default=400, help="seconds of wall clock for everything [400]")
    parser.add_argument("--only", nargs="+", choices=[run.name for run in RUNS], help="these runs alone")
    parser.add_argument("--scratch", type=Path, help="where to make checkpoints; a temporary folder by default")
    arguments = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", flush=True)

    arguments.folder.mkdir(parents=True, exist_ok=True)
    runs = [run for run in RUNS if arguments.only is None or run.name in arguments.only]
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        made = make_checkpoints([run.name for run in runs], Path(scratch))
        say(f"checkpoints made: {', '.join(made)}")
        runs = [run for run in runs if run.name in made]
        for number, run in enumerate(runs):
            allowed_s = allowance(run, runs[number + 1 :], arguments.budget - (time.monotonic() - began))
            if allowed_s < LEAST_S:
                say(f"{run.name}: left out, {allowed_s:.0f} s were left")
                continue
            say(f"{run.name}: begins, {allowed_s:.0f} s allowed")
            words = command(run, Path(scratch) / run.name, arguments.folder / run.name, allowed_s)
            code = run_within(words, allowed_s)
            say(f"{run.name}: exit code {code}")


if __name__ == "__main__":
    main()
