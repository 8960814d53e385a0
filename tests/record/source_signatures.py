"""Records the signatures of the places' functions from the sources of their libraries.

    python tests/record/source_signatures.py LIBRARY=VERSION=FOLDER ...

FOLDER holds the library's packages, as a wheel does.  Nothing is imported.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from ssdprof.record.places import PLACES

FILE = Path(__file__).with_name("source_signatures.json")


def parameters(folder: Path, module: str, function: str) -> list[str] | None:
    """Of a function or method, from the file of its module; with "**" if it takes any keywords.
    None if it is not there.
    """
    path = folder.joinpath(*module.split("."))
    files = [path.with_suffix(".py"), path / "__init__.py"]
    source = next((file for file in files if file.is_file()), None)
    if source is None:
        return None
    body: Iterable[ast.stmt] = ast.parse(source.read_text("utf-8")).body
    for name in function.split("."):
        found = [node for node in body if getattr(node, "name", None) == name]
        if not found:
            return None
        body = getattr(found[-1], "body", [])
    arguments = found[-1].args  # type: ignore[attr-defined]
    several = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [each.arg for each in several] + ["**"] * (arguments.kwarg is not None)


def main(arguments: list[str]) -> None:
    recorded = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
    for argument in arguments:
        library, version, folder = argument.split("=", 2)
        functions = {}
        for place in PLACES:
            if place.library == library:
                names = parameters(Path(folder), place.module, place.function) or []
                functions[f"{place.module}:{place.function}"] = " ".join(names)
        recorded[library] = {"version": version, "functions": functions}
    lines = json.dumps(recorded, indent=1, sort_keys=True)
    FILE.write_text(lines + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
