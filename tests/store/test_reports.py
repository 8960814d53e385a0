"""Folders of reports: what is on the disk after any end, two writers, the latest report, and
damaged documents.
"""

import errno
import json
import re
import shutil
import subprocess
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import cases
import pytest
from cases import case, failed, of_answers, samples, timed
from fakes import denied
from torchrun import python

from ssdprof.core.case import Case
from ssdprof.core.report import LeftOut
from ssdprof.core.target import Serving
from ssdprof.errors import BadInputError, ExitCode, MissingCapabilityError
from ssdprof.files import safe_name
from ssdprof.progress import Watcher
from ssdprof.store.header import draft
from ssdprof.store.ranks import Ranks
from ssdprof.store.reports import (
    DOCUMENT,
    HEADER,
    RUNS,
    check_folder,
    dump,
    latest,
    listed,
    load,
    opened,
)

pytestmark = pytest.mark.usefixtures("in_empty_folder")
GOES_ON = "The same command with --out out goes on."


def header(kind: str = "run", target: str = "org/model", **fields) -> dict[str, Any]:
    known = {"kind": kind, "target": target, "command": ("ssdprof", kind), "baseline": "unfused"}
    return known | {"model": cases.checkpoint(), "environment": cases.environment()} | fields


def writing(folder: str | Path | None, ranks: Ranks | None = None, **fields):
    """The context of a report in a folder."""
    return opened(folder and Path(folder), Watcher(), ranks, **header(**fields))


def store(name: str | None, *made: Case, kind: str = "run", **fields) -> Path:
    with writing(RUNS / name if name else None, kind=kind, **fields) as writer:
        for one in made or (case("unfused"), case()):
            writer.case(one)
    return writer.folder


# --- writing and reading


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_report_is_read_back_as_it_was_written():
    clocks = cases.clocks()
    left = LeftOut(case_key="layer 9", reason="spent")
    requested = tuple(map(cases.requested, (case("unfused"), case())))
    with writing(None, requested=requested, notes=("Random weights.",)) as writer:
        for remark in ("Each key head was taken once.", "", "Each key head was taken once."):
            writer.note(remark)
        writer.case(case())
        writer.case(case("unfused"))
        writer.update(clocks=clocks, left_out=(left,), seconds=2.5)
        writer.peaked(7)
        writer.peaked(5)
        assert not load(writer.folder)[1].complete
    path, report = load(writer.folder)
    assert path == writer.folder
    assert report.id == path.name
    assert path.parent == RUNS
    assert report.complete
    # in the requested order
    assert [one.implementation for one in report.cases] == ["unfused", "fused"]
    assert report.changed(cases=writer.report.cases, id=writer.report.id) == writer.report.changed(
        id=report.id
    )
    assert report.captured == (case().layer,)
    family, *remarks = (one for one in report.remarks if one != "Random weights.")
    assert family.startswith("ibm-granite/granite-4.0 is a family of models")
    assert remarks == ["Each key head was taken once."]
    assert (report.clocks, report.left_out, report.peak_bytes) == (clocks, (left,), 7)
    assert report.seconds < 2.5  # the seconds until the end, and not those that were written before
    for where in (path.name, path / "run.json", str(path), None):
        assert load(where) == (path, report)


def test_a_case_is_two_lines_and_its_errors_are_written_once():
    verified = case()
    done = case(samples=timed(50.0, 70.0))
    with writing(None) as writer:
        writer.case(verified)
        assert load(writer.folder)[1].cases == (verified,)
        writer.case(done)
        assert load(writer.folder)[1].cases == writer.report.cases == (done,)
    lines = [
        json.loads(line) for line in (writer.folder / "cases.0.jsonl").read_text().splitlines()
    ]
    assert ["accuracy" in line["case"] for line in lines if "case" in line] == [True, False]
    assert load(None)[1].cases == (done,)


def test_a_later_line_with_other_errors_or_a_fault_counts():
    wrong = failed(case())
    fault = case("unfused").changed(later_fault="after it was timed: head 3")
    folder = store(None, case("unfused"), case(), wrong, fault)
    assert load(folder)[1].cases == (fault, wrong)


