"""What records refuse, what follows from them, and that a document is read back as it was."""

import json
import math
from typing import get_args, get_type_hints

import cases
import pytest
from cases import (
    RELAXED_FP32,
    accuracy,
    bench,
    case,
    cell,
    deviation,
    layer,
    of_answers,
    of_prefill,
    prefill,
    timed,
    value,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ssdprof.core.accuracy import BudgetUse, ErrorTest
from ssdprof.core.base import Record, Text, Time, states_of
from ssdprof.core.case import Case, Launch, Samples
from ssdprof.core.report import ProcessLine, Report
from ssdprof.core.target import CallRef, Ceilings
from ssdprof.errors import first_fault

REPORTS = {
    "run": cases.report(),
    "without a GPU": cases.report(gpu=False),
    "chunks": cases.in_calls(cases.report(layers=(0,))),
    "bench": bench(),
    "prefill": prefill(),
    "answers": cases.answers(),
    "nonfinite": cases.report(change=lambda one: cases.failed(one, "nonfinite")),
    "refused": cases.report(change=lambda one: cases.failed(one, "refused")),
}


RUN = REPORTS["run"]


@pytest.mark.parametrize("name", REPORTS)
def test_a_document_is_read_back_as_it_was(name):
    text = REPORTS[name].model_dump_json(exclude_defaults=True)
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert Report.model_validate_json(text) == REPORTS[name]


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(
    us=st.lists(
        st.lists(st.floats(min_value=1e-3, max_value=1e9), min_size=1, max_size=5),
        min_size=2,
        max_size=5,
    )
)
def test_samples_are_read_back_as_they_were(us: list[list[float]]):
    made = Samples(process="p", clock="device", us=tuple(map(tuple, us)))
    assert Samples.model_validate_json(made.model_dump_json()) == made
    found = case(samples=(made,)).device_us
    assert found.low <= found.value <= found.high or math.isinf(found.high)


@pytest.mark.parametrize(
    ("made", "fields", "fault"),
    [
        (case(), {"surprise": 1}, "surprise is not a known key"),
        (case(), {"seqlen": 0}, "seqlen is 0, not above 0"),
        (case(), {"status": "passed"}, "status is 'passed', not 'ran', 'refused', 'out"),
        (deviation(), {"rms_ratio": math.nan}, "rms_ratio is nan, not a finite number"),
        (deviation(), {"max_abs": math.inf}, "max_abs is inf, not a finite number"),
        (deviation(), {"matches": (100.1, 100.0, 100.0)}, "matches.0 is 100.1, not at most 100"),
        (accuracy().budget[0], {"budget": 0.0}, "budget is 0.0, not above 0"),
        (accuracy(), {"dtype": "int8"}, "dtype is 'int8', not 'fp64', "),
        (cases.band(), {"top1_pct": 101}, "top1_pct is 101, not at most 100"),
        (ProcessLine(), {"seconds": -1}, "seconds is -1, not at least 0"),
        (RUN, {"smallest_difference": -0.01}, "smallest_difference is -0.01, not at least 0"),
    ],
)
def test_a_number_out_of_range_and_an_unknown_field_are_refused(made, fields, fault):
    with pytest.raises(ValidationError) as caught:
        made.changed(**fields)
    assert first_fault(caught.value).startswith(fault)


@pytest.mark.parametrize("us", [((1.0,),), ((1.0,), ()), ((1.0,), (0.0,)), ((1.0,), (math.nan,))])
def test_samples_are_two_recordings_of_positive_times(us: tuple[tuple[float, ...], ...]):
    with pytest.raises(ValidationError):
        Samples(process="p", clock="call", us=us)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"task": {"kind": "layer", "layer": cases.layer()}}, "dims\n  Field required"),
        ({"task": {"layer": cases.layer(), "dims": cases.dims()}}, "discriminator 'kind'"),
        ({"status": "failed"}, "only to a case that ran"),
        ({"later_fault": "wrong"}, "has no times"),
        ({"nonfinite": True}, "has no times"),
        ({"samples": (*timed(1.0), *timed(1.0))}, "samples occurs twice"),
        ({"accuracy": (accuracy(), accuracy())}, "a tensor occurs twice"),
        ({"task": of_answers().task, "precision": "exact, int8 states"}, "'recurrent' decodes"),
    ],
)
def test_a_case_is_of_one_thing_and_only_what_ran_has_times(fields, why):
    with pytest.raises(ValidationError, match=why):
        case(samples=timed(1.0)).changed(**fields)


