"""Properties of GPUs that kernels depend on.  They are cached, because a query takes much of the time of a launch."""

from functools import cache

import torch


def is_there_one() -> bool:
    """Whether there is a GPU.

    Asks NVML if possible, which does not start the driver: a process forked after its start could not use the driver.
    """
    return torch.cuda.device_count() > 0


def capability(tensor: torch.Tensor) -> tuple[int, int]:
    """Compute capability, (9, 0) for Hopper."""
    return _properties(tensor.get_device())[0]


def sm_count(tensor: torch.Tensor) -> int:
    """Number of multiprocessors."""
    return _properties(tensor.get_device())[1]


@cache
def _properties(index: int) -> tuple[tuple[int, int], int]:
    properties = torch.cuda.get_device_properties(index)
    return (properties.major, properties.minor), properties.multi_processor_count


def name(tensor: torch.Tensor) -> str:
    """Name of the GPU, for example "NVIDIA H200"; "cpu" for a tensor on the CPU."""
    return _name(tensor.get_device())


@cache
def _name(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).name) if index >= 0 else "cpu"
