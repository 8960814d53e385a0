"""Exports of a report for other programs: CSV, a baseline for `compare`, JUnit's XML, and GitHub
Actions.

Unlike the tables of a document, CSV, baselines and JUnit's XML merge no rows and leave none out:
each case that `pairs.compared` returns has a row, a line or a test.  What GitHub shows is cut.
"""

import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from csv import DictWriter
from dataclasses import replace
from itertools import chain
from typing import Any, get_args
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

import numpy as np

from ssdprof.core import words as fmt
from ssdprof.core.accuracy import Accuracy, Deviation
from ssdprof.core.base import (
    CLOCKS,
    EXACT_FP32,
    TOLERANCES,
    Clock,
    PartName,
    intermediates_of,
    states_of,
)
from ssdprof.core.case import (
    Answers,
    Case,
    DecodedStates,
    Generated,
    Launch,
    LayerCall,
    Prefill,
    Summary,
)
from ssdprof.core.conditions import METRICS, Metric, number
from ssdprof.core.outcome import Outcome, gated_cases
from ssdprof.core.pairs import compared
from ssdprof.core.report import Report
from ssdprof.core.statistics import Estimate
from ssdprof.core.target import LayerRef
from ssdprof.errors import printable, whole_words
from ssdprof.report import markdown
from ssdprof.report.calls import SHOWN, again
from ssdprof.report.document import compose, target_words
from ssdprof.report.facts import gpu_name, versions_of
from ssdprof.report.statements import (
    by_gate,
    caveats,
    found_while_recorded,
    incomplete,
    verdict_lines,
    why_not_passed,
)
from ssdprof.report.table import Table

MOST_ANNOTATIONS = 10  # of a kind in a step; GitHub silently drops the others
LONGEST_MESSAGE = 4_000  # characters of an annotation, and of the output "verdict"
_MOST_ROWS = 12  # of the table in a step's summary
_FORMULA = tuple("=+-@\t\r")  # a spreadsheet computes a text that begins with one of these
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # in XML 1.0


# --- CSV

# Header -> value.  The header ends with the unit in brackets, if there is one.
CsvRow = dict[str, object]

# `record and record.field` in the rows below is None if there is no record.

# A case without results, for the headers, which a report without cases needs, too.
_EMPTY_CALL = LayerCall.model_construct(layer=LayerRef(index=0, name="", operator=""), dims=None)
_EMPTY_CASE = Case.model_construct(
    task=_EMPTY_CALL, batch=1, seqlen=1, implementation="", precision=EXACT_FP32, status="failed"
)


def csv(report: Report) -> str:
    """The report as CSV, with a row per compared case, for a spreadsheet or a data frame.

    Every kind of report has the same columns; intervals of call times are added if several
    processes measured them.  Missing values are empty, and floating-point numbers have their stored
    precision.
    """
    text = io.StringIO()
    writer = DictWriter(text, list(_row(report, _EMPTY_CASE)), lineterminator="\n")
    writer.writeheader()
    for row in records(report):
        writer.writerow({name: _without_formula(value) for name, value in row.items()})
    return text.getvalue()


