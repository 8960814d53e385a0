"""Formats in which a pool keeps the states of decoding between steps.  Imports no torch.

    fp32, bf16, fp16                  rounded to nearest
    bf16-stochastic, fp16-stochastic  rounded up or down at random, so that the mean is kept
    fp8                               e4m3, with a scale
    int8                              -127 to 127, with a scale
    int8-carried                      int8, and its rounding error in 8 more bits

A scale is an fp32 number that maps the largest number of the format, 448 or 127, to the largest
magnitude of the numbers that share the scale.  The pool has a scale for each row (`int8`) or for
each head (`int8:head`).  With a fixed range (`int8:fixed=4`) it has no scales; numbers beyond the
range become the end of the range.  A row is what a server keeps side by side for one value channel:
the K numbers of a column of a state (K, V), or the N numbers of a row of an SSD state (P, N).
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
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}  # of a number, without its error
_SCALE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class StateFormat:
    """A format of the states in a pool.

    name: as a user writes it.
    number: what a number is stored as; "function": what `function` makes of it.
    rounding: "carried" keeps the rounding error of int8 too, as a multiple of 1 / 254 of int8's
        unit.  It says nothing about a function.
    scale: which numbers share a scale: those of a row, or of a head; "fixed": all, with a scale
        that is not stored; empty: the format has none.
    fixed_range: with a fixed scale, the magnitude that the largest number of the format stands for.
    function: a user's function: states in fp32, (sequences, heads, K, V) or for SSD (sequences,
        heads, P, N) -> the same, rounded.  None for other formats.
    """

    name: str
    number: Number
    rounding: Rounding = "nearest"
    scale: Scale = ""
    fixed_range: float = 0.0
    function: Callable[[Tensor], Tensor] | None = None

    @property
    def constants(self) -> tuple[str, str, str, float]:
        """The number format, rounding, scale and fixed range, which are a compile-time argument of
        kernels (`stored_states.py`).
        """
        return self.number, self.rounding, self.scale, self.fixed_range

    def state_bytes(self, key_dim: int, value_dim: int) -> int | None:
        """The bytes of one head's state with its scales; None for a user's function.

        key_dim, value_dim: K and V; of SSD N and P.
        """
        if self.number == "function":
            return None
        width = _BYTES[self.number] * (2 if self.rounding == "carried" else 1)
        scales = {"row": value_dim, "head": 1}.get(self.scale, 0)
        return width * key_dim * value_dim + _SCALE_BYTES * scales
