"""Tests of an output's errors against the errors that the roundings of its precision can cause.

docs/measuring.md describes the tests.  `DRAWS` evaluations of the rounded form ("draws"), in which
every operand has an independent uniform error of at most half a unit in the last place
(`Rounded.perturb`), show the errors that a correct kernel with 16-bit inputs may have.  Errors are
divided by the RMS of the oracle's row (one position of a head, or one row of a state), so that rows
of any size count alike.

Shapes in this module: h is the heads; rows are positions of `out`, or rows of a state.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ssdprof.core.accuracy import ErrorTest, TestName
from ssdprof.core.base import SLICES

DRAWS = 12
# lengths of chunks and tiles; errors are summed over the positions with the same remainder
PERIODS = (16, 32, 64, 128, 256)
# Limits in standard deviations of the draws: of one number for each head, and of one of many
# numbers, whose deviations are known less well.
_SIGMAS = 6.0
_MANY_SIGMAS = 18.0
_SMALLEST_ROW = 1e-30  # rows with a smaller RMS do not count: they may be flushed to zero

# What was evaluated: "oracle", "floor" (the oracle, rounded to the output's dtype), "ours" (a
# kernel) or "rounded" (a rounded form); the key of the kernel or of the rounded form, else None;
# the number of a rounded form's evaluation, the plain ones first, else 0.
_Evaluation = tuple[str, Hashable, int]


class HeadNorms:
    """Running largest magnitude and sum of squares of a tensor's finite elements, per head."""

    def __init__(self, heads: int, device: torch.device) -> None:
        self.max = torch.zeros(heads, dtype=torch.float64, device=device)
        self.square_sum = torch.zeros(heads, dtype=torch.float64, device=device)

    def add(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """block: (h, rows, width), finite, fp64.  Returns its squares, and their sums over rows."""
        squares = block.square()
        rows = squares.sum(2)
        if block.numel():
            self.max = torch.maximum(self.max, squares.amax((1, 2)).sqrt())  # exact from 1e-150
            self.square_sum += rows.sum(1)
        return squares, rows

    def rms(self, elements: float) -> Tensor:
        """RMS of each head, for this number of elements per head."""
        return (self.square_sum / elements).sqrt()


def finite(tensor: Tensor) -> Tensor:
    """The tensor with 0 for NaN and infinities."""
    return tensor.nan_to_num(0.0, 0.0, 0.0)


class RoundingTests:
    """The tests of one output tensor of several kernels: `add` every block, then call `checks`.

    Kernels and rounded forms have keys.  A rounded form ("null", for null hypothesis) is evaluated
    several times: first without random errors ("plain"), for each chunk length, then for each draw.
    """

    def __init__(self, length: int | None, *, tested: bool = True, plain_count: int = 1) -> None:
        """length: positions of `out`; None for states, which have no slices of positions.
        tested: whether errors are tested; else only their norms are summed.
        plain_count: the number of evaluations of a rounded form without random errors.
        """
        self._tested = tested
        self._plain_count = plain_count
        self._length = length
        self._slice_count = min(SLICES, length or 0)
        # (h, 2 + width + slices), with e the error and hi the oracle, both divided by the RMS of
        # the row: the sums of e hi and of e^2 over a head, then those of e^2 over each of its
        # columns, and over each of its slices
        self._sums: dict[_Evaluation, Tensor] = {}
        self._norms: dict[_Evaluation, HeadNorms] = {}

    def norms(self, nulls: Sequence[Hashable]) -> list[HeadNorms]:
        """The norms of the errors of every evaluation of these rounded forms."""
        return [
            norms
            for (evaluated, null, _), norms in self._norms.items()
            if evaluated == "rounded" and null in nulls
        ]

    def add(
        self,
        high: Tensor,
        floor: Tensor,
        kernels: Mapping[int, Tensor],
        rounded: Mapping[str, Iterable[Tensor]],
        start: int,
        origin: int,
    ) -> None:
        """Add a block.  All tensors are (h, rows, width), fp64.

        high: the oracle's block.  floor: the same, rounded to the output's dtype.
        kernels: the block of each kernel's output.
        rounded: the errors of each evaluation of each rounded form, as iterables that compute them,
            so that one is in memory at a time.
        start: position of the first row.  origin: first position of its sequence.
        """
        rms = high.square().mean(2, keepdim=True).sqrt()  # (h, rows, 1)
        weights = torch.where(rms > _SMALLEST_ROW, 1 / rms.square(), 0.0)  # of squares of a row
        scaled = high * weights
        in_slice = self._slices(high.shape[1], start, origin, high.device)

        def add_error(key: _Evaluation, error: Tensor) -> None:
            """Add the block's sums for one evaluation to `_sums` and `_norms`."""
            error = finite(error)
            norms = self._norms.setdefault(key, HeadNorms(len(high), high.device))
            squares, row_sums = norms.add(error)
            if not self._tested:
                return
            products = (error * scaled).sum((1, 2))  # e hi, (h)
            column_sums = (weights.mT @ squares)[:, 0]  # (h, width)
            head_sums = column_sums.sum(1)  # (h)
            slice_sums = (row_sums * weights[..., 0]) @ in_slice  # (h, slices)
            heads = torch.stack([products, head_sums], 1)
            new = torch.cat([heads, column_sums, slice_sums], 1)
            self._sums[key] = self._sums[key] + new if key in self._sums else new

        add_error(("oracle", None, 0), high)
        add_error(("floor", None, 0), floor - high)
        for name, tensor in kernels.items():
            add_error(("ours", name, 0), tensor - high)
        for null, evaluations in rounded.items():
            for number, error in enumerate(evaluations):
                add_error(("rounded", null, number), error)

    def _slices(self, rows: int, start: int, origin: int, device: torch.device) -> Tensor:
        """The slices of each row, (rows, slices), fp64: 1 where the row is in the slice, else 0.

        First come slices of consecutive positions, then, for each of `PERIODS`, slices of the
        positions of a sequence with the same remainder.  (rows, 0) for states.
        """
        if self._length is None:
            return torch.zeros(rows, 0, dtype=torch.float64, device=device)
        position = torch.arange(start, start + rows, device=device)
        # the index of each row's slice, and the number of slices
        indices = [(position * self._slice_count // self._length, self._slice_count)]
        indices += [((position - origin) % period, period) for period in PERIODS]
        columns = [index[:, None] == torch.arange(count, device=device) for index, count in indices]
        return torch.cat(columns, 1).double()

    def checks(
        self, name: Hashable, nulls: Sequence[Hashable], unit: float, coarsest: Tensor
    ) -> tuple[ErrorTest, ...]:
        """For each test, the place (such as a head or a slice) that uses most of its limit; of the
        periods, that of all.  Empty if errors are not tested.  Tests without a limit that is
        positive and finite are left out.

        name: the key of the kernel.  nulls: rounded forms, of which the kernel may be any.
        unit: the unit roundoff of the inputs' dtype.
        coarsest: (h), the relative error of the coarsest rounding of each head, which is above
            `unit` where decays have large exponents.
        Waits for the device.
        """
        if not self._sums:
            return ()
        norm = self._sums["oracle", None, 0]
        floor = self._sums["floor", None, 0]
        kernel = self._sums["ours", name, 0]
        evaluations = range(self._plain_count + DRAWS)
        forms = [
            torch.stack([self._sums["rounded", null, number] for number in evaluations])
            for null in nulls
        ]
        room = (coarsest - unit).clamp(min=0)[:, None].to(norm.device)  # beyond the draws' errors
        least = unit / 16  # allowed in any case, for accumulators that truncate
        tests = [
            *self._tests_of_gains(norm, kernel, forms, room, least),
            *self._tests_of_sizes(norm, floor, kernel, forms, room, least),
        ]
        worst: dict[str, ErrorTest] = {}
        for result in filter(None, tests):
            if result.test not in worst or result.used > worst[result.test].used:
                worst[result.test] = result
        return tuple(worst.values())

    def _tests_of_gains(
        self, norm: Tensor, kernel: Tensor, forms: Sequence[Tensor], room: Tensor, least: float
    ) -> Iterator[ErrorTest | None]:
        """Tests of the gain of each head, and of the mean gain of all heads.

        The gain is the relative amount by which a head is too large: the sum of e hi over the sum
        of hi^2, 0 if the head is right.  In the mean, heads have weights: the inverse of the
        variance that the draws of the first rounded form show.

        norm, kernel: the sums of the oracle and of the kernel, (h, sums).
        forms: the sums of each rounded form, (plain_count + DRAWS, h, sums).
        room: the additional relative error of each head, (h, 1).  least: see `checks`.
        """
        gain = finite(kernel[:, :1] / norm[:, :1])  # (h, 1)
        gains = [finite(form[..., :1] / norm[:, :1]) for form in forms]
        yield _worst("gain", *self._from_middle(gain, gains, least + room))
        if len(norm) > 1:
            variance = gains[0][self._plain_count :].var(0)
            inverse = torch.where(variance > 0, 1 / variance, 0.0)
            weights = inverse / inverse.sum()
            mean = (gain * weights).sum(0, keepdim=True)
            means = [(form * weights).sum(1, keepdim=True) for form in gains]
            yield _worst(
                "mean gain", *self._from_middle(mean, means, least + (room * weights).sum(0))
            )

    def _tests_of_sizes(
        self,
        norm: Tensor,
        floor: Tensor,
        kernel: Tensor,
        forms: Sequence[Tensor],
        room: Tensor,
        least: float,
    ) -> Iterator[ErrorTest | None]:
        """Tests of the RMS error of a head, of its columns, and of its slices of positions.

        floor: the sums of the rounded oracle, (h, sums).  The others: see `_tests_of_gains`.
        """
        slice_sums = 0 if self._length is None else self._slice_count + sum(PERIODS)
        # the tests in the order of their sums: the name, the number of sums, the period
        tests: list[tuple[TestName, int, int | None]] = [
            ("rms", 1, None),
            ("column", norm.shape[1] - 2 - slice_sums, None),
        ]
        if slice_sums:
            tests.append(("slice", self._slice_count, None))
            tests += [("period", period, period) for period in PERIODS]
        begin = 1  # behind the sum of e hi
        for test, count, period in tests:
            sums = slice(begin, begin + count)
            begin += count
            size = norm[:, sums]
            limits = [
                _limit(floor[:, sums], form[self._plain_count :, :, sums], size) for form in forms
            ]
            limit = torch.stack(limits).amax(0) / size + (2 * room).square() + least**2
            yield _worst(test, (kernel[:, sums] / size).sqrt(), limit.sqrt(), period)

    def _from_middle(
        self, ours: Tensor, forms: Sequence[Tensor], room: Tensor
    ) -> tuple[Tensor, Tensor]:
        """How far a gain is from the middle of the range that roundings explain, and half the width
        of that range.

        The errors of draws are independent.  Errors of real roundings are not, where a number of
        few bits is multiplied by a factor near 1.  The evaluations without random errors show that
        bias, and a kernel may have twice as much.

        ours: the gains of the kernel, (h, 1).  forms: those of each rounded form, (plain_count +
        DRAWS, h, 1).  room: added on both sides, (h, 1).
        """
        lows = []
        highs = []
        for gains in forms:
            plain = gains[: self._plain_count]
            draws = gains[self._plain_count :]
            bias = 2 * (plain - draws.mean(0))
            spread = room + 2 * _SIGMAS * draws.std(0)
            lows.append(draws.mean(0) + bias.amin(0).clamp(max=0) - spread)
            highs.append(draws.mean(0) + bias.amax(0).clamp(min=0) + spread)
        low = torch.stack(lows).amin(0)
        high = torch.stack(highs).amax(0)
        return ours - (low + high) / 2, (high - low) / 2


def _limit(floor: Tensor, draws: Tensor, elements: Tensor) -> Tensor:
    """The largest sums of squares that roundings explain, (h, places); a place is a head, a column
    or a slice.

    The variance of a place is at least the variance of an average element times the elements of the
    place: 12 draws may show none of the few ties that could be rounded the other way.

    floor: the sums of the rounded oracle, (h, places).  draws: (DRAWS, h, places).
    elements: the sums of the oracle, (h, places), which count elements because rows are divided by
    their RMS.
    """
    internal = draws - floor  # errors before the output is rounded
    element_variance = internal.sum(2).var(0) / elements.sum(1)  # (h)
    variance = torch.maximum(internal.var(0), elements * element_variance[:, None])
    sigmas = _SIGMAS if floor.shape[1] == 1 else _MANY_SIGMAS
    return floor + 4 * (internal.mean(0).clamp(min=0) + sigmas * variance.sqrt())


def _worst(
    test: TestName, values: Tensor, limits: Tensor, period: int | None = None
) -> ErrorTest | None:
    """The test of the place that uses most of its limit, where a value that is NaN uses none; None
    if that limit is not positive and finite.

    values, limits: (h, places).
    """
    ratio = torch.nan_to_num(values.abs() / limits, nan=0.0, posinf=torch.finfo(torch.float64).max)
    index = int(ratio.argmax())
    head, place = divmod(index, values.shape[1])
    limit = float(limits[head, place])
    if not 0 < limit < float("inf"):
        return None
    return ErrorTest(
        test=test,
        head=head,
        position=place if test in ("column", "slice", "period") else None,
        period=period,
        value=float(values[head, place]),
        limit=limit,
    )
