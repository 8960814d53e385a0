"""Facts, self-checks and hints of a kernel; a value that was not collected is never 0."""

from dataclasses import replace

import pytest
from stalls import synthetic

from ssdprof.schema import EXACT_FP32, Dims, Launch, LayerRef
from ssdprof.schema.stalls import Launched, Profiled
from ssdprof.stalls import facts
from ssdprof.stalls.analyse import analyse, stalls_of
from ssdprof.stalls.raw import Point


def subject(*kernels: str, launch_count: int = 1) -> Profiled:
    launches = tuple(Launch(kernel=name, config={}) for name in kernels)
    return Profiled(
        layer=LayerRef(index=0, name="layers.0", operator="ssd"),
        dims=Dims(operator="ssd", batch=1, seqlen=64, chunk_size=64, dtype="bf16", sizes={}, words="1 head x 64"),
        precision=EXACT_FP32,
        launched=(Launched(implementation="fused", variant="v", launch_count=launch_count, launches=launches),),
    )


def statuses(report_or_kernel: object) -> dict[str, str]:
    return {check.name: check.status for check in report_or_kernel.checks}  # type: ignore[attr-defined]


def test_metrics_become_facts_in_our_units() -> None:
    found = stalls_of(synthetic.kernel())
    assert found.throughput.duration_us == 2.0
    assert found.resources.grid == (40, 1, 1)
    assert found.resources.limited_by == ("registers", "shared memory")
    assert found.sample_count == 200
    assert found.busy_samples == 200 - 22 - 50


def test_what_was_not_collected_is_none_and_named() -> None:
    found = stalls_of(synthetic.kernel(metrics={}, totals={}, points=()))
    assert all(value is None for _, value in found.throughput)
    assert {name for name, value in found.resources if value is not None} == {"limited_by"}
    assert found.resources.limited_by == ()
    assert found.sample_count is None
    assert {"duration_us", "registers", "limited_by", "stall reasons", "source lines"} <= set(found.not_collected)
    assert set(statuses(found).values()) == {"not checked"}
    assert found.hints == ()


def test_a_zero_that_was_collected_stays_a_zero() -> None:
    zeros = {"dram__bytes_read.sum": 0, "lts__t_bytes.sum": 0}
    found = stalls_of(synthetic.kernel(metrics=synthetic.METRICS | zeros))
    assert (found.throughput.dram_read_bytes, found.throughput.l2_bytes) == (0, 0)
    assert "dram_read_bytes" not in found.not_collected


def test_another_name_of_a_metric_will_do() -> None:
    metrics = {"lts__t_sectors.sum": 10, "derived__local_spilling_requests": 7}
    found = stalls_of(synthetic.kernel(metrics=metrics))
    assert (found.throughput.l2_bytes, found.resources.spill_requests) == (320, 7)


@pytest.mark.parametrize(("pipe_pct", "peak"), [(40.0, 1000.0), (20.0, 2000.0)])
def test_the_peak_of_tensor_cores_is_that_of_dense_operands(pipe_pct: float, peak: float) -> None:
    name = "sm__ops_path_tensor_src_bf16_dst_fp32.sum"
    metrics = {
        name: 4e9,
        f"{name}.pct_of_peak_sustained_elapsed": 20.0,
        f"{name}.peak_sustained_elapsed.per_second": 2e15,
        "sm__ops_path_tensor_src_int8.sum": 0.0,
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": pipe_pct,
    }
    found = facts.throughput(synthetic.kernel(metrics=metrics))
    assert found.tensor_flops == 4e9
    assert found.tensor_peak_tflops == peak


FP32 = {
    f"smsp__sass_thread_inst_executed_op_{name}_pred_on.sum.per_cycle_elapsed": 10.0
    for name in ("fadd", "fmul", "ffma")
}


