"""Exports of a report for other programs: CSV, JUnit's XML, GitHub Actions, and
github-action-benchmark.

No row is folded or left out: each case has its own.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from csv import DictWriter
from dataclasses import replace
from typing import get_args
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

import numpy as np

from ssdprof.core import words as fmt
from ssdprof.core.base import (
    CLOCKS,
    EXACT_FP32,
    TOLERANCES,
    Clock,
    PartName,
    intermediates_of,
    states_of,
)
from ssdprof.core.case import Answers, Case, Drawn, Launch, LayerCall, Prefill, Summary
from ssdprof.core.outcome import Outcome, judged
from ssdprof.core.report import Report
from ssdprof.core.statistics import Estimate
from ssdprof.core.subject import LayerRef
from ssdprof.errors import printable, whole_words
from ssdprof.report import markdown
from ssdprof.report.calls import SHOWN, again
from ssdprof.report.document import compose, subject
from ssdprof.report.facts import gpu_name
from ssdprof.report.statements import by_gate, caveats, errors, incomplete, verdict_lines
from ssdprof.report.table import Table

MOST_ANNOTATIONS = 10  # of a kind in a step; GitHub silently drops the others
LONGEST_MESSAGE = 4_000  # characters
_MOST_ROWS = 12  # of a summary
_FORMULA = tuple("=+-@\t\r")  # begin a text that a spreadsheet computes
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # in XML 1.0


def rows(report: Report) -> tuple[Case, ...]:
    """All cases, but of a model's answers only those that are judged."""
    return tuple(case for case in report.cases if not isinstance(case.task, Answers) or case.judged)


# --- CSV

Row = dict[str, object]  # header, with its unit -> value
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
    for row in records(report):  # a text that a spreadsheet would compute gets an apostrophe
        formulas = {
            name: f"'{one}"
            for name, one in row.items()
            if isinstance(one, str) and one.startswith(_FORMULA)
        }
        writer.writerow(row | formulas)
    return text.getvalue()


def records(report: Report) -> list[Row]:
    """A row per case with numbers, texts and None, for a data frame."""

    return [
        {
            name: one if isinstance(one, int | float | None) else str(one)
            for name, one in _row(report, case).items()
        }
        for case in rows(report)
    ]


def _row(report: Report, case: Case) -> Row:
    drawn = case.task if isinstance(case.task, Drawn) else None
    whole = case.task if isinstance(case.task, Prefill) else None
    band = case.band
    speedup = report.speedup(case)
    rival = report.rival(case) if speedup else None
    interval = band and band.perplexity_interval_pct
    row: Row = {
        "report": report.id,
        "model": subject(report),
        "GPU": gpu_name(report.environment),
        "case": case.where,
        "layer": case.layer and case.layer.index,
        "call": case.call,
        "sequences x tokens": drawn and drawn.tokens,
        "tokens": case.seqlen,
        "batch": case.batch,
        "dimensions": case.dims,
        "implementation": case.implementation,
        "kernel": " ".join(dict.fromkeys(filter(None, (case.variant, case.version)))),
        "intermediates": intermediates_of(case.precision),
        "states": states_of(case.precision),
        "chunk size": case.chunk_size,
        "status": case.result,
        "reason": case.why,
        "baseline": rival and f"{rival.implementation} {rival.precision}",
    }
    for clock in CLOCKS:
        every = [us for one in case.samples if one.clock == clock for turn in one.us for us in turn]
        known = clock == "device" or report.samplers > 1
        row |= _estimate(f"speedup, {clock}", "x", report.speedup(case, clock), known)
        row[f"verdict, {clock}"] = report.faster(case, clock)
        row |= _estimate(f"{clock} time", "µs", case.by_clock(clock), known)
        row[f"{clock} time, min [µs]"] = min(every, default=None)
        row[f"{clock} time, P95 [µs]"] = float(np.percentile(every, 95)) if every else None
        row[f"{clock} time, max [µs]"] = max(every, default=None)
        row[f"{clock} time, samples"] = len(every) or None
    row["of roofline [%]"] = case.floor_pct(report.ceilings)
    row["extra memory [bytes]"] = case.workspace_bytes
    row["kernels launched"] = case.kernels
    for tensor, name in SHOWN.items():
        one = case.tensor(tensor)
        for against, error in (
            ("baseline", one and one.vs_baseline),
            ("fp64", one and one.vs_oracle),
        ):
            for tolerance in TOLERANCES:
                header = f"{name}, match against {against} @ {fmt.tolerance(tolerance)}"
                row[f"{header} [%]"] = error and error.match_pct(tolerance)
                if tolerance:
                    row[f"{header} of rms [%]"] = error and error.match_rms_pct(tolerance)
        row[f"{name}, rms error [relative]"] = one and one.vs_oracle.rms_ratio
        row[f"{name}, rms error of floor [relative]"] = one and one.floor.rms_ratio
        row[f"{name}, largest error"] = one and one.vs_oracle.max_abs
    us = whole.part_us if whole else {}
    return row | {
        "speedup predicted [x]": report.predicted(case) if speedup else None,
        "operator of one layer, device time [µs]": whole and whole.alone_us,
        **{f"{name}, GPU time [µs]": us.get(name) for name in get_args(PartName)},
        "peak memory [bytes]": whole and whole.peak_bytes,
        "logits, rms of difference [relative]": whole and whole.logits_rms,
        "KL, mean [nats]": band and band.kl_mean,
        "KL, p99 [nats]": band and band.kl_p99,
        "KL, max [nats]": band and band.kl_max,
        "same top token [%]": band and band.top1_pct,
        "perplexity": band and band.perplexity,
        "change of perplexity [%]": band and band.perplexity_increase_pct,
        "change of perplexity, low [%]": interval and interval[0],
        "change of perplexity, high [%]": interval and interval[1],
    }


