"""Time small calls of the gated delta rule, compared with flash-linear-attention: 15 batches and 12
packs.

    python benchmarks/small_gdn_cases.py FOLDER [--budget SECONDS] [--no-fla]
    python benchmarks/small_gdn_cases.py RESULT.json --states

The sizes are those of a published comparison: 15 to 16,384 tokens; heads of 60, 64, 100 and 128,
equally many key and value heads; a gate of logsigmoid(uniform) / size; in some cases half of the
gates are 0.  Measured and judged as in `ssdprof bench gdn`.  Keeps its report in FOLDER, as
`ssdprof bench --out` does.  Needs a GPU.

--states compares two launches alone that pass the state from chunk to chunk: the time of fla's over
  that of unfused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from ssdprof import operators
from ssdprof.commands.output import TerminalWatcher
from ssdprof.environment import machine
from ssdprof.errors import SsdprofError
from ssdprof.jobs.bench import bench
from ssdprof.jobs.options import BenchOptions
from ssdprof.kernels import Precision
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.measure.trace import traced, work
from ssdprof.operators.generate import Cell, Shape, Tokens
from ssdprof.operators.implementations import required, resolve
from ssdprof.operators.tensors import dtype_named
from ssdprof.report import document, markdown

# sequences, tokens of each, heads, K = V, divisor of the gate, share of gates that are 0
BATCHES = (
    (1, 63, 1, 64, 1.0, 0.0),
    (2, 500, 3, 60, 1.0, 0.0),
    (2, 1000, 3, 64, 1.0, 0.5),
    (3, 1024, 4, 100, 0.1, 0.0),
    (4, 1024, 4, 128, 1.0, 0.0),
    (2, 1500, 4, 128, 10.0, 0.0),
    (4, 2048, 8, 64, 1.0, 0.0),
    (8, 512, 8, 64, 1.0, 0.0),
    (16, 512, 8, 64, 1.0, 0.0),
    (32, 256, 8, 64, 1.0, 0.0),
    (64, 128, 8, 64, 1.0, 0.0),
    (8, 512, 8, 128, 1.0, 0.0),
    (16, 256, 8, 128, 1.0, 0.0),
    (32, 128, 8, 128, 1.0, 0.0),
    (64, 64, 8, 128, 1.0, 0.0),
)
PACKS = (  # sequences, tokens of all, heads, K = V, share of gates that are 0
    (1, 15, 4, 60, 0.0),
    (3, 1000, 4, 64, 0.0),
    (3, 1000, 4, 64, 0.5),
    (5, 2000, 4, 100, 0.0),
    (1, 8192, 4, 60, 0.0),
    (8, 4096, 4, 64, 0.0),
    (16, 8192, 4, 64, 0.0),
    (32, 8192, 4, 64, 0.0),
    (64, 8192, 4, 64, 0.0),
    (32, 4096, 4, 128, 0.0),
    (64, 6656, 4, 128, 0.0),
    (128, 4608, 4, 64, 0.5),
)


def cells() -> Iterator[Cell]:
    """All cells, in fp16 as in the comparison."""
    for sequences, length, heads, dim, gate_norm, ungated in BATCHES:
        yield _cell(Tokens(sequences=sequences, seqlen=length), heads, dim, gate_norm, ungated)
    for sequences, total, heads, dim, ungated in PACKS:
        longest = -(-total // sequences)  # the mean; `draw` cuts the total at random places
        yield _cell(
            Tokens(sequences=sequences, seqlen=longest, shortest=1),
            heads,
            dim,
            1.0,
            ungated,
            total=total,
        )


def _cell(
    tokens: Tokens, heads: int, dim: int, gate_norm: float, ungated: float, *, total: int = 0
) -> Cell:
    words = f"{tokens.sequences} packed, {total} in all" if total else str(tokens)
    shape = Shape(
        f"{words}, {heads} heads of {dim}, gate / {gate_norm:g}, {ungated:.0%} ungated",
        f"{heads}/{heads} heads, K {dim}, V {dim}, gate / {gate_norm:g}, {ungated:.0%} without",
        {"heads": heads, "dim": dim, "gate_norm": gate_norm, "ungated": ungated, "total": total},
    )
    return Cell(shape=shape, dtype="fp16", layout="contiguous", tokens=tokens)


def draw(cell: Cell, device: torch.device) -> GDNInputs:
    """The same inputs in every call.  Packs are cut at random places, and have initial states."""
    shape, tokens, dtype = cell.shape, cell.tokens, dtype_named(cell.dtype)
    heads, dim, total = (int(shape.sizes[name]) for name in ("heads", "dim", "total"))
    gate_norm, ungated = shape.sizes["gate_norm"], shape.sizes["ungated"]
    generator = torch.Generator(device).manual_seed(0)
    batch, length = (1, total) if tokens.packed else (tokens.sequences, tokens.seqlen)
    sizes, dims = (batch, length, heads), (dim,)

    def uniform(*size: int) -> torch.Tensor:
        return torch.rand(*size, generator=generator, device=device)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device)

    bounds = None
    if tokens.packed:
        cuts = (
            torch.randperm(total - 1, generator=generator, device=device)[: tokens.sequences - 1]
            + 1
        )
        ends = torch.tensor([0, total], device=device)
        bounds = torch.cat([ends[:1], cuts.sort().values, ends[1:]]).int()
    return GDNInputs(
        q=normal(*sizes, *dims).to(dtype),
        k=normal(*sizes, *dims).to(dtype),
        v=normal(*sizes, *dims).to(dtype),
        g=F.logsigmoid(uniform(*sizes)) / gate_norm * (uniform(*sizes) >= ungated),
        beta=uniform(*sizes).sigmoid().to(dtype),
        initial_state=normal(tokens.sequences, heads, *dims, *dims),
        use_qk_l2norm=True,
        cu_seqlens=bounds,
    )


STATE_PASS = {"fla": "chunk_gated_delta_rule_fwd_kernel_h", "unfused": "_gdn_chunk_state_kernel"}
STATISTICS = {"median": 50, "P95": 95, "min": 0, "max": 100}  # percentiles
CALLS = 100


def state_ratios(cell: Cell) -> dict[str, float]:
    """fla's time over that of unfused, by the statistic of 100 calls each, in the profiler."""
    device, us = torch.device("cuda"), {}
    inputs = draw(cell, device)
    for name, kernel in STATE_PASS.items():
        run = partial(
            required(resolve(operators.get("gdn"), name)).run,
            inputs,
            Precision(state_dtype=inputs.q.dtype),
        )
        run()  # compiles it, and fla tunes itself
        found = work(traced(lambda run=run: [run() for _ in range(CALLS)], device))
        us[name] = [spent for _, kind, spent in found if kind.startswith(kernel)]
        assert len(us[name]) == CALLS, f"{len(us[name])} launches of {kernel}"
    return {
        word: float(np.percentile(us["fla"], q) / np.percentile(us["unfused"], q))
        for word, q in STATISTICS.items()
    }