def test_a_process_line_is_written_at_most_twice_a_second_and_samples_name_it(monkeypatch):
    monkeypatch.setattr(time, "monotonic", count(0.0, 0.01).__next__)
    with writing(None) as writer:
        for peak in range(200):
            writer.update(peak_bytes=peak)
        writer.case(case(samples=(samples("device", 50.0, process=writer.process),)))
    assert (writer.folder / "cases.0.jsonl").read_text().count("\n") < 10
    _, report = load(None)
    assert report.peak_bytes == 199
    assert [each.process for one in report.cases for each in one.samples] == [report.first.process]


@pytest.mark.parametrize(
    ("seqlen", "serving", "longest"),
    [
        (2048, Serving(), None),
        (2049, Serving(), "2,049"),
        (2048, Serving(decode=4), "2,052"),
        (5000, Serving(packed=(2500, 2500)), "2,500"),  # each runs separately
        (3000, Serving(chunk=1000), "3,000"),
    ],
)
def test_a_sequence_beyond_the_trained_context_is_noted(seqlen, serving: Serving, longest):
    model = cases.checkpoint(trained_context=2048, siblings=())
    said = draft(**header(model=model, prompts=(cases.prompt(seqlen, serving=serving),))).notes
    begins = [f"The model was trained on 2,048 tokens and ran on {longest}: "] if longest else []
    assert [note[: len(begins[0])] for note in said] == begins


# --- folders


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("ibm-granite/granite-4.0-h-small", "granite-4.0-h-small"),
        ("/data/my models/x y/", "x-y"),
        ("../..", "model"),
        ("a/$(rm -rf ~)\n", "rm--rf"),
        ("m" * 300, "m" * 80),
    ],
)
def test_a_folder_is_named_after_the_subject_in_harmless_letters(model, expected):
    assert safe_name(model) == expected


def test_names_sort_by_time_and_never_collide():
    names = [store(None).name for _ in range(4)]
    assert len(set(names)) == 4
    assert all(name[15:].startswith("-model") for name in names)
    assert latest("run") == RUNS / max(names)


def test_the_latest_is_the_one_that_was_started_last_of_its_kind():
    assert latest("run") is None
    with pytest.raises(BadInputError, match="no run under") as caught:
        load(None)
    assert "ssdprof run" in caught.value.hint
    for name, created in (("b", "2026-01-02"), ("a", "2026-01-03"), ("bench", "2026-01-04")):
        folder = store(name, kind="bench" if name == "bench" else "run")
        text = (folder / "run.json").read_text()
        own = json.loads(text)["created"]
        (folder / "run.json").write_text(text.replace(own, f"{created}T00:00:00+00:00"))
    assert (latest("run"), latest("bench"), latest("prefill")) == (RUNS / "a", RUNS / "bench", None)
    assert load(None)[0] == RUNS / "a"
    assert load(None, "run", "bench")[0] == RUNS / "bench"
    with writing(RUNS / "in work") as writer:
        writer.case(case())
        assert load(None)[0] == RUNS / "a"
    assert load(None)[0] == RUNS / "in work"
    with pytest.raises(BadInputError, match=r"a is a report of ssdprof run\.") as caught:
        load("a", "bench", "answers")
    assert caught.value.hint == "Name one of ssdprof bench, answers."
    (RUNS / "a" / "cases.0.jsonl").unlink()
    assert (load("a")[1].cases, load("a")[1].complete) == ((), False)
    Path("empty").mkdir()
    for where, complaint in (
        ("empty", "it contains no run.json"),
        ("nowhere", "it does not exist"),
        (" ", "is empty"),
    ):
        with pytest.raises(BadInputError, match=complaint):
            load(where)


def test_reports_are_listed_the_newest_first_with_what_is_wrong_with_them():
    assert listed(RUNS) == ()
    for name in ("a", "b"):
        store(name)
    (RUNS / "c").mkdir()
    (RUNS / "c" / "run.json").write_text("{")
    (RUNS / "no-run").mkdir()
    (RUNS / "a-file").write_text("")
    (good, other, bad) = listed(RUNS)
    assert [path.name for path, _ in (good, other)] == ["b", "a"]
    assert bad[0].name == "c"
    assert "not valid JSON" in str(bad[1])


