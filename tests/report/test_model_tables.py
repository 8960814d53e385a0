"""Reports of the whole model and comparisons: their tables and sentences."""

import cases
import pytest
from cases import EXACT_FP32, answers, band, failed, of_answers, of_prefill, prefill, report, timed
from report.shown import row
from report.test_contents import ONE, SMALL, changed, of_title, verdict

from ssdprof.core.case import Case
from ssdprof.core.conditions import parse_change
from ssdprof.core.pairs import compare
from ssdprof.core.report import LeftOut, Report
from ssdprof.report import comparison
from ssdprof.report.document import compose
from ssdprof.report.statements import in_short
from ssdprof.report.table import Document, Table, table


def test_answers_are_shown_over_all_positions_in_bands_and_by_layer():
    alone = [
        of_answers(alone=index, bands=(band(kl_mean=kl),)) for index, kl in ((3, 1e-4), (9, 1e-2))
    ]
    noise = of_answers("unfused", change="last bit of its inputs moved")
    found = answers(noise, of_answers(generated=8, first_difference=2), *alone)
    assert (
        compose(found).title
        == "ssdprof: ibm-granite/granite-4.0-h-small, 1,100 tokens, NVIDIA H200"
    )
    total = of_title(found, "Answers at 1,100 tokens")
    noisy, fused = total.rows
    assert noisy[0] == "noise: unfused, last bit of its inputs moved"
    assert "; ".join(fused) == (
        "fused; exact, fp32; 2.00e-3; 0.01; 0.1; 500; 99.50%; 5; 0.05; 8.01; "
        "+0.125% [-0.1%, +0.3%]; 3"
    )
    assert total.note == "Reference: fp64 oracle.  The model ran in bf16, its own dtype."
    by_position = of_title(found, "Answers by position")
    assert [cells[2] for cells in by_position.rows[:2]] == ["0 to 274", "275 to 1,099"]
    assert [cells[:4] for cells in of_title(found, "One layer at a time").rows] == [
        ("9", "fused", "exact, fp32", "0.01"),
        ("3", "fused", "exact, fp32", "1.00e-4"),
    ]
    (cells,) = of_title(answers(of_answers(bands=(), nonfinite=7)), "Answers at").rows
    assert cells == ("fused", "exact, fp32", "nonfinite")


# --- prefills


def test_what_was_left_to_the_model_is_named():
    unfused = of_prefill("unfused", 2000.0, left_to_model=("the norm",))
    sections = {one.title: one.blocks for one in compose(prefill(unfused, of_prefill())).sections}
    left = "unfused at 1,024 tokens: the model itself computed the norm."
    assert sections["Left to the model"] == ((left,),)


def test_prefills_that_were_not_timed_are_named():
    out = LeftOut(
        case_key="prefill, model convolution and norm, 16,384 tokens",
        implementations=("fused",),
        reason="no time",
    )
    wrong = of_prefill("fused", None, status="out of memory", reason="too large", parts={})
    late = of_prefill("unfused", None, reason="no turns", parts={}, layers=3)
    found = prefill(late, wrong, left_out=(out,), complete=False)
    place = "prefill, model convolution and norm, 1,024 tokens"
    assert verdict(found) == [
        (
            "PARTIAL: the command did not reach its end.  The results here are valid; the rest is "
            "missing."
        ),
        f"FAILED: 1 of 2 cases: fused (exact, fp32 states) out of memory in {place}.",
    ]
    assert compose(found).caveats == (f"Fused of {out.case_key} was left out: no time.",)
    assert list(map("; ".join, of_title(found, "Failures").rows)) == [
        f"out of memory; fused hopper; exact, fp32; {place}; too large",
        f"passed; unfused; exact, fp32; {place}; no turns",
    ]
    untimed, out_of_memory = of_title(found, "Prefill time, only 3 of 40 layers").rows
    assert (untimed[3], out_of_memory[3]) == ("not timed", "out of memory")


# --- comparisons


def compared(base: Report, new: Report, *fail_if: str, every: bool = False, stalls=()) -> Document:
    allowed = list(map(parse_change, fail_if))
    found = compare(("a", base), ("b", new), smallest_difference=0.01, allowed=allowed)
    return comparison.compose(found, stalls, all_cases=every)


def tables(document: Document) -> dict[str, Table]:
    return {
        block.title: block
        for one in document.sections
        for block in one.blocks
        if isinstance(block, Table)
    }


slowed = changed(lambda case: case.changed(samples=timed(750.0, 770.0)), layers=(0,))


