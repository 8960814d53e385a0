"""The contents of a report, for all renderers: verdict, advice, caveats, facts, and tables of
calls.
"""

from collections.abc import Callable, Collection

import cases
import pytest
from cases import (
    EXACT_FP16,
    EXACT_FP32,
    RELAXED_FP16,
    RELAXED_FP32,
    bench,
    cell,
    checkpoint,
    clocks,
    failed,
    in_calls,
    of_answers,
    prompt,
    report,
    timed,
    with_task,
)
from report.shown import row

from ssdprof.core.base import BETWEEN_CALLS, REPEATS, PrecisionName, Probe
from ssdprof.core.case import Case
from ssdprof.core.conditions import parse_gate
from ssdprof.core.report import LeftOut, Report
from ssdprof.core.target import CallRef, Serving
from ssdprof.report import calls
from ssdprof.report.document import compose
from ssdprof.report.facts import meanings, what_ran
from ssdprof.report.groups import groups
from ssdprof.report.statements import caveats, in_short, verdict_lines
from ssdprof.report.table import PRECISION, Cells, Table, fold_precisions, table

EXACT = (EXACT_FP32,)
TWO = (EXACT_FP32, RELAXED_FP16)
ONE = {"layers": (3,), "precisions": EXACT}
TWO_OF_ONE = ONE | {"precisions": TWO}
Change = Callable[[Case], Case]


def changed(
    how: Change,
    implementation: str = "fused",
    precision: PrecisionName | None = None,
    layers: Collection[int] = (),
) -> Change:
    """`how` for the selected cases; the others stay."""

    def change(case: Case) -> Case:
        mine = case.implementation == implementation and precision in (None, case.precision)
        return (
            how(case)
            if mine and (not layers or (case.layer and case.layer.index in layers))
            else case
        )

    return change


def result(word: str, *where, **more) -> Change:
    return changed(lambda case: failed(case, word), *where, **more)


def verdict(found: Report) -> list[str]:
    return [line.text for line in verdict_lines(found)]


def steps(found: Report, of_prompts: Change = lambda case: case) -> Report:
    """With a decode step after each prompt, in `recurrent` and its baseline `unfused_step`."""
    names = {"fused": "recurrent", "unfused": "unfused_step"}
    chunks = []
    for one in found.cases:
        call = CallRef(kind="decode", number=1, count=1, prompt_seqlen=one.seqlen, sequences=1)
        name = names[one.implementation]
        baseline = "unfused_step" if one.baseline else ""
        step = with_task(one, call=call)
        chunks.append(step.changed(implementation=name, baseline=baseline, variant=name, seqlen=1))
    return found.changed(cases=(*map(of_prompts, found.cases), *chunks))


def packed(*lengths: int) -> Report:
    call = CallRef(
        kind="packed", number=1, count=1, prompt_seqlen=sum(lengths), sequences=len(lengths)
    )
    prompts = (prompt(sum(lengths), serving=Serving(packed=lengths)),)
    return report(
        seqlens=(sum(lengths),), prompts=prompts, change=lambda case: with_task(case, call=call)
    )


# --- the verdict


def without_exact_answer(case: Case) -> Case:
    """The case for NaN weights: the oracle's answer is not finite."""
    bad = failed(case, "nonfinite").accuracy[0]
    remark = "q holds NaN, first at position 3 of sequence 0"
    return failed(case, "nonfinite").changed(
        accuracy=(bad.changed(floor=bad.vs_oracle, remark=remark),)
    )


def in_two_layers(case: Case) -> Case:
    first = case.layer and case.layer.index == 9
    return without_exact_answer(case) if first else result("nonfinite", layers=(18,))(case)