@pytest.mark.parametrize(
    "cycles", [{"smsp__cycles_elapsed.avg": 3000.0}, {"smsp__cycles_elapsed.avg.per_second": 1.5e9}], ids=str
)
def test_fp32_operations_are_counted_by_cycles(cycles: dict[str, float]) -> None:
    """1.5 GHz for 2 us; a fused multiplication and addition counts as two."""
    found = facts.throughput(synthetic.kernel(metrics=synthetic.METRICS | FP32 | cycles))
    assert found.fp32_flops == 40 * 3000
    assert facts.throughput(synthetic.kernel(metrics=synthetic.METRICS | FP32)).fp32_flops is None


def test_a_kernel_without_products_lacks_no_peak_for_them() -> None:
    metrics = synthetic.METRICS | {"sm__ops_path_tensor_src_int8.sum": 0.0}
    found = stalls_of(synthetic.kernel(metrics=metrics))
    assert found.throughput.tensor_flops == 0
    assert "tensor_peak_tflops" not in found.not_collected
    assert "tensor_peak_tflops" in stalls_of(synthetic.kernel()).not_collected


def test_where_no_warp_was_sampled_averages_are_taken_by_one_name() -> None:
    name = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
    metrics = {name.format("gmma"): 0.5, name.format("no_instruction"): 1.5, name.format("wait"): 0.0}
    found = stalls_of(synthetic.kernel(metrics=metrics, totals={}, points=()))
    assert found.average == {"no_instructions": 1.5, "warpgroup_arrive": 0.5}
    assert "stall reasons" not in found.not_collected
    assert stalls_of(synthetic.kernel(metrics=synthetic.METRICS | metrics)).average == {}


# --- self-checks


def test_checks_pass_on_a_report_that_adds_up() -> None:
    report = analyse([synthetic.report(synthetic.kernel())], subject("_kernel"))
    assert set(statuses(report).values()) == {"ok"}
    assert set(statuses(report.kernels[0]).values()) == {"ok"}


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"metrics": synthetic.METRICS | {"smsp__pcsamp_sample_count": 201}}, "reasons add up to the samples"),
        ({"totals": {"wait": 199}}, "lines add up to the kernel"),
        ({"totals": {"wait": 199}}, "stages add up to the kernel"),
        ({"totals": {"wait": 120, "barrier": 80}}, "every reason adds up over the lines"),
        ({"metrics": synthetic.METRICS | {"smsp__pcsamp_dropped_bytes": 64}}, "no sample was dropped"),
        ({"sources": {}}, "the source was recorded"),
        ({"sources": {synthetic.FILE: "@jit\ndef f():\n    pass\n"}}, "every line has a stage"),
    ],
)
def test_a_check_fails_where_something_is_missing(changes: dict[str, object], check: str) -> None:
    assert statuses(stalls_of(synthetic.kernel(**changes)))[check] == "failed"


def test_the_check_says_what_is_missing() -> None:
    kernel = stalls_of(synthetic.kernel(metrics=synthetic.METRICS | {"smsp__pcsamp_sample_count": 201}))
    assert next(check.detail for check in kernel.checks if check.status == "failed") == "200 of 201; 1 missing"


@pytest.mark.parametrize(
    ("wanted", "count", "detail"),
    [
        (("_kernel", "_other"), 2, "not profiled: _other; 1 launches instead of 2"),
        (("_other",), 1, "not profiled: _other; not requested: _kernel"),
        (("_kernel",), 3, "1 launches instead of 3"),
    ],
)
def test_launches_that_nobody_asked_for_are_found(wanted: tuple[str, ...], count: int, detail: str) -> None:
    report = analyse([synthetic.report(synthetic.kernel())], subject(*wanted, launch_count=count))
    failed = [check for check in report.checks if check.status == "failed"]
    assert [check.detail for check in failed] == [detail]


def test_a_report_from_elsewhere_cannot_be_asked_what_was_wanted() -> None:
    report = analyse([synthetic.report(synthetic.kernel(), whole=None)])
    assert set(statuses(report).values()) == {"not checked"}
    assert analyse([synthetic.report(synthetic.kernel(), whole=False)]).checks[0].status == "failed"


