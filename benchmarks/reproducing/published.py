"""Reads benchmarks/published/NAME.toml: a source's claims and how they are measured.  README.md has the format."""

from __future__ import annotations

import re
import tomllib
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ssdprof.errors import BadInputError
from ssdprof.schema.base import first_fault

FOLDER = Path(__file__).parent.parent / "published"
_NAME = r"[A-Za-z_]\w*(?:\[[^\]]+\])?"
COMPARISON = re.compile(rf"({_NAME}) (<=|>=|<|>|==) (-?\d+(?:\.\d+)?|{_NAME})")
_COMPARISONS = re.compile(rf"{COMPARISON.pattern}(?: and {COMPARISON.pattern})*")


class Part(BaseModel):
    """A table of the document.  An unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Measure(Part):
    """commands: run one after the other; the last writes `file`.  share: share of the remaining seconds.
    subject: "SHAPE, DTYPE" for a bench, a model for prefill; a recorded report must have the same subject.
    """

    name: str
    reads: Literal["bench", "run", "stalls", "prefill"]
    subject: str = ""
    commands: tuple[str, ...]
    file: str = ""
    share: float = Field(default=1.0, gt=0, le=1)


class _Value(Part):
    """key: the words of the combination of `each`, or the stated key; "" if the value has only a name."""

    name: str
    measure: str
    of: str
    key: str = ""


class Ratio(_Value):
    """The speedup of `of` over `over`; without `over`, the time of `of` in microseconds.

    statistic: statistic of the samples.  All but the median use the pooled samples of all recordings.
    """

    kind: Literal["time"]
    over: str = ""
    clock: Literal["device", "call"] = "device"
    statistic: Literal["median", "p95", "min", "max"] = "median"
    cells: tuple[str, ...] = ()
    pick: Literal["", "least", "greatest", "mean"] = ""

    @property
    def unit(self) -> str:
        return "x" if self.over else "us"


class Match(_Value):
    """Percent of the elements that match, or RMS error over that of the rounded oracle."""

    kind: Literal["match", "match with fp64", "error over floor"]
    tolerance: float = 0.0
    cells: tuple[str, ...] = ()
    pick: Literal["", "least", "greatest", "mean"] = ""

    @property
    def unit(self) -> str:
        return "x" if self.kind == "error over floor" else "%"


class Stall(_Value):
    """Percent of the samples of an implementation's warps that are in `stages`, stalled for `reasons`.

    stages: a name includes its parts; empty for all.  without: excluded parts of them.  reasons: empty for all.
    resource: if set, this number of its longest kernel is the value instead.
    """

    kind: Literal["stalls"]
    stages: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    resource: Literal["", "compute_pct", "memory_pct", "l2_pct", "dram_pct", "occupancy_pct"] = ""

    @property
    def unit(self) -> str:
        return "%"


class EndToEnd(_Value):
    """The speedup of a prefill with `of` instead of `over`, in percent; without `over`, a part of its time.

    part: the whole call in milliseconds; the GPU's work for the operator, in milliseconds; or the percent of the call
    in which the GPU is idle.
    """

    kind: Literal["prefill"]
    over: str = ""
    part: Literal["call", "operator", "idle"] = "call"
    seqlen: int
    surroundings: Literal["model", "bundled"] = "bundled"

    @property
    def unit(self) -> str:
        return "%" if self.over or self.part == "idle" else "ms"


Value = Annotated[Ratio | Match | Stall | EndToEnd, Field(discriminator="kind")]


class Numbers(Part):
    """Quoted numbers, each compared with the value `value[KEY]`; without `value`, they are not measured here.

    within_pct: largest difference, in percent of the quoted number.  beside: further values without a quoted number.
    """

    words: str
    value: str = ""
    beside: tuple[str, ...] = ()
    within_pct: float = 10.0
    absolute: bool = False
    quoted: dict[str, float]
    note: str = ""


class Claim(Part):
    """holds: comparisons of values, joined by "and".  why: why it is not measured.  note: how it is judged.  reason:
    why it does not hold in the recorded results.  gpu: if it differs from the document's.  absolute: whether it is
    about a time, which another GPU cannot confirm."""

    words: str
    quoted: str
    holds: str = ""
    why: str = ""
    note: str = ""
    reason: str = ""
    gpu: str = ""
    absolute: bool = False

    @field_validator("holds")
    @classmethod
    def _understood(cls, holds: str) -> str:
        if holds and not _COMPARISONS.fullmatch(holds):
            raise ValueError(f"{holds!r} is not comparisons like 'name >= 1.5', joined by 'and'")
        return holds

    @model_validator(mode="after")
    def _judged_or_explained(self) -> Claim:
        if bool(self.holds) == bool(self.why):
            raise ValueError("a claim has either holds or why")
        return self


class Figure(Part):
    """values: drawn in one plot, over their keys.  band: shaded, from lowest to highest quoted value."""

    values: tuple[str, ...]
    axis: str
    band: tuple[float, float] | None = None


class Published(Part):
    """One document.  gpu: GPUs of the source, separated by commas.  quoted: quoted numbers of a runner."""

    title: str
    source: str
    gpu: str
    runner: str = ""
    seconds: float = 100.0
    choices: tuple[str, ...] = ()
    measure: tuple[Measure, ...] = ()
    value: tuple[Value, ...] = ()
    numbers: tuple[Numbers, ...] = ()
    figure: Figure | None = None
    claim: tuple[Claim, ...]
    quoted: Any = None

    @field_validator("value", mode="before")
    @classmethod
    def _each(cls, values: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [one for value in values for one in _spelled_out(value)]

    @field_validator("numbers", mode="before")
    @classmethod
    def _each_value(cls, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [one for group in groups for one in _of_each_value(group)]

    @model_validator(mode="after")
    def _names_fit(self) -> Published:
        if bool(self.runner) == bool(self.measure):
            raise ValueError("a document has either a runner or measurements")
        if self.runner:
            return self
        measures, values = {one.name for one in self.measure}, {one.name for one in self.value}
        used = [(one.measure, measures) for one in self.value]
        used += [(name, values) for one in self.numbers for name in (one.value, *one.beside) if name]
        used += [(name.partition("[")[0], values) for one in self.claim for name in names_in(one)]
        used += [(name, values) for name in (self.figure.values if self.figure else ())]
        for name, known in used:
            if name not in known:
                raise ValueError(f"{name!r} is none of {', '.join(sorted(known))}")
        return self


def names_in(claim: Claim) -> list[str]:
    """The distinct values in a claim."""
    sides = [side for left, _, right in COMPARISON.findall(claim.holds) for side in (left, right)]
    return list(dict.fromkeys(side for side in sides if not is_number(side)))


def is_number(side: str) -> bool:
    """Whether a side of a comparison is a number.  Otherwise it is a value's name."""
    return side[0] in "-0123456789"