def _estimate(name: str, unit: str, found: Estimate | None, known: bool) -> Row:
    headers = (f"{name} [{unit}]", f"{name}, low [{unit}]", f"{name}, high [{unit}]")
    return dict(zip(headers if known else headers[:1], found or (None, None, None), strict=False))


# --- baselines


def baseline(report: Report) -> str:
    """A JSON document for `compare`, to be kept in a repository: a line per case, with times and
    their intervals, the output's errors, memory and launches; without samples and what else differs
    from run to run.
    """
    own = [
        one.changed(steps={}, notes=(), gates={}, doubts={}, clocks=None)
        for one in report.processes
    ]
    head = _stored(report.changed(cases=(), requested=(), processes=own))
    lines = ",\n".join(json.dumps(_stored(_summarised(report, case))) for case in rows(report))
    return (
        "{\n"
        + "".join(f'"{name}": {json.dumps(one)},\n' for name, one in head.items())
        + f'"cases": [\n{lines}\n]\n}}'
    )


def _summarised(report: Report, case: Case) -> Case:
    over: dict[Clock, Estimate] = {
        clock: found for clock in CLOCKS if (found := report.speedup(case, clock))
    }
    accuracy = []
    for tensor in case.accuracy:
        if tensor.tensor == "out" or tensor.reason:
            short = tensor.changed(
                vs_oracle=tensor.vs_oracle.changed(along=()),
                vs_baseline=tensor.vs_baseline and tensor.vs_baseline.changed(along=()),
                floor=tensor.floor.changed(along=()),
            )
            accuracy.append(short if tensor.reason else short.changed(budget=(), checks=()))
    launches = [
        Launch(kernel=one.kernel, config={"digest": one.digest}, registers=one.registers)
        for one in case.launches
    ]
    summary = (
        Summary(call=case.call_us, device=case.device_us, over=over)
        if case.samples
        else case.summary
    )
    return case.changed(
        inputs=case.inputs[:16],
        task=case.task.changed(parts={}) if isinstance(case.task, Prefill) else case.task,
        samples=(),
        summary=summary,
        accuracy=accuracy,
        launches=launches,
        probes=[one for one in case.probes if one.holds == "no"],
        trials={},
        first_call=None,
        plan="",
        bytes_moved=None,
        flops=None,
    )


def _stored(record: Report | Case) -> dict[str, object]:
    """Its fields; what a case is and its times come first."""
    found = record.model_dump(mode="json", exclude_defaults=True)
    first = ("implementation", "precision", "task", "seqlen", "status", "summary", "accuracy")
    order = first if isinstance(record, Case) else ()
    return {name: found[name] for name in (*order, *found) if name in found}


# --- JUnit


