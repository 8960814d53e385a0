"""Settings files: their allowed contents, which file applies, and how the command line overrides it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import jsonschema
import pytest

from ssdprof.errors import BadInputError
from ssdprof.schema import Gates
from ssdprof.settings import document, find, gates

pytestmark = pytest.mark.usefixtures("in_empty_folder")

WHOLE = """
[gates]
min-speedup = 1.5
min-match = { "1e-3" = 99.0, "0" = 60 }
max-rms-ratio = 1.5

[prefill]
min-speedup = 1.05

[compare]
fail-if = ["slower:3%", "match:-0.1"]
smallest-difference = "2%"
"""


def test_everything_that_a_file_may_hold() -> None:
    Path("ssdprof.toml").write_text(WHOLE)
    settings = find.load()
    assert settings.gates.model_dump() == {
        "min_speedup": 1.5,
        "min_match": {"1e-3": 99.0, "0": 60.0},
        "max_rms_ratio": 1.5,
    }
    assert settings.prefill.min_speedup == 1.05
    assert settings.compare.fail_if == ("slower:3%", "match:-0.1")
    assert settings.compare.smallest_difference == "2%"
    jsonschema.validate(tomllib.loads(WHOLE), json.loads(document.SCHEMA_FILE.read_text()))


def test_the_nearest_file_counts_and_its_own_comes_first() -> None:
    assert find.load() == document.Settings()
    Path("pyproject.toml").write_text("[tool.ssdprof.gates]\nmin-speedup = 1\n")
    assert find.load().gates.min_speedup == 1
    Path("ssdprof.toml").write_text("[gates]\nmin-speedup = 2\n")
    assert find.load().gates.min_speedup == 2
    assert find.load(Path("pyproject.toml")).gates.min_speedup == 1


def test_a_folder_without_settings_takes_those_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("ssdprof.toml").write_text("[gates]\nmin-speedup = 2\n")
    Path("below").mkdir()
    monkeypatch.chdir("below")
    Path("pyproject.toml").write_text("[project]\nname = 'other'\n")
    assert find.load().gates.min_speedup == 2


@pytest.mark.parametrize(
    ("text", "complaint", "hint"),
    [
        ("[gates]\nmin-sped = 2", "unknown key gates.min-sped", "Did you mean min-speedup?"),
        ("[gate]\nmin-speedup = 2", "unknown key gate.", "Did you mean gates?"),
        ("[compare]\nfail-iff = []", "unknown key compare.fail-iff", "Did you mean fail-if?"),
        ("[gates]\nmin_speedup = 2", "unknown key gates.min_speedup", "Did you mean min-speedup?"),
        ("[gates]\nmin-speedup = 'fast'", "gates.min-speedup", "settings-v1.json"),
        ("[gates]\nmin-speedup = -1", "gates.min-speedup", "settings-v1.json"),
        ('[gates]\nmin-match = { "1e-5" = 99 }', "gates.min-match.1e-5", "settings-v1.json"),
        ('[gates]\nmin-match = { "1e-3" = 101 }', "gates.min-match.1e-3", "settings-v1.json"),
        ("[gates", "is not TOML", "--config"),
    ],
)
def test_what_a_file_may_not_hold(text: str, complaint: str, hint: str) -> None:
    Path("ssdprof.toml").write_text(text)
    with pytest.raises(BadInputError) as caught:
        find.load()
    assert complaint in caught.value.message
    assert hint in caught.value.hint
    if "is not TOML" not in complaint:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(tomllib.loads(text), json.loads(document.SCHEMA_FILE.read_text()))


def test_a_file_that_is_named_must_have_settings() -> None:
    Path("pyproject.toml").write_text("[project]\nname = 'other'\n")
    with pytest.raises(BadInputError, match=r"has no \[tool.ssdprof\]"):
        find.load(Path("pyproject.toml"))


def test_the_published_schema_is_the_generated_one() -> None:
    assert document.SCHEMA_FILE.read_text() == document.schema_text(), (
        "write it anew: python -c 'from ssdprof.settings.document import *; SCHEMA_FILE.write_text(schema_text())'"
    )


def test_the_command_line_comes_before_the_file() -> None:
    Path("ssdprof.toml").write_text(WHOLE)
    found = gates.chosen(None, min_speedup=3.0, min_match=["1e-2:99.9%"])
    assert found == Gates(min_speedup=3.0, min_match={"1e-2": 99.9}, max_rms_ratio=1.5)
    assert gates.of_accuracy(Gates(max_rms_ratio=1.0), found) == found.model_copy(update={"max_rms_ratio": 1.0})


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("1e-4:99", "Choose from: 0, 1e-3, 1e-2"),
        ("99", "TOLERANCE:PERCENT"),
        ("1e-3:x", "1e-3:99"),
        ("0:101", "1e-3:99"),
    ],
)
def test_a_match_that_cannot_be_read(word: str, hint: str) -> None:
    with pytest.raises(BadInputError) as caught:
        gates.parse_matches([word])
    assert hint in caught.value.hint
