"""Exports of a report for other programs: CSV, JUnit's XML, GitHub Actions, and
github-action-benchmark.

No row is folded or left out: each case has its own.
"""

import io
import json
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
from ssdprof.report.document import compose, target
from ssdprof.report.facts import gpu_name, versions_of
from ssdprof.report.statements import by_gate, caveats, errors, incomplete, verdict_lines
from ssdprof.report.table import Table

MOST_ANNOTATIONS = 10  # of a kind in a step; GitHub silently drops the others
LONGEST_MESSAGE = 4_000  # characters
_MOST_ROWS = 12  # of a summary
_FORMULA = tuple("=+-@\t\r")  # begin a text that a spreadsheet computes
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # in XML 1.0


# --- CSV

CsvRow = dict[str, object]  # header, with its unit -> value


_ANY = LayerCall.model_construct(layer=LayerRef(index=0, name="", operator=""), dims=None)
_EMPTY = Case.model_construct(  # for the headers of a report without cases
    task=_ANY, batch=1, seqlen=1, implementation="", precision=EXACT_FP32, status="failed"
)


def csv(report: Report) -> str:
    """A row per case, for a spreadsheet or a data frame; the same columns for every kind of report,
    named as in the report's tables, with units.

    Missing values are empty; floats have their stored precision.
    """
    text = io.StringIO()
    writer = DictWriter(text, list(_row(report, _EMPTY)), lineterminator="\n")
    writer.writeheader()
    for row in records(report):
        writer.writerow({name: _without_formula(value) for name, value in row.items()})
    return text.getvalue()


def _without_formula(value: object) -> object:
    """A text that a spreadsheet would compute gets an apostrophe."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def records(report: Report) -> list[CsvRow]:
    """A row per case with numbers, texts and None, for a data frame."""
    return [_row(report, case) for case in compared(report)]


def _row(report: Report, case: Case) -> CsvRow:
    """Every column of a case; None where it has no such value."""
    row = _identity(report, case)
    for clock in CLOCKS:
        row |= _times(report, case, clock)
    row["of roofline [%]"] = case.floor_pct(report.ceilings)
    row["extra memory [bytes]"] = case.workspace_bytes
    row["kernels launched"] = case.kernels
    for tensor, name in SHOWN.items():
        row |= _errors(case.tensor(tensor), name)
    return row | _of_model(report, case)


def _identity(report: Report, case: Case) -> CsvRow:
    """The columns of what was computed, by what, and whether it passed."""
    generated = case.inputs_of if isinstance(case.inputs_of, Generated) else None
    baseline = report.baseline_of(case) if report.speedup(case) else None
    return {
        "report": report.id,
        "model": target(report),
        "GPU": gpu_name(report.environment),
        "case": case.where,
        "layer": case.layer and case.layer.index,
        "call": case.call and str(case.call),
        "sequences x tokens": generated and generated.tokens,
        "tokens": case.seqlen,
        "batch": case.batch,
        "dimensions": case.dims and str(case.dims),
        "implementation": case.implementation,
        "kernel": " ".join(dict.fromkeys(filter(None, (case.variant, case.version)))),
        "intermediates": intermediates_of(case.precision),
        "states": states_of(case.precision),
        "chunk size": case.chunk_size,
        "status": case.result,
        "reason": case.why,
        "baseline": baseline and f"{baseline.implementation} {baseline.precision}",
    }


def _times(report: Report, case: Case, clock: Clock) -> CsvRow:
    """The columns of a clock.  Call times have an interval only if several processes measured
    them.
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
    value, low, high = estimate or (None, None, None)
    row: CsvRow = {f"{name} [{unit}]": value}
    if has_interval:
        row |= {f"{name}, low [{unit}]": low, f"{name}, high [{unit}]": high}
    return row


def _errors(accuracy: Accuracy | None, name: str) -> CsvRow:
    baseline = accuracy.vs_baseline if accuracy else None
    oracle = accuracy.vs_oracle if accuracy else None
    return {
        **_matches(baseline, f"{name}, match against baseline"),
        **_matches(oracle, f"{name}, match against fp64"),
        f"{name}, rms error [relative]": oracle and oracle.rms_ratio,
        f"{name}, rms error of floor [relative]": accuracy and accuracy.floor.rms_ratio,
        f"{name}, largest error": oracle and oracle.max_abs,
    }


