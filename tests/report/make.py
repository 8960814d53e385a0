"""RunReports made by hand, for tests of reports and of commands that show them.  No number in them was measured.

make_report()                       a whole run on a GPU: four layers, one prompt, exact and relaxed
make_report(gpu=False)              accuracy only, from Triton's interpreter
make_report(change=lambda case: failed(case, "nonfinite") if ... else case)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from ssdprof import schema
from ssdprof.schema import (
    EXACT_FP32,
    CaseResult,
    Deviation,
    Interval,
    LayerRef,
    Match,
    PrecisionRecord,
    RunReport,
    Status,
)

EXACT_FP16 = PrecisionRecord(intermediates="exact", state_dtype="fp16")
RELAXED_FP32 = PrecisionRecord(intermediates="relaxed", state_dtype="fp32")
RELAXED_FP16 = PrecisionRecord(intermediates="relaxed", state_dtype="fp16")
ALL_PRECISIONS = tuple(
    PrecisionRecord(intermediates=kind, state_dtype=state)
    for kind in ("exact", "relaxed")
    for state in ("fp32", "fp16", "bf16")
)
HEADS, HEADDIM, DSTATE = 128, 64, 128


def make_report(
    *,
    layers: Sequence[int] = (0, 9, 18, 27),
    seqlens: Sequence[int] = (131_072,),
    precisions: Sequence[PrecisionRecord] = (EXACT_FP32, EXACT_FP16, RELAXED_FP32, RELAXED_FP16),
    gpu: bool = True,
    change: Callable[[CaseResult], CaseResult] = lambda case: case,
    **fields: Any,
) -> RunReport:
    """change: applied to every case.  fields: replace fields of the report."""
    cases = [case for seqlen in seqlens for index in layers for case in make_cases(index, seqlen, precisions, gpu=gpu)]
    report = RunReport(
        ssdprof_version="0.1.0",
        run_id="20260102-030405-granite-4.0-h-small",
        created="2026-01-02T03:04:05Z",
        command=("ssdprof", "run", "ibm-granite/granite-4.0", "--seq", ",".join(map(str, seqlens))),
        state="complete",
        checkpoint=make_checkpoint(),
        environment=make_environment(gpu=gpu),
        prompts=tuple(make_prompt(seqlen) for seqlen in seqlens),
        captured_layers=tuple(layer(index) for index in layers),
        segment_length=8192,
        model_peak_bytes=30 << 30 if gpu else None,
        clocks=make_clocks() if gpu else None,
        ceilings=schema.Ceilings(copy_gb_per_s=4312.0, matmul_tflops=781.0) if gpu else None,
        cases=tuple(change(case) for case in cases),
    )
    return report.model_copy(update=fields)


def make_checkpoint(**fields: Any) -> schema.CheckpointRef:
    mamba = [i for i in range(40) if i not in (5, 15, 25, 35)]
    checkpoint = schema.CheckpointRef(
        requested="ibm-granite/granite-4.0",
        source="hub",
        repo_id="ibm-granite/granite-4.0-h-small",
        revision="0123456789abcdef0123456789abcdef01234567",
        model_type="granitemoehybrid",
        layers=tuple(layer(index) for index in mamba),
        layer_count=40,
        siblings=("ibm-granite/granite-4.0-h-tiny", "ibm-granite/granite-4.0-h-1b"),
        trained_context=131_072,
    )
    return checkpoint.model_copy(update=fields)


def make_environment(*, gpu: bool) -> schema.Environment:
    h200 = schema.Gpu(
        name="NVIDIA H200",
        compute_capability="9.0",
        sm_count=132,
        memory_bytes=150_754_820_096,
        l2_bytes=62_914_560,
        driver="580.65.06",
        cuda="13.0",
    )
    return schema.Environment(
        gpu=h200 if gpu else None,
        cpu="x86_64, 16 cores",
        platform="Linux 6.8",
        python="3.12.3",
        packages={"torch": "2.11.0", "triton": "3.6.0", "transformers": "5.18.0"},
    )


def make_clocks(**fields: Any) -> schema.Clocks:
    clocks = schema.Clocks(sm_mhz=(1980, 1965), memory_mhz=(3201, 3201), temperature_c=(41, 63), throttle_reasons=())
    return clocks.model_copy(update=fields)


def make_prompt(seqlen: int, **fields: Any) -> schema.Prompt:
    prompt = schema.Prompt(
        kind="default",
        source="public-domain prose shipped with ssdprof",
        tokenizer="ibm-granite/granite-4.0-h-small",
        seqlen=seqlen,
        token_sha256="9f" * 32,
    )
    return prompt.model_copy(update=fields)


def in_calls(report: RunReport, count: int = 3) -> RunReport:
    """The report for a chunked prefill: every case of a whole prompt becomes one case for each of `count` chunks."""
    (prompt,) = report.prompts
    whole = count * prompt.seqlen
    calls = schema.Serving(chunk=prompt.seqlen).calls(whole)
    cases = tuple(case.model_copy(update={"call": call}) for call in calls for case in report.cases)
    served = {"seqlen": whole, "serving": schema.Serving(chunk=prompt.seqlen)}
    return report.model_copy(update={"cases": cases, "prompts": (prompt.model_copy(update=served),)})


def with_steps(report: RunReport, count: int = 2) -> RunReport:
    """The report with decode steps after its prompt, with the numbers of the exact cases with fp32 states."""
    (prompt,) = report.prompts
    steps = schema.StepsAsked(
        implementations=("unfused_step", "recurrent"), precisions=(EXACT_FP32,), baseline="unfused_step"
    )
    names = {"unfused": "unfused_step", "fused": "recurrent"}
    exact = [case for case in report.cases if case.precision == EXACT_FP32]
    found = [
        case.model_copy(
            update={
                "call": call,
                "implementation": names[case.implementation],
                "dims": case.dims.model_copy(update={"seqlen": 1}),
                "speedup": case.speedup and case.speedup.model_copy(update={"baseline": f"unfused_step {EXACT_FP32}"}),
            }
        )
        for call in schema.Serving(decode=count).calls(prompt.seqlen)[1:]
        for case in exact
    ]
    asked = schema.Asked(
        implementations=("unfused", "fused"),
        precisions=tuple(dict.fromkeys(case.precision for case in report.cases)),
        layers=report.captured_layers,
        steps=steps,
    )
    return report.model_copy(
        update={
            "cases": (*report.cases, *found),
            "asked": asked,
            "prompts": (prompt.model_copy(update={"serving": schema.Serving(decode=count)}),),
        }
    )


def served(case: CaseResult, kind: Literal["packed", "chunk"], prompt_seqlen: int, sequences: int = 1) -> CaseResult:
    """The case for a packed call, or for the first of two chunks."""
    count = 2 if kind == "chunk" else 1
    call = schema.CallRef(kind=kind, number=1, count=count, prompt_seqlen=prompt_seqlen, sequences=sequences)
    return case.model_copy(update={"call": call})


def layer(index: int) -> LayerRef:
    return LayerRef(index=index, name=f"model.layers.{index}.mamba", operator="ssd")


def make_cases(index: int, seqlen: int, precisions: Sequence[PrecisionRecord], *, gpu: bool) -> list[CaseResult]:
    """The cases of a replay of one layer: for each state dtype the baseline, then both implementations."""
    cases = []
    for state in dict.fromkeys(precision.state_dtype for precision in precisions):
        of_state = [precision for precision in precisions if precision.state_dtype == state]
        original = ("unfused", PrecisionRecord(intermediates="exact", state_dtype=state))
        pairs = [original, *((name, precision) for precision in of_state for name in ("unfused", "fused"))]
        cases += [make_case(index, seqlen, *pair, gpu=gpu) for pair in dict.fromkeys(pairs)]
    return cases


def make_case(
    index: int, seqlen: int, implementation: str, precision: PrecisionRecord, *, gpu: bool = True
) -> CaseResult:
    """A case that passed.  Its numbers differ from layer to layer and from precision to precision."""
    unfused = implementation == "unfused"
    baseline = unfused and precision.intermediates == "exact"
    twist = 1 + 0.01 * index + 0.1 * (precision.intermediates == "relaxed") + 0.07 * (precision.state_dtype != "fp32")
    original_us = (10_000.0 * seqlen / 131_072 + 40) * (1 + 0.001 * index)
    device_ratio = 1.0 if unfused else 2.4 * twist
    device_us = original_us / device_ratio
    call_us, call_ratio = device_us + (150 if unfused else 30), 0.98 * device_ratio
    timed = {
        "timing": schema.Timing(
            call_median_us=call_us,
            device_median_us=device_us,
            call_interval_us=around(call_us, 0.01),
            device_interval_us=around(device_us, 0.005),
            recordings=5,
            samples=40,
        ),
        "speedup": None
        if baseline
        else schema.Speedup(
            baseline=f"unfused exact, {precision.state_dtype} states",
            call_ratio=call_ratio,
            call_interval=around(call_ratio, 0.03),
            call_verdict="no difference" if unfused else "faster",
            device_ratio=device_ratio,
            device_interval=around(device_ratio, 0.02),
            verdict="no difference" if unfused else "faster",
            smallest_difference=0.01,
        ),
        "roofline": schema.Roofline(
            bytes_moved=4_400_000_000,
            flops=690_000_000_000,
            floor_us=1030.0 * seqlen / 131_072,
            bound="memory",
            floor_pct=100 * 1030.0 * seqlen / 131_072 / device_us,
        ),
        "memory": schema.Memory(peak_bytes=6 << 30, workspace_bytes=(2 << 30) if unfused else 132_120_576),
    }
    return CaseResult(
        layer=layer(index),
        dims=schema.Dims(
            operator="ssd",
            batch=1,
            seqlen=seqlen,
            chunk_size=256,
            dtype="bf16",
            sizes={"nheads": HEADS, "headdim": HEADDIM, "dstate": DSTATE, "ngroups": 1},
            words=f"{HEADS} heads x {HEADDIM}, state {DSTATE}, 1 group",
        ),
        implementation=implementation,
        variant=("portable" if unfused else "hopper") if gpu else "interpreter",
        precision=precision,
        status="passed",
        accuracy=make_accuracy(index, seqlen, precision, baseline=baseline),
        launches=make_launches(implementation, gpu=gpu),
        **(timed if gpu else {}),  # type: ignore[arg-type]
    )


def make_accuracy(
    index: int, seqlen: int, precision: PrecisionRecord, *, baseline: bool
) -> tuple[schema.TensorAccuracy, ...]:
    relaxed, narrow = precision.intermediates == "relaxed", precision.state_dtype != "fp32"
    equal = 66.823 if relaxed else 99.337 if narrow else 99.696
    within = 99.743 if relaxed else 100.0
    against = f"unfused exact, {precision.state_dtype} states"
    rms = 2.1e-3 * (1 + 0.001 * index + 0.05 * relaxed + 0.03 * narrow)
    out, states = 2 * seqlen * HEADS * HEADDIM // 2, HEADS * HEADDIM * DSTATE
    where, head = (0, seqlen - 1 - index, 79, 63), 79
    return (
        schema.TensorAccuracy(
            tensor="out",
            vs_oracle=deviation("fp64 oracle", out, (0.012, 41.5, 99.98), rms, 0.031 + 0.001 * index, where, head),
            vs_baseline=None if baseline else deviation(against, out, (equal, within, 100.0), 1.4e-4, 0.0156, where, 3),
            floor=deviation("fp64 oracle", out, (0.014, 43.25, 100.0), 1.66e-3, 0.0156, where, 80),
            passed=True,
        ),
        schema.TensorAccuracy(
            tensor="final_states",
            vs_oracle=deviation("fp64 oracle", states, (0.001, 97.5, 100.0), 8.1e-4, 0.002, (0, 5, 1, 2), 5),
            vs_baseline=None
            if baseline
            else deviation(against, states, (50.0, 99.9999, 100.0), 6e-5, 0.0001, (0, 6, 3, 4), 6),
            floor=deviation("fp64 oracle", states, (0.1, 100.0, 100.0), 2.9e-8, 1e-7, (0, 7, 8, 9), 7),
            passed=True,
        ),
    )


def deviation(
    against: str,
    elements: int,
    matches: Sequence[float],
    rms_ratio: float,
    max_abs: float,
    worst_position: tuple[int, ...],
    worst_head: int,
) -> Deviation:
    return Deviation(
        against=against,
        elements=elements,
        matches=tuple(Match(tolerance=t, match_pct=pct) for t, pct in zip(schema.TOLERANCES, matches, strict=True)),
        rms_ratio=rms_ratio,
        max_abs=max_abs,
        worst_head=worst_head,
        worst_position=worst_position,
        nonfinite=0,
    )


def make_launches(implementation: str, *, gpu: bool) -> tuple[schema.Launch, ...]:
    if not gpu:
        return (schema.Launch(kernel=implementation, config={"chunk": 64}),)
    if implementation == "unfused":
        names = (
            "_chunk_cumsum_kernel",
            "_chunk_state_kernel",
            "_state_passing_kernel",
            "_bmm_kernel",
            "_chunk_scan_kernel",
        )
        return tuple(
            schema.Launch(
                kernel=name, config={"block_l": 64, "num_warps": 4}, registers=96 + i, spills=0, shared_bytes=49_152
            )
            for i, name in enumerate(names)
        )
    config: dict[str, int | str | bool] = {"segment_chunks": 32, "chunk": 64, "num_warps": 12, "stages": 3}
    return (schema.Launch(kernel="segment_kernel", config=config, registers=168, spills=0, shared_bytes=204_800),)


def around(value: float, share: float) -> Interval:
    return Interval(low=value * (1 - share), high=value * (1 + share))


def failed(case: CaseResult, status: Status, reason: str = "") -> CaseResult:
    """The case with another status: without timing, and without accuracy if nothing ran."""
    ran = status in ("inaccurate", "nonfinite")
    accuracy = tuple(_failed(a, nonfinite=status == "nonfinite") for a in case.accuracy) if ran else ()
    untimed: dict[str, Any] = {"timing": None, "speedup": None, "roofline": None, "memory": None}
    return case.model_copy(update={"status": status, "reason": reason, "accuracy": accuracy, **untimed})


def _failed(accuracy: schema.TensorAccuracy, *, nonfinite: bool) -> schema.TensorAccuracy:
    if accuracy.tensor != "out":
        return accuracy
    broken: dict[str, Any] = {"rms_ratio": 0.4}
    if nonfinite:
        broken = {"rms_ratio": float("nan"), "max_abs": float("inf"), "nonfinite": 7, "first_nonfinite": (0, 777, 5, 9)}
    vs_oracle = accuracy.vs_oracle.model_copy(update=broken)
    return accuracy.model_copy(update={"passed": False, "vs_oracle": vs_oracle, "reason": "head 5 is over its budget"})


def with_scale(case: CaseResult) -> CaseResult:
    """The case with the newer fields of errors: a scale, here values up to 41.5, and four slices along the prompt."""
    more = {"scale_max_abs": 41.5}
    return case.model_copy(
        update={
            "accuracy": tuple(
                accuracy.model_copy(
                    update={
                        "vs_oracle": accuracy.vs_oracle.model_copy(update=more | _along(accuracy, 2.0e-3)),
                        "floor": accuracy.floor.model_copy(update=more | _along(accuracy, 1.6e-3)),
                    }
                )
                for accuracy in case.accuracy
            )
        }
    )


def _along(accuracy: schema.TensorAccuracy, error: float) -> dict[str, Any]:
    return {"along": tuple(error * (1 + i / 10) for i in range(4)) if accuracy.tensor == "out" else ()}
