"""Measure the house: how much there is (tokens), how it reads (density, golf), how it hangs
together (names, imports).

    python tests/house.py [--limits] [--details] [FOLDER]

FOLDER is the checkout (default: here).  With --limits the exit code is 1 if a number is above its
limit.  Tokens are counted without comments and docstrings: documentation is free, and so are line
breaks.
"""

import ast
import collections
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

LIMITS = {
    # how much
    "package tokens": 320_000, "test tokens": 325_000, "script tokens": 42_000, ("files in the "
"package"): 240,
    "result lines": 12_000, "result bytes": 12_000_000, "docs words": 25_000, "README words": 700,
    # how it reads
    "package tokens per 100 code lines": 1_000, "test tokens per 100 code lines": 1_080,
    "lines over 100 characters": 0, "fmt: skip in the package": 80, "fmt: skip in tests": 80,
    "lambdas in the package": 220, "strings times a condition": 0, "ternaries in ternaries": 0,
    "comprehensions with two loops": 60, "loops over one thing": 0, ("vague names (one, found, "
"own, ...)"): 200,
    "undocumented functions over 12 lines": 30, "functions over 60 lines": 20, ("longest "
"function"): 110,
    "longest file": 900, "functions over 12 parameters": 15, "Any in the package": 380,
    # how it hangs together
    "classes": 230, "homonyms (classes and aliases)": 6, "one-importer modules": 40,
    "late imports": 20,
}  # fmt: skip
SKIPPED = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip
VAGUE = {"one", "found", "own", "given", "told", "said", "made", "ours", "theirs"}
COMPREHENSIONS = (ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Details = dict[str, list[str]]


def tracked(root: Path) -> list[Path]:
    out = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z"], capture_output=True, text=True, check=True
    ).stdout
    return [root / name for name in out.split("\0") if name and (root / name).is_file()]


def module_of(root: Path, file: Path) -> str:
    parts = list(file.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def has_docstring(node: ast.AST) -> bool:
    body = getattr(node, "body", None)
    first = body[0] if isinstance(body, list) and body else None
    return (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )


def tokens_and_lines(source: str, tree: ast.Module) -> tuple[int, int]:
    """Tokens and lines with code, without comments and docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and has_docstring(node):
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    count = 0
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SKIPPED and token.start[0] not in docstrings:
            count += 1
            lines.add(token.start[0])
    return count, len(lines)


def is_golf_product(node: ast.AST) -> bool:
    """A string times something that is no number: "%" * is_percent."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return False
    sides = (node.left, node.right)
    texts = [
        side
        for side in sides
        if isinstance(side, ast.JoinedStr)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str))
    ]
    others = [side for side in sides if side not in texts]
    return (
        bool(texts)
        and bool(others)
        and isinstance(others[0], (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Attribute))
    )


def aliases(tree: ast.Module) -> list[tuple[str, int]]:
    """Names of types that a module assigns."""
    names = []
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and len(node.targets) == 1
            and isinstance(node.targets[0], ast.Name)
        ):
            value = ast.unparse(node.value)
            if re.match(r"^_?[A-Z][a-z]\w*$", node.targets[0].id) and re.search(r"\[|\|", value):
                names.append((node.targets[0].id, node.lineno))
    return names