WITHIN = "within the error budget against the fp64 oracle."
ANSWERS_COMPARED = "Answers of 1 case (and 1 of noise or single layers) were compared"
SMALL = {"layers": (0, 9), "precisions": EXACT}
WHOLE = report(**SMALL)
NOTES = ("While it was recorded: layer 3: out is NaN.",)
VERDICTS: dict[str, tuple[Report, list[str]]] = {
    "failed": (
        report(precisions=TWO, change=result("nonfinite", precision=RELAXED_FP16)),
        ["FAILED: 4 of 16 cases: fused (relaxed, fp16 states) not finite in layers 0, 9, 18, 27."],
    ),
    "the inputs' fault": (
        report(precisions=EXACT, change=in_two_layers),
        [
            "FAILED: the model's inputs, not the kernels.  In layer 9 the exact answer itself is "
            "not finite.  It begins in layer 9, 131,072 tokens: q holds NaN, first at position 3 "
            "of sequence 0.",
            "FAILED: 1 of 8 cases: fused (exact, fp32 states) not finite in layer 18.",
        ],
    ),
    "partial": (
        report(complete=False),
        [
            "PARTIAL: this run did not reach its end.  The results here are valid",
            f"So far all 32 cases are {WITHIN}",
        ],
    ),
    "nothing": (report(complete=False, cases=()), ["PARTIAL: ", "Nothing was compared."]),
    "of a part": (
        report(capture_complete=False),
        ["PARTIAL: the replayed capture was interrupted", "So far all"],
    ),
    "missing": (
        report(
            **SMALL,
            cases=WHOLE.cases[:3],
            left_out=(LeftOut(case_key="layer 9, 131", reason="no time"),),
        ),
        ["MISSING: 1 requested case.", f"The other 3 cases are {WITHIN}"],
    ),
    "left out": (
        report(
            layers=(0,),
            precisions=EXACT,
            requested=tuple(map(cases.requested, WHOLE.cases)),
            left_out=(LeftOut(case_key="layer 9", reason="no time"),),
        ),
        ["PASSED", "At 131,072"],
    ),
    "refused": (
        report(change=result("refused", precision=RELAXED_FP32)),
        [
            "REFUSED: fused (relaxed, fp32 states) in layers 0, 9, 18, 27: headdim 80 is not "
            "supported.",
            f"The other 28 cases are {WITHIN}",
        ],
    ),
    "all refused": (
        report(change=lambda case: failed(case, "refused"), **SMALL),
        ["REFUSED: ", "Nothing was compared."],
    ),
    "interpreted": (
        report(gpu=False, **SMALL),
        [
            f"PASSED: all 4 cases are {WITHIN[:-1]}; Triton's interpreter ran the portable kernel, "
            "and no GPU's kernel was run; laws of bundled kernels were not tested (--laws all ",
            "At 131,072",
        ],
    ),
    "found while recorded": (
        WHOLE.changed(notes=NOTES),
        [
            f"PASSED for the kernels, not for what the server did: all 4 cases are {WITHIN}",
            NOTES[0],
            "At 131,072",
        ],
    ),
    "gate": (
        report(layers=range(8), precisions=EXACT, conditions=cases.gates("speedup:2.2", "rms:9")),
        [
            "GATE FAILED: speedup:2.2: layer 0, 131,072 tokens, fused, exact, fp32 states: 2x; ",
            "All 16",
        ],
    ),
    "bench without a library": (
        bench(failed(cell()[0], "refused"), *cell()[1:]),
        ["PASSED: all 2 cases"],
    ),
    "bench failed": (
        bench(*cell()[:2], failed(cell()[2])),
        [
            "FAILED: 1 of 2 cases: fused (exact, fp32 states) inaccurate in mamba2-2.7b, bf16, "
            "1 x 1,024."
        ],
    ),
    "bench below its gate": (
        bench(conditions=cases.gates("speedup:3")),
        [
            "GATE FAILED: speedup:3: mamba2-2.7b, bf16, 1 x 1,024, fused, exact, fp32 states: 2x.",
            "All 2",
        ],
    ),
    "answers": (cases.answers(), [f"{ANSWERS_COMPARED}: no limit was given."]),
    "answers within": (
        cases.answers(conditions=cases.gates("kl:1")),
        [f"{ANSWERS_COMPARED}: they are within the limits."],
    ),
    "answers whose limit could not be judged": (
        cases.answers(
            cases.of_answers(bands=(cases.band(perplexity=None),)),
            conditions=cases.gates("perplexity:9"),
        ),
        [
            "GATE FAILED: perplexity:9: no case passed that it could judge.",
            "Answers of 1 case were compared: a limit could not be judged.",
        ],
    ),
    "answers outside": (
        cases.answers(conditions=cases.gates("kl:1e-6", "top1:100%")),
        [
            "FAILED: the answers of fused (exact, fp32 states) at 1,100 tokens: kl:1e-6: "
            "0.002 nats; top1:100%: 99.5%."
        ],
    ),
    "answers that are not finite": (
        cases.answers(of_answers(bands=(), nonfinite=7)),
        [
            "FAILED: the answers of fused (exact, fp32 states) at 1,100 tokens: nonfinite: the "
            "distribution at position 7 is not finite."
        ],
    ),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict_names_what_is_wrong_and_what_is_not(name):
    found, expected = VERDICTS[name]
    lines = verdict_lines(found)
    assert len(lines) == len(expected), lines
    bad = ("FAILED", "PARTIAL", "MISSING", "REFUSED", "GATE", "Nothing", "While")
    for line, begins in zip(lines, expected, strict=True):
        assert line.text.startswith(begins)
        assert line.good != (line.text.startswith(bad) or "not be judged" in line.text)


def test_many_offenders_of_a_gate_are_counted():
    assert verdict(VERDICTS["gate"][0])[0].endswith("; and 2 more.")


# --- where an implementation may be used


def advised(found: Report) -> str:
    ((line, _),) = [line for line in verdict_lines(found) if " may " in line.text]
    return line


def coarse(case: Case) -> Case:
    relaxed = case.implementation == "fused" and case.precision == RELAXED_FP16
    return (
        case.changed(accuracy=cases.of_size(3100, "unfused exact, fp16 states"))
        if relaxed
        else case
    )


def with_answers(*kl: float) -> Report:
    """With divergences of fused at relaxed, fp16 states, and a noise of 1e-6."""
    found = report(**TWO_OF_ONE, change=coarse, gpu=False)
    made = [of_answers("fused", RELAXED_FP16, bands=(cases.band(kl_mean=one),)) for one in kl]
    made += [of_answers("unfused", change="moved", bands=(cases.band(kl_mean=1e-6),))] if kl else []
    return found.changed(cases=(*found.cases, *made))


WITHIN_BUDGET = "it is within the error budget in the layer replayed."
BOTH = "exact, fp32 states and at relaxed, fp16 states"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (report(layers=(3,), precisions=(EXACT_FP16,)), f"exact, fp16 states: {WITHIN_BUDGET}"),
        (
            report(precisions=TWO, gpu=False),
            f"{BOTH}: it is within the error budget in every layer replayed.",
        ),
        (
            with_answers(),
            f"exact, fp32 states: {WITHIN_BUDGET}  It may not be used at relaxed, fp16 states: "
            "its error is 3,010 times that of exact intermediates.",
        ),
        (with_answers(1.5e-6), f"{BOTH}: {WITHIN_BUDGET}"),
        (
            with_answers(3e-5),
            f"exact, fp32 states: {WITHIN_BUDGET}  It may not be used at relaxed, fp16 states: "
            "its answers diverge 30.0 times as far as by the model's own noise.",
        ),
    ],
)
def test_it_is_said_where_an_implementation_may_be_used(found: Report, words):
    assert advised(found) == f"At 131,072 tokens, fused may be used at {words}"


