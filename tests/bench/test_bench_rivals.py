"""Bars over the fastest rival, over a floor or a time, and by draw, for results with a part of the cells."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import bars
import check_bars
import pytest
from bench.benches import measured, report
from check_bars import against, summary
from recorded import recorded
from rivals import Rivals

from ssdprof import operators
from ssdprof.core.report import Report
from ssdprof.store.reports import dump

GENERATOR = operators.get("gdn").generated

RECORDS = """
yardstick = "fla"
rivals = ["flash_qla", "flashinfer"]

[[record]]
name = "flashinfer"
version = "0.7.2"
shapes = ["tiny"]
drawn = ["", "normalised"]
[record.us]
"1 x 40" = [100, 400]

[[record]]
name = "flash_qla"
version = "0.1.3"
shapes = ["tiny"]
drawn = [""]
[record.us]
"1 x 40" = [150, 300]
"""


@pytest.fixture
def rivals(tmp_path: Path) -> Rivals:
    (tmp_path / "rivals.toml").write_text(RECORDS)
    return Rivals.load(tmp_path / "rivals.toml")


def timed(*, drawn: tuple[str, ...] = (), checked: int | None = None, **costs: float) -> Report:
    """A report of implementations with given device times; a call takes 10 us more."""
    return report(*(measured(name, us, drawn=drawn, checked=checked) for name, us in costs.items()))


def check(
    rules: dict[str, Any], reports: list[Report], rivals: Rivals = bars.NO_RIVALS, *, partial: bool = False
) -> tuple[bars.Finding, ...]:
    return bars.check(rules, [cell for one in reports for cell in recorded("b", one)], rivals, partial=partial)


def rule(**fields: Any) -> dict[str, Any]:
    bar = {"name": "a bar", "shapes": ["tiny"], "tokens": ["1 x 40"], "of": "fused exact fp32", "over": "best rival"}
    return {"bar": [bar | {"device": {"must": 2.0}} | fields]}


# --- the best rival


def test_a_rival_that_no_run_has_is_reckoned_by_the_yardstick(rivals: Rivals) -> None:
    (found,) = check(rule(), [timed(fused=50.0, fla=400.0)], rivals)
    (reading,) = found.readings
    assert reading.ratio == pytest.approx(400 * 100 / 400 / 50)
    assert reading.rival == "flashinfer 0.7.2, recorded"
    assert found.holds
    assert list(against([found])) == ["best rival is flashinfer 0.7.2, recorded: tiny, 1 x 40"]


def test_a_measured_rival_stands_for_its_record(rivals: Rivals) -> None:
    """FlashInfer takes 110 us, more than in its record; FlashQLA's record is 100 us; ours takes 50."""
    (found,) = check(rule(), [timed(fused=50.0, fla=200.0, flashinfer=110.0)], rivals)
    assert (found.readings[0].ratio, found.readings[0].rival) == (pytest.approx(2.0), "flash_qla 0.1.3, recorded")
    (found,) = check(rule(), [timed(fused=50.0, fla=200.0, flashinfer=80.0)], rivals)
    assert (found.readings[0].ratio, found.readings[0].rival) == (pytest.approx(1.6), "flashinfer, in the run")
    assert not found.holds


def test_the_yardstick_may_be_the_fastest_but_not_the_only_one(rivals: Rivals) -> None:
    (found,) = check(rule(), [timed(fused=50.0, fla=90.0, flashinfer=120.0, flash_qla=95.0)], rivals)
    assert (found.readings[0].ratio, found.readings[0].rival) == (pytest.approx(1.8), "fla, in the run")
    (found,) = check(rule(), [timed(fused=50.0, fla=90.0)], Rivals(yardstick="fla"))
    assert len(found.unmeasured) == 1


@pytest.mark.parametrize(("drawn", "ratio"), [(("normalised",), 2.0), (("quarter-ungated",), None)])
def test_a_record_serves_its_draws_alone(rivals: Rivals, drawn: tuple[str, ...], ratio: float | None) -> None:
    rules, result = rule(drawn=list(drawn)), timed(fused=50.0, fla=400.0, drawn=drawn)
    (found,) = check(rules, [result], rivals)
    assert found.readings[0].ratio == ratio
    (other,) = check(rule(), [result], rivals)
    assert len(other.unmeasured) == 1, "inputs that are drawn otherwise are other cells"


def test_without_the_yardstick_nothing_is_reckoned(rivals: Rivals) -> None:
    (found,) = check(rule(), [timed(fused=50.0)], rivals)
    assert len(found.unmeasured) == 1


