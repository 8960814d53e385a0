"""Rules of the repository: allowed imports, and a fast command line."""

import ast
import re
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from torchrun import python

from ssdprof import operators

ROOT = Path(__file__).parent.parent
# A part of ssdprof may import the parts below its row, and BASE; parts of one row do not know each
# other.
ROWS = (
    "cli",
    "commands pytest_plugin",
    "api",
    "jobs",
    "record stalls report",
    "capture measure store settings",
    "checkpoint",
    "environment operators",
    "kernels",
)
RANK = {name: rank for rank, row in enumerate(ROWS) for name in row.split()}
BASE = {"core", "progress", "files", "errors"}  # they import nothing else
# instead of what the rows allow
ONLY = {"report": BASE, "kernels": set(), **dict.fromkeys(BASE, BASE)}
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for file in sorted((ROOT / "ssdprof").rglob("*.py"))
}


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def imports(file: Path) -> set[str]:
    """Modules of ssdprof that a file imports, at any place in it."""
    nodes = list(ast.walk(parsed(file)))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{file}: a relative import"  # noqa: PT018
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else node.module for name in names}
    return {name for name in found if name.split(".")[0] == "ssdprof"}


def part(module: str) -> str:
    return [*module.split("."), ""][1]


def allowed(name: str) -> set[str]:
    below = {other for other, rank in RANK.items() if rank > RANK.get(name, 0)}
    return ONLY.get(name, below | BASE) | {name, ""}


@pytest.mark.parametrize("name", [*RANK, *sorted(BASE)])
def test_a_part_imports_only_what_it_may(name):
    for file in (file for module, file in MODULES.items() if part(module) == name):
        outside = {part(module) for module in imports(file)} - allowed(name)
        assert not outside, f"{file.relative_to(ROOT)} imports {outside}"


def test_every_part_has_a_row():
    assert {part(module) for module in MODULES} - {"", "__main__"} <= {*RANK, *BASE}


def within(module: str, rooms: tuple[str, ...]) -> bool:
    return any(f"{module}.".startswith(f"{room}.") for room in rooms)


# an operator of the same family, whose kernels and whose part of a record it shares
BUILDS_ON = {"kda": "gdn"}
PARTS = ("", "_definitions", "_inputs", "_oracle", "_tuning")  # of a record, a file each


def test_only_its_own_rooms_know_an_operator():
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
            foreign = {module for module in imports(file) if within(module, own)}
            assert not foreign, f"{file.relative_to(ROOT)} imports {foreign}"
        for node in ast.walk(parsed(file)) if part(name) not in ("operators", "kernels") else ():
            if isinstance(node, ast.Compare | ast.Match):
                compared = {leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
                assert operator not in compared, (
                    f"{file.relative_to(ROOT)}:{node.lineno} compares with {operator}"
                )


def test_no_kernel_imports_its_reference_or_the_reverse():
    for name, file in MODULES.items():
        for other in (
            imports(file) if part(name) == "kernels" and file.name != "__init__.py" else ()
        ):
            kernel = (
                other
                if name.endswith(".reference")
                else name
                if other.endswith(".reference")
                else None
            )
            files = [one for module, one in MODULES.items() if kernel and within(module, (kernel,))]
            assert not any("@triton.jit" in one.read_text() for one in files), (
                f"{name} imports {other}"
            )


def test_no_environment_variable_reaches_a_kernel_and_no_first_call_is_tuned():
    """They read one, Triton's variable that selects the interpreter."""
    for file in (file for name, file in MODULES.items() if part(name) == "kernels"):
        lines = [
            line
            for line in file.read_text().splitlines()
            if re.search("environ|triton.autotune", line)
        ]
        assert all("TRITON_INTERPRET" in line for line in lines), file.relative_to(ROOT)


def test_nothing_heavy_is_imported_before_it_is_needed():
    """Each line of this process may have imported none of the libraries that it prints."""
    code = """if True:
        import sys
        def loaded(*libraries):
            print(*sys.modules.keys() & set(libraries))
        import ssdprof
        assert "run" in dir(ssdprof)
        loaded("torch", "typer")
        import ssdprof.cli, ssdprof.kernels
        loaded("pydantic")
        import ssdprof.operators; ssdprof.operators.records()
        loaded("torch", "triton", "transformers", "huggingface_hub", "numpy")
        from ssdprof.checkpoint.model import open_model; open_model("demo")
        loaded("torch", "triton", "transformers")
        import ssdprof.kernels.ssd.unfused
        assert ssdprof.kernels.names("ssd")[0] == "reference", "not in the order of imports"
        import ssdprof.capture.layers, ssdprof.checkpoint.load  # for replays of stored captures
        loaded("transformers")"""
    ran = python("-c", code)
    assert (ran.returncode, ran.stdout.split()) == (0, []), ran.stderr
