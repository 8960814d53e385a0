"""Measure what others published, and write the results next to their numbers.

    python benchmarks/reproduce.py NAME [--budget SECONDS] [--published DIR] [--out DIR]
        [--recorded MEASUREMENT=FILE ... [--kernels HASH]]
    python benchmarks/reproduce.py NAME --from RESULT.json [--check]
    python benchmarks/reproduce.py --page [--check]

NAME is a file in benchmarks/published, which defines the measurements, the quoted numbers and the claims.
Writes NAME.json, NAME.md and NAME.svg into DIR, by default benchmarks/results/published/<GPU>, after each measurement.
An interrupted run keeps its results so far; after a killed one, the reports are in DIR/NAME-reports-*.
--recorded takes an existing report, such as one of those, instead of measuring; if it lacks the hash of its kernels'
sources, --kernels states it.  --from renders a result again into its folder, without a GPU; --check compares with the
existing files instead.  --page writes seeds.md into benchmarks/results, from all results.  Every time is measured by
ssdprof's own commands.

Exit code 1 says that an output was wrong, or with --check that a file has other contents; 3 that nothing could be
measured here; 130 that the run was interrupted.  A claim that does not hold is a result, not an error.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from reproducing import measuring, published, rendering, reports, seeds
from reproducing.measuring import Means
from reproducing.published import Published
from reproducing.result import Recorded, Result, folder_of, load, stored, understood

from ssdprof.cli import INTERNAL_ERROR, INTERRUPTED
from ssdprof.errors import BadInputError, ExitCode, MissingCapabilityError, SsdprofError
from ssdprof.files import write_text
from ssdprof.report import format as fmt

HERE = Path(__file__).parent
RECORDS = HERE / "results"
RESULTS = RECORDS / "published"
PAGE = RECORDS / "seeds.md"
RENDER_S = 60.0
PUBLISHED_KERNEL = Path("mamba_ssm", "ops", "triton", "ssd_fused5.py")  # within its checkout


def reproduce(
    name: str,
    document: Published,
    *,
    budget: float,
    out: Path | None,
    checkout: Path | None = None,
    records: Mapping[str, Recorded] | None = None,
) -> int:
    """Measures, and writes the result after each measurement.

    out: folder; None for the GPU's folder.  records: existing reports, by the names of their measurements.
    """
    began = time.monotonic()
    code: int = ExitCode.OK
    records = records or {}
    with measuring.reports_folder(name, out or RESULTS) as kept:
        there = {key: one.report for key, one in records.items()}
        means = Means(seconds=budget, published=checkout, folder=kept, recorded=there)
        for found, missing in measuring.measure(document, means):
            if not found:
                continue
            content = stored(name, document, found, missing, seconds=time.monotonic() - began, recorded=records)
            result = understood(name, document, content)
            folder = out or RESULTS / result.folder
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / f"{name}.json", json.dumps(content, indent=1) + "\n")
            code = render(document, result, folder)
    return code


def recorded(document: Published, words: Iterable[str], kernels: str) -> dict[str, Recorded]:
    """words: MEASUREMENT=FILE.  kernels: the hash for reports without one, "" if it is unknown."""
    measures = {one.name: one for one in document.measure}
    found: dict[str, Recorded] = {}
    for word in words:
        name, _, place = word.partition("=")
        if name not in measures or not place:
            raise BadInputError(
                f"--recorded {word} names no measurement and its report.",
                f"Write MEASUREMENT=FILE.  Measurements: {', '.join(measures)}.",
            )
        if name in found:
            raise BadInputError(f"--recorded names {name} twice.", "Give one report for each measurement.")
        file, subject = Path(place), measures[name].subject
        report = reports.read(measures[name].reads, file)
        if subject and (others := reports.subjects(report) - {subject}):
            raise BadInputError(f"{file} is a report of {fmt.words(sorted(others))}.", f"Give one of {subject}.")
        own = reports.kernels(report)
        resolved, home = file.resolve(), RECORDS.resolve()
        found[name] = Recorded(
            file=resolved.relative_to(home).as_posix() if resolved.is_relative_to(home) else file.name,
            created=reports.created(report),
            kernels=own or kernels,
            stated=not own and bool(kernels),
            report=report.model_dump(mode="json"),
        )
    return found


def refuse_without_gpu(name: str, document: Published) -> None:
    """Raises MissingCapabilityError without a GPU.  Does not use the GPU: only the commands do."""
    import torch

    if not torch.cuda.is_available():
        recorded = "" if document.runner else ", and --recorded takes a report that exists"
        hint = f"--from renders a result again without one{recorded}."
        raise MissingCapabilityError(f"{name} needs an NVIDIA GPU, and torch sees none.", hint)


def run_runner(document: Published, budget: float, out: Path | None) -> int:
    """The exit code of the document's script, which writes the files; 70 if it was killed."""
    from ssdprof.environment.machine import gpu  # imports torch

    here = None if out else gpu()
    folder = out or RESULTS / folder_of(here.name if here else "no GPU")
    words = [sys.executable, str(HERE / document.runner), "--out", str(folder), "--budget", f"{budget:.0f}"]
    return of_script(words, budget)


