"""Folders of reports: run.json, written once, and cases.N.jsonl of each rank, which only grow.

A line is {"case": ...}, a case, or more of a case that an earlier line began, or {"process": ...},
of which the last counts.  Every file has one writer, which holds its lock, so whoever reads knows
who is still at work.  An end of any kind, SIGKILL too, loses at most the case in work, and the same
command on the folder goes on from there.  `ssdprof ... --json` prints a report as one document,
which is read as well.
"""

import errno
import fcntl
import json
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import filterfalse, pairwise
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError

from ssdprof.core.base import VERSION
from ssdprof.core.case import Case
from ssdprof.core.report import LeftOut, ProcessLine, Report
from ssdprof.core.target import LayerRef
from ssdprof.core.words import plural
from ssdprof.environment.child import sample_again, tell
from ssdprof.errors import (
    BadInputError,
    MissingCapabilityError,
    SsdprofError,
    first_fault,
    library_message,
    unreadable,
)
from ssdprof.files import (
    check_writable,
    locked,
    parse_json,
    read_stored,
    regular,
    safe_name,
    uninterrupted,
    unwritable,
    write_text,
)
from ssdprof.progress import Watcher
from ssdprof.store.header import draft
from ssdprof.store.ranks import FIRST, POLL_S, Ranks

RUNS = Path("runs")
HEADER = "run.json"
DOCUMENT = "report.json"  # what --json printed, in a folder of its own
CAPTURES = "captures"
FAILURES = "failures"  # calls that failed: see `jobs.failures`
_LATER = 0.5  # s; what changes often, such as clocks, is written at most so often
_AGAIN = "Use the ssdprof that wrote it, or measure again."
_TAKEN = ("Another run is writing into", "Wait for it to end, or name another folder with --out.")
# of one request, run twice
_MAY_DIFFER = {"version", "id", "created", "placement", "notes", "cases", "processes"}
_WORDS = {
    "model": "another model",
    "prompts": "another prompt",
    "environment": "another machine",
    "ssdprof_version": "another ssdprof",
    "commit": "another commit",
}
_PROCESS: TypeAdapter[ProcessLine] = TypeAdapter(ProcessLine)


