import gc
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import typer.main
import typer.testing

# one process per core, where more threads would wait; sums, and with them goldens, depend on their
# number
os.environ.setdefault("OMP_NUM_THREADS", "1")
# otherwise a call of the command line in a test's process builds all commands again
typer.testing._get_command = cache(typer.main.get_command)


def pytest_configure(config: pytest.Config):
    # in a shell's background, tests of Ctrl-C would fail
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # numpy's warning about every loop over a tensor in Triton's interpreter
    config.addinivalue_line(
        "filterwarnings", "ignore:Conversion of an array:DeprecationWarning:triton"
    )


def pytest_collection_finish():
    """Freezes imported objects.  Otherwise a timer that first collects garbage would scan all of
    them each time.
    """
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item):
    """Every test draws the same random numbers, in any order of tests.  Without a GPU, `-m gpu`
    skips with a reason.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")


@pytest.fixture
def registries_of_its_own(monkeypatch):
    """Removes the implementations and operators that the test registers, and keeps the bundled
    ones.
    """
    from ssdprof import kernels, operators
    from ssdprof.kernels import registry

    kernels.get("ssd", "reference")  # registers all bundled ones; their modules do so only once
    monkeypatch.setattr(registry, "_implementations", dict(registry._implementations))
    monkeypatch.setattr(operators, "_OPERATORS", dict(operators._OPERATORS))


@pytest.fixture
def exact_kernels(registries_of_its_own: None):
    """unfused, fused and recurrent return the exact output: the interpreter is slow."""
    from ssdprof.kernels import registry
    from ssdprof.measure.accuracy import oracle_output

    for key, old in list(registry._implementations.items()):
        if key[1] in ("unfused", "fused", "recurrent"):
            registry._implementations[key] = replace(
                old, run=lambda inputs, _precision: oracle_output(inputs)
            )


@pytest.fixture
def small_guards(monkeypatch):
    """4 KiB around a kernel's tensors instead of 1 MiB, which takes longer to look at than the
    tensors.
    """
    monkeypatch.setattr("ssdprof.measure.isolate.GUARD_BYTES", 1 << 12)


@pytest.fixture
def in_empty_folder(tmp_path, monkeypatch):
    """The test runs in an empty folder, and prints without colours."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def users_folder(in_empty_folder: None, tmp_path, monkeypatch) -> Iterator[Path]:
    """The current folder of the test, for a user's modules.  Modules imported from it are removed
    after the test.
    """
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield tmp_path
    for name in sys.modules.keys() - known:
        if tmp_path in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
            del sys.modules[name]
