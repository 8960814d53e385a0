"""Settings files: their allowed contents, which file applies, and how the command line overrides
it.
"""

import os
import tomllib
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from cases import gates, rows

from ssdprof import settings
from ssdprof.commands.stored import schema
from ssdprof.errors import BadInputError

pytestmark = pytest.mark.usefixtures("in_empty_folder")

SCHEMA = schema("settings-v1")
WHOLE = """
gates = ["speedup:1.5", "match:99%", "match@0:60%", "rms:1.5"]

[prefill]
gates = ["speedup:1.05"]

[compare]
fail-if = ["time:base+3%", "match:base-0.1"]
smallest-difference = "2%"
"""


def test_everything_that_a_file_may_hold():
    Path("ssdprof.toml").write_text(WHOLE)
    assert settings.load().model_dump() == {
        "gates": ("speedup:1.5", "match:99%", "match@0:60%", "rms:1.5"),
        "prefill": {"gates": ("speedup:1.05",)},
        "compare": {"fail_if": ("time:base+3%", "match:base-0.1"), "smallest_difference": "2%"},
    }
    jsonschema.validate(tomllib.loads(WHOLE), SCHEMA)


def test_the_nearest_file_with_settings_counts_and_its_own_comes_first(monkeypatch):
    assert settings.load() == settings.ProjectSettings()
    Path("pyproject.toml").write_text('[tool.ssdprof]\ngates = ["rms:1"]\n')
    assert settings.load().gates == ("rms:1",)
    Path("ssdprof.toml").write_text('gates = ["rms:2"]\n')
    assert settings.load().gates == ("rms:2",)
    assert settings.load(Path("pyproject.toml")).gates == ("rms:1",)
    Path("below").mkdir()
    monkeypatch.chdir("below")
    Path("pyproject.toml").write_text("[project]\nname = 'other'\n")
    assert settings.load().gates == ("rms:2",)
    with pytest.raises(BadInputError, match=r"has no \[tool.ssdprof\]"):
        settings.load(Path("pyproject.toml"))


@pytest.mark.parametrize(
    ("text", "complaint", "hint"),
    [
        ('gate = ["rms:2"]', "unknown key gate.", "Did you mean gates?"),
        ("[compare]\nfail-iff = []", "unknown key compare.fail-iff", "Did you mean fail-if?"),
        ("[compare]\nfail_if = []", "unknown key compare.fail_if", "Did you mean fail-if?"),
        ("[gates]\nspeedup = 2", "gates is a mapping, not a list.", "settings-v1"),
        ("gates = [3]", "gates.0 is 3, not a text.", "settings-v1"),
        ("prefill = 3", "prefill is 3, not a mapping.", "settings-v1"),
        ("[gates", "is not TOML", "--config"),
        ("a = " + "[" * 10_000 + "]" * 10_000, "is not TOML", "--config"),
    ],
)
def test_what_a_file_may_not_hold(text, complaint, hint):
    Path("ssdprof.toml").write_text(text)
    with pytest.raises(BadInputError) as caught:
        settings.load()
    assert complaint in caught.value.message
    assert hint in caught.value.hint
    if "is not TOML" not in complaint:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(tomllib.loads(text), SCHEMA)


@pytest.mark.parametrize("text", ["[tool]\nssdprof = 3", "[[tool.ssdprof]]\ngates = 3", "tool = 3"])
def test_a_table_that_is_none(text):
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
)
def test_what_is_no_file_is_not_passed_over(make: Callable[[Path], object]):
    make(Path("ssdprof.toml"))
    with pytest.raises(BadInputError, match=r"ssdprof\.toml cannot be read"):
        settings.load()


def test_the_command_line_comes_before_the_file():
    Path("ssdprof.toml").write_text(WHOLE)
    given = gates("speedup:3", "match@1e-2:99.9%", "match@1e-3:98%")
    assert settings.gates(None, given) == (*given, *gates("match@0:60%", "rms:1.5"))
    assert settings.gates(None, (), prefill=True) == gates("speedup:1.05")


# a file => what is wrong in it
TEXTS = """\
gates = ["sped:2"] => gates: The gate 'sped:2' is of an unknown metric
prefill.gates = ["sped:2"] => prefill.gates: The gate 'sped:2' is of an unknown metric
compare.fail-if = ["time:3%"] => compare.fail-if: The change 'time:3%' cannot be read
compare.smallest-difference = "" => compare.smallest-difference: it is not a percentage
"""


@pytest.mark.parametrize(("text", "complaint"), rows(TEXTS))
def test_a_text_of_a_file_that_cannot_be_read_is_refused_with_its_key(text, complaint):
    Path("ssdprof.toml").write_text(text)
    with pytest.raises(BadInputError, match=rf"ssdprof\.toml: {complaint}"):
        settings.load()
