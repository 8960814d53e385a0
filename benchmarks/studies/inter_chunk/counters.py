"""ncu's counters for the study's kernels: sectors read from L2, bytes of DRAM, occupancy."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ssdprof.errors import MissingCapabilityError
from ssdprof.stalls import facts, ncu, read
from ssdprof.stalls.read import RawKernel

TARGET = Path(__file__).parent.parent / "scan_002_target.py"
SECTIONS = ("LaunchStats", "Occupancy", "SpeedOfLight", "MemoryWorkloadAnalysis_Tables")
L2_READS = "lts__t_sectors_srcunit_tex_op_read.sum"  # sectors of 32 bytes that SMs read from L2


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A call that ncu profiles: a diagonal contender on random inputs.  kernels: its launches, in order."""

    contender: str
    chunks: int
    dim: int
    kernels: tuple[str, ...]


def count(watched: Sequence[Watched], timeout_s: float) -> list[dict[str, Any]]:
    """A record for each call, summed over its launches.

    Raises MissingCapabilityError if ncu is missing, or has no permission to count.
    """
    program = ncu.find()
    names = [name for one in watched for name in one.kernels]
    with tempfile.TemporaryDirectory(prefix="ssdprof-") as folder:
        plan, report = Path(folder) / "plan.json", Path(folder) / "scan-002.ncu-rep"
        plan.write_text(json.dumps([asdict(one) for one in watched]), encoding="utf-8")
        command = ncu.command(program, report, names, len(names), (sys.executable, str(TARGET), str(plan)), SECTIONS)
        output = ncu.run(command, timeout_s=timeout_s, environ=ncu.clean_environment(os.environ))
        if not report.is_file():
            raise ncu.explain(output, 0)
        kernels = read.read(report).kernels
    if [kernel.function for kernel in kernels] != names:
        raise MissingCapabilityError(
            f"ncu profiled {len(kernels)} launches in another order than the {len(names)} that were made.",
            "Does another process use the GPU?",
        )
    return records(watched, kernels)


def records(watched: Sequence[Watched], kernels: Sequence[RawKernel]) -> list[dict[str, Any]]:
    found, left = [], list(kernels)
    for one in watched:
        own, left = left[: len(one.kernels)], left[len(one.kernels) :]
        record: dict[str, Any] = {"contender": one.contender, "chunks": one.chunks, "dim": one.dim}
        sums: defaultdict[str, float] = defaultdict(float)
        for kernel in own:
            speed = facts.numbers(kernel)
            for name, value in (
                ("l2_read_sectors", kernel.number(L2_READS)),
                ("dram_read_bytes", speed["dram_read_bytes"]),
                ("dram_write_bytes", speed["dram_write_bytes"]),
                ("l2_bytes", speed["l2_bytes"]),
                ("ncu_us", speed["duration_us"]),
            ):
                sums[name] += float("nan") if value is None else value
        used = facts.numbers(own[0])
        record |= {name: value for name, value in sums.items() if value == value}  # NaN: not collected
        record |= {
            "occupancy_pct": used["occupancy_pct"],
            "occupancy_limit_pct": used["occupancy_limit_pct"],
            "limited_by": list(used["limited_by"]),
            "registers": used["registers"],
            "shared_bytes": used["shared_bytes"],
        }
        found.append(record)
    return found
