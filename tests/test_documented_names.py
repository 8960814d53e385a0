"""Every path, command, function, schema and bench that a document names exists."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import pytest
import recorded
from command_line import Answer
from targets import slow
from test_documents import CODE, COMMANDS, DOCUMENTS, ROOT, options_of

from ssdprof.commands.stored import schema

# what ssdprof or a user writes, and what other projects have
ELSEWHERE = {
    "run.json", "recording.json", "stalls.md", "baseline.json", "ssdprof.toml", "FILE.json",
    "cases.N.jsonl", "data/compiled-VERSION.json", "RishiAstra/mamba",
}  # fmt: skip
FOLDERS = ("ssdprof", "docs", "tests", "benchmarks", ".ci", ".github")
SUFFIX = re.compile(r"\w\.(?:py|md|toml|csv|jsonl?|yml|sh)$")
# a row says what ran on a day: its tests have their names of that day
DATED = re.compile(r"^\| 20\d\d-.*$", re.M)
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.M | re.S)


def tracked() -> set[str]:
    """The files and folders of the repository, by every end of their paths."""
    command = ["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    files = [Path(name) for name in listed if (ROOT / name).exists()]
    paths = {path for file in files for path in (file, *file.parents)}
    return {"/".join(path.parts[start:]) for path in paths for start in range(len(path.parts))}


def quoted(file: Path) -> Iterator[str]:
    """What stands between backticks, outside of fenced blocks."""
    text = FENCED.sub("", file.read_text())
    yield from re.findall(r"`([^`\n]+)`", text)


def lost_paths(file: Path, known: set[str]) -> Iterator[str]:
    """Paths between backticks that no file or folder has."""
    dated = " ".join(DATED.findall(file.read_text()))
    for word in (word for words in quoted(file) for word in words.split()):
        path = word.rstrip("/")
        named = ("/" in path and path.split("/")[0] in FOLDERS) or SUFFIX.search(path)
        if not named or not re.fullmatch(r"[\w./-]+", path) or path in known | ELSEWHERE:
            continue
        of_that_day = "/" not in path and f"`{path}`" in dated
        if not of_that_day and not (file.parent / path).resolve().exists():
            yield f"{file.relative_to(ROOT)}: {word}"


def test_every_path_that_is_named_exists():
    """The laboratory log is a record of its days."""
    known = tracked()
    files = [file for file in (*DOCUMENTS, *CODE) if "log" not in file.parts]
    assert [path for file in files for path in lost_paths(file, known)] == []


def test_every_command_in_a_sentence_exists():
    calls = [
        call.split()
        for file in DOCUMENTS
        if file.name != "CHANGELOG.md"
        for words in quoted(file)
        for call in re.findall(r"^ssdprof ([a-z].*)", words)
    ]
    assert len(calls) > 20
    for command, *words in calls:
        assert command in COMMANDS, words
        options = {word.split("=")[0] for word in words if re.match(r"--[a-z]", word)}
        assert options <= options_of(command), (command, words)
        if command == "schemas" and words:
            schema(words[0])


def test_every_name_of_the_package_exists():
    """Functions and classes that documents import or call."""
    for file in DOCUMENTS:
        text = file.read_text()
        code = "\n".join([*FENCED.findall(text), *quoted(file)])
        for module, names in re.findall(r"from (ssdprof[\w.]*) import ([\w, ]+)", code):
            for name in names.split(","):
                resolve_name(f"{module}:{name.strip()}")
        for name in re.findall(r"\bssdprof\.((?!toml\b|yml\b)[a-z]\w*)\(", code):
            assert callable(resolve_name(f"ssdprof:{name}")), (file.name, name)


def test_every_bench_that_is_named_has_results():
    benches = {cell.bench.name for gpu in ("h200", "h100") for cell in recorded.committed(gpu)}
    named = {
        word
        for file in [*(ROOT / "docs").glob("*.md"), recorded.RESULTS / "README.md"]
        for words in quoted(file)
        for word in words.split()
        if re.fullmatch(r"(?:ssd|gdn|kda|published)[-/][a-z0-9.-]+", word)
    }
    assert len(named) > 10
    assert {name for name in named if name not in benches | tracked()} == set()


FOUND = sorted({file.parent for file in recorded.RESULTS.glob("*/report.json")})


@pytest.mark.parametrize("folder", [FOUND[0], *slow(*FOUND[1:])], ids=str)
def test_a_recorded_result_is_exported_as_a_page(folder: Path, tmp_path):
    page = tmp_path / "x.html"
    Answer("export", str(folder), "-o", str(page))
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert os.listdir(tmp_path) == ["x.html"]


def test_every_name_of_the_kernels_in_the_glossary_is_in_the_code():
    text = (ROOT / "docs" / "glossary.md").read_text()
    (section,) = re.findall(r"^## Terms of the fused kernels\n(.*?)^## ", text, re.M | re.S)
    code = " ".join(file.read_text() for file in CODE if "ssdprof" in file.parts)
    names = re.findall(r"`(\w{3,})`", section)
    assert len(names) > 10
    assert [name for name in names if not re.search(rf"\b{name}\b", code)] == []


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_says_which_commands_need_a_gpu(command):
    """Those that end with exit code 3 on a machine without one, and no other."""
    needs = command in ("bench", "prefill", "stalls", "tune")
    said = re.search(r"[Nn]eeds\s+an\s+NVIDIA\s+GPU", COMMANDS[command].help)
    assert bool(said) == needs


@pytest.mark.parametrize(
    ("option", "value"), [("--dtype", "bf16"), ("--dtypes", "exact"), ("--states", "fp32")]
)
def test_an_option_means_the_same_in_every_command(option, value):
    """By the help of all commands, which `test_goldens` compares with this file."""
    shown = (ROOT / "tests" / "goldens" / "options.txt").read_text().splitlines()
    declared = [line for line in shown if line.startswith(f"{option} ")]
    assert len(declared) > 2
    assert all(value in line for line in declared)
    assert not any("--cast" in options_of(command) for command in COMMANDS)
