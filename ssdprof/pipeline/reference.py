"""The reference of a model's answers: the model with its operators computed by a reference.

To measure noise, the same reference also runs on inputs changed in the last bit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ssdprof import operators
from ssdprof.capture.forward import PromptRun, hidden_states
from ssdprof.capture.intercept import OperatorCall, Result
from ssdprof.checkpoint.meta import Mixer
from ssdprof.measure.oracle import oracle_output
from ssdprof.operators import tensors
from ssdprof.pipeline.answers_request import Reference as Wanted
from ssdprof.pipeline.substitute import Compute, implemented
from ssdprof.schema import EXACT_FP32

LONGEST_S = 300.0  # limit of the oracle's time for all runs of a prompt, estimated from a piece
PIECE = 2048  # tokens from which the estimate is made
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True, kw_only=True)
class Reference:
    """name: for the report.  remark: the reason of the choice, in a sentence; empty for the oracle."""

    compute: Compute
    name: str
    remark: str = ""


def oracle(call: OperatorCall) -> Result:
    """The fp64 oracle, rounded once to the dtypes of the operator's output."""
    return oracle_output(call.inputs)


def baseline(sites: Sequence[Mixer]) -> Compute:
    """The operator's baseline implementation, exact, with fp32 states."""
    return implemented(baseline_name(sites), EXACT_FP32, sites)


def baseline_name(sites: Sequence[Mixer]) -> str:
    """The name of the baseline: a model has one kind of operator."""
    return operators.get(sites[0].operator).baseline


def choose(wanted: Wanted, prompt: PromptRun, runs: float) -> Reference:
    """The oracle, or the baseline if requested or if the oracle would take longer than `LONGEST_S`.

    runs: number of runs of the model on the reference; a run with it in some layers counts as a fraction.
    """
    if wanted == "unfused":
        return _baseline(prompt, "--reference names it.")
    if wanted == "auto" and prompt.ids.shape[1] > 2 * PIECE:
        seconds = runs * _oracle_seconds(prompt)
        if seconds > LONGEST_S:
            return _baseline(
                prompt,
                f"The fp64 oracle would take about {seconds / 60:.0f} min, estimated from {PIECE:,} tokens; "
                "--reference oracle uses it anyway.",
            )
    return Reference(compute=oracle, name="fp64 oracle")


def _baseline(prompt: PromptRun, remark: str) -> Reference:
    return Reference(
        compute=baseline(prompt.mixers), name=f"{baseline_name(prompt.mixers)} {EXACT_FP32}", remark=remark
    )


def _oracle_seconds(prompt: PromptRun) -> float:
    """Seconds of a run of the model on the oracle, from a piece of the prompt.  The first run is a warm-up."""
    piece = replace(prompt, ids=prompt.ids[:, :PIECE], segment_length=PIECE)
    for _ in range(2):
        began = time.monotonic()
        hidden_states(piece, oracle).cpu()  # waits for the device
        seconds = time.monotonic() - began
    return seconds * prompt.ids.shape[1] / PIECE


def with_moved_bits(compute: Compute) -> Compute:
    """`compute` on inputs with the last bit of each element flipped.

    This changes the tensors that a model writes into one tensor (x, B and C of SSD, q, k and v of GDN).  Half of the
    numbers become larger and the others smaller, by half to one unit in the last place, as after a different rounding
    before the operator.  Zeros are not changed, because their last bit is a number of another magnitude.
    """

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        bits = tensor.view(_INTEGERS[tensor.element_size()])
        return torch.where(tensor == 0, tensor, (bits ^ 1).view(tensor.dtype))

    def run(call: OperatorCall) -> Result:
        views = operators.get(call.mixer.operator).door.views
        changed = {name: moved(tensor) for name, tensor in tensors.tensors(call.inputs).items() if name in views}
        return compute(replace(call, inputs=replace(call.inputs, **changed)))

    return run


def in_other_chunks(compute: Compute) -> Compute:
    """`compute` with chunks of half the length, if the operator's inputs have a chunk size that can be halved."""

    def run(call: OperatorCall) -> Result:
        chunk = getattr(call.inputs, "chunk_size", 0)
        if chunk < 32:
            return compute(call)
        return compute(replace(call, inputs=replace(call.inputs, chunk_size=chunk // 2)))

    return run
