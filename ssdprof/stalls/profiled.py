"""The process that ncu profiles: one layer's captured tensors, and one call inside an NVTX range.

    python -m ssdprof.stalls.profiled JOB FILE         JOB: an `ncu.Job`, as JSON

Small, because ncu saves and restores the device memory that the process can reach between its
passes.  FILE gets, as JSON, a `Launched` with the launches of the call, or the message, hint and
exit code of an error.

It also makes the compiler record, for an inlined instruction, the line that has its stage.  An
instruction has one line in a report: that of the innermost function that was inlined there, a
helper's or a library's.  Triton writes the chain of calls into its PTX as a comment, which ptxas
drops:

    .loc 3 382 10    // role_scores.py:82:10 @[ role_scores.py:64:17 @[ hopper_kernel.py:161:45 ] ]

So each .loc is replaced, before ptxas reads it, by the innermost line of the chain that has a
stage.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from ssdprof import operators
from ssdprof.capture import store
from ssdprof.core.stalls import Launched
from ssdprof.errors import BadInputError, ExitCode, SsdprofError
from ssdprof.kernels import UnsupportedError
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation
from ssdprof.measure.first_run import Call, counted_launches, recorded_launches
from ssdprof.measure.roofline import with_occupancy
from ssdprof.operators.implementations import own_precisions, required, resolve
from ssdprof.operators.operator import Operator
from ssdprof.stalls import ncu
from ssdprof.stalls.attribute import UNKNOWN, SourceFiles
from ssdprof.stalls.read import base_name
from ssdprof.store.tuned import use_file

DEVICE = "cuda"


def main() -> None:
    """Make the call of the job twice: to compile and tune everything, and for ncu."""
    job = ncu.Job.model_validate_json(sys.argv[1])
    out = Path(sys.argv[2])
    install()
    if job.tuned:
        use_file(job.tuned)
    try:
        inputs = load(job.folder, job.layer, job.seqlen, DEVICE)
        operator = operators.get(inputs.operator)
        implementation = required(resolve(operator, job.implementation))
        call = call_at(operator, implementation, inputs, Precision.named(job.precision))
        launched = warm_up(implementation, call)
    except (SsdprofError, UnsupportedError, torch.OutOfMemoryError) as error:
        refusal = refusal_of(error)
        out.write_text(json.dumps(refusal) + "\n", encoding="utf-8")
        sys.exit(f"Error: {refusal['message']}")
    out.write_text(launched.model_dump_json() + "\n", encoding="utf-8")
    profiled(call)


def load(folder: Path, layer: int, seqlen: int, device: str) -> Inputs:
    """The captured inputs of one layer.  Raises BadInputError if they are not in the folder."""
    manifest, read = store.load(folder)
    for stored in manifest.layers:
        if stored.layer.index == layer and stored.seqlen == seqlen and stored.whole:
            return read(stored, device).inputs
    raise BadInputError(f"{folder} holds no layer {layer} of {seqlen} tokens.", "Capture it first.")


def refusal_of(error: Exception) -> dict[str, str | int]:
    """The message and hint for the user, and the exit code of the command, which the error's type
    determines.
    """
    if isinstance(error, torch.OutOfMemoryError):
        full = "The layer's tensors do not fit into the GPU's memory."
        error = SsdprofError(full, "Use a shorter --seq.", ExitCode.MISSING_CAPABILITY)
    elif not isinstance(error, SsdprofError):
        error = SsdprofError(
            f"{error}.", "Name another --layer, --impl or precision.", ExitCode.BAD_INPUT
        )
    return {"message": error.message, "hint": error.hint, "exit_code": int(error.exit_code)}


def call_at(
    operator: Operator, implementation: Implementation, inputs: Inputs, wanted: Precision
) -> Call:
    """The call at the requested precision, or at the most similar one of an implementation that
    lacks it.

    Raises MissingCapabilityError if the implementation is unavailable.
    """
    dtype = operator.oracle.dims(inputs).dtype

    def likeness(precision: Precision) -> tuple[bool, bool]:
        same_intermediates = precision.intermediates == wanted.intermediates
        return same_intermediates, precision.state_dtype == wanted.state_dtype

    precision = max(own_precisions(implementation, dtype, (wanted,)), key=likeness)
    return Call(
        implementation=implementation, inputs=inputs, precision=precision, label=implementation.name
    )


@torch.no_grad()
def warm_up(implementation: Implementation, call: Call) -> Launched:
    """Compile and tune everything, so that the profiled call only launches.

    A library tunes itself in its first call, so only later calls have its final launches.
    """
    call.run()
    with recorded_launches() as launches, counted_launches() as count:
        call.run()
    return Launched(
        implementation=implementation.name,
        variant=implementation.plan(call.inputs, call.precision).variant,
        precision=str(call.precision),
        launch_count=len(count),
        launches=tuple(with_occupancy(launch, call.device) for launch in launches),
    )


@torch.no_grad()
def profiled(call: Call) -> None:
    """The call that ncu profiles."""
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_push(ncu.RANGE)  # type: ignore[no-untyped-call]
    call.run()
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


# --- lines of callers

_KEY = "ssdprof: lines of callers"  # part of the key of such kernels in Triton's cache, if it asks
_FILE = re.compile(r'^\s*\.file\s+(\d+) "([^"]+)"', re.MULTILINE)
_LOC = re.compile(r"^(\s*\.loc\s+)(\d+) (\d+) (\d+)(\s*//\s*)(.+)$", re.MULTILINE)
_FRAME = re.compile(r"([^\s@\[\]:]+):(\d+):(\d+)")


def install() -> None:
    """Install the hook for every kernel that Triton compiles in this process from now on.

    Triton 3.6 does not ask the hook for a part of its cache's key, so TRITON_CACHE_DIR must be a
    folder without compiled kernels.
    """
    triton.knobs.runtime.add_stages_inspection_hook = _hook


def _hook(*arguments: Any) -> tuple[str, str] | None:
    """Triton's hook for compilation stages: it names the call sites in PTX.

    Triton calls it without arguments for its part of the cache's key, else with a compiler's
    stages.
    """
    if not arguments:
        return _KEY, _KEY
    stages: dict[str, Callable[..., str]] = arguments[1]
    make = stages.get("ptx")
    if make is not None:

        def make_and_name(*module_and_metadata: object) -> str:
            return name_call_sites(make(*module_and_metadata))

        stages["ptx"] = make_and_name
    return None


def name_call_sites(ptx: str, sources: SourceFiles | None = None) -> str:
    """The PTX with every .loc at the innermost line that has a stage; unchanged if no line of the
    chain has one.

    sources: of the files that the PTX names; None reads them.
    """
    files = dict(_FILE.findall(ptx))
    known = sources or SourceFiles({path: text for path in files.values() if (text := _text(path))})
    numbers: dict[str, list[str]] = defaultdict(list)  # frames name a file without its folder
    for number, path in files.items():
        numbers[base_name(path)].append(number)

    def innermost(loc: re.Match[str]) -> str:
        """The line directive with the innermost frame whose stage is known."""
        before, _, _, _, remark, chain = loc.groups()
        for name, line, column in _FRAME.findall(chain):
            for number in numbers.get(name, ()):
                if known.stage_of(files[number], int(line)).stage not in (None, UNKNOWN):
                    return f"{before}{number} {line} {column}{remark}{chain}"
        return loc[0]

    return _LOC.sub(innermost, ptx)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""  # then its lines are not changed


if __name__ == "__main__":
    main()
