"""Settings files: their allowed contents, which file applies, and how the command line overrides
it.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from ssdprof import settings
from ssdprof.commands.stored import schema
from ssdprof.core.conditions import of_options
from ssdprof.errors import BadInputError

pytestmark = pytest.mark.usefixtures("in_empty_folder")

SCHEMA = schema("settings-v1")
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
    assert settings.load().model_dump() == {
        "gates": {"min_speedup": 1.5, "min_match": {"1e-3": 99.0, "0": 60.0}, "max_rms_ratio": 1.5},
        "prefill": {"min_speedup": 1.05},
        "compare": {"fail_if": ("slower:3%", "match:-0.1"), "smallest_difference": "2%"},
    }
    jsonschema.validate(tomllib.loads(WHOLE), SCHEMA)


def test_the_nearest_file_with_settings_counts_and_its_own_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert settings.load() == settings.ProjectSettings()
    Path("pyproject.toml").write_text("[tool.ssdprof.gates]\nmin-speedup = 1\n")
    assert settings.load().gates.min_speedup == 1
    Path("ssdprof.toml").write_text("[gates]\nmin-speedup = 2\n")
    assert settings.load().gates.min_speedup == 2
    assert settings.load(Path("pyproject.toml")).gates.min_speedup == 1
    Path("below").mkdir()
    monkeypatch.chdir("below")
    Path("pyproject.toml").write_text("[project]\nname = 'other'\n")
    assert settings.load().gates.min_speedup == 2
    with pytest.raises(BadInputError, match=r"has no \[tool.ssdprof\]"):
        settings.load(Path("pyproject.toml"))


@pytest.mark.parametrize(
    ("text", "complaint", "hint"),
    [
        ("[gates]\nmin-sped = 2", "unknown key gates.min-sped", "Did you mean min-speedup?"),
        ("[gate]\nmin-speedup = 2", "unknown key gate.", "Did you mean gates?"),
        ("[compare]\nfail-iff = []", "unknown key compare.fail-iff", "Did you mean fail-if?"),
        ("[gates]\nmin_speedup = 2", "unknown key gates.min_speedup", "Did you mean min-speedup?"),
        ("[gates]\nmin-speedup = 'fast'", "gates.min-speedup", "settings-v1"),
        ("[gates]\nmin-speedup = -1", "gates.min-speedup", "settings-v1"),
        ('[gates]\nmin-match = { "1e-5" = 99 }', "gates.min-match.1e-5", "settings-v1"),
        ('[gates]\nmin-match = { "1e-3" = 101 }', "gates.min-match.1e-3", "settings-v1"),
        ("[gates]\nmin-speedup = true", "gates.min-speedup", "settings-v1"),
        ("[gates]\nmin-speedup = inf", "gates.min-speedup", "settings-v1"),
        ('[gates]\nmin-match = { "1e-3" = true }', "gates.min-match.1e-3", "settings-v1"),
        ("gates = 3", "gates", "settings-v1"),
        ("[gates", "is not TOML", "--config"),
        ("a = " + "[" * 10_000 + "]" * 10_000, "is not TOML", "--config"),
    ],
)
def test_what_a_file_may_not_hold(text: str, complaint: str, hint: str) -> None:
    Path("ssdprof.toml").write_text(text)
    with pytest.raises(BadInputError) as caught:
        settings.load()
    assert complaint in caught.value.message
    assert hint in caught.value.hint
    if "is not TOML" not in complaint and "inf" not in text:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(tomllib.loads(text), SCHEMA)


@pytest.mark.parametrize("text", ["[tool]\nssdprof = 3", "[[tool.ssdprof]]\ngates = 3", "tool = 3"])
def test_a_table_that_is_none(text: str) -> None:
    Path("pyproject.toml").write_text(text)
    with pytest.raises(BadInputError, match=r"\[tool.ssdprof\] is not a table"):
        settings.load()


@pytest.mark.parametrize(
    "make",
    [
        Path.mkdir,
        lambda file: file.symlink_to("nowhere"),
        os.mkfifo,
        lambda file: file.symlink_to(file),
    ],
    ids=["a folder", "a broken link", "a pipe", "a link to itself"],
)
def test_what_is_no_file_is_not_passed_over(make: Callable[[Path], object]) -> None:
    make(Path("ssdprof.toml"))
    with pytest.raises(BadInputError, match=r"ssdprof\.toml cannot be read"):
        settings.load()


def test_the_command_line_comes_before_the_file() -> None:
    Path("ssdprof.toml").write_text(WHOLE)
    given = of_options(min_speedup=3.0, min_match=["1e-2:99.9%"])
    assert settings.gates(None, given) == (*given, *of_options(max_rms_ratio=1.5))
    elsewhere = settings.gates(None, of_options(["match@1e-2:1%"]))
    assert {"0", "1e-3", "1e-2"} == {one.at for one in elsewhere if one.metric == "match"}
    assert settings.gates(None, (), prefill=True) == of_options(min_speedup=1.05)
