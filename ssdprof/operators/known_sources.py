"""The stages in files of other libraries' kernels, by the hash of the file.

A TOML table in the operator's folder has, for each file:

    implementation   that launches its kernels; left out for helpers
    version, file    what it is, for people
    sha256           of the file: another version has other lines, and another hash
    stages           function -> its stage; "caller" for a helper that is inlined into others' stages
    starts           line -> the stage that begins there, inside the function
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class KnownSource:
    """One version of a file: see the module."""

    sha256: str
    version: str
    file: str
    implementation: str = ""
    stages: Mapping[str, str]
    starts: Mapping[int, str] = field(default_factory=dict)


def known_sources(table: Path) -> Mapping[str, KnownSource]:
    """The files of a table, by their hash."""
    found = [_source(**entry) for entry in tomllib.loads(table.read_text(encoding="utf-8"))["source"]]
    return {source.sha256: source for source in found}


def _source(*, starts: Mapping[str, str] | None = None, **values: object) -> KnownSource:
    lines = {int(line): stage for line, stage in (starts or {}).items()}
    return KnownSource(starts=lines, **values)  # type: ignore[arg-type]