class Writer:
    """Appends the lines of one process.  folder: of the report.  report: what this process has of
    it.

    earlier: the cases of a process that was interrupted, by name, if this one goes on.
    """

    def __init__(self, folder: Path, header: Report, file: BinaryIO | None) -> None:
        lines, line = _lines(Path(file.name)) if file else ([], None)
        self.folder = folder
        self.earlier = _joined(lines)
        line = line or ProcessLine(process=uuid4().hex[:8])
        cases = tuple(self.earlier.values())
        self.report = header.changed(cases=cases, processes=(line,), ranks=header.ranks)
        self._file = file
        self._on_disk: ProcessLine | None = None
        self._due_s = 0.0
        self._cases = dict(self.earlier)

    @property
    def process(self) -> str:
        """The name of this process in its samples."""
        return self.report.first.process

    @property
    def captures(self) -> Path:
        """Where `--save-captures` stores the operators' inputs."""
        return self.folder / CAPTURES

    @property
    def begun(self) -> bool:
        """Whether there are results to keep."""
        return bool(self._cases)

    def case(self, case: Case) -> None:
        """Append a case, or its samples or fault if it was appended before.  Notes that its layer
        was captured.
        """
        if case.layer:
            self.captured(case.layer)
        known = self._cases.get(case.name)
        line = case.changed(accuracy=()) if known and known.accuracy == case.accuracy else case
        self._write({"case": line.model_dump(mode="json", exclude_defaults=True)})
        self._cases[case.name] = known.joined(case) if known else case
        self.report = self.report.model_copy(update={"cases": tuple(self._cases.values())})

    def captured(self, layer: LayerRef) -> None:
        if layer not in self.report.first.captured:
            self.update(captured=(*self.report.first.captured, layer))

    def update(self, **fields: Any) -> None:
        """Fields of the process's line (`ProcessLine`): ceilings, peak_bytes, seconds, steps,
        left_out; clocks: the latest reading.
        """
        before = self.report.first.clocks
        if before and "clocks" in fields:
            latest = fields["clocks"] or before  # None: they could not be read
            fields["clocks"] = before.until(latest)
        line = ProcessLine(**(self.report.first.field_values | fields))
        self.report = self.report.model_copy(update={"processes": (line,)})
        if time.monotonic() >= self._due_s:
            self.flush()

    def flush(self) -> None:
        """Write the process's line, if it has changed."""
        line = self.report.first
        if line != self._on_disk:
            self._write({"process": line.model_dump(mode="json", exclude_defaults=True)})
            self._on_disk = line
            self._due_s = time.monotonic() + _LATER

    def leave_out(self, case_key: str, reason: str, implementations: tuple[str, ...] = ()) -> None:
        """Note what is not measured, and why.  implementations: empty: all in this place."""
        left_out = LeftOut(case_key=case_key, reason=reason, implementations=implementations)
        self.update(left_out=(*self.report.left_out, left_out))

    def note(self, text: str) -> None:
        """A sentence for the reader, once; nothing if it is empty."""
        if text and text not in self.report.remarks:
            self.update(notes=(*self.report.first.notes, text))

    def doubt(self, layer: int, sentences: Iterable[str]) -> None:
        """Note what makes a layer's inputs unlike a model's."""
        doubts = dict(self.report.first.doubts)
        for text in sentences:
            doubts[text] = tuple(dict.fromkeys((*doubts.get(text, ()), layer)))
        if doubts != self.report.first.doubts:
            self.update(doubts=doubts)

    def peaked(self, size: int) -> None:
        """The peak of this process's GPU memory so far is `size` bytes; 0: no GPU is used."""
        if size:
            self.update(peak_bytes=max(size, self.report.first.peak_bytes or 0))

    def remembers(self, layer: int, heads: Callable[[], tuple[int, ...]]) -> None:
        """Note how many heads of a layer remember for how long, unless that is known."""
        if (key := str(layer)) not in self.report.first.gates:
            self.update(gates=self.report.first.gates | {key: heads()})

    def _write(self, line: dict[str, object]) -> None:
        if self._file is None:
            return
        try:
            if not os.path.isfile(self.folder / HEADER):
                raise FileNotFoundError(errno.ENOENT, "It was removed")
            self._file.write(
                json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"
            )
            self._file.flush()
        except OSError as error:
            raise unwritable(self.folder, error) from error


def check_folder(out: Path | None) -> None:
    """Raise in advance what `opened` raises for a folder, before a model is loaded."""
    check_writable(out or RUNS)
    if out and (file := out / f"cases.{FIRST}.jsonl").exists():
        with locked(file, *_TAKEN):
            pass
    if out and header_of(out).exists():
        _refuse_complete(out)


def _refuse_complete(folder: Path) -> Report:
    """The interrupted report.  Raises BadInputError for one that is complete, and for a document,
    which would be read instead of what is written.
    """
    header = header_of(folder)
    is_document = header.name == DOCUMENT or _document(header).cases
    if is_document or (report := _folder(folder)).complete:
        raise BadInputError(f"{folder} holds a run already.", "Name another folder with --out.")
    return report


def _refuse_another(folder: Path, header: Report, sources: Iterable[Path]) -> None:
    """BadInputError unless it is an interrupted report of this header, and the `sources` are
    unchanged.
    """
    known = _refuse_complete(folder)
    before, now = _request(known), _request(header)
    began = datetime.fromisoformat(known.created).timestamp()
    changed = [path for path in sources if path.stat().st_ctime > began + 1]
    why = f"from before {changed[0]} was changed" if changed else ""
    if differs := next((name for name in before if before[name] != now[name]), ""):
        why = f"of {_WORDS.get(differs, 'another request')}"
    if why:
        command = shlex.join([*_without_folder(known.command), "--out", str(folder)])
        hint = f"Name another folder with --out.  What goes on there is: {command}"
        raise BadInputError(f"{folder} holds an interrupted run {why}.", hint)