def test_the_committed_records_are_of_cells_that_a_bar_speaks_of() -> None:
    rivals = Rivals.load()
    assert rivals.yardstick == "fla"
    spoken = {
        (shape, tokens)
        for bar in bars_of("gdn")
        if bar["over"] == "best rival"
        for shape in bar["shapes"]
        for tokens in bar["tokens"]
    }
    places = {(shape, tokens) for _, shape, tokens, _ in rivals.records}
    assert {name for name, *_ in rivals.records} == set(rivals.names)
    assert ("qwen3.5-9b", "1 x 65,536") in places & spoken
    assert {drawn for *_, drawn in rivals.records} <= {"", *GENERATOR.ways}
    assert rivals.records["flashinfer", "qwen3.5-9b", "1 x 65,536", ""].ratio == pytest.approx(1521 / 3871)


# --- other yardsticks


def test_over_microseconds_and_over_the_floor() -> None:
    result = timed(fused=50.0)
    (found,) = check(rule(over=100), [result])
    assert (found.readings[0].ratio, found.what) == (2.0, "as 100 us, device")
    floor_us = result.cases[0].floor_us(result.ceilings)
    assert floor_us
    (found,) = check(rule(over="floor", device={"goal": 0.77}), [result])
    assert found.readings[0].ratio == pytest.approx(floor_us / 50, rel=1e-5)
    assert (found.must, found.holds, found.at_goal) == (0.0, True, 0)


def test_errors_count_where_all_tokens_were_compared() -> None:
    rules = rule(over="unfused exact", device={}, error={"must": 0.99}, checked_in_full=True)
    del rules["bar"][0]["device"]
    full, short = timed(fused=50.0, unfused=90.0), timed(fused=50.0, unfused=90.0, checked=16)
    (found,) = check(rules, [full])
    assert found.what == "as unfused exact, error"
    assert found.readings[0].ratio == pytest.approx(1.0)
    (found,) = check(rules, [short])
    assert len(found.unmeasured) == 1


# --- a part of the cells


def test_partial_judges_what_was_measured() -> None:
    rules = rule(over="fla", tokens=["1 x 40", "1 x 80"])
    (strict,) = check(rules, [timed(fused=50.0, fla=200.0)])
    (partial,) = check(rules, [timed(fused=50.0, fla=200.0)], partial=True)
    assert (strict.holds, len(strict.unmeasured)) == (False, 1)
    assert (partial.holds, partial.left_out, len(partial.readings)) == (True, 1, 1)
    assert summary([partial], "gdn").rows[0][5] == "held; 1 cells left out"
    (missed,) = check(rules, [timed(fused=150.0, fla=200.0)], partial=True)
    assert not missed.holds


def test_partial_does_not_pass_a_bar_of_which_nothing_was_measured() -> None:
    (found,) = check(rule(over="fla", tokens=["1 x 80"]), [timed(fused=50.0, fla=200.0)], partial=True)
    assert (found.holds, found.left_out) == (False, 0)


@pytest.mark.slow
def test_the_script_takes_partial(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(dump(timed(fused=50.0, mamba_ssm=200.0)))
    (tmp_path / "bars.toml").write_text(
        '[[bar]]\nname="a bar"\nshapes=["tiny"]\ntokens=["1 x 40", "1 x 80"]\nof="fused"\nover="mamba_ssm"\n'
        "device={must=3}\n"
    )
    command = [sys.executable, check_bars.__file__, str(tmp_path / "result.json")]
    command += ["--bars", str(tmp_path / "bars.toml")]
    strict, partial = (
        subprocess.run([*command, *words], capture_output=True, text=True, check=False) for words in ([], ["--partial"])
    )
    assert (strict.returncode, partial.returncode) == (1, 0), strict.stderr + partial.stderr
    assert "not measured: tiny, 1 x 80" in strict.stdout
    assert "held; 1 cells left out" in partial.stdout


# --- the committed bars of GDN


def bars_of(operator: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads((check_bars.HERE / f"bars-{operator}.toml").read_text())["bar"]
    return found


def test_relaxed_is_held_to_exact_in_every_cell_of_exact() -> None:
    def cells(of: str) -> set[tuple[str, str, str]]:
        return {
            (shape, tokens, drawn)
            for bar in bars_of("gdn")
            if bar["of"] == of and "device" in bar
            for shape in bar["shapes"]
            for tokens in bar["tokens"]
            for drawn in bar.get("drawn", [""])
        }

    exact = {cell for cell in cells("fused exact fp32") if cell[2] != "normalised"}  # the same kernels
    assert cells("fused relaxed") == exact