# --- hints


def test_a_hint_names_its_evidence() -> None:
    found = stalls_of(synthetic.kernel())
    hint = next(hint for hint in found.hints if hint.stage == "loads")
    assert hint.evidence == (
        "long_scoreboard in loads is 30 % of the kernel's busy samples, 100 % of them on kernel.py:6 `return p`; "
        "L2 hit rate 92 %."
    )
    assert "latency of L2" in hint.advice


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ({"gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": 88.0}, "DRAM is full"),
        ({"lts__throughput.avg.pct_of_peak_sustained_elapsed": 88.0}, "L2 is full"),
        ({"lts__t_sector_hit_rate.pct": 20.0}, "latency of loads"),
    ],
)
def test_what_helps_a_load_depends_on_the_memories(metric: dict[str, float], words: str) -> None:
    found = stalls_of(synthetic.kernel(metrics=synthetic.METRICS | metric))
    assert words in next(hint.advice for hint in found.hints if hint.stage == "loads")


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        ("", "look at the roles that fill the barrier, or"),
        ("def f():\n    mbarrier.arrive(shared.full)\n", "look at `f`, which fills the barrier, or"),
        (
            "def f():\n    mbarrier.arrive(shared.full)\ndef g():\n    mbarrier.expect(shared.full, 1)\n",
            "look at `f` and `g`, which fill the barrier, or",
        ),
    ],
)
def test_a_wait_for_a_role_names_the_role(roles: str, words: str) -> None:
    source = synthetic.SOURCE.replace("shared.empty", "shared.full").replace(
        '"empty": "ahead"', '"full": "waiting.chunk"'
    )
    found = stalls_of(synthetic.kernel(sources={synthetic.FILE: source + roles}))
    assert words in next(hint.advice for hint in found.hints if hint.stage == "waiting.chunk")


def test_idle_warps_and_issuing_give_no_hint() -> None:
    points = (*synthetic.POINTS, Point(0x180, synthetic.FILE, 9, "FADD", {"selected": 500}))
    found = stalls_of(synthetic.kernel(points=points))
    assert not [hint for hint in found.hints if "selected in" in hint.evidence or hint.stage in ("ahead", "idle warps")]


def test_a_wait_for_tensor_cores_is_told_from_one_for_warps() -> None:
    source = synthetic.SOURCE.replace("return exp2(x)", "return warpgroup_mma_wait(0, deps=[x])")
    points = (Point(0x150, synthetic.FILE, 9, "WARPGROUP.DEPBAR", {"barrier": 60}),)
    found = stalls_of(synthetic.kernel(points=points, sources={synthetic.FILE: source}))
    assert "tensor cores are at work" in found.hints[0].advice
    other = stalls_of(synthetic.kernel(points=points))
    assert "slowest of their block" in other.hints[0].advice


def test_spills_occupancy_and_waves_are_spoken_of() -> None:
    metrics = synthetic.METRICS | {
        "sass__inst_executed_register_spilling": 12345,
        "launch__waves_per_multiprocessor": 1.2,
    }
    evidence = " ".join(hint.evidence for hint in stalls_of(synthetic.kernel(metrics=metrics)).hints)
    assert "12,345 loads and stores of spilled registers, at 128 registers" in evidence
    assert "Occupancy 25 %, limited by registers and shared memory; a scheduler issues in 40 %" in evidence
    assert "1.20 waves: the last one keeps 20 %" in evidence


def test_the_implementation_is_told_by_the_kernel() -> None:
    assert stalls_of(synthetic.kernel(function="_fused_kernel")).implementation == "fused"
    assert stalls_of(synthetic.kernel()).implementation == ""
    report = analyse([synthetic.report(replace(synthetic.kernel(), function="_mine"))], subject("_mine"))
    assert report.kernels[0].implementation == "fused"
