"""Names that users type for models and layers, and the table of published checkpoints.  Imports no
torch.
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

DEMO_FOLDERS = {folder.name: folder for folder in sorted(Path(__file__).parent.glob("demo*"))}
_ALIKE = 0.83  # difflib's ratio from which a name counts as a typo of another
_AT_MOST = 4  # suggestions


# --- published checkpoints


@dataclass(frozen=True, kw_only=True)
class KnownCheckpoint:
    """One repo.  None: unknown.  dims: sizes of its operator by name, as the operator's outline
    lists them.
    """

    repo: str
    parameters: int  # of the whole model
    operator_layers: int | None = None
    layers: int | None = None
    dims: dict[str, int] | None = None
    # tokens, if it differs from the config's max_position_embeddings
    trained_context: int | None = None


@dataclass(frozen=True, kw_only=True)
class Family:
    """Checkpoints of one `model_type`, smallest first.

    typed: names that users type and that are not repos.  flagship: the repo used for them.
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
    """A table of families.toml.  `layers` of a checkpoint: those with an operator, and all."""
    names = operators.get(row["operator"]).mixer_sizes
    known = (
        KnownCheckpoint(
            repo=f"{organisation}/{entry['repo']}",
            parameters=round(1e9 * entry["billions"]),
            operator_layers=entry.get("layers", [None])[0],
            layers=entry.get("layers", [None])[-1],
            dims=dict(zip(names, entry["sizes"], strict=True)) if "sizes" in entry else None,
            trained_context=entry.get("context"),
        )
        for entry in checkpoints
    )
    return Family(checkpoints=tuple(known), typed=tuple(typed), **row)


_TABLE = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))
OTHER_SCANS: dict[str, str] = _TABLE["other_scans"]  # model type -> why it is refused
FAMILIES = tuple(_family(**row) for row in _TABLE["family"])
# any other works if it calls an operator
KNOWN_TYPES = tuple(dict.fromkeys(row.model_type for row in FAMILIES))


def family_named(typed: str) -> Family | None:
    """The family with the name `typed`; None if there is none."""
    return next((row for row in FAMILIES if typed.casefold() in map(str.casefold, row.typed)), None)


_CHECKPOINTS = tuple(chain.from_iterable(row.checkpoints for row in FAMILIES))
KNOWN = {checkpoint.repo.casefold(): checkpoint for checkpoint in _CHECKPOINTS}  # by repo


def siblings_that_fit(repo_id: str, budget_bytes: int) -> tuple[KnownCheckpoint, ...]:
    """Other members of `repo_id`'s family whose 16-bit weights take at most `budget_bytes`, largest
    first.
    """
    members = next(
        (row.checkpoints for row in FAMILIES if any(c.repo == repo_id for c in row.checkpoints)), ()
    )
    fitting = [c for c in members if c.repo != repo_id and 2 * c.parameters <= budget_bytes]
    return tuple(sorted(fitting, key=lambda checkpoint: -checkpoint.parameters))


# --- names of models


def is_folder(name: str) -> bool:
    """Whether the user means a local folder: an existing one, or a name that only a path can
    have.
    """
    separators = (os.sep, os.altsep or os.sep)
    return (
        os.path.exists(os.path.expanduser(name))
        or name.startswith((".", "~", *separators))
        or name.endswith(separators)
    )


def close_names(typed: str) -> list[str]:
    """Known names of which `typed` may be a typo, or the beginning or a word, the likeliest
    first.
    """
    end = typed.rpartition("/")[2].casefold()
    # else the end of a name decides: granite-9 is no granite-4.0
    begins = not any(map(str.isdigit, end))

    def likeness(name: str) -> float:
        """The best match of what was typed: with the whole name, or of its end with a part of the
        name.
        """
        last = name.rpartition("/")[2].casefold()
        words = [word for word in last.split("-") if len(word) > 4 and end.isalnum()]
        parts = [last, *words]
        if begins:
            parts.append(last[: len(end)])
        pairs = [(typed.casefold(), name.casefold()), *((end, part) for part in parts)]
        return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)

    names = {
        *DEMO_FOLDERS,
        *chain.from_iterable(row.typed for row in FAMILIES),
        *(checkpoint.repo for checkpoint in _CHECKPOINTS),
    }
    scored = sorted((-likeness(name), name) for name in names)
    return [name for score, name in scored if -score >= _ALIKE][:_AT_MOST]


# --- names of layers

_GRAMMAR = (
    "Write --layers all, first:N, every:K (every Kth, from the first), or decoder layer numbers "
    "and ranges: 3,7 or 0-3."
)
_NUMBERS = r"(\d{1,6})(?:\s*-\s*(\d{1,6}))?"


def check_layers(spec: str) -> None:
    """BadInputError for a spec that cannot be read, whatever the model."""
    text = spec.strip().lower()
    read = re.fullmatch(rf"all|(first|every):0*[1-9]\d{{0,5}}|{_NUMBERS}(\s*,\s*{_NUMBERS})*", text)
    ranges = re.findall(_NUMBERS, text if text[:1].isdigit() else "")
    if not read or any(last and int(last) < int(first) for first, last in ranges):
        raise BadInputError(f"--layers {spec!r} cannot be read.", _GRAMMAR)


def select_indices(spec: str, indices: Sequence[int]) -> tuple[int, ...]:
    """Those of `indices`, the decoder layers with an operator, that `spec` names, each once, in
    their order.

    `all`, `first:N` and `every:K` count them: with 0, 1, 3, 4, `first:3` is 0, 1 and 3.  Numbers
    and ranges, such as `3,7` and `0-3,7`, are decoder layer indices; a range includes both ends,
    and selects its layers with an operator.

    Raises BadInputError for a spec that cannot be read and for a layer that does not exist; the
    message lists the existing ones.
    """
    check_layers(spec)
    word, _, number = spec.strip().lower().partition(":")
    listed = f"the model has {len(indices)}: {', '.join(map(str, indices))}."
    if word == "all":
        return tuple(indices)
    if word == "every":
        return tuple(indices[:: int(number)])
    if word == "first":
        if int(number) > len(indices):
            raise BadInputError(f"--layers {spec}: {listed}", "Use --layers all for every one.")
        return tuple(indices[: int(number)])
    ranges = [
        (int(first), int(last or first), f"{first}-{last}" if last else first)
        for first, last in re.findall(_NUMBERS, word)
    ]
    if missing := [
        words for first, last, words in sorted(ranges) if not {*indices} & {*range(first, last + 1)}
    ]:
        raise BadInputError(
            f"Layer {', '.join(missing)} has no SSD, GDN or KDA operator; {listed}",
            "Numbers are decoder layer indices, counted from 0.",
        )
    return tuple(
        index for index in indices if any(first <= index <= last for first, last, _ in ranges)
    )


def shown(value: object) -> str:
    """`value` as text for a message, shortened, because a config may hold any text."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
