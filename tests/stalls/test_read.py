"""Reading a report with a stand-in for the ncu-report package, and files that are no report with the real one."""

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ssdprof.errors import BadInputError, MissingCapabilityError
from ssdprof.stalls.facts import stalls_of
from ssdprof.stalls.read import KERNELS, RawKernel, launches, read

SOURCE = "@jit\ndef _mine(x):\n    return x\n"
PCSAMP = "smsp__pcsamp_warps_issue_stalled"


def block(payload: bytes) -> bytes:
    """One block of ncu's container: the header's size, the header with the payload's size, the payload."""
    header = b"\x08\x01" + b"\x1a\x02\x08\x07" + b"\x28" + bytes([len(payload)])
    return struct.pack("<I", len(header)) + header + payload


WHOLE = b"NVR\0" + struct.pack("<I", 2) + b"\x08\x07" + block(b"x" * 100) + block(b"y" * 7)


class Metric:
    def __init__(self, name: str, value: Any, unit: str = "", at: dict[int, int] | None = None) -> None:
        self._name, self._value, self._unit, self._at = name, value, unit, at or {}

    def name(self) -> str:
        return self._name

    def value(self) -> Any:
        return self._value

    def unit(self) -> str:
        return self._unit

    def num_instances(self) -> int:
        return len(self._at)

    def correlation_ids(self) -> Any:
        return SimpleNamespace(as_uint64=lambda k: list(self._at)[k])

    def as_uint64(self, k: int) -> int:
        return list(self._at.values())[k]


def launch_of(*metrics: Metric) -> RawKernel:
    """One launch after it was written to the child process's file and read again."""
    (kernel,) = launches(module(*metrics), Path("r.ncu-rep"))
    (read_again,) = KERNELS.validate_json(json.dumps([asdict(kernel)]))
    assert read_again == kernel
    return kernel


def module(*metrics: Metric) -> Any:
    """ncu_report with one launch."""
    by_name = {metric.name(): metric for metric in metrics}
    action = SimpleNamespace(
        name=lambda: "_mine",
        metric_names=lambda: tuple(by_name),
        metric_by_name=by_name.get,
        source_files=lambda: SimpleNamespace(asdict=lambda: {"/a/k.py": SOURCE, "/b": ""}),
        source_info=lambda at: SimpleNamespace(file_name=lambda: "/a/k.py", line=lambda: 3) if at == 0x20 else None,
        sass_by_pc=lambda at: f"  LDG   R{at}",
    )
    profiled = SimpleNamespace(num_actions=lambda: 1, action_by_idx=lambda _: action)
    context = SimpleNamespace(num_ranges=lambda: 1, range_by_idx=lambda _: profiled)
    return SimpleNamespace(load_report=lambda _: context)


