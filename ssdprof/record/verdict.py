"""Compares the outputs of a recorded call with the error budget.  Imports the kernels of all
operators, because the recorder's thread must not import any module.
"""

from dataclasses import replace

import torch

from ssdprof import kernels, operators
from ssdprof.core.case import CLOSE
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.precision import Precision
from ssdprof.measure.accuracy import Candidate, compare
from ssdprof.measure.diagnosis import diagnosed
from ssdprof.operators.operator import OutputPair
from ssdprof.record.settings import GIGABYTE

# with at least so many bytes of a GPU free, the comparison with the oracle runs there, otherwise on
# the host
_ORACLE_BYTES = 10 * GIGABYTE

kernels.get("ssd", "reference")  # imports the kernels of all operators


def why_outside_budget(inputs: Inputs, served: OutputPair) -> str:
    """Why the output of a server is outside the error budget of `ssdprof run`.  Empty if it is not,
    if the relative RMS errors of out and of the states are at most `CLOSE`, or if both differ from
    the bundled kernel's by at most half of `CLOSE`.

    inputs: of a packed call, with gates after their activations.
    served: out and final states that the server computed, without NaN and infinity.

    The comparison with the bundled kernel runs on the tensors' device, in the current stream.  The
    fp64 oracle runs there too if `_ORACLE_BYTES` are free, otherwise on the host.  It takes as much
    time as hundreds of calls, so it is used only if the output differs from that of the bundled
    kernel, whose own error is far below `CLOSE`, by more than half of `CLOSE`.

    Raises BadInputError if no bundled kernel can compute the call, and UnsupportedError if it is a
    verification that `recurrent` refuses.
    """
    are_close = [
        (served_tensor.float() - tensor.float()).norm() <= CLOSE / 2 * tensor.float().norm()
        for served_tensor, tensor in zip(served, _bundled(inputs), strict=True)
    ]
    if all(are_close):
        return ""
    out, states = served
    if out.is_cuda and torch.cuda.mem_get_info()[0] < _ORACLE_BYTES:
        # the oracle then runs on the host, so that it takes no memory from the server
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


def _bundled(inputs: Inputs) -> OutputPair:
    """The output of a bundled kernel; on the CPU, of the operator's chunked form in fp32.

    Only `recurrent` returns the state after each token of a verification.
    """
    if inputs.state_every and inputs.device.type == "cuda":
        return kernels.get(inputs.operator, "recurrent").run(inputs, Precision())
    return operators.get(inputs.operator).binding.replacement(inputs)
