"""Facts, self-checks and hints of a kernel; a value that was not collected is never 0."""

import re
from dataclasses import replace
from typing import Any

import pytest
from stalls import synthetic

from ssdprof.core.base import EXACT_FP32
from ssdprof.core.case import Launch
from ssdprof.core.stalls import KernelStalls, Launched, StallReport
from ssdprof.stalls.facts import analyse, stalls_of
from ssdprof.stalls.read import Point


def launched(*kernels: str, launch_count: int = 1) -> tuple[Launched]:
    launches = tuple(Launch(kernel=name, config={}) for name in kernels)
    fields = {"implementation": "fused", "variant": "v", "precision": EXACT_FP32}
    return (Launched(**fields, launch_count=launch_count, launches=launches),)


def statuses(report_or_kernel: StallReport | KernelStalls) -> dict[str, str]:
    return {name: status for name, (status, _) in report_or_kernel.checks.items()}


def metrics(**changes: float) -> dict[str, Any]:
    return {"metrics": synthetic.METRICS | changes}


def with_metrics(**changes: float) -> KernelStalls:
    return stalls_of(synthetic.kernel(**metrics(**changes)))


def hint(found: KernelStalls, stage: str) -> str:
    return next(text for text in found.hints if f" in {stage} is " in text)


def test_what_was_not_collected_is_none_and_named():
    found = stalls_of(synthetic.kernel(metrics={}, totals={}, points=()))
    assert {"duration_us", "registers", "limited_by", "stall reasons", "source lines"} <= set(
        found.not_collected
    )
    absent = set(found.not_collected) - {"limited_by", "stall reasons", "source lines"}
    assert len(absent) == 24
    assert all(getattr(found, name) is None for name in absent)
    assert (found.limited_by, found.sample_count, found.hints) == ((), None, {})
    assert set(statuses(found).values()) == {"not checked"}


def test_a_zero_that_was_collected_stays_a_zero_and_another_name_of_a_metric_will_do():
    found = with_metrics(**{"dram__bytes_read.sum": 0, "lts__t_bytes.sum": 0})
    assert (found.dram_read_bytes, found.l2_bytes) == (0, 0)
    assert "dram_read_bytes" not in found.not_collected
    metrics = {
        "lts__t_sectors.sum": 10,
        "derived__local_spilling_requests": 7,
        "launch__shared_mem_per_block_static": 100,
        "launch__shared_mem_per_block_driver": 24,
        "smsp__issue_active.avg.per_cycle_active": 0.25,
    }
    found = stalls_of(synthetic.kernel(metrics=metrics))
    assert (found.l2_bytes, found.spill_requests) == (320, 7)
    assert (found.shared_bytes, found.issue_pct) == (124, 25.0)


@pytest.mark.parametrize(
    ("pipe_pct", "tf32_pct", "peak"), [(40, 0, 1000), (20, 0, 2000), (40, 20, 2000)]
)
def test_the_peak_of_tensor_cores_is_that_of_dense_operands(pipe_pct, tf32_pct, peak):
    """With operands of two types, the cores work for each of them in turn."""
    name = "sm__ops_path_tensor_src_bf16_dst_fp32.sum"
    tf32 = "sm__ops_path_tensor_src_tf32_dst_fp32.sum"
    metrics = {
        name: 4e9,
        tf32: tf32_pct,
        f"{tf32}.pct_of_peak_sustained_elapsed": tf32_pct,
        f"{name}.pct_of_peak_sustained_elapsed": 20.0,
        f"{name}.peak_sustained_elapsed.per_second": 2e15,
        "sm__ops_path_tensor_src_int8.sum": 0.0,
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": pipe_pct,
    }
    found = stalls_of(synthetic.kernel(metrics=metrics))
    assert (found.tensor_flops, found.tensor_peak_tflops) == (4e9 + tf32_pct, peak)


@pytest.mark.parametrize(
    "cycles",
    [{"smsp__cycles_elapsed.avg": 3000.0}, {"smsp__cycles_elapsed.avg.per_second": 1.5e9}],
    ids=str,
)
def test_fp32_operations_are_counted_by_cycles(cycles: dict[str, float]):
    """1.5 GHz for 2 us; a fused multiplication and addition counts as two."""
    rate = "smsp__sass_thread_inst_executed_op_{}_pred_on.sum.per_cycle_elapsed"
    rates = {rate.format(name): 10.0 for name in ("fadd", "fmul", "ffma")}
    assert with_metrics(**rates, **cycles).fp32_flops == 40 * 3000
    assert with_metrics(**rates).fp32_flops is None


def test_a_kernel_without_products_lacks_no_peak_for_them():
    found = with_metrics(**{"sm__ops_path_tensor_src_int8.sum": 0.0})
    assert found.tensor_flops == 0
    assert "tensor_peak_tflops" not in found.not_collected
    assert "tensor_peak_tflops" in stalls_of(synthetic.kernel()).not_collected


def test_where_no_warp_was_sampled_averages_are_taken_by_one_name():
    name = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
    metrics = {
        name.format("gmma"): 0.5,
        name.format("no_instruction"): 1.5,
        name.format("wait"): 0.0,
    }
    found = stalls_of(synthetic.kernel(metrics=metrics, totals={}, points=()))
    assert found.average == {"no_instructions": 1.5, "warpgroup_arrive": 0.5}
    assert "stall reasons" not in found.not_collected
    assert with_metrics(**metrics).average == {}


def test_the_implementation_is_told_by_the_kernel():
    assert stalls_of(synthetic.kernel(function="_fused_kernel")).implementation == "fused"
    assert stalls_of(synthetic.kernel()).implementation == ""
    report = analyse(
        [synthetic.report(replace(synthetic.kernel(), function="_mine"))], launched("_mine")
    )
    assert report.kernels[0].implementation == "fused"


