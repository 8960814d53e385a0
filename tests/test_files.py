"""Writing files: what is there is replaced at once, or not at all."""

import os
from pathlib import Path

import pytest

from ssdprof.errors import BadInputError, MissingCapabilityError
from ssdprof.files import append_text, check_writable, locked, read_json, regular, write_text

pytestmark = pytest.mark.usefixtures("in_empty_folder")


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="only Linux has a disk that is always full"
)
def test_a_device_is_written_to_and_not_replaced():
    with pytest.raises(MissingCapabilityError, match="disk is full"):
        write_text(Path("/dev/full"), "text", replace=False)
    assert Path("/dev/full").is_char_device()


def test_a_file_is_overwritten_only_when_told_and_a_link_is_followed():
    file = Path("link.md")
    file.symlink_to("real.md")
    write_text(file, "one", replace=False)
    with pytest.raises(BadInputError, match=r"link\.md exists") as caught:
        write_text(file, "two", replace=False)
    assert "--force" in caught.value.hint
    assert file.read_text() == "one"
    write_text(file, "two")
    assert file.is_symlink()
    assert Path("real.md").read_text() == "two"


def test_a_folder_that_is_not_there_is_named():
    with pytest.raises(BadInputError, match="no folder nowhere"):
        write_text(Path("nowhere/report.md"), "text")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"{", "Expecting"),
        (b"\xff", "not UTF-8"),
        (b"[" * 10**5, "nested too deeply"),
        (b'{"a": {"b": 1, "b": 2}}', "'b' occurs twice"),
        (b"9" * 5000, "limit"),
    ],
)
def test_what_is_not_json(text, why):
    Path("a.json").write_bytes(text)
    with pytest.raises(ValueError, match=why):
        read_json(Path("a.json"))


def test_a_pipe_and_a_large_file_are_not_read():
    os.mkfifo("pipe")
    with pytest.raises(OSError, match="not a regular file"):
        regular(Path("pipe"))
    with Path("large").open("wb") as file:
        file.truncate(3 << 30)
    with pytest.raises(OSError, match="large"):
        read_json(Path("large"))


def test_neither_a_pipe_nor_a_link_of_others_is_written_to():
    os.mkfifo("pipe")
    with pytest.raises(MissingCapabilityError, match="pipe cannot be written"):
        append_text(Path("pipe"), "text")
    Path("folder").mkdir()
    Path("folder/.lock").symlink_to(Path("elsewhere").absolute())
    with (
        pytest.raises(MissingCapabilityError, match="folder cannot be written"),
        locked(Path("folder/.lock"), "", ""),
    ):
        pytest.fail("it was locked")
    assert not Path("elsewhere").exists()


def test_whether_a_folder_can_be_made_is_tried():
    with pytest.raises(MissingCapabilityError, match="/proc/x cannot be written"):
        check_writable(Path("/proc/x"))
    check_writable(Path("new/folder"))
    assert not list(Path().iterdir())


def test_a_long_name_is_no_hindrance():
    write_text(Path("a" * 250), "text")
    assert [file.name for file in Path().iterdir()] == ["a" * 250]
