"""Runs for comparisons: two layers at two precisions on a GPU, and the same run after a regression."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from report.make import RELAXED_FP32, make_environment, make_report
from ssdprof.schema import EXACT_FP32, CaseResult, Environment, Interval, RunReport

FUSED = "layer 0, 131,072 tokens, fused, exact, fp32 states"


def slowed(factor: float, where: Callable[[CaseResult], bool] = lambda _: True) -> Callable[[CaseResult], CaseResult]:
    """Multiplies the times of the selected cases by `factor`, and adjusts their speedups."""

    def change(case: CaseResult) -> CaseResult:
        if not where(case) or case.timing is None:
            return case
        times = {
            name: Interval(low=value.low * factor, high=value.high * factor) if isinstance(value, Interval) else value
            for name, value in dict(case.timing).items()
        }
        times |= {name: getattr(case.timing, name) * factor for name in ("call_median_us", "device_median_us")}
        speedup = case.speedup and case.speedup.model_copy(
            update={
                "device_ratio": case.speedup.device_ratio / factor,
                "device_interval": Interval(
                    low=case.speedup.device_interval.low / factor, high=case.speedup.device_interval.high / factor
                ),
            }
        )
        return case.model_copy(update={"timing": case.timing.model_copy(update=times), "speedup": speedup})

    return change


def fused(case: CaseResult) -> bool:
    return case.implementation == "fused"


def run(**fields: Any) -> RunReport:
    return make_report(**({"layers": (0, 9), "precisions": (EXACT_FP32, RELAXED_FP32)} | fields))


def other_machine(**changes: str) -> Environment:
    environment = make_environment(gpu=True)
    assert environment.gpu is not None
    triton = changes.pop("triton", environment.packages["triton"])
    return environment.model_copy(
        update={
            "gpu": environment.gpu.model_copy(update=changes),
            "packages": environment.packages | {"triton": triton},
        }
    )
