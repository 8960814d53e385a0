"""The process that ncu profiles for scan_002.py: every call of PLAN once, inside one range.

python benchmarks/studies/scan_002_target.py PLAN
"""

from __future__ import annotations

import json
import sys
from functools import cache, partial
from pathlib import Path

import torch
from inter_chunk.cells import BATCH, HEADS
from inter_chunk.contenders import diagonal
from inter_chunk.inputs import draw

from ssdprof.stalls.ncu import RANGE


def main() -> None:
    drawn = cache(partial(draw, batch=BATCH, heads=HEADS, device="cuda"))
    calls = []
    for one in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        inputs = drawn(chunks=one["chunks"], dim=one["dim"])
        calls.append(partial(diagonal(one["dim"])[one["contender"]], inputs))
        calls[-1]()  # compiles
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_push(RANGE)  # type: ignore[no-untyped-call]
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
