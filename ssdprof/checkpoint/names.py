"""Parses names of models: hub ids, addresses, revisions after an @, and names with a typo."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ssdprof.checkpoint.families import FAMILIES, known
from ssdprof.errors import BadInputError

DEMOS = ("demo", "demo-gdn")
_ALIKE = 0.83  # difflib's ratio from which a name counts as a typo of another
_AT_MOST = 4  # suggestions


@dataclass(frozen=True)
class RepoName:
    """A repo on the hub.  revision: None where the user named none."""

    repo_id: str
    revision: str | None


def is_folder(name: str) -> bool:
    """Whether the user means a local folder: an existing one, or a name that only a path can have."""
    separators = (os.sep, os.altsep or os.sep)
    return os.path.exists(expanded(name)) or name.startswith((".", "~", *separators)) or name.endswith(separators)


def expanded(name: str) -> Path:
    return Path(os.path.expanduser(name))


def parse_repo(typed: str, revision: str | None) -> RepoName:
    """ "org/name", "org/name@v1" or "https://huggingface.co/org/name/tree/v1"; `revision` is the value of --revision.

    A known repo in another case is corrected.  Raises BadInputError for an address without a repo,
    and for two different revisions.
    """
    repo_id, named = _from_address(typed) if "://" in typed else _split(typed)
    if named is not None and revision not in (None, named):
        raise BadInputError(
            f"{typed} names the revision {named}, and --revision another: {revision}.", "Give one of them."
        )
    checkpoint = known(repo_id)
    return RepoName(checkpoint.repo if checkpoint else repo_id, revision or named)


def close_names(typed: str) -> list[str]:
    """Known names of which `typed` may be a typo, the likeliest first."""
    names = {*DEMOS, *(name for row in FAMILIES for name in (*row.typed, *(one.repo for one in row.checkpoints)))}
    scored = sorted((-_likeness(typed.casefold(), name.casefold()), name) for name in names)
    return [name for score, name in scored if -score >= _ALIKE][:_AT_MOST]


def _likeness(typed: str, name: str) -> float:
    """Similarity from 0 to 1: of the whole names, of the parts after the organisation, or of two words."""
    last, typed_last = name.rpartition("/")[2], typed.rpartition("/")[2]
    pairs = [(typed, name), (typed_last, last)]
    if not any(c.isdigit() for c in typed):  # else the end of a name decides: granite-9 is not a typo of granite-4.0
        pairs.append((typed_last, last[: len(typed_last)]))
    if typed.isalnum():
        pairs += [(typed, word) for word in last.split("-") if len(word) > 4]
    return max(difflib.SequenceMatcher(None, one, other).ratio() for one, other in pairs)


def _split(typed: str) -> tuple[str, str | None]:
    repo_id, at, revision = typed.partition("@")
    return repo_id, (revision or None) if at else None


def _from_address(typed: str) -> tuple[str, str | None]:
    """https://huggingface.co/org/name[/tree|blob|resolve/REV[/file]]"""
    parts = [part for part in urlsplit(typed).path.split("/") if part]
    if len(parts) < 2 or parts[0] in ("datasets", "spaces", "docs", "papers", "collections"):
        raise BadInputError(
            f"{typed} is not the address of a model.", "An address has the form https://huggingface.co/org/name."
        )
    repo_id, rest = "/".join(parts[:2]), parts[2:]
    if len(rest) < 2 or rest[0] not in ("tree", "blob", "resolve"):
        return repo_id, None
    pull_request = re.fullmatch(r"refs/pr/\d+", "/".join(rest[1:4]))
    return repo_id, pull_request[0] if pull_request else unquote(rest[1])
