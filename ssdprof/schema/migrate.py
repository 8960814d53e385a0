"""Converts documents of schema version 1 to version 2 before they are read.

Version 1 knew one operator: `dims` held the sizes of SSD, without naming it.
"""

from __future__ import annotations

from typing import Any

OLDEST = 1


def run_report(document: dict[str, Any]) -> dict[str, Any]:
    """A RunReport of version 1."""
    return document | {"schema_version": 2, "cases": _each(document, "cases", _with_dims)}


def manifest(document: dict[str, Any]) -> dict[str, Any]:
    """A CaptureManifest of version 1, which had no hash of the scalars."""
    layers = _each(document, "layers", lambda layer: layer | {"scalars_sha256": None})
    return document | {"schema_version": 2, "layers": layers}


def bench_report(document: dict[str, Any]) -> dict[str, Any]:
    """A BenchReport of version 1."""
    cells = _each(document, "cells", lambda cell: _with_dims(cell) | {"sizes": _brief(cell.get("dims"))})
    return document | {"schema_version": 2, "operator": "ssd", "kind": "bench", "cells": cells}


def _each(document: dict[str, Any], name: str, change: Any) -> Any:
    """A list of converted records; anything else is left for the reader to refuse."""
    records = document.get(name)
    if not isinstance(records, list):
        return records
    return [change(record) if isinstance(record, dict) else record for record in records]


def _with_dims(holder: dict[str, Any]) -> dict[str, Any]:
    """A record with converted `dims`; one without is left for the reader to refuse."""
    old = holder.get("dims")
    if not isinstance(old, dict):
        return holder
    sizes = {name: old.get(name) for name in ("nheads", "headdim", "dstate", "ngroups")}
    groups = f"{sizes['ngroups']} group{'' if sizes['ngroups'] == 1 else 's'}"
    words = f"{sizes['nheads']} heads x {sizes['headdim']}, state {sizes['dstate']}, {groups}"
    kept = {name: old.get(name) for name in ("batch", "seqlen", "chunk_size", "dtype")}
    return holder | {"dims": {"operator": "ssd", **kept, "sizes": sizes, "words": words}}


def _brief(dims: object) -> str:
    if not isinstance(dims, dict):
        return ""
    return f"{dims.get('nheads')}x{dims.get('headdim')}, N {dims.get('dstate')}, G {dims.get('ngroups')}"
