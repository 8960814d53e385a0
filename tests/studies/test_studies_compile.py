"""The kernels of the studies compile for Hopper without a GPU, fit it, and spill only if the study says so."""

import os
from pathlib import Path

import pytest
from kernels.compile_target import SHARED_BYTES, Compiled, compiled
from studies.inter_chunk_kernels import LAUNCHES as INTER_CHUNK
from studies.selective_scan_launches import LAUNCHES as SELECTIVE_SCAN

pytestmark = pytest.mark.compiler

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("tests", "tests/studies", "benchmarks/studies")


def compiled_here(module: str) -> dict[str, list[Compiled]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(str(ROOT / folder) for folder in FOLDERS))
        return compiled(module, 90)


@pytest.mark.parametrize("label", INTER_CHUNK)
def test_the_inter_chunk_kernels(label: str) -> None:
    for kernel in compiled_here("inter_chunk_kernels")[label]:
        assert kernel.spilled_bytes == 0, kernel
        assert kernel.shared_bytes <= SHARED_BYTES[90], kernel
        assert kernel.fuses, "a loop and a chain would round differently"
        assert kernel.metadata["bytes"] > 0


@pytest.mark.parametrize("label", SELECTIVE_SCAN)
def test_the_scans(label: str) -> None:
    """Tiles of 256 and 512 positions spill with four warps; the study measures the cost."""
    (kernel,) = compiled_here("selective_scan_launches")[label]
    spills = label.endswith(("256", "512"))
    assert (kernel.spilled_bytes > 0) == spills, kernel
    assert kernel.shared_bytes <= SHARED_BYTES[90], kernel
    assert kernel.fuses
    assert kernel.metadata["flops"] > 0
