"""What the compiler calls a line of our kernels is one: in a file of ours inside a kernel, or in Triton's library.

Profilers know no more than that.  A function that Triton builds without calling it may be filed under the wrong file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ssdprof.stalls.stages import UNKNOWN, Sources

TESTS = Path(__file__).parent.parent
COMPILE = """
import re, sys
from compile_target import _AbsentGpu, on_meta
from ssd_cases import EXACT, Case
import torch, triton
from triton.runtime.jit import JITFunction
from ssdprof.kernels.ssd.fused_config import FusedConfig
from ssdprof.kernels.ssd.fused_portable import ssd_fused_portable
from ssdprof.kernels.ssd import hopper_launch
from ssdprof.kernels.ssd.unfused import five_stages

triton.runtime.driver.set_active(_AbsentGpu(90))
run = JITFunction.run
def compile_only(self, *args, grid, warmup, **kwargs):
    ptx = run(self, *args, grid=grid, warmup=True, **kwargs).asm["ptx"]
    files = dict(re.findall(r'\\.file\\s+(\\d+) "([^"]+)"', ptx))
    for number, line in sorted(set(re.findall(r"\\.loc\\s+(\\d+) (\\d+)", ptx))):
        if line != "0":
            print(self.__name__, files[number], line, sep="|")
JITFunction.run = compile_only
inputs = on_meta(Case(seqlen=1024, heads=4, headdim=64, dstate=128, dtype=torch.bfloat16).inputs())
five_stages(inputs, EXACT)
ssd_fused_portable(inputs, EXACT, config=FusedConfig.choose(inputs, (9, 0)))
hopper_launch.ssd_fused_hopper(inputs, EXACT, config=hopper_launch.HopperConfig(segment=4))
"""


@pytest.fixture(scope="module")
def lines() -> list[tuple[str, str, int]]:
    """(kernel, file, line) of everything that was compiled."""
    path = os.pathsep.join([str(TESTS / "kernels"), str(TESTS.parent)])
    environ = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": path}
    result = subprocess.run([sys.executable, "-c", COMPILE], env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return [(kernel, file, int(line)) for kernel, file, line in (row.split("|") for row in result.stdout.splitlines())]


def test_every_kernel_was_compiled(lines: list[tuple[str, str, int]]) -> None:
    assert {kernel for kernel, _, _ in lines} >= {
        "_chunk_cumsum_kernel", "_chunk_state_kernel", "_state_passing_kernel", "_bmm_chunk_kernel",
        "_chunk_scan_kernel", "_fused_kernel", "_fused_hopper_kernel",
    }  # fmt: skip


def test_every_line_has_a_stage_or_belongs_to_its_caller(lines: list[tuple[str, str, int]]) -> None:
    sources = Sources({file: Path(file).read_text() for _, file, _ in lines})
    lost = sorted({row for row in lines if sources.place(row[1], row[2]).stage == UNKNOWN})
    assert not lost


def test_every_stage_that_a_kernel_names_is_compiled_somewhere(lines: list[tuple[str, str, int]]) -> None:
    sources = Sources({file: Path(file).read_text() for _, file, _ in lines})
    for kernel in ("_fused_kernel", "_fused_hopper_kernel"):
        found = {sources.place(file, line).stage for name, file, line in lines if name == kernel}
        assert {
            "ticket", "chunk_cumsum", "bmm_chunk", "state_passing.wait", "state_passing.load", "state_passing.store",
            "chunk_scan.previous", "chunk_scan.current", "chunk_scan.residual",
        } <= found  # fmt: skip