def measure(root: Path) -> tuple[dict[str, int], Details]:
    files = tracked(root)
    parts = {file: file.relative_to(root).parts for file in files}
    code = {
        top: [f for f in files if parts[f][0] == top and f.suffix == ".py"]
        for top in ("ssdprof", "tests", "benchmarks")
    }
    source = {file: file.read_text() for top in code.values() for file in top}
    tree = {file: ast.parse(text) for file, text in source.items()}
    size = {file: tokens_and_lines(source[file], tree[file]) for file in source}
    details: Details = collections.defaultdict(list)
    numbers: dict[str, int] = {}

    def total(top: str, which: int) -> int:
        return sum(size[file][which] for file in code[top])

    for top, name in (("ssdprof", "package"), ("tests", "test"), ("benchmarks", "script")):
        numbers[f"{name} tokens"] = total(top, 0)
        if name != "script":
            numbers[f"{name} tokens per 100 code lines"] = round(
                100 * total(top, 0) / max(1, total(top, 1))
            )
    numbers["lines over 100 characters"] = sum(
        len(x) > 100 for text in source.values() for x in text.splitlines()
    )
    for top, name in (("ssdprof", "the package"), ("tests", "tests")):
        numbers[f"fmt: skip in {name}"] = sum(source[f].count("# fmt: skip") for f in code[top])
    numbers["longest file"] = max(source[f].count("\n") for f in code["ssdprof"])

    names = {module_of(root, f): f for f in code["ssdprof"]}
    defined = collections.defaultdict(set)
    importers = collections.defaultdict(set)
    longest = 0
    for file in code["ssdprof"]:
        where = str(file.relative_to(root))
        outer = {id(node) for node in tree[file].body}
        guarded = {id(x) for n in tree[file].body if isinstance(n, ast.If) for x in ast.walk(n)}
        for name, line in aliases(tree[file]):
            defined[name].add(f"{where}:{line}")
        for node in ast.walk(tree[file]):
            at = f"{where}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ClassDef):
                details["classes"].append(f"{at} {node.name}")
                defined[node.name].add(at)
            elif isinstance(node, FUNCTIONS):
                length = (node.end_lineno or 0) - node.lineno + 1
                arguments = node.args
                longest = max(longest, length)
                if length > 60:
                    details["functions over 60 lines"].append(f"{at} {node.name}: {length}")
                if length > 12 and not has_docstring(node):
                    details["undocumented functions over 12 lines"].append(f"{at} {node.name}")
                if (
                    len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
                    > 12
                ):
                    details["functions over 12 parameters"].append(f"{at} {node.name}")
            elif isinstance(node, ast.Lambda):
                details["lambdas in the package"].append(at)
            elif isinstance(node, COMPREHENSIONS):
                if len(node.generators) > 1:
                    details["comprehensions with two loops"].append(at)
                if any(
                    isinstance(g.iter, (ast.List, ast.Tuple)) and len(g.iter.elts) == 1
                    for g in node.generators
                ):
                    details["loops over one thing"].append(at)
            elif isinstance(node, ast.IfExp):
                if any(isinstance(x, ast.IfExp) for x in ast.walk(node) if x is not node):
                    details["ternaries in ternaries"].append(at)
            elif isinstance(node, ast.Name):
                if node.id == "Any":
                    details["Any in the package"].append(at)
                if isinstance(node.ctx, ast.Store) and node.id in VAGUE:
                    details["vague names (one, found, own, ...)"].append(f"{at} {node.id}")
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                if id(node) not in outer and id(node) not in guarded and file.name != "cli.py":
                    details["late imports"].append(at)
                targets = [n.name for n in node.names]
                if isinstance(node, ast.ImportFrom):
                    targets = [f"{node.module}.{name}" for name in targets] + [node.module or ""]
                for target in targets:
                    if target in names and names[target] != file:
                        importers[target].add(file)
            if is_golf_product(node):
                details["strings times a condition"].append(at)
    for name, places in sorted(defined.items()):
        if len({place.rsplit(":", 1)[0] for place in places}) > 1:
            details["homonyms (classes and aliases)"].append(f"{name}: {', '.join(sorted(places))}")
    details["one-importer modules"] = sorted(
        m
        for m, f in names.items()
        if f.name != "__init__.py"
        and len(importers[m]) == 1
        and not m.startswith("ssdprof.kernels.")
    )
    for name in LIMITS:
        if name in details:
            numbers[name] = len(details[name])
    results = [f for f in files if parts[f][:2] == ("benchmarks", "results")]
    data = [
        f
        for f in files
        if f.suffix in {".json", ".jsonl", ".csv", ".gz", ".xz", ".npz", ".pt"}
        and parts[f][0] != "ssdprof"
    ]

    def lines(several: list[Path]) -> int:
        return sum(f.read_bytes().count(b"\n") for f in several)

    def words(several: list[Path]) -> int:
        return sum(len(f.read_text().split()) for f in several)

    numbers |= {
        "longest function": longest,
        "files in the package": len(code["ssdprof"]),
        "result lines": lines(
            [f for f in results if f.suffix in {".json", ".jsonl", ".md", ".csv"}]
        ),
        "result bytes": sum(f.stat().st_size for f in data),
        "docs words": words([f for f in files if parts[f][0] == "docs" and f.suffix == ".md"]),
        "README words": words([root / "README.md"]),
    }
    return {name: numbers.get(name, 0) for name in LIMITS}, details


def main() -> int:
    arguments = [a for a in sys.argv[1:] if not a.startswith("-")]
    numbers, details = measure(Path(arguments[0] if arguments else ".").resolve())
    over = [name for name, value in numbers.items() if value > LIMITS[name]]
    for name, value in numbers.items():
        print(f"{name:42} {value:10,}  limit {LIMITS[name]:10,}  {'OVER' if name in over else ''}")
    if "--details" in sys.argv:
        for name, rows in details.items():
            print(f"\n{name}:", *rows, sep="\n  ")
    print("over: " + ", ".join(over) if over else "all within their limits")
    return int("--limits" in sys.argv and bool(over))


if __name__ == "__main__":
    sys.exit(main())