# --- every end


_PARTIAL = cases.report().changed(processes=(cases.report().first.changed(complete=False),))


@pytest.mark.parametrize(
    ("file", "document"),
    [
        ("", ""),
        (HEADER, dump(_PARTIAL)),
        (DOCUMENT, dump(_PARTIAL)),
        (DOCUMENT, dump(cases.report())),
        (DOCUMENT, "{}"),
    ],
)
def test_a_folder_that_holds_a_report_is_not_used_again(file, document):
    """Nor one with a document, to which no line can be added, and which would be read instead of
    what a run writes.
    """
    folder = store("one")
    if document:
        (folder / HEADER).unlink()
        (folder / file).write_text(document)
        (folder / "cases.0.jsonl").write_text("")
    before = contents(folder)
    with pytest.raises(BadInputError, match="holds a run already"):
        check_folder(folder)
    with pytest.raises(BadInputError, match="holds a run already"), writing(folder):
        pytest.fail("the folder was handed out")
    assert contents(folder) == before


def test_a_further_process_that_is_started_again_begins_anew(monkeypatch):
    """What it had sampled before it failed does not count."""
    monkeypatch.setattr("ssdprof.store.reports.run_sampler", lambda *_: None)
    folder = store("one", samplers=2)
    for process, names in (("first", ("unfused", "fused")), ("again", ("unfused",))):
        with suppress(ZeroDivisionError), opened(folder, Watcher(), sampler=1) as writer:
            for name in names:
                writer.case(case(name, samples=(samples("device", 50.0, process=process),)))
            if process == "first":
                raise ZeroDivisionError
    unfused, fused = load(folder)[1].cases
    assert ([one.process for one in unfused.samples], fused.samples) == (["again"], ())


SECOND = """
import os, sys
from ssdprof.errors import BadInputError
from test_reports import case, writing
try:
    with writing("shared") as writer:
        print("got it", flush=True)
        writer.case(case())
        if sys.argv[1:]:
            writer._file.write(b'{"case": {"task"')
            writer._file.flush()
            os.kill(os.getpid(), 9)
except BadInputError as error:
    print(error.message)
"""


def second(*words: str) -> subprocess.CompletedProcess[str]:
    return python("-c", SECOND, *words)


def test_two_writers_at_once_into_one_folder():
    """The second one is another process.  It fails, and does not affect the first."""
    with writing("shared") as writer:
        held = second()
        assert held.stdout == "Another run is writing into shared.\n", held.stderr
        writer.case(case())
    assert load("shared")[1].complete
    assert load("shared")[1].cases == (case(),)


def test_what_a_killed_process_wrote_is_kept_but_for_the_line_in_work():
    killed = second("die")
    assert (killed.returncode, killed.stdout) == (-9, "got it\n"), killed.stderr
    _, report = load("shared")
    assert (report.cases, report.complete) == ((case(),), False)


def interrupted(*made: Case, **fields) -> Path:
    with (
        pytest.raises(KeyboardInterrupt, match=r"The same command with --out 'my run' goes on\."),
        writing("my run", **fields) as writer,
    ):
        for one in made or (case("unfused"),):
            writer.case(one)
        writer.note("Each key head was taken once.")
        writer.peaked(7)
        writer.update(
            clocks=cases.clocks(throttle_reasons=("hot",)),
            left_out=(LeftOut(case_key="layer 9", reason="spent"),),
        )
        raise KeyboardInterrupt
    return Path("my run")


def test_the_same_request_goes_on_where_it_was_interrupted():
    folder = interrupted(command=("ssdprof", "run", "--out", "x", "m"))
    (folder / "cases.0.jsonl").open("ab").write(b'{"case": {"task"')
    before = load(folder)[1]
    with writing(folder, command=("ssdprof", "run", "m", "--out=my run")) as writer:
        assert writer.earlier == {case("unfused").name: case("unfused")}
        writer.case(case())
        writer.peaked(5)
        writer.update(clocks=cases.clocks(sm_mhz=(3, 4)))
    report = load(folder)[1]
    assert (report.cases, report.complete, report.left_out) == ((case("unfused"), case()), True, ())
    assert (report.created, report.command) == (before.created, before.command)
    (one,) = report.processes
    assert (one.notes, one.peak_bytes, one.ended) == (("Each key head was taken once.",), 7, "")
    assert one.clocks == cases.clocks(
        sm_mhz=(cases.clocks().sm_mhz[0], 4), throttle_reasons=("hot",)
    )
    assert one.process != before.first.process


