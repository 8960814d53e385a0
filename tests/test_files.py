"""Writing files: what is there is replaced at once, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from ssdprof.errors import BadInputError, MissingCapabilityError
from ssdprof.files import write_text

pytestmark = pytest.mark.usefixtures("in_empty_folder")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
def test_a_device_is_written_to_and_not_replaced() -> None:
    with pytest.raises(MissingCapabilityError, match="disk is full"):
        write_text(Path("/dev/full"), "text", replace=False)
    assert Path("/dev/full").is_char_device()


def test_a_file_is_overwritten_only_when_told() -> None:
    file = Path("report.md")
    write_text(file, "one", replace=False)
    with pytest.raises(BadInputError, match=r"report\.md exists") as caught:
        write_text(file, "two", replace=False)
    assert "--force" in caught.value.hint
    assert file.read_text() == "one"
    write_text(file, "two")
    assert file.read_text() == "two"


def test_a_link_is_followed() -> None:
    Path("real.md").write_text("one")
    Path("link.md").symlink_to("real.md")
    write_text(Path("link.md"), "two")
    assert Path("link.md").is_symlink()
    assert Path("real.md").read_text() == "two"


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(BadInputError, match="no folder nowhere"):
        write_text(Path("nowhere/report.md"), "text")
