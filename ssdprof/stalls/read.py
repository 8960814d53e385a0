"""An .ncu-rep file as plain values, by NVIDIA's ncu-report package: no GPU and no ncu needed.

    python -m ssdprof.stalls.read FILE OUT         OUT gets the launches, as JSON

The package is compiled code: a damaged file can crash it, and an intact file crashes it if torch is
loaded too (with 2025.3.1).  So it runs in a process of its own, and this module imports neither
torch nor anything that does.
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
from ssdprof.errors import BadInputError, MissingCapabilityError, how_ended

MetricValue = int | float | str
# + a reason; with "_not_issued" after it, a part of the same samples
_SAMPLED = "smsp__pcsamp_warps_issue_stalled_"
# other names of stall reasons
CANONICAL = {"gmma": "warpgroup_arrive", "no_instruction": "no_instructions"}
_TO_NS = {
    "s": 1e9,
    "ms": 1e6,
    "us": 1e3,
    "ns": 1.0,
    "second": 1e9,
    "msecond": 1e6,
    "usecond": 1e3,
    "nsecond": 1.0,
}
_NOT_INSTALLED = 9  # exit code
_MAGIC = b"NVR\0"
_LAYOUT = b"\x08\x07"  # version 7 of the container: the one whose sizes are known here
_TIMEOUT_S = 600  # far above the time for the largest intact report
_AGAIN = "Copy or record it again."


@dataclass(frozen=True)
class Point:
    """An instruction with the warps that were sampled there.

    file: as the report names it; "" and line 0 if it has no line information.  samples: by stall
    reason.
    """

    address: int
    file: str
    line: int
    sass: str
    samples: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class RawKernel:
    """One profiled launch.

    metrics: by ncu's name, in base units (nanoseconds, bytes, cycles, percent)
    totals: samples by stall reason over the whole kernel, as the report itself adds them up; empty
    if not collected
    points: in order of address; empty if source counters were not collected
    sources: file name -> text, as recorded
    """

    function: str
    metrics: Mapping[str, MetricValue]
    totals: Mapping[str, int] = field(default_factory=dict)
    points: tuple[Point, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)

    def number(self, *names: str) -> float | None:
        """The value of the first of these metrics that was collected."""
        values = (self.metrics.get(name) for name in names)
        return next((value for value in values if isinstance(value, int | float)), None)


KERNELS = TypeAdapter(tuple[RawKernel, ...])  # reads the output of `main`


@dataclass(frozen=True, kw_only=True)
class RawReport:
    """A file.  name: without folders.  whole: whether its length agrees with its headers; None:
    unknown.
    """

    name: str
    sha256: str
    kernels: tuple[RawKernel, ...]
    whole: bool | None = None


def base_name(path: str) -> str:
    """The last part of a path of any operating system."""
    return PurePosixPath(path.replace("\\", "/")).name


def read(path: Path) -> RawReport:
    """Every launch in a report.

    Raises BadInputError for a file that is missing, not a report, truncated, damaged or without a
    launch, and MissingCapabilityError if ncu-report is not installed.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadInputError(
            f"{path} cannot be read: {error.strerror}.", "Name an .ncu-rep file."
        ) from error
    whole = _is_whole(content)
    kernels = () if whole is False else _kernels(path)
    if kernels and all(kernel.metrics for kernel in kernels):
        return RawReport(
            name=path.name, sha256=hashlib.sha256(content).hexdigest(), kernels=kernels, whole=whole
        )
    if not content.startswith(_MAGIC) and path.suffix != ".ncu-repz":
        raise BadInputError(f"{path} is not an ncu report.", "Name a file that 'ncu -o' wrote.")
    if whole is False:
        raise BadInputError(f"{path} is truncated: it ends in the middle of a block.", _AGAIN)
    raise BadInputError(
        f"{path} holds no profiled kernel (zero ranges): nothing was profiled, or the file is "
        "damaged.",
        "Copy it again; or ncu's filters (-k, --nvtx-include, --launch-skip) matched nothing when "
        "it was recorded.",
    )


