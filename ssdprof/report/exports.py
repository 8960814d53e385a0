"""Exports of a report for other programs: CSV, JUnit's XML, GitHub Actions, and github-action-benchmark.

No row is folded or left out: each case has its own.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from csv import DictWriter
from typing import get_args
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from ssdprof.core import statistics
from ssdprof.core import words as fmt
from ssdprof.core.base import EXACT_FP32, TOLERANCES, Clock, PartName
from ssdprof.core.case import AnswerBand, Case
from ssdprof.core.conditions import judged
from ssdprof.core.outcome import outcome
from ssdprof.core.report import Report
from ssdprof.core.statistics import Estimate
from ssdprof.core.subject import Dims, LayerRef
from ssdprof.report import markdown
from ssdprof.report.calls import SHOWN
from ssdprof.report.document import compose
from ssdprof.report.facts import caveats, gpu_name
from ssdprof.report.model import prefill_failures
from ssdprof.report.statements import by_gate, errors, incomplete, verdict_lines

SUMMARY_BYTES = 1024 * 1024  # of a step of GitHub Actions; GitHub shows nothing of a longer one
MOST_ANNOTATIONS = 10  # of a kind in a step; GitHub silently drops the others
LONGEST_MESSAGE = 4_000  # characters
_CUT = "\n\nCut here: a step summary of GitHub holds 1 MiB.  `ssdprof export --format markdown` writes all of it.\n"
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # in XML 1.0


def kind(report: Report) -> str:
    """ "run", "bench" or "prefill"; a comparison of answers is a run's too."""
    return report.kind if report.kind in ("bench", "prefill") else "run"


def identity(report: Report) -> str:
    """Unique among results of its kind."""
    return report.id if kind(report) == "run" else f"{report.subject} {report.created}"


def subject(report: Report) -> str:
    """The model, or the operator of a bench."""
    return f"{report.subject} on drawn inputs" if report.kind == "bench" else report.subject


def rows(report: Report) -> tuple[Case, ...]:
    """All cases, but of a model's answers only those that are judged."""
    return tuple(case for case in report.cases if not case.answers or case.judged)


def _caveats(report: Report) -> tuple[str, ...]:
    return (*report.remarks, *prefill_failures(report)) if report.kind == "prefill" else caveats(report)


# --- CSV

Row = dict[str, object]  # header, with its unit -> value
_EMPTY = Case(
    layer=LayerRef(index=0, name="", operator=""),
    dims=Dims(operator="", batch=1, seqlen=1, chunk_size=None, dtype="fp32", sizes={}, words=""),
    batch=1,
    seqlen=1,
    implementation="",
    precision=EXACT_FP32,
    status="failed",
)  # for the headers of a report without cases


