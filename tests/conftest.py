import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # one process per core already: more threads only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background, where tests of Ctrl-C would fail
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # numpy's, about every loop over a tensor in Triton's interpreter
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array:DeprecationWarning:triton")


def pytest_collection_finish() -> None:
    """What was imported stays: a timer that collects garbage first would otherwise go through all of it each time."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Every test draws the same random numbers, whatever ran before.  Without a GPU, `-m gpu` skips and says why."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")


@pytest.fixture
def registries_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The implementations and operators that the test registers are gone after it; what is bundled stays registered."""
    from ssdprof import kernels, operators
    from ssdprof.kernels import registry

    kernels.get("ssd", "reference")  # registers all that are bundled, and their modules do so only once
    monkeypatch.setattr(registry, "_implementations", dict(registry._implementations))
    monkeypatch.setattr(operators, "_registered", dict(operators._registered))


@pytest.fixture
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs in a folder of its own, and prints without colours."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def users_folder(in_empty_folder: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:  # noqa: ARG001
    """The folder that the test runs in, for modules of a user: what is imported from it is forgotten after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield tmp_path
    for name in sys.modules.keys() - known:
        if tmp_path in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
            del sys.modules[name]
