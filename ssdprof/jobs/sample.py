"""`python -m ssdprof.jobs.sample FOLDER NUMBER`: a fresh process, which measures the cases of a
report again, and adds their samples to it as process NUMBER.

Clocks, temperature and addresses differ between processes; intervals of call times need several.
"""

import sys
from dataclasses import replace
from pathlib import Path

from ssdprof.environment import child
from ssdprof.errors import SsdprofError
from ssdprof.jobs import target
from ssdprof.jobs.options import BenchOptions, RunOptions, own_kernels, parsed
from ssdprof.progress import Watcher
from ssdprof.store import reports


def sample(options: BenchOptions | RunOptions, folder: Path, number: int) -> None:
    """Measure the cases of a report again.  options: those of the report in the folder.

    Imports torch: a process with it must not be forked.
    """
    from ssdprof.jobs import bench as bench_job
    from ssdprof.jobs import run as run_job

    if isinstance(options, BenchOptions):
        sampler = replace(options, out=folder, sampler=number)
        bench_job.find_and_bench(*target.bench(sampler), Watcher())
    else:
        of_calls = replace(options, answers=False, prefill=False, stalls=False, trace=None)
        run_job.run(*target.run(replace(of_calls, out=folder, sampler=number)), Watcher())


def main() -> None:
    """Sample in a child process if the options name kernels of the user, as a command does."""
    folder = Path(sys.argv[1])
    number = int(sys.argv[2])
    _, report = reports.load(folder)
    words = list(report.command[2:])
    of_bench = report.kind == "bench"
    options = parsed(BenchOptions, words) if of_bench else parsed(RunOptions, words)
    ended = child.fork() if own_kernels(vars(options)) else None
    if ended is None:
        try:
            sample(options, folder, number)
        except SsdprofError as error:
            print(f"error: {error.message}", file=sys.stderr)
        child.finish(0)
    elif ended.last("exit") is None:
        reports.close(folder, number, ended.last("case") or "", f"Process {number} {ended.ending}")


if __name__ == "__main__":
    main()
