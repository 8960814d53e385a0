"""Mutants of the package, and the tests that kill them: the proof that a smaller suite is as
strong.

    python tests/mutants.py RESULTS [ROOM ...] [--jobs N] [--limit SECONDS]

`mutants.jsonl` lists them, one a line: a statement (of a compound one the header), as `ast.unparse`
writes it, and what replaces it.  The operators of mutmut 3.8.1 drew them once, with the seed 43;
those "by hand" are kinds of error that tests let live before.  A mutant follows its statement into
any file.  `equivalent`: why no test can kill it.

Each is applied in a copy of the tree, and judged by the tests of its room alone: first those that
name its module.
RESULTS gets a line for each: killed, and by which test; survived; timeout; not found; broken, if
that test fails without the mutant too.  Mutants that RESULTS has are skipped, so that a run that
was stopped goes on.
"""

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "mutants.jsonl"
WHOLE = "jobs stalls test_cli.py test_goldens.py test_answers.py test_end_to_end.py"
TESTS = {  # of each room: files and folders
    "kernels": "kernels operators/test_adapters.py test_kept_states.py",
    "operators": "operators kernels/test_functions.py jobs/test_tune.py capture/test_served.py",
    "checkpoint": "checkpoint test_hub_end_to_end.py",
    "environment": (
        "test_environment.py test_toolchain.py test_ranks.py capture/test_capture_memory.py"
    ),
    "capture": "capture test_served_run.py",
    "measure": "measure jobs test_implementations.py",
    "store": "store test_settings.py jobs test_ranks.py",
    "stalls": "stalls test_goldens.py",
    "report": "report stalls test_cli.py test_goldens.py",
    "core": "core report measure capture jobs stalls test_schemas.py test_goldens.py",
    "record": "record capture/test_recording.py capture/test_workloads.py",
    "states": "kernels/test_stored_states.py jobs/test_states_job.py report/test_states.py",
    "jobs": f"{WHOLE} test_served_run.py test_ranks.py",
    "commands": f"{WHOLE} commands report store",
}
Mutant = dict[str, str]


def header(statement: ast.stmt) -> str:
    text = ast.unparse(statement)
    return text.splitlines()[0] if hasattr(statement, "body") else text


def statements(tree: ast.AST, name: str = "") -> list[tuple[str, ast.stmt]]:
    """Every statement, with the name of its function."""
    found = [(name, child) for child in ast.iter_child_nodes(tree) if isinstance(child, ast.stmt)]
    for child in ast.iter_child_nodes(tree):
        found += statements(
            child, child.name if isinstance(child, ast.FunctionDef | ast.ClassDef) else name
        )
    return found


@cache
def headers(source: str) -> list[tuple[str, str, ast.stmt]]:
    """Of every statement: its function, its header, itself."""
    return [
        (name, header(statement), statement) for name, statement in statements(ast.parse(source))
    ]


def place(mutant: Mutant, tree: Path) -> tuple[Path, ast.stmt] | None:
    """Where the statement stands; of several places, that in the function and the file of the
    mutant.
    """
    found = []
    for file in sorted((tree / "ssdprof").rglob("*.py")):
        for name, text, statement in headers(file.read_text()):
            if text == mutant["original"]:
                alike = name == mutant["function"].split(".")[-1], file == tree / mutant["file"]
                found.append((alike, file, statement))
    return max(found, key=lambda one: one[0])[1:] if found else None


def mutated(mutant: Mutant, source: str, statement: ast.stmt) -> str:
    """The source with the statement, or its header, replaced."""
    lines = source.splitlines()
    first = statement.lineno - 1
    inner = getattr(statement, "body", None)
    last = statement.end_lineno if inner is None else max(first + 1, inner[0].lineno - 1)
    indent, word = re.match(r"(\s*)(el(?=if ))?", lines[first]).groups(default="")
    return "\n".join([*lines[:first], indent + word + mutant["mutated"], *lines[last:], ""])


def tests_of(mutant: Mutant, tree: Path, module: Path) -> list[str]:
    """The test files of the mutant's room: first those that name its module or what it defines, and
    the short ones.
    """
    paths = [tree / "tests" / word for word in TESTS[mutant["room"]].split()]
    files = [
        file
        for path in paths
        for file in (path.rglob("test_*.py") if path.is_dir() else [path] * path.exists())
    ]
    texts = {str(file.relative_to(tree)): file.read_text() for file in files}
    names = re.findall(r"^(?:def|class) ([A-Za-z]\w+)", module.read_text(), re.MULTILINE)
    named = re.compile(rf"\b({'|'.join([module.stem, *names])})\b")
    return sorted(
        texts, key=lambda file: ("_gpu" in file, not named.search(texts[file]), len(texts[file]))
    )


def run_tests(tree: Path, tests: list[str], limit_s: float) -> tuple[int, str]:
    """pytest's exit code, 128 or more after the limit of processor time, and the first test that
    failed.
    """
    env = os.environ | {"PYTHONPATH": f"{tree}:{tree}/tests", "OMP_NUM_THREADS": "1"}
    limits = f"prlimit --cpu={limit_s:.0f} timeout -s KILL {5 * limit_s:.0f} {sys.executable}"
    command = [
        *f"{limits} -m pytest -x -n 0 -p no:cacheprovider --tb=no -rfE".split(),
        "-m",
        "not gpu and not ncu and not compiler",  # slow tests count
        *tests,
    ]
    ran = subprocess.run(command, cwd=tree, env=env, text=True, stdout=subprocess.PIPE)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE)
    return ran.returncode, failed[1] if failed else ""


def judge(mutant: Mutant, tree: Path, limit_s: float) -> tuple[str, str]:
    """The mutant's status, and the test that kills it."""
    if (found := place(mutant, tree)) is None:
        return "not found", ""
    file = found[0]
    before = found[0].read_text()
    file.write_text(mutated(mutant, before, found[1]))
    code, test = run_tests(tree, tests_of(mutant, tree, file), limit_s)
    file.write_text(before)
    if code == 0 or code >= 128:
        return ("timeout" if code else "survived"), ""
    # no test: nothing can be imported
    without = test and run_tests(tree, [test.split("[")[0]], limit_s)[0]
    return ("broken" if without else "killed"), test


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("rooms", nargs="*")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=240.0)
    wanted = parser.parse_args()
    listed = [json.loads(line) for line in LIST.read_text().splitlines()]
    known = (
        {json.loads(line)["mutated"] for line in wanted.results.open()}
        if wanted.results.exists()
        else set()
    )
    left = [
        one
        for one in listed
        if one["mutated"] not in known and one["room"] in (wanted.rooms or TESTS)
    ]
    with (
        tempfile.TemporaryDirectory(prefix="ssdprof-mutants-") as folder,
        ThreadPoolExecutor(wanted.jobs) as pool,
    ):
        trees: Queue[Path] = Queue()
        for job in range(wanted.jobs):
            unwanted = shutil.ignore_patterns(".git", "__pycache__", "runs", ".*_cache")
            trees.put(Path(shutil.copytree(ROOT, Path(folder) / str(job), ignore=unwanted)))

        def one(mutant: Mutant):
            tree = trees.get()
            began = time.monotonic()
            status, test = judge(mutant, tree, wanted.limit)
            trees.put(tree)
            line = mutant | {
                "status": status,
                "test": test,
                "seconds": round(time.monotonic() - began),
            }
            with wanted.results.open("a") as file:
                print(json.dumps(line), file=file)

        list(pool.map(one, left))


if __name__ == "__main__":
    main()
