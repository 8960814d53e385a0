"""The base class of records, and the types of their fields.

Records are immutable.  They refuse unknown fields, NaN, infinities (but for limits in the arguments
of a captured call) and numbers out of range.  They import no torch.  They hold what was measured;
ratios, intervals and verdicts are properties, computed when they are read.  Shapes use the letters
of `docs/glossary.md`; units are in the names.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from itertools import chain
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from ssdprof.errors import HARMFUL, escaped

VERSION: Final = 4  # of the format of reports
SMALLEST_DIFFERENCE: Final = 0.01  # relative; times that differ by less are not called different
TOLERANCES: Final[tuple[float, ...]] = (0.0, 1e-3, 1e-2)  # at which matching elements are counted
# Slices of a prompt.  Slice i holds the positions p with p * SLICES // seqlen == i; a prompt of
# fewer tokens has as many slices as tokens, with one position in each.
SLICES: Final = 32

MEMORIES: Final[tuple[int, ...]] = (64, 1024, 16384)  # tokens within which a head may forget

DType = Literal["fp64", "fp32", "fp16", "bf16"]
StoredDType = Literal["fp64", "fp32", "fp16", "bf16", "int32", "int64"]  # of a tensor in a capture
Intermediates = Literal["exact", "relaxed"]
# Whether a case ran.  Whether its result is right is `Case.result`.
Status = Literal["ran", "refused", "out of memory", "failed"]
Fault = Literal["refused", "out of memory", "failed"]
CaseResult = Literal["passed", "inaccurate", "nonfinite", "refused", "out of memory", "failed"]
# "call": a Python call on an idle device.  "device": the replay of a CUDA graph of the call.
Clock = Literal["call", "device"]
CLOCKS: Final[tuple[Clock, ...]] = ("device", "call")
TensorName = Literal["out", "final_states"]
PlacementKind = Literal["one-gpu", "all-gpus", "cpu-offload", "disk-offload"]
# the origin of the convolution and the gated norm around an operator
KernelOrigin = Literal["model", "bundled"]
PartName = Literal["operator", "convolution", "gated norm", "mixer", "attention", "MLP", "rest"]

LONGEST_SEQLEN: Final = 1 << 24  # tokens of a call, and elements along any other axis
MOST_STEPS: Final = 4096  # decode steps after a prompt; also the largest number of processes
_LARGEST_INT: Final = 1 << 62  # fits into a signed integer of 64 bits
Count = Annotated[int, Field(ge=0, le=_LARGEST_INT)]
Size = Annotated[int, Field(gt=0, le=_LARGEST_INT)]
Length = Annotated[int, Field(gt=0, le=LONGEST_SEQLEN)]
Processes = Annotated[int, Field(gt=0, le=MOST_STEPS)]
Position = Annotated[tuple[Count, ...], Field(min_length=1)]  # an index for each axis
# the limits keep ratios of ratios, and their intervals, finite
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


# A text from any source, made harmless for every output.  Pydantic itself refuses lone surrogates.
Text = Annotated[str, BeforeValidator(_harmless)]


class Record(BaseModel):
    """The base class of every stored record.  The type of a text field is `Text`, never `str`."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="strings"
    )

    def changed(self, **fields: object) -> Self:
        """A copy with other values of some fields, validated again.

        Pydantic's `model_copy` does not validate.
        """
        return type(self)(**(self.field_values | fields))

    @property
    def field_values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in type(self).model_fields}


def check_unique(what: str, names: Sequence[object]) -> None:
    """Raise ValueError if one of the names occurs twice.  what: the subject of the message."""
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{what} occurs twice: {repeated}")


# Reports store a precision as its name.  Kernels take a `ssdprof.kernels.Precision`.
EXACT_FP32: Final = "exact, fp32 states"
PRECISIONS: Final = (
    EXACT_FP32,
    "exact, fp16 states",
    "exact, bf16 states",
    "relaxed, fp32 states",
    "relaxed, fp16 states",
    "relaxed, bf16 states",
)
# One of `PRECISIONS`.  Cases of decoded tokens have more formats of states: "exact, int8 states".
PrecisionName = Annotated[Text, Field(pattern=r"^(exact|relaxed), \S+ states$")]


def intermediates_of(precision: PrecisionName) -> str:
    """The intermediates of a precision: "exact" or "relaxed"."""
    return precision.partition(", ")[0]


def states_of(precision: PrecisionName) -> str:
    """The dtype or other format of the states of a precision: "fp32", "int8"."""
    return short_precision(precision).partition(", ")[2]


def short_precision(precision: PrecisionName) -> str:
    """The precision as the column of a table shows it: "exact, fp32"."""
    return precision.removesuffix(" states")


def exact_precision(precision: PrecisionName) -> PrecisionName:
    """The precision with the same states and exact intermediates."""
    return precision.replace("relaxed", "exact")


def precisions_for(
    dtype: DType, intermediates: Literal["exact", "relaxed", "all"], states: Sequence[DType] | None
) -> tuple[PrecisionName, ...]:
    """Every combination of intermediates and state dtypes, exact before relaxed.

    dtype: of the inputs.
    states: the state dtypes.  None or empty: fp32 states for exact intermediates, and states in the
        inputs' dtype for relaxed ones.
    """
    kinds: tuple[Intermediates, ...] = (
        ("exact", "relaxed") if intermediates == "all" else (intermediates,)
    )
    names: list[PrecisionName] = []
    for kind in kinds:
        default: DType = "fp32" if kind == "exact" else dtype
        names += [f"{kind}, {state} states" for state in states or (default,)]
    return tuple(names)


# A law that no kernel promises to obey: its result is reported, and breaking it fails no case.
REPEATS: Final = "repeats bitwise"
# The names of laws about a pool of states (measure/pools.py) begin with this.
BETWEEN_CALLS: Final = "between calls: "
# begins the remark on a fault that was found while a server ran
WHILE_RECORDED: Final = "While it was recorded: "
# "not applicable": the law says nothing about such a call, or the kernel declares that it does not
# support it.  "not tested": the law could not be tested here.
Holds = Literal["yes", "no", "not tested", "not applicable"]
Laws = Literal["quick", "default", "all"]  # which laws are tested
ENDED: Final = ("its call ", "after its call ")  # begin the detail of a law whose process ended
STOPPED: Final = "was stopped after"  # in that detail, if it was stopped because a call took long


class Probe(Record):
    """The result of testing a law, which every correct kernel obeys (measure/laws.py).

    name: of the law.
    detail: if the law is broken, what is wrong, and where; if it was not tested or is not
        applicable, the reason; if it holds, the limits within which it does, or empty.
    """

    name: Text
    holds: Holds
    detail: Text = ""


def distinct(several: Iterable[Iterable[Key]]) -> list[Key]:
    """The items of several collections, each item once, in the order of first occurrence."""
    return list(dict.fromkeys(chain.from_iterable(several)))


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Key -> the items with this key.  Keys and items are in the order of the items."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
