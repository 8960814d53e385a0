"""Folders of reports: how they are written, resumed after an interruption, and read.

A folder has a header, run.json, which is written once, and a file cases.N.jsonl for each process
N, which only grows.  A line of such a file is one of these:

    {"case": ...}       a case, or what is new in a case that an earlier line began
    {"process": ...}    the results of the process that belong to no case; the last such line counts

Every file has one writer, which holds its lock, so a reader can see whether the process is still
running.  However a process ends, by SIGKILL too, at most the case in progress is lost.  The same
command with --out and the same folder resumes after the last case.

`ssdprof ... --json` prints a report as one document, which can be read as well.
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
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError

from ssdprof.core.base import VERSION
from ssdprof.core.case import Case
from ssdprof.core.report import LeftOut, ProcessLine, Report
from ssdprof.core.target import LayerRef
from ssdprof.core.words import plural
from ssdprof.environment.child import run_sampler, tell
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
from ssdprof.store.ranks import FIRST_RANK, POLL_S, Ranks

RUNS = Path("runs")
KINDS = ("run", "bench", "prefill", "answers")  # kinds of reports that are kept under RUNS
HEADER = "run.json"
DOCUMENT = "report.json"  # what --json printed, in a folder of its own
CAPTURES = "captures"
FAILURES = "failures"  # calls that failed: see `jobs.failures`
# Seconds.  A process's line, parts of which change often, is written at most once in this time.
_FLUSH_S = 0.5
_VERSION_HINT = "Use the ssdprof that wrote it, or measure again."
# the message and the hint if another process holds the lock: see `files.locked`
_LOCKED = ("Another run is writing into", "Wait for it to end, or name another folder with --out.")
# fields of a header that may differ if the same request is run twice
_MAY_DIFFER = {"version", "id", "created", "placement", "notes", "cases", "processes"}
# field of a header -> the end of "it holds an interrupted run of ...", if the request has another
# value of the field
_FAULT_BY_FIELD = {
    "model": "another model",
    "prompts": "another prompt",
    "environment": "another machine or other libraries",
    "ssdprof_version": "another ssdprof",
    "commit": "another commit",
}
_PROCESS: TypeAdapter[ProcessLine] = TypeAdapter(ProcessLine)


class Writer:
    """Appends the lines of one process to its file.

    folder: of the report.
    report: the report as far as this process knows it, which does not include other processes.
    earlier: name -> case, of the cases that were there before: those of an interrupted process that
        this one resumes, or for a sampler those of the ranks.
    """

    def __init__(self, folder: Path, header: Report, file: BinaryIO | None) -> None:
        """file: opened for appending, and locked; None to keep the report in memory only."""
        lines, line = _lines(Path(file.name)) if file else ([], None)
        self.folder = folder
        self.earlier = _joined(lines)
        line = line or ProcessLine(process=uuid4().hex[:8])
        cases = tuple(self.earlier.values())
        self.report = header.changed(cases=cases, processes=(line,))
        self._file = file
        self._on_disk: ProcessLine | None = None
        self._due_s = 0.0
        self._cases = dict(self.earlier)

    @property
    def process(self) -> str:
        """The name of this process, which its samples have, too."""
        return self.report.first.process

    @property
    def captures(self) -> Path:
        """Where `--save-captures` stores the operators' inputs."""
        return self.folder / CAPTURES

    @property
    def has_cases(self) -> bool:
        """Whether there are results to keep."""
        return bool(self._cases)

    def case(self, case: Case) -> None:
        """Append a case.  If it was appended before, append it without its accuracy, unless that
        has changed.  Its layer is noted as captured.
        """
        if case.layer:
            self.captured(case.layer)
        known = self._cases.get(case.name)
        line = case.changed(accuracy=()) if known and known.accuracy == case.accuracy else case
        self._write({"case": line.model_dump(mode="json", exclude_defaults=True)})
        self._cases[case.name] = known.joined(case) if known else case
        self.report = self.report.model_copy(update={"cases": tuple(self._cases.values())})

    def captured(self, layer: LayerRef) -> None:
        """Note that the inputs of a layer were captured."""
        if layer not in self.report.first.captured:
            self.update(captured=(*self.report.first.captured, layer))

    def update(self, **fields: Any) -> None:
        """Change fields of the process's line (`ProcessLine`), and write it if the last time was
        long enough ago.

        clocks: the latest reading; None if they could not be read.
        """
        before = self.report.first.clocks
        if before and "clocks" in fields:
            fields["clocks"] = before.until(fields["clocks"] or before)
        line = ProcessLine(**(self.report.first.field_values | fields))
        self.report = self.report.model_copy(update={"processes": (line,)})
        if time.monotonic() >= self._due_s:
            self.flush()

    def flush(self) -> None:
        """Write the process's line if it has changed."""
        line = self.report.first
        if line != self._on_disk:
            self._write({"process": line.model_dump(mode="json", exclude_defaults=True)})
            self._on_disk = line
            self._due_s = time.monotonic() + _FLUSH_S

    def leave_out(self, case_key: str, reason: str, implementations: tuple[str, ...] = ()) -> None:
        """Note that requested cases are not measured: see `LeftOut`.

        implementations: empty if all implementations are left out.
        """
        left_out = LeftOut(case_key=case_key, reason=reason, implementations=implementations)
        self.update(left_out=(*self.report.left_out, left_out))

    def note(self, text: str) -> None:
        """Add a sentence for the reader, unless it is empty or was added before."""
        if text and text not in self.report.remarks:
            self.update(notes=(*self.report.first.notes, text))

    def doubt(self, layer: int, sentences: Iterable[str]) -> None:
        """Note sentences on how the inputs of a layer differ from those of any model."""
        doubts = dict(self.report.first.doubts)
        for text in sentences:
            doubts[text] = tuple(dict.fromkeys((*doubts.get(text, ()), layer)))
        if doubts != self.report.first.doubts:
            self.update(doubts=doubts)

    def peaked(self, size: int) -> None:
        """Note the peak of this process's GPU memory so far, in bytes; 0 if it uses no GPU."""
        if size:
            self.update(peak_bytes=max(size, self.report.first.peak_bytes or 0))

    def note_gates(self, layer: int, heads: Callable[[], tuple[int, ...]]) -> None:
        """Note how many heads of a layer forget within which time, unless it was noted before.

        heads: () -> the numbers of heads (see `ProcessLine.gates`); it is called only if need be.
        """
        gates = self.report.first.gates
        if str(layer) not in gates:
            self.update(gates=gates | {str(layer): heads()})

    def _write(self, line: dict[str, object]) -> None:
        """Append a line to the file, if there is one.

        Raises MissingCapabilityError if it cannot be written, or if the report was removed.
        """
        if self._file is None:
            return
        try:
            if not os.path.isfile(self.folder / HEADER):
                raise FileNotFoundError(errno.ENOENT, "It was removed")
            text = json.dumps(line, separators=(",", ":"), allow_nan=False)
            self._file.write(text.encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise unwritable(self.folder, error) from error


def check_folder(out: Path | None) -> None:
    """Raise what `opened` would raise for a folder whatever the request is, before a model is
    loaded: the folder cannot be written, another process is writing into it, or it has a report
    that is complete or damaged, or a document.
    """
    check_writable(out or RUNS)
    if out and (file := out / f"cases.{FIRST_RANK}.jsonl").exists():
        with locked(file, *_LOCKED):
            pass
    if out and header_of(out).exists():
        _interrupted(out)


def _interrupted(folder: Path) -> Report:
    """The interrupted report in a folder that has a report.

    Raises BadInputError if the report is complete or cannot be read, and if the folder has a whole
    document, which would be read instead of what is written beside it.
    """
    header = header_of(folder)
    is_document = header.name == DOCUMENT or _document(header).cases
    report = None if is_document else _folder(folder)
    if report is None or report.complete:
        raise BadInputError(f"{folder} holds a run already.", "Name another folder with --out.")
    return report


def _refuse_another(folder: Path, header: Report, sources: Iterable[Path]) -> None:
    """Raise BadInputError unless the report in a folder can be resumed.

    It can if it was interrupted, its request is that of `header`, and the files `sources`, which
    must exist, have not changed since it began.
    """
    interrupted = _interrupted(folder)
    began = datetime.fromisoformat(interrupted.created).timestamp()  # in whole seconds
    changed = [path for path in sources if path.stat().st_ctime > began + 1]
    fault = f"from before {changed[0]} was changed" if changed else ""
    now = _request(header)
    differing = [name for name, value in _request(interrupted).items() if value != now[name]]
    if differing:
        fault = f"of {_FAULT_BY_FIELD.get(differing[0], 'another request')}"
    if fault:
        command = shlex.join([*_without_folder(interrupted.command), "--out", str(folder)])
        hint = f"Name another folder with --out, or resume that run: {command}"
        raise BadInputError(f"{folder} holds an interrupted run {fault}.", hint)


def _request(header: Report) -> dict[str, object]:
    """The fields of a header that are equal if the same request is run twice, with the command
    without its folder.
    """
    fields = {name: value for name, value in header.field_values.items() if name not in _MAY_DIFFER}
    return fields | {"command": _without_folder(header.command)}


def _without_folder(command: Sequence[str]) -> list[str]:
    """The words of a command without `--out DIR` and `--out=DIR`."""
    words = []
    is_value_of_out = False
    for word in command:
        if not is_value_of_out and word != "--out" and not word.startswith("--out="):
            words.append(word)
        is_value_of_out = word == "--out"
    return words


@contextmanager
def opened(
    out: Path | None,
    watcher: Watcher,
    ranks: Ranks | None = None,
    sources: Callable[[], Iterable[Path]] = tuple,
    sampler: int = 0,
    **fields: Any,
) -> Iterator[Writer]:
    """Write a report while the context is open.

    If the folder has an interrupted report of the same request, this process resumes it: its cases
    are `Writer.earlier`.  At the end of the context, the first process starts the further samplers
    that the report asks for.  After an exception the cases that were measured stay, and the user is
    told where they are.  Without a case the files are removed.

    out: the folder; None for `runs/<time>-<target>/`.
    ranks: the processes that share the cases; None if this is the only one.  The first one makes
        the folder, and waits for the others at the end.
    sources: () -> the files on which the results depend and which `fields` do not describe.
    sampler: the number of this process if it only adds samples to the report in `out`; else 0, and
        the other arguments describe the report.
    fields: see `draft`.

    Raises BadInputError if `out` has another report, if a file is in its place, or if another
    process is writing into it; MissingCapabilityError if it cannot be written, or if a rank died.
    """
    if sampler:
        assert out
        with _sampled(out, sampler) as writer:
            yield writer
        return
    began = time.monotonic()
    header = draft(**fields)
    rank = ranks.rank if ranks else FIRST_RANK
    path = _folder_of(out, header, ranks)
    header = header.changed(id=path.absolute().name, ranks=ranks.count if ranks else 1)
    is_new = not path.exists()
    with locked(path / f"cases.{rank}.jsonl", *_LOCKED) as file:
        if rank == FIRST_RANK:
            _begin(path, header, sources)
        if ranks:
            _tell_open(path, ranks)
        writer = _resumed(path, header, file, watcher)
        earlier_seconds = writer.report.first.seconds  # of the interrupted process
        tell(f"report {rank} {path.resolve()}")
        try:
            yield writer
            if rank == FIRST_RANK:
                _sample_in_others(writer, watcher)
            seconds = earlier_seconds + time.monotonic() - began
            writer.update(complete=True, seconds=round(seconds, 3))
            writer.flush()
            if ranks and ranks.is_first:
                _wait(path, ranks)
        except BaseException as error:
            _clean_up(writer, error, watcher, ranks, is_new)
            raise


def _folder_of(out: Path | None, header: Report, ranks: Ranks | None) -> Path:
    """The folder of the report.  The first rank chooses it, and the others wait for its name."""
    if ranks and not ranks.is_first:
        return Path(ranks.told("folder", FIRST_RANK))
    return out or new_folder(header.target)


def _begin(path: Path, header: Report, sources: Callable[[], Iterable[Path]]) -> None:
    """Write the header, unless the folder has an interrupted report that can be resumed.  Files of
    cases without a header are emptied.

    Raises BadInputError if the folder has any other report.
    """
    if header_of(path).exists():
        _refuse_another(path, header, sources())
        return
    for stale in path.glob("cases.[0-9]*.jsonl"):
        os.truncate(stale, 0)
    write_text(path / HEADER, header.model_dump_json(exclude_defaults=True, indent=1) + "\n")


def _tell_open(path: Path, ranks: Ranks) -> None:
    """Tell the other ranks that this one has opened its file, and if it is the first one, where."""
    if ranks.is_first:
        ranks.tell("folder", str(path.resolve()))
    ranks.tell(f"{ranks.rank}/open")


def _resumed(path: Path, header: Report, file: BinaryIO, watcher: Watcher) -> Writer:
    """The writer of a file, which may have cases of an interrupted process."""
    _cut(file)
    writer = Writer(path, header, file)
    if os.path.getsize(file.name):
        # This process has a name of its own, and tries again what the interrupted one left out.
        writer.update(process=uuid4().hex[:8], left_out=(), complete=False, ended="")
    if writer.has_cases:
        watcher.say(f"{path} has {plural(len(writer.earlier), 'case')}, and goes on.")
    return writer


def _sample_in_others(writer: Writer, watcher: Watcher) -> None:
    """Start the further samplers of the report, one after another, each of which is a process that
    samples every case.  Samplers that completed before an interruption are not started again.
    """
    header = writer.report
    for number in range(header.ranks, header.process_count):
        if not _last(writer.folder, number).complete:
            with watcher.step(f"Process {number + 1} of {header.samplers}"):
                run_sampler(writer.folder, number)


@contextmanager
def _sampled(folder: Path, number: int) -> Iterator[Writer]:
    """`opened` for a sampler.  `Writer.earlier` are the cases of the ranks, which it samples again.
    What the sampler itself wrote before an interruption is dropped.

    number: of the process.
    """
    with locked(folder / f"cases.{number}.jsonl", *_LOCKED) as file:
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
    """Store why the report ended with an error.  Tell the user where its cases are, unless another
    rank died: then its error is all that the user reads.  Remove a report without a case.

    is_new: whether the folder did not exist before this report.

    Raises the error of a rank that died, or a KeyboardInterrupt with the sentence for the user.
    """
    with uninterrupted():
        # if another rank died, that is the cause: torchrun then interrupts this one
        death = _dead(writer.folder, ranks) if ranks else None
        sentence = _note_end(writer, death or error)
        if not writer.has_cases and (ranks is None or ranks.is_first):
            _remove_empty(writer.folder, is_new)
    if death:
        raise death from None
    if isinstance(error, KeyboardInterrupt):
        raise KeyboardInterrupt(sentence) from None
    if writer.has_cases:
        watcher.say(sentence)


def _remove_empty(folder: Path, is_new: bool) -> None:
    """Remove a report, unless a process has written a case.

    is_new: whether to remove the folder, too.
    """
    files = [*folder.glob("cases.[0-9]*.jsonl")]
    if any(b'{"case":' in file.read_bytes() for file in files):
        return
    for file in (*files, folder / HEADER):
        file.unlink(missing_ok=True)
    if is_new:
        with suppress(OSError):  # it has other files, or was removed
            folder.rmdir()


def _note_end(writer: Writer, error: BaseException) -> str:
    """Store why the process ended, if it has cases.  Returns a sentence that says where they are,
    that there are none, or that they were lost because somebody removed the report.
    """
    if not writer.has_cases:
        return "Nothing had been compared yet, and no report is kept."
    if isinstance(error, KeyboardInterrupt):
        reason = "interrupted"
    elif isinstance(error, SsdprofError):
        reason = error.message.rstrip(".")
    else:
        reason = library_message(error)
    with suppress(SsdprofError):  # the error may be that the disk is full
        writer.update(ended=reason)
        writer.flush()
    report = writer.report
    if not (writer.folder / HEADER).is_file():
        return "What was done could not be kept."
    answers = len(report.of_answers)
    cases = len(report.cases) - answers
    parts = []
    if cases or not answers:
        of_layers = f" of {plural(len(report.captured), 'layer')}" if report.captured else ""
        parts.append(plural(cases, "case") + of_layers)
    if answers:
        parts.append(f"{plural(answers, 'case')} of answers")
    kept = f"What was done is kept in {writer.folder}, marked as partial: {' and '.join(parts)}."
    return f"{kept}  The same command with --out {shlex.quote(str(writer.folder))} goes on."


def close(folder: Path, rank: int, case: str, why: str) -> Report | None:
    """Store why the process of a rank ended, which the process itself could not.

    Returns the report; None if there is none, or if the rank has no case and none was running.

    case: the case that was running, as JSON, which is stored as failed; empty if none was.
    why: the reason.
    """
    file = folder / f"cases.{rank}.jsonl"
    if not file.is_file() or not (folder / HEADER).is_file():
        return None
    with locked(file, *_LOCKED) as opened_file:
        _cut(opened_file)
        complete = _last(folder, rank).complete
        writer = Writer(folder, _document(folder / HEADER), opened_file)
        if case:
            writer.case(Case.model_validate_json(case).changed(status="failed", reason=why))
        elif not writer.has_cases:
            return None
        if not complete:
            writer.update(ended=why)
            writer.flush()
    return load(folder)[1]


def _wait(path: Path, ranks: Ranks) -> None:
    """Wait until every other rank has closed its file.

    Raises MissingCapabilityError if one ended before its share was done.
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
    """The error for another rank that died; None if none did.

    A rank that completed its share, or stored why it ended, does not count as dead.  The first rank
    always does when it has ended.
    """
    for rank in range(ranks.count):
        if rank != ranks.rank and not ranks.alive(rank):
            last = _last(path, rank)
            if rank == FIRST_RANK or not (last.complete or last.ended):
                return ranks.gone(rank)
    return None


def _is_free(file: Path) -> bool:
    """Whether no process is writing into a file: a writer holds the file's lock."""
    with file.open("rb") as opened_file:
        try:
            fcntl.flock(opened_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _cut(file: BinaryIO) -> None:
    """Remove an incomplete last line, whose writer was killed."""
    file.truncate(Path(file.name).read_bytes().rfind(b"\n") + 1)


# --- reading


def load(where: str | os.PathLike[str] | None, *kinds: str) -> tuple[Path, Report]:
    """Read a report.  Returns its folder, or the file of a document, and the report.

    where: the folder of a report, its run.json, a name under `runs/`, or a document that `--json`
        printed; None for the latest report of the kinds under `runs/`.
    kinds: the allowed kinds of reports.  Without any, all are allowed, and the latest report is
        that of kind "run".

    Raises BadInputError if there is no such report, if it cannot be read, or if it is of another
    kind.
    """
    path = _path(where, kinds)
    report = _document(path) if path.is_file() else _folder(path)
    if kinds and report.kind not in kinds:
        raise BadInputError(
            f"{path} is a report of ssdprof {report.kind}.",
            f"Name one of ssdprof {', '.join(kinds)}.",
        )
    return path, report


def latest(*kinds: str) -> Path | None:
    """The newest report under `runs/` of one of the kinds that no process is still writing; None if
    there is none.
    """
    by_age = [
        (report.created, report.id, path)
        for path, report in _each_report(RUNS, _header)
        if isinstance(report, Report) and report.kind in kinds
    ]
    for *_, path in sorted(by_age, reverse=True):
        if all(map(_is_free, path.glob("cases.[0-9]*.jsonl"))):
            return path
    return None


def listed(folder: Path) -> tuple[tuple[Path, Report | SsdprofError], ...]:
    """The reports directly under a folder with their paths, the newest first; none if there is no
    such folder.

    In place of an unreadable report there is the error of reading it.  These come last.
    """

    def age(item: tuple[Path, Report | SsdprofError]) -> tuple[str, Path]:
        path, report = item
        return report.created if isinstance(report, Report) else "", path

    return tuple(sorted(_each_report(folder, _folder), key=age, reverse=True))


def dump(report: Report) -> str:
    """A report as one JSON document, which `load` reads."""
    return report.model_dump_json(exclude_defaults=True, indent=1)


def header_of(folder: Path) -> Path:
    """The document or the header in a folder.  The file may not exist."""
    document = folder / DOCUMENT
    return document if document.is_file() else folder / HEADER


def _header(folder: Path) -> Report:
    return _document(header_of(folder))


def _each_report(
    folder: Path, read: Callable[[Path], Report]
) -> Iterator[tuple[Path, Report | SsdprofError]]:
    """The folders of reports directly under a folder, each with what `read` returns for it, or the
    SsdprofError that it raises; none if there is no such folder.
    """
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if header_of(path).is_file():
            try:
                yield path, read(path)
            except SsdprofError as error:
                yield path, error


def _path(where: str | os.PathLike[str] | None, kinds: tuple[str, ...]) -> Path:
    """The folder or the document of a report: see `load`.  Raises BadInputError if there is no such
    report.
    """
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
    reason = "it does not exist"
    if any(path.is_dir() for path in paths):
        reason = f"it contains no {HEADER}"
    raise BadInputError(
        f"{where} is not a run: {reason}.", f"Name a run's folder; they are kept under {RUNS}/."
    )


def _document(file: Path) -> Report:
    """The report in a header or a document.

    Raises BadInputError if there is none, if it is damaged, or if another version of ssdprof wrote
    it.
    """
    report = read_stored(file, Report.model_validate, VERSION, _VERSION_HINT)
    is_of_tensors = report.kind == "run" and not report.prompts  # `ssdprof.compare` made it
    needs_model = report.kind in ("run", "prefill", "answers") and not is_of_tensors
    if report.model is None and needs_model:
        raise BadInputError(f"{file} is damaged: it has no model.", _VERSION_HINT)
    return report


def _folder(path: Path) -> Report:
    """The report in a folder with the cases of all ranks, in the order in which they were
    requested, and the samples of all samplers.  Raises BadInputError if it cannot be read.
    """
    header = _header(path)
    if header.cases:  # the user gave a whole document the name of a header
        return header
    cases: dict[str, Case] = {}
    processes: list[ProcessLine] = []
    for number in range(header.process_count):
        lines, process = _lines(path / f"cases.{number}.jsonl")
        for name, case in _joined(lines).items():
            if number < header.ranks:
                cases[name] = case
            elif name in cases:
                cases[name] = cases[name].sampled(case)
            else:
                raise BadInputError(
                    f"{path} is damaged: no rank has the case {name}.", _VERSION_HINT
                )
        if process:
            processes.append(process)
    order = {", ".join(parts): number for number, parts in enumerate(header.requested)}
    ordered = sorted(cases.values(), key=lambda case: order.get(case.name, len(order)))
    try:
        return header.changed(cases=tuple(ordered), processes=tuple(processes))
    except ValidationError as error:
        raise BadInputError(f"{path} is damaged: {first_fault(error)}.", _VERSION_HINT) from error


def _joined(lines: Iterable[Case]) -> dict[str, Case]:
    """Name -> the case, with everything that later lines add to it."""
    cases: dict[str, Case] = {}
    for case in lines:
        cases[case.name] = cases[case.name].joined(case) if case.name in cases else case
    return cases


def _lines(file: Path) -> tuple[list[Case], ProcessLine | None]:
    """The cases in a file, and the last line of the process; None if there is none.  A file that
    does not exist has no cases.

    An incomplete last line is ignored: its writer was killed.

    Raises BadInputError for any other line that is damaged, and SsdprofError if the file cannot be
    read.
    """
    if not file.exists():
        return [], None
    cases: list[Case] = []
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
                        f"{file} is damaged: line {number} is neither a case nor a process.",
                        _VERSION_HINT,
                    )
        except ValueError as error:
            fault = f"not JSON: {library_message(error)}"
            if isinstance(error, ValidationError):
                fault = first_fault(error)
            raise BadInputError(
                f"{file} is damaged, line {number}: {fault}.", _VERSION_HINT
            ) from error
    return cases, process


def _last(folder: Path, number: int) -> ProcessLine:
    """The last line of the process with this number; an empty one if there is none."""
    return _lines(folder / f"cases.{number}.jsonl")[1] or ProcessLine()


def _text(file: Path) -> str:
    """The text of a file.  Raises SsdprofError if it cannot be read."""
    try:
        return regular(file).read_text(encoding="utf-8")
    except OSError as error:
        raise unreadable(str(file), error, "Name a run's folder.") from error
    except UnicodeDecodeError as error:
        raise BadInputError(
            f"{file} is not JSON: it is not UTF-8.", "The file may be cut off or damaged."
        ) from error


def new_folder(target: str) -> Path:
    """The path of a new folder runs/<time>-<target>, which is not created yet.

    Its name ends with -2, -3, ... if that folder exists, as when two runs start within a second.
    """
    path = RUNS / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{safe_name(target)}"
    number = 1
    candidate = path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
