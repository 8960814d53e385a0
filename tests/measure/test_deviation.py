"""Counting matches, norms and positions, block by block."""

import math

import pytest
import torch
from torch import Tensor

from ssdprof.core.accuracy import Deviation
from ssdprof.measure import accuracy
from ssdprof.measure.accuracy import Region, RunningDeviation, rms_ratio

SHAPE = (2, 5, 3, 4)  # (b, l, h, p)


def deviation_of(
    ours: Tensor, other: Tensor, block: int = 2, scale: Tensor | None = None
) -> Deviation:
    running = RunningDeviation("other", SHAPE, SHAPE[2], torch.ones(()) if scale is None else scale)
    for row in range(SHAPE[0]):
        for start in range(0, SHAPE[1], block):
            place = Region(shape=SHAPE, index=row, positions=(start, min(start + block, SHAPE[1])))
            running.add(place.cut(ours), place.cut(other), place)
    return running.result()


def test_tolerance_is_absolute_plus_relative():
    other = torch.full(SHAPE, 2.0)
    other[1, 0, 0, 0] = -9
    ours = other.clone()
    # 1e-3 (1 + 2) and 1e-2 (1 + 2) are the limits
    ours[0, 0, 0] += torch.tensor([0.0, 2.9e-3, 3.1e-3, 3.1e-2])
    percent = 100 / other.numel()
    expected = [100 - 3 * percent, 100 - 2 * percent, 100 - percent]
    result = deviation_of(ours, other)
    assert (list(result.matches), result.scale_max_abs) == (pytest.approx(expected), 9)
    ours = torch.zeros(SHAPE)
    other = torch.zeros(SHAPE)
    ours[0, 0, 0, 0], ours[1, 4, 2, 3] = -0.0, 1e-45  # a tolerance of 0 means equal values
    assert deviation_of(ours, other).matches[0] == pytest.approx(100 - percent)


def test_a_match_relative_to_the_rms_depends_on_no_unit():
    """An absolute tolerance is empty for numbers as small as itself."""
    other = torch.full(SHAPE, 0.002)
    other[1] = 0
    ours = other.clone()
    ours[0, 0, 0] += torch.tensor([0.0, 1e-6, 5e-6, 9e-4])
    percent = 100 / other.numel()
    result = deviation_of(ours, other, scale=torch.tensor(0.002))
    assert result.match_pct(1e-3) == 100
    assert [result.match_rms_pct(one) for one in (1e-3, 1e-2)] == pytest.approx(
        [100 - 2 * percent, 100 - percent]
    )


def test_what_is_not_finite_matches_only_the_same_infinity():
    inf = math.inf
    nan = math.nan
    ours = torch.zeros(SHAPE)
    other = torch.zeros(SHAPE)
    ours[1, 2, 1] = torch.tensor([inf, inf, 0.0, nan])
    other[1, 2, 1] = torch.tensor([inf, -inf, inf, nan])
    result = deviation_of(ours, other)
    assert list(result.matches) == pytest.approx([100 - 300 / other.numel()] * 3)
    assert (result.nonfinite, result.first_nonfinite) == (4, (1, 2, 1, 0))
    assert (result.rms_ratio, result.max_abs) == (0, 0)


@pytest.mark.parametrize("block", [1, 2, 5])
def test_the_first_nonfinite_is_the_first_in_memory_order(block):
    ours = torch.zeros(SHAPE)
    ours[1, 1, 0, 0] = ours[0, 3, 2, 1] = ours[0, 4, 0, 0] = math.nan
    result = deviation_of(ours, torch.zeros(SHAPE), block)
    assert (result.nonfinite, result.first_nonfinite) == (3, (0, 3, 2, 1))


def test_the_worst_head_is_worst_for_its_size():
    other = torch.ones(SHAPE)
    other[:, :, 0] = 1000
    ours = other.clone()
    ours[:, :, 0] += 10  # 1 % of a large head
    ours[1, 3, 2, 1] += 5  # 5 / sqrt(40) of a small one
    ours[0, 4, 0, 2] += 1
    result = deviation_of(ours, other)
    assert result.worst_head == 2
    assert (result.max_abs, result.worst_position) == (11, (0, 4, 0, 2))
    assert result.rms_ratio == pytest.approx(math.sqrt((39 * 100 + 121 + 25) / (40 * 1000**2 + 80)))


def test_states_are_placed_by_sequence_and_head():
    shape = (3, 2, 4, 5)
    running = RunningDeviation("other", shape, 2, torch.ones(()))
    ours = torch.zeros(shape)
    other = torch.ones(shape)
    ours[2, 1, 3, 4] = 7
    for sequence in range(3):
        place = Region(shape=shape, index=sequence, positions=None)
        running.add(place.cut(ours), place.cut(other), place)
    assert (running.result().worst_head, running.result().worst_position) == (1, (2, 1, 3, 4))


def test_an_error_against_nothing_is_infinite():
    ratios = rms_ratio(torch.tensor([0.0, 4.0, 4.0]), torch.tensor([0.0, 0.0, 16.0]))
    assert ratios.tolist() == [0.0, math.inf, 0.5]


@pytest.mark.gpu
def test_sums_are_the_same_bits_each_time():
    """This is needed to compare a report of several ranks with that of one process."""
    shape = (1, 5000, 8, 64)
    ours, other = torch.randn(2, *shape, device="cuda")
    place = Region(shape=shape, index=0, positions=(0, shape[1]))

    def along() -> tuple[float | None, ...]:
        running = RunningDeviation("other", shape, shape[2], torch.ones((), device="cuda"))
        running.add(place.cut(ours), place.cut(other), place)
        return running.result().along

    assert len({along() for _ in range(20)}) == 1


@pytest.mark.parametrize("block", [1, 2, 5])
def test_an_error_is_found_in_its_slice_of_the_positions(block, monkeypatch):
    """Two slices of 5 positions: 0 to 2, and 3 and 4."""
    monkeypatch.setattr(accuracy, "SLICES", 2)
    other = torch.full(SHAPE, 2.0)
    ours = other.clone()
    ours[1, 2] += 1  # one of six rows of positions in the first slice
    ours[:, 4] += 3  # half of the second
    result = deviation_of(ours, other, block)
    assert result.along == pytest.approx((math.sqrt(1 / 6) / 2, math.sqrt(9 / 2) / 2))


def test_fewer_positions_than_slices_are_a_slice_each():
    ours = torch.zeros(SHAPE)
    ours[0, 3] = 1
    assert deviation_of(ours, torch.zeros(SHAPE)).along == (0, 0, 0, None, 0)
