"""The kernels of the studies compile for Hopper without a GPU, fit it, and spill only where the study says so."""

import os
from pathlib import Path

import pytest
from kernels.compile_target import SHARED_BYTES, Compiled, compiled
from studies.inter_chunk_kernels import LAUNCHES as INTER_CHUNK

pytestmark = pytest.mark.compiler

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("tests", "tests/studies", "benchmarks/studies")


@pytest.fixture(scope="module")
def inter_chunk() -> dict[str, list[Compiled]]:
    return compiled_here("inter_chunk_kernels")


def compiled_here(module: str) -> dict[str, list[Compiled]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(str(ROOT / folder) for folder in FOLDERS))
        return compiled(module, 90)


@pytest.mark.parametrize("label", INTER_CHUNK)
def test_the_inter_chunk_kernels(inter_chunk: dict[str, list[Compiled]], label: str) -> None:
    kernels = inter_chunk[label]
    assert kernels
    for kernel in kernels:
        assert kernel.spilled_bytes == 0, kernel
        assert kernel.shared_bytes <= SHARED_BYTES[90], kernel
        assert kernel.fuses, "a loop and a chain would round differently"
        assert kernel.metadata["bytes"] > 0
