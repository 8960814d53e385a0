"""Rules of the repository: allowed imports, a fast command line, and correct documents."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import typer

import ssdprof
from ssdprof import operators
from ssdprof.cli import app

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ssdprof"

MEASURING = {"errors", "schema", "quantities", "progress", "capture", "environment", "operators", "kernels", "measure"}
STAGES = MEASURING | {"checkpoint", "stalls", "runs", "files"}
# The parts of ssdprof that each part may import, in addition to itself, in the order of the data.
MAY_IMPORT = {
    "errors": set(),
    "schema": set(),
    "quantities": set(),
    "progress": set(),
    "files": {"errors"},
    "kernels": set(),
    "operators": {"errors", "schema", "kernels"},
    "checkpoint": {"errors", "schema", "quantities", "progress"},
    "capture": {"errors", "schema", "quantities", "progress", "files", "operators", "kernels", "environment"},
    "environment": {"errors", "schema", "quantities", "kernels"},
    "measure": {"errors", "schema", "operators", "kernels", "environment"},
    "stalls": MEASURING | {"tuning"},
    "bench": MEASURING | {"report", "files"},
    "tuning": MEASURING | {"report", "bench", "runs", "files"},
    "report": {"errors", "schema", "quantities"},
    "runs": {"errors", "schema", "progress", "files", "environment"},
    "pipeline": STAGES | {"report"},
    "settings": {"errors", "schema"},
    "compare": {"errors", "schema", "runs", "report", "bench", "pipeline"},
    "commands": STAGES | {"report", "bench", "tuning", "pipeline", "settings", "compare"},
}
SOURCES = sorted(PACKAGE.rglob("*.py"))


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path) -> set[str]:
    """Modules of ssdprof that a file imports, at any place in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            assert node.module is not None
            found.update(
                name if is_module(name := f"{node.module}.{alias.name}") else node.module for alias in node.names
            )
    return {name for name in found if name.split(".")[0] == "ssdprof"}


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def part(module: str) -> str:
    return [*module.split("."), ""][1]


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_a_part_imports_only_what_it_may(name: str) -> None:
    files = [file for file in SOURCES if part(module_name(file)) == name]
    assert files, f"ssdprof/{name} is gone; take it out of MAY_IMPORT"
    for file in files:
        outside = {part(module) for module in imports(file)} - {name, ""}
        assert outside <= MAY_IMPORT[name], f"{file.relative_to(ROOT)} imports {outside - MAY_IMPORT[name]}"


def test_only_its_own_rooms_know_an_operator() -> None:
    """`kernels/__init__.py` exports functions for users who need only a kernel; nothing else names an operator."""
    facade = PACKAGE / "kernels" / "__init__.py"
    for operator in operators.names():
        own = (f"ssdprof.kernels.{operator}", f"ssdprof.operators.{operator}")
        for file in SOURCES:
            name = module_name(file)
            if file == facade or any(f"{name}.".startswith(f"{room}.") for room in own):
                continue
            foreign = {module for module in imports(file) if any(f"{module}.".startswith(f"{room}.") for room in own)}
            assert not foreign, f"{file.relative_to(ROOT)} imports {foreign}"


def test_no_stage_asks_for_an_operator_by_name() -> None:
    """No comparison with an operator's name outside of `operators` and `kernels`."""
    names = set(operators.names())
    for file in SOURCES:
        if part(module_name(file)) in ("operators", "kernels"):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare | ast.Match):
                compared = {leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
                assert not compared & names, f"{file.relative_to(ROOT)}:{node.lineno} compares with an operator's name"


def test_every_part_has_a_rule() -> None:
    top = {"", "__main__", "cli"}
    assert {part(module_name(file)) for file in SOURCES} - top == set(MAY_IMPORT)


def test_no_kernel_imports_its_reference_or_the_reverse() -> None:
    for reference in (PACKAGE / "kernels").rglob("reference.py"):
        family = module_name(reference.parent / "__init__.py")
        for file in reference.parent.rglob("*.py"):
            if file == reference:
                kernels = {name for name in imports(file) if name.startswith(f"{family}.") and has_kernel(name)}
                assert not kernels, f"{file.relative_to(ROOT)} imports {kernels}"
            elif file.name != "__init__.py":
                assert f"{family}.reference" not in imports(file), file.relative_to(ROOT)


def has_kernel(module: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    return any("@triton.jit" in file.read_text(encoding="utf-8") for file in files)


def test_no_environment_variable_reaches_a_kernel() -> None:
    """Only device.py reads one, Triton's variable that selects the interpreter."""
    for file in (PACKAGE / "kernels").rglob("*.py"):
        if file.name != "device.py":
            assert "environ" not in file.read_text(encoding="utf-8"), file.relative_to(ROOT)


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, ssdprof, ssdprof.cli, ssdprof.kernels, ssdprof.operators\n"
        "ssdprof.operators.outlines()\n"
        "print(*{'torch', 'triton', 'transformers', 'huggingface_hub', 'numpy', 'pydantic'} & sys.modules.keys())"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == []


def test_help_answers_at_once() -> None:
    """Measured by processor time, which does not change on a busy machine."""

    def seconds() -> float:
        before = os.times()
        subprocess.run([sys.executable, "-m", "ssdprof", "--help"], capture_output=True, check=True)
        after = os.times()
        return after.children_user - before.children_user + after.children_system - before.children_system

    assert min(seconds() for _ in range(3)) < 0.5


@pytest.mark.parametrize("module", ["ssdprof.kernels"])
def test_every_exported_name_exists(module: str) -> None:
    loaded = import_module(module)
    assert loaded.__all__
    for name in loaded.__all__:
        assert getattr(loaded, name) is not None
    with pytest.raises(AttributeError):
        loaded.nothing_of_this_name  # noqa: B018


def test_the_version_is_the_same_everywhere() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## \[(\d[^]]*)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert ssdprof.__version__ == declared == newest[1]


COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def options_of(command: str) -> set[str]:
    return {option for parameter in COMMANDS[command].params for option in parameter.opts}


def fenced_lines(file: Path) -> list[str]:
    blocks = re.findall(r"^```\w*\n(.*?)^```", file.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line.strip() for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize(
    "file", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda file: file.name
)
def test_every_command_line_in_the_documents_exists(file: Path) -> None:
    for line in fenced_lines(file):
        for call in re.findall(r"(?:^|&& |\$ |-m )ssdprof (.+?)(?= &&|$)", line):
            words = call.split()
            if words[0].startswith("-"):
                continue
            assert words[0] in COMMANDS, line
            unknown = {word.split("=")[0] for word in words if re.match(r"-{1,2}[a-z]", word)} - options_of(words[0])
            assert not unknown, line


def test_the_list_of_commands_is_whole() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)


def test_every_option_in_the_readme_exists() -> None:
    known = {"--install-completion", "--help", "--version"}.union(*(options_of(command) for command in COMMANDS))
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (ROOT / "README.md").read_text()))
    assert mentioned <= known


@pytest.mark.parametrize("mark", ["main", "test", "full"])
def test_ci_finds_the_readme_commands(mark: str) -> None:
    """.ci/run reads the fenced block after the mark; there must be exactly one, with one line."""
    found = re.findall(rf"^<!-- ci: {mark} -->\n```\n(.+)\n```$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(found) == 1


def test_make_help_lists_every_target() -> None:
    shown = subprocess.run(
        ["make", "-C", str(ROOT), "--no-print-directory"], capture_output=True, text=True, check=True
    )
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert {line.split()[0] for line in shown.stdout.splitlines()} == set(phony[1].split())
