"""Versions of libraries whose modules have no version attribute."""

from __future__ import annotations

from importlib import metadata


def version(package: str) -> str:
    """The version of an installed package, or "unknown" for a checkout."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
