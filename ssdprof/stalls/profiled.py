"""The process that ncu profiles: one layer's captured tensors, and one call inside an NVTX range.

    python -m ssdprof.stalls.profiled JOB FILE         JOB: an `ncu.Job`, as JSON

The process uses little memory, because ncu saves and restores all device memory of the process
between its passes.  It writes into FILE, as JSON, a `Launched` with the launches of the call, or
the message, hint and exit code of an error.

The process also makes the compiler record, for each inlined instruction, the line that has its
stage.  A report has one line for an instruction: that of the innermost inlined function, which may
be a helper or a library.  Triton writes the chain of calls into its PTX as a comment, which ptxas
drops:

    .loc 3 382 10    // role_scores.py:82:10 @[ role_scores.py:64:17 @[ hopper_kernel.py:161:45 ] ]

Before ptxas reads the PTX, this module therefore replaces the line of each .loc with the innermost
line of the chain that has a stage.
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
    """Make the call of the job: first to compile and tune everything, then for ncu.

    If the call is refused or does not fit into the GPU's memory, write the error into the file, and
    exit with a message.
    """
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
    """The message and hint for the user and the exit code of the command, for an error of the call:
    an SsdprofError, an UnsupportedError or torch's OutOfMemoryError.
    """
    if isinstance(error, torch.OutOfMemoryError):
        error = SsdprofError(
            "The layer's tensors do not fit into the GPU's memory.",
            "Use a shorter --seq.",
            ExitCode.MISSING_CAPABILITY,
        )
    elif not isinstance(error, SsdprofError):
        error = SsdprofError(
            f"{error}.", "Name another --layer, --impl or precision.", ExitCode.BAD_INPUT
        )
    return {"message": error.message, "hint": error.hint, "exit_code": int(error.exit_code)}


def call_at(
    operator: Operator, implementation: Implementation, inputs: Inputs, wanted: Precision
) -> Call:
    """The call at the wanted precision, or at the most similar one that the implementation has:
    with the same intermediates if there is one, then with the same state dtype.
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
    """Compile and tune everything, so that the profiled call only launches kernels.

    Returns the launches of a second call.  A library may tune itself in its first call, so only
    later calls have its final launches.
    """
    call.run()
    with recorded_launches() as launches, counted_launches() as all_launches:
        call.run()
    return Launched(
        implementation=implementation.name,
        variant=implementation.plan(call.inputs, call.precision).variant,
        precision=str(call.precision),
        launch_count=len(all_launches),
        launches=tuple(with_occupancy(launch, call.device) for launch in launches),
    )


@torch.no_grad()
def profiled(call: Call) -> None:
    """Make the call that ncu profiles, inside the NVTX range."""
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_push(ncu.RANGE)  # type: ignore[no-untyped-call]
    call.run()
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


# --- lines of callers

# Versions of Triton that ask for it add this to the keys of compiled kernels in Triton's cache, so
# that kernels with replaced lines are told from others.
_KEY = "ssdprof: lines of callers"
# in PTX: the number and the path of a file; a .loc with the comment that has the chain of calls;
# and a file, line and column in such a chain
_FILE = re.compile(r'^\s*\.file\s+(\d+) "([^"]+)"', re.MULTILINE)
_LOC = re.compile(r"^(\s*\.loc\s+)(\d+) (\d+) (\d+)(\s*//\s*)(.+)$", re.MULTILINE)
_FRAME = re.compile(r"([^\s@\[\]:]+):(\d+):(\d+)")


def install() -> None:
    """Replace the lines of every kernel that Triton compiles in this process from now on: see
    `name_call_sites`.

    Triton 3.6 does not ask for a part of its cache's key, so TRITON_CACHE_DIR must be a folder
    without kernels that other processes compiled.
    """
    triton.knobs.runtime.add_stages_inspection_hook = _hook


def _hook(*arguments: Any) -> tuple[str, str] | None:
    """A hook of Triton's compiler, which makes its stage "ptx" replace the lines in PTX.

    Triton calls the hook without arguments to get a part of its cache's key, and a hash
    of it.  Otherwise the second argument is a dictionary of the compiler's stages, which the hook
    changes, and the result is None.
    """
    if not arguments:
        return _KEY, _KEY
    stages: dict[str, Callable[..., str]] = arguments[1]
    make_ptx = stages.get("ptx")
    if make_ptx is not None:

        def make_with_call_sites(*module_and_metadata: object) -> str:
            return name_call_sites(make_ptx(*module_and_metadata))

        stages["ptx"] = make_with_call_sites
    return None


def name_call_sites(ptx: str, sources: SourceFiles | None = None) -> str:
    """The PTX with every .loc at the innermost line of its chain of calls that has a stage.

    A .loc without a comment is unchanged, and one in whose chain no line has a known stage.

    sources: the files that the PTX names; None to read them on this machine.
    """
    files = dict(_FILE.findall(ptx))
    known = sources or SourceFiles({path: _text(path) for path in files.values()})
    # name of a file without its folder -> the numbers of such files
    numbers: dict[str, list[str]] = defaultdict(list)
    for number, path in files.items():
        numbers[base_name(path)].append(number)

    def innermost(loc: re.Match[str]) -> str:
        """The .loc with the innermost line of its chain that has a stage, or as it is."""
        before, _, _, _, remark, chain = loc.groups()
        for name, line, column in _FRAME.findall(chain):
            for number in numbers.get(name, ()):
                if known.stage_of(files[number], int(line)).stage not in (None, UNKNOWN):
                    return f"{before}{number} {line} {column}{remark}{chain}"
        return loc[0]

    return _LOC.sub(innermost, ptx)


def _text(path: str) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


if __name__ == "__main__":
    main()
