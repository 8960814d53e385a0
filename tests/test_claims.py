"""The table of published claims: it says what the recorded results say, and its conditions can fail."""

from __future__ import annotations

import claims
import pytest

ROW = {
    "study": "fig9-10", "claim": "faster", "quoted": "1.5x", "result": "published/fig9-10", "quantity": "device ratio",
    "of": "published relaxed fp16", "over": "mamba_ssm exact fp16", "at": "1 x 1,024", "must": ">= 1.5 <= 2.51",
    "measured": "", "verdict": "", "note": "",
}  # fmt: skip


def test_the_table_and_its_page_are_filled_from_the_results() -> None:
    rows = claims.rows()
    found = claims.filled(rows)
    assert found == rows, "python benchmarks/claims.py"
    assert claims.as_csv(found) == claims.CLAIMS.read_text(encoding="utf-8")
    text = claims.PAGE.read_text(encoding="utf-8")
    assert claims.page(text, found) == text
    assert all(row["claim"] in text for row in rows)
    assert {row["study"] for row in rows} == set(claims.sources())
    unmeasured = [row for row in rows if row["verdict"] == claims.NOT_MEASURED]
    assert all(row["note"] or row["quantity"].endswith("_us") for row in unmeasured)


def filled(**changes: str) -> tuple[str, str]:
    (row,) = claims.filled([ROW | changes])
    return row["measured"], row["verdict"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("1.292", "does not hold (other GPU)")),
        ({"must": "> 1"}, ("1.292", "holds (other GPU)")),
        ({"must": "within 1 % of 1.3"}, ("1.292", "holds (other GPU)")),
        ({"must": "within 0.5 % of 1.3"}, ("1.292", "does not hold (other GPU)")),
        ({"at": "least", "quantity": "call ratio"}, ("1.481", "does not hold (other GPU)")),
        ({"at": "3 x 7"}, ("", "not measured")),
        ({"over": "fla exact fp16"}, ("", "not measured")),
        ({"quantity": "", "of": ""}, ("", "not measured")),
    ],
)
def test_a_row(changes: dict[str, str], expected: tuple[str, str]) -> None:
    assert filled(**changes) == expected


def test_a_time_is_judged_on_the_gpu_of_the_source_only() -> None:
    row = ROW | {"quantity": "warm_us", "must": "within 10 % of 100"}
    assert claims.judged(row, 105, None, "H200", "NVIDIA H200") == "holds"
    assert claims.judged(row, 115, None, "A100, H200", "NVIDIA H200") == "does not hold"
    assert claims.judged(row, 105, None, "H100", "NVIDIA H200") == "other GPU"


@pytest.mark.parametrize(
    ("must", "value", "above", "expected"),
    [
        (">= 1.5 <= 2.5", 1.5, None, True), (">= 1.5 <= 2.5", 2.6, None, False), ("> 1", 1, None, False),
        ("< 2", 1.9, None, True), ("= 4", 4, None, True), ("= 4", 5, None, False), ("> above", 2, 1.5, True),
        ("> above", 2, 2.5, False), ("> above", 2, None, False),
    ],
)  # fmt: skip
def test_conditions(must: str, value: float, above: float | None, expected: bool) -> None:
    assert claims.holds(must, value, above) is expected


@pytest.mark.parametrize("must", ["about 3", ">= 1.5 and", "1.5"])
def test_a_condition_that_cannot_be_read_is_refused(must: str) -> None:
    with pytest.raises(ValueError, match="is no condition"):
        claims.holds(must, 1, None)


def test_a_claim_holds_if_all_of_its_rows_do() -> None:
    rows = [ROW | {"verdict": verdict} for verdict in ("holds", "does not hold (other GPU)")]
    rows += [ROW | {"claim": "slower", "verdict": claims.HOLDS}]
    others = [ROW | {"study": study, "verdict": claims.HOLDS} for study in claims.sources() if study != "fig9-10"]
    quoted = ROW | {"must": "within 1 % of 2", "measured": "2"}
    rows.append(quoted | {"claim": "c", "measured": "", "verdict": claims.NOT_MEASURED})
    rows += [quoted | {"claim": "a", "verdict": "holds"}, quoted | {"claim": "b", "verdict": "does not hold"}]
    text = claims.counts([*rows, *others]).replace("\u00a0", " ")
    line = next(line for line in text.splitlines() if line.startswith("| fig9-10"))
    assert [cell.strip() for cell in line.split("|")[4:-1]] == ["1", "1", "0", "1 of 2"]
