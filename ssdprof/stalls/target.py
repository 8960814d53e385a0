"""The process that ncu profiles: one layer's captured tensors, and one call inside an NVTX range.

    python -m ssdprof.stalls.target FOLDER --layer N --seqlen N --implementation NAME --launched FILE

Small, because ncu saves and restores the device memory that the process can reach between its passes.  FILE gets, as
JSON, a `Launched` with the launches of the call, or a `Refusal`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from ssdprof import operators
from ssdprof.capture import store
from ssdprof.core.base import PrecisionRecord
from ssdprof.errors import BadInputError, ExitCode, SsdprofError
from ssdprof.kernels import UnsupportedError
from ssdprof.measure.call import Call, call_of
from ssdprof.measure.launches import counted_launches, recorded_launches
from ssdprof.measure.occupancy import Limits, occupancy
from ssdprof.operators.dtypes import precision_record
from ssdprof.operators.named import Named, resolve
from ssdprof.schema.stalls import Launched, Refusal  # TODO
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
    precision = PrecisionRecord(intermediates=given.intermediates, state_dtype=given.state_dtype)
    call_sites.install()
    if given.tuned:
        use_file(given.tuned)
    try:
        inputs = load(given.folder, given.layer, given.seqlen, DEVICE)
        named = resolve(operators.of(inputs), given.implementation)
        call = call_at(named, inputs, precision)
        launched = warm_up(named, call)
    except (SsdprofError, UnsupportedError, torch.OutOfMemoryError) as error:
        refusal = refusal_of(error)
        given.launched.write_text(refusal.model_dump_json() + "\n", encoding="utf-8")
        sys.exit(f"Error: {refusal.message}")
    given.launched.write_text(launched.model_dump_json() + "\n", encoding="utf-8")
    profiled(call)


def load(folder: Path, layer: int, seqlen: int, device: str) -> Any:
    """The captured inputs of one layer.  Raises BadInputError if they are not in the folder."""
    manifest, read = store.load(folder)
    for stored in manifest.layers:
        if stored.layer.index == layer and stored.seqlen == seqlen and stored.whole:
            return read(stored, device).inputs
    raise BadInputError(f"{folder} holds no layer {layer} of {seqlen} tokens.", "Capture it first.")


def refusal_of(error: Exception) -> Refusal:
    """The message of an error for the user.  Its type determines the exit code of the command."""
    if isinstance(error, SsdprofError):
        return Refusal(message=error.message, hint=error.hint, exit_code=error.exit_code)
    if isinstance(error, torch.OutOfMemoryError):
        message, hint = "The layer's tensors do not fit into the GPU's memory.", "Use a shorter --seq."
        return Refusal(message=message, hint=hint, exit_code=ExitCode.MISSING_CAPABILITY)
    hint = "Name another --layer, --impl or precision."
    return Refusal(message=f"{error}.", hint=hint, exit_code=ExitCode.BAD_INPUT)


def call_at(named: Named, inputs: Any, wanted: PrecisionRecord) -> Call:
    """The call at the requested precision, or at the most similar one of an implementation that lacks it.

    Raises MissingCapabilityError if the implementation is unavailable.
    """
    found = named.precisions(operators.of(inputs).costed.dims(inputs).dtype, (wanted,))

    def likeness(one: PrecisionRecord) -> tuple[bool, bool]:
        return one.intermediates == wanted.intermediates, one.state_dtype == wanted.state_dtype

    return call_of(named.present, inputs, max(found, key=likeness))


@torch.no_grad()
def warm_up(named: Named, call: Call) -> Launched:
    """Compile and tune everything, so that the profiled call only launches.

    A library tunes itself in its first call, so only later calls have its final launches.
    """
    call.run()
    with recorded_launches() as launches, counted_launches() as count:
        call.run()
    limits = Limits.of(call.device) if call.device.type == "cuda" else None
    found = [occupancy(launch, limits) if limits else None for launch in launches]
    return Launched(
        implementation=named.name,
        variant=call.plan().variant,
        precision=precision_record(call.precision),
        launch_count=len(count),
        launches=tuple(launches),
        occupancy_pct=tuple(one.warps_pct if one else None for one in found),
    )


@torch.no_grad()
def profiled(call: Call) -> None:
    """The call that ncu profiles."""
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_push(RANGE)  # type: ignore[no-untyped-call]
    call.run()
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
