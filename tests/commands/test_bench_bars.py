"""Results against the bars of the kernels."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import bars
import cases
import check_bars
import pytest
import recorded
from benches import measured, report

from ssdprof.core.base import EXACT_FP32
from ssdprof.core.report import Report
from ssdprof.store.reports import dump

RELAXED = "relaxed, bf16 states"
RULES = tomllib.loads("""
[[bar]]
name = "exact"
shapes = ["tiny"]
tokens = ["1 x 40"]
of = "fused exact fp32"
over = "mamba_ssm"
device = { must = 3.0, goal = 4.0 }
call = { must = 2.9 }

[[bar]]
name = "relaxed"
shapes = ["tiny"]
tokens = ["1 x 40"]
of = "fused relaxed"
over = "fused exact"
device = { must = 1.0, goal = 1.15 }

[first_call]
name = "first call"
of = ["fused"]
seconds = 2.0
""")


@cache
def timed(
    fused_us: float = 100.0, relaxed_us: float = 80.0, seconds: float = 1.5, **fields
) -> Report:
    """mamba_ssm takes 300 us and has two precisions, one of them slower.  A call costs 10 us
    more.
    """
    first = {"seconds": 9.0, "compiled": {"one": seconds}}
    times = (
        ("mamba_ssm", 300.0, EXACT_FP32),
        ("mamba_ssm", 400.0, RELAXED),
        ("fused", fused_us, EXACT_FP32),
        ("fused", relaxed_us, RELAXED),
    )
    return report(*(measured(*one, first_call=first) for one in times), **fields)


def check(*reports: Report) -> dict[tuple[str, str], Any]:
    cells = [cell for one in reports for cell in recorded.recorded("bench", one)]
    return {(one.name, one.what): one for one in bars.check(RULES, cells)}


def test_what_holds_and_what_does_not():
    found = check(timed())
    device = found["exact", "as mamba_ssm, device"]
    call = found["exact", "as mamba_ssm, call"]
    assert (device.least.ratio, device.holds, device.at_goal) == (3.0, True, 0)
    assert call.least.ratio == pytest.approx(310 / 110)
    assert (call.holds, len(call.missed)) == (False, 1)
    relaxed = found["relaxed", "as fused exact, device"]
    assert (relaxed.least.ratio, relaxed.holds, relaxed.at_goal) == (1.25, True, 1)
    assert not check(timed(relaxed_us=101.0))["relaxed", "as fused exact, device"].holds


def test_what_was_not_measured_does_not_hold():
    alone = report(measured("fused", 1.0))
    device = check(alone)["exact", "as mamba_ssm, device"]
    assert (device.holds, device.missed, len(device.unmeasured)) == (False, (), 1)
    assert not check(alone)["first call", "as 2 s, compiling"].holds


@pytest.mark.parametrize(
    ("kernels", "least"),
    [(("", "", ""), 1.5), (("01", "02", "03"), 2.0)],
    ids=["of unknown kernels", "of the newest kernels"],
)
def test_of_several_results_that_have_both_the_least_counts(kernels: tuple[str, ...], least):
    """Without a baseline a result does not make the others older."""
    less = timed(200.0, kernels=kernels[0])
    more = timed(150.0, kernels=kernels[1], created="2026-01-02T00:00:00+00:00")
    alone = report(measured("fused", 1.0), kernels=kernels[2], created="2026-01-03T00:00:00+00:00")
    for order in ((less, more, alone), (alone, more, less)):
        assert check(*order)["exact", "as mamba_ssm, device"].least.ratio == least


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("status", ["inaccurate", "refused", "failed"])
def test_a_kernel_that_failed_has_missed_whatever_another_result_says(status, *, library):
    good = timed()
    new = timed(created="2026-01-02T00:00:00+00:00")
    made = tuple(
        cases.failed(case, status) if case.label.startswith("fused, exact") else case
        for case in new.cases
        if library or case.implementation == "fused"
    )
    found = check(good, new.changed(cases=made))
    device = found["exact", "as mamba_ssm, device"]
    assert [reading.ratio for reading in device.missed] == [0]
    assert "exact (as mamba_ssm, device): tiny, 1 x 40: failed" in check_bars.remarks(
        found.values()
    )
    # its baseline failed once, and was timed once
    assert found["relaxed", "as fused exact, device"].holds


def test_a_rival_that_failed_once_is_taken_from_where_it_was_timed():
    good = timed()
    new = timed(fused_us=1.0)
    made = (
        cases.failed(one, "failed") if one.implementation == "mamba_ssm" else one
        for one in new.cases
    )
    failed = new.changed(cases=tuple(made))
    assert check(failed, good)["exact", "as mamba_ssm, device"].least.ratio == 3.0
    assert len(check(failed)["exact", "as mamba_ssm, device"].unmeasured) == 1


def test_a_kernel_that_compiles_too_long_is_named():
    slow = check(timed(seconds=2.5))["first call", "as 2 s, compiling"]
    assert slow.least.ratio == pytest.approx(0.8)
    assert slow.least.cell == "one for tiny, 1 x 40"
    assert not slow.holds


A_BAR = """[[bar]]
name = "a bar"
shapes = ["tiny"]
tokens = ["1 x 40"]
of = "fused exact"
over = "mamba_ssm"
device = {{ must = {must} }}
"""


def check_files(folder: Path, monkeypatch, must: int, *gpus: str) -> int | str | None:
    """The exit code of the script, for a result of each GPU."""
    (folder / "bars.toml").write_text(A_BAR.format(must=must))
    for number, name in enumerate(gpus):
        environment = cases.environment()
        of_gpu = environment.changed(gpu=environment.gpu.changed(name=name))
        (folder / f"{number}.json").write_text(dump(timed().changed(environment=of_gpu)))
    files = [str(folder / f"{number}.json") for number in range(len(gpus))]
    monkeypatch.setattr("sys.argv", ["check_bars.py", *files, "--bars", str(folder / "bars.toml")])
    try:
        check_bars.main()
    except SystemExit as ended:
        return ended.code
    return 0


def test_the_script_prints_a_table_and_ends_with_1_if_a_bar_does_not_hold(
    tmp_path, monkeypatch, capsys
):
    """Of one GPU only."""
    assert check_files(tmp_path, monkeypatch, 3, "NVIDIA H200", "NVIDIA H200") == 0
    assert "held" in capsys.readouterr().out
    assert check_files(tmp_path, monkeypatch, 4, "NVIDIA H200") == 1
    assert (
        "a bar (as mamba_ssm, device): tiny, 1 x 40: 3.00x, 25 % short of 4.00x"
        in capsys.readouterr().out
    )
    assert check_files(tmp_path, monkeypatch, 3, "NVIDIA H200", "NVIDIA H100") == 2
    assert "the results are of NVIDIA H100 and NVIDIA H200" in capsys.readouterr().err


OPERATORS = ("ssd", "gdn")


def bars_of(operator: str) -> dict[str, Any]:
    return tomllib.loads((check_bars.HERE / f"bars-{operator}.toml").read_text())


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_bar_holds_in_the_committed_results(operator):
    cells = [
        cell
        for cell in recorded.committed("h200")
        if cell.bench.operator == operator and not cell.bench.fixed
    ]
    found = bars.check(bars_of(operator), cells)
    assert found
    assert list(check_bars.remarks(found)) == []


# --- other yardsticks


def of_one(fields: dict[str, Any], result: Report) -> bars.Finding:
    bar = {
        "name": "a bar",
        "shapes": ["tiny"],
        "tokens": ["1 x 40"],
        "of": "fused exact fp32",
    } | fields
    (found,) = bars.check({"bar": [bar]}, list(recorded.recorded("b", result)))
    return found


def test_over_microseconds_and_over_the_floor():
    result = report(measured("fused", 50.0))
    found = of_one({"over": 100, "device": {"must": 2.0}}, result)
    assert found.readings[0].ratio == 2.0
    assert (found.what, found.holds) == ("as 100 us, device", True)
    floor_us = result.cases[0].floor_us(result.ceilings)
    assert floor_us
    found = of_one({"over": "floor", "device": {"goal": 0.77}}, result)
    assert found.readings[0].ratio == pytest.approx(floor_us / 50, rel=1e-5)
    assert (found.must, found.holds, found.at_goal) == (0.0, True, 0)


def test_errors_count_where_all_tokens_were_compared():
    rules = {"over": "unfused exact", "error": {"must": 0.99}, "checked_in_full": True}
    full, short = (
        report(
            *(
                measured(name, us, checked=checked)
                for name, us in (("fused", 50.0), ("unfused", 90.0))
            )
        )
        for checked in (None, 16)
    )
    assert of_one(rules, full).what == "as unfused exact, error"
    assert of_one(rules, full).readings[0].ratio == pytest.approx(1.0)
    assert len(of_one(rules, short).unmeasured) == 1
