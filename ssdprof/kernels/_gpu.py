"""Properties of GPUs that kernels depend on.  Cached: a query takes a good part of the time before a launch."""

from functools import cache

import torch


def is_there_one() -> bool:
    """Asked without starting the driver, where NVML answers: a process forked afterwards could not use it."""
    return torch.cuda.device_count() > 0


def capability(tensor: torch.Tensor) -> tuple[int, int]:
    """Compute capability, (9, 0) for Hopper."""
    return _properties(tensor.get_device())[0]


def sm_count(tensor: torch.Tensor) -> int:
    """Multiprocessors."""
    return _properties(tensor.get_device())[1]


@cache
def _properties(index: int) -> tuple[tuple[int, int], int]:
    properties = torch.cuda.get_device_properties(index)
    return (properties.major, properties.minor), properties.multi_processor_count


def name(tensor: torch.Tensor) -> str:
    """ "NVIDIA H200"; "cpu" where there is no GPU."""
    return _name(tensor.get_device())


@cache
def _name(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).name) if index >= 0 else "cpu"
