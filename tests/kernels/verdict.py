"""The verdict of the comparator, for tests of kernels."""

from ssdprof.kernels.inputs import Inputs, Output
from ssdprof.kernels.precision import Precision
from ssdprof.measure.accuracy import Candidate, compare


def assert_passes(output: Output, inputs: Inputs, precision: Precision) -> None:
    """AssertionError with the reason unless the output passes."""
    candidate = Candidate(output=output, precision=precision)
    reasons = [accuracy.reason for accuracy in compare(inputs, {"": candidate})[""]]
    assert not any(reasons), "; ".join(filter(None, reasons))
