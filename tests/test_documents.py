"""Links and anchors of documents and of code have targets, commands and options exist, and the
words are plain.
"""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer

import ssdprof
from ssdprof.cli import app

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    file
    for folder in (".", "docs", "benchmarks", "ssdprof")
    for file in (ROOT.glob("*.md") if folder == "." else (ROOT / folder).rglob("*.md"))
)
CODE = sorted(
    {
        file
        for folder in ("ssdprof", "benchmarks", "tests")
        for file in (ROOT / folder).rglob("*.py")
    }
    - {Path(__file__)}
)
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def anchors(file: Path) -> set[str]:
    """The anchors of a Markdown file: those that GitHub derives from headings, and explicit
    ones.
    """
    text = file.read_text()
    found = set(re.findall(r'<a id="([^"]+)">', text))
    for heading in re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M
    ):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return found


def broken(file: Path, target: str) -> bool:
    """Whether `target`, a path relative to `file` with or without an anchor, does not exist."""
    path, _, anchor = target.partition("#")
    there = (file.parent / path).resolve() if path else file
    return not there.exists() or bool(
        anchor and there.suffix == ".md" and anchor not in anchors(there)
    )


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_of_documents_lead_somewhere(file: Path):
    text = re.sub(r"```.*?```|`[^`]*`", "", file.read_text(), flags=re.S)
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    assert [target for target in targets if broken(file, target)] == []


def test_documents_that_code_cites_exist():
    """By their path from the root of the repository, with an anchor or without."""
    lost = [
        f"{file.relative_to(ROOT)}: {cited}"
        for file in CODE
        for cited in re.findall(r"\b(?:docs|benchmarks)/[\w./-]+\.md(?:#[\w-]+)?", file.read_text())
        if broken(ROOT / "README.md", cited)
    ]
    assert lost == []


def test_a_broken_anchor_is_found():
    log = ROOT / "benchmarks" / "log" / "ssd.md"
    assert not broken(log, "#row-57")
    assert broken(log, "#row-999")
    assert not broken(ROOT / "README.md", "docs/measuring.md#cold-cache")
    assert broken(ROOT / "README.md", "docs/measuring.md#warm-cache")
    assert broken(ROOT / "README.md", "docs/nothing.md")


# Phrases that this project does not allow; CONTRIBUTING.md, "Plain words", has the alternatives.
BANNED = re.compile(
    r"""(?:^\ *|[.!?]\ \ ?|\"\"\")Of\ (?!course|floor:)[a-z`]   # a sentence that begins with "Of"
    | \bgoes\ on\ where\b
    | \bnobody\ (?:looks|knows|asks|waits)\b
    | \bis\ missing\ for\ everyone\b
    | \b[Aa]\ mistake\ of\ ssdprof\b
    | \bwhat\ is\ waited\ for\b
    | \bWhat\ Triton\ \S+\ made\ of\b
    | \bpretends?\ to\ be\b
    | \bcan(?:not)?\ be\ had\b
    | \bput\ to\ the\ test\b
    | \bbehind\ each\ other\b
    | \bin\ whatever\b
    | \bhears?\ of\b
    | \bthat\ which\b
    | \bholds?\ no\ more\b
    | \b[Ww]ho\ takes\ part\b
    | \basked\ for\ and\ (?:is|are)\ not\b
    | \b(?:which|all\ that)\ there\ (?:is|are)\b
    | \bwith\ nothing\ in\ (?:it|them)\b
    | :\ right\ first\b
    | \b[Hh]ow\ exact\b
    | \b[Ww]hat\ bec[ao]mes?\ of\b
    | \b[Bb]oth\ operators\b                                   # there are three
    | `?\b(?:SSD|ssd)`?\ (?:or|and)\ `?(?:GDN|gdn)`?(?:\ (?:layer|operator)|:\ the\ scan)
    """,
    re.MULTILINE | re.VERBOSE,
)


def test_the_prose_keeps_to_plain_words():
    # examples of wrong wording; released entries
    exempt = {ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"}
    prose = [
        file
        for file in DOCUMENTS
        if file not in exempt and "log" not in file.parts and "text" not in file.parts
    ]
    code = [file for file in CODE if "tests" not in file.parts and file not in exempt]
    found = [
        f"{file.relative_to(ROOT)}: {match[0]!r}"
        for file in (*prose, *code)
        for match in BANNED.finditer(file.read_text())
    ]
    assert found == []


def options_of(command: str) -> set[str]:
    return {option for parameter in COMMANDS[command].params for option in parameter.opts}


@pytest.mark.parametrize(
    "file", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda one: one.name
)
def test_every_command_line_in_the_documents_exists(file: Path):
    blocks = re.findall(r"^```\w*\n(.*?)^```", file.read_text(), re.MULTILINE | re.DOTALL)
    for line in (line.strip() for block in blocks for line in block.splitlines()):
        for call in re.findall(r"(?:^|&& |\$ |-m )ssdprof ([^-].*?)(?= &&| -- |$)", line):
            command, *words = call.split()
            assert command in COMMANDS, line
            unknown = {
                word.split("=")[0] for word in words if re.match(r"-{1,2}[a-z]", word)
            } - options_of(command)
            assert not unknown, line


def test_the_documents_list_every_command_and_no_other_option():
    listed = re.findall(
        r"^\| `(\w+)` \|", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE
    )
    assert sorted(listed) == sorted(COMMANDS)
    known = {"--install-completion", "--help", "--version"}.union(*map(options_of, COMMANDS))
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (ROOT / "README.md").read_text())) <= known


@pytest.mark.parametrize("mark", ["main", "test", "full"])
def test_ci_finds_the_readme_commands(mark: str):
    """.ci/run reads the fenced block after the mark; there must be exactly one, with one line."""
    found = re.findall(
        rf"^<!-- ci: {mark} -->\n```\n(.+)\n```$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert len(found) == 1


def test_make_help_lists_every_target():
    shown = subprocess.run(
        ["make", "-C", ROOT, "--no-print-directory"], capture_output=True, text=True, check=True
    )
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert {line.split()[0] for line in shown.stdout.splitlines()} == set(phony[1].split())


def test_the_version_is_the_same_everywhere():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(
        r"^## \[(\d[^]]*)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert newest is not None
    assert ssdprof.__version__ == declared == newest[1]