def _matches(error: Deviation | None, name: str) -> CsvRow:
    row: CsvRow = {}
    for tolerance in TOLERANCES:
        header = f"{name} @ {fmt.tolerance(tolerance)}"
        row[f"{header} [%]"] = error and error.match_pct(tolerance)
        if tolerance:
            row[f"{header} of rms [%]"] = error and error.match_rms_pct(tolerance)
    return row


def _of_model(report: Report, case: Case) -> CsvRow:
    """Columns of prefills, decoded states and answers."""
    states = case.task if isinstance(case.task, DecodedStates) else None
    prefill = case.task if isinstance(case.task, Prefill) else None
    part_us = prefill.part_us if prefill else {}
    band = case.band
    low, high = None, None
    if band and band.perplexity_interval_pct:
        low, high = band.perplexity_interval_pct
    return {
        "speedup predicted [x]": report.predicted(case) if report.speedup(case) else None,
        "operator of one layer, device time [µs]": prefill and prefill.alone_us,
        **{f"{name}, GPU time [µs]": part_us.get(name) for name in get_args(PartName)},
        "peak memory [bytes]": prefill and prefill.peak_bytes,
        "logits, rms of difference [relative]": prefill and prefill.logits_rms,
        "heads": (states and len(states.memories)) or None,
        "heads lost": states and sum(map(bool, states.lost)),
        "steps until a head is lost": states and states.kept_steps,
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

_ALONG = {"vs_oracle": {"along"}, "vs_baseline": {"along"}, "floor": {"along"}}
_NOT_SUMMARISED = {
    **dict.fromkeys(("trials", "first_call", "plan", "bytes_moved", "flops"), True),
    "task": {"parts"},
    "accuracy": {"__all__": _ALONG},
}


def baseline(report: Report) -> str:
    """A JSON document for `compare`, to be kept in a repository: a line per case, with times and
    their intervals, the output's errors, memory and launches; without samples and what else differs
    from run to run.
    """
    processes = [
        process.changed(steps={}, notes=(), gates={}, doubts={}, clocks=None)
        for process in report.processes
    ]
    head = _stored(report.changed(cases=(), requested=(), processes=processes))
    fields = "".join(f'"{name}": {json.dumps(value)},\n' for name, value in head.items())
    cases = ",\n".join(json.dumps(_summarised(report, case)) for case in compared(report))
    return f'{{\n{fields}"cases": [\n{cases}\n]\n}}'


def _summarised(report: Report, case: Case) -> dict[str, object]:
    """The fields of a case without its samples, but with what `compare` reads."""
    summary = case.summary
    if case.samples:
        speedups = {clock: report.speedup(case, clock) for clock in CLOCKS}
        over = {clock: speedup for clock, speedup in speedups.items() if speedup}
        summary = Summary(call=case.call_us, device=case.device_us, over=over)
    launches = [
        Launch(kernel=launch.kernel, config={"digest": launch.digest}, registers=launch.registers)
        for launch in case.launches
    ]
    accuracy = [error for error in case.accuracy if error.tensor == "out" or error.reason]
    probes = [probe for probe in case.probes if probe.holds == "no"]
    short = case.changed(
        inputs=case.inputs[:16],
        samples=(),
        summary=summary,
        accuracy=accuracy,
        launches=launches,
        probes=probes,
    )
    return _stored(short, _NOT_SUMMARISED)


def _stored(record: Report | Case, without: dict[str, Any] | None = None) -> dict[str, object]:
    """The fields of a record as stored.  Those that say what a case is, and its times, come
    first.
    """
    fields = record.model_dump(mode="json", exclude_defaults=True, exclude=without)
    first = ("implementation", "precision", "task", "seqlen", "status", "summary", "accuracy")
    order = first if isinstance(record, Case) else ()
    return {name: fields[name] for name in (*order, *fields) if name in fields}


# --- JUnit


def junit(report: Report) -> str:
    """JUnit's XML, as CI systems show it: a suite with a test per case, and one for the gates and
    the whole.

    Keeps to the schema of Apache Ant's JUnit task (https://github.com/windyroad/JUnit-Schema), the
    strictest in use.
    """
    outcome = Outcome(report)
    counted = {case.name for case in outcome.faulty}
    cases = [_of_case(report, case, counts=case.name in counted) for case in compared(report)]
    # with the time of everything but the calls above; without a GPU these have none
    whole = _test(report.kind, "all requested cases are present", report.seconds)
    if why := incomplete(report):
        _answer(whole, "error", "incomplete", why)
    gates = _gates(report, outcome)
    root = Element("testsuites")
    suites = ("cases", cases), (report.kind, [whole, *gates])
    for place, (name, tests) in enumerate(suites):
        root.append(_suite(report, place, name, tests))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)


