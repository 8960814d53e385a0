"""Converts dtypes and precisions between stored records, torch and the kernels."""

from typing import Literal

import torch

from ssdprof import schema
from ssdprof.kernels.precision import Precision

_BY_NAME: dict[schema.DType, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
_NAMES = {dtype: name for name, dtype in _BY_NAME.items()}
_INDICES: dict[torch.dtype, schema.StoredDType] = {torch.int32: "int32", torch.int64: "int64"}
_STORED: dict[str, torch.dtype] = {name: dtype for names in (_NAMES, _INDICES) for dtype, name in names.items()}


def dtype_name(dtype: torch.dtype) -> schema.DType:
    """torch.bfloat16 -> "bf16".  KeyError for a dtype that records do not have."""
    return _NAMES[dtype]


def dtype_named(name: schema.DType) -> torch.dtype:
    """ "bf16" -> torch.bfloat16."""
    return _BY_NAME[name]


def input_dtype(name: schema.DType) -> Literal["fp32", "fp16", "bf16"]:
    """The name of the dtype of inputs.  ValueError for fp64, which inputs do not have."""
    if name == "fp64":
        raise ValueError("an operator's inputs are fp32, fp16 or bf16")
    return name


def stored_dtype_name(dtype: torch.dtype) -> schema.StoredDType:
    """As `dtype_name`, also for the integers of `cu_seqlens`."""
    return _INDICES.get(dtype) or dtype_name(dtype)


def stored_dtype_named(name: schema.StoredDType) -> torch.dtype:
    """The inverse of `stored_dtype_name`."""
    return _STORED[name]


def precision_of(record: schema.PrecisionRecord) -> Precision:
    return Precision(intermediates=record.intermediates, state_dtype=dtype_named(record.state_dtype))


def precision_record(precision: Precision) -> schema.PrecisionRecord:
    """The inverse of `precision_of`."""
    return schema.PrecisionRecord(intermediates=precision.intermediates, state_dtype=dtype_name(precision.state_dtype))