@pytest.mark.parametrize(
    ("fields", "of"),
    [
        ({"command": ("ssdprof", "run", "--laws", "all")}, "of another request"),
        ({"requested": (("layer 0", "fused", "exact"),)}, "of another request"),
        ({"baseline": "fused"}, "of another request"),
        ({"kind": "bench"}, "of another request"),
        ({"model": cases.checkpoint(revision="f" * 40)}, "of another model"),
        (
            {"environment": cases.environment(triton="3.9.0")},
            "of another machine or other libraries",
        ),
        ({"prompts": (cases.prompt(8),)}, "of another prompt"),
        ({"sources": lambda: [Path("new")]}, "from before new was changed"),
    ],
)
def test_another_request_does_not_go_on(fields, of):
    folder = interrupted()
    header_file = folder / "run.json"
    header_file.write_text(
        header_file.read_text().replace(load(folder)[1].created, "2026-01-01T00:00:00+00:00")
    )
    Path("new").touch()
    before = contents(folder)
    with pytest.raises(BadInputError) as caught, writing(folder, **fields):
        pytest.fail("the folder was handed out")
    assert str(caught.value) == f"my run holds an interrupted run {of}."
    assert (
        caught.value.hint
        == "Name another folder with --out, or resume that run: ssdprof run --out 'my run'"
    )
    assert contents(folder) == before


def test_lines_without_a_header_are_of_nobody_and_other_files_the_users():
    (interrupted() / "run.json").unlink()
    Path("my run", "cases.mine.jsonl").write_text("mine")
    with writing("my run") as writer:
        assert writer.earlier == {}
    assert Path("my run", "cases.mine.jsonl").read_text() == "mine"
    assert load("my run")[1].cases == ()


@pytest.mark.parametrize("folder", ["new", "an empty one of the user", "removed meanwhile"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MissingCapabilityError("no memory")])
def test_a_report_that_ended_before_its_first_case_is_not_kept(error, folder):
    before = store("before")
    out = Path("out")
    if folder == "an empty one of the user":
        out.mkdir()
    with pytest.raises(type(error), match=r"no report is kept|no memory"), writing(out) as writer:
        writer.note("Each key head was taken once.")
        if folder == "removed meanwhile":
            shutil.rmtree(out)
        raise error
    assert out.exists() == (folder == "an empty one of the user")
    assert not out.exists() or not any(out.iterdir())
    assert latest("run") == before


@pytest.mark.parametrize(
    ("made", "parts"),
    [
        ((case(),), "1 case of 1 layer."),
        ((case(), case("unfused"), of_answers()), "2 cases of 1 layer and 1 case of answers."),
        ((of_answers(),), "1 case of answers."),
    ],
)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MissingCapabilityError("no memory")])
def test_a_report_that_ended_early_is_kept_and_says_so(made: tuple[Case, ...], parts, error):
    """The user reads it from the watcher, or after Ctrl-C from the exception."""
    said = []
    watcher = Watcher()
    watcher.say = said.append  # type: ignore[method-assign]
    with pytest.raises(type(error)) as caught, opened(Path("out"), watcher, **header()) as writer:
        for one in made:
            writer.case(one)
        raise error
    said = said or [str(caught.value)]
    assert said == [f"What was done is kept in out, marked as partial: {parts}  {GOES_ON}"]
    _, report = load("out")
    ended = str(error) or "interrupted"
    assert (report.complete, report.cases, report.first.ended) == (False, made, ended)


