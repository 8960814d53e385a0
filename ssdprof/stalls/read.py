"""An .ncu-rep file as plain values, by NVIDIA's ncu-report package: no GPU and no ncu needed."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import tempfile
from pathlib import Path

from ssdprof.environment import child
from ssdprof.errors import BadInputError, MissingCapabilityError, how_ended
from ssdprof.stalls import unpack
from ssdprof.stalls.raw import RawKernel, RawReport

_MAGIC = b"NVR\0"
_LAYOUT = b"\x08\x07"  # version 7 of the container: the one whose sizes are known here
_TIMEOUT_S = 600  # far above the time for the largest intact report
_AGAIN = "Copy or record it again."


def read(path: Path) -> RawReport:
    """Every launch in a report.

    Raises BadInputError for a file that is missing, not a report, truncated, damaged or without a launch, and
    MissingCapabilityError if ncu-report is not installed.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror}.", "Name an .ncu-rep file.") from error
    whole = _is_whole(content)
    if whole is False:
        raise _unusable(path, content, whole)
    kernels = _kernels(path)
    if not kernels or not all(kernel.metrics for kernel in kernels):
        raise _unusable(path, content, whole)
    return RawReport(name=path.name, sha256=hashlib.sha256(content).hexdigest(), kernels=kernels, whole=whole)


def _unusable(path: Path, content: bytes, whole: bool | None) -> BadInputError:
    if not content.startswith(_MAGIC) and path.suffix != ".ncu-repz":
        return BadInputError(f"{path} is not an ncu report.", "Name a file that 'ncu -o' wrote.")
    if whole is False:
        return BadInputError(f"{path} is truncated: it ends in the middle of a block.", _AGAIN)
    return BadInputError(
        f"{path} holds no profiled kernel (zero ranges): nothing was profiled, or the file is damaged.",
        "Copy it again; or ncu's filters (-k, --nvtx-include, --launch-skip) matched nothing when it was recorded.",
    )


def _kernels(path: Path) -> tuple[RawKernel, ...]:
    """By ncu-report in a child process, which a damaged file may crash."""
    with tempfile.TemporaryDirectory(prefix="ssdprof-") as folder:
        out = Path(folder) / "kernels.json"
        command = [*child.python("ssdprof.stalls.unpack"), str(path), str(out)]
        try:
            ended = subprocess.run(
                command,
                env=os.environ | child.search_path(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise BadInputError(f"{path} is damaged: ncu-report did not finish.", _AGAIN) from error
        if ended.returncode == unpack.NOT_INSTALLED:
            raise MissingCapabilityError(
                "The ncu-report package, which reads ncu's files, is not installed.", "pip install ncu-report"
            )
        if ended.returncode != 0:
            words = ended.stderr.decode(errors="replace").strip().splitlines()[-1:]
            how = how_ended(ended.returncode) if ended.returncode < 0 else "".join(words)
            raise BadInputError(f"{path} is damaged: ncu-report could not read it ({how}).", _AGAIN)
        return unpack.parse(out.read_text(encoding="utf-8"))


# --- whether a file is complete: a report is a sequence of blocks, each with a header that has the size of its payload


def _is_whole(content: bytes) -> bool | None:
    """Whether the blocks end where the file ends; None for another container."""
    if not content.startswith(_MAGIC):
        return None
    at = len(_MAGIC)
    try:
        size = struct.unpack_from("<I", content, at)[0]  # of the file's own header
        if content[at + 4 : at + 4 + size] != _LAYOUT:
            return None
        at += 4 + size
        while at < len(content):
            size = struct.unpack_from("<I", content, at)[0]
            header = content[at + 4 : at + 4 + size]
            at += 4 + size + _payload_size(header)
    except (struct.error, IndexError):
        return False
    return bool(at == len(content))


def _payload_size(header: bytes) -> int:
    """Field 5 of the block header, a protocol buffer."""
    at, size = 0, 0
    while at < len(header):
        key, at = _varint(header, at)
        value, at = _varint(header, at)  # a number, or the length of the following bytes
        if key & 7 == 2:
            at += value
        elif key >> 3 == 5:
            size = value
    return size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
