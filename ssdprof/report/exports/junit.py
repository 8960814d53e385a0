"""JUnit's XML, as CI systems show it: a test per case, and one per gate.

Keeps to the schema of Apache Ant's JUnit task (https://github.com/windyroad/JUnit-Schema), the strictest in use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from ssdprof.report import summary
from ssdprof.schema import CaseResult, RunReport
from ssdprof.schema.gating import gate_names
from ssdprof.schema.outcome import RunOutcome, outcome
from ssdprof.schema.rows import Row, of_run

_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # in XML 1.0
_FAILURES = ("inaccurate", "nonfinite")  # what a comparison found; other ends are errors
_ANSWERS = ("failure", "error", "skipped")


def render(report: RunReport) -> str:
    """A suite of the cases, and one of what the run as a whole had to hold."""
    found = outcome(report)
    cases = [_case(case, row, found) for case, row in zip(report.cases, of_run(report), strict=True)]
    root = Element("testsuites")
    for number, (name, tests) in enumerate({"cases": cases, "run": list(_whole(report, found))}.items()):
        root.append(_suite(report, number, name, tests))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)


def _suite(report: RunReport, number: int, name: str, tests: Sequence[Element]) -> Element:
    counts = {answer: sum(test.find(answer) is not None for test in tests) for answer in _ANSWERS}
    suite = Element(
        "testsuite",
        id=str(number),
        package="ssdprof",
        name=f"{_clean(report.checkpoint.repo_id)}: {name}",
        timestamp=report.created[:19],
        hostname="localhost",  # a report holds no host's name
        tests=str(len(tests)),
        failures=str(counts["failure"]),
        errors=str(counts["error"]),
        skipped=str(counts["skipped"]),
        time=_seconds(sum(float(test.get("time", 0)) for test in tests)),
    )
    properties = SubElement(suite, "properties")
    for key, value in _properties(report).items():
        SubElement(properties, "property", name=key, value=_clean(value))
    suite.extend(tests)
    SubElement(suite, "system-out").text = _clean("\n".join((*summary.verdict(report), *summary.caveats(report))))
    SubElement(suite, "system-err")
    return suite


def _properties(report: RunReport) -> dict[str, str]:
    gpu = report.environment.gpu
    return {
        "run": report.run_id,
        "model": report.checkpoint.repo_id,
        "GPU": gpu.name if gpu else "none",
        "driver": gpu.driver if gpu else "none",
        "ssdprof": report.ssdprof_version,
        **{name: report.environment.packages.get(name, "none") for name in ("torch", "triton")},
    }


def _case(case: CaseResult, row: Row, found: RunOutcome) -> Element:
    call_us = case.timing.call_median_us if case.timing else 0.0
    test = _test(case.implementation, row.name, call_us / 1e6)
    if case.status == "refused" and case not in found.refused:
        SubElement(test, "skipped", message=_clean(case.reason))
    elif case.status in _FAILURES:
        _answer(test, "failure", case.status, case.reason or case.status)
    elif case.status != "passed":
        _answer(test, "error", case.status, case.reason or case.status)
    return test


def _whole(report: RunReport, found: RunOutcome) -> Iterator[Element]:
    whole = _test("run", "everything that was asked for is there")
    if not found.passed and not report.cases:
        _answer(whole, "error", "empty", "Nothing was compared.")
    elif found.broken_off or found.missing:
        _answer(whole, "error", "incomplete", found.broken_off or f"{found.missing} cases are missing")
    yield whole
    for gate in gate_names(report.gates):
        test = _test("gates", gate)
        if rows := [one for one in found.broken if one.gate == gate]:
            _answer(test, "failure", "gate", "\n".join(str(one) for one in rows))
        yield test


def _test(group: str, name: str, seconds: float = 0.0) -> Element:
    return Element("testcase", classname=f"ssdprof.{_clean(group)}", name=_clean(name), time=_seconds(seconds))


def _answer(test: Element, tag: str, kind: str, text: str) -> None:
    """The first line is the message, which many readers show alone."""
    SubElement(test, tag, type=kind, message=_clean(text.splitlines()[0])).text = _clean(text)


def _seconds(value: float) -> str:
    return f"{value:.9f}"  # the schema allows no exponent


def _clean(text: str) -> str:
    return _ILLEGAL.sub("\ufffd", text)
