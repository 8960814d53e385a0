"""Numbers as strings: units, digits, and shares that are 0 % or 100 % only if they are exact."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdprof.core import words as fmt
from ssdprof.core.statistics import Estimate

CASES = [
    (
        fmt.duration,
        {
            None: "-",
            0.0: "0 µs",
            0.123: "0.123 µs",
            9.996: "10.0 µs",
            187.4: "187 µs",
            999.7: "1.00 ms",
            1930.0: "1.93 ms",
            999_600.0: "1.00 s",
            2_100_000.0: "2.10 s",
        },
    ),
    (
        fmt.percent,
        {
            None: "-",
            100.0: "100.000%",
            99.99999999: "99.999%",
            math.nextafter(100.0, 0.0): "99.999%",
            99.696: "99.696%",
            0.0: "0.000%",
            1e-9: "<0.001%",
            math.nan: "NaN",
        },
    ),
    (
        fmt.small,
        {
            None: "-",
            2.1312e-3: "2.13e-3",
            0.125: "0.125",
            0.0: "0",
            999.6: "1.00e3",
            -4e-8: "-4.00e-8",
            math.nan: "NaN",
            -math.inf: "-inf",
        },
    ),
    (
        fmt.size_words,
        {
            None: "-",
            0: "0 B",
            1023: "1023 B",
            1024: "1.00 KiB",
            132_120_576: "126 MiB",
            1023 << 20: "0.999 GiB",
        },
    ),
    (fmt.share, {None: "-", 0.3: "<1%", 31.25: "31%"}),
    (
        lambda value: fmt.share(value, 1),
        {99.996: "100.0%", 16.84: "16.8%", 0.04: "<0.1%", 0.0: "0.0%"},
    ),
    (fmt.tolerance, {0.0: "0", 1e-3: "1e-3", 1e-2: "1e-2"}),
    (
        fmt.speedup,
        {
            None: "-",
            Estimate(1.523, 1.49, 1.55): "1.52x [1.49, 1.55]",
            Estimate(0.0123, 0.0121, 0.0125): "0.0123x [0.0121, 0.0125]",
            Estimate(1234.4, 1200, 1300): "1234x [1200, 1300]",
        },
    ),
    (fmt.indices, {(9, 3, 1, 2, 0, 3): "0-3, 9", (4,): "4", (): "-"}),
]


@pytest.mark.parametrize(("show", "texts"), CASES)
def test_a_number_as_text(show, texts):
    assert [show(value) for value in texts] == list(texts.values())


@given(st.floats(min_value=1e-3, max_value=1e9))
def test_duration_is_within_half_a_percent(us):
    number, unit = fmt.duration(us).split(" ")
    assert float(number) * {"µs": 1, "ms": 1e3, "s": 1e6}[unit] == pytest.approx(us, rel=5.1e-3)


@given(
    st.floats(min_value=0.0, max_value=100.0, exclude_min=True, exclude_max=True), st.integers(0, 4)
)
def test_percent_says_all_or_none_only_if_it_is(value, decimals):
    text = fmt.percent(value, decimals)
    number = float(text.lstrip("<").rstrip("%"))
    assert number < 100
    assert text.startswith("<") or 0 < number <= value


def test_words():
    assert (fmt.words(["a"]), fmt.words(["a", "b", "c"], "or")) == ("a", "a, b or c")
    assert (fmt.plural(1, "layer"), fmt.plural(1000, "layer")) == ("1 layer", "1,000 layers")