def known(folder: Path = FOLDER) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.toml"))


def load(name: str, folder: Path = FOLDER) -> Published:
    """Raises BadInputError for an unknown name, and for a document that is not in the format."""
    there = known(folder)
    if name not in there:
        near = get_close_matches(name, there, n=1, cutoff=0.3)
        asked = f"Did you mean {near[0]}?  " if near else ""
        raise BadInputError(f"{name!r} is not a published comparison.", f"{asked}Choose from: {', '.join(there)}.")
    file = folder / f"{name}.toml"
    try:
        return Published.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except tomllib.TOMLDecodeError as error:
        raise BadInputError(f"{file.name} is not TOML: {error}.") from error
    except ValidationError as error:
        raise BadInputError(f"{file.name}: {first_fault(error)}.", f"See {folder.name}/README.md.") from error


def _spelled_out(value: dict[str, Any]) -> list[dict[str, Any]]:
    """One value for each combination of the words in `each`, which replace the braces.  Words that are not in the name
    are the key.
    """
    plain = {key: one for key, one in value.items() if key != "each"}
    each = {name: [str(word) for word in words] for name, words in value.get("each", {}).items()}
    apart = [name for name in each if f"{{{name}}}" not in str(value.get("name"))]
    found = []
    for combination in product(*each.values()):
        words = dict(zip(each, combination, strict=True))
        key = " ".join(words[name] for name in apart)
        found.append({**_filled(plain, words), **({"key": key} if key else {})})
    return found


def _of_each_value(numbers: dict[str, Any]) -> list[dict[str, Any]]:
    """One table for each value in `words_of`, which maps the value's name to the words of its table."""
    shared = {key: one for key, one in numbers.items() if key != "words_of"}
    words_of = numbers.get("words_of", {})
    return [shared | {"value": value, "words": words} for value, words in words_of.items()] or [shared]


def _filled(fields: Any, words: dict[str, str]) -> Any:
    if isinstance(fields, str):
        for name, word in words.items():
            fields = fields.replace(f"{{{name}}}", word)
        return fields
    if isinstance(fields, dict):
        return {key: _filled(value, words) for key, value in fields.items()}
    return [_filled(one, words) for one in fields] if isinstance(fields, list) else fields
