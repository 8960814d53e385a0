"""Names that users type for models and layers, and the table of published checkpoints.

Imports no torch.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ssdprof import operators
from ssdprof.errors import BadInputError

# name of a demo, which users type in place of a model -> its folder in the package
DEMO_FOLDERS = {folder.name: folder for folder in sorted(Path(__file__).parent.glob("demo*"))}
_LEAST_RATIO = 0.83  # with at least this ratio of difflib, a name counts as a typo of another one
_MOST_SUGGESTIONS = 4  # at most so many names are suggested


# --- published checkpoints


@dataclass(frozen=True, kw_only=True)
class KnownCheckpoint:
    """One repo on the hub.

    parameters: number of parameters of the whole model.
    operator_layers: number of layers with an operator.  layers: number of all layers.
    dims: sizes of the operator by name (`Operator.mixer_sizes`).
        These three are None if they are not known.
    trained_context: tokens; None: the config's max_position_embeddings is right.
    """

    repo: str
    parameters: int
    operator_layers: int | None = None
    layers: int | None = None
    dims: dict[str, int] | None = None
    trained_context: int | None = None


@dataclass(frozen=True, kw_only=True)
class Family:
    """Checkpoints of one `model_type`, the smallest first.

    typed: names of the family that users type; they are no repos.  flagship: the repo that such a
    name means.
    """

    title: str
    model_type: str
    operator: str
    checkpoints: tuple[KnownCheckpoint, ...]
    typed: tuple[str, ...] = ()
    flagship: str | None = None


def _family(
    organisation: str, checkpoints: list[dict[str, Any]], typed: Sequence[str] = (), **row: Any
) -> Family:
    """The family that a table of families.toml describes.

    typed, row: as in `Family`.  In the file, `layers` of a checkpoint is a list: the number of
    layers with an operator, and of all layers.  It has a single number if all layers have an
    operator.
    """
    names = operators.get(row["operator"]).mixer_sizes
    known: list[KnownCheckpoint] = []
    for entry in checkpoints:
        counts = entry.get("layers", [None])
        checkpoint = KnownCheckpoint(
            repo=f"{organisation}/{entry['repo']}",
            parameters=round(1e9 * entry["billions"]),
            operator_layers=counts[0],
            layers=counts[-1],
            dims=dict(zip(names, entry["sizes"], strict=True)) if "sizes" in entry else None,
            trained_context=entry.get("context"),
        )
        known.append(checkpoint)
    return Family(checkpoints=tuple(known), typed=tuple(typed), **row)


_TABLE = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))
OTHER_SCANS: dict[str, str] = _TABLE["other_scans"]  # model type -> why it is refused
FAMILIES = tuple(_family(**row) for row in _TABLE["family"])
# model types for messages; a model of another type works if it calls an operator
KNOWN_TYPES = tuple(dict.fromkeys(family.model_type for family in FAMILIES))


def family_named(typed: str) -> Family | None:
    """The family with the name `typed`, in any capitalisation; None if there is none."""
    for family in FAMILIES:
        if typed.casefold() in map(str.casefold, family.typed):
            return family
    return None


_CHECKPOINTS = tuple(chain.from_iterable(family.checkpoints for family in FAMILIES))
# repo in lower case -> checkpoint
KNOWN = {checkpoint.repo.casefold(): checkpoint for checkpoint in _CHECKPOINTS}


def siblings_that_fit(repo_id: str, budget_bytes: int) -> tuple[KnownCheckpoint, ...]:
    """Other checkpoints of the repo's family whose 16-bit weights take at most `budget_bytes`, the
    largest first.
    """
    for family in FAMILIES:
        others = [known for known in family.checkpoints if known.repo != repo_id]
        if len(others) < len(family.checkpoints):  # the repo is in this family
            fitting = [known for known in others if 2 * known.parameters <= budget_bytes]
            return tuple(reversed(fitting))
    return ()


# --- names of models


def is_folder(name: str) -> bool:
    """Whether a name means a local folder: a file or folder has it, or only a path can have it."""
    return (
        os.path.exists(os.path.expanduser(name))
        or name.startswith((".", "~", os.sep))
        or name.endswith(os.sep)
    )


def close_names(typed: str) -> list[str]:
    """At most `_MOST_SUGGESTIONS` known names that `typed` may mean by a typo, a beginning or a
    word, the likeliest first.
    """
    typed_end = typed.rpartition("/")[2].casefold()  # without the organisation
    # With digits, a name is compared as a whole: granite-9 is not the beginning of granite-4.0.
    may_be_beginning = typed_end and not any(map(str.isdigit, typed_end))

    def likeness(name: str) -> float:
        """From 0 to 1: how well `typed` matches the name, or the end of `typed` matches the end of
        the name, a long word of that end, or, if `typed` has no digits, the beginning of that end.
        """
        end = name.rpartition("/")[2].casefold()
        parts = [end]
        if typed_end.isalnum():
            parts += [word for word in end.split("-") if len(word) > 4]
        if may_be_beginning:
            parts.append(end[: len(typed_end)])
        pairs = [(typed.casefold(), name.casefold())]
        pairs += [(typed_end, part) for part in parts]
        return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)

    names = {
        *DEMO_FOLDERS,
        *chain.from_iterable(family.typed for family in FAMILIES),
        *(checkpoint.repo for checkpoint in _CHECKPOINTS),
    }
    scored = sorted((-likeness(name), name) for name in names)
    return [name for score, name in scored if -score >= _LEAST_RATIO][:_MOST_SUGGESTIONS]


# --- names of layers

_GRAMMAR = (
    "Write --layers all, first:N, every:K (every Kth, from the first), or decoder layer numbers "
    "and ranges: 3,7 or 0-3."
)
_NUMBERS = r"(\d{1,6})(?:\s*-\s*(\d{1,6}))?"  # a layer number, or a range
_LAYERS = re.compile(rf"all|(first|every):0*[1-9]\d{{0,5}}|{_NUMBERS}(\s*,\s*{_NUMBERS})*")


def check_layers(spec: str) -> None:
    """BadInputError for a value of --layers that can be read for no model.  spec: see
    `select_indices`.
    """
    text = spec.strip().lower()
    ranges = re.findall(_NUMBERS, text)
    backwards = any(last and int(last) < int(first) for first, last in ranges)
    if backwards or not _LAYERS.fullmatch(text):
        raise BadInputError(f"--layers {spec!r} cannot be read.", _GRAMMAR)


def select_indices(spec: str, indices: Sequence[int]) -> tuple[int, ...]:
    """The layers that a value of --layers names, without duplicates, in the order of `indices`.

    indices: indices of the decoder layers with an operator.
    spec: "all", "first:N" or "every:K", which count these layers: of 0, 1, 3, 4, "first:3" selects
        0, 1 and 3.  Or numbers and ranges, such as "3,7" and "0-3,7", which are decoder layer
        indices; a range includes both ends, and selects its layers with an operator.

    Raises BadInputError for a spec that cannot be read, for "first:N" with more layers than there
    are, and for a number or a range without a layer of `indices`; the message lists `indices`.
    """
    check_layers(spec)
    text = spec.strip().lower()
    word, _, number = text.partition(":")
    listed = f"the model has {len(indices)}: {', '.join(map(str, indices))}."
    if word == "all":
        return tuple(indices)
    if word == "every":
        return tuple(indices[:: int(number)])
    if word == "first":
        if int(number) > len(indices):
            raise BadInputError(f"--layers {spec}: {listed}", "Use --layers all for every one.")
        return tuple(indices[: int(number)])
    missing: list[str] = []  # numbers and ranges without a layer of `indices`, as typed
    selected: set[int] = set()
    for first, last in re.findall(_NUMBERS, text):  # `last` is empty for a single number
        in_range = [index for index in indices if int(first) <= index <= int(last or first)]
        selected.update(in_range)
        if not in_range:
            missing.append(f"{first}-{last}" if last else first)
    if missing:
        absent = ", ".join(missing)
        layers_have = f"Layer {absent} has" if absent.isdigit() else f"Layers {absent} have"
        raise BadInputError(
            f"{layers_have} no SSD, GDN or KDA operator; {listed}",
            "Numbers are decoder layer indices, counted from 0.",
        )
    return tuple(index for index in indices if index in selected)


def shown(value: object) -> str:
    """The repr of `value` for a message, cut to 60 characters: a config may hold any text."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
