"""An .ncu-rep file as plain values, by NVIDIA's ncu-report package: no GPU and no ncu needed."""

from __future__ import annotations

import hashlib
import math
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ssdprof.errors import BadInputError, MissingCapabilityError
from ssdprof.stalls.raw import Point, RawKernel, RawReport, Value
from ssdprof.stalls.reasons import canonical

SAMPLED = "smsp__pcsamp_warps_issue_stalled_"  # + a reason; with "_not_issued" after it, a part of the same samples
_MAGIC = b"NVR\0"
_LAYOUT = b"\x08\x07"  # version 7 of the container: the one whose sizes are known here
_TO_BASE = {"s": 1e9, "ms": 1e6, "us": 1e3, "ns": 1.0, "second": 1e9, "msecond": 1e6, "usecond": 1e3, "nsecond": 1.0}


def read(path: Path) -> RawReport:
    """Every launch in a report.

    Raises BadInputError for a file that is missing, no report, truncated or without a launch, and
    MissingCapabilityError if ncu-report is not installed.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror}.", "Name an .ncu-rep file.") from error
    whole = _is_whole(content)
    if whole is False:  # not even shown to ncu-report, which such a file may crash
        raise _unusable(path, content, whole)
    kernels = tuple(_kernels(path))
    if not kernels or not all(kernel.metrics for kernel in kernels):
        raise _unusable(path, content, whole)
    return RawReport(name=path.name, sha256=hashlib.sha256(content).hexdigest(), kernels=kernels, whole=whole)


def _unusable(path: Path, content: bytes, whole: bool | None) -> BadInputError:
    if not content.startswith(_MAGIC) and path.suffix != ".ncu-repz":
        return BadInputError(f"{path} is no ncu report.", "Name a file that 'ncu -o' wrote.")
    if whole is False:
        return BadInputError(f"{path} is truncated: it ends in the middle of a block.", "Copy or record it again.")
    return BadInputError(
        f"{path} holds no profiled kernel (zero ranges).",
        "ncu's filters (-k, --nvtx-include, --launch-skip) matched nothing when it was recorded.",
    )


def _kernels(path: Path) -> Iterator[RawKernel]:
    try:
        import ncu_report
    except ImportError as error:
        raise MissingCapabilityError(
            "The ncu-report package, which reads ncu's files, is not installed.", "pip install ncu-report"
        ) from error
    context = ncu_report.load_report(str(path))
    for i in range(context.num_ranges()):
        profiled = context.range_by_idx(i)
        for j in range(profiled.num_actions()):
            yield _kernel(profiled.action_by_idx(j))


def _kernel(action: Any) -> RawKernel:
    names = [name for name in action.metric_names() if "TriageCompute" not in name]
    metrics: dict[str, Value] = {}
    totals: dict[str, int] = {}
    samples: dict[int, dict[str, int]] = defaultdict(dict)
    for name in names:
        metric = action.metric_by_name(name)
        if name.startswith(SAMPLED) and not name.endswith("_not_issued"):
            reason = canonical(name.removeprefix(SAMPLED))
            totals[reason] = totals.get(reason, 0) + int(metric.value() or 0)
            addresses = metric.correlation_ids()
            for k in range(metric.num_instances()):
                count, at = metric.as_uint64(k), samples[addresses.as_uint64(k)]
                if count:
                    at[reason] = at.get(reason, 0) + count
        value = _value(metric)
        if value is not None:
            metrics[name] = value
    return RawKernel(
        function=action.name(),
        metrics=metrics,
        totals=totals,
        points=tuple(_point(action, address, samples[address]) for address in sorted(samples)),
        sources={name: text for name, text in dict(action.source_files().asdict()).items() if text},
    )


def _value(metric: Any) -> Value | None:
    """In base units; None for a metric that is named but has no number."""
    value = metric.value()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int | float) and metric.name().startswith("gpu__time"):
        return value * _TO_BASE.get(metric.unit(), 1.0)
    return value if isinstance(value, int | float | str) else None


def _point(action: Any, address: int, samples: dict[str, int]) -> Point:
    source = action.source_info(address)
    return Point(
        address=address,
        file=source.file_name() if source else "",
        line=source.line() if source else 0,
        sass=" ".join((action.sass_by_pc(address) or "").split()),
        samples=samples,
    )


# --- whether a file is whole: a report is a row of blocks, each with a header that says how long its payload is


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
        value, at = _varint(header, at)  # a number, or the length of what follows
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
