"""Build ssdprof's default text from the documentation inside a CPython installation.

    python3.11 benchmarks/build_text.py [--out FOLDER]

Sources, both under the PSF licence (Python-2.0): the language reference that `help()` prints
(`pydoc_data.topics`) and the docstrings of the standard library's modules, classes and functions.
Files that carry a copyright notice of somebody else than the Python Software Foundation are left
out.  The result depends on the patch release of CPython: the shipped text comes from 3.11.7 on
Linux.  Writes text.txt.xz, text.sha256 and LICENSE.
"""

import argparse
import ast
import hashlib
import lzma
import pydoc_data.topics
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SHINGLE = 8  # words
SEEN_SHARE = 0.25  # a paragraph is a repetition when this share of its shingles has been seen
SHORTEST_DOCSTRING = 400  # characters; shorter ones are labels rather than prose
SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
COPYRIGHT = re.compile(
    r"^.*(?:copyright|\(c\) ?\d{4}|permission to use|spdx-license).*$", re.IGNORECASE | re.MULTILINE
)


def topics() -> Iterator[tuple[str, str]]:
    """(heading, text) of every topic of the language reference."""
    for name, text in pydoc_data.topics.topics.items():
        yield f"topic {name}", text


def docstrings(library: Path) -> Iterator[tuple[str, str]]:
    """(heading, text) of every docstring of the standard library that is long enough to be
    prose.
    """
    for file in sorted(library.rglob("*.py")):
        parts = file.relative_to(library).with_suffix("").parts
        if SKIPPED.intersection(parts):
            continue
        try:
            source = file.read_text("utf-8")
        except UnicodeDecodeError:  # the few sources in another encoding
            continue
        if any("Python Software Foundation" not in notice for notice in COPYRIGHT.findall(source)):
            continue
        module = ".".join(parts).removesuffix(".__init__")
        for name, node in definitions(ast.parse(source), module):
            text = ast.get_docstring(node)
            if text is not None and len(text) >= SHORTEST_DOCSTRING:
                yield name, text


def definitions(
    node: ast.AST, name: str
) -> Iterator[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef]]:
    """(qualified name, node) of everything in `node` that can have a docstring, itself included."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        yield name, node
    for child in ast.iter_child_nodes(node):
        inner = (
            f"{name}.{child.name}" if isinstance(child, ast.ClassDef | ast.FunctionDef) else name
        )
        yield from definitions(child, inner)


def without_repetition(documents: list[tuple[str, str]]) -> Iterator[str]:
    """Each document under its heading, without paragraphs whose words mostly occurred before."""
    seen: set[tuple[str, ...]] = set()
    for heading, text in documents:
        kept = []
        for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
            words = paragraph.split()
            shingles = {
                tuple(words[i : i + SHINGLE]) for i in range(max(1, len(words) - SHINGLE + 1))
            }
            if len(shingles & seen) <= SEEN_SHARE * len(shingles):
                kept.append(paragraph.rstrip())
            seen |= shingles
        if sum(map(len, kept)) >= SHORTEST_DOCSTRING:
            yield f"{heading}\n\n" + "\n\n".join(kept) + "\n\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(__file__).parent.parent / "ssdprof" / "capture" / "text"
    parser.add_argument(
        "--out", type=Path, default=default, help="where to write (default: the package)"
    )
    folder: Path = parser.parse_args().out
    library = Path(sysconfig.get_path("stdlib"))
    documents = [*topics(), *docstrings(library)]
    # A fixed shuffle: any part of the text, also a held-out one, is a fair sample of the whole.
    documents.sort(key=lambda document: hashlib.sha256(document[0].encode()).digest())
    data = "".join(without_repetition(documents)).encode("utf-8")
    digest = hashlib.sha256(data).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt.xz").write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
    (folder / "text.sha256").write_text(f"{digest}  text.txt\n")
    (folder / "LICENSE").write_text((library / "LICENSE.txt").read_text("utf-8"))
    words = len(data.decode().split())
    print(f"CPython {sys.version.split()[0]}: {len(data)} bytes, {words} words, sha256 {digest}")


if __name__ == "__main__":
    main()
