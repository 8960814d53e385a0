"""Reads an .ncu-rep file with NVIDIA's package ncu-report, which needs neither a GPU nor ncu.

    python -m ssdprof.stalls.read FILE OUT         writes the launches in FILE into OUT, as JSON

The package is compiled code.  A damaged file can crash it, and version 2025.3.1 crashes on an
intact file if torch is loaded, too.  It therefore runs in a separate process, and this module
imports neither torch nor anything that imports torch.
"""

import hashlib
import json
import math
import os
import struct
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from pydantic import TypeAdapter

from ssdprof.environment import child
from ssdprof.errors import BadInputError, MissingCapabilityError, how_ended, unreadable

MetricValue = int | float | str
# The start of the metrics of samples, followed by a stall reason.  Metrics that end with
# "_not_issued" count some of the same samples again.
_SAMPLED = "smsp__pcsamp_warps_issue_stalled_"
# name of a stall reason in some versions -> its usual name
CANONICAL = {"gmma": "warpgroup_arrive", "no_instruction": "no_instructions"}
# first letter of the unit of a time -> nanoseconds: s or second, ms or msecond, ...
_TO_NS = {"s": 1e9, "m": 1e6, "u": 1e3, "n": 1.0}
_NOT_INSTALLED = 9  # exit code of the child process if ncu-report is not installed
_MAGIC = b"NVR\0"  # the start of a report
# the file header of version 7 of the layout; of other versions this module does not know how a
# block says its size
_LAYOUT = b"\x08\x07"
_TIMEOUT_S = 600  # far above the time for the largest intact report
_COPY_HINT = "Copy or record it again."


@dataclass(frozen=True)
class Point:
    """An instruction of a kernel, with the warps that were sampled there.

    address: that of the instruction in the GPU's memory.
    file, line: the source line, with the file as the report names it; "" and 0 if the instruction
        has no line information.
    sass: the instruction as text.
    samples: stall reason -> the number of samples, without zeros.
    """

    address: int
    file: str
    line: int
    sass: str
    samples: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class RawKernel:
    """One profiled launch.

    function: the name of the kernel.
    metrics: ncu's name -> value in base units (nanoseconds, bytes, cycles, percent), without those
        whose value is not finite.
    totals: stall reason -> the samples of the whole kernel, as the report itself adds them up;
        empty if they were not collected.
    points: the instructions in the order of their addresses; empty if source counters were not
        collected.
    sources: name of a recorded source file -> its text.
    """

    function: str
    metrics: Mapping[str, MetricValue]
    totals: Mapping[str, int] = field(default_factory=dict)
    points: tuple[Point, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)

    def number(self, *names: str) -> float | None:
        """The value of the first of these metrics that was collected as a number; None if none
        was.
        """
        for name in names:
            value = self.metrics.get(name)
            if isinstance(value, int | float):
                return value
        return None


KERNELS = TypeAdapter(tuple[RawKernel, ...])  # reads the output of `main`


@dataclass(frozen=True, kw_only=True)
class RawReport:
    """The contents of an .ncu-rep file.

    name: of the file, without folders.
    sha256: of the contents.
    whole: whether the file ends where its last block ends; None if that is not known.
    """

    name: str
    sha256: str
    kernels: tuple[RawKernel, ...]
    whole: bool | None = None


def base_name(path: str) -> str:
    """The last part of a path, which may be of any operating system."""
    return PurePosixPath(path.replace("\\", "/")).name


def read(path: Path) -> RawReport:
    """Read a file of ncu with all its launches.

    Raises BadInputError for a file that is missing, not a report, truncated, damaged or without a
    launch, and MissingCapabilityError if ncu-report is not installed or the user may not read the
    file.  A compressed report, .ncu-repz, does not begin with `_MAGIC`.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise unreadable(str(path), error, "Name an .ncu-rep file.") from error
    whole = _is_whole(content)
    kernels = () if whole is False else _kernels(path)
    if kernels and all(kernel.metrics for kernel in kernels):
        return RawReport(
            name=path.name, sha256=hashlib.sha256(content).hexdigest(), kernels=kernels, whole=whole
        )
    if not content.startswith(_MAGIC) and path.suffix != ".ncu-repz":
        raise BadInputError(f"{path} is not an ncu report.", "Name a file that 'ncu -o' wrote.")
    if whole is False:
        raise BadInputError(f"{path} is truncated: it ends in the middle of a block.", _COPY_HINT)
    raise BadInputError(
        f"{path} holds no profiled kernel (zero ranges): nothing was profiled, or the file is "
        "damaged.",
        "Copy it again; or ncu's filters (-k, --nvtx-include, --launch-skip) matched nothing when "
        "it was recorded.",
    )


def _kernels(path: Path) -> tuple[RawKernel, ...]:
    """The launches in a file, which a child process reads.  Raises BadInputError if the child fails
    or does not end within `_TIMEOUT_S`, and MissingCapabilityError if ncu-report is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="ssdprof-") as folder:
        out = Path(folder) / "kernels.json"
        command = [*child.python("ssdprof.stalls.read"), str(path), str(out)]
        environ = os.environ | child.search_path()
        code, output = child.run(command, timeout_s=_TIMEOUT_S, environ=environ)
        if code is None:
            raise BadInputError(f"{path} is damaged: ncu-report did not finish.", _COPY_HINT)
        if code == _NOT_INSTALLED:
            raise MissingCapabilityError(
                "The ncu-report package, which reads ncu's files, is not installed.",
                "pip install ncu-report",
            )
        if code != 0:
            reason = how_ended(code) if code < 0 else output.strip().rpartition("\n")[2]
            raise BadInputError(
                f"{path} is damaged: ncu-report could not read it ({reason}).", _COPY_HINT
            )
        return KERNELS.validate_json(out.read_bytes())