def _request(header: Report) -> dict[str, object]:
    """The fields that are the same if one request is run twice."""
    fields = {name: value for name, value in header.field_values.items() if name not in _MAY_DIFFER}
    return fields | {"command": _without_folder(header.command)}


def _without_folder(command: Sequence[str]) -> list[str]:
    """The words of a command without --out DIR."""
    return [
        word
        for before, word in pairwise(("", *command))
        if "--out" not in (before, word) and not word.startswith("--out=")
    ]


@contextmanager
def opened(
    out: Path | None,
    watcher: Watcher,
    ranks: Ranks | None = None,
    sources: Callable[[], Iterable[Path]] = tuple,
    sampler: int = 0,
    **fields: Any,
) -> Iterator[Writer]:
    """Keep a report while the context is open.

    out: the folder; None: `runs/<time>-<target>/`.  ranks: processes that share the cases; the
    first one makes the folder, and waits at the end for the others.  fields: see `draft`.
    sources: gives the files on which the results depend, and the fields do not.
    sampler: number of a process that only adds samples to the report in `out`.
    After an exception what was done stays, and the user is told where it is; without a case the
    files are removed.
    The same request goes on in the folder of an interrupted report: its cases are `Writer.earlier`.

    Raises BadInputError if `out` has another report, or another process is writing into it;
    MissingCapabilityError if it cannot be written, or if a rank died.
    """
    if sampler:
        assert out
        with _sampled(out, sampler) as writer:
            yield writer
        return
    began = time.monotonic()
    header = draft(**fields)
    rank = ranks.rank if ranks else FIRST
    path = _folder_of(out, header, ranks)
    header = header.changed(
        id=path.absolute().name or path.resolve().name, ranks=ranks.count if ranks else 1
    )
    is_new = not path.exists()
    with locked(path / f"cases.{rank}.jsonl", *_TAKEN) as file:
        if rank == FIRST:
            _begin(path, header, sources)
        if ranks:
            _tell_open(path, ranks)
        writer = _resumed(path, header, file, watcher)
        tell(f"report {rank} {path.resolve()}")
        try:
            yield writer
            if rank == FIRST:
                _sample_in_others(writer, watcher)
            seconds = writer.report.first.seconds or round(time.monotonic() - began, 3)
            writer.update(complete=True, seconds=seconds)
            writer.flush()
            if ranks and ranks.first:
                _wait(path, ranks)
        except BaseException as error:
            _clean_up(writer, error, watcher, ranks, is_new)
            raise


def _folder_of(out: Path | None, header: Report, ranks: Ranks | None) -> Path:
    """The folder of the report, which the first rank chooses."""
    if ranks and not ranks.first:
        return Path(ranks.told("folder", FIRST))
    return out or new_folder(header.target)


def _begin(path: Path, header: Report, sources: Callable[[], Iterable[Path]]) -> None:
    """Write the header.  Raises BadInputError if there is one of another request."""
    if header_of(path).exists():
        _refuse_another(path, header, sources())
        return
    for stale in path.glob("cases.[0-9]*.jsonl"):
        os.truncate(stale, 0)
    write_text(path / HEADER, header.model_dump_json(exclude_defaults=True, indent=1) + "\n")


def _tell_open(path: Path, ranks: Ranks) -> None:
    """Tell the other ranks that this one has opened its file; the first one names the folder."""
    if ranks.first:
        ranks.tell("folder", str(path.resolve()))
    ranks.tell(f"{ranks.rank}/open")


def _resumed(path: Path, header: Report, file: BinaryIO, watcher: Watcher) -> Writer:
    """The writer of a file, after the cases that an interrupted process wrote into it."""
    _cut(file)
    writer = Writer(path, header, file)
    if os.path.getsize(file.name):
        # a process of its own, which tries again what the interrupted one left out
        writer.update(process=uuid4().hex[:8], left_out=(), complete=False, ended="")
    if writer.begun:
        watcher.say(f"{path} has {plural(len(writer.earlier), 'case')}, and goes on.")
    return writer


