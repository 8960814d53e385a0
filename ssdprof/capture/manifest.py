"""The manifest of a folder of captures.  Imports no torch, so that a folder that cannot be used is
refused at once.
"""

import os
from contextlib import suppress
from pathlib import Path

from ssdprof.core.base import VERSION
from ssdprof.core.target import CaptureManifest
from ssdprof.errors import BadInputError, SsdprofError
from ssdprof.files import read_object, read_stored

MANIFEST = "manifest.json"
CAPTURE_HINT = "Capture again."
BROKEN_OFF = (
    "This capture was interrupted: layers or prompts may be missing, and a run of it cannot pass."
)


def is_capture(path: Path) -> bool:
    """Whether `path` is a folder with a manifest, which may be damaged or another program's."""
    return os.path.isfile(path / MANIFEST)


def is_foreign(folder: Path) -> bool:
    """Whether the manifest in `folder` is another program's.  False if it is missing or cannot be
    read.
    """
    with suppress(SsdprofError):
        return "checkpoint" not in read_object(folder / MANIFEST, MANIFEST, CAPTURE_HINT)
    return False


def read_manifest(folder: Path) -> CaptureManifest:
    """The manifest in `folder`.

    Raises BadInputError, which names the file, if it is missing, damaged, of another schema version
    or another program's, and MissingCapabilityError if there is no permission to read it.
    """
    path = folder / MANIFEST
    if is_foreign(folder):
        raise BadInputError(f"{path} is not the manifest of a capture.", "Name another folder.")
    return read_stored(path, CaptureManifest.model_validate, VERSION, CAPTURE_HINT)