# --- whether a file is complete
#
# A report is `_MAGIC`, a file header, and a sequence of blocks.  A block is a payload after a
# header, which contains the size of the payload.  Headers are protocol buffers, preceded by their
# length as a little-endian integer of 4 bytes.

_LENGTH_DELIMITED = 2  # the wire type of a field of bytes in a protocol buffer
_SIZE_FIELD = 5  # the number of the field with the size of a block's payload


def _is_whole(content: bytes) -> bool | None:
    """Whether the last block ends where the file ends; None if the layout of the file is not
    known.
    """
    if not content.startswith(_MAGIC):
        return None
    try:
        header, offset = _header(content, len(_MAGIC))
        if header != _LAYOUT:
            return None
        while offset < len(content):
            header, offset = _header(content, offset)
            offset += _payload_size(header)
    except (struct.error, IndexError):
        return False
    return offset == len(content)


def _header(content: bytes, offset: int) -> tuple[bytes, int]:
    """The header whose length is at byte `offset`, without that length, and the offset of the byte
    after it.  The header is shorter than its length says if the file ends in it.
    """
    start = offset + 4
    end = start + int(struct.unpack_from("<I", content, offset)[0])
    return content[start:end], end


def _payload_size(header: bytes) -> int:
    """The size in bytes of the payload that follows the header of a block.  The headers of this
    layout have only integers and fields of bytes.
    """
    offset = 0
    size = 0
    while offset < len(header):
        key, offset = _varint(header, offset)
        value, offset = _varint(header, offset)  # a number, or the length of the bytes that follow
        wire_type = key & 7
        if wire_type == _LENGTH_DELIMITED:
            offset += value
        elif key >> 3 == _SIZE_FIELD:
            size = value
    return size


def _varint(content: bytes, offset: int) -> tuple[int, int]:
    """The variable-length integer of a protocol buffer that begins at byte `offset`, and the offset
    of the byte after it.

    Raises IndexError if the content ends in it.  Each byte has seven bits of the number, the lowest
    ones first; its highest bit is set if more bytes follow.
    """
    value = shift = 0
    while True:
        byte = content[offset]
        value |= (byte & 0x7F) << shift
        offset += 1
        shift += 7
        if byte < 0x80:
            return value, offset


# --- the child process


def main() -> None:
    """Write the launches of a file of ncu, the first argument, into a JSON file, the second one.
    Exits with `_NOT_INSTALLED` without ncu-report.
    """
    try:
        import ncu_report
    except ImportError:
        sys.exit(_NOT_INSTALLED)
    file, out = map(Path, sys.argv[1:])
    kernels = [asdict(kernel) for kernel in launches(ncu_report, file)]
    out.write_text(json.dumps(kernels), encoding="utf-8")


def launches(ncu_report: ModuleType, path: Path) -> Iterator[RawKernel]:
    """The launches in a file, in their order.  ncu_report: the module."""
    context = ncu_report.load_report(str(path))
    for range_number in range(context.num_ranges()):
        nvtx_range = context.range_by_idx(range_number)
        for number in range(nvtx_range.num_actions()):
            yield _launch(nvtx_range.action_by_idx(number))


def _launch(action: Any) -> RawKernel:
    """One launch.  action: an object of the module `ncu_report`."""
    metrics: dict[str, MetricValue] = {}
    totals: Counter[str] = Counter()
    samples: dict[int, Counter[str]] = defaultdict(Counter)  # address -> stall reason -> samples
    for name in action.metric_names():
        if "TriageCompute" in name:  # a group of ncu's, from which nothing here is computed
            continue
        metric = action.metric_by_name(name)
        if name.startswith(_SAMPLED) and not name.endswith("_not_issued"):
            reason = name.removeprefix(_SAMPLED)
            reason = CANONICAL.get(reason, reason)
            totals[reason] += int(metric.value() or 0)
            for address, count in _instances(metric):
                at_address = samples[address]  # an instruction without samples is a point, too
                if count:
                    at_address[reason] += count
        if (value := _value(metric)) is not None:
            metrics[name] = value
    return RawKernel(
        function=action.name() or "",  # None in a damaged file
        metrics=metrics,
        totals=dict(totals),
        points=tuple(_point(action, address, samples[address]) for address in sorted(samples)),
        sources={name: text for name, text in dict(action.source_files().asdict()).items() if text},
    )


def _instances(metric: Any) -> Iterator[tuple[int, int]]:
    """(address, count) of a metric for each instruction."""
    addresses = metric.correlation_ids()
    for number in range(metric.num_instances()):
        yield addresses.as_uint64(number), metric.as_uint64(number)


def _value(metric: Any) -> MetricValue | None:
    """The value of a metric in base units, times in nanoseconds; None if it is neither a finite
    number nor a text.
    """
    value = metric.value()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int | float) and metric.name().startswith("gpu__time"):
        return value * _TO_NS.get(metric.unit()[:1], 1.0)
    return value if isinstance(value, int | float | str) else None


def _point(action: Any, address: int, samples: Mapping[str, int]) -> Point:
    """The instruction at an address of a launch.  action: as in `_launch`."""
    source = action.source_info(address)
    return Point(
        address=address,
        file=source.file_name() if source else "",
        line=source.line() if source else 0,
        sass=" ".join((action.sass_by_pc(address) or "").split()),
        samples=dict(samples),
    )


if __name__ == "__main__":
    main()