# --- self-checks

TWO_REASONS = {"totals": {"wait": 120, "barrier": 80}}
UNKNOWN_LINES = {"sources": {synthetic.FILE: "@jit\ndef f():\n    pass\n"}}


@pytest.mark.parametrize(
    ("changes", "check", "detail"),
    [
        (
            metrics(smsp__pcsamp_sample_count=201),
            "reasons add up to the samples",
            "200 of 201; 1 missing",
        ),
        ({"totals": {"wait": 199}}, "lines add up to the kernel", "200 of 199; 1 too many"),
        ({"totals": {"wait": 199}}, "stages add up to the kernel", "200 of 199; 1 too many"),
        (TWO_REASONS, "every reason adds up over the lines", "wait 12 of 120; barrier 50 of 80"),
        (metrics(smsp__pcsamp_dropped_bytes=64), "no sample was dropped", "64 bytes dropped"),
        ({"sources": {}}, "the source was recorded", "not in the report: kernel.py"),
        (UNKNOWN_LINES, "every line has a stage", "200 samples on lines of unknown stage"),
    ],
)
def test_a_check_says_what_is_wrong(changes, check, detail):
    assert stalls_of(synthetic.kernel(**changes)).checks[check] == ("failed", detail)


@pytest.mark.parametrize(
    ("wanted", "count", "detail"),
    [
        (("_kernel", "_other"), 2, "not profiled: _other; 1 launches instead of 2"),
        (("_other",), 1, "not profiled: _other; not requested: _kernel"),
        (("_kernel",), 3, "1 launches instead of 3"),
    ],
)
def test_launches_that_nobody_asked_for_are_found(wanted, count, detail):
    report = analyse([synthetic.report(synthetic.kernel())], launched(*wanted, launch_count=count))
    assert [words for status, words in report.checks.values() if status == "failed"] == [detail]


def test_a_report_from_elsewhere_cannot_be_asked_what_was_wanted():
    whole, cut = (synthetic.report(synthetic.kernel(), whole=each) for each in (None, False))
    assert set(statuses(analyse([whole])).values()) == {"not checked"}
    assert statuses(analyse([cut, whole]))[f"{cut.name} is complete"] == "failed"
    assert len(analyse([cut, whole]).sources) == 2, "files of two folders may have one name"
    assert not analyse([], missing="no ncu").checks


# --- hints

DRAM_FULL, L2_FULL = (
    f"{unit}throughput.avg.pct_of_peak_sustained_elapsed" for unit in ("gpu__dram_", "lts__")
)


@pytest.mark.parametrize(
    ("metric", "evidence", "advice"),
    [
        ({}, "L2 hit rate 92 %", "Bound by the latency of L2"),
        ({DRAM_FULL: 88.0}, "L2 hit rate 92 %, DRAM 88 %", "DRAM is full"),
        ({L2_FULL: 88.0}, "L2 hit rate 92 %, L2 88 %", "L2 is full"),
        ({"lts__t_sector_hit_rate.pct": 20.0}, "L2 hit rate 20 %", "Bound by the latency of loads"),
    ],
)
def test_a_hint_names_its_evidence_and_a_load_that_of_the_memories(
    metric: dict[str, float], evidence, advice
):
    found = with_metrics(**metric)
    text = hint(found, "loads")
    assert text.startswith(
        "long_scoreboard in loads is 30 % of the kernel's busy samples, 100 % of them on "
        f"kernel.py:6 `return p`; {evidence}.  {advice}"
    )
    assert found.hints[text] == pytest.approx(100 * 38 / 128)


def test_a_wait_for_a_role_points_to_the_roles():
    source = synthetic.SOURCE.replace("ahead", "waiting.chunk")
    found = stalls_of(synthetic.kernel(sources={synthetic.FILE: source}))
    assert "look at the roles that fill the barrier" in hint(found, "waiting.chunk")


def test_idle_warps_and_issuing_give_no_hint():
    points = (*synthetic.POINTS, Point(0x180, synthetic.FILE, 9, "FADD", {"selected": 500}))
    found = stalls_of(synthetic.kernel(points=points))
    assert not [
        text for text in found.hints if re.search("selected in| in (ahead|idle warps) is", text)
    ]


def test_a_wait_for_tensor_cores_is_told_from_one_for_warps():
    source = synthetic.SOURCE.replace("return exp2(x)", "return warpgroup_mma_wait(0, deps=[x])")
    points = (Point(0x150, synthetic.FILE, 9, "WARPGROUP.DEPBAR", {"barrier": 60}),)
    found = stalls_of(synthetic.kernel(points=points, sources={synthetic.FILE: source}))
    assert "tensor cores are at work" in next(iter(found.hints))
    assert "slowest of their block" in next(iter(stalls_of(synthetic.kernel(points=points)).hints))


def test_spills_occupancy_and_waves_are_spoken_of():
    found = with_metrics(
        **{"sass__inst_executed_register_spilling": 12345, "launch__waves_per_multiprocessor": 1.2}
    )
    whole = " ".join(text for text, share in found.hints.items() if share is None)
    assert "12,345 loads and stores of spilled registers, at 128 registers" in whole
    assert (
        "Occupancy 25 %, limited by registers and shared memory; a scheduler issues in 40 %"
        in whole
    )
    assert "1.20 waves: the last one keeps 20 %" in whole
    assert any(
        "fills 50 % of the GPU once" in text
        for text in with_metrics(**{"launch__waves_per_multiprocessor": 0.5}).hints
    )