# ncu_report for a child process: one launch
ONE_LAUNCH = """
from types import SimpleNamespace as N
def load_report(path):
    metric = N(name=lambda: "gpu__time_duration.sum", value=lambda: 7.0, unit=lambda: "ns")
    action = N(
        name=lambda: "_mine", metric_names=lambda: NAMES, metric_by_name=lambda _: metric,
        source_files=lambda: N(asdict=dict),
    )
    return N(num_ranges=lambda: 1, range_by_idx=lambda _: N(num_actions=lambda: 1, action_by_idx=lambda _: action))
NAMES = ("gpu__time_duration.sum",)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces ncu_report by a module, for child processes."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def put(source: str) -> None:
        (folder / "ncu_report.py").write_text(source)

    return put


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "r.ncu-rep"
    path.write_bytes(WHOLE)
    return path


def test_a_launch_becomes_plain_values() -> None:
    kernel = launch_of(
        Metric(f"{PCSAMP}_gmma", 3, at={0x20: 3, 0x10: 0}), Metric(f"{PCSAMP}_wait", 5, at={0x10: 4, 0x20: 1}),
        Metric(f"{PCSAMP}_wait_not_issued", 2, at={0x10: 2}), Metric("smsp__pcsamp_sample_count", 8),
        Metric("gpu__time_duration.sum", 1.5, "us"), Metric("lts__t_sector_hit_rate.pct", float("nan"), "%"),
        Metric("dram__bytes_read.sum", None),
    )  # fmt: skip
    assert kernel.totals == {"warpgroup_arrive": 3, "wait": 5}
    assert [(point.address, point.line, point.sass, dict(point.samples)) for point in kernel.points] == [
        (0x10, 0, "LDG R16", {"wait": 4}),
        (0x20, 3, "LDG R32", {"warpgroup_arrive": 3, "wait": 1}),
    ]
    assert kernel.metrics["gpu__time_duration.sum"] == 1500.0  # ns
    assert list(kernel.sources) == ["/a/k.py"]
    found = stalls_of(kernel)
    assert {status for status, _ in found.checks.values()} <= {"ok", "not checked"}
    assert {"l2_hit_pct", "dram_read_bytes"} <= set(found.not_collected)


def test_a_launch_without_source_counters_has_no_stages() -> None:
    found = stalls_of(launch_of(Metric("gpu__time_duration.sum", 7.0, "ns")))
    assert found.duration_us == 0.007
    assert (found.sample_count, found.stages, found.lines) == (None, {}, ())
    assert {"stall reasons", "source lines"} <= set(found.not_collected)
    assert {status for status, _ in found.checks.values()} == {"not checked"}


# --- files, read in a child process

LOADS, DAMAGED = "def load_report(path): ", r"r\.ncu-rep is damaged: ncu-report could not read it "


def test_a_report_is_read_in_a_process_of_its_own(file: Path, package: Callable[[str], None]) -> None:
    """Without torch, beside which the package crashes."""
    package("import sys\nassert 'torch' not in sys.modules\n" + ONE_LAUNCH + "print('words of its own')\n")
    report = read(file)
    assert (report.name, report.whole, report.sha256) == ("r.ncu-rep", True, hashlib.sha256(WHOLE).hexdigest())
    assert [(kernel.function, kernel.metrics) for kernel in report.kernels] == [
        ("_mine", {"gpu__time_duration.sum": 7})
    ]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (ONE_LAUNCH + "NAMES = ()\n", "no profiled kernel"),
        (LOADS + "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", DAMAGED + r"\(SIGSEGV\)"),
        (LOADS + "raise RuntimeError('bad block')", DAMAGED + r"\(RuntimeError: bad block\)"),
        (LOADS + "import time; time.sleep(60)", "did not finish"),
    ],
)
def test_a_file_that_breaks_the_package_is_refused(
    file: Path, package: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, source: str, words: str
) -> None:
    package(source)
    monkeypatch.setattr("ssdprof.stalls.read._TIMEOUT_S", 5)
    with pytest.raises(BadInputError, match=words) as raised:
        read(file)
    assert "again" in raised.value.hint


@pytest.mark.parametrize("content", [WHOLE[:-1], WHOLE[:40], WHOLE + b"\0"])
def test_a_file_of_the_wrong_length_is_truncated(file: Path, package: Callable[[str], None], content: bytes) -> None:
    package(ONE_LAUNCH)
    file.write_bytes(content)
    with pytest.raises(BadInputError, match="is truncated"):
        read(file)


@pytest.mark.parametrize(
    ("name", "content"),
    [("r.ncu-repz", b"\x28\xb5\x2f\xfd"), ("r.ncu-rep", WHOLE.replace(b"\x08\x07", b"\x08\x09", 1) + b"more")],
)
def test_a_compressed_report_or_one_of_another_layout_does_not_say_whether_it_is_whole(
    tmp_path: Path, package: Callable[[str], None], name: str, content: bytes
) -> None:
    package(ONE_LAUNCH)
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path / name).whole is None


def test_the_real_package_finds_nothing_in_a_report_without_launches(file: Path) -> None:
    file.write_bytes(WHOLE[:10])
    with pytest.raises(BadInputError, match="zero ranges"):
        read(file)


def test_without_the_package_it_says_so(file: Path, package: Callable[[str], None]) -> None:
    package("raise ImportError\n")
    with pytest.raises(MissingCapabilityError, match="not installed") as raised:
        read(file)
    assert raised.value.hint == "pip install ncu-report"
