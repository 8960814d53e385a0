"""Reading a report with a stand-in for the ncu-report package, and files that are no report with
the real one.
"""

import hashlib
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from ssdprof.errors import BadInputError, MissingCapabilityError
from ssdprof.stalls.read import read

Package = Callable[[str], None]  # the fixture `package`


def block(payload: bytes) -> bytes:
    """One block of ncu's container: the header's size, the header with the payload's size, the
    payload.
    """
    header = b"\x08\x01" + b"\x1a\x02\x08\x07" + b"\x28" + bytes([len(payload)])
    return struct.pack("<I", len(header)) + header + payload


WHOLE = b"NVR\0" + struct.pack("<I", 2) + b"\x08\x07" + block(b"x" * 100) + block(b"y" * 7)


# ncu_report for a child process: one launch
ONE_LAUNCH = """
from types import SimpleNamespace as N
def metric(name):
    return N(name=lambda: name, value=lambda: METRICS[name], unit=lambda: "us")
def load_report(path):
    action = N(
        name=lambda: "_mine", metric_names=lambda: METRICS, metric_by_name=metric,
        source_files=lambda: N(asdict=lambda: {"/a/k.py": "text", "/b": ""}),
    )
    range = N(num_actions=lambda: 1, action_by_idx=lambda _: action)
    return N(num_ranges=lambda: 1, range_by_idx=lambda _: range)
METRICS = {
    "gpu__time_duration.sum": 1.5, "lts__t_sector_hit_rate.pct": float("nan"),
    "dram__bytes_read.sum": None,
}
"""


@pytest.fixture
def package(tmp_path, monkeypatch) -> Package:
    """Replaces ncu_report by a module, for child processes."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def put(source: str):
        (folder / "ncu_report.py").write_text(source)

    return put


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "r.ncu-rep"
    path.write_bytes(WHOLE)
    return path


# --- files, read in a child process

LOADS = "def load_report(path): "
DAMAGED = r"r\.ncu-rep is damaged: ncu-report could not read it "


def test_a_report_is_read_in_a_process_of_its_own(file: Path, package: Package):
    """Without torch, beside which the package crashes."""
    package(
        "import sys\nassert 'torch' not in sys.modules\n"
        + ONE_LAUNCH
        + "print('words of its own')\n"
    )
    report = read(file)
    assert (report.name, report.whole, report.sha256) == (
        "r.ncu-rep",
        True,
        hashlib.sha256(WHOLE).hexdigest(),
    )
    (kernel,) = report.kernels
    assert (kernel.function, kernel.metrics) == ("_mine", {"gpu__time_duration.sum": 1500}), (
        "ns, and what is finite"
    )
    assert kernel.sources == {"/a/k.py": "text"}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (ONE_LAUNCH + "METRICS = {}\n", "no profiled kernel"),
        (LOADS + "import ctypes; ctypes.string_at(0)", DAMAGED + r"\(SIGSEGV\)"),
        (LOADS + "raise RuntimeError('bad block')", DAMAGED + r"\(RuntimeError: bad block\)"),
        (LOADS + "import time; time.sleep(600)", "did not finish"),
    ],
)
def test_a_file_that_breaks_the_package_is_refused(
    file: Path, package: Package, monkeypatch, source, words
):
    package(source)
    if "sleep" in source:
        monkeypatch.setattr("ssdprof.stalls.read._TIMEOUT_S", 0.5)
    with pytest.raises(BadInputError, match=words) as raised:
        read(file)
    assert "again" in raised.value.hint


@pytest.mark.parametrize("content", [WHOLE[:-1], WHOLE[:40], WHOLE + b"\0"])
def test_a_file_of_the_wrong_length_is_truncated(file: Path, package: Package, content):
    package(ONE_LAUNCH)
    file.write_bytes(content)
    with pytest.raises(BadInputError, match="is truncated"):
        read(file)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("r.ncu-repz", b"\x28\xb5\x2f\xfd"),
        ("r.ncu-rep", WHOLE.replace(b"\x08\x07", b"\x08\x09", 1) + b"more"),
    ],
)
def test_a_compressed_report_or_one_of_another_layout_does_not_say_whether_it_is_whole(
    tmp_path, package: Package, name, content
):
    package(ONE_LAUNCH)
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path / name).whole is None


def test_the_real_package_finds_nothing_in_a_report_without_launches(file: Path):
    file.write_bytes(WHOLE[:10])
    with pytest.raises(BadInputError, match="zero ranges"):
        read(file)


def test_without_the_package_it_says_so(file: Path, package: Package):
    package("raise ImportError\n")
    with pytest.raises(MissingCapabilityError, match="not installed") as raised:
        read(file)
    assert raised.value.hint == "pip install ncu-report"
