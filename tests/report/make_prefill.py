"""Prefill times of a model: two implementations at one length, one of them twice as fast."""

from __future__ import annotations

from typing import Any

from report.make import make_checkpoint, make_environment

from ssdprof.schema import EXACT_FP32, Interval, LayerRef
from ssdprof.schema.prefill import (
    CallTime,
    PartTime,
    Prefill,
    PrefillCase,
    PrefillLength,
    PrefillReport,
    PrefillSpeedup,
)


def case(name: str, call_us: float, parts: dict[str, float], **fields: Any) -> PrefillCase:
    return PrefillCase.model_validate(
        {
            "implementation": name,
            "surroundings": "bundled",
            "precision": EXACT_FP32,
            "status": "passed",
            "call": CallTime(
                median_us=call_us,
                interval_us=Interval(low=0.99 * call_us, high=1.01 * call_us),
                recordings=3,
                samples=3,
            ),
            "parts": tuple(PartTime(name=part, gpu_us=us, launches=1) for part, us in parts.items()),  # type: ignore[arg-type]
        }
        | fields
    )


def speedup(ratio: float, predicted: float | None) -> PrefillSpeedup:
    return PrefillSpeedup(
        ratio=ratio, interval=Interval(low=ratio - 0.01, high=ratio + 0.01), verdict="faster", predicted=predicted
    )


UNFUSED = case("unfused", 2000, {"operator": 600, "mixer": 1000}, alone_us=10.0)
FUSED = case("fused", 1000, {"operator": 300, "mixer": 600}, alone_us=5.0, variant="hopper", speedup=speedup(2.0, 1.18))


def length(*cases: PrefillCase) -> PrefillLength:
    layer = LayerRef(index=3, name="model.layers.3.mamba", operator="ssd")
    return PrefillLength(seqlen=1024, batch=1, segment_length=1024, operator_calls=60, layer=layer, cases=cases)


def found(*cases: PrefillCase, **fields: Any) -> Prefill:
    settings: dict[str, Any] = {"layers": 40, "layer_count": 40, "lengths": (length(*cases),)} | fields
    return Prefill(
        operator_layers=36, attention="sdpa", convolution="causal-conv1d 1.5", smallest_difference=0.01, **settings
    )


def report(state: str = "complete", **fields: Any) -> PrefillReport:
    return PrefillReport.model_validate(
        {
            "ssdprof_version": "0.1.0",
            "created": "2026-01-02T03:04:05Z",
            "command": ("ssdprof", "prefill", "granite"),
            "state": state,
            "checkpoint": make_checkpoint(),
            "environment": make_environment(gpu=True),
            "prefill": found(UNFUSED, FUSED),
        }
        | fields
    )
