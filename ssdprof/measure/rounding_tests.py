"""Tests of an output's errors against the errors that the roundings of its precision can cause.

docs/measuring.md has the tests.  `DRAWS` evaluations of the rounded form, in which every operand
has an independent uniform error of at most half a unit in the last place (`Rounded.perturbed`),
show what a correct kernel with 16-bit inputs can do.  Errors are divided by the RMS of the oracle's
row (one position of a head, or one row of a state), so that rows of any size count alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ssdprof.core.accuracy import ErrorTest, TestName
from ssdprof.core.base import SLICES

DRAWS = 12
PERIODS = (16, 32, 64, 128, 256)
_SIGMAS, _MANY_SIGMAS = 6.0, 18.0
_SMALLEST_ROW = 1e-30  # an RMS below it may be flushed to zero


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
    """With 0 instead of what is not."""
    return tensor.nan_to_num(0.0, 0.0, 0.0)


class RoundingTests:
    """The tests of one output tensor of several kernels: add the blocks, then ask for `checks`.

    length: positions of a row of the tensor; None for states, which have no slices of positions.
    judged: whether errors are tested; else only their norms are known.  Keys name `kernels`,
    and rounded forms (`rounded`: `exact` ones without random errors, then the draws of it).
    """

    def __init__(self, length: int | None, *, tested: bool = True, exact: int = 1) -> None:
        self._tested, self._exact = tested, exact
        self._length = length
        self._slice_count = min(SLICES, length or 0)
        # of e hi of a head, of e^2 of a head, of its columns, and of its slices: (h, 2 + width +
        # slices)
        self._sums: dict[tuple[str, Hashable, int], Tensor] = {}
        self._norms: dict[tuple[str, Hashable, int], HeadNorms] = {}

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
        kernels: Mapping[Any, Tensor],
        rounded: Mapping[str, Iterable[Tensor]],
        start: int,
        origin: int,
    ) -> None:
        """A block; tensors are (h, rows, width) in fp64.

        high: the oracle; floor: rounded to the output's dtype.  rounded: the errors of these forms,
        computed as they are taken, so that one is in memory at a time.  start: position of the
        first row; origin: of the first of its sequence.
        """
        size = high.square().mean(2, keepdim=True).sqrt()
        weights = torch.where(size > _SMALLEST_ROW, 1 / size.square(), 0.0)  # of squares
        scaled = high * weights
        weights = weights.mT  # (h, 1, rows)
        in_slice = self._slices(high.shape[1], start, origin, high.device)

        def summed(key: tuple[str, Hashable, int], error: Tensor) -> None:
            error = finite(error)
            squares, rows = self._norms.setdefault(key, HeadNorms(len(high), high.device)).add(
                error
            )
            if not self._tested:
                return
            columns = (weights @ squares)[:, 0]
            sums = (error * scaled).sum((1, 2))[:, None], columns.sum(1, keepdim=True)
            new = torch.cat([*sums, columns, (rows * weights[:, 0]) @ in_slice], 1)
            self._sums[key] = self._sums[key] + new if key in self._sums else new

        summed(("oracle", None, 0), high)
        summed(("floor", None, 0), floor - high)
        for name, tensor in kernels.items():
            summed(("ours", name, 0), tensor - high)
        for null, several in rounded.items():
            for k, error in enumerate(several):
                summed(("rounded", null, k), error)

    def _slices(self, rows: int, start: int, origin: int, device: torch.device) -> Tensor:
        """(rows, s): 1 where the row is in the slice."""
        if self._length is None:
            return torch.zeros(rows, 0, dtype=torch.float64, device=device)
        position = torch.arange(start, start + rows, device=device)
        indices = [(position * self._slice_count // self._length, self._slice_count)]
        indices += [((position - origin) % period, period) for period in PERIODS]
        one_hot = (index[:, None] == torch.arange(count, device=device) for index, count in indices)
        return torch.cat([each.double() for each in one_hot], 1)

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
        room = (coarsest - unit).clamp(min=0)[:, None].to(norm.device)
        forms = [
            torch.stack([self._sums["rounded", null, k] for k in range(self._exact + DRAWS)])
            for null in nulls
        ]
        draws = [several[self._exact :] for several in forms]
        gains = [finite(several[..., :1] / norm[:, :1]) for several in forms]
        gain = finite(kernel[:, :1] / norm[:, :1])
        # 1/16: for accumulators that truncate
        tests = [_worst("gain", *self._gain(gain, gains, unit / 16 + room))]
        if len(norm) > 1:
            variance = gains[0][self._exact :].var(0)
            certain = torch.where(variance > 0, 1 / variance, 0.0)
            share = certain / certain.sum()
            means = [(several * share).sum(1, keepdim=True) for several in gains]
            mean, mean_room = (gain * share).sum(0, keepdim=True), (room * share).sum(0)
            tests.append(_worst("mean gain", *self._gain(mean, means, unit / 16 + mean_room)))
        width = norm.shape[1] - 2 - (self._length is not None) * (self._slice_count + sum(PERIODS))
        parts: list[tuple[TestName, int, int | None]] = [("rms", 1, None), ("column", width, None)]
        if self._length is not None:
            parts += [
                ("slice", self._slice_count, None),
                *(("period", period, period) for period in PERIODS),
            ]
        begin = 1
        for test, count, period in parts:
            part = slice(begin, begin + count)
            begin += count
            size = norm[:, part]
            each = [_limit(floor[:, part], several[..., part], size) for several in draws]
            limit = torch.stack(each).amax(0) / size + (2 * room).square() + (unit / 16) ** 2
            tests.append(_worst(test, (kernel[:, part] / size).sqrt(), limit.sqrt(), period))
        worst: dict[str, ErrorTest] = {}
        for result in filter(None, tests):
            if result.test not in worst or result.used > worst[result.test].used:
                worst[result.test] = result
        return tuple(worst.values())

    def _gain(self, ours: Tensor, forms: Sequence[Tensor], room: Tensor) -> tuple[Tensor, Tensor]:
        """How far a gain is from the middle of what roundings explain, and how far it may be.

        ours: (h, 1); forms: (exact + DRAWS, h, 1).  The errors of draws are independent.  Those of
        real roundings are not, where a number of few bits is multiplied by a factor near 1: the
        exact forms show that bias, of which a kernel may have twice as much.
        """
        least, most = [], []
        for gains in forms:
            exact, draws = gains[: self._exact], gains[self._exact :]
            bias = 2 * (exact - draws.mean(0))
            spread = room + 2 * _SIGMAS * draws.std(0)
            least.append(draws.mean(0) + bias.amin(0).clamp(max=0) - spread)
            most.append(draws.mean(0) + bias.amax(0).clamp(min=0) + spread)
        low, high = torch.stack(least).amin(0), torch.stack(most).amax(0)
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
    """values, limits: (h, positions).  None if nothing is tested."""
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
