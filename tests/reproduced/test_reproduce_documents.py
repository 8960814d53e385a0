"""The words of every published document."""

from __future__ import annotations

from pathlib import Path

import pytest
import reproduce
import small_gdn_cases
import typer
from reproduced.made import document
from reproducing import measuring
from reproducing import published as documents

from ssdprof import cli
from ssdprof.errors import BadInputError


def test_an_unknown_name_has_the_nearest_one() -> None:
    with pytest.raises(BadInputError, match="'fig910' is not a published comparison") as error:
        documents.load("fig910")
    assert error.value.hint.startswith("Did you mean fig9-10?")
    assert "table2" in error.value.hint


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("title = ", "is not TOML"),
        ("title = 'x'", "source"),
        ("title = 'x'\nsource = 'y'\ngpu = 'z'\nclaim = []\nclaims = 1\nrunner = 'a.py'", "claims"),
        ("title = 'x'\nsource = 'y'\ngpu = 'z'\nclaim = []", "either a runner or measurements"),
    ],
)
def test_a_document_that_is_not_in_the_format_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "bad.toml").write_text(text, encoding="utf-8")
    with pytest.raises(BadInputError, match=words):
        documents.load("bad", tmp_path)


def test_a_claim_about_no_value_is_refused() -> None:
    with pytest.raises(ValueError, match="'speed' is none of"):
        document(claim=[{"words": "W", "quoted": "Q", "holds": "speed > 1"}])


@pytest.mark.parametrize("name", documents.known())
def test_every_document_can_be_measured(name: str) -> None:
    """Its commands are understood, its scripts are there."""
    stated = documents.load(name)
    places = {"out": "o.json", "budget": "60", "scratch": "s", "folder": "f"}
    commands = typer.main.get_command(cli.app)
    for measure in stated.measure:
        for command in measure.commands:
            words = measuring.words_of(command, places, None)
            if words[1] == "-m":
                commands.commands[words[3]].make_context(words[3], words[4:])  # type: ignore[attr-defined]
            else:
                assert Path(words[1]).is_file()
    if stated.runner:
        assert (reproduce.HERE / stated.runner).is_file()


def test_the_quoted_cases_of_gdn_are_the_measured_ones() -> None:
    names = [cell.shape.name for cell in small_gdn_cases.cells()]
    for group in documents.load("gdn-004").numbers:
        assert list(group.quoted) == names


def test_quoted_keys_of_table_2_are_values() -> None:
    stated = documents.load("table2")
    made = {f"{one.name}[{one.key}]" for one in stated.value}
    for group in stated.numbers:
        assert {f"{group.value}[{key}]" for key in group.quoted} <= made
