"""Run flash-linear-attention's own tests of the chunked gated delta rule on
`kernels/gdn/compat.py`.

    python benchmarks/fla_cases.py path/to/tests/ops/test_gdn.py RESULT.json
    python benchmarks/fla_cases.py benchmarks/olmo_gdn_cases.py RESULT.json

fla must be installed, because the tests compare with its recurrence.  Shapes and tolerances are
those of the test file.  Outputs and final states are compared; gradients are not, because our
kernels have none.  A case with options that our kernel refuses by name counts as refused.  Writes
RESULT.json and a table next to it; exit code 1 if a case failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

# read when fla is imported; selects only its Triton path
os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"

import pytest
import torch

from ssdprof.environment import machine
from ssdprof.environment.toolchain import require_gpu
from ssdprof.kernels.gdn.compat import chunk_gated_delta_rule
from ssdprof.kernels.registry import UnsupportedError

SELECTED = "test_chunk and not blackwell"


def client_of(ours: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of `ours` that skips the test if `ours` refuses an argument."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return ours(*args, **kwargs)
        except UnsupportedError as error:
            pytest.skip(f"refused: {error}")

    return call


def compared(assert_close: Callable[..., None]) -> Callable[..., None]:
    """fla's comparison, for the output and the final state only."""

    def compare(prefix: str, *args: Any, **kwargs: Any) -> None:
        if prefix.partition("@")[0] in ("o", "ht"):
            assert_close(prefix, *args, **kwargs)

    return compare


class Outcomes:
    """A pytest plugin that records the outcome of each case."""

    def __init__(self) -> None:
        self.of_case: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("::")[2]
        if report.skipped:
            reason = (
                report.longrepr[2].removeprefix("Skipped: ")
                if isinstance(report.longrepr, tuple)
                else ""
            )
            outcome = "refused" if reason.startswith("refused: ") else "skipped by the test"
            self.of_case[name] = (outcome, reason.removeprefix("refused: "))
        elif report.failed:
            self.of_case[name] = ("failed", str(report.longrepr).strip().splitlines()[-1])
        elif report.when == "call":
            self.of_case[name] = ("passed", "")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tests", type=Path)
    parser.add_argument("result", type=Path)
    options = parser.parse_args()
    require_gpu("The kernels under test need", "Run this on a machine with a CUDA build of torch.")
    import fla.ops.gated_delta_rule as library
    import fla.utils

    library.chunk_gated_delta_rule = client_of(chunk_gated_delta_rule)
    torch.set_grad_enabled(False)
    # the tests request gradients, which are not compared
    torch.Tensor.backward = lambda *_, **__: None
    torch.Tensor.grad = property(torch.zeros_like, lambda *_: None)
    fla.utils.assert_close = compared(fla.utils.assert_close)
    outcomes = Outcomes()
    arguments = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "-k", SELECTED, "--tb=line"]
    pytest.main(
        [str(options.tests), f"--rootdir={options.tests.parent}", *arguments], plugins=[outcomes]
    )
    result = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python benchmarks/fla_cases.py {options.tests.name} {options.result.name}",
        "fla": version("fla-core"),
        "tests_sha256": hashlib.sha256(options.tests.read_bytes()).hexdigest(),
        "environment": machine.collect().model_dump(mode="json"),
        "cases": [
            {"name": name, "outcome": outcome, "why": why}
            for name, (outcome, why) in outcomes.of_case.items()
        ],
    }
    options.result.write_text(json.dumps(result, indent=1) + "\n")
    print(Counter(case["outcome"] for case in result["cases"]))
    passed = [case for case in result["cases"] if case["outcome"] == "passed"]
    return int(not passed or any(case["outcome"] == "failed" for case in result["cases"]))


if __name__ == "__main__":
    sys.exit(main())
