"""Tests of an output's errors against the errors that the roundings of its precision can cause.

docs/measuring.md has the tests.  `DRAWS` evaluations of the rounded form, in which every operand
has an independent uniform error of at most half a unit in the last place (`Rounded.perturb`),
show what a correct kernel with 16-bit inputs can do.  Errors are divided by the RMS of the oracle's
row (one position of a head, or one row of a state), so that rows of any size count alike.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ssdprof.core.accuracy import ErrorTest, TestName
from ssdprof.core.base import SLICES

DRAWS = 12
PERIODS = (16, 32, 64, 128, 256)
_SIGMAS = 6.0
_MANY_SIGMAS = 18.0
_SMALLEST_ROW = 1e-30  # an RMS below it may be flushed to zero

# "oracle", "floor", "ours" or "rounded"; the kernel, or the rounded form; the draw of its errors
_Evaluation = tuple[str, Hashable, int]


class HeadNorms:
    """Running maximum and sum of squares of a tensor's finite elements, per head."""

    def __init__(self, heads: int, device: torch.device) -> None:
        self.max = torch.zeros(heads, dtype=torch.float64, device=device)
        self.square_sum = torch.zeros(heads, dtype=torch.float64, device=device)

    def add(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """block: (h, rows, width), finite, fp64.  Returns its squares, and their sums over rows."""
        squares = block.square()
        rows = squares.sum(2)
        if block.numel():
            self.max = torch.maximum(self.max, squares.amax((1, 2)).sqrt())  # exact
            self.square_sum += rows.sum(1)
        return squares, rows

    def rms(self, elements: float) -> Tensor:
        """RMS of each head, for this number of elements per head."""
        return (self.square_sum / elements).sqrt()


def finite(tensor: Tensor) -> Tensor:
    """The tensor with 0 for NaN and infinities."""
    return tensor.nan_to_num(0.0, 0.0, 0.0)


class RoundingTests:
    """The tests of one output tensor of several kernels: add the blocks, then ask for `checks`.

    length: positions of a row of the tensor; None for states, which have no slices of positions.
    tested: whether errors are tested; else only their norms are known.  Keys name `kernels`,
    and rounded forms (`rounded`: `exact` ones without random errors, then the draws of it).
    """

    def __init__(self, length: int | None, *, tested: bool = True, exact: int = 1) -> None:
        self._tested = tested
        self._exact = exact
        self._length = length
        self._slice_count = min(SLICES, length or 0)
        # (h, 2 + width + slices), with e the error and hi the oracle: the sums of e hi and of e^2
        # over a head, then of e^2 over each of its columns, and over each of its slices
        self._sums: dict[_Evaluation, Tensor] = {}
        self._norms: dict[_Evaluation, HeadNorms] = {}

    def norms(self, nulls: Sequence[Hashable]) -> list[HeadNorms]:
        """The errors of every evaluation of these rounded forms."""
        return [
            norms
            for (what, null, _), norms in self._norms.items()
            if what == "rounded" and null in nulls
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
        """A block; tensors are (h, rows, width) in fp64.

        high: the oracle; floor: rounded to the output's dtype.  rounded: the errors of these forms,
        computed as they are taken, so that one is in memory at a time.  start: position of the
        first row; origin: of the first of its sequence.
        """
        rms = high.square().mean(2, keepdim=True).sqrt()  # (h, rows, 1)
        weights = torch.where(rms > _SMALLEST_ROW, 1 / rms.square(), 0.0)  # of squares
        scaled = high * weights
        in_slice = self._slices(high.shape[1], start, origin, high.device)

        def add_error(key: _Evaluation, error: Tensor) -> None:
            """Add the sums of this block, with rows weighted: see `_sums`."""
            error = finite(error)
            norms = self._norms.setdefault(key, HeadNorms(len(high), high.device))
            squares, of_rows = norms.add(error)
            if not self._tested:
                return
            with_high = (error * scaled).sum((1, 2))
            of_columns = (weights.mT @ squares)[:, 0]
            of_head = of_columns.sum(1)
            of_slices = (of_rows * weights[..., 0]) @ in_slice
            heads = torch.stack([with_high, of_head], 1)
            new = torch.cat([heads, of_columns, of_slices], 1)
            self._sums[key] = self._sums[key] + new if key in self._sums else new

        add_error(("oracle", None, 0), high)
        add_error(("floor", None, 0), floor - high)
        for name, tensor in kernels.items():
            add_error(("ours", name, 0), tensor - high)
        for null, draws in rounded.items():
            for draw, error in enumerate(draws):
                add_error(("rounded", null, draw), error)

    def _slices(self, rows: int, start: int, origin: int, device: torch.device) -> Tensor:
        """(rows, s): 1 where the row is in the slice."""
        if self._length is None:
            return torch.zeros(rows, 0, dtype=torch.float64, device=device)
        position = torch.arange(start, start + rows, device=device)
        indices = [(position * self._slice_count // self._length, self._slice_count)]
        indices += [((position - origin) % period, period) for period in PERIODS]
        one_hot = (index[:, None] == torch.arange(count, device=device) for index, count in indices)
        return torch.cat([columns.double() for columns in one_hot], 1)

    def checks(
        self, name: Hashable, nulls: Sequence[Hashable], unit: float, coarsest: Tensor
    ) -> tuple[ErrorTest, ...]:
        """The place that uses most of its limit, for each test.  Waits for the device.

        nulls: rounded forms, of which the kernel may be any; unit: unit roundoff of the inputs;
        coarsest: (h), the relative error of the coarsest rounding of each head, which is above it
        where decays have large exponents.
        """
        if not self._sums:
            return ()
        norm, floor, kernel = (
            self._sums[key] for key in (("oracle", None, 0), ("floor", None, 0), ("ours", name, 0))
        )
        forms = [
            torch.stack([self._sums["rounded", null, k] for k in range(self._exact + DRAWS)])
            for null in nulls
        ]
        room = (coarsest - unit).clamp(min=0)[:, None].to(norm.device)
        least = unit / 16  # for accumulators that truncate
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
        """Tests of the part of a head by which it is too large, 0 if it is right; then of its mean,
        in which heads count by the precision with which roundings let their gains be known.

        norm, kernel: sums, (h, sums); forms: (exact + DRAWS, h, sums).  room: (h, 1).
        """
        gain = finite(kernel[:, :1] / norm[:, :1])
        gains = [finite(form[..., :1] / norm[:, :1]) for form in forms]
        yield _worst("gain", *self._gain(gain, gains, least + room))
        if len(norm) > 1:
            variance = gains[0][self._exact :].var(0)
            certain = torch.where(variance > 0, 1 / variance, 0.0)
            share = certain / certain.sum()
            mean = (gain * share).sum(0, keepdim=True)
            means = [(form * share).sum(1, keepdim=True) for form in gains]
            yield _worst("mean gain", *self._gain(mean, means, least + (room * share).sum(0)))

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

        Tensors are those of `_tests_of_gains`.
        """
        slices = 0 if self._length is None else self._slice_count + sum(PERIODS)
        # the test, its number of sums, its period
        parts: list[tuple[TestName, int, int | None]] = [
            ("rms", 1, None),
            ("column", norm.shape[1] - 2 - slices, None),
        ]
        if slices:
            parts.append(("slice", self._slice_count, None))
            parts += [("period", period, period) for period in PERIODS]
        begin = 1
        for test, count, period in parts:
            part = slice(begin, begin + count)
            begin += count
            size = norm[:, part]
            limits = [_limit(floor[:, part], form[self._exact :, :, part], size) for form in forms]
            limit = torch.stack(limits).amax(0) / size + (2 * room).square() + least**2
            yield _worst(test, (kernel[:, part] / size).sqrt(), limit.sqrt(), period)

    def _gain(self, ours: Tensor, forms: Sequence[Tensor], room: Tensor) -> tuple[Tensor, Tensor]:
        """How far a gain is from the middle of what roundings explain, and how far it may be.

        ours: (h, 1); forms: (exact + DRAWS, h, 1).  The errors of draws are independent.  Those of
        real roundings are not, where a number of few bits is multiplied by a factor near 1: the
        exact forms show that bias, of which a kernel may have twice as much.
        """
        least = []
        most = []
        for gains in forms:
            exact = gains[: self._exact]
            draws = gains[self._exact :]
            bias = 2 * (exact - draws.mean(0))
            spread = room + 2 * _SIGMAS * draws.std(0)
            least.append(draws.mean(0) + bias.amin(0).clamp(max=0) - spread)
            most.append(draws.mean(0) + bias.amax(0).clamp(min=0) + spread)
        low = torch.stack(least).amin(0)
        high = torch.stack(most).amax(0)
        return ours - (low + high) / 2, (high - low) / 2


def _limit(floor: Tensor, draws: Tensor, elements: Tensor) -> Tensor:
    """(h, positions), parts of the head: the largest sum of squares that rounding explains.  draws:
    (DRAWS, h, positions).

    The variance of a place is at least that of an average element, times its elements: 12 draws may
    show none of the few ties that could be rounded the other way.
    """
    internal = draws - floor
    of_one = internal.sum(2).var(0) / elements.sum(1)  # (h), the variance of an element
    variance = torch.maximum(internal.var(0), elements * of_one[:, None])
    sigmas = _SIGMAS if floor.shape[1] == 1 else _MANY_SIGMAS
    return floor + 4 * (internal.mean(0).clamp(min=0) + sigmas * variance.sqrt())


def _worst(
    test: TestName, values: Tensor, limits: Tensor, period: int | None = None
) -> ErrorTest | None:
    """The test of the element with the largest ratio to its limit; None if no limit is positive and
    finite.

    values, limits: (h, positions).
    """
    ratio = torch.nan_to_num(values.abs() / limits, nan=0.0, posinf=torch.finfo(torch.float64).max)
    index = int(ratio.argmax())
    head, position = divmod(index, values.shape[1])
    limit = float(limits[head, position])
    if not 0 < limit < float("inf"):
        return None
    value = float(values[head, position])
    return ErrorTest(
        test=test,
        head=head,
        position=None if values.shape[1] == 1 else position,
        period=period,
        value=value,
        limit=limit,
    )