def csv(report: Report) -> str:
    """A row per case, for a spreadsheet or a data frame.  Columns are named as in the report's tables, with units.

    Missing values are empty; floats have their stored precision."""
    text = io.StringIO()
    writer = DictWriter(text, list(_row(report, _EMPTY)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(_row(report, case) for case in rows(report))
    return text.getvalue()


def _row(report: Report, case: Case) -> Row:
    version = case.version if case.prefill else ""
    names = {
        "implementation": case.implementation,
        "kernel": " ".join(dict.fromkeys(word for word in (case.variant, version) if word)),
        "intermediates": case.precision.intermediates,
        "states": case.precision.state_dtype,
        "status": case.result,
        "reason": case.why,
        "baseline": _baseline(report, case),
    }
    if report.kind == "prefill":
        return _place(report, case) | names | _prefill(report, case)
    return _place(report, case) | names | _call(report, case) | (_answers(case) if kind(report) == "run" else {})


def _place(report: Report, case: Case) -> Row:
    gpu, drawn, whole, dims = gpu_name(report.environment), case.drawn, case.prefill, case.dims
    size = {"tokens": case.seqlen, "batch": case.batch}
    if report.kind == "bench":
        return {
            "bench": report.created,
            "operator": report.subject,
            "GPU": gpu,
            "shape": drawn and drawn.shape,
            "inputs": ", ".join((dims.dtype, *drawn.ways, drawn.layout)) if dims and drawn else "",
            "sequences x tokens": drawn and drawn.tokens,
            **size,
            "dimensions": dims,
            "chunk size": case.chunk_size,
        }
    if report.kind == "prefill":
        return {
            "prefill": report.created,
            "model": report.subject,
            "GPU": gpu,
            "layers": whole and whole.layers,
            **size,
            "segment length": whole and whole.segment_length,
            "convolution and norm": whole and whole.conv_and_norm,
        }
    layer = case.layer.index if case.layer else "all"
    place = {"run": report.id, "model": report.subject, "GPU": gpu, "layer": layer, "call": case.call or ""}
    return place | size | {"dimensions": dims or ""}


def _baseline(report: Report, case: Case) -> str | None:
    """That of the speedup, with its precision in a run."""
    rival = report.rival(case) if report.speedup(case) else None
    if rival is None:
        return None
    return rival.implementation if kind(report) != "run" else f"{rival.implementation} {rival.precision}"


def _call(report: Report, case: Case) -> Row:
    row: Row = {}
    clocks: tuple[tuple[Clock, Estimate | None], ...] = (("device", case.device_us), ("call", case.call_us))
    for clock, _ in clocks:
        row |= _estimate(f"speedup, {clock}", "x", report.speedup(case, clock))
        row[f"verdict, {clock}"] = report.faster(case, clock)
    for clock, time in clocks:
        spread = statistics.spread(found) if (found := case.rounds(clock)) else None
        row |= _estimate(f"{clock} time", "µs", time)
        row[f"{clock} time, min [µs]"] = spread and spread.min_us
        row[f"{clock} time, P95 [µs]"] = spread and spread.p95_us
        row[f"{clock} time, max [µs]"] = spread and spread.max_us
        row[f"{clock} time, samples"] = spread and spread.samples
    row["of roofline [%]"] = case.floor_pct(report.ceilings)
    row["extra memory [bytes]"] = case.memory and case.memory.workspace_bytes
    row["kernels launched"] = case.kernels
    for tensor, name in SHOWN.items():
        one = case.tensor(tensor)
        sides = {"baseline": one and one.vs_baseline, "fp64": one and one.vs_oracle}
        for against, error in sides.items():
            for tolerance in TOLERANCES:
                header = f"{name}, match against {against} @ {fmt.tolerance(tolerance)} [%]"
                row[header] = error and error.match_pct(tolerance)
        row[f"{name}, rms error [relative]"] = one and one.vs_oracle.rms_ratio
        row[f"{name}, rms error of floor [relative]"] = one and one.floor.rms_ratio
        row[f"{name}, largest error"] = one and one.vs_oracle.max_abs
    return row


def _prefill(report: Report, case: Case) -> Row:
    whole = case.prefill
    us: dict[str, float] = {part.name: part.gpu_us for part in whole.parts} if whole else {}
    row = _estimate("speedup, call", "x", report.speedup(case)) | {"verdict, call": report.faster(case)}
    row["speedup predicted [x]"] = report.predicted(case) if report.speedup(case) else None
    row |= _estimate("call time", "µs", case.call_us)
    row["operator of one layer, device time [µs]"] = whole and whole.alone_us
    row |= {f"{name}, GPU time [µs]": us.get(name) for name in get_args(PartName)}
    row["peak memory [bytes]"] = whole and whole.peak_bytes
    row["logits, rms of difference [relative]"] = whole and whole.logits_rms
    return row


def _answers(case: Case) -> Row:
    band = _band(case)
    interval = band and band.perplexity_interval_pct
    return {
        "KL, mean [nats]": band and band.kl_mean,
        "KL, p99 [nats]": band and band.kl_p99,
        "KL, max [nats]": band and band.kl_max,
        "same top token [%]": band and band.top1_pct,
        "perplexity": band and band.perplexity,
        "change of perplexity [%]": band and band.perplexity_increase_pct,
        "change of perplexity, low [%]": interval and interval.low,
        "change of perplexity, high [%]": interval and interval.high,
    }


def _band(case: Case) -> AnswerBand | None:
    return case.answers.bands[0] if case.answers and case.answers.bands else None


def _estimate(name: str, unit: str, found: Estimate | None) -> Row:
    """A value and the ends of its 95 % interval."""
    headers = (f"{name} [{unit}]", f"{name}, low [{unit}]", f"{name}, high [{unit}]")
    return dict(zip(headers, found or (None, None, None), strict=True))


# --- JUnit


def junit(report: Report) -> str:
    """JUnit's XML, as CI systems show it: a suite with a test per case, and one for the gates and the whole.

    Keeps to the schema of Apache Ant's JUnit task (https://github.com/windyroad/JUnit-Schema), the strictest in use.
    """
    found = outcome(report)
    counted = {case.name for case in (*found.failed, *found.refused, *found.answers_failed)}
    cases = []
    for case in rows(report):
        test = _test(case.implementation, case.name, case.call_us.value / 1e6 if case.call_us else 0.0)
        why = case.why or case.result
        if case.result != "passed" and case.name not in counted:  # its failure does not count
            SubElement(test, "skipped", message=_clean(why))
        elif case.result != "passed":
            _answer(test, "failure" if case.result in ("inaccurate", "nonfinite") else "error", case.result, why)
        cases.append(test)
    root = Element("testsuites")
    for number, (name, tests) in enumerate({"cases": cases, kind(report): list(_whole(report))}.items()):
        root.append(_suite(report, number, name, tests))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)


def _suite(report: Report, number: int, name: str, tests: Sequence[Element]) -> Element:
    answers = ("failure", "error", "skipped")
    failures, wrong, skipped = (str(sum(test.find(one) is not None for test in tests)) for one in answers)
    suite = Element(
        "testsuite",
        id=str(number),
        package="ssdprof",
        name=f"{_clean(subject(report))}: {name}",
        timestamp=report.created[:19],
        hostname="localhost",  # reports contain no host name
        tests=str(len(tests)),
        failures=failures,
        errors=wrong,
        skipped=skipped,
        time=_seconds(sum(float(test.get("time", 0)) for test in tests)),
    )
    gpu, packages = report.environment.gpu, report.environment.packages
    values = {
        kind(report): identity(report),
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
    lines = (*(line.text for line in verdict_lines(report)), *_caveats(report))
    SubElement(suite, "system-out").text = _clean("\n".join(lines))
    SubElement(suite, "system-err")
    return suite


def _whole(report: Report) -> Iterator[Element]:
    whole = _test(kind(report), "all requested cases are present")
    if why := incomplete(report):
        _answer(whole, "error", "incomplete", why)
    yield whole
    broken = by_gate(outcome(report).broken)
    for gate in dict.fromkeys(one.spelling for one in report.conditions):
        test = _test("gates", gate)
        if gate in broken:
            _answer(test, "failure", "gate", "\n".join(map(str, broken[gate])))
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


# --- GitHub Actions: https://docs.github.com/actions/reference/workflows-and-actions/workflow-commands


def step_summary(report: Report, used_bytes: int = 0) -> str:
    """The report as Markdown.  used_bytes: present size of the step's summary.

    A report that is too long is cut, with a note; empty if there is no room for the note."""
    room = SUMMARY_BYTES - used_bytes
    text = markdown.render(compose(report), limit_bytes=min(markdown.LIMIT_BYTES, room))
    encoded = text.encode()
    if len(encoded) <= room:
        return text
    if room < len(_CUT):
        return ""
    whole = encoded[: room - len(_CUT)].decode(errors="ignore")
    return whole.rsplit("\n", 1)[0] + _CUT


def workflow_commands(report: Report) -> Iterator[str]:
    """Annotations, one line each: errors for the reasons why it did not pass, warnings for its caveats."""
    yield from _commands("error", f"ssdprof: {subject(report)}", errors(report))
    yield from _commands("warning", f"ssdprof: {subject(report)}", _caveats(report))


def outputs(report: Report) -> dict[str, str]:
    """Outputs of the step.  The last three are the worst values of cases that gates judge; empty without such cases."""
    cases = [case for case in judged(report) if case.result == "passed" and not case.answers]
    speedups = [found.value for case in cases if (found := report.speedup(case))]
    out = [one for case in cases if (one := case.tensor("out"))]
    matches = [pct for one in out if one.vs_baseline and (pct := one.vs_baseline.match_pct(1e-3)) is not None]
    ratios = [ratio for one in out if (ratio := one.over_floor) is not None]
    worst = {
        "least-speedup": min(speedups, default=None),
        "least-match": min(matches, default=None),
        "largest-rms-ratio": max(ratios, default=None),
    }
    return {
        "passed": "true" if outcome(report).passed else "false",
        "verdict": _cut(" ".join(" ".join(line.text for line in verdict_lines(report)).split())),
        "run": identity(report),
        **{name: "" if value is None else f"{value:.6g}" for name, value in worst.items()},
    }


def _commands(name: str, title: str, lines: Iterable[str]) -> Iterator[str]:
    every = list(lines)
    shown = every if len(every) <= MOST_ANNOTATIONS else every[: MOST_ANNOTATIONS - 1]
    head = f"::{name} title={_data(title).replace(':', '%3A').replace(',', '%2C')}::"
    for line in shown:
        yield f"{head}{_data(_cut(line))}"
    if rest := len(every) - len(shown):
        yield f"{head}{fmt.plural(rest, 'line')} more: see the summary of this step."


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_MESSAGE else f"{text[: LONGEST_MESSAGE - 3]}..."


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


# --- github-action-benchmark: https://github.com/benchmark-action/github-action-benchmark

Entry = dict[str, str | float]
_Number = tuple[str, Estimate | float | None, str]  # name, value, unit


def benchmark_action(report: Report, *, bigger: bool = False) -> str:
    """The JSON of its tool customSmallerIsBetter, or customBiggerIsBetter.

    Smaller: device and call times, extra memory or that of a prefill, RMS errors, divergences and perplexities.
    Bigger: speedups over the baseline, how much of the output matches the baseline's, and equal top tokens.
    Cases that did not pass are left out, because they have no valid number.
    """
    extra = f"{kind(report)} {identity(report)}, {gpu_name(report.environment, 'no GPU')}"
    found = [
        _entry(case, *number) | {"extra": extra}
        for case in rows(report)
        if case.result == "passed"
        for number in (_bigger(report, case) if bigger else _smaller(case))
        if number[1] is not None
    ]
    return json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False)


def _smaller(case: Case) -> Iterator[_Number]:
    out, band = case.tensor("out"), _band(case)
    yield "device time", case.device_us, "µs"
    yield "call time", case.call_us, "µs"
    yield "peak memory", case.prefill.peak_bytes if case.prefill else None, "bytes"
    yield "extra memory", case.memory.workspace_bytes if case.memory else None, "bytes"
    yield "rms error", out.vs_oracle.rms_ratio if out else None, "relative"
    yield "KL, mean", band.kl_mean if band else None, "nats"
    yield "perplexity", band.perplexity if band else None, "tokens"


def _bigger(report: Report, case: Case) -> Iterator[_Number]:
    out, band = case.tensor("out"), _band(case)
    yield "speedup, device", report.speedup(case, "device"), "x"
    yield "speedup, call", report.speedup(case, "call"), "x"
    yield "match @ 1e-3", out.vs_baseline.match_pct(1e-3) if out and out.vs_baseline else None, "%"
    yield "same top token", band.top1_pct if band else None, "%"


def _entry(case: Case, name: str, value: Estimate | float | None, unit: str) -> Entry:
    assert value is not None
    number = value.value if isinstance(value, Estimate) else value
    entry: Entry = {"name": f"{case.name}: {name}", "unit": unit, "value": number}
    if isinstance(value, Estimate):
        entry["range"] = f"± {(value.high - value.low) / 2:.3g}"
    return entry