CHUNK = CallRef(kind="chunk", number=2, count=3, prompt_seqlen=40, sequences=1)
PROMPT = cases.prompt(40)


@pytest.mark.parametrize(
    ("made", "fields", "why"),
    [
        (deviation(), {"nonfinite": 9999, "first_nonfinite": (0, 0)}, "above 1000 elements"),
        (deviation(), {"nonfinite": 3}, "exactly if nonfinite is above 0"),
        (deviation(), {"worst_position": (10**9, 1)}, "not within 1000 elements"),
        (deviation(), {"worst_position": (10**30,)}, "less than or equal"),
        (deviation(), {"matches": deviation().matches[:2]}, "Field required"),
        (cases.samples("device", 1.0), {"us": ((1e300, 1.0), (1.0, 1.0))}, "less than or equal"),
        (cases.band(), {"perplexity_interval_pct": (3, 2)}, "low is above high"),
        (CHUNK, {"number": 4}, "no call 4 of 3"),
        (PROMPT, {"seqlen": 10**12}, "less than or equal"),
        (PROMPT, {"batch": 1 << 20}, "at most 16,777,216 tokens"),
        (PROMPT, {"serving": {"chunk": 1}}, "greater than or equal"),
        (PROMPT, {"serving": {"packed": (3, 4)}}, "tokens of the prompt"),
        (cases.checkpoint(), {"layer_count": 1}, "only 1 layers"),
        (cases.checkpoint(), {"layers": (layer(), layer())}, "a layer occurs twice"),
        (RUN, {"created": "yesterday"}, "ISO 8601"),
        (RUN, {"created": "2026-13-01T00:00:00Z"}, "month must be in"),
        (RUN, {"cases": RUN.cases[:1] * 2}, "a case occurs twice"),
        (RUN, {"cases": (case(accuracy=()),)}, "nothing says what it computed"),
        (RUN, {"requested": RUN.requested[:1] * 2}, "a requested case occurs twice"),
        (RUN, {"processes": RUN.processes * 2}, "a process occurs twice"),
        (RUN, {"conditions": ({"metric": "speed", "limit": 1, "text": ""},)}, "no metric speed"),
        (
            RUN,
            {"conditions": ({"metric": "match", "at": "1e-9", "limit": 1, "text": ""},)},
            "no match at 1e-9",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(made, fields, why):
    with pytest.raises(ValidationError, match=why):
        made.changed(**fields)


def unchecked_text(words: object) -> bool:
    """Whether a field's type has a `str` that is neither a `Text` nor a `Time`."""
    validators = getattr(words, "__metadata__", ())
    if get_args(Text)[1] in validators or get_args(Time)[1] in validators:
        return False
    return words is str or any(map(unchecked_text, get_args(words)))


def test_every_text_is_harmless():
    ours = [kind for kind in Record.__subclasses__() if kind.__module__.startswith("ssdprof.")]
    unchecked = [
        f"{kind.__name__}.{name}"
        for kind in ours
        for name, words in get_type_hints(kind, include_extras=True).items()
        if unchecked_text(words)
    ]
    assert unchecked == []
    assert Launch(kernel="a\x1b[2J", config={"b\x07": "\ud800", "c": 1}) == Launch(
        kernel="a\\x1b[2J", config={"b\\x07": "\\ud800", "c": 1}
    )


# --- names


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (case(), "layer 0, 1,024 tokens, fused, exact, fp32 states"),
        (case(batch=8), "layer 0, 8 x 1,024 tokens, fused, exact, fp32 states"),
        (
            case(seqlen=8, call=CHUNK),
            "layer 0, 8 tokens, chunk 2 of 3 of 40 tokens, fused, exact, fp32 states",
        ),
        (
            case(
                seqlen=40,
                call=CallRef(kind="packed", number=1, count=1, prompt_seqlen=40, sequences=3),
            ),
            "layer 0, 40 tokens in 3 packed sequences, fused, exact, fp32 states",
        ),
        (
            case(
                seqlen=1,
                call=CallRef(kind="decode", number=1, count=4, prompt_seqlen=40, sequences=1),
            ),
            "layer 0, 1 token, decode step 1 of 4 after 40 tokens, fused, exact, fp32 states",
        ),
        (cell()[2], "mamba2-2.7b, bf16, 1 x 1,024, fused, exact, fp32 states"),
        (
            cases.with_task(cell()[2], layout="views", ways=("long memory",)),
            "mamba2-2.7b, bf16, views, long memory, 1 x 1,024, fused, exact, fp32 states",
        ),
        (of_answers(), "answers, 1,100 tokens, fused, exact, fp32 states"),
        (of_answers(alone=3), "answers of layer 3 alone, 1,100 tokens, fused, exact, fp32 states"),
        (
            of_answers(change="moved bits"),
            "answers, moved bits, 1,100 tokens, fused, exact, fp32 states",
        ),
        (
            of_prefill(),
            "prefill, model convolution and norm, 1,024 tokens, fused, exact, fp32 states",
        ),
    ],
)
def test_a_case_has_the_same_name_in_every_report(made: Case, name):
    assert made.name == name == ", ".join(cases.requested(made))


# --- results


def over(norm: str = "max"):
    use = BudgetUse(norm=norm, head=3, error=2.0, budget=1.0, position=(0, 1, 3, 2))
    return accuracy(budget=(use,))


def test_an_error_beyond_its_budget_is_inaccurate_and_says_where():
    assert case().result == "passed"
    wrong = case(accuracy=(over(), accuracy("final_states", 0.5)), reason="not timed")
    assert wrong.result == "inaccurate"
    assert wrong.why == (
        "out, head 3: max|ours - oracle| is 2, its budget 1; the largest difference is at (0, 1, "
        "3, 2); not timed"
    )
    at_the_limit = over().changed(budget=(over().budget[0].changed(error=1.0),))
    assert case(accuracy=(at_the_limit,)).result == "passed"
    assert case(accuracy=(over("rms"),)).result == "inaccurate"


def test_states_in_a_coarser_dtype_than_claimed_are_inaccurate():
    states = accuracy("final_states", claimed="fp32", coarser="bf16")
    found = case(accuracy=(accuracy(), states))
    assert (found.result, found.why) == (
        "inaccurate",
        "final_states: fp32 states are claimed, but a head has only bf16 numbers",
    )


@pytest.mark.parametrize(("used", "where"), [(2.3, "head 1"), (2.5, "head 1, column 7")])
def test_a_place_is_named_if_it_is_twice_as_bad_as_its_head(used, where):
    head = ErrorTest(test="rms", head=1, value=1.2, limit=1)
    column = ErrorTest(test="column", head=1, position=7, value=used, limit=1)
    assert accuracy(checks=(head, column)).reason.startswith(f"out, {where}: relative RMS error")


def test_what_is_not_finite_says_whose_fault_it_is():
    bad = deviation(nonfinite=2, first_nonfinite=(0, 1, 2, 3))
    kernel = case(accuracy=(accuracy(vs_oracle=bad),))
    assert kernel.result == "nonfinite"
    assert kernel.why == (
        "out: not finite in 2 elements, the first at (0, 1, 2, 3); the exact answer is finite "
        "everywhere"
    )
    exact = case(accuracy=(accuracy(vs_oracle=bad, floor=bad),))
    assert "the exact answer, rounded to bf16, is itself not finite in 2 elements" in exact.why
    assert case(nonfinite=True).result == "nonfinite"
    assert case(nonfinite=True).why == "some element is not finite"
    assert of_answers(nonfinite=1234).why == "the distribution at position 1,234 is not finite"


@pytest.mark.parametrize(
    ("kind", "rms", "result"),
    [
        ("library", 0.0099, "passed"),
        ("library", 0.0101, "inaccurate"),
        ("library", None, "inaccurate"),
        ("bundled", 0.0099, "inaccurate"),
        ("own", 0.0099, "inaccurate"),
    ],
)
def test_another_library_may_be_outside_the_budget_if_it_is_close(kind, rms, result):
    found = case(
        kind=kind, accuracy=(over().changed(vs_oracle=deviation().changed(rms_ratio=rms)),)
    )
    assert (found.result, bool(found.accuracy_faults)) == (result, True)


def test_a_fault_while_it_was_timed_makes_it_inaccurate():
    found = case(later_fault="after it was timed: head 3")
    assert (found.result, found.why, found.time_us) == (
        "inaccurate",
        "after it was timed: head 3",
        None,
    )


@pytest.mark.parametrize(
    ("one", "is_gated"),
    [
        (case(), True),
        (case("unfused"), False),
        (case("unfused", RELAXED_FP32, baseline="unfused"), False),
        (case("fla", kind="library"), False),
        (case("mine", kind="own"), True),
        (of_answers(), True),
        (of_answers(alone=3), False),
        (of_answers(change="moved bits"), False),
    ],
)
def test_what_gates_apply_to(one: Case, is_gated):
    assert one.is_gated is is_gated


def test_a_match_is_of_its_tolerance():
    assert deviation(matches=(1.0, 2.0, 3.0)).match_pct(1e-3) == 2


# --- times


def test_times_are_of_all_processes_and_each_clock():
    both = case(samples=(*timed(100.0, 150.0), cases.samples("call", 250.0, process="q")))
    assert value(both.call_us) == pytest.approx(math.sqrt(150 * 250))
    assert both.time_us == both.device_us
    assert of_prefill().time_us == of_prefill().call_us
    assert case().time_us is None


def test_a_speedup_is_of_times_in_the_same_rounds():
    slow = case("unfused", samples=timed(100.0, 150.0))
    fast = case(samples=timed(50.0, 75.0))
    found = fast.over(slow)
    assert found == pytest.approx((2, 2, 2))
    assert fast.over(slow, "call") == pytest.approx((2, 2, 2))
    assert (fast.over(None), fast.over(fast), fast.over(case())) == (None, None, None)


def test_the_floor_is_the_slower_of_memory_and_arithmetic():
    ceilings = Ceilings(copy_gb_per_s=1000, matmul_tflops=100)
    one = case(bytes_moved=10**6, flops=10**9, samples=timed(100.0))
    assert one.floor_us(ceilings) == pytest.approx(10)
    assert one.changed(bytes_moved=2 * 10**8, flops=1).floor_us(ceilings) == pytest.approx(200)
    assert one.floor_pct(ceilings) == pytest.approx(10)
    assert (
        one.floor_us(None),
        case().floor_us(ceilings),
        one.changed(samples=()).floor_pct(ceilings),
    ) == (None,) * 3


# --- a report


def test_the_baseline_is_the_exact_one_of_equal_states():
    report = cases.report(layers=(0, 9))
    for one in report.cases:
        base = report.baseline_of(one)
        if one.baseline:
            assert (base.layer, base.implementation, base.precision) == (
                one.layer,
                "unfused",
                f"exact, {states_of(one.precision)} states",
            )
        else:
            assert (base, report.speedup(one)) == (None, None)


def test_a_bench_compares_with_the_fastest_of_another_implementation():
    half = "exact, fp16 states"
    made = (*cell(times={"fla": 200.0, "fused": 50.0}), *cell(times={"fla": 150.0}, precision=half))
    report = bench(*made)
    assert value(report.speedup(made[1], over="fla")) == pytest.approx(3)
    untimed = bench(
        made[1], *(one.changed(samples=()) for one in made if one.implementation == "fla")
    )
    assert untimed.speedup(made[1], over="fla") is None


@pytest.mark.parametrize(
    ("share", "speedup"), [(0.25, 2.0), (0.1, 1.5), (0.9, 4.0), (0.3, 0.5), (0.0, 3.0)]
)
def test_the_speedup_of_a_prefill_is_predicted_by_amdahls_law(share, speedup):
    alone = share * 2000 / 60
    base = of_prefill("unfused", 2000.0, alone_us=alone)
    own = of_prefill(alone_us=alone / speedup)
    found = prefill(base, own).predicted(own)
    assert found == pytest.approx(1 / (1 - share + share / speedup))
    assert prefill(base, own).predicted(base) is None
    assert prefill(own).predicted(own) is None
    late = cases.with_task(own, alone_us=None)
    assert prefill(base, late).predicted(late) is None


def test_nothing_is_predicted_of_a_part_that_is_longer_than_the_whole():
    base = of_prefill("unfused", 100.0, alone_us=150.0 / 60)
    own = of_prefill(alone_us=20.0 / 60)
    assert prefill(base, own).predicted(own) is None


def test_what_belongs_to_processes_is_joined():
    lines = (
        ProcessLine(
            process="a",
            captured=(layer(0), layer(2)),
            peak_bytes=5,
            seconds=3.0,
            notes=("x",),
            complete=True,
        ),
        ProcessLine(
            process="b",
            captured=(layer(1),),
            peak_bytes=9,
            seconds=2.0,
            notes=("x", "y"),
            complete=True,
        ),
    )
    report = cases.report().changed(processes=lines, ranks=2, notes=("first",))
    assert [one.index for one in report.captured] == [0, 1, 2]
    assert (report.peak_bytes, report.seconds, report.complete) == (9, 3.0, True)
    assert report.remarks == ("first", "x", "y")
    assert not report.changed(processes=lines[:1]).complete
