"""Makes the first call of a user's kernel in a separate process, so that a crash does not end this one.

A call that hangs is stopped; one that crashes takes its own process with it, and its own CUDA context.  All tensors of
the call lie between guards.

    python -m ssdprof.measure.rehearsal FOLDER

FOLDER holds the call, and gets a `Verdict`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch

from ssdprof import operators, schema
from ssdprof.environment import child
from ssdprof.errors import MissingCapabilityError, how_ended, printable
from ssdprof.kernels.registry import Implementation
from ssdprof.measure.attempt import Attempt, attempt
from ssdprof.measure.call import Call, UnfitError, call_of
from ssdprof.measure.faults import type_and_message
from ssdprof.measure.guard import GuardedInputs, guarded_allocations, unwritten
from ssdprof.operators import own, tensors
from ssdprof.operators.named import Named

FIRST_CALL_S = 180.0
_START_S = 120.0  # for importing torch and loading the inputs, also on a busy machine
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL")
_STOPPED = 124  # exit code of a process that took too long
_CALL, _VERDICT, _WORDS = "call.pt", "verdict.json", "words.txt"


class Verdict(schema.Record):
    """The result of a first call.  status: "passed" means only that the call may be made here."""

    status: Literal["passed"] | schema.Fault
    reason: str = ""


class Rehearsals:
    """First calls of users' kernels, one for each precision and each form of the inputs.  limit_s: seconds for one."""

    def __init__(self, limit_s: float = FIRST_CALL_S) -> None:
        self._limit_s = limit_s
        self._verdicts: dict[Hashable, Verdict] = {}

    def require(self, named: Named, inputs: Any, precision: schema.PrecisionRecord) -> None:
        """UnfitError if the kernel fails at its first call on inputs of this form, now or earlier."""
        key = (named.source, precision, tensors.form(inputs))
        if key not in self._verdicts:
            self._verdicts[key] = _rehearsed(named, inputs, precision, self._limit_s)
        verdict = self._verdicts[key]
        if verdict.status != "passed":
            raise UnfitError(verdict.status, verdict.reason)


def _rehearsed(named: Named, inputs: Any, precision: schema.PrecisionRecord, limit_s: float) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="ssdprof-") as name:
        folder = Path(name)
        request = {
            "operator": operators.of(inputs).name,
            "name": named.name,
            "source": named.source,
            "precision": precision.model_dump(),
            "arguments": tensors.tensors(inputs) | tensors.scalars(inputs),
            "limit_s": limit_s,
        }
        torch.save(request, folder / _CALL)
        tensors.release_cache(inputs)
        command = [*child.python("ssdprof.measure.rehearsal"), name]
        code = _run(command, folder / _WORDS, limit_s + _START_S)
        if code == 0 and (folder / _VERDICT).is_file():
            return Verdict.model_validate_json((folder / _VERDICT).read_text(encoding="utf-8"))
        words = (folder / _WORDS).read_text(encoding="utf-8", errors="replace").split("\n")
    return Verdict(status="failed", reason=_death(code, limit_s, next((line for line in words[::-1] if line), "")))


def _run(command: list[str], words: Path, timeout_s: float) -> int:
    """The exit code of a command, `_STOPPED` if it takes too long.  Its output goes into a file.

    In any case, no process of its group is left.
    """
    environment = {name: value for name, value in os.environ.items() if not _SECRET.search(name)}
    with (
        words.open("wb") as file,
        subprocess.Popen(
            command,
            env=environment | child.search_path(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return _STOPPED
        finally:
            with suppress(ProcessLookupError):  # no process of the group is left
                os.killpg(process.pid, signal.SIGKILL)


def _death(code: int, limit_s: float, last_words: str) -> str:
    """The reason why a process with this exit code left no verdict."""
    if code == _STOPPED:
        return f"its first call was stopped after {limit_s:g} s"
    if code < 0:
        return f"its first call ended its process by {how_ended(code)}"
    words = printable(last_words)
    return f"its first call ended its process with {how_ended(code)}{f': {words}' if words else ''}"


# --- in the other process


def main() -> None:
    """Make the call that the folder describes, and write the verdict."""
    folder = Path(sys.argv[1])
    request = torch.load(folder / _CALL, weights_only=True)
    operator = operators.get(request["operator"])
    function = own.load(request["source"])
    implementation = own.implementation(operator, request["name"], function)
    inputs = operator.inputs(**request["arguments"])
    watchdog = threading.Timer(request["limit_s"], os._exit, (_STOPPED,))
    watchdog.daemon = True
    watchdog.start()
    verdict = judged(implementation, inputs, schema.PrecisionRecord(**request["precision"]))
    watchdog.cancel()
    (folder / _VERDICT).write_text(verdict.model_dump_json(), encoding="utf-8")


@torch.no_grad()
def judged(implementation: Implementation, inputs: Any, precision: schema.PrecisionRecord) -> Verdict:
    """Make the first call, and check the memory around its tensors."""
    guarded = GuardedInputs(inputs)
    call = call_of(implementation, guarded.inputs, precision, damage=guarded.damage)
    with guarded_allocations() as damage:
        tried = _attempt(call)
        if tried.output is None:
            return Verdict(status=tried.status, reason=tried.reason)
        if words := damage():
            return Verdict(status="failed", reason=words)
    for name, tensor in zip(("out", "final_states"), tried.output, strict=True):
        if elements := unwritten(tensor):
            return Verdict(status="failed", reason=f"it leaves {elements:,} elements of {name} unwritten")
    return Verdict(status="passed")


def _attempt(call: Call) -> Attempt:
    try:
        return attempt(call)
    except MissingCapabilityError as error:  # the GPU is unusable for this process, which ends here
        cause = error.__cause__ or error
        return Attempt(status="failed", reason=type_and_message(cause))


if __name__ == "__main__":
    main()