def states(file: Path) -> None:
    """Write the ratios of all cells, by "cell, statistic"."""
    values: dict[str, float] = {}
    for cell in cells():
        values |= {
            f"{cell.shape.name}, {word}": round(value, 4)
            for word, value in state_ratios(cell).items()
        }
        print(cell.shape.name, values[f"{cell.shape.name}, median"], flush=True)
    result = {
        "environment": machine.collect().model_dump(mode="json"),
        "calls": CALLS,
        "values": values,
    }
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--budget", type=float, help="seconds of wall clock")
    parser.add_argument("--no-fla", action="store_true", help="ours alone")
    parser.add_argument("--states", action="store_true", help="the state pass alone")
    arguments = parser.parse_args()
    if arguments.states:
        return states(arguments.folder)
    gdn = operators.get("gdn")
    names = (*(() if arguments.no_fla else ("fla",)), "unfused", "fused", "recurrent")
    request = BenchOptions(
        operator="gdn",
        measured=tuple(cells()),
        compared=tuple(required(resolve(gdn, name)) for name in names),
        baseline=names[0],
        match_with="unfused",
        budget=arguments.budget,
        first_call_s=60,
        out=arguments.folder,
        command=("python", "benchmarks/small_gdn_cases.py", str(arguments.folder)),
    )
    print(
        markdown.render(
            document.compose(
                bench(
                    request,
                    replace(gdn, generated=replace(gdn.generated, draw=draw)),
                    TerminalWatcher(),
                )[1]
            )
        )
    )


if __name__ == "__main__":
    try:
        main()
    except SsdprofError as error:
        print(f"Error: {error.message} {error.hint}", file=sys.stderr)
        sys.exit(int(error.exit_code))
