"""Reading stored results, and their pages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import reproduce
from reproduced.made import DOCUMENT, H200, document
from reproducing import judging, published, rendering, seeds
from reproducing.result import Result, load, understood

from ssdprof.bench.schema import BenchReport, dump
from ssdprof.errors import BadInputError, ExitCode


def test_a_file_that_is_no_result_has_its_sentence(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    for text, words in (("{", "is not JSON"), ("{}", "is no result"), ('{"study": "other"}', "is a result of other")):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(BadInputError, match=words):
            load("test", document(), file)
    with pytest.raises(BadInputError, match="cannot be read"):
        load("test", document(), tmp_path / "none.json")


@pytest.mark.parametrize(
    "rest",
    [
        {},
        {"missing": {}, "reports": {"kernels": {"kind": "bench"}}},
        {"missing": {}, "reports": []},
        {"missing": 1, "reports": {}},
    ],
)
def test_a_result_that_is_not_whole_has_its_sentence(tmp_path: Path, rest: dict[str, object]) -> None:
    """The error has one sentence, and not the exit code of a wrong output."""
    file = tmp_path / "r.json"
    file.write_text(json.dumps({"study": "test"} | rest), encoding="utf-8")
    with pytest.raises(BadInputError, match="is no whole result of test") as told:
        load("test", document(), file)
    assert "\n" not in told.value.message


def test_a_runner_writes_its_pages_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A wrong output in the result sets the exit code."""
    script, file = tmp_path / "x.py", tmp_path / "test.json"
    script.write_text("import sys; print(*sys.argv[1:])", encoding="utf-8")
    stated = document(runner=str(script), measure=[], value=[], numbers=[], figure=None, claim=DOCUMENT["claim"])
    content = {"study": "test", "environment": {"gpu": {"name": H200}}, "values": {"least": 2.0}, "missing": {}}
    for wrong, code in (([], ExitCode.OK), (["one is wrong"], ExitCode.GATE_FAILED)):
        file.write_text(json.dumps({**content, "wrong": wrong}), encoding="utf-8")
        assert reproduce.again("test", stated, file, check=False) == code
        assert f"--from {file}" in capfd.readouterr().err
    with pytest.raises(BadInputError, match="has a runner"):
        reproduce.again("test", stated, file, check=True)


def test_the_page_tells_what_holds_and_why(recorded: BenchReport) -> None:
    content = {"missing": {}, "reports": {"kernels": json.loads(dump(recorded))}}
    stated = document(
        claim=[
            *DOCUMENT["claim"],
            {"words": "Thrice", "quoted": "3x", "holds": "least > 1000", "reason": "twice is all"},
        ]
    )
    result = understood("test", stated, content)
    text = seeds.page([("test", stated, [result]), ("later", document(title="Later"), [])])
    assert f"| test | {H200} | 1 | 1 | 1 |" in text
    places = [f"**{words}**" for _, words in seeds.GROUPS]
    order = [places[0], "It is faster: quoted 1x", places[1], "Thrice: quoted 3x", places[2], "nobody can"]
    assert [text.index(words) for words in order] == sorted(text.index(words) for words in order)
    assert "It says so." in text
    assert "Twice is all." in text
    assert "A source.  GPU of the source: H200." in text
    assert "Not measured yet: `python benchmarks/reproduce.py later`." in text


def test_values_without_a_quoted_number_stand_beside() -> None:
    numbers = [{"words": "N", "value": "speedup", "beside": ["least"], "quoted": {"a": 1.5}}]
    found = {"speedup[a]": 1.0, "least[a]": 7.25}
    page = rendering.as_markdown(document(numbers=numbers), Result(name="t", gpu=H200, values=found, missing={}))
    assert re.search(r"\| a +\| 1 +\| 1.5 +\| outside +\| 7.25", page)


def test_a_long_label_of_a_figure_has_two_lines() -> None:
    """A single line would be cut off at the left."""
    long = "Chunk Scan, previous state: barriers of prev_states and what is computed"
    result = Result(name="test", gpu=H200, values={"speedup[a]": 1.0, f"speedup[{long}]": 2.0}, missing={})
    picture = rendering.as_picture(document(), result)
    assert picture is not None
    assert ">Chunk Scan, previous state: barriers of prev_states and what is<" in picture
    assert ">computed<" in picture


def test_crosses_are_quoted_numbers() -> None:
    result = Result(name="test", gpu=H200, values={"speedup[a]": 1.0, "speedup[b]": 2.0}, missing={})
    stated = document(numbers=[{"words": "N", "value": "speedup", "quoted": {"a": 1.5}}])
    picture = rendering.as_picture(stated, result)
    assert picture is not None
    assert "speedup, quoted" in picture
    nothing = Result(name="test", gpu=H200, values={}, missing={})
    assert rendering.as_picture(stated, nothing) is None
    assert "test.svg" not in rendering.as_markdown(stated, nothing)
    assert "(test.svg)" in rendering.as_markdown(stated, result)


@pytest.mark.parametrize(
    "file", sorted(reproduce.RESULTS.glob("*/*.json")), ids=lambda file: f"{file.parent.name}/{file.stem}"
)
def test_a_committed_page_is_what_its_result_and_its_document_say(file: Path) -> None:
    """Otherwise the page would still have an old version of a changed claim."""
    stated = published.load(file.stem)
    if stated.runner:
        pytest.skip("the runner writes its page")
    page = rendering.as_markdown(stated, load(file.stem, stated, file))
    assert file.with_suffix(".md").read_text(encoding="utf-8") == page, f"reproduce.py {file.stem} --from {file}"


@pytest.mark.parametrize(
    "file", sorted(reproduce.RESULTS.glob("*/*.json")), ids=lambda file: f"{file.parent.name}/{file.stem}"
)
def test_every_claim_that_does_not_hold_in_a_committed_result_has_a_reason(file: Path) -> None:
    stated = published.load(file.stem)
    result = load(file.stem, stated, file)
    claims = judging.claims(stated, result.values, result.gpu)
    assert [one.claim for one in claims if one.verdict.startswith(judging.OUTSIDE) and not one.reason] == []


def test_the_committed_page_of_all_results_is_what_they_say() -> None:
    assert reproduce.write_page(check=True) == ExitCode.OK, "python benchmarks/reproduce.py --page"
