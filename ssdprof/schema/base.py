"""The base class of records, and types that several records use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

SCHEMA_VERSION: Final = 2

DType = Literal["fp64", "fp32", "fp16", "bf16"]
StoredDType = Literal["fp64", "fp32", "fp16", "bf16", "int32", "int64"]  # of a tensor in a capture
Intermediates = Literal["exact", "relaxed"]
Status = Literal["passed", "inaccurate", "nonfinite", "refused", "out of memory", "failed"]
Fault = Literal["refused", "out of memory", "failed"]  # the status of a call that raised an error


class Record(BaseModel):
    """Base of every stored record: immutable, and an unknown field is an error.

    JSON has no NaN: non-finite numbers are stored as "NaN", "Infinity" and "-Infinity", and read back as numbers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


def first_fault(error: ValidationError) -> str:
    """The first error of a document: "cases.0.status: Field required"."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the document'}: {first['msg']}"


def kernel_name(implementation: str, variant: str) -> str:
    """ "fused hopper"; the variant only if it differs from the name."""
    return implementation if variant in ("", implementation) else f"{implementation} {variant}"


class PrecisionRecord(Record):
    intermediates: Intermediates
    state_dtype: DType

    def __str__(self) -> str:
        return f"{self.intermediates}, {self.state_dtype} states"

    @property
    def short(self) -> str:
        """ "exact, fp32", for the column of a table."""
        return f"{self.intermediates}, {self.state_dtype}"


EXACT_FP32 = PrecisionRecord(intermediates="exact", state_dtype="fp32")


def precisions_for(
    dtype: DType, intermediates: Literal["exact", "relaxed", "all"], states: Sequence[DType] | None
) -> tuple[PrecisionRecord, ...]:
    """Every pair of intermediates and state dtype, exact before relaxed.

    dtype: of the inputs.  states: None: fp32 with exact, the inputs' dtype with relaxed.
    """
    kinds: tuple[Intermediates, ...] = ("exact", "relaxed") if intermediates == "all" else (intermediates,)
    return tuple(
        PrecisionRecord(intermediates=kind, state_dtype=state)
        for kind in kinds
        for state in states or ("fp32" if kind == "exact" else dtype,)
    )
