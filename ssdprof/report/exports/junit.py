"""JUnit's XML, as CI systems show it: a test per case, and one per gate.

Keeps to the schema of Apache Ant's JUnit task (https://github.com/windyroad/JUnit-Schema), the strictest in use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from ssdprof.report.exports.exported import Exported
from ssdprof.schema.rows import Row

_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # in XML 1.0
_FAILURES = ("inaccurate", "nonfinite")  # results of a comparison; other statuses are errors
_ANSWERS = ("failure", "error", "skipped")


def render(exported: Exported) -> str:
    """One suite for the cases, and one for the gates and the state of the whole."""
    cases = [_case(row, excused=number in exported.excused) for number, row in enumerate(exported.rows)]
    root = Element("testsuites")
    for number, (name, tests) in enumerate({"cases": cases, exported.kind: list(_whole(exported))}.items()):
        root.append(_suite(exported, number, name, tests))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)


def _suite(exported: Exported, number: int, name: str, tests: Sequence[Element]) -> Element:
    counts = {answer: sum(test.find(answer) is not None for test in tests) for answer in _ANSWERS}
    suite = Element(
        "testsuite",
        id=str(number),
        package="ssdprof",
        name=f"{_clean(exported.subject)}: {name}",
        timestamp=exported.created[:19],
        hostname="localhost",  # reports contain no host name
        tests=str(len(tests)),
        failures=str(counts["failure"]),
        errors=str(counts["error"]),
        skipped=str(counts["skipped"]),
        time=_seconds(sum(float(test.get("time", 0)) for test in tests)),
    )
    properties = SubElement(suite, "properties")
    for key, value in _properties(exported).items():
        SubElement(properties, "property", name=key, value=_clean(value))
    suite.extend(tests)
    SubElement(suite, "system-out").text = _clean("\n".join((*exported.verdict, *exported.caveats)))
    SubElement(suite, "system-err")
    return suite


def _properties(exported: Exported) -> dict[str, str]:
    gpu = exported.environment.gpu
    return {
        exported.kind: exported.identity,
        "inputs" if exported.kind == "bench" else "model": exported.subject,
        "GPU": exported.gpu,
        "driver": gpu.driver if gpu else "none",
        "ssdprof": exported.ssdprof_version,
        **{name: exported.environment.packages.get(name, "none") for name in ("torch", "triton")},
    }


def _case(row: Row, *, excused: bool) -> Element:
    test = _test(row.implementation, row.name, row.call[0] / 1e6 if row.call else 0.0)
    if excused:
        SubElement(test, "skipped", message=_clean(row.reason or row.status))
    elif row.status in _FAILURES:
        _answer(test, "failure", row.status, row.reason or row.status)
    elif row.status != "passed":
        _answer(test, "error", row.status, row.reason or row.status)
    return test


def _whole(exported: Exported) -> Iterator[Element]:
    whole = _test(exported.kind, "all requested cases are present")
    if exported.incomplete:
        _answer(whole, "error", "incomplete", exported.incomplete)
    yield whole
    for gate in exported.gate_names:
        test = _test("gates", gate)
        if rows := [one for one in exported.broken if one.gate == gate]:
            _answer(test, "failure", "gate", "\n".join(str(one) for one in rows))
        yield test


def _test(group: str, name: str, seconds: float = 0.0) -> Element:
    return Element("testcase", classname=f"ssdprof.{_clean(group)}", name=_clean(name), time=_seconds(seconds))


def _answer(test: Element, tag: str, kind: str, text: str) -> None:
    """The failure of a test.  Its first line is the message, because many readers show only that."""
    SubElement(test, tag, type=kind, message=_clean(text.splitlines()[0])).text = _clean(text)


def _seconds(value: float) -> str:
    return f"{value:.9f}"  # the schema allows no exponent


def _clean(text: str) -> str:
    return _ILLEGAL.sub("\ufffd", text)
