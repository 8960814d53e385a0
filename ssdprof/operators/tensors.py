"""Dtypes and precisions, and the names that records have for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ssdprof.core.base import DType, StoredDType, precisions_for
from ssdprof.operators.late import precision, torch

# name in records -> name in torch, which must not be imported here
_TORCH: dict[StoredDType, str] = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "int32": "int32",
    "int64": "int64",
}
_NAMES: dict[str, StoredDType] = {f"torch.{word}": name for name, word in _TORCH.items()}
_INTEGERS = ("int32", "int64")


def dtype_name(dtype: torch.dtype) -> DType:
    """torch.bfloat16 -> "bf16".  Raises KeyError for an integer dtype, and for one without a
    name.
    """
    name = _NAMES[str(dtype)]
    if name in _INTEGERS:
        raise KeyError(dtype)
    return name  # type: ignore[return-value]


def dtype_named(name: StoredDType) -> torch.dtype:
    """ "bf16" -> torch.bfloat16."""
    return getattr(torch, _TORCH[name])  # type: ignore[no-any-return]


def stored_dtype_name(dtype: torch.dtype) -> StoredDType:
    """The same as `dtype_name`, also for int32 and int64, the dtypes of `cu_seqlens` and of slots.
    Raises KeyError for a dtype without a name.
    """
    return _NAMES[str(dtype)]


def requested_precisions(
    dtype: DType, intermediates: Literal["exact", "relaxed", "all"], states: Sequence[DType] | None
) -> tuple[precision.Precision, ...]:
    """The precisions of the names that `core.base.precisions_for` returns for these arguments."""
    return tuple(map(precision.Precision.named, precisions_for(dtype, intermediates, states)))


def exact_fp32(_dtype: DType) -> tuple[precision.Precision, ...]:
    """Exact intermediates and fp32 states, for inputs of any dtype: the only precision of many
    implementations.
    """
    return (precision.Precision(),)


def states_as_inputs(dtype: DType) -> tuple[precision.Precision, ...]:
    """Exact intermediates, and states in the inputs' dtype."""
    return requested_precisions(dtype, "exact", (dtype,))
