import fcntl
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils._device
from torch import Tensor


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN (or -1) until a kernel writes it."""

    def poison(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate_poisoned(*args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            tensor.detach().fill_(torch.nan if tensor.is_floating_point() else -1)
            return tensor

        return allocate_poisoned

    # kept by torch for `with torch.device`: with the real functions
    torch.utils._device._device_constructors()
    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch, "empty_strided", poison(torch.empty_strided))
    monkeypatch.setattr(Tensor, "new_empty", poison(Tensor.new_empty))


def emulate_on(monkeypatch: pytest.MonkeyPatch, device: str, *operators: str) -> None:
    """The Hopper kernels run in the emulator, if the device is "emulator"."""
    from gluon_emulator import GDN, KDA, SSD, emulate

    for operator in operators if device == "emulator" else ():
        emulate(monkeypatch, seed=1, source={"ssd": SSD, "gdn": GDN, "kda": KDA}[operator])


@pytest.fixture
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The `Target` that a test gets from `targets`."""
    emulate_on(monkeypatch, request.param.device, request.param.operator)
    return request.param


@pytest.fixture(params=["emulator", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where tensors lie in a test of the Hopper kernels in the emulator and on a GPU."""
    emulate_on(monkeypatch, request.param, "ssd", "gdn")
    if request.param == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")
    return "cuda" if request.param == "cuda" else "cpu"


@pytest.fixture
def much_gpu_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tens of gigabytes of GPU memory, for one test at a time across all test processes; freed
    afterwards.
    """
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with (shared / "much_gpu_memory.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        gc.collect()
        torch.cuda.empty_cache()
