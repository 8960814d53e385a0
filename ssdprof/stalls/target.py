"""The process that ncu watches: one layer's captured tensors, one call inside an NVTX range, and nothing else.

    python -m ssdprof.stalls.target FOLDER --layer N --seqlen N --implementation NAME --launched FILE

Small, because ncu saves and restores the device memory that the process can reach between its passes.  FILE gets, as
JSON, a `Launched`, what one call launches; if that cannot be, a `Refusal`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from ssdprof import kernels, operators
from ssdprof.capture import store
from ssdprof.errors import BadInputError, ExitCode, SsdprofError
from ssdprof.kernels import UnsupportedError
from ssdprof.kernels.precision import Precision
from ssdprof.measure.launches import counted_launches, recorded_launches
from ssdprof.measure.occupancy import Limits, occupancy
from ssdprof.operators import tensors
from ssdprof.operators.dtypes import dtype_named
from ssdprof.schema.stalls import Launched, Refusal
from ssdprof.stalls import call_sites
from ssdprof.stalls.ncu import RANGE
from ssdprof.tuning.use import use_file

DEVICE = "cuda"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layer", type=int, required=True)
    parser.add_argument("--seqlen", type=int, required=True)
    parser.add_argument("--implementation", required=True)
    parser.add_argument("--intermediates", choices=("exact", "relaxed"), default="exact")
    parser.add_argument("--state-dtype", choices=("fp32", "fp16", "bf16"), default="fp32")
    parser.add_argument("--launched", type=Path, required=True)
    parser.add_argument("--tuned", type=Path)
    given = parser.parse_args()
    precision = Precision(intermediates=given.intermediates, state_dtype=dtype_named(given.state_dtype))
    call_sites.install()
    if given.tuned:
        use_file(given.tuned)
    try:
        inputs = load(given.folder, given.layer, given.seqlen, DEVICE)
        launched = warm_up(given.implementation, inputs, precision)
    except (SsdprofError, UnsupportedError, torch.OutOfMemoryError) as error:
        refusal = refusal_of(error)
        given.launched.write_text(refusal.model_dump_json() + "\n", encoding="utf-8")
        sys.exit(f"Error: {refusal.message}")
    given.launched.write_text(launched.model_dump_json() + "\n", encoding="utf-8")
    profiled(given.implementation, inputs, precision)


def load(folder: Path, layer: int, seqlen: int, device: str) -> Any:
    """The captured inputs of one layer.  Raises BadInputError if they are not in the folder."""
    manifest, read = store.load(folder)
    for stored in manifest.layers:
        if stored.layer.index == layer and stored.seqlen == seqlen:
            return read(stored, device).inputs
    raise BadInputError(f"{folder} holds no layer {layer} of {seqlen} tokens.", "Capture it first.")


def refusal_of(error: Exception) -> Refusal:
    """What the user is told of an error: whose it is decides the exit code of the command."""
    if isinstance(error, SsdprofError):
        return Refusal(message=error.message, hint=error.hint, exit_code=error.exit_code)
    if isinstance(error, torch.OutOfMemoryError):
        message, hint = "The layer's tensors do not fit into the GPU's memory.", "Use a shorter --seq."
        return Refusal(message=message, hint=hint, exit_code=ExitCode.MISSING_CAPABILITY)
    hint = "Name another --layer, --impl or precision."
    return Refusal(message=f"{error}.", hint=hint, exit_code=ExitCode.BAD_INPUT)


@torch.no_grad()
def warm_up(name: str, inputs: Any, precision: Precision) -> Launched:
    """Compile and settle everything, so that the profiled call only launches."""
    implementation = kernels.get(operators.of(inputs).name, name)
    with recorded_launches() as launches, counted_launches() as count:
        implementation.run(inputs, precision)
    implementation.run(inputs, precision)
    device = tensors.device(inputs)
    limits = Limits.of(device) if device.type == "cuda" else None
    found = [occupancy(launch, limits) if limits else None for launch in launches]
    return Launched(
        implementation=name,
        variant=implementation.plan(inputs, precision).variant,
        launch_count=len(count),
        launches=tuple(launches),
        occupancy_pct=tuple(one.warps_pct if one else None for one in found),
    )


@torch.no_grad()
def profiled(name: str, inputs: Any, precision: Precision) -> None:
    """The one call that ncu sees."""
    run = kernels.get(operators.of(inputs).name, name).run
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_push(RANGE)  # type: ignore[no-untyped-call]
    run(inputs, precision)
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