def _kernels(path: Path) -> tuple[RawKernel, ...]:
    """Every launch in a report, read by a child process."""
    with tempfile.TemporaryDirectory(prefix="ssdprof-") as folder:
        out = Path(folder) / "kernels.json"
        command = [*child.python("ssdprof.stalls.read"), str(path), str(out)]
        environ = os.environ | child.search_path()
        code, output = child.run(command, timeout_s=_TIMEOUT_S, environ=environ)
        if code is None:
            raise BadInputError(f"{path} is damaged: ncu-report did not finish.", _AGAIN)
        if code == _NOT_INSTALLED:
            raise MissingCapabilityError(
                "The ncu-report package, which reads ncu's files, is not installed.",
                "pip install ncu-report",
            )
        if code != 0:
            how = how_ended(code) if code < 0 else "".join(output.strip().splitlines()[-1:])
            raise BadInputError(f"{path} is damaged: ncu-report could not read it ({how}).", _AGAIN)
        return KERNELS.validate_json(out.read_bytes())


# --- whether a file is complete: a report is a sequence of blocks, each with a header that has the
#   size of its payload


def _is_whole(content: bytes) -> bool | None:
    """Whether the blocks end where the file ends; None for another container."""
    if not content.startswith(_MAGIC):
        return None
    try:
        header, at = _header(content, len(_MAGIC))
        if header != _LAYOUT:
            return None
        while at < len(content):
            header, at = _header(content, at)
            at += _payload_size(header)
    except (struct.error, IndexError):
        return False
    return at == len(content)


def _header(content: bytes, at: int) -> tuple[bytes, int]:
    """A header and where it ends."""
    end = at + 4 + int(struct.unpack_from("<I", content, at)[0])
    return content[at + 4 : end], end


def _payload_size(header: bytes) -> int:
    """Field 5 of the block header, a protocol buffer."""
    at = 0
    size = 0
    while at < len(header):
        key, at = _varint(header, at)
        value, at = _varint(header, at)  # a number, or the length of the following bytes
        if key & 7 == 2:
            at += value
        elif key >> 3 == 5:
            size = value
    return size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """A number of a protocol buffer, which begins at byte `at`, and where the next field begins."""
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 0x7F) << shift
        at += 1
        shift += 7
        if byte < 0x80:
            return value, at


# --- the child process


def main() -> None:
    """Write the launches of a file as JSON.  The arguments are the file of ncu and the JSON
    file.
    """
    try:
        import ncu_report
    except ImportError:
        sys.exit(_NOT_INSTALLED)
    file, out = map(Path, sys.argv[1:])
    out.write_text(
        json.dumps([asdict(kernel) for kernel in launches(ncu_report, file)]), encoding="utf-8"
    )


def launches(ncu_report: ModuleType, path: Path) -> Iterator[RawKernel]:
    """Every launch in the file, by the module `ncu_report`."""
    context = ncu_report.load_report(str(path))
    for i in range(context.num_ranges()):
        profiled = context.range_by_idx(i)
        for j in range(profiled.num_actions()):
            yield _launch(profiled.action_by_idx(j))


def _launch(action: Any) -> RawKernel:
    """One profiled launch of the module `ncu_report`."""
    metrics: dict[str, MetricValue] = {}
    totals: Counter[str] = Counter()
    samples: dict[int, Counter[str]] = defaultdict(Counter)
    for name in action.metric_names():
        if "TriageCompute" in name:
            continue
        metric = action.metric_by_name(name)
        if name.startswith(_SAMPLED) and not name.endswith("_not_issued"):
            reason = name.removeprefix(_SAMPLED)
            reason = CANONICAL.get(reason, reason)
            totals[reason] += int(metric.value() or 0)
            for address, count in _instances(metric):
                at_address = samples[address]  # the point exists even without samples
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
    """The address of each instruction, and the metric's count there."""
    addresses = metric.correlation_ids()
    for number in range(metric.num_instances()):
        yield addresses.as_uint64(number), metric.as_uint64(number)


def _value(metric: Any) -> MetricValue | None:
    """A metric's value in base units; None if it has no number."""
    value = metric.value()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int | float) and metric.name().startswith("gpu__time"):
        return value * _TO_NS.get(metric.unit(), 1.0)
    return value if isinstance(value, int | float | str) else None


def _point(action: Any, address: int, samples: Mapping[str, int]) -> Point:
    source = action.source_info(address)
    sass = " ".join((action.sass_by_pc(address) or "").split())
    return Point(
        address,
        source.file_name() if source else "",
        source.line() if source else 0,
        sass,
        dict(samples),
    )


if __name__ == "__main__":
    main()