def test_a_full_disk_leaves_what_was_written_before(monkeypatch):
    class Full:
        def write(self, _: bytes):
            raise OSError(errno.ENOSPC, "No space left on device")

    with (
        pytest.raises(MissingCapabilityError, match="disk is full") as caught,
        writing("r") as writer,
    ):
        writer.case(case())
        monkeypatch.setattr(writer, "_file", Full())
        writer.case(case("unfused"))
    assert caught.value.exit_code == ExitCode.MISSING_CAPABILITY
    assert load("r")[1].cases == (case(),)


def test_an_unwritable_folder_says_why(monkeypatch):
    monkeypatch.setattr(Path, "mkdir", denied)
    with (
        pytest.raises(MissingCapabilityError, match=r"cannot be written: permission denied\."),
        writing("r"),
    ):
        pytest.fail("the folder was handed out")


# --- damage

GOOD = dump(cases.report(layers=(0,)))


# what is replaced in the text => by what => what is said
DAMAGED = """\
"version": 4 => "version": 99 => has format version 99; this ssdprof reads version 4
"kind": "run" => "kind": "sweep" => kind is 'sweep', not 'run', 'bench'
"target" => "subjekt" => target is missing
"elements": 1000 => "elements": 0 => elements is 0, not above 0
"elements": 1000 => "elements": 0.5 => elements is 0.5, not an integer
"nonfinite": 0 => "nonfinite": "x" => nonfinite is 'x', not an integer
"kind": "layer" => "kind": "x" => cases.0.task.kind is 'x', not one of 'layer'
"kind": "layer", =>  => cases.0.task.kind is missing
2026-01-02T => 2026-01-02 => created is '2026-01-0203:04:05Z': a time is ISO 8601
"num_warps": 4 => "num_warps": [] => num_warps is a list of length 0, not an integer or a text
"precision": "exact, fp32 states" => "precision": "x" => precision is 'x', not of the form ^
"id": " => "x": 1, "id": " => x is not a known key
0.004 => 0.004, 0.1 => slices of its positions, where other
"""
NO_JSON = ("", GOOD[:100], "[" * 100_000)


def test_a_damaged_document_is_refused_with_the_place():
    documents = [(GOOD.replace(old, new, 1), words) for old, new, words in cases.rows(DAMAGED)]
    documents += [(text, "is not valid JSON") for text in NO_JSON]
    documents.append(('{"schema_version": 2}', "is not a document of ssdprof"))
    header = store("one", case()) / "run.json"
    for text, words in documents:
        for file in (Path("printed.json"), header):
            file.write_text(text)
            with pytest.raises(BadInputError, match=re.escape(words)) as caught:
                load(file)
            assert caught.value.hint


LINE = json.dumps({"case": case().model_dump(mode="json", exclude_defaults=True)})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: not JSON"),
        ('{"cell": {}}', "line 2 is neither a case nor a process"),
        ('{"case": {}}', "line 2: task is missing"),
        (
            LINE.replace('"rms_ratio": 0.002', '"rms_ratio": -1', 1),
            r"line 2: accuracy\.0\.vs_oracle\.rms_ratio",
        ),
        ('{"process": {"seconds": -1}}', "line 2: seconds"),
        ("\ud800", "not UTF-8"),
    ],
)
def test_a_damaged_line_is_refused_with_its_number(line, words):
    folder = store("one", case("unfused"))
    file = folder / "cases.0.jsonl"
    first, *rest = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join((first, line.encode(errors="surrogatepass"), *rest, b"")))
    with pytest.raises(BadInputError, match=words):
        load(folder)


def test_a_folder_whose_lines_do_not_fit_together_is_damaged():
    folder = store("one", case("unfused"), case("fused"))
    file = folder / "cases.0.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line.get("case", {}).pop("accuracy", None)
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(BadInputError, match=r"is damaged: .*nothing says what it computed"):
        load(folder)


def test_a_case_of_a_sampler_that_no_rank_has_is_damage(monkeypatch):
    monkeypatch.setattr("ssdprof.store.reports.run_sampler", lambda *_: None)
    folder = store("one", samplers=2)
    (folder / "cases.0.jsonl").rename(folder / "cases.1.jsonl")
    with pytest.raises(BadInputError, match="is damaged: no rank has the case "):
        load(folder)
