"""The fp64 recurrence on captured inputs, and the tolerance for results."""

from typing import Any

import torch

from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.gdn.reference import gdn_recurrence
from ssdprof.kernels.ssd.reference import ssd_recurrence

FP32_ROUNDING = 5e-5  # of the largest value: a few hundred roundings through the layers


def oracle(inputs: Any) -> Any:
    return (gdn_recurrence if isinstance(inputs, GDNInputs) else ssd_recurrence)(inputs, torch.float64)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest deviation, relative to the largest value."""
    return float((one.double() - other.double()).abs().max() / other.double().abs().max())