def junit(report: Report) -> str:
    """JUnit's XML, as CI systems show it: a suite with a test per case, and one for the gates and
    the whole.

    Keeps to the schema of Apache Ant's JUnit task (https://github.com/windyroad/JUnit-Schema), the
    strictest in use.
    """
    found = Outcome(report)
    counted = {case.name for case in (*found.failed, *found.refused, *found.answers_failed)}
    cases = []
    for case in rows(report):
        test = _test(
            case.implementation, case.name, case.call_us.value / 1e6 if case.call_us else 0.0
        )
        why = case.why or case.result
        if case.result != "passed" and case.name not in counted:  # its failure does not count
            SubElement(test, "skipped", message=_clean(why))
        elif case.result != "passed":
            kind = "failure" if case.result in ("inaccurate", "nonfinite") else "error"
            _answer(test, kind, case.result, f"{why}{again(report, case)}")
        cases.append(test)
    # with the time of everything but the calls above; without a GPU these have none
    whole = [_test(report.kind, "all requested cases are present", report.seconds)]
    if why := incomplete(report):
        _answer(whole[0], "error", "incomplete", why)
    broken = by_gate(found.broken)
    for gate in dict.fromkeys(one.text for one in report.conditions):
        whole.append(_test("gates", gate))
        if gate in broken:
            _answer(whole[-1], "failure", "gate", "\n".join(map(str, broken[gate])))
    root = Element("testsuites")
    root.extend([_suite(report, 0, "cases", cases), _suite(report, 1, report.kind, whole)])
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)


def _suite(report: Report, number: int, name: str, tests: Sequence[Element]) -> Element:
    gpu, packages = report.environment.gpu, report.environment.packages
    failed, wrong, skipped = (
        str(sum(test.find(tag) is not None for test in tests))
        for tag in ("failure", "error", "skipped")
    )
    suite = Element(
        "testsuite",
        id=str(number),
        package="ssdprof",
        name=f"{_clean(subject(report))}: {name}",
        timestamp=report.created[:19],
        hostname="localhost",  # reports contain no host name
        tests=str(len(tests)),
        failures=failed,
        errors=wrong,
        skipped=skipped,
        time=_seconds(sum(float(test.get("time", 0)) for test in tests)),
    )
    values = {
        report.kind: report.id,
        "inputs" if report.kind == "bench" else "model": subject(report),
        "GPU": gpu_name(report.environment),
        "driver": gpu.driver if gpu else "none",
        "ssdprof": report.ssdprof_version,
        **{name: packages.get(name, "none") for name in ("torch", "triton")},
    }
    properties = SubElement(suite, "properties")
    for key, value in values.items():
        SubElement(properties, "property", name=key, value=_clean(value))
    suite.extend(tests)
    lines = (*(line.text for line in verdict_lines(report)), *caveats(report))
    SubElement(suite, "system-out").text = _clean("\n".join(lines))
    SubElement(suite, "system-err")
    return suite


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
    first = [
        replace(one, blocks=(replace(block, rows=block.rows[:_MOST_ROWS], note=""),))
        for one in document.sections
        for block in one.blocks
        if isinstance(block, Table)
    ]
    return markdown.render(replace(document, sections=tuple(first[:1])))


def workflow_commands(report: Report) -> Iterator[str]:
    """Annotations, one line each: errors for the reasons why it did not pass, warnings for its
    caveats.
    """
    title = _data(f"ssdprof: {subject(report)}").replace(":", "%3A").replace(",", "%2C")
    found = Outcome(report)
    failed = (*found.failed, *found.refused, *found.answers_failed)
    reasons = [f"{case.name}: {case.result}: {case.why}" for case in failed if case.why]
    annotations: tuple[tuple[str, Iterable[str]], ...] = (
        ("error", (*errors(report), *reasons)),
        ("warning", caveats(report)),
    )
    for name, lines in annotations:
        every, head = list(lines), f"::{name} title={title}::"
        shown = every if len(every) <= MOST_ANNOTATIONS else every[: MOST_ANNOTATIONS - 1]
        yield from (f"{head}{_data(whole_words(line, LONGEST_MESSAGE))}" for line in shown)
        if rest := len(every) - len(shown):
            yield f"{head}{fmt.plural(rest, 'line')} more: see the summary of this step."


def outputs(report: Report) -> dict[str, str]:
    """Outputs of the step.  The last three are the worst values of cases that gates judge; empty
    without such cases.
    """
    cases = [
        case
        for case in judged(report)
        if case.result == "passed" and not isinstance(case.task, Answers)
    ]
    out = [one for case in cases if (one := case.tensor("out"))]
    worst = {
        "least-speedup": min(
            (found.value for case in cases if (found := report.speedup(case))), default=None
        ),
        "least-match": min(
            (pct for case in cases if (pct := case.match_pct(1e-3)) is not None), default=None
        ),
        "largest-rms-ratio": max(
            (ratio for one in out if (ratio := one.over_floor) is not None), default=None
        ),
    }
    return {
        "passed": "true" if Outcome(report).passed else "false",
        "verdict": whole_words(
            printable(" ".join(line.text for line in verdict_lines(report))), LONGEST_MESSAGE
        ),
        "run": printable(report.id),
        **{name: "" if value is None else f"{value:.6g}" for name, value in worst.items()},
    }


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