NOT_ASKED = "the model's answers were not compared"
LESS = "on this NVIDIA H200, fused takes 515 µs less of 1.03 ms for layer 3 at 131,072 tokens, "
OVER_OURS = "a speedup of 2.00x over unfused, our own baseline; no other library was timed here"
GAIN = f"{LESS}{OVER_OURS}; {NOT_ASKED}"


def beside(name: str, kind: str, *changes: Change) -> Report:
    """A report with the cases of `fused` a second time, as another implementation's."""
    found = report(**ONE)
    more = [
        case.changed(implementation=name, kind=kind)
        for case in found.cases
        if case.implementation == "fused"
    ]
    every = [*found.cases, *more]
    for change in changes:
        every = [change(case) for case in every]
    return cases.of_cases("run", every)


def slower(case: Case) -> Case:
    return case.changed(samples=timed(772.5, 900))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (report(**ONE, seqlens=(1024, 131_072)), f"{GAIN}; use exact, fp32 states."),
        (
            beside("fla", "library", changed(slower, "fla")),
            f"{LESS}a speedup of 2.00x over unfused and 1.50x over fla; {NOT_ASKED}; "
            "use exact, fp32 states.",
        ),
        (beside("fla", "library", result("inaccurate", "fla")), f"{GAIN}; use exact, fp32 states."),
        (
            report(**ONE, change=changed(lambda one: one.changed(samples=timed(2e3, 2e3)))),
            "keep unfused: fused is not faster at 131,072 tokens.",
        ),
        (
            # 0.5 % and 2.5 % faster than unfused
            report(
                **TWO_OF_ONE,
                change=changed(
                    lambda one: one.changed(
                        samples=timed(1005 if one.precision == RELAXED_FP16 else 1025, 2e3)
                    )
                ),
            ),
            f"{LESS.replace('515', '25.0')}{OVER_OURS.replace('2.00', '1.02')}; {NOT_ASKED}; "
            "use relaxed, fp16 states.",
        ),
        (
            with_answers(),
            "fused is accurate enough at exact, fp32 states for layer 3 at 131,072 tokens; "
            "without a GPU there is no speed.",
        ),
        (report(change=changed(failed)), "fused did not pass; keep unfused."),
        (
            report(**TWO_OF_ONE, change=result("refused", precision=RELAXED_FP16)),
            f"fused refused calls at relaxed, fp16 states; {GAIN}; use exact, fp32 states.",
        ),
        (
            steps(report(**ONE), result("refused")),
            "fused refused calls; "
            + GAIN.replace("fused", "recurrent", 1)
            .replace("at 131", "in decode steps after 131")
            .replace("unfused", "unfused_step")
            + "; use exact, fp32 states.",
        ),
        (
            beside("mine:f", "own", changed(slower, "mine:f")),
            f"{GAIN}; use exact, fp32 states; mine:f has a speedup of 1.33x over unfused at exact, "
            "fp32 states.",
        ),
        (
            beside("mine:f", "own", result("inaccurate", "mine:f")),
            f"mine:f did not pass; {GAIN}; use exact, fp32 states.",
        ),
        (
            beside("mine:f", "own", result("failed", "unfused")),
            "unfused did not pass; fused is accurate enough and mine:f is accurate enough for "
            "layer 3 at 131,072 tokens; on this GPU not every call of fused, mine:f and unfused "
            "was timed.",
        ),
        (
            report(**ONE, conditions=(parse_gate("speedup:9"), parse_gate("rms:0.1"))),
            "fused misses speedup:9 and rms:0.1; keep unfused.",
        ),
        (
            report(**ONE, conditions=(parse_gate("kl:1"),)),
            f"kl:1 could judge no case; {GAIN}; use exact, fp32 states.",
        ),
        (report(complete=False), "keep unfused for now: this run is incomplete."),
        (
            report(**ONE, notes=NOTES),
            f"explain first what went wrong while it was recorded; {GAIN}; use exact, fp32 states.",
        ),
    ],
)
def test_the_last_sentence_says_what_to_do(found: Report, words):
    assert [line.text for line in in_short(found)] == [f"In short: {words}"]
    assert compose(found).verdict[-1].text == f"In short: {words}"