def of_script(words: list[str], seconds: float) -> int:
    """The exit code of the script; INTERNAL_ERROR if a signal ended it."""
    code = measuring.run_within(words, seconds)
    if code >= 0:
        return code
    print("The script was killed.  Its result holds what it had found; --from writes the pages.", file=sys.stderr)
    return INTERNAL_ERROR


def render(document: Published, result: Result, folder: Path) -> int:
    """Writes the pages; the exit code of the result."""
    for file, text in rendered(document, result, folder).items():
        write_text(file, text)
        print(f"Written: {file}")
    return judged(result)


def again(name: str, document: Published, file: Path, *, check: bool) -> int:
    """Renders a result, or compares its pages with the stored ones.  A runner writes its own pages."""
    result = load(name, document, file)
    if document.runner:
        if check:
            raise BadInputError(f"{name} has a runner, which writes its pages.", "Leave --check out.")
        return of_script([sys.executable, str(HERE / document.runner), "--from", str(file)], RENDER_S) or judged(result)
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
    """File -> its contents."""
    files = {folder / f"{result.name}.md": rendering.as_markdown(document, result)}
    picture = rendering.as_picture(document, result)
    return files | ({folder / f"{result.name}.svg": picture} if picture else {})


def compared(files: dict[Path, str]) -> int:
    """1 if a file is missing or has other contents."""
    stale = [file for file, text in files.items() if not file.is_file() or file.read_text(encoding="utf-8") != text]
    for file in stale:
        print(f"{file} is not what its result says.  Render it again without --check.", file=sys.stderr)
    return ExitCode.GATE_FAILED if stale else ExitCode.OK


def judged(result: Result) -> int:
    for one in result.wrong:
        print(f"wrong: {one}", file=sys.stderr)
    return ExitCode.GATE_FAILED if result.wrong else ExitCode.OK


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help=f"one of {', '.join(published.known())}")
    parser.add_argument("--budget", type=float, help="seconds of wall clock, instead of the document's")
    parser.add_argument("--published", type=Path, metavar="DIR", help="a checkout of the published kernel")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the files")
    parser.add_argument(
        "--recorded", action="append", default=[], metavar="MEASUREMENT=FILE", help="take a report that exists"
    )
    parser.add_argument("--kernels", default="", metavar="HASH", help="of recorded reports that do not hold theirs")
    parser.add_argument("--from", dest="file", type=Path, metavar="RESULT.json", help="render a result again")
    parser.add_argument("--check", action="store_true", help="compare with the files that are there, write none")
    parser.add_argument("--page", action="store_true", help="write results/seeds.md from all results")
    options = parser.parse_args()
    if options.page:
        if options.name or options.file or options.recorded:
            raise BadInputError("--page is about all results, and takes no other.", "Give it alone, or with --check.")
        return write_page(check=options.check)
    if options.name is None:
        raise BadInputError("Name a published comparison.", f"Choose from: {', '.join(published.known())}.")
    if options.check and options.file is None:
        raise BadInputError("--check compares what --from or --page would write.", "Give one of them.")
    if options.published is not None and not (options.published / PUBLISHED_KERNEL).is_file():
        raise BadInputError(f"{options.published} holds no {PUBLISHED_KERNEL}.", "Give a checkout of RishiAstra/mamba.")
    if options.budget is not None and not options.budget > 0:
        raise BadInputError(f"--budget {options.budget:g} leaves no time.", "Give a number of seconds.")
    document = published.load(options.name)
    if options.file:
        if options.out or options.recorded:
            raise BadInputError("--from writes into the folder of its result, from the data in it.", "Give it alone.")
        return again(options.name, document, options.file, check=options.check)
    budget = options.budget or document.seconds
    if document.runner:
        if options.recorded:
            raise BadInputError(f"{options.name} has a runner, which measures everything.", "Leave --recorded out.")
        refuse_without_gpu(options.name, document)
        return run_runner(document, budget, options.out)
    records = recorded(document, options.recorded, options.kernels)
    if len(records) < len(document.measure):
        refuse_without_gpu(options.name, document)
    return reproduce(
        options.name, document, budget=budget, checkout=options.published, out=options.out, records=records
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the results so far are kept in any case
    try:
        sys.exit(main())
    except SsdprofError as error:
        print(f"Error: {error.message} {error.hint}", file=sys.stderr)
        sys.exit(int(error.exit_code))
    except KeyboardInterrupt:
        print("Interrupted.  What was measured by then is kept.", file=sys.stderr)
        sys.exit(INTERRUPTED)
