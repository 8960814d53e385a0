"""The base class of records, and the types of their fields.

Records are immutable, refuse unknown fields, NaN and numbers out of range, and import no torch.
They hold what was measured; ratios, intervals and verdicts are properties, computed when they are
read.  Shapes use the letters of `docs/glossary.md`; units are in the names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from itertools import chain
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from ssdprof.errors import HARMFUL, escaped

VERSION: Final = 4  # of reports
SMALLEST_DIFFERENCE: Final = 0.01
TOLERANCES: Final[tuple[float, ...]] = (0.0, 1e-3, 1e-2)
# of a prompt: slice i holds positions p with p * SLICES // seqlen == i; one each if fewer
SLICES: Final = 32

MEMORIES: Final[tuple[int, ...]] = (64, 1024, 16384)  # tokens within which a head may forget

DType = Literal["fp64", "fp32", "fp16", "bf16"]
StoredDType = Literal["fp64", "fp32", "fp16", "bf16", "int32", "int64"]  # of a tensor in a capture
Intermediates = Literal["exact", "relaxed"]
# what happened; whether it is right is `Case.result`
Status = Literal["ran", "refused", "out of memory", "failed"]
Fault = Literal["refused", "out of memory", "failed"]
CaseResult = Literal["passed", "inaccurate", "nonfinite", "refused", "out of memory", "failed"]
Clock = Literal["call", "device"]  # a Python call on an idle device; replay of a recorded graph
CLOCKS: Final[tuple[Clock, ...]] = ("device", "call")
TensorName = Literal["out", "final_states"]
PlacementKind = Literal["one-gpu", "all-gpus", "cpu-offload", "disk-offload"]
# the origin of the convolution and the gated norm around an operator
KernelOrigin = Literal["model", "bundled"]
PartName = Literal["operator", "convolution", "gated norm", "mixer", "attention", "MLP", "rest"]

LONGEST_SEQLEN: Final = 1 << 24  # tokens of a call, and elements along any other axis
MOST_STEPS: Final = 4096  # of decoding after a prompt, and ranks
_MOST: Final = 1 << 62
Count = Annotated[int, Field(ge=0, le=_MOST)]
Size = Annotated[int, Field(gt=0, le=_MOST)]
Length = Annotated[int, Field(gt=0, le=LONGEST_SEQLEN)]
Processes = Annotated[int, Field(gt=0, le=MOST_STEPS)]
Position = Annotated[tuple[Count, ...], Field(min_length=1)]  # an index for each axis
# so that ratios of ratios and their intervals are finite
Microseconds = Annotated[float, Field(ge=1e-3, le=1e12)]
NotNegative = Annotated[float, Field(ge=0)]
Percent = Annotated[float, Field(ge=0, le=100)]


Item = TypeVar("Item")
Key = TypeVar("Key")


def _time(text: str) -> str:
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\+00:00|Z)", text):
        raise ValueError("a time is ISO 8601 in UTC, to the second")
    datetime.fromisoformat(text)
    return text


Time = Annotated[str, AfterValidator(_time)]


def _harmless(text: object) -> object:
    return HARMFUL.sub(escaped, text) if isinstance(text, str) else text


# a text from anywhere, which is harmless in every output; pydantic itself refuses lone surrogates
Text = Annotated[str, BeforeValidator(_harmless)]


class Record(BaseModel):
    """Base of every stored record.  Its texts are `Text`, never `str`."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="strings"
    )

    def changed(self, **fields: object) -> Self:
        """A copy with other fields, checked again: pydantic's own `model_copy` checks nothing."""
        return type(self)(**(self.own | fields))

    @property
    def own(self) -> dict[str, Any]:
        """The fields."""
        return {name: getattr(self, name) for name in type(self).model_fields}


def unique(what: str, names: Sequence[object]) -> None:
    """ValueError if one of the names occurs twice."""
    if len(set(names)) < len(names):
        raise ValueError(
            f"{what} occurs twice: {next(name for name in names if names.count(name) > 1)}"
        )


# In reports a precision is its name.  Where kernels run it is `ssdprof.kernels.Precision`.
EXACT_FP32: Final = "exact, fp32 states"
PRECISIONS: Final = (
    EXACT_FP32,
    "exact, fp16 states",
    "exact, bf16 states",
    "relaxed, fp32 states",
    "relaxed, fp16 states",
    "relaxed, bf16 states",
)
# one of these, or "exact, int8 states" of decoded tokens, whose states have more formats
PrecisionName = Annotated[Text, Field(pattern=r"^(exact|relaxed), \S+ states$")]


def intermediates_of(precision: PrecisionName) -> str:
    """ "exact" or "relaxed"."""
    return precision.partition(", ")[0]


def states_of(precision: PrecisionName) -> str:
    """The dtype of its states: "fp32"."""
    return short_precision(precision).partition(", ")[2]


def short_precision(precision: PrecisionName) -> str:
    """ "exact, fp32", for the column of a table."""
    return precision.removesuffix(" states")


def exact_precision(precision: PrecisionName) -> PrecisionName:
    """The same states with exact intermediates."""
    return precision.replace("relaxed", "exact")


def precisions_for(
    dtype: DType, intermediates: Literal["exact", "relaxed", "all"], states: Sequence[DType] | None
) -> tuple[PrecisionName, ...]:
    """Every pair of intermediates and state dtype, exact before relaxed.

    dtype: of the inputs.  states: None: fp32 with exact, the inputs' dtype with relaxed.
    """
    kinds: tuple[Intermediates, ...] = (
        ("exact", "relaxed") if intermediates == "all" else (intermediates,)
    )
    names: list[PrecisionName] = []
    for kind in kinds:
        default: DType = "fp32" if kind == "exact" else dtype
        names += [f"{kind}, {state} states" for state in states or (default,)]
    return tuple(names)


REPEATS: Final = "repeats bitwise"  # a law that no kernel promises: only reported
# begins the names of laws about a pool of states: measure/pools.py
BETWEEN_CALLS: Final = "between calls: "
Holds = Literal["yes", "no", "not applicable"]
Laws = Literal["quick", "default", "all"]  # which laws are tested


class Probe(Record):
    """Whether a law holds that every correct kernel obeys, as measure/laws.py tests it.

    detail: the first position that broke it, why the law is not applicable, or in which limits it
    holds.
    """

    name: Text
    holds: Holds
    detail: Text = ""


def distinct(several: Iterable[Iterable[Key]]) -> list[Key]:
    """Each item of all of them once, in their order."""
    return list(dict.fromkeys(chain.from_iterable(several)))


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items with each key, both in their order."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