@pytest.mark.parametrize(
    ("kl", "words"),
    [
        (0.0, "its answers stay within the model's own noise; use relaxed"),
        (3e-5, "use exact, fp32"),
    ],
)
def test_answers_decide_on_the_precision(kl, words):
    faster = changed(lambda one: one.changed(samples=timed(400, 700)), precision=RELAXED_FP16)
    found = report(**TWO_OF_ONE, change=faster)
    answered = found.changed(cases=(*found.cases, *with_answers(kl).of_answers))
    (line,) = in_short(answered)
    assert words in line.text


# --- caveats and words


def outside(case: Case) -> Case:
    return (
        case.changed(accuracy=failed(case).accuracy) if case.implementation == "unfused" else case
    )


def library(case: Case) -> Case:
    if case.implementation != "fused":
        return case
    own = case.changed(implementation="fla", kind="library")
    if case.layer and case.layer.index == 9:
        return own.changed(status="refused", reason="no such size.", accuracy=(), samples=())
    return own.changed(accuracy=failed(report().cases[0]).accuracy)


def as_exact(case: Case) -> Case:
    reason = "" if case.precision == EXACT_FP32 else "; the same as exact with fp32 states"
    return case.changed(plan=f"two launches{reason}")


def short_as_exact(case: Case) -> Case:
    return as_exact(case) if case.seqlen == 8 else case.changed(plan="two launches")


