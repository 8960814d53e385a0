"""Amdahl's law computed from times equals Amdahl's law computed from shares."""

import pytest
from ssdprof.measure.amdahl import predicted_speedup


@pytest.mark.parametrize(("share", "speedup"), [(0.25, 2.0), (0.1, 1.5), (0.9, 4.0), (0.3, 0.5), (0.0, 3.0)])
def test_it_is_the_law(share: float, speedup: float) -> None:
    whole = 800.0
    predicted = predicted_speedup(whole, share * whole, share * whole / speedup)
    assert predicted == pytest.approx(1 / (1 - share + share / speedup))


def test_nothing_is_predicted_of_a_part_that_is_longer_than_the_whole() -> None:
    assert predicted_speedup(100.0, 150.0, 20.0) is None
