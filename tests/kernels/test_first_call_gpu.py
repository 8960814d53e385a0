"""On a GPU: no kernel takes more than two seconds to compile, and nothing is tuned in a first call.

    python test_first_call_gpu.py FILE

writes the measurements.  A call that took longer is repeated after all others, up to three times in all, until each of
its kernels has compiled within the limit once.  The reason: a rented processor can run at less than half of its speed
for seconds or minutes because of other users' work, which is not a cost of the kernel.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
from kernel_cases import BF16, EXACT, FP32, RELAXED, SSDCase
from triton.runtime.jit import JITFunction

from ssdprof import kernels
from ssdprof.kernels import launch as launching
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd import fused
from ssdprof.kernels.ssd.inputs import SSDOutput
from ssdprof.measure.first_run import timed_first_call

MOST_SECONDS = 2.0  # for one kernel, by Triton's own clock
TRIES = 3
MAMBA2 = SSDCase(seqlen=4096, heads=80, headdim=64, dstate=128, dtype=BF16, device="cuda")
LARGE = MAMBA2.but(heads=32, headdim=128, dstate=256)
LENGTHS = (6000, 9, 0, 2048)  # the first is cut into segments into segments
HYBRID = MAMBA2.but(heads=128, headdim=80, groups=8, lengths=LENGTHS)
PACKED = {"lengths": LENGTHS, "initial_states": True}
CASES: dict[str, tuple[SSDCase, str, Precision]] = {
    "hopper": (MAMBA2, "fused", EXACT), "hopper relaxed": (MAMBA2, "fused", RELAXED),
    "hopper, shares": (MAMBA2.but(seqlen=1024, batch=32), "fused", EXACT),
    "hopper, packed": (MAMBA2.but(lengths=LENGTHS), "fused", EXACT),
    "hopper, n 64": (MAMBA2.but(dstate=64), "fused", EXACT),
    "hopper, packed, p 80": (HYBRID.but(initial_states=True), "fused", EXACT),
    "portable, gate": (MAMBA2.but(gate=True), "fused", EXACT), "hopper, n 256": (LARGE, "fused", EXACT),
    "hopper, n 256, looks back": (LARGE.but(seqlen=65536), "fused", EXACT),
    "hopper, n 256, packed": (LARGE.but(**PACKED), "fused", RELAXED),
    "portable, n 256, gate": (LARGE.but(gate=True), "fused", EXACT),
    "portable, fp32": (MAMBA2.but(dtype=FP32), "fused", EXACT),
    "portable, fp32, n 256": (LARGE.but(dtype=FP32), "fused", EXACT),
    "unfused": (MAMBA2.but(chunk_size=256), "unfused", EXACT),
    "unfused, packed, fp32": (HYBRID.but(dtype=FP32, gate=True, chunk_size=128), "unfused", EXACT),
}  # fmt: skip


@cache
def measured() -> dict[str, Any]:
    """The measurements of this file, from a new process."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "first_calls.json"
        environment = os.environ | {"TRITON_INTERPRET": "0"}
        subprocess.run([sys.executable, __file__, file], env=environment, cwd=Path(__file__).parent, check=True)
        result: dict[str, Any] = json.loads(file.read_text())
    print(json.dumps(result["calls"]))
    return result


@pytest.mark.gpu
@pytest.mark.parametrize("label", CASES)
def test_no_kernel_takes_long_to_compile(label: str) -> None:
    seconds = measured()["calls"][label]["seconds"]
    assert seconds, "nothing was compiled: the cache was not empty"
    assert all(min(tries) <= MOST_SECONDS for tries in seconds.values()), seconds


@pytest.mark.gpu
@pytest.mark.parametrize("label", CASES)
def test_no_kernel_is_tuned(label: str) -> None:
    """An autotuner would compile a kernel once for each configuration."""
    call = measured()["calls"][label]
    assert {kernel: len(seconds) for kernel, seconds in call["seconds"].items() if len(seconds) != call["tries"]} == {}


@triton.jit
def _nothing() -> None:
    """Compiled first, to include Triton's one-time work per process: a hash of itself and 400 MB of its compiler."""


def _compiled(run: Callable[[], SSDOutput]) -> list[tuple[str, float]]:
    """The kernels that a first call compiles, with empty caches, and the seconds that each takes."""
    for module in [module for name, module in sys.modules.items() if name.startswith("ssdprof.kernels")]:
        for function in vars(module).values():
            if isinstance(function, JITFunction):
                function.device_caches.clear()
    with (
        TemporaryDirectory(prefix="ssdprof-") as folder, triton.knobs.cache.scope(),
        patch.dict(fused.FUSED.launches, clear=True), patch.dict(launching._kept, clear=True),
    ):  # fmt: skip
        triton.knobs.cache.dir = folder
        _, first = timed_first_call(run, torch.device("cuda"), math.inf)
    return [(kernel, round(seconds, 3)) for kernel, seconds in first.compiled.items()]


def _made(label: str, call: dict[str, Any]) -> dict[str, Any]:
    """`call` with one more try: the number of tries, and the seconds of each kernel in every try."""
    case, implementation, precision = CASES[label]
    run = partial(kernels.get("ssd", implementation).run, case.inputs(), precision)
    seconds: dict[str, list[float]] = {kernel: [*taken] for kernel, taken in call["seconds"].items()}
    for kernel, one in _compiled(run):
        seconds.setdefault(kernel, []).append(one)
    torch.cuda.empty_cache()
    return {"tries": call["tries"] + 1, "seconds": seconds}


def _all_quick(call: dict[str, Any]) -> bool:
    return call["tries"] > 0 and all(min(taken) <= MOST_SECONDS for taken in call["seconds"].values())


def main(file: Path) -> None:
    _nothing[(1,)]()
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    calls: dict[str, Any] = {label: {"tries": 0, "seconds": {}} for label in CASES}
    for label in (label for _ in range(TRIES) for label in CASES if not _all_quick(calls[label])):
        calls[label] = _made(label, calls[label])
        file.write_text(json.dumps({**machine, "created": created, "calls": calls}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
