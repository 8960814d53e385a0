"""Formats in which a pool keeps the states of decoding between steps.  Imports no torch.

    fp32, bf16, fp16                to nearest
    bf16-stochastic, fp16-stochastic  up or down at random, so that the mean is kept
    fp8                             e4m3, with a scale
    int8                            -127 to 127, with a scale
    int8-carried                    int8, and the rounding error in 8 bits of its own

A scale is an fp32 number that maps the largest number of a format, 448 or 127, to the largest
magnitude under it.  There is one for each row (`int8`), one for each head (`int8:head`), or none in
the pool, but a fixed range (`int8:fixed=4`), beyond which numbers become the end of the range.  A
row is what a server keeps side by side for one value channel: the K numbers of a column of a state
(K, V), the N numbers of a row of an SSD state (P, N).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Number = Literal["fp32", "bf16", "fp16", "fp8", "int8", "function"]
Rounding = Literal["nearest", "stochastic", "carried"]
Scale = Literal["", "row", "head", "fixed"]
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
_SCALE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class StateFormat:
    """A format of the states in a pool.

    name: as a user writes it.
    carried: the rounding error of int8 is kept, too, as a multiple of 1 / 254 of int8's unit.
    fixed_range: the magnitude that the largest number stands for, with a fixed scale.
    function: a user's own: (sequences, heads, K, V) fp32, of SSD (sequences, heads, P, N) -> the
        same, rounded.
    """

    name: str
    number: Number
    rounding: Rounding = "nearest"
    scale: Scale = ""
    fixed_range: float = 0.0
    function: Callable[[Tensor], Tensor] | None = None

    @property
    def constants(self) -> tuple[str, str, str, float]:
        """What kernels are compiled for (`stored_states.py`)."""
        return self.number, self.rounding, self.scale, self.fixed_range

    def state_bytes(self, key_dim: int, value_dim: int) -> int | None:
        """The bytes of one head's state (K, V) with its scales, or (N, P) of SSD; None for a user's
        function.
        """
        if self.number == "function":
            return None
        width = _BYTES[self.number] * (2 if self.rounding == "carried" else 1)
        scales = {"row": value_dim, "head": 1}.get(self.scale, 0)
        return width * key_dim * value_dim + _SCALE_BYTES * scales