without_library = [case for case in bench().cases if case.kind != "library"]
HOT = clocks(throttle_reasons=("SwPowerCap",))
UNTIMED = "No speed: nothing was timed, because this machine has no GPU."
ONE_CHUNK = (
    "no more than one chunk of 256: no state is passed on, "
    "so the dtype of the states is not tested."
)
CAVEATS: dict[str, tuple[Report, list[str]]] = {
    "none": (report(), []),
    "throttled": (
        report(clocks=HOT, notes=("A note.",)),
        ["The GPU throttled while it was timed (SwPower", "A note."],
    ),
    "demo": (
        report(model=checkpoint(source="demo")),
        ["The built-in demo model is too small to fill a GPU"],
    ),
    "no GPU": (report(model=checkpoint(source="demo"), gpu=False), [UNTIMED]),
    "untimed": (
        report(change=lambda case: case.changed(samples=())),
        ["No speed: nothing was timed in this run."],
    ),
    "some untimed": (
        report(**SMALL, change=changed(lambda case: case.changed(samples=()), layers=(0,))),
        [
            "No time: 1 case passed and could not be timed: "
            "layer 0, 131,072 tokens, fused, exact, fp32 states."
        ],
    ),
    "one chunk": (report(seqlens=(256, 257)), [f"256 tokens are {ONE_CHUNK}"]),
    "one token": (report(seqlens=(1,)), [f"1 token is {ONE_CHUNK}"]),
    "a first chunk": (
        in_calls(report(seqlens=(256,)), 1),
        [f"A sequence of at most 256 tokens is {ONE_CHUNK}"],
    ),
    "later chunks": (in_calls(report(seqlens=(256,)), 2), []),
    "packed": (packed(200, 256, 144), [f"A sequence of at most 256 tokens is {ONE_CHUNK}"]),
    "packed, longer": (packed(200, 257, 144), []),
    "what a server computed": (
        beside("served", "served", changed(lambda case: case.changed(samples=()), "served")),
        [],
    ),
    "baseline": (
        report(**ONE, change=outside),
        [
            "The baseline has a fault, but was timed: unfused, exact, fp32 states inaccurate in "
            "layer 3, 131,072 tokens (rms error of the output 2.00e-3, of fused 2.06e-3)."
        ],
    ),
    "libraries": (
        report(precisions=EXACT, change=library, requested=()),
        [
            "Without a time: fla (exact, fp32 states) in layer 9: no such size.",
            "Outside the error budget, but passed because it is another library's: fla (exact, "
            "fp32 states) in layers 0, 18, 27.",
        ],
    ),
    "equal precisions": (
        report(change=changed(as_exact)),
        [
            "fused computes exact, fp16 states; relaxed, fp32 states; relaxed, fp16 states as "
            "exact with fp32 states: its outputs are the same, and its times differ by noise only. "
            " Their rows may differ, because each is compared with the baseline at its own state "
            "dtype."
        ],
    ),
    "equal precisions in short calls": (
        report(layers=(0, 9), seqlens=(512, 8), gpu=False, change=changed(short_as_exact)),
        [
            f"8 tokens are {ONE_CHUNK}",
            UNTIMED,
            "fused computes exact, fp16 states; relaxed, fp32 states; relaxed, fp16 states as "
            "exact with fp32 states in layers 0, 9 at 8 tokens: its outputs are the same.",
        ],
    ),
    "a baseline whose exact answer is not finite": (
        report(gpu=False, change=without_exact_answer),
        [UNTIMED],
    ),
    "a bench without other libraries": (
        bench(*without_library),
        ["Speedups are over unfused, our own baseline; no other library was timed here."],
    ),
    "left out": (
        bench(left_out=(LeftOut(case_key="a cell", implementations=("fla",), reason="no room"),)),
        ["Fla of a cell was left out: no room."],
    ),
}


