"""The output of `ssdprof compare`: two reports of the same kind, BASE and NEW, and what changed
between them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path

from ssdprof.core import words as fmt
from ssdprof.core.base import distinct, short_precision
from ssdprof.core.case import Case, DecodedStates
from ssdprof.core.pairs import CasePair, Comparison, Side, Total, target, unfinished
from ssdprof.core.report import Report
from ssdprof.report.calls import match_heading
from ssdprof.report.facts import versions_of
from ssdprof.report.table import (
    PRECISION,
    Document,
    Section,
    Table,
    TableRow,
    VerdictLine,
    is_filled,
    section,
    shortened,
    strings,
    table,
)

READING = (
    "Ratios are BASE's time over NEW's: above 1, NEW is faster.  Time: by device, of a prefill by "
    "call.  Speedups are over the baseline, and compare across machines; their ratio is NEW's over "
    "BASE's.  In brackets: 95 % intervals of the spread within each of the two; what differs from "
    "run to run, such as clocks and temperature, is not in them."
)
_MOST_OFFENDERS = 3  # cases named for each condition; `compare` names all of them on stderr
_NAMES = ("case", "implementation", PRECISION)


def _names(pair: CasePair) -> TableRow:
    return {
        "case": pair.case.case_key,
        "implementation": pair.case.implementation,
        PRECISION: short_precision(pair.case.precision),
    }


# --- what the columns BASE and NEW show of a case


def _errors(case: Case) -> TableRow:
    """The match with the baseline, and the errors against the fp64 oracle."""
    error = case.error
    return {
        match_heading(1e-3).replace("\n", " "): fmt.percent(case.match_pct(1e-3)),
        "rms error": fmt.small(error.rms_of_all if error else None),
        "largest error": fmt.small(error.max_abs if error else None),
    }


def _answers(case: Case) -> TableRow:
    band = case.band
    return {
        "mean KL [nats]": fmt.small(band.kl_mean if band else None),
        "same top token": fmt.percent(band.top1_pct if band else None),
        "perplexity": fmt.small(band.perplexity if band else None),
    }


def _states(case: Case) -> TableRow:
    """How long a format keeps all states, and its errors after the last step; no cells for a case
    that decodes no states.
    """
    if not isinstance(case.task, DecodedStates):
        return {}
    return {
        "steps kept": fmt.count(case.task.kept_steps),
        "state error": fmt.small(case.task.last(case.task.state_errors)),
        "output error": fmt.small(case.task.last(case.task.out_errors)),
    }


def _accuracy_cells(case: Case) -> TableRow:
    """The cells of all tables on accuracy."""
    return _errors(case) | _answers(case) | _states(case)


def _resources(case: Case) -> TableRow:
    """The kernels of a case.  A digest stands for their configurations, which are too long for a
    table.
    """
    configuration = " ".join(f"{launch.kernel} {launch.digest}" for launch in case.launches)
    digest = sha256(configuration.encode()).hexdigest()[:6]
    return {
        "kernel": case.variant_and_version or fmt.MISSING,
        "configuration": digest if configuration else fmt.MISSING,
        "kernels": fmt.count(case.kernel_count),
        "extra memory": fmt.size_words(case.workspace_bytes),
    }


# title of a section -> the cells of a case that its table compares
_DESCRIBED: dict[str, Callable[[Case], TableRow]] = {
    "Accuracy of the output": _errors,
    "Answers of the model": _answers,
    "States of decoded tokens": _states,
    "Kernels and memory": _resources,
}


# --- the document


def compose(
    comparison: Comparison, stalls: Sequence[Table] = (), *, all_cases: bool = False
) -> Document:
    """The document of a comparison.

    stalls: the tables of changes by stage.
    all_cases: whether to show cases and columns that did not change, too.
    """
    names = _short_names(str(comparison.base[0]), str(comparison.new[0]))
    return Document(
        title=f"ssdprof compare: BASE {names[0]}, NEW {names[1]}",
        verdict=tuple(_verdict(comparison)),
        caveats=tuple(_caveats(comparison)),
        sections=tuple(_sections(comparison, stalls, all_cases)),
    )


def _short_names(base: str, new: str) -> tuple[str, str]:
    """The last parts of two paths that differ: x and y of a/x/run and b/y/run.  The paths as they
    are if one is the end of the other, or if they are equal.
    """
    parts = zip(reversed(Path(base).parts), reversed(Path(new).parts), strict=False)
    for base_part, new_part in parts:
        if base_part != new_part:
            return base_part, new_part
    return base, new


def _verdict(comparison: Comparison) -> Iterator[VerdictLine]:
    """The conditions that fail, those that hold, and how many cases were compared and differ, or
    why none was compared.
    """
    passed = []
    for change, verdicts in comparison.verdicts.items():
        if verdicts:
            offenders = shortened([verdict.what for verdict in verdicts], _MOST_OFFENDERS)
            yield VerdictLine(f"FAILED: {change}: {offenders}.", good=False)
        else:
            passed.append(change)
    if passed:
        yield VerdictLine(f"PASSED: no case violates {fmt.words(passed, 'or')}.")
    if reason := comparison.nothing_compared:
        counts = _times(comparison, comparison.pairs)
        yield VerdictLine(f"FAILED: nothing was compared: {reason} ({counts}).", good=False)
        return
    in_both = [pair for pair in comparison.pairs if pair.base and pair.new]
    summary = f"Compared {fmt.plural(len(in_both), 'case')}."
    unpaired = [pair.verdict for pair in comparison.pairs if not (pair.base and pair.new)]
    if unpaired:
        summary += f"  Not compared: {_counts(unpaired)}."
    summary += f"  Time: {_times(comparison, in_both)}."
    if changes := _counts(filter(None, map(_accuracy_change, comparison.pairs))):
        summary += f"  Accuracy: {changes}."
    yield VerdictLine(summary)


def _times(comparison: Comparison, pairs: Iterable[CasePair]) -> str:
    """How many pairs have which verdict: "4 no difference within 1%, 1 slower".  Without a
    smallest difference no limit is named: "4 no difference".
    """
    within = "no difference"
    if comparison.smallest_difference:
        within += f" within {100 * comparison.smallest_difference:g}%"
    verdicts = (pair.verdict for pair in pairs)
    return _counts(within if verdict == "no difference" else verdict for verdict in verdicts)


def _accuracy_change(pair: CasePair) -> str:
    """How the result of a case changed, or else its errors, in words.  Empty if BASE or NEW has no
    such case, or no error of it.

    "equal": all cells that the tables show are.
    """
    base = pair.base
    new = pair.new
    if base is None or new is None:
        return ""
    if base.result != new.result:
        return f"now {new.result}"
    before = _error(base)
    after = _error(new)
    if before is None or after is None:
        return ""
    if pair.other_inputs:
        return "not comparable"
    if _accuracy_cells(base) == _accuracy_cells(new):
        return "equal"
    return "with a larger error" if after > before else "with another error, no larger"


def _error(case: Case) -> float | None:
    """What "a larger error" compares: the RMS error of an output, the error of a decoded state
    after the last step, or the mean KL divergence of answers.  None if the case has none.
    """
    if isinstance(case.task, DecodedStates):
        return case.task.last(case.task.state_errors)
    if case.band:
        return case.band.kl_mean
    return case.error.rms_of_all if case.error else None


def _counts(words: Iterable[str]) -> str:
    """How often each word occurs, the most frequent one first: "3 equal, 1 slower"."""
    return ", ".join(f"{number} {word}" for word, number in Counter(words).most_common())


def _caveats(comparison: Comparison) -> Iterator[str]:
    """The reasons why times or errors cannot be compared, and why a report is incomplete."""
    with_speedups = [pair for pair in comparison.pairs if pair.over_baseline]
    reasons = distinct([comparison.machine, *(pair.incomparable for pair in with_speedups)])
    if reasons:
        speedups = ""
        if with_speedups:
            speedups = "  Speedups over the baseline, each measured under the same conditions, are."
        yield (
            f"The conditions differ ({'; '.join(reasons)}), so absolute times are not compared."
            f"{speedups}"
        )
    for name, (_, report) in (("BASE", comparison.base), ("NEW", comparison.new)):
        if reason := unfinished(report):
            yield f"{name} is not complete: {reason}."
    for reason in dict.fromkeys(pair.other_inputs for pair in comparison.pairs):
        if reason:
            yield f"Errors cannot be compared: {reason}."


def _sections(
    comparison: Comparison, stalls: Sequence[Table], all_cases: bool
) -> Iterator[Section]:
    """The sections: the change of speed, what else differs, what was not compared, and what ran.

    all_cases: whether to show cases and columns that did not change, too.
    """
    in_both = [(pair, pair.base, pair.new) for pair in comparison.pairs if pair.base and pair.new]
    shown_verdicts = ("faster", "slower", "no difference") if all_cases else ("faster", "slower")
    speeds = [
        _speed(comparison, pair, base, new)
        for pair, base, new in in_both
        if pair.verdict in shown_verdicts
    ]
    yield section(
        "Speed",
        _totals(comparison.totals),
        table("Speed of NEW against BASE", speeds, (*_NAMES, "verdict"), keys=3),
        reading=READING,
    )
    for title, describe in _DESCRIBED.items():
        described = [(_names(pair), describe(base), describe(new)) for pair, base, new in in_both]
        yield section(title, _differences(title, described, all_cases))
    yield section("Stalls by stage", *stalls)
    yield section("Not compared", _unpaired(comparison.pairs))
    yield section("What ran", _facts(comparison))


def _totals(totals: Sequence[Total]) -> Table:
    """A row for each mean change of cases of one implementation and precision.  The column "by"
    says of what the ratio is, and `READING` how.
    """
    rows = [
        {
            "implementation": total.implementation,
            PRECISION: short_precision(total.precision),
            "where": total.where,
            "verdict": total.verdict,
            "ratio": fmt.speedup(total.change, by_call=total.by.startswith("call")),
            "by": total.by,
            "mean of": fmt.plural(total.cases, total.over),
        }
        for total in totals
    ]
    text_headings = ("implementation", PRECISION, "where", "verdict", "by", "mean of")
    return table("Change of all cases together", rows, text_headings, keys=3)


def _speed(comparison: Comparison, pair: CasePair, base: Case, new: Case) -> TableRow:
    """The row of a case that both have: the changes, then the times and the speedups over the
    baseline in BASE and in NEW.
    """
    by_call = pair.case.clock == "call"
    return {
        **_names(pair),
        "verdict": pair.verdict,
        "time,\nBASE / NEW": fmt.speedup(pair.time, by_call=by_call),
        "call time,\nBASE / NEW": fmt.speedup(pair.call, by_call=True),
        "speedup,\nNEW / BASE": fmt.speedup(pair.over_baseline, by_call=by_call),
        "time,\nBASE": fmt.duration(base.time_us and base.time_us.value),
        "time,\nNEW": fmt.duration(new.time_us and new.time_us.value),
        "speedup,\nBASE": _speedup(comparison.base, base),
        "speedup,\nNEW": _speedup(comparison.new, new),
    }


def _speedup(side: Side, case: Case) -> str:
    _, report = side
    speedup = report.speedup(case)
    return fmt.ratio(speedup and speedup.value)


def _differences(
    title: str, described: Sequence[tuple[TableRow, TableRow, TableRow]], all_cases: bool
) -> Table:
    """The cells of BASE and NEW side by side.

    described: for each case its names, its cells in BASE, and its cells in NEW.
    all_cases: whether to show cases and columns without a difference, too, unless the case has no
        value at all.
    """
    shown = [
        (names, base, new)
        for names, base, new in described
        if base != new or (all_cases and any(map(is_filled, base.values())))
    ]
    rows: list[TableRow] = [dict(names) for names, _, _ in shown]
    headings = list(shown[0][1]) if shown else []
    for heading in headings:
        if all_cases or any(base[heading] != new[heading] for _, base, new in shown):
            for row, (_, base, new) in zip(rows, shown, strict=True):
                row[f"{heading},\nBASE"] = base[heading]
                row[f"{heading},\nNEW"] = new[heading]
    note = "" if all_cases else "Only cases that changed; all of them with --format markdown."
    return table(f"{title}, side by side", rows, _NAMES, keys=3, note=note)


def _unpaired(pairs: Sequence[CasePair]) -> Table:
    """The cases without a verdict on speed, and why they have none.

    Cases that passed in both reports, and were timed in neither, are left out.
    """
    rows = []
    for pair in pairs:
        sides = {"BASE": pair.base, "NEW": pair.new}
        details = ", ".join(f"{name} {_result(case)}" for name, case in sides.items() if case)
        passed_untimed = pair.verdict == "not timed" and details == "BASE passed, NEW passed"
        if passed_untimed or pair.verdict in ("faster", "slower", "no difference"):
            continue
        if pair.verdict == "not comparable":
            details = "; ".join(pair.incomparable) or details
        rows.append(_names(pair) | {"why": pair.verdict, "more": details})
    return table("Cases without a verdict on speed", rows, (*_NAMES, "why", "more"), keys=3)


def _result(case: Case) -> str:
    return f"{case.result} and timed" if case.time_us else case.result


def _facts(comparison: Comparison) -> Table:
    """What BASE and NEW ran, and on which machine."""
    base_name, base = comparison.base
    new_name, new = comparison.new
    new_facts = _facts_of(new)
    rows = [(name, fact, new_facts[name]) for name, fact in _facts_of(base).items()]
    headers = ("", f"BASE: {base_name}", f"NEW: {new_name}")
    return strings("What ran", headers, rows, (0, 1, 2))


def _facts_of(report: Report) -> TableRow:
    return {
        "what": f"{report.kind}: {target(report)}",
        "started": report.created,
        "commit": report.commit or fmt.MISSING,
        **versions_of(report, ("triton", "torch", "transformers"), fmt.MISSING),
    }
