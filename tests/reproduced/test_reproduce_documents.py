"""The contents of every published document."""

from __future__ import annotations

from pathlib import Path

import pytest
import reproduce
import small_gdn_cases
import typer
from inter_chunk.cells import CHUNKS
from reproduced.made import document
from reproducing import judging, measuring
from reproducing import published as documents

from ssdprof import cli
from ssdprof.errors import BadInputError


def test_an_unknown_name_has_the_nearest_one() -> None:
    with pytest.raises(BadInputError, match="'fig910' is not a published comparison") as error:
        documents.load("fig910")
    assert error.value.hint.startswith("Did you mean fig9-10?")
    assert "table2" in error.value.hint


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("title = ", "is not TOML"),
        ("title = 'x'", "source"),
        ("title = 'x'\nsource = 'y'\ngpu = 'z'\nclaim = []\nclaims = 1\nrunner = 'a.py'", "claims"),
        ("title = 'x'\nsource = 'y'\ngpu = 'z'\nclaim = []", "either a runner or measurements"),
    ],
)
def test_a_document_that_is_not_in_the_format_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "bad.toml").write_text(text, encoding="utf-8")
    with pytest.raises(BadInputError, match=words):
        documents.load("bad", tmp_path)


def test_a_claim_about_no_value_is_refused() -> None:
    with pytest.raises(ValueError, match="'speed' is none of"):
        document(claim=[{"words": "W", "quoted": "Q", "holds": "speed > 1"}])


def test_several_values_are_beside_the_same_numbers() -> None:
    quoted = {"1 x 1,024": 1.0}
    words_of = {"speedup": "Faster", "least": "At least"}
    found = document(numbers=[{"words_of": words_of, "quoted": quoted}, {"words": "Only quoted", "quoted": quoted}])
    assert {one.value: one.words for one in found.numbers} == words_of | {"": "Only quoted"}
    assert all(one.quoted == quoted for one in found.numbers)


@pytest.mark.parametrize("name", documents.known())
def test_every_document_can_be_measured(name: str) -> None:
    """Its commands are valid, and its scripts exist."""
    stated = documents.load(name)
    places = {"out": "o.json", "budget": "60", "scratch": "s", "folder": "f"}
    commands = typer.main.get_command(cli.app)
    for measure in stated.measure:
        for command in measure.commands:
            words = measuring.words_of(command, places, None)
            if words[1] == "-m":
                commands.commands[words[3]].make_context(words[3], words[4:])  # type: ignore[attr-defined]
            else:
                assert Path(words[1]).is_file()
        if measure.reads == "stalls":  # a separate folder of results
            assert measure.file == f"{measure.commands[-1].rpartition('--out ')[2]}/stalls/stalls.json"
    if stated.runner:
        assert (reproduce.HERE / stated.runner).is_file()


def test_the_quoted_cases_of_gdn_are_the_measured_ones() -> None:
    names = [cell.shape.name for cell in small_gdn_cases.cells()]
    for group in documents.load("gdn-004").numbers:
        assert list(group.quoted) == names


def test_quoted_keys_of_table_2_are_values() -> None:
    stated = documents.load("table2")
    made = {f"{one.name}[{one.key}]" for one in stated.value}
    for group in stated.numbers:
        assert {f"{group.value}[{key}]" for key in group.quoted} <= made


def words_of(chunk: str) -> str:
    return f"mamba_ssm_{chunk}_over_128_fp16"


@pytest.mark.parametrize(
    ("name", "claim", "right", "one_off"),
    [
        ("fig11", "fp16 states: mamba_ssm is fastest with chunks of 256", {words_of("256"): 1.2, words_of("64"): 0.9},
         {words_of("64"): 1.3}),
        ("scan-002", "The fused kernel is always better", {f"speedup_d64_g{g}": 1.5 for g in CHUNKS},
         {"speedup_d64_g32": 0.9}),
        ("table2", "Published kernel, all configurations, at 1e-2, every length",
         {f"least_at_1e2[{states} {kind}]": 100.0 for states in ("fp32", "fp16") for kind in ("exact", "relaxed")},
         {"least_at_1e2[fp32 exact]": 99.9}),
    ],
)  # fmt: skip
def test_a_claim_about_all_does_not_hold_without_one_of_them(
    name: str, claim: str, right: dict[str, float], one_off: dict[str, float]
) -> None:
    stated = documents.load(name)
    for values, verdict in ((right, "inside"), (right | one_off, "outside")):
        (found,) = [one for one in judging.claims(stated, values, stated.gpu) if one.claim == claim]
        assert found.verdict == verdict


def test_the_shares_of_appendix_b_add_up_as_stated() -> None:
    stated = documents.load("appendix-b")
    (shares,) = [group.quoted for group in stated.numbers]
    total = sum(share for name, share in shares.items() if not name.endswith(("utilization", "Occupancy")))
    assert any(f"add up to about {round(total, -1):.0f} %" in choice for choice in stated.choices)


def test_the_quoted_bandwidth_of_scan_003_fits_the_quoted_times() -> None:
    """The choice of the head dimension depends on it."""
    (us,) = [one["us"]["parallel"] for one in documents.load("scan-003").quoted if one.get("tiles") == 64 and
             one["pass"] == "forward"]  # fmt: skip
    gb_per_s = {512: 343, 1024: 750, 2048: 741, 4096: 797, 8192: 805, 16384: 810, 32768: 813}
    for length, rate in gb_per_s.items():
        assert rate == pytest.approx(392 * 128 * length / us[str(length)] / 1e3, rel=0.01), length
