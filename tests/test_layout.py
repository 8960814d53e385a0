"""Rules of the repository: allowed imports, and a fast command line."""

import ast
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from ssdprof import operators

ROOT = Path(__file__).parent.parent
# A part of ssdprof may import the parts below its row, and BASE; parts of one row do not know each
# other.
ROWS = (
    "cli",
    "commands pytest_plugin",
    "api",
    "jobs",
    "stalls report",
    "capture measure store settings",
    "checkpoint",
    "environment operators",
    "kernels",
)
RANK = {name: rank for rank, row in enumerate(ROWS) for name in row.split()}
BASE = {"core", "progress", "files", "errors"}  # they import nothing else
# instead of what the rows allow
ONLY = {"report": BASE, "kernels": set(), **dict.fromkeys(BASE, BASE)}
TREES = {
    file: ast.parse(file.read_text(encoding="utf-8"))
    for file in sorted((ROOT / "ssdprof").rglob("*.py"))
}
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for file in TREES
}


def imports(file: Path) -> set[str]:
    """Modules of ssdprof that a file imports, at any place in it."""
    nodes = list(ast.walk(TREES[file]))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{file}: a relative import"  # noqa: PT018
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else node.module for name in names}
    return {name for name in found if name.split(".")[0] == "ssdprof"}


def part(module: str) -> str:
    return [*module.split("."), ""][1]


IMPORTS = {file: imports(file) for file in TREES}


def allowed(name: str) -> set[str]:
    below = {other for other, rank in RANK.items() if rank > RANK.get(name, 0)}
    return ONLY.get(name, below | BASE) | {name, ""}


@pytest.mark.parametrize("name", [*RANK, *sorted(BASE)])
def test_a_part_imports_only_what_it_may(name: str) -> None:
    for file in (file for module, file in MODULES.items() if part(module) == name):
        outside = {part(module) for module in IMPORTS[file]} - allowed(name)
        assert not outside, f"{file.relative_to(ROOT)} imports {outside}"


def test_every_part_has_a_row() -> None:
    assert {part(module) for module in MODULES} - {"", "__main__"} <= {*RANK, *BASE}


def within(module: str, rooms: tuple[str, ...]) -> bool:
    return any(f"{module}.".startswith(f"{room}.") for room in rooms)


# an operator of the same family, whose kernels and whose part of a record it shares
BUILDS_ON = {"kda": "gdn"}
PARTS = ("", "_histories", "_inputs", "_oracle", "_tuning")  # of a record, a file each


def test_only_its_own_rooms_know_an_operator() -> None:
    """The registries have a line for each; nothing else imports or compares with one by name."""
    for operator, (name, file) in product(operators.names(), MODULES.items()):
        beside = (f"ssdprof.operators.{operator}{suffix}" for suffix in PARTS)
        own = (f"ssdprof.kernels.{operator}", *beside)
        heirs = [
            f"ssdprof.{place}"
            for one in BUILDS_ON
            for place in (f"kernels.{one}", *(f"operators.{one}{suffix}" for suffix in PARTS))
            if BUILDS_ON[one] == operator
        ]
        if name not in ("ssdprof.kernels", "ssdprof.operators") and not within(
            name, (*own, *heirs)
        ):
            foreign = {module for module in IMPORTS[file] if within(module, own)}
            assert not foreign, f"{file.relative_to(ROOT)} imports {foreign}"
        for node in ast.walk(TREES[file]) if part(name) not in ("operators", "kernels") else ():
            if isinstance(node, ast.Compare | ast.Match):
                compared = {leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
                assert operator not in compared, (
                    f"{file.relative_to(ROOT)}:{node.lineno} compares with {operator}"
                )


def test_no_kernel_imports_its_reference_or_the_reverse() -> None:
    for name, file in MODULES.items():
        for other in (
            IMPORTS[file] if part(name) == "kernels" and file.name != "__init__.py" else ()
        ):
            kernel = (
                other
                if name.endswith(".reference")
                else name
                if other.endswith(".reference")
                else None
            )
            files = [one for module, one in MODULES.items() if kernel and within(module, (kernel,))]
            assert not any("@triton.jit" in one.read_text(encoding="utf-8") for one in files), (
                f"{name} imports {other}"
            )


def test_no_environment_variable_reaches_a_kernel_and_no_first_call_is_tuned() -> None:
    """They read one, Triton's variable that selects the interpreter."""
    for file in (file for name, file in MODULES.items() if part(name) == "kernels"):
        lines = [
            line
            for line in file.read_text(encoding="utf-8").splitlines()
            if re.search("environ|triton.autotune", line)
        ]
        assert all("TRITON_INTERPRET" in line for line in lines), file.relative_to(ROOT)


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, ssdprof.cli, ssdprof.kernels\n"
        "print(*{'pydantic'} & sys.modules.keys())\n"
        "import ssdprof.operators; ssdprof.operators.records()\n"
        "print(*{'torch', 'triton', 'transformers', 'huggingface_hub', 'numpy'} & "
        "sys.modules.keys())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not ran.stdout.split()


def test_help_answers_at_once() -> None:
    """Measured by processor time, which does not change on a busy machine."""

    def seconds() -> float:
        before = os.times()
        subprocess.run([sys.executable, "-m", "ssdprof", "--help"], capture_output=True, check=True)
        return sum(os.times()[2:4]) - sum(before[2:4])  # of children: user, system

    assert min(seconds() for _ in range(3)) < 0.5
