"""Computes a recorded call again.  Importing it imports all kernels."""

from dataclasses import replace

import torch

from ssdprof import kernels, operators
from ssdprof.core.case import CLOSE
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.precision import Precision
from ssdprof.measure.accuracy import Candidate, compare
from ssdprof.measure.diagnosis import diagnosed
from ssdprof.operators.operator import Output
from ssdprof.record.settings import GIGABYTE

_ROOM_BYTES = 10 * GIGABYTE  # of free memory of a GPU, for a comparison with the oracle

for _operator in operators.names():
    kernels.get(_operator, "reference")


def outside_budget(inputs: Inputs, served: Output) -> str:
    """Why what a server computed is outside the budget that `ssdprof run` has for it; empty if it
    is not.

    Computed on their device, on this thread's stream.  Our kernel, which is well inside of the
    budget, decides on most calls; the fp64 oracle takes as much time as hundreds of calls.
    """
    ours = operators.get(inputs.operator).binding.replacement(inputs)
    distances = [
        (theirs.float() - exact.float()).norm() / exact.float().norm()
        for theirs, exact in zip(served, ours, strict=True)
    ]
    if all(bool(distance <= CLOSE / 2) for distance in distances):
        return ""
    out, states = served
    if out.is_cuda and torch.cuda.mem_get_info()[0] < _ROOM_BYTES:
        tensors = {name: tensor.cpu() for name, tensor in inputs.tensors.items()}
        inputs = replace(inputs, **tensors)
        out, states = out.cpu(), states.cpu()
    candidate = Candidate(
        output=(out, states.float()), precision=Precision(state_dtype=states.dtype)
    )
    accuracies = compare(inputs, {"served": candidate})["served"]
    ratios = [accuracy.vs_oracle.rms_ratio for accuracy in accuracies]
    if all(ratio is not None and ratio <= CLOSE for ratio in ratios):
        return ""
    reasons = [accuracy.reason for accuracy in diagnosed(inputs, candidate, accuracies)]
    return next(filter(None, reasons), "")
