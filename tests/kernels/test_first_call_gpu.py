"""On a GPU: nobody waits more than two seconds for a kernel to be compiled, and nothing is tuned in a first call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import triton
from ssd_cases import EXACT, RELAXED, Case

from ssdprof.kernels.precision import Precision

MOST_SECONDS = 2.0  # for one kernel, by Triton's own clock
BF16, FP32 = torch.bfloat16, torch.float32
MAMBA2 = Case(seqlen=4096, heads=80, headdim=64, dstate=128, dtype=BF16, device="cuda")
HYBRID = Case(heads=128, headdim=80, dstate=128, groups=8, dtype=BF16, device="cuda")
LARGE = Case(heads=32, headdim=128, dstate=256, dtype=BF16, device="cuda")
LENGTHS = (600, 9, 0, 2048)

# (case, implementation, precision)
CASES: dict[str, tuple[Case, str, Precision]] = {
    "hopper": (MAMBA2, "fused", EXACT),
    "hopper relaxed": (MAMBA2, "fused", RELAXED),
    "hopper, one segment": (Case(**vars(MAMBA2) | {"seqlen": 1024, "batch": 32}), "fused", EXACT),
    "hopper, packed": (Case(**vars(MAMBA2) | {"lengths": LENGTHS}), "fused", EXACT),
    "hopper, n 64": (Case(**vars(MAMBA2) | {"dstate": 64}), "fused", EXACT),
    "hopper, packed, p 80": (Case(**vars(HYBRID) | {"lengths": LENGTHS, "initial_states": True}), "fused", EXACT),
    "portable, gate": (Case(**vars(MAMBA2) | {"gate": True}), "fused", EXACT),
    "hopper, n 256": (Case(**vars(LARGE) | {"seqlen": 4096}), "fused", EXACT),
    "hopper, n 256, packed": (Case(**vars(LARGE) | {"lengths": LENGTHS, "initial_states": True}), "fused", RELAXED),
    "portable, n 256, gate": (Case(**vars(LARGE) | {"seqlen": 4096, "gate": True}), "fused", EXACT),
    "portable, fp32": (Case(**vars(MAMBA2) | {"dtype": FP32}), "fused", EXACT),
    "unfused": (Case(**vars(MAMBA2) | {"chunk_size": 256}), "unfused", EXACT),
    "unfused, packed, fp32": (
        Case(**vars(HYBRID) | {"lengths": LENGTHS, "dtype": FP32, "gate": True, "chunk_size": 128}),
        "unfused",
        EXACT,
    ),
}


@cache
def compiled() -> dict[str, dict[str, float]]:
    """Label -> kernel -> seconds: the least of up to three, because a rented processor does other work as well."""
    least = _in_a_new_process()
    for _ in range(2):
        if max(max(kernels.values()) for kernels in least.values()) <= MOST_SECONDS:
            break
        again = _in_a_new_process()
        least = {
            label: {name: min(seconds, again[label][name]) for name, seconds in kernels.items()}
            for label, kernels in least.items()
        }
    print(json.dumps(least, indent=1))
    return least


def _in_a_new_process() -> dict[str, dict[str, float]]:
    """With an empty cache."""
    with TemporaryDirectory(prefix="ssdprof-") as folder:
        result = subprocess.run(
            [sys.executable, __file__],
            env=os.environ | {"TRITON_CACHE_DIR": folder, "TRITON_INTERPRET": "0"},
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    assert result.returncode == 0, result.stderr
    seconds: dict[str, dict[str, float]] = json.loads(result.stdout)
    return seconds


@pytest.mark.gpu
@pytest.mark.parametrize("label", CASES)
def test_no_kernel_takes_long_to_compile(label: str) -> None:
    seconds = compiled()[label]
    assert seconds, "nothing was compiled: the cache was not empty"
    assert max(seconds.values()) <= MOST_SECONDS, seconds


@pytest.mark.gpu
@pytest.mark.parametrize("label", CASES)
def test_no_kernel_is_tuned(label: str) -> None:
    """An autotuner would compile a kernel once for each configuration."""
    kernels = [name.split()[1] for name in compiled()[label]]
    assert len(kernels) == len(set(kernels)), kernels


@triton.jit
def _nothing() -> None:
    """Compiled first, it pays for what Triton does once in a process: it hashes itself, 400 MB of its compiler too."""


def _measure() -> dict[str, dict[str, float]]:
    from ssdprof import kernels
    from ssdprof.bench.first_call import Patience, first_call

    _nothing[(1,)]()
    result = {}
    for label, (case, implementation, precision) in CASES.items():
        inputs = case.inputs()
        run = kernels.get("ssd", implementation).run
        _, first = first_call(lambda: run(inputs, precision), inputs.x.device, Patience())  # noqa: B023
        result[label] = {f"{number} {one.kernel}": one.seconds for number, one in enumerate(first.compiled)}
        torch.cuda.empty_cache()
    return result


if __name__ == "__main__":
    print(json.dumps(_measure()))
