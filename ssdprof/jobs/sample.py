"""`python -m ssdprof.jobs.sample FOLDER NUMBER`: times the cases of a report again, in a fresh
process, and adds their samples to the report as process NUMBER.

Clocks, temperature and memory addresses differ between processes, so that the interval of a call
time needs samples of several.
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
    """Time the cases of a report again, and add their samples to it.  Cases that have no samples
    there are left out.

    options: the options of the command that wrote the report.  folder: the report's folder.
    number: the number of this process in the report.

    Imports torch, after which the process must not be forked.
    """
    from ssdprof.jobs import bench as bench_job
    from ssdprof.jobs import run as run_job

    if isinstance(options, BenchOptions):
        sampler = replace(options, out=folder, sampler=number)
        bench_job.run_bench(*target.bench(sampler), Watcher())
    else:
        times_only = replace(options, answers=False, prefill=False, stalls=False, trace=None)
        run_job.run(*target.run(replace(times_only, out=folder, sampler=number)), Watcher())


def main() -> None:
    """Sample in this process, or, if the options name kernels of the user, in a child process,
    whose crash is noted in the report.

    If sampling fails, the report stays partial.  Nobody reads this process's exit code.
    """
    folder = Path(sys.argv[1])
    number = int(sys.argv[2])
    _, report = reports.load(folder)
    words = list(report.command[2:])  # those after "ssdprof bench" or "ssdprof run"
    is_bench = report.kind == "bench"
    options = parsed(BenchOptions, words) if is_bench else parsed(RunOptions, words)
    ended = child.fork() if own_kernels(vars(options)) else None
    if ended is None:  # this is the process that samples
        try:
            sample(options, folder, number)
        except SsdprofError as error:
            print(f"error: {error.message}", file=sys.stderr)
        child.finish(0)
    elif ended.last("exit") is None:  # the child process ended before it told its exit code
        reports.close(folder, number, ended.last("case") or "", f"Process {number} {ended.ending}")


if __name__ == "__main__":
    main()
