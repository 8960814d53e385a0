"""Reads CSV files that ncu printed of a report: `--page raw` and `--page source`.

    ncu --import FILE --csv --page raw --print-units base        a launch per row; the row below the names holds units
    ncu --import FILE --csv --page source --print-source cuda,sass   a line or instruction per row

Differences between versions are tolerated: lines of ncu's before the table, thousands separators, empty cells,
"n/a", rows that are too short, names that occur twice, headers that are repeated, short names of stall reasons.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ssdprof.errors import BadInputError
from ssdprof.stalls.raw import SAMPLED, Point, RawKernel, RawReport, Value
from ssdprof.stalls.reasons import canonical

_STALL = re.compile(r"stall_(\w+)")  # a column of the source page; those "(Not Issued)" are a part of the same samples
_FACTORS = {
    "byte": {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12},
    "second": {"n": 1, "u": 10**3, "m": 10**6, "": 10**9},
}
_UNIT = re.compile(r"([KMGTnum]?)(byte|second)s?(?:/block)?", re.IGNORECASE)
_SHORT_UNITS = {"ns": "nsecond", "us": "usecond", "ms": "msecond", "s": "second"}
_ADVICE = "Print it with: ncu --import FILE --csv --page raw --print-units base (or --page source)."

Row = Sequence[str]


def read(path: Path) -> RawReport:
    """Every launch of a CSV file.  Raises BadInputError for one that is neither a raw nor a source page."""
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror}.", "Name a CSV file of ncu.") from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path} is not a CSV file: it is not UTF-8.", _ADVICE) from error
    rows = list(csv.reader(line for line in text.splitlines() if line.strip() and not line.startswith("==")))
    kernels = tuple(_kernels(path, rows))
    if not kernels:
        raise BadInputError(f"{path} holds no launch.", "Was anything profiled?")
    return RawReport(name=path.name, sha256=hashlib.sha256(content).hexdigest(), kernels=kernels)


def _kernels(path: Path, rows: Sequence[Row]) -> Iterator[RawKernel]:
    if any("Metric Name" in row for row in rows):
        raise BadInputError(f"{path} is the details page, which does not hold every stall reason.", _ADVICE)
    header = next((number for number, row in enumerate(rows) if "Kernel Name" in row and "ID" in row), None)
    if header is not None:
        yield from _raw_page(rows[header], rows[header + 1 :])
    elif any(_stalls(row) for row in rows):
        yield from _source_page(rows)
    else:
        raise BadInputError(f"{path} is not a page of stalls: it has neither launches nor stall columns.", _ADVICE)


# --- a launch per row


def _raw_page(names: Row, rows: Sequence[Row]) -> Iterator[RawKernel]:
    units: Mapping[str, str] = {}
    for row in rows:
        if row[: len(names)] == names:
            continue  # the header again
        cells = dict(zip(reversed(names), reversed(_filled(row, len(names))), strict=True))  # of two, the first
        if not cells["ID"]:
            units = cells
            continue
        found = {name: _value(cell, units.get(name, "")) for name, cell in cells.items() if "__" in name}
        metrics = {name: value for name, value in found.items() if value is not None}
        yield RawKernel(function=cells["Kernel Name"].split("(")[0], metrics=metrics, totals=_totals(metrics))


def _totals(metrics: Mapping[str, Value]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for name, value in metrics.items():
        if name.startswith(SAMPLED) and not name.endswith("_not_issued") and isinstance(value, int | float):
            reason = canonical(name.removeprefix(SAMPLED))
            totals[reason] = totals.get(reason, 0) + round(value)
    return totals


def _value(cell: str, unit: str) -> Value | None:
    """A cell's value in base units; None for an empty cell."""
    number = _number(cell)
    if number is None:
        return None if cell.strip() in ("", "-", "n/a", "nan") else cell
    known = _UNIT.fullmatch(_SHORT_UNITS.get(unit, unit))
    if known is None:
        return number
    return number * _FACTORS[known[2].lower()].get(known[1].lower(), 1)


def _number(cell: str) -> float | None:
    """ "1,215.50" -> 1215.5; None if it is not a number.  A cell with instances, "5 (1; 4)", is their sum, 5."""
    text = cell.split("(")[0].strip().replace(",", "")
    try:
        value = float(text)
    except ValueError:
        return None
    return None if value != value else value


# --- a line or an instruction per row


def _source_page(rows: Sequence[Row]) -> Iterator[RawKernel]:
    """The blocks of a source page: rows with the names of file and kernel, a header, and the rows below it."""
    kernel, file = "", ""
    names: tuple[str, ...] = ()
    blocks: dict[str, list[tuple[str, dict[str, list[str]]]]] = {}
    for row in rows:
        if row[0] in ("Kernel Name", "Function Name") and len(row) > 1 and not _stalls(row):
            kernel = row[1].split("(")[0]
        elif row[0] == "File Path" and not _stalls(row):
            file = row[1]
        elif _stalls(row):
            names = tuple(row)
        elif names:
            cells: dict[str, list[str]] = {}
            for name, cell in zip(names, _filled(row, len(names)), strict=True):
                cells.setdefault(name, []).append(cell)
            blocks.setdefault(kernel, []).append((file, cells))
    for name, found in blocks.items():
        yield _listing(name, found)


def _listing(kernel: str, rows: Sequence[tuple[str, dict[str, list[str]]]]) -> RawKernel:
    """The instructions, or the lines if there are none: both have the same samples."""
    instructions: list[Point] = []
    lines: list[Point] = []
    texts: dict[str, dict[int, str]] = {}
    number = 0
    for file, cells in rows:
        sources = cells.get("Source", [""])
        line, address = _number(cells.get("Line No", [""])[0]), _address(cells.get("Address", [""])[0])
        samples = _samples(cells)
        if line is not None:
            number = int(line)
            texts.setdefault(file, {})[number] = sources[0]
            lines.append(Point(0, file, number, "", samples))
        if address is not None:
            instructions.append(Point(address, file if number else "", number, sources[-1].strip(), samples))
    points = tuple(sorted(instructions, key=lambda point: point.address) or lines)
    totals: dict[str, int] = {}
    for point in points:
        for reason, count in point.samples.items():
            totals[reason] = totals.get(reason, 0) + count
    return RawKernel(function=kernel, metrics={}, totals=totals, points=points, excerpts=texts)


def _samples(cells: Mapping[str, list[str]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, values in cells.items():
        match, count = _STALL.fullmatch(name), _number(values[0])
        if match and count:
            reason = canonical(match[1])
            found[reason] = found.get(reason, 0) + round(count)
    return found


def _stalls(row: Row) -> bool:
    """Whether a row is a header with stall reasons."""
    return any(_STALL.fullmatch(cell) for cell in row)


def _address(text: str) -> int | None:
    """None if it is not an address: "-" on the row of a line, "..." for omitted instructions of other lines."""
    digits = re.fullmatch(r"(?:0x)?([0-9a-fA-F]+)", text.strip())
    return int(digits[1], 16) if digits else None


def _filled(row: Row, length: int) -> list[str]:
    """The row, filled up to one cell for every name."""
    return [*row[:length], *[""] * (length - len(row))]
