"""Inputs that no model has but a faulty recording may have: outside the domain of the operator's
formulas, the same in every position, or 0 in most positions.
"""

from collections.abc import Iterable, Iterator

from torch import Tensor

from ssdprof.kernels.inputs import Inputs
from ssdprof.operators.operator import Operator

MANY = 0.1  # least share of elements outside the domain that is a fault; fewer may be padding
MOST = 0.6  # least share of positions with only zeros that is a fault; fewer may be padding
LONGEST_KEY = 2.0  # l2 norm of k in calls that do not normalise it; a normalised k has about 1


def doubts(operator: Operator, inputs: Inputs) -> Iterator[str]:
    """A sentence for each fault of the inputs that makes results worthless, however accurate they
    are.
    """
    tensors = operator.binding.positional(inputs)
    for name, values in tensors.items():
        is_zero = (values == 0).flatten(2).all(-1)
        if values.shape[1] > 1 and bool((values == values[:, :1]).all()):
            content = "the same" if values.any() else "0"
            yield f"{name} is {content} in every position, so that wrong kernels may pass."
        elif float(is_zero.float().mean()) >= MOST:
            yield f"{name} is 0 in most positions, so that wrong kernels may pass."
    faults: Iterable[tuple[str, Tensor, str]] = ()
    if "g" in tensors:
        faults = _faults_of_delta_rule(inputs)
    elif "dt" in tensors:
        faults = _faults_of_ssd(inputs)
    for fault, is_outside, consequence in faults:
        share = float(is_outside.float().mean())
        if share >= MANY:
            extent = "all" if share == 1 else "many"
            where = "heads" if is_outside.ndim == 1 else "positions"
            yield f"{fault} in {extent} {where}: {consequence}."


def _faults_of_delta_rule(inputs: Inputs) -> Iterator[tuple[str, Tensor, str]]:
    """Faults that inputs of GDN and KDA may have: (a clause that names the fault; a mask of the
    elements that have it; what follows from it).  A mask is that of a tensor (b, l, ...), or of a
    parameter (h).
    """
    tensors = inputs.tensors
    yield (
        "g is above 0",
        tensors["g"] > 0,
        "it is no logarithm of a decay, counts as 0 there, and nothing is forgotten",
    )
    beta = tensors["beta"]
    yield (
        "beta is below 0 or above 2",
        (beta < 0) | (beta > 2),
        "it is no sigmoid, nor twice one, and states grow",
    )
    if not inputs.scalars["use_qk_l2norm"]:
        yield (
            f"k is longer than {LONGEST_KEY:g} and the call asks for no norm",
            tensors["k"].float().norm(dim=-1) > LONGEST_KEY,
            "states grow",
        )


def _faults_of_ssd(inputs: Inputs) -> Iterator[tuple[str, Tensor, str]]:
    """Faults that inputs of SSD may have, in the form of `_faults_of_delta_rule`."""
    tensors = inputs.tensors
    yield (
        "A is not below 0",
        tensors["A"] >= 0,
        "it is not minus an exponential, and nothing is forgotten",
    )
    if not inputs.scalars["dt_softplus"]:
        dt = tensors["dt"].float()
        if "dt_bias" in tensors:
            dt = dt + tensors["dt_bias"].float()
        yield "dt is below 0 and the call asks for no softplus", dt < 0, "it is no time step"