def _sample_in_others(writer: Writer, watcher: Watcher) -> None:
    """Sample every case in further processes, except those that are complete."""
    header = writer.report
    for number in range(header.ranks, header.files):
        if not _last(writer.folder, number).complete:
            with watcher.step(f"Process {number + 1} of {header.samplers}"):
                sample_again(writer.folder, number)


@contextmanager
def _sampled(folder: Path, number: int) -> Iterator[Writer]:
    """As `opened`, for process `number`: `Writer.earlier` are the cases of the first one."""
    with locked(folder / f"cases.{number}.jsonl", *_TAKEN) as file:
        file.truncate(0)
        writer = Writer(folder, _document(folder / HEADER), file)
        writer.earlier = {case.name: case for case in _folder(folder).cases}
        tell(f"report {number} {folder.resolve()}")
        try:
            yield writer
            writer.update(complete=True)
            writer.flush()
        except BaseException as error:
            with uninterrupted():
                _note_end(writer, error)
            raise


def _clean_up(
    writer: Writer, error: BaseException, watcher: Watcher, ranks: Ranks | None, is_new: bool
) -> None:
    """Keep what was done before an error, and tell the user where it is; remove a report without
    a case.

    is_new: whether this process made the folder.  Raises the error of a rank that died, and a
    KeyboardInterrupt with the sentence for the user.
    """
    with uninterrupted():
        # torchrun interrupts the other ranks after one has died
        died = _dead(writer.folder, ranks) if ranks else None
        kept = _note_end(writer, died or error)
        if not writer.begun and (ranks is None or ranks.first):
            _remove_empty(writer.folder, is_new)
    if died:
        raise died from None
    if isinstance(error, KeyboardInterrupt):
        raise KeyboardInterrupt(kept) from None
    if writer.begun:
        watcher.say(kept)


def _remove_empty(folder: Path, is_new: bool) -> None:
    """Remove a report, unless a process has written a case.  is_new: the folder too."""
    files = [*folder.glob("cases.[0-9]*.jsonl")]
    if any(b'{"case":' in file.read_bytes() for file in files):
        return
    for file in (*files, folder / HEADER):
        file.unlink(missing_ok=True)
    if is_new:
        with suppress(OSError):  # it has other files, or was removed
            folder.rmdir()


def _note_end(writer: Writer, error: BaseException) -> str:
    """Note why the process ended.  Returns a sentence on where its results are."""
    if not writer.begun:
        return "Nothing had been compared yet, and no report is kept."
    why = "interrupted" if isinstance(error, KeyboardInterrupt) else library_message(error)
    if isinstance(error, SsdprofError):
        why = error.message.rstrip(".")
    with suppress(SsdprofError):  # the disk may be what ended it
        writer.update(ended=why)
        writer.flush()
    report = writer.report
    if not (writer.folder / HEADER).is_file():
        return "What was done could not be kept."
    answers = len(report.of_answers)
    cases = len(report.cases) - answers
    of = f" of {plural(len(report.captured), 'layer')}" if report.captured else ""
    parts = [plural(cases, "case") + of] if cases or not answers else []
    parts += [f"{plural(answers, 'case')} of answers"] if answers else []
    kept = f"What was done is kept in {writer.folder}, marked as partial: {' and '.join(parts)}."
    return f"{kept}  The same command with --out {shlex.quote(str(writer.folder))} goes on."


def close(folder: Path, rank: int, case: str, why: str) -> Report | None:
    """Note why the process of a rank ended, in its file: the process itself could not.  Returns the
    report; None if there is none.

    case: the one that ran then, as JSON; empty if none did.
    """
    file = folder / f"cases.{rank}.jsonl"
    if not file.is_file() or not (folder / HEADER).is_file():
        return None
    with locked(file, *_TAKEN) as opened_file:
        _cut(opened_file)
        complete = _last(folder, rank).complete
        writer = Writer(folder, _document(folder / HEADER), opened_file)
        if case:
            writer.case(Case.model_validate_json(case).changed(status="failed", reason=why))
        elif not writer.begun:
            return None
        if not complete:
            writer.update(ended=why)
            writer.flush()
    return load(folder)[1]