def _of_case(report: Report, case: Case, *, counts: bool) -> Element:
    """The test of a case.  counts: its failure fails the report."""
    seconds = case.call_us.value / 1e6 if case.call_us else 0.0
    test = _test(case.implementation, case.name, seconds)
    why = case.why or case.result
    if case.result != "passed" and not counts:
        SubElement(test, "skipped", message=_clean(why))
    elif case.result != "passed":
        kind = "failure" if case.result in ("inaccurate", "nonfinite") else "error"
        _answer(test, kind, case.result, f"{why}{again(report, case)}")
    return test


def _gates(report: Report, outcome: Outcome) -> Iterator[Element]:
    broken = by_gate(outcome.broken)
    for gate in dict.fromkeys(gate.text for gate in report.conditions):
        test = _test("gates", gate)
        if gate in broken:
            _answer(test, "failure", "gate", "\n".join(map(str, broken[gate])))
        yield test


def _suite(report: Report, number: int, name: str, tests: Sequence[Element]) -> Element:
    """Its counts, properties and tests, then the verdict as its output."""
    suite = Element(
        "testsuite",
        id=str(number),
        package="ssdprof",
        name=f"{_clean(target(report))}: {name}",
        timestamp=report.created[:19],
        hostname="localhost",  # reports contain no host name
        tests=str(len(tests)),
        failures=_count(tests, "failure"),
        errors=_count(tests, "error"),
        skipped=_count(tests, "skipped"),
        time=_seconds(sum(float(test.get("time", 0)) for test in tests)),
    )
    values = {
        report.kind: report.id,
        "inputs" if report.kind == "bench" else "model": target(report),
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
    return str(sum(test.find(tag) is not None for test in tests))


def _test(group: str, name: str, seconds: float = 0.0) -> Element:
    return Element(
        "testcase", classname=f"ssdprof.{_clean(group)}", name=_clean(name), time=_seconds(seconds)
    )


def _answer(test: Element, tag: str, kind: str, text: str) -> None:
    """The failure of a test.  Its first line is the message, because many readers show only
    that.
    """
    SubElement(test, tag, type=kind, message=_clean(text.splitlines()[0])).text = _clean(text)


def _seconds(value: float) -> str:
    return f"{value:.9f}"  # the schema allows no exponent


def _clean(text: str) -> str:
    return _ILLEGAL.sub("\ufffd", text)


# --- GitHub Actions:
#   https://docs.github.com/actions/reference/workflows-and-actions/workflow-commands


def step_summary(report: Report) -> str:
    """One screen of Markdown: the verdict, what limits it, and the first table."""
    document = compose(report)
    for section in document.sections:
        for block in section.blocks:
            if isinstance(block, Table):
                short = replace(block, rows=block.rows[:_MOST_ROWS], note="")
                first = replace(section, blocks=(short,))
                return markdown.render(replace(document, sections=(first,)))
    return markdown.render(document)


def workflow_commands(report: Report) -> Iterator[str]:
    """Annotations, one line each: errors for the reasons why it did not pass, warnings for its
    caveats.
    """
    title = _data(f"ssdprof: {target(report)}").replace(":", "%3A").replace(",", "%2C")
    faulty = (case for case in Outcome(report).faulty if case.why)
    reasons = [f"{case.name}: {case.result}: {case.why}" for case in faulty]
    yield from _annotations("error", title, [*errors(report), *reasons])
    yield from _annotations("warning", title, list(caveats(report)))


def _annotations(kind: str, title: str, lines: Sequence[str]) -> Iterator[str]:
    """The lines as annotations: at most as many as GitHub shows, of which the last one then counts
    the others.
    """
    head = f"::{kind} title={title}::"
    shown = lines if len(lines) <= MOST_ANNOTATIONS else lines[: MOST_ANNOTATIONS - 1]
    for line in shown:
        yield f"{head}{_data(whole_words(line, LONGEST_MESSAGE))}"
    if rest := len(lines) - len(shown):
        yield f"{head}{fmt.plural(rest, 'line')} more: see the summary of this step."


def outputs(report: Report) -> dict[str, str]:
    """Outputs of the step.  The last three are the worst values of cases that gates judge; empty
    without such cases.
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
    """The value that fails a gate first; empty if no case has one."""
    values = (metric.value(case, metric.default, report.speedup) for case in cases)
    known = [number(value) for value in values if value is not None]
    most = min if metric.more_is_better else max
    return f"{most(known):.6g}" if known else ""


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
