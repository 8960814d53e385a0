"""Comparisons of prefill times: of two records, and of two runs that contain them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from compare.changed import other_machine, run
from report.make import make_checkpoint
from report.make_prefill import FUSED, UNFUSED, found, length, report
from ssdprof.compare.compare import compare
from ssdprof.compare.conditions import parse
from ssdprof.compare.read import read
from ssdprof.runs import document, prefill_file
from ssdprof.schema import Environment, Interval, RunReport
from ssdprof.schema.comparison import Comparison, Pair
from ssdprof.schema.prefill import LeftOutLength, PrefillCase, PrefillReport
from test_schemas import keeps_to
from typer.testing import CliRunner

from ssdprof.cli import app
from ssdprof.report import comparison
from ssdprof.report.tables import Table

pytestmark = pytest.mark.usefixtures("in_empty_folder")

ROW = "prefill, bundled surroundings, 1,024 tokens, fused, exact, fp32 states"
WIDTH = math.log(1.01 / 0.99) / 2  # half an interval of the made calls, in the logarithm


def slowed(case: PrefillCase, factor: float) -> PrefillCase:
    """The case with its call time multiplied by `factor`, and its speedup adjusted."""
    assert case.call is not None
    call = case.call.model_copy(
        update={
            "median_us": case.call.median_us * factor,
            "interval_us": Interval(low=case.call.interval_us.low * factor, high=case.call.interval_us.high * factor),
        }
    )
    speedup = case.speedup and case.speedup.model_copy(
        update={
            "ratio": case.speedup.ratio / factor,
            "interval": Interval(low=case.speedup.interval.low / factor, high=case.speedup.interval.high / factor),
        }
    )
    return case.model_copy(update={"call": call, "speedup": speedup})


def of(*cases: PrefillCase, **fields: Any) -> PrefillReport:
    prefill = {name: fields.pop(name) for name in ("layers", "attention", "lengths", "left_out") if name in fields}
    return report(**{"prefill": found(*cases).model_copy(update=prefill)} | fields)


def compared(base: PrefillReport | RunReport, new: PrefillReport | RunReport, *fail_if: str) -> Comparison:
    for name, one in (("base.json", base), ("new.json", new)):
        Path(name).write_text(document.dump(one) if isinstance(one, RunReport) else prefill_file.dump(one))
    return compare(
        read("base.json"), read("new.json"), smallest_difference=0.01, fail_if=[parse(text) for text in fail_if]
    )


def pair_of(found: Comparison, name: str = ROW) -> Pair:
    (pair,) = (pair for pair in found.pairs if pair.row.name == name)
    return pair


def offences(found: Comparison) -> list[str]:
    return [str(one) for condition in found.conditions for one in condition.offenders]


SLOW = of(UNFUSED, slowed(FUSED, 1.05))
BASE = of(UNFUSED, FUSED)


def test_call_times_have_a_ratio_an_interval_and_a_verdict() -> None:
    pair = pair_of(compared(BASE, SLOW))
    assert pair.time is not None
    assert pair.time == pair.call
    assert pair.time.ratio == pytest.approx(1 / 1.05)
    assert pair.time.interval.low == pytest.approx(math.exp(-math.sqrt(2) * WIDTH) / 1.05)
    assert pair.verdict == "slower"
    assert pair.over_baseline is not None
    assert pair.over_baseline.ratio == pytest.approx(1 / 1.05)
    assert pair_of(compared(SLOW, BASE)).verdict == "faster"
    assert pair_of(compared(BASE, BASE)).verdict == "no difference"
    assert pair_of(compared(BASE, SLOW), ROW.replace("fused", "unfused")).verdict == "no difference"


def test_a_condition_on_times_covers_prefills_and_names_the_row() -> None:
    assert offences(compared(BASE, SLOW, "slower:3%")) == [f"slower:3%: {ROW}: 1.05 times BASE's time [1.035, 1.065]"]
    assert len(offences(compared(BASE, SLOW, "slower-call:3%"))) == 1
    assert not offences(compared(BASE, SLOW, "slower:4%"))
    assert not offences(compared(SLOW, BASE, "slower:0%"))
    answer = CliRunner().invoke(app, ["compare", "base.json", "new.json"], prog_name="ssdprof")
    assert answer.exit_code == 0
    answer = CliRunner().invoke(app, ["compare", "new.json", "base.json", "--fail-if", "slower:3%"])
    assert answer.exit_code == 1
    assert f"FAILED: slower:3%: {ROW}: 1.05 times" in " ".join(answer.stderr.split())


def versions(**packages: str) -> Environment:
    environment = other_machine()
    return environment.model_copy(update={"packages": environment.packages | packages})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"environment": other_machine(name="NVIDIA H100")}, "other GPU: NVIDIA H200, now NVIDIA H100"),
        ({"environment": other_machine(driver="1.2")}, "other driver"),
        ({"environment": versions(triton="9.9")}, "other Triton"),
        ({"environment": versions(torch="9.9")}, "other PyTorch"),
        ({"environment": versions(transformers="9.9")}, "other transformers"),
        ({"attention": "eager"}, "other attention: sdpa, now eager"),
        (
            {"lengths": (length(UNFUSED, slowed(FUSED, 1.05)).model_copy(update={"segment_length": 512}),)},
            "other segment length: 1,024, now 512",
        ),
    ],
)
def test_absolute_times_on_something_else_do_not_compare_and_speedups_do(fields: dict[str, Any], reason: str) -> None:
    found = compared(BASE, of(UNFUSED, slowed(FUSED, 1.05), **fields), "slower:3%")
    pair = pair_of(found)
    assert (pair.time, pair.call, len(pair.incomparable)) == (None, None, 1)
    assert pair.incomparable[0].startswith(reason)
    assert pair.over_baseline is not None
    assert pair.over_baseline.ratio == pytest.approx(1 / 1.05)
    assert offences(found) == [f"slower:3%: {ROW}: 0.9524 times BASE's speedup [0.9457, 0.9591]"]
    assert pair_of(found, ROW.replace("fused", "unfused")).verdict == "not comparable"
    (said,) = comparison.compose(found).caveats
    assert reason in said
    assert "absolute times are not compared.  " in said


def test_the_models_own_convolution_counts_where_it_ran() -> None:
    own = tuple(case.model_copy(update={"surroundings": "model"}) for case in (UNFUSED, FUSED))
    base, new = (
        report(prefill=found(UNFUSED, FUSED, *own).model_copy(update={"convolution": name})) for name in ("a", "b")
    )
    whole = compared(base, new)
    assert pair_of(whole).incomparable == ()
    assert pair_of(whole, ROW.replace("bundled", "model")).incomparable == ("other convolution: a, now b",)


@pytest.mark.parametrize(
    "fields", [{"checkpoint": make_checkpoint(repo_id="other/model")}, {"layers": 6}], ids=["model", "layers"]
)
def test_another_model_or_fewer_layers_do_not_compare_at_all(fields: dict[str, Any]) -> None:
    found = compared(BASE, of(UNFUSED, FUSED, **fields), "slower:3%")
    pair = pair_of(found)
    assert (pair.time, pair.over_baseline, pair.verdict) == (None, None, "not comparable")
    assert "no case could be judged: other model: ibm-granite/" in offences(found)[0]


def test_another_batch_is_another_case() -> None:
    more = of(lengths=(length(UNFUSED, FUSED).model_copy(update={"batch": 8}),))
    found = compared(BASE, more, "slower:3%")
    assert [pair.verdict for pair in found.pairs] == ["only in NEW"] * 2 + ["only in BASE"] * 2
    assert found.pairs[1].row.place == "prefill, bundled surroundings, 8 x 1,024 tokens"
    assert offences(found) == ["slower:3%: no case could be judged: no case is in both"]


def test_what_base_timed_and_new_did_not_offends() -> None:
    failed = FUSED.model_copy(update={"status": "nonfinite", "call": None, "speedup": None})
    assert offences(compared(BASE, of(UNFUSED, failed), "slower:90%")) == [
        f"slower:90%: {ROW}: timed in BASE; nonfinite in NEW"
    ]
    late = FUSED.model_copy(update={"call": None, "speedup": None})
    assert len(offences(compared(BASE, of(UNFUSED, late), "slower:90%"))) == 1
    assert "NEW is incomplete" in offences(compared(BASE, report("partial"), "slower:90%"))[0]
    lost = LeftOutLength(seqlen=131_072, reason="spent")
    assert not offences(compared(BASE, of(UNFUSED, FUSED, left_out=(lost,)), "slower:90%"))


def test_lengths_of_one_implementation_and_surroundings_have_a_mean() -> None:
    short, long = length(UNFUSED, FUSED), length(UNFUSED, FUSED).model_copy(update={"seqlen": 16_384})
    slow = long.model_copy(update={"cases": (UNFUSED, slowed(FUSED, 1.21))})
    totals = compared(of(lengths=(short, long)), of(lengths=(short, slow))).totals
    assert [(one.where, one.implementation, one.over, one.by, one.cases) for one in totals] == [
        ("prefill, bundled surroundings", name, "length", "call time", 2) for name in ("unfused", "fused")
    ]
    assert totals[1].change.ratio == pytest.approx(1 / 1.1)


def test_prefills_within_runs() -> None:
    base, new = (run(prefill=one.prefill) for one in (BASE, SLOW))
    found = compared(base, new, "slower:3%")
    assert [one.removeprefix("slower:3%: ").split(":")[0] for one in offences(found)] == [ROW]
    assert {(total.over, total.by) for total in found.totals} == {("layer", "device time"), ("length", "call time")}
    assert len({total.where for total in found.totals}) == 2
    assert pair_of(compared(base, run())).verdict == "only in BASE"


def test_a_record_and_a_run_do_not_compare() -> None:
    base, new = Path("base.json"), Path("new.json")
    base.write_text(document.dump(run(prefill=BASE.prefill)))
    new.write_text(prefill_file.dump(BASE))
    answer = CliRunner().invoke(app, ["compare", "base.json", "new.json"])
    assert answer.exit_code == 2
    assert "BASE is a run and NEW is a prefill." in answer.stderr
    new.write_text('{"prefill_version": 1}')
    answer = CliRunner().invoke(app, ["compare", "base.json", "new.json"])
    assert answer.exit_code == 2
    assert "new.json: The file is not a result of ssdprof prefill: ssdprof_version" in " ".join(answer.stderr.split())


def test_the_tables_show_both_sides() -> None:
    portable = slowed(FUSED, 1.05).model_copy(update={"variant": "portable"})
    shown = comparison.compose(compared(BASE, of(UNFUSED, portable)))
    assert [section.title for section in shown.sections] == ["Prefill time of the model", "What ran"]
    table = shown.sections[0].blocks[0]
    assert isinstance(table, Table)
    assert table.rows[1] == (
        "prefill, bundled surroundings, 1,024 tokens", "fused", "exact, fp32", "hopper, now portable", "slower",
        "0.95x [0.94, 0.97]", "0.95x [0.95, 0.96]", "1.00 ms", "1.05 ms", "2.00x", "1.90x",
    )  # fmt: skip
    assert "by call time, one length" in shown.summary[1].text


def test_the_json_keeps_to_the_published_schema() -> None:
    found = compared(BASE, SLOW, "slower:3%")
    keeps_to("comparison-v1", found.model_dump_json())
    assert Comparison.model_validate_json(found.model_dump_json()) == found


RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-prefill"


@pytest.mark.parametrize("file", sorted(RECORDED.glob("*.json")), ids=lambda file: file.stem)
def test_a_recorded_result_does_not_differ_from_itself(file: Path) -> None:
    subject = read(str(file))
    found = compare(subject, subject, smallest_difference=0.01, fail_if=[parse("slower:0%")])
    assert found.passed
    assert {pair.verdict for pair in found.pairs} == {"no difference"}