def _wait(path: Path, ranks: Ranks) -> None:
    """Wait until every other rank has closed its file.  MissingCapabilityError if one ended before
    its share was done.
    """
    for rank in range(ranks.count):
        if rank == ranks.rank:
            continue
        ranks.told(f"{rank}/open", rank)
        while not _is_free(path / f"cases.{rank}.jsonl"):
            time.sleep(POLL_S)
        last = _last(path, rank)
        if not last.complete:
            error = ranks.gone(rank)
            if last.ended:
                raise MissingCapabilityError(
                    f"Rank {rank} of {ranks.count} ended: {last.ended}.", error.hint
                )
            raise error


def _dead(path: Path, ranks: Ranks) -> MissingCapabilityError | None:
    """The error for another rank that died; None if there is none.

    A rank that noted why it ended left a message of its own.
    """
    for rank in range(ranks.count):
        if rank != ranks.rank and not ranks.alive(rank):
            last = _last(path, rank)
            if rank == FIRST or not (last.complete or last.ended):
                return ranks.gone(rank)
    return None


def _is_free(file: Path) -> bool:
    """Whether no process holds its lock."""
    with file.open("rb") as opened_file:
        try:
            fcntl.flock(opened_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _cut(file: BinaryIO) -> None:
    """Cut off a line that was not written to its end."""
    file.truncate(Path(file.name).read_bytes().rfind(b"\n") + 1)


# --- reading


def load(where: str | Path | None, *kinds: str) -> tuple[Path, Report]:
    """The folder, or the file, and the report.

    where: a report's folder, its run.json, a name under `runs/`, a document that --json printed, or
        None for the latest report of the kinds under `runs/`.
    Raises BadInputError if there is none, if it cannot be read, or if it is of another kind.
    """
    path = _path(where, kinds)
    report = _document(path) if path.is_file() else _folder(path)
    if kinds and report.kind not in kinds:
        raise BadInputError(
            f"{path} is a report of ssdprof {report.kind}.", f"Name one of ssdprof {kinds[0]}."
        )
    return path, report


def latest(*kinds: str) -> Path | None:
    """The report under `runs/` that was started last, of one of the kinds, and that no process is
    still writing.
    """
    started = [
        (report.created, report.id, path)
        for path, report in _readable(RUNS, _header)
        if isinstance(report, Report) and report.kind in kinds
    ]
    newest_first = (path for *_, path in sorted(started, reverse=True))
    return next(filterfalse(_is_written_now, newest_first), None)


def _is_written_now(folder: Path) -> bool:
    return not all(map(_is_free, folder.glob("cases.[0-9]*.jsonl")))


def listed(folder: Path) -> tuple[tuple[Path, Report | SsdprofError], ...]:
    """The reports directly under `folder`, the newest first, unreadable ones last, with what is
    wrong with them.
    """
    reports = _readable(folder, _folder)
    return tuple(
        sorted(reports, key=lambda each: (getattr(each[1], "created", ""), each[0]), reverse=True)
    )


def dump(report: Report) -> str:
    """One JSON document, which `load` reads."""
    return report.model_dump_json(exclude_defaults=True, indent=1)


def header_of(folder: Path) -> Path:
    """The file with which the report in a folder begins; it may not exist."""
    document = folder / DOCUMENT
    return document if document.is_file() else folder / HEADER


def _header(folder: Path) -> Report:
    return _document(header_of(folder))


def _readable(
    folder: Path, read: Callable[[Path], Report]
) -> Iterator[tuple[Path, Report | SsdprofError]]:
    """Folders of reports directly under `folder`, with what `read` gives or raises."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if header_of(path).is_file():
            try:
                yield path, read(path)
            except SsdprofError as error:
                yield path, error


def _path(where: str | Path | None, kinds: tuple[str, ...]) -> Path:
    """The folder or the file of a report: see `load`."""
    if where is None:
        newest = latest(*(kinds or ("run",)))
        if newest is None:
            raise BadInputError(
                f"There is no run under {RUNS.resolve()}.",
                "Make one with 'ssdprof run MODEL', or name a run's folder.",
            )
        return newest
    if not str(where).strip():
        raise BadInputError(
            "The run's name is empty.", "Name a run's folder, or leave it out for the latest run."
        )
    paths = (Path(where), RUNS / where)
    for path in paths:
        if path.is_file():
            return path.parent if path.name == HEADER else path
        if header_of(path).is_file():
            return path
    why = f"it contains no {HEADER}" if any(map(Path.is_dir, paths)) else "it does not exist"
    raise BadInputError(
        f"{where} is not a run: {why}.", f"Name a run's folder; they are kept under {RUNS}/."
    )


def _document(file: Path) -> Report:
    """The report in a header or a document.  Raises BadInputError if there is none, if it is
    damaged, or if another version of ssdprof wrote it.
    """
    report = read_stored(file, Report.model_validate, VERSION, _AGAIN)
    of_tensors = report.kind == "run" and not report.prompts  # of `ssdprof.compare`
    if report.model is None and report.kind in ("run", "prefill", "answers") and not of_tensors:
        raise BadInputError(f"{file} is damaged: it has no model.", _AGAIN)
    return report


def _folder(path: Path) -> Report:
    """The report with the cases of all ranks, in the order in which they were requested."""
    header = _header(path)
    if header.cases:  # a whole document, which the user gave this name
        return header
    cases: dict[str, Case] = {}
    processes: list[ProcessLine] = []
    for number in range(header.files):
        lines, process = _lines(path / f"cases.{number}.jsonl")
        for name, case in _joined(lines).items():
            is_sampler = number >= header.ranks
            cases[name] = cases[name].sampled(case) if is_sampler else case
        if process:
            processes.append(process)
    order = {", ".join(parts): number for number, parts in enumerate(header.requested)}
    ordered = sorted(cases.values(), key=lambda case: order.get(case.name, len(order)))
    try:
        return header.changed(cases=tuple(ordered), processes=tuple(processes))
    except ValidationError as error:
        raise BadInputError(f"{path} is damaged: {first_fault(error)}.", _AGAIN) from error


def _joined(lines: Iterable[Case]) -> dict[str, Case]:
    """A case of each name."""
    cases: dict[str, Case] = {}
    for case in lines:
        cases[case.name] = cases[case.name].joined(case) if case.name in cases else case
    return cases


def _lines(file: Path) -> tuple[list[Case], ProcessLine | None]:
    """The cases, and the last line of the process.  A last line without its end is left out: its
    process was killed.
    """
    if not file.exists():
        return [], None
    cases = list[Case]()
    process = None
    for number, line in enumerate(_text(file).split("\n")[:-1], start=1):
        try:
            match parse_json(line):
                case {"case": fields}:
                    cases.append(Case.model_validate(fields))
                case {"process": fields}:
                    process = _PROCESS.validate_python(fields)
                case _:
                    raise BadInputError(
                        f"{file} is damaged: line {number} is neither a case nor a process.", _AGAIN
                    )
        except ValidationError as error:
            raise BadInputError(
                f"{file} is damaged, line {number}: {first_fault(error)}.", _AGAIN
            ) from error
        except ValueError as error:
            what = f"not JSON: {library_message(error)}"
            raise BadInputError(f"{file} is damaged, line {number}: {what}.", _AGAIN) from error
    return cases, process


def _last(folder: Path, number: int) -> ProcessLine:
    """The last line of a process; an empty one if there is none."""
    return _lines(folder / f"cases.{number}.jsonl")[1] or ProcessLine()


def _text(file: Path) -> str:
    try:
        return regular(file).read_text(encoding="utf-8")
    except OSError as error:
        raise unreadable(str(file), error, "Name a run's folder.") from error
    except UnicodeDecodeError as error:
        raise BadInputError(
            f"{file} is not JSON: it is not UTF-8.", "The file may be cut off or damaged."
        ) from error


def new_folder(target: str) -> Path:
    """runs/<time>-<target>, or the same with -2, -3, ... if it exists: two runs may start within
    one second.
    """
    path = RUNS / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{safe_name(target)}"
    number = 1
    candidate = path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