def _without_formula(value: object) -> object:
    """The value; a text that a spreadsheet would compute is preceded by an apostrophe."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def records(report: Report) -> list[CsvRow]:
    """A row per compared case, for a data frame.  Values are numbers, texts, or None if missing."""
    return [_row(report, case) for case in compared(report)]


def _row(report: Report, case: Case) -> CsvRow:
    """The row of a case.  It has every column, with None where the case has no value."""
    row = _identity(report, case)
    for clock in CLOCKS:
        row |= _times(report, case, clock)
    row["of roofline [%]"] = case.floor_pct(report.ceilings)
    row["extra memory [bytes]"] = case.workspace_bytes
    row["kernels launched"] = case.kernel_count
    for tensor, name in SHOWN.items():
        row |= _errors(case.tensor(tensor), name)
    return row | _of_model(report, case)


def _identity(report: Report, case: Case) -> CsvRow:
    """The columns that name the call, the implementation and the baseline of its speedup, and the
    case's result.
    """
    generated = case.inputs_of if isinstance(case.inputs_of, Generated) else None
    baseline = report.baseline_of(case) if report.speedup(case) else None
    return {
        "report": report.id,
        "model": target_words(report),
        "GPU": gpu_name(report.environment),
        "case": case.where,
        "layer": case.layer and case.layer.index,
        "call": case.call and str(case.call),
        "sequences x tokens": generated and generated.tokens,
        "tokens": case.seqlen,
        "batch": case.batch,
        "dimensions": case.dims and str(case.dims),
        "implementation": case.implementation,
        "kernel": case.variant_and_version,
        "intermediates": intermediates_of(case.precision),
        "states": states_of(case.precision),
        "chunk size": case.chunk_size,
        "status": case.result,
        "reason": case.why,
        "baseline": baseline and f"{baseline.implementation} {baseline.precision}",
    }


def _times(report: Report, case: Case, clock: Clock) -> CsvRow:
    """The columns of one clock.  The percentile and the extremes are of the samples of all
    processes.

    Call times have an interval only if several processes measured them, because they differ by
    more from process to process than within one.
    """
    samples: list[float] = []
    for recording in case.samples:
        if recording.clock == clock:
            samples += chain.from_iterable(recording.us)
    has_interval = clock == "device" or report.samplers > 1
    return {
        **_estimate(f"speedup, {clock}", "x", report.speedup(case, clock), has_interval),
        f"verdict, {clock}": report.faster(case, clock),
        **_estimate(f"{clock} time", "µs", case.by_clock(clock), has_interval),
        f"{clock} time, min [µs]": min(samples, default=None),
        f"{clock} time, P95 [µs]": float(np.percentile(samples, 95)) if samples else None,
        f"{clock} time, max [µs]": max(samples, default=None),
        f"{clock} time, samples": len(samples) or None,
    }


def _estimate(name: str, unit: str, estimate: Estimate | None, has_interval: bool) -> CsvRow:
    """The columns of an estimate: its value, and the ends of its interval if `has_interval`."""
    value, low, high = estimate or (None, None, None)
    row: CsvRow = {f"{name} [{unit}]": value}
    if has_interval:
        row |= {f"{name}, low [{unit}]": low, f"{name}, high [{unit}]": high}
    return row


def _errors(accuracy: Accuracy | None, name: str) -> CsvRow:
    """The columns of the errors of one tensor, against fp64 where the header says nothing else.
    Errors are infinite if an element is not finite.

    name: the tensor, in words.
    """
    baseline = accuracy.vs_baseline if accuracy else None
    oracle = accuracy.vs_oracle if accuracy else None
    floor = accuracy.floor if accuracy else None
    return {
        **_matches(baseline, f"{name}, match against baseline"),
        **_matches(oracle, f"{name}, match against fp64"),
        f"{name}, elements not finite": oracle and oracle.nonfinite,
        f"{name}, rms error [relative]": oracle and oracle.rms_of_all,
        f"{name}, rms error of floor [relative]": floor and floor.rms_ratio,
        f"{name}, largest error": oracle and (math.inf if oracle.nonfinite else oracle.max_abs),
    }


def _matches(error: Deviation | None, name: str) -> CsvRow:
    """The share of matching elements at each tolerance.  name: the start of the headers."""
    row: CsvRow = {}
    for tolerance in TOLERANCES:
        header = f"{name} @ {fmt.tolerance(tolerance)}"
        row[f"{header} [%]"] = error and error.match_pct(tolerance)
        if tolerance:
            row[f"{header} of rms [%]"] = error and error.match_rms_pct(tolerance)
    return row


def _of_model(report: Report, case: Case) -> CsvRow:
    """The columns that only prefills, decoded states or answers have."""
    prefill = case.task if isinstance(case.task, Prefill) else None
    part_us = prefill.part_us if prefill else {}
    states = case.task if isinstance(case.task, DecodedStates) else None
    band = case.band
    low, high = (band and band.perplexity_interval_pct) or (None, None)
    return {
        "speedup predicted [x]": report.predicted(case) if report.speedup(case) else None,
        "operator of one layer, device time [µs]": prefill and prefill.alone_us,
        **{f"{name}, GPU time [µs]": part_us.get(name) for name in get_args(PartName)},
        "peak memory [bytes]": prefill and prefill.peak_bytes,
        "logits, rms of difference [relative]": prefill and prefill.logits_rms,
        "heads": states and (len(states.memories) or None),
        "heads lost": sum(map(bool, states.lost)) if states and states.state_errors else None,
        "steps kept": states and states.kept_steps,
        "state error, worst head [relative]": states and states.last(states.state_errors),
        "output error, worst head [relative]": states and states.last(states.out_errors),
        "state of a sequence [bytes]": states and states.slot_bytes,
        "KL, mean [nats]": band and band.kl_mean,
        "KL, p99 [nats]": band and band.kl_p99,
        "KL, max [nats]": band and band.kl_max,
        "same top token [%]": band and band.top1_pct,
        "perplexity": band and band.perplexity,
        "change of perplexity [%]": band and band.perplexity_increase_pct,
        "change of perplexity, low [%]": low,
        "change of perplexity, high [%]": high,
    }


# --- baselines

# What a baseline leaves out, in pydantic's notation: the errors along the positions, the parts of a
# prefill, and what no comparison reads.
_ALONG = {"vs_oracle": {"along"}, "vs_baseline": {"along"}, "floor": {"along"}}
_NOT_SUMMARISED = {
    **dict.fromkeys(("trials", "first_call", "plan", "bytes_moved", "flops"), True),
    "task": {"parts"},
    "accuracy": {"__all__": _ALONG},
}


def baseline(report: Report) -> str:
    """A short JSON document for `compare`, to be kept in a repository.

    Each compared case is one line with its times and their intervals, the output's errors, memory
    and launches.  Left out are samples, requested cases, and of the processes their steps, notes,
    clocks, and what they found out about the inputs.
    """
    processes = [
        process.changed(steps={}, notes=(), gates={}, doubts={}, clocks=None)
        for process in report.processes
    ]
    fields = _stored(report.changed(cases=(), requested=(), processes=processes))
    head = "".join(f'"{name}": {json.dumps(value)},\n' for name, value in fields.items())
    cases = ",\n".join(json.dumps(_summarised(report, case)) for case in compared(report))
    return f'{{\n{head}"cases": [\n{cases}\n]\n}}'


def _summarised(report: Report, case: Case) -> dict[str, object]:
    """The fields of a case that `compare` reads.

    Estimates stand in place of the samples, and digests in place of configurations.  Errors of
    other tensors than the output are kept if they are outside the budget, and laws if they are
    broken, because the result follows from these.
    """
    summary = case.summary
    if case.samples:
        speedups = {clock: report.speedup(case, clock) for clock in CLOCKS}
        known = {clock: speedup for clock, speedup in speedups.items() if speedup}
        summary = Summary(call=case.call_us, device=case.device_us, over=known)
    launches = [
        Launch(kernel=launch.kernel, config={"digest": launch.digest}, registers=launch.registers)
        for launch in case.launches
    ]
    accuracy = [error for error in case.accuracy if error.tensor == "out" or error.reason]
    probes = [probe for probe in case.probes if probe.holds == "no"]
    short = case.changed(
        inputs=case.inputs[:16],  # as many characters as `compare` reads
        samples=(),
        summary=summary,
        accuracy=accuracy,
        launches=launches,
        probes=probes,
    )
    return _stored(short, _NOT_SUMMARISED)


def _stored(record: Report | Case, without: dict[str, Any] | None = None) -> dict[str, object]:
    """The fields of a record as JSON stores them, without those with their default values.  A case
    begins with what identifies it, its times and its errors.

    without: the fields to leave out, in pydantic's notation.
    """
    fields = record.model_dump(mode="json", exclude_defaults=True, exclude=without)
    first = ("implementation", "precision", "task", "seqlen", "status", "summary", "accuracy")
    first_fields = first if isinstance(record, Case) else ()
    return {name: fields[name] for name in (*first_fields, *fields) if name in fields}


# --- JUnit


def junit(report: Report) -> str:
    """The report in JUnit's XML, as CI systems show it.

    One suite has a test per compared case.  The other suite has a test per gate, and a test that
    all requested cases are present.  The document follows the schema of Apache Ant's JUnit task
    (https://github.com/windyroad/JUnit-Schema), the strictest one in use.
    """
    outcome = Outcome(report)
    faulty = {case.name for case in outcome.faulty}
    cases = [_of_case(report, case, fails=case.name in faulty) for case in compared(report)]
    # its time is that of the whole command, of which the calls above are a small part
    presence = _test(report.kind, "all requested cases are present", report.seconds)
    if reason := incomplete(report):
        _fail(presence, "error", "incomplete", reason)
    root = Element("testsuites")
    root.append(_suite(report, 0, "cases", cases))
    root.append(_suite(report, 1, report.kind, [presence, *_gates(report, outcome)]))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)


def _of_case(report: Report, case: Case, *, fails: bool) -> Element:
    """The test of a case.  Its time is that of one call, 0 if it is not known.

    fails: whether a case that did not pass makes the report fail; otherwise its test is skipped.
    """
    seconds = case.call_us.value / 1e6 if case.call_us else 0.0
    test = _test(case.implementation, case.name, seconds)
    reason = case.why or case.result
    if case.result != "passed" and not fails:
        SubElement(test, "skipped", message=_clean(reason))
    elif case.result != "passed":
        tag = "failure" if case.result in ("inaccurate", "nonfinite") else "error"
        _fail(test, tag, case.result, f"{reason}{again(report, case)}")
    return test


def _gates(report: Report, outcome: Outcome) -> Iterator[Element]:
    """A test for each gate, which fails if a case breaks the gate."""
    broken = by_gate(outcome.broken)
    for gate in dict.fromkeys(gate.text for gate in report.conditions):
        test = _test("gates", gate)
        if gate in broken:
            _fail(test, "failure", "gate", "\n".join(map(str, broken[gate])))
        yield test


def _suite(report: Report, number: int, name: str, tests: Sequence[Element]) -> Element:
    """A suite: its counts as attributes, its properties, its tests, and the verdict and the caveats
    of the report as its output.

    number: of the suite in the document, from 0.
    name: what its tests have in common.
    """
    suite = Element(
        "testsuite",
        id=str(number),
        package="ssdprof",
        name=f"{_clean(target_words(report))}: {name}",
        timestamp=report.created[:19],  # without a time zone, as the schema wants it
        hostname="localhost",  # reports contain no host name
        tests=str(len(tests)),
        failures=_count(tests, "failure"),
        errors=_count(tests, "error"),
        skipped=_count(tests, "skipped"),
        time=_seconds(sum(float(test.get("time", 0)) for test in tests)),
    )
    values = {
        report.kind: report.id,
        "inputs" if report.kind == "bench" else "model": target_words(report),
        **versions_of(report, ("torch", "triton"), "none"),
    }
    properties = SubElement(suite, "properties")
    for key, value in values.items():
        SubElement(properties, "property", name=key, value=_clean(value))
    suite.extend(tests)
    lines = (*(line.text for line in verdict_lines(report)), *caveats(report))
    SubElement(suite, "system-out").text = _clean("\n".join(lines))
    SubElement(suite, "system-err")
    return suite


def _count(tests: Sequence[Element], tag: str) -> str:
    """The number of tests that contain an element of this tag."""
    return str(sum(test.find(tag) is not None for test in tests))


def _test(subject: str, name: str, seconds: float = 0.0) -> Element:
    """A test without a result, which has passed.  subject: the end of its class name."""
    classname = f"ssdprof.{_clean(subject)}"
    return Element("testcase", classname=classname, name=_clean(name), time=_seconds(seconds))


def _fail(test: Element, tag: str, kind: str, text: str) -> None:
    """Add a failure to a test.

    tag: "failure" or "error".  kind: the word for the failure, such as a case's result.  text: the
    reason; its first line is the message, because many programs show only the message.
    """
    SubElement(test, tag, type=kind, message=_clean(text.splitlines()[0])).text = _clean(text)


def _seconds(value: float) -> str:
    return f"{value:.9f}"  # the schema allows no exponent


def _clean(text: str) -> str:
    """The text with a replacement character for each character that XML does not allow."""
    return _ILLEGAL.sub("\ufffd", text)


# --- GitHub Actions:
#   https://docs.github.com/actions/reference/workflows-and-actions/workflow-commands


def step_summary(report: Report) -> str:
    """The summary of a GitHub step in Markdown: the verdict, the caveats, and the first
    `_MOST_ROWS` rows of the first table.
    """
    document = compose(report)
    for section in document.sections:
        for block in section.blocks:
            if isinstance(block, Table):
                hidden = len(block.rows) - _MOST_ROWS
                note = f"{fmt.plural(hidden, 'more row')} left out." if hidden > 0 else ""
                short = replace(block, rows=block.rows[:_MOST_ROWS], note=note)
                first = replace(section, blocks=(short,))
                return markdown.render(replace(document, sections=(first,)))
    return markdown.render(document)


def workflow_commands(report: Report) -> Iterator[str]:
    """The annotations of a GitHub step, one command a line: an error for each reason why the report
    did not pass, and a warning for each caveat and each fault that was found while a server ran.
    """
    # a property of a command, in which more characters are escaped than in its data
    title = _data(f"ssdprof: {target_words(report)}").replace(":", "%3A").replace(",", "%2C")
    faulty = (case for case in Outcome(report).faulty if case.why)
    reasons = [f"{case.name}: {case.result}: {case.why}" for case in faulty]
    yield from _annotations("error", title, [*why_not_passed(report), *reasons])
    warnings = [*found_while_recorded(report)[:1], *caveats(report)]
    yield from _annotations("warning", title, warnings)


def _annotations(kind: str, title: str, lines: Sequence[str]) -> Iterator[str]:
    """The lines as annotations.

    GitHub shows at most `MOST_ANNOTATIONS`.  If there are more lines, the last annotation says how
    many are left out.
    """
    head = f"::{kind} title={title}::"
    shown = lines if len(lines) <= MOST_ANNOTATIONS else lines[: MOST_ANNOTATIONS - 1]
    for line in shown:
        yield f"{head}{_data(whole_words(line, LONGEST_MESSAGE))}"
    left_out = len(lines) - len(shown)
    if left_out:
        yield f"{head}{fmt.plural(left_out, 'line')} more: see the summary of this step."


def outputs(report: Report) -> dict[str, str]:
    """The outputs of a GitHub step, by name.

    "least-speedup", "least-match" and "largest-rms-ratio" are the worst values of the cases that
    passed and that gates apply to, without answers; empty if no such case has a value.
    """
    cases = [
        case
        for case in gated_cases(report)
        if case.result == "passed" and not isinstance(case.task, Answers)
    ]
    worst = {"least-speedup": "speedup", "least-match": "match", "largest-rms-ratio": "rms"}
    verdict = printable(" ".join(line.text for line in verdict_lines(report)))
    return {
        "passed": "true" if Outcome(report).passed else "false",
        "verdict": whole_words(verdict, LONGEST_MESSAGE),
        "run": printable(report.id),
        **{name: _worst(METRICS[metric], cases, report) for name, metric in worst.items()},
    }


def _worst(metric: Metric, cases: Iterable[Case], report: Report) -> str:
    """The value of a metric in the case with the worst one; empty if no case has a value."""
    values = (metric.value(case, metric.default, report.speedup) for case in cases)
    known = [number(value) for value in values if value is not None]
    if not known:
        return ""
    worst = min(known) if metric.more_is_better else max(known)
    return f"{worst:.6g}"


def _data(text: str) -> str:
    """The text as the data of a workflow command, in which these characters are escaped."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
