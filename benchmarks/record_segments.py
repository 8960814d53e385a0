"""Time the Hopper SSD kernel with many ways to cut sequences into segments, on the GPU here.

    python benchmarks/record_segments.py FILE

Writes FILE, JSON: device microseconds (median of 5, cold L2) of every cut that `candidates`
considers, for three models' shapes, one with N = 256 and two with few heads, bf16, exact, fp32
states.  The constants of `config.py` are fitted to these times, and
tests/kernels/test_hopper_schedule.py checks the fit.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import triton

from ssdprof.jobs.reading import parse_shapes
from ssdprof.kernels.hopper.ring import CHUNK
from ssdprof.kernels.hopper.schedule import Cut, ceil_div
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig, candidates, n_split, program_count
from ssdprof.kernels.ssd.hopper.launch import hopper_launch
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.measure.timing import CudaTimer
from ssdprof.operators.generate import Cell, Tokens
from ssdprof.operators.ssd import OPERATOR
from ssdprof.operators.ssd_inputs import draw

SHAPES = "mamba2-2.7b,granite-4.0-h-small,nemotron-3-nano,falcon-h1-3b,10x64x128x1,4x64x128x1"
LENGTHS = (1024, 2048, 4096, 8192, 16384, 65536)
REPEATS = 5


def device_us(timer: CudaTimer, inputs: SSDInputs, segments: Cut, sm_count: int) -> float:
    chosen = SSDHopperConfig.choose(inputs, sm_count, batch_invariant=False)
    config = replace(chosen, **asdict(segments))
    recording = timer.record(partial(hopper_launch(inputs, Precision(), config), inputs))
    return float(np.median([timer.device_us(recording) for _ in range(REPEATS)]))


def main(file: Path) -> None:
    device = torch.device("cuda")
    properties = torch.cuda.get_device_properties(device)
    timer = CudaTimer(device)
    sm_count = properties.multi_processor_count
    cells = []
    for shape in parse_shapes(OPERATOR.generated, SHAPES):
        for seqlen in LENGTHS:
            tokens = Tokens(sequences=1, seqlen=seqlen)
            inputs = replace(
                draw(Cell(shape=shape, dtype="bf16", layout="contiguous", tokens=tokens), device),
                chunk_size=256,
            )
            nchunks, pairs = ceil_div(seqlen, CHUNK.value), program_count(inputs)
            cuts = {
                (*s.lengths(nchunks), s.recompute): s for s in candidates(nchunks, sm_count / pairs)
            }
            cells.append(
                {
                    "shape": shape.name,
                    "seqlen": seqlen,
                    "nchunks": nchunks,
                    "pairs": pairs,
                    "halves": n_split(inputs.B.shape[3]),
                    "cuts": [
                        {**asdict(s), "device_us": round(device_us(timer, inputs, s, sm_count), 2)}
                        for s in cuts.values()
                    ],
                }
            )
            print(shape.name, seqlen, len(cuts), flush=True)
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    machine = {"gpu": properties.name, "sm_count": sm_count, **versions}
    file.write_text(json.dumps({**machine, "cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