@pytest.mark.parametrize("name", CAVEATS)
def test_caveats(name):
    found, expected = CAVEATS[name]
    said = list(caveats(found))
    assert len(said) == len(expected), said
    assert all(one.startswith(begins) for one, begins in zip(said, expected, strict=True)), said


def test_a_baseline_or_a_library_outside_its_budget_fails_nothing():
    assert verdict(CAVEATS["baseline"][0])[0] == f"PASSED: the one case is {WITHIN}"
    assert verdict(CAVEATS["libraries"][0])[0].startswith("PASSED: all 4 cases")


def test_words_are_explained_where_they_appear():
    words = dict(meanings(report()))
    assert " ".join(words) == "unfused fused exact relaxed"
    assert words["unfused"].endswith("; the baseline")
    other = dict(meanings(report().changed(baseline="fla")))
    assert other["baseline"] == "fla, which the others are compared with"
    assert other["unfused"] == "ssdprof's own kernels with one launch per stage"


# --- what ran


def of_run(found: Report) -> dict[str, str]:
    return {name: value for name, value in what_ran(found).rows}


def test_facts_of_special_runs():
    assert of_run(steps(report()))["baseline"] == "unfused and unfused_step in decode steps"
    assert (
        of_run(report(ranks=2))["ranks"]
        == "2 processes, each on a GPU of its own, shared the cases"
    )
    tuned = changed(lambda case: case.changed(plan="one launch; tuned on this GPU, 2026-11-20"))
    assert (
        of_run(report(change=tuned))["tuned"]
        == "fused: tuned on this GPU, 2026-11-20 (16 of 32 cases)"
    )
    assert of_run(report(clocks=HOT))["clocks"].endswith("throttled: SwPowerCap")
    for version, named in (("mine:run", "fused, mine:run"), ("fused", "fused")):
        own = changed(lambda case, version=version: case.changed(kind="own", version=version))
        found = of_run(report(change=own, precisions=TWO))
        assert found["your kernel"] == f"{named}, at exact, fp32 states; relaxed, fp16 states"
    assert of_run(bench(kernels="0123456789abcdef"))["kernels"].endswith("0123456789ab")
    assert of_run(cases.prefill())["segments"] == "1,024 tokens by 1,024"


# --- speed


