"""Prefill times in a report: ratios, parts that add up, failed predictions, and lengths without times."""

from __future__ import annotations

import make
import pytest
from report.make_prefill import FUSED, UNFUSED, case, found, length, report, speedup
from rich.console import Console

from ssdprof.report import markdown, prefill_document
from ssdprof.report import terminal as tables
from ssdprof.report.tables import prefill
from ssdprof.schema.prefill import LeftOutLength, PrefillReport


def test_a_column_of_parts_adds_up_to_the_call() -> None:
    table = prefill.parts(found(UNFUSED, FUSED), length(UNFUSED, FUSED))
    assert table is not None
    for column, whole in ((1, 2000), (2, 1000)):
        *shares, total = (float(row[column].split("(")[1].rstrip("%)")) for row in table.rows)
        assert total == 100
        assert sum(shares) == pytest.approx(100, abs=0.3), whole
    assert table.rows[-2][0] == "GPU idle"


def test_where_a_prediction_fails_the_parts_account_for_the_whole_difference() -> None:
    """The predicted gain is 60 x 5 = 300, the measured one 1000: 400 more in the mixer, 300 more in the idle GPU."""
    (said,) = prefill.differences(found(UNFUSED, FUSED))
    assert said == (
        "fused hopper with bundled surroundings at 1,024 tokens: Amdahl's law predicts 1.18x, measured is 2.00x.  "
        "The difference: 400 µs less in the mixer and 300 µs less in the idle GPU."
    )


@pytest.mark.parametrize(("predicted", "said"), [(1.81, 0), (1.79, 1), (2.19, 0), (2.21, 1), (None, 0)])
def test_ten_percent_are_an_agreement(predicted: float | None, said: int) -> None:
    own = FUSED.model_copy(update={"speedup": speedup(2.0, predicted)})
    assert len(list(prefill.differences(found(UNFUSED, own)))) == said


def test_without_a_profile_a_difference_is_told_all_the_same() -> None:
    own = FUSED.model_copy(update={"parts": ()})
    (said,) = prefill.differences(found(UNFUSED, own))
    assert said.endswith("no profile says why.")


def test_what_was_not_timed_is_said() -> None:
    refused = UNFUSED.model_copy(
        update={"implementation": "mamba_ssm", "status": "refused", "reason": "no", "call": None}
    )
    left = FUSED.model_copy(update={"left_to_model": ("the convolution",)})
    late = FUSED.model_copy(update={"call": None, "speedup": None, "reason": "the turns need 9 s"})
    spent = "the budget of 60 s was spent"
    lost = LeftOutLength(seqlen=131_072, reason=spent)
    some = LeftOutLength(seqlen=16_384, surroundings="model", implementations=("fused", "fla"), reason=spent)
    reported = found(refused, left, late, left_out=(lost, some))
    assert list(prefill.failures(reported)) == [
        "mamba_ssm with bundled surroundings at 1,024 tokens: refused: no.",
        "fused hopper at 1,024 tokens: the model itself computed the convolution.",
        "fused hopper with bundled surroundings at 1,024 tokens: not timed: the turns need 9 s.",
        "131,072 tokens: left out: the budget of 60 s was spent.",
        "fused and fla with model surroundings at 16,384 tokens: left out: the budget of 60 s was spent.",
    ]
    times = prefill.times(reported)
    assert times is not None
    assert [row[3] for row in times.rows] == ["refused", "1.00 ms", "not timed"]


def test_fewer_layers_than_the_model_has_are_in_every_table() -> None:
    some = found(UNFUSED, FUSED, layers=6)
    times, parts = prefill.times(some), prefill.parts(some, some.lengths[0])
    assert times is not None
    assert parts is not None
    assert "only 6 of 40 layers" in times.title
    assert "only 6 of 40 layers" in parts.title


def test_both_renderers_show_it_and_a_partial_report_says_so() -> None:
    whole = markdown.render_document(prefill_document.compose(report()))
    assert "2.00x [1.99, 2.01] (+100.0%) over unfused at 1,024 tokens, faster; Amdahl's law predicts 1.18x." in whole
    assert "causal-conv1d 1.5" in whole
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(tables.render_document(prefill_document.compose(report("partial")), good=prefill_document.GOOD))
    assert "Partial: the command did not end." in console.export_text()
    assert prefill_document.compose(report("partial")).failed
    assert not prefill_document.compose(report()).failed


def test_a_failed_case_holds_no_time_and_fails_the_report() -> None:
    with pytest.raises(ValueError, match="a time belongs only to a case that passed"):
        case("fused", 1000, {}, status="failed")
    failed = case("fused", 1000, {}, status="nonfinite", call=None)
    assert found(UNFUSED, failed).failed == (failed,)


def test_a_runs_report_has_the_same_sections() -> None:
    whole = markdown.render(make.make_report(prefill=found(UNFUSED, FUSED)))
    assert "### Prefill time" in whole
    assert "### Prefill time" not in markdown.render(make.make_report())


def test_json_reads_back() -> None:
    assert PrefillReport.model_validate_json(report().model_dump_json()) == report()


def test_weights_gpu_time_and_throttling_are_said_at_the_top() -> None:
    slowed = make.make_clocks(throttle_reasons=("power cap",))
    head, _ = markdown.render_document(prefill_document.compose(report(clocks=slowed))).split("### Prefill time", 1)
    assert "weights: from the hub, revision 0123456789ab, GPU: NVIDIA H200, when: 20" in head
    assert "The GPU throttled while it was timed (power cap)" in head
