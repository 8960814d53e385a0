"""Measure what others published, and write it beside their numbers.

    python benchmarks/reproduce.py NAME [--budget SECONDS] [--published DIR] [--out DIR]
    python benchmarks/reproduce.py NAME --from RESULT.json [--check]
    python benchmarks/reproduce.py --page [--check]

NAME is that of a file in benchmarks/published, which says what is measured, what is quoted, and when a claim holds.
Writes NAME.json, NAME.md and NAME.svg into DIR, by default benchmarks/results/published/<GPU>.  --from renders a result
again, without a GPU, beside it; --check compares with what is there instead.  --page writes seeds.md
into benchmarks/results, from all results.  Every time is measured by ssdprof's own commands.

Exit code 1 says that an output was wrong, or with --check that a file is not what it would be.  A claim that does not
hold is a result.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path

from reproducing import measuring, published, rendering, seeds
from reproducing.published import Published
from reproducing.result import Result, load, stored, understood

from ssdprof.errors import BadInputError, ExitCode, SsdprofError
from ssdprof.files import write_text

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "published"
PAGE = HERE / "results" / "seeds.md"


def reproduce(name: str, document: Published, budget: float, checkout: Path | None, out: Path | None) -> int:
    """Measures now, and writes after each measurement.  out: folder; None for that of the GPU."""
    began = time.monotonic()
    code: int = ExitCode.OK
    for found, missing in measuring.measure(document, budget, checkout):
        if not found:
            continue
        content = stored(name, document, found, missing, time.monotonic() - began)
        result = understood(name, document, content)
        folder = out or RESULTS / short(result.gpu)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"{name}.json", json.dumps(content, indent=1) + "\n")
        code = render(document, result, folder)
    return code


def run_runner(document: Published, budget: float, out: Path | None) -> int:
    """The exit code of the document's own script, which writes the files."""
    from ssdprof.environment.machine import gpu  # imports torch

    here = gpu()
    folder = out or RESULTS / short(here.name if here else "no GPU")
    words = [sys.executable, str(HERE / document.runner), "--out", str(folder), "--budget", f"{budget:.0f}"]
    return measuring.run_within(words, budget)


def render(document: Published, result: Result, folder: Path) -> int:
    """Writes the pages; the exit code of the result."""
    for file, text in rendered(document, result, folder).items():
        write_text(file, text)
        print(f"Written: {file}")
    return judged(result)


def again(name: str, document: Published, file: Path, *, check: bool) -> int:
    """Renders a result, or compares what lies beside it.  The pages of a runner are its own: its claims are printed."""
    result = load(name, document, file)
    if document.runner:
        print(rendering.claims_table(document, result))
        return judged(result)
    if check:
        return compared(rendered(document, result, file.parent))
    return render(document, result, file.parent)


def write_page(*, check: bool) -> int:
    found = []
    for name in published.known():
        document = published.load(name)
        files = sorted(RESULTS.glob(f"*/{name}.json"))
        found.append((name, document, [load(name, document, file) for file in files]))
    text = seeds.page(found)
    if check:
        return compared({PAGE: text})
    write_text(PAGE, text)
    return ExitCode.OK


def rendered(document: Published, result: Result, folder: Path) -> dict[Path, str]:
    """File -> what it holds."""
    files = {folder / f"{result.name}.md": rendering.as_markdown(document, result)}
    picture = rendering.as_picture(document, result)
    return files | ({folder / f"{result.name}.svg": picture} if picture else {})


def compared(files: dict[Path, str]) -> int:
    """1 if a file is missing or holds something else."""
    stale = [file for file, text in files.items() if not file.is_file() or file.read_text(encoding="utf-8") != text]
    for file in stale:
        print(f"{file} is not what its result says.  Render it again without --check.", file=sys.stderr)
    return ExitCode.GATE_FAILED if stale else ExitCode.OK


def judged(result: Result) -> int:
    for one in result.wrong:
        print(f"wrong: {one}", file=sys.stderr)
    return ExitCode.GATE_FAILED if result.wrong else ExitCode.OK


def short(gpu: str) -> str:
    """ "NVIDIA H200" -> "h200"."""
    return re.sub(r"\W+", "-", gpu.removeprefix("NVIDIA ").lower()).strip("-")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help=f"one of {', '.join(published.known())}")
    parser.add_argument("--budget", type=float, help="seconds of wall clock, instead of the document's")
    parser.add_argument("--published", type=Path, metavar="DIR", help="a checkout of the published kernel")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the files")
    parser.add_argument("--from", dest="file", type=Path, metavar="RESULT.json", help="render a result again")
    parser.add_argument("--check", action="store_true", help="compare with the files that are there, write none")
    parser.add_argument("--page", action="store_true", help="write results/seeds.md from all results")
    options = parser.parse_args()
    if options.page:
        return write_page(check=options.check)
    if options.name is None:
        raise BadInputError("Name a published comparison.", f"There are: {', '.join(published.known())}.")
    if options.check and options.file is None:
        raise BadInputError("--check compares what --from or --page would write.", "Give one of them.")
    if options.published is not None and not options.published.is_dir():
        raise BadInputError(f"{options.published} is no folder.", "Give a checkout of the published kernel.")
    document = published.load(options.name)
    if options.file:
        return again(options.name, document, options.file, check=options.check)
    budget = options.budget or document.seconds
    if document.runner:
        return run_runner(document, budget, options.out)
    return reproduce(options.name, document, budget, options.published, options.out)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SsdprofError as error:
        print(f"Error: {error.message} {error.hint}", file=sys.stderr)
        sys.exit(int(error.exit_code))
