"""The table of published claims: it says what the recorded results say, and its conditions can
fail.
"""

import claims
import pytest


def test_the_table_and_its_page_are_filled_from_the_results():
    rows = claims.rows()
    found = claims.filled(rows)
    assert found == rows, "python benchmarks/claims.py"
    assert claims.as_csv(found) == claims.CLAIMS.read_text()
    text = claims.PAGE.read_text()
    assert claims.page(text, found) == text
    assert all(row["claim"] in text for row in rows)
    assert {row["study"] for row in rows} == set(claims.sources())
    unmeasured = [row for row in rows if row["verdict"] == claims.NOT_MEASURED]
    assert all(row["note"] or row["quantity"].endswith("_us") for row in unmeasured)


@pytest.mark.parametrize(
    ("must", "value", "above", "expected"),
    [
        (">= 1.5 <= 2.5", 1.5, None, True),
        (">= 1.5 <= 2.5", 2.6, None, False),
        ("> 1", 1, None, False),
        ("< 2", 1.9, None, True),
        ("= 4", 4, None, True),
        ("= 4", 5, None, False),
        ("> above", 2, 1.5, True),
        ("> above", 2, 2.5, False),
        ("> above", 2, None, False),
    ],
)
def test_conditions(must: str, value: float, above: float | None, expected: bool):
    assert claims.holds(must, value, above) is expected


@pytest.mark.parametrize("must", ["about 3", ">= 1.5 and", "1.5"])
def test_a_condition_that_cannot_be_read_is_refused(must: str):
    with pytest.raises(ValueError, match="is no condition"):
        claims.holds(must, 1, None)