@pytest.mark.parametrize("every", [False, True])
def test_a_slower_run_is_compared_case_by_case_and_what_did_not_change_is_left_out(every):
    base = report(**SMALL)
    new = report(layers=(0,), precisions=(EXACT_FP32,), change=slowed)
    stalls = [table("Stages", [{"stage": "scores"}], ())]
    document = compared(base, new, "time:base+3%", "memory:base+0%", stalls=stalls, every=every)
    failing, passing, last = document.verdict
    name = "layer 0, 131,072 tokens, fused, exact, fp32 states"
    assert failing.text.startswith(f"FAILED: time:base+3%: {name}: 1.5 times BASE's time [1.")
    assert (passing.text, passing.good) == ("PASSED: no case violates memory:base+0%.", True)
    assert last.text == (
        "Compared 2 cases.  Not compared: 2 only in BASE.  "
        "Time: 1 no difference within 1%, 1 slower.  Accuracy: 2 equal."
    )
    found = tables(document)
    total = row(found["Change of all cases together"], "fused")
    assert "; ".join(total.values()) == (
        "fused; exact, fp32; 131,072 tokens; slower; 0.67x [0.66, 0.67]; device time; 1 layer"
    )
    speed = row(found["Speed of NEW against BASE"], "layer 0, 131,072 tokens", "fused")
    assert speed["verdict"] == "slower"
    assert " ".join(speed.values()).endswith(" 500 µs 750 µs 2.00x 1.33x")
    assert len(found["Speed of NEW against BASE"].rows) == (2 if every else 1)
    assert ("Accuracy of the output, side by side" in found) == every
    assert ("Kernels and memory, side by side" in found) == every
    assert found["Stages"].rows == (("scores",),)
    assert [cells[3:] for cells in found["Cases without a verdict on speed"].rows] == [
        ("only in BASE", "BASE passed and timed")
    ] * 2


def test_only_the_values_that_changed_are_shown():
    base = report(**SMALL)
    other = base.cases[-1].launches[0].changed(config={"chunk": 32})
    wider = changed(lambda case: case.changed(launches=(other,)), layers=(0,))
    table = tables(compared(base, base.changed(cases=tuple(map(wider, base.cases)))))[
        "Kernels and memory, side by side"
    ]
    assert table.headers[3:] == ("configuration,\nBASE", "configuration,\nNEW")
    ((_, name, _, before, now),) = table.rows
    assert (name, before != now) == ("fused", True)


def worse(case: Case) -> Case:
    error = cases.deviation(rms_ratio=0.5)
    return case.changed(accuracy=(cases.accuracy("out").changed(vs_oracle=error),))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda case: case, "2 equal"),
        (failed, "1 equal, 1 now inaccurate"),
        (worse, "1 equal, 1 with a "),
    ],
)
@pytest.mark.parametrize("gpu", [False, True])
def test_what_became_of_accuracy_is_in_the_first_line(how, words, gpu):
    base = report(**ONE, gpu=gpu)
    new = base.changed(cases=tuple(map(changed(how), base.cases)))
    (line,) = compared(base, new).verdict
    assert f"Accuracy: {words}" in line.text, line.text


def test_a_time_that_is_missing_in_new_is_shown():
    base = report(**ONE)
    untimed = base.changed(cases=[case.changed(samples=()) for case in base.cases])
    first, _ = tables(compared(base, untimed))["Cases without a verdict on speed"].rows
    assert first[3:] == ("not timed", "BASE passed and timed, NEW passed")


@pytest.mark.parametrize(
    ("fused_us", "fla_us", "words"),
    [
        (
            1000.0,
            None,
            "gives a whole prefill of 1,024 tokens a speedup of 2.00x over unfused, our",
        ),
        (
            2100.0,
            1050.0,
            "is not faster in a whole prefill of 1,024 tokens: it has a speedup of 0.95x over "
            "unfused and 0.50x over fla; mine is not faster in a whole prefill of 1,024 tokens: ",
        ),
    ],
)
def test_a_prefill_is_in_short(fused_us, fla_us, words):
    fla = of_prefill("fla", fla_us).changed(kind="library")
    mine = of_prefill("mine", fused_us).changed(kind="own")
    found = prefill(of_prefill("unfused", 2000.0), of_prefill("fused", fused_us), mine, fla)
    (line,) = in_short(found)
    assert line.text.startswith(f"In short: on this NVIDIA H200, fused {words}")
    assert not in_short(prefill(of_prefill("unfused", 2000.0), of_prefill("fused", None)))


@pytest.mark.parametrize(
    ("base", "new", "title"),
    [
        ("a/run", "b/run", "BASE a, NEW b"),
        ("runs/one", "two.json", "BASE one, NEW two.json"),
        ("run", "x/run", "BASE run, NEW x/run"),
    ],
)
def test_the_title_of_a_comparison_is_short(base, new, title):
    whole = report(layers=(0,))
    found = compare((base, whole), (new, whole), smallest_difference=0.01)
    assert comparison.compose(found).title == f"ssdprof compare: {title}"


def test_other_machines_and_inputs_are_caveats():
    base = report(**ONE)
    other = base.changed(
        environment=cases.environment(driver="600.1"), model=cases.checkpoint(revision="f" * 40)
    )
    machine, inputs = compared(base, other).caveats
    assert machine.startswith(
        "The conditions differ (other driver: 580.65.06, now 600.1), so absolute times are not"
    )
    assert inputs.startswith("Errors cannot be compared: other inputs: ")
    (machine,) = compared(answers(), answers(environment=other.environment)).caveats
    assert machine.endswith("so absolute times are not compared.")
    partial = compared(base, cases.in_calls(base).changed(processes=()))
    assert partial.verdict[-1].text.startswith("FAILED: nothing was compared: no case is in both")
    assert "NEW is not complete: this run did not reach its end." in partial.caveats


def test_answers_are_compared():
    document = compared(answers(), answers(of_answers(bands=(band(kl_mean=0.5),))), "kl:base+0.1")
    cells = row(tables(document)["Answers of the model, side by side"], "answers, 1,100 tokens")
    assert cells["mean KL [nats], NEW"] == "0.5"
    assert document.verdict[0].text.endswith("0.002 nats in BASE, 0.5 nats in NEW.")
