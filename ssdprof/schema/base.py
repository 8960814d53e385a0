"""What every record is, and the words that several of them use."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 2

DType = Literal["fp64", "fp32", "fp16", "bf16"]
StoredDType = Literal["fp64", "fp32", "fp16", "bf16", "int32", "int64"]  # of a tensor in a capture
Intermediates = Literal["exact", "relaxed"]


class Record(BaseModel):
    """Base of every stored record: immutable, and an unknown field is an error.

    JSON has no NaN: non-finite numbers are stored as "NaN", "Infinity" and "-Infinity", and read back as numbers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class PrecisionRecord(Record):
    intermediates: Intermediates
    state_dtype: DType

    def __str__(self) -> str:
        return f"{self.intermediates}, {self.state_dtype} states"
