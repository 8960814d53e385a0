"""Record prefill times of whole models with random weights, on the GPU here.

    python benchmarks/record_prefill.py FOLDER [--budget SECONDS] [--only NAME ...] [--scratch DIR]

Makes the checkpoints of `RUNS` in DIR, all at once (27 GB, removed again), runs `ssdprof prefill`
on each against every library that is installed, one after the other, and keeps its report in
FOLDER/<run>.  The runs share the budget, the most important ones first; results name the runs that
did not fit.  A run that hangs is stopped, and its results so far are kept.  No network is needed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
TO_START_S = 12  # for a run's imports; its own budget begins after them
TO_STOP_S = 20  # from a run's limit to its end
LEAST_S = 30  # a run with less time does not begin


@dataclass(frozen=True, kw_only=True)
class Run:
    """limit_s: seconds of wall clock for this run.  seconds: seconds of sampling for each length
    and
    origin of the convolution and the norm: the model's, then the bundled ones.
    """

    name: str
    seq: str
    libraries: tuple[str, ...]
    seconds: float = 4
    limit_s: float


SSD_LIBRARIES, GDN_LIBRARIES = ("mamba_ssm",), ("fla", "flash_qla", "flashinfer")
RUNS = (
    Run(name="mamba2-2.7b", seq="1k,16k,128k", libraries=SSD_LIBRARIES, limit_s=130),
    Run(name="granite-4.0-h-1b", seq="1k,16k,128k", libraries=SSD_LIBRARIES, limit_s=90),
    Run(name="qwen3.5-9b", seq="16k,128k", libraries=GDN_LIBRARIES, limit_s=150),
)


def make_checkpoints(names: Sequence[str], scratch: Path) -> list[str]:
    """Make all checkpoints in parallel.  Returns the names of those that succeeded."""
    script = HERE / "make_random_checkpoint.py"
    making = {
        name: subprocess.Popen([sys.executable, script, name, scratch / name, "--device", "cuda"])
        for name in names
    }
    return [name for name, process in making.items() if process.wait() == 0]


def command(run: Run, checkpoint: Path, out: Path, allowed_s: float) -> list[str]:
    libraries = ",".join(name for name in run.libraries if find_spec(name) is not None)
    words = [
        sys.executable,
        "-m",
        "ssdprof",
        "prefill",
        checkpoint,
        "--seq",
        run.seq,
        "--batch",
        "1",
        "--conv-and-norm",
        "bundled",
        "--seconds",
        f"{run.seconds:g}",
        "--budget",
        f"{allowed_s - TO_START_S:.0f}",
        "--out",
        out,
        "--no-tuned",
        *(["--against", libraries] if libraries else []),
    ]
    return list(map(str, words))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to write the results")
    parser.add_argument(
        "--budget", type=float, default=400, help="seconds of wall clock for everything [400]"
    )
    parser.add_argument(
        "--only", nargs="+", choices=[run.name for run in RUNS], help="these runs alone"
    )
    parser.add_argument(
        "--scratch", type=Path, help="where to make checkpoints; a temporary folder by default"
    )
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
        for run in runs:
            allowed_s = min(run.limit_s, arguments.budget - (time.monotonic() - began))
            if allowed_s < LEAST_S:
                say(f"{run.name}: left out, {allowed_s:.0f} s were left")
                continue
            say(f"{run.name}: begins, {allowed_s:.0f} s allowed")
            words = command(run, Path(scratch) / run.name, arguments.folder / run.name, allowed_s)
            offline, limit_s = os.environ | {"HF_HUB_OFFLINE": "1"}, allowed_s + TO_STOP_S
            with suppress(subprocess.TimeoutExpired):
                done = subprocess.run(
                    words, env=offline, stdout=sys.stderr, timeout=limit_s, check=False
                )
                say(f"{run.name}: exit code {done.returncode}")


if __name__ == "__main__":
    main()