def test_the_sum_names_its_layers_and_its_baseline_and_leaves_out_what_failed():
    several = (groups(report(layers=layers))[0] for layers in ((0,), (0, 9)))
    assert [calls.total_speed(group).title for group in several] == [
        "Speed at 131,072 tokens, layer 0",
        "Speed at 131,072 tokens, sum over 2 layers",
    ]
    (untimed,) = groups(report(gpu=False))
    assert not calls.total_speed(untimed)
    assert not calls.speed_by_layer(untimed)
    (group,) = groups(report(change=result("inaccurate", precision=EXACT_FP32, layers=(9,))))
    table = calls.total_speed(group)
    assert table.title == "Speed at 131,072 tokens, sum over 4 layers"
    assert "Baseline: unfused, exact, with the same state dtype." in table.note
    assert row(table, "unfused portable", "relaxed, fp32")["speedup, device"].startswith("1.11x [")
    assert row(table, "fused hopper", "exact, fp32")["layers"] == "3 of 4"
    assert row(table, "unfused portable", "exact, fp32")["layers"] == "4 of 4"
    assert "times over different numbers of layers do not compare" in table.note
    cells = row(calls.speed_by_layer(group), "9", "fused hopper", "exact, fp32")
    assert " ".join(list(cells.values())[3:]) == "- inaccurate - - - - - - -"


# --- accuracy


def out(found: Report) -> Table:
    table, _ = calls.accuracies(groups(found)[0])
    return table


def test_a_case_over_its_budget_is_counted_and_a_refused_one_has_no_row():
    table = out(report(precisions=EXACT, change=result("inaccurate", layers=(9,))))
    assert row(table, "fused hopper", "exact, fp32", "fp64")["within budget"] == "NO: 1/4"
    table = out(report(change=result("refused", precision=RELAXED_FP32)))
    assert not any(
        "relaxed, fp32" in cells[1] for cells in table.rows if cells[0] == "fused hopper"
    )


def test_of_several_chunks_the_worst_call_is_named():
    place = row(
        out(in_calls(report(layers=(0, 9), seqlens=(24,), precisions=EXACT))),
        "fused hopper",
        "exact, fp32",
        "fp64",
    )["its position"]
    assert place.startswith("layer 9, chunk ")


def test_rows_are_folded_only_if_all_other_cells_are_equal():
    def folded(*rows: tuple[str, str, str]) -> tuple[Cells, ...]:
        named = [{"name": name, PRECISION: precision, "x": x} for name, precision, x in rows]
        return table("t", fold_precisions(named), ()).rows

    equal = ("a", "exact, fp32", "x"), ("a", "exact, fp16", "x")
    others = ("b", "exact, fp32", "x"), ("b", "exact, fp16", "y"), ("c", "", "x")
    assert folded(*equal, *others) == (("a", "all 2 precisions", "x"), *others)
    mixed = folded(*equal, ("a", "relaxed, fp32", "x"), ("a", "relaxed, fp16", "z"))
    assert mixed[0] == ("a", "exact, fp32/fp16; relaxed, fp32", "x")


def test_a_key_column_that_is_empty_is_no_longer_one():
    assert table("t", [{"a": "-", "b": "1"}], (), keys=2).without_empty_columns().keys == 1


@pytest.mark.parametrize(
    ("kind", "detail", "words"),
    [
        ("own", "out at (0, 3) is 1 and 2", "states) breaks a law (causality) in layer 9."),
        ("own", "its call 2 ended its process by SIGBUS", "crashed in the law causality in layer"),
        ("own", "its call 2 was stopped after 60 s", "did not return in the law causality in"),
        ("library", "", "PASSED"),
    ],
)
def test_laws_are_a_table_and_a_broken_one_fails_what_is_no_library(kind, detail, words):
    broken = Probe(name="causality", holds="no", detail=detail)
    kept = (Probe(name="linearity", holds="yes"), Probe(name="halving", holds="yes"))
    probes = (*kept, broken, Probe(name=REPEATS, holds="no", detail="out at (0, 4)"))
    found = report(
        precisions=TWO,
        change=changed(lambda case: case.changed(kind=kind, probes=probes), layers=(9,)),
    )
    assert next(calls.laws(found)).rows == (
        ("fused", "all 2 precisions", "yes", "linearity; halving", ""),
        ("fused", "all 2 precisions", "no", "causality", broken.detail),
        ("fused", "all 2 precisions", "no", REPEATS, "out at (0, 4)"),
    )
    assert words in verdict(found)[0]
    assert {case.why for case in found.cases if case.result == "inaccurate"} == (
        set() if kind == "library" else {f"law 'causality': {detail}"}
    )


