"""The precision of the two kinds of numbers that an implementation may round: intermediates, and
states between chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

# name in reports -> dtype
_STATE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes in which an implementation computes.

    intermediates: "exact": decays and their products with scores and values are in fp32, as in the
        unfused original; "relaxed": they are in the dtype of the inputs, or for fp32 inputs in
        bfloat16 (`intermediate_dtype`), unless a kernel rounds the operands of its products to tf32
        instead.
    state_dtype: the dtype in which states pass from chunk to chunk or from segment to segment.
    """

    intermediates: Literal["exact", "relaxed"] = "exact"
    state_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.intermediates not in ("exact", "relaxed"):
            raise ValueError(
                f"intermediates must be 'exact' or 'relaxed', not {self.intermediates!r}"
            )
        if self.state_dtype not in _STATE_DTYPES.values():
            raise ValueError(
                f"state_dtype must be float32, float16 or bfloat16, not {self.state_dtype}"
            )

    @classmethod
    def named(cls, name: str) -> Precision:
        """The precision of a name in reports, such as "relaxed, bf16 states"; " states" may be left
        out.  Raises ValueError or KeyError for other texts.
        """
        intermediates, states = name.removesuffix(" states").split(", ")
        return cls(
            intermediates=intermediates,  # type: ignore[arg-type]
            state_dtype=_STATE_DTYPES[states],
        )

    def __str__(self) -> str:
        """The name in reports, such as "relaxed, bf16 states"."""
        states = {dtype: name for name, dtype in _STATE_DTYPES.items()}
        return f"{self.intermediates}, {states[self.state_dtype]} states"

    @property
    def exact(self) -> bool:
        """Whether intermediates are exact."""
        return self.intermediates == "exact"

    def intermediate_dtype(self, input_dtype: torch.dtype) -> torch.dtype:
        """The dtype of decays, scores and their products, for inputs of `input_dtype`, in kernels
        that do not round to tf32.
        """
        if self.exact:
            return torch.float32
        return torch.bfloat16 if input_dtype == torch.float32 else input_dtype

    @property
    def equals_exact_text(self) -> str:
        """The end of a plan's reason for a kernel that computes in fp32 at every precision, which
        says so if another precision was asked for; "" if it was the exact one with fp32 states.
        """
        return "" if self == Precision() else "; the same as exact with fp32 states"