def test_laws_of_a_pool_have_a_table_of_their_own():
    where = "call 1, row 3, slot 0, head 2: it is wrong"
    probes = (
        Probe(name="linearity", holds="yes"),
        Probe(name=f"{BETWEEN_CALLS}padded rows", holds="no", detail=where),
        Probe(name=f"{BETWEEN_CALLS}a shared prefix", holds="yes"),
    )
    found = report(precisions=TWO, change=changed(lambda case: case.changed(probes=probes)))
    of_calls, of_pool = calls.laws(found)
    assert of_calls.rows == (("fused", "all 2 precisions", "yes", "linearity", ""),)
    assert of_pool.rows == (
        ("fused", "all 2 precisions", "no", "padded rows", where),
        ("fused", "all 2 precisions", "yes", "a shared prefix", ""),
    )
    assert not any(calls.laws(report()))
    sections = compose(found).sections
    named = [getattr(table, "title", "") for section in sections for table in section.blocks]
    assert "State between calls" in named


# --- launches, failures, remarks


def test_failures_share_rows_come_first_and_say_where_the_first_nan_is():
    found = report(
        layers=(0, 1, 2, 5), seqlens=(1024, 2048), precisions=EXACT, change=result("nonfinite")
    )
    (cells,) = calls.reasons(found).rows
    assert cells[:3] == ("nonfinite", "fused hopper", "exact, fp32")
    assert cells[3] == "layers 0-2, 5 at 1,024 tokens; layers 0-2, 5 at 2,048 tokens"
    assert cells[5] == "out[0, 1, 2, 3]"
    assert compose(found).sections[0].title == "Failures, refusals, remarks"
    differs = changed(lambda case: case.changed(reason="differs"), layers=(9,))
    (remark,) = calls.reasons(report(change=differs, precisions=EXACT)).rows
    assert "; ".join(remark) == (
        "passed; fused hopper; exact, fp32; layer 9 at 131,072 tokens; differs"
    )


def test_a_launch_is_used_for_no_more_than_its_calls():
    def change(case: Case) -> Case:
        is_other = case.seqlen == 8 and case.precision == RELAXED_FP16
        return case.changed(launches=()) if is_other else case

    table = calls.launches(report(layers=(0,), seqlens=(8, 9), precisions=TWO, change=change))
    assert table.rows[-1][-1] == "exact, fp32 and relaxed, fp16 at 9 tokens"


def test_endless_failures_are_cut_and_counted():
    def change(case: Case) -> Case:
        return failed(case, "failed").changed(reason=f"{case.where} " + "x\n" * 1000)

    command = ("ssdprof", "run", "m")
    made = report(layers=range(50), precisions=EXACT, change=change, command=command)
    assert "  60 more rows" in calls.repeats(made).note
    table = calls.reasons(made)
    assert len(table.rows) == 40
    assert table.note.startswith("60 more rows")
    assert {len(cells[4]) for cells in table.rows} > {2007}, "no sentence is cut"


# --- benches


def of_title(found: Report, title: str) -> Table:
    blocks = (block for one in compose(found).sections for block in one.blocks)
    return next(
        block for block in blocks if isinstance(block, Table) and block.title.startswith(title)
    )


def test_where_the_baseline_does_not_run_unfused_takes_its_place():
    made = [
        c.changed(baseline="" if c.kind == "library" else "fla") for c in (*cell(), *cell(2048))
    ]
    made[3] = failed(made[3], "refused")
    table = of_title(bench(*made, baseline="fla"), "Speed: ")
    over = {size: row(table, size, "fused hopper") for size in ("1 x 1,024", "1 x 2,048")}
    assert [(one["over"], one["speedup, device"][:5]) for one in over.values()] == [
        ("fla", "1.60x"),
        ("unfused", "2.00x"),
    ]
    assert row(table, "1 x 2,048", "fla")["verdict"] == "refused"
