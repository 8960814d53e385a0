"""How long states keep their digits: what each format costs and loses, by layer, by memory of the
heads and by step.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ssdprof.core import statistics
from ssdprof.core import words as fmt
from ssdprof.core.base import MEMORIES, grouped, states_of
from ssdprof.core.case import BUDGET, Case, DecodedStates, StateErrors, worst
from ssdprof.core.report import Report
from ssdprof.core.statistics import Estimate
from ssdprof.report.table import Section, Table, TableRow, VerdictLine, section, strings, table

SLOTS = 256  # sequences in the pools whose sizes are shown
TITLE = "States of decoded tokens"  # of a section
_FLAT = 0.1  # exponent of the step, up to which an error stays
_MAY_GROW = {"grows": "still grows", "unclear": "may still grow"}  # trends
_DETAILED = 2  # formats whose losses are in the sentence
_READING = (
    "Errors: rms of the difference from fp64 over rms of fp64, of the worst head: of the state "
    "after the last step, of the output in the steps since the mark before.  Lost: heads whose "
    f"state error exceeds {BUDGET} times that of the format's first rounding, and that of inputs "
    "in bf16, first after these tokens.  "
    "Trend: the state error of the worst head grows, stays or is forgotten as step^p, fitted from "
    "the square root of the last step on, with its 95 % interval; it is unclear where p is not "
    f"near 0 but could be.  Pool: {SLOTS} sequences, these layers.  "
    "''ssdprof answers --decode-states' shows how the model's answers change."
)


class HeadStates(NamedTuple):
    """Heads of a layer whose states were kept in one format."""

    case: Case
    task: DecodedStates
    heads: Sequence[int]

    @property
    def lost(self) -> list[int]:
        """The step at which each lost head was lost."""
        return [step for head in self.heads if (step := self.task.lost[head]) is not None]

    def worst(self, errors: StateErrors) -> list[float]:
        """The largest error of its heads at each mark; infinite if one is not known."""
        return [worst(of_mark[head] for head in self.heads) for of_mark in errors]

    @property
    def state_errors(self) -> list[float]:
        return self.worst(self.task.state_errors)

    @property
    def out_errors(self) -> list[float]:
        return self.worst(self.task.out_errors)


def by_format(cases: Iterable[Case]) -> dict[str, list[HeadStates]]:
    """Format -> all heads of each layer."""
    layers = [
        HeadStates(case, case.task, range(len(case.task.memories)))
        for case in cases
        if isinstance(case.task, DecodedStates) and case.task.state_errors
    ]
    return grouped(layers, lambda layer: states_of(layer.case.precision))


def by_size(report: Report) -> dict[str, list[Case]]:
    """ "4,096 tokens, decoded" -> its cases, the longest first."""
    cases = sorted(report.of_states, key=lambda case: -case.seqlen)
    return grouped(cases, lambda case: f"{case.size}, {case.where.rpartition(', ')[2]}")


def by_layer(report: Report) -> dict[str, list[Case]]:
    """ "layer 3, decoded, 4,096 tokens" -> its cases."""
    return grouped(report.of_states, lambda case: case.case_key)


# --- tables


def overviews(report: Report) -> list[Table]:
    """Tables of all formats over all layers, one for each size."""
    tables = []
    for size, cases in by_size(report).items():
        layer_count = len({case.case_key for case in cases})
        rows = []
        for name, layers in by_format(cases).items():
            pool = _pool_bytes(layers)
            rows.append({"states": name, f"pool\nof {SLOTS}": fmt.size_words(pool), **_row(layers)})
        title = f"States, {size}, {fmt.plural(layer_count, 'layer')}"
        tables.append(table(title, rows, ("states", "trend")))
    return tables


def sections(report: Report) -> Iterator[Section]:
    """The formats, then the heads of each layer by memory, then their errors step by step."""
    yield section(TITLE, *overviews(report), reading=_READING)
    for layer, cases in by_layer(report).items():
        tables = [_of_memories(cases), steps(cases, "state"), steps(cases, "output")]
        yield section(f"States, {layer}", *tables, folded=True)


def _of_memories(cases: Sequence[Case]) -> Table:
    """A row for each format and the heads that forget within the same time."""
    rows = []
    for name, (layer,) in by_format(cases).items():
        memories = layer.task.memories
        for memory, heads in sorted(grouped(layer.heads, memories.__getitem__).items()):
            within = f"within {MEMORIES[memory]:,}" if memory < len(MEMORIES) else "hardly"
            names = {"states": name, "heads\nforget": within}
            rows.append(names | _row([layer._replace(heads=heads)]))
    words = ("states", "heads\nforget", "trend")
    return table("Heads by the tokens within which they forget", rows, words, keys=2)


def _row(layers: Sequence[HeadStates]) -> TableRow:
    """What a format loses, and its errors in the worst head."""
    lost = [step for layer in layers for step in layer.lost]
    heads = sum(len(layer.heads) for layer in layers)
    power = _power(layers)
    return {
        "heads\nlost": f"{len(lost):,} of {heads:,}",
        "from\ntoken": fmt.count(min(lost)) if lost else "never",
        "state\nerror": fmt.small(_last_error(layers)),
        "output\nerror": fmt.small(max(layer.out_errors[-1] for layer in layers)),
        "trend": _trend(power),
        "p": "{:.2f} [{:.2f}, {:.2f}]".format(*power) if power else fmt.MISSING,
    }


def steps(cases: Sequence[Case], which: str) -> Table:
    """The error of a layer's state or output in its worst head, step by step."""
    lines = errors_by_step(cases, which)
    cells = [map(fmt.count, marks(cases)), *(map(fmt.small, line) for line in lines.values())]
    rows = zip(*cells, strict=True) if lines else ()
    return strings(f"Error of the {which}, worst head", ("tokens", *lines), rows, ())


def marks(cases: Sequence[Case]) -> Sequence[int]:
    """The numbers of tokens after which errors were measured, equal in all cases."""
    return next(case.task.marks for case in cases if isinstance(case.task, DecodedStates))


def errors_by_step(cases: Sequence[Case], which: str) -> dict[str, list[float]]:
    """Format -> the largest error of a head at each mark."""
    return {
        name: layer.state_errors if which == "state" else layer.out_errors
        for name, (layer,) in by_format(cases).items()
    }


# --- numbers


def losses(cases: Iterable[Case]) -> int:
    """The number of heads that the formats lose, together."""
    return sum(len(layer.lost) for layers in by_format(cases).values() for layer in layers)


def _last_error(layers: Iterable[HeadStates]) -> float:
    return max(layer.state_errors[-1] for layer in layers)


def _pool_bytes(layers: Iterable[HeadStates]) -> int | None:
    """The bytes of the states in a pool of `SLOTS` slots; None for a user's format."""
    sizes = [layer.task.slot_bytes for layer in layers]
    return None if None in sizes else SLOTS * sum(filter(None, sizes))


def _power(layers: Sequence[HeadStates]) -> Estimate | None:
    """The power of the step with which the state error of the worst head grows; None if there are
    too few steps, or an error is 0 or not finite.
    """
    marks = layers[0].task.marks
    later = []
    lines = zip(*(layer.state_errors for layer in layers), strict=True)
    for mark, errors in zip(marks, lines, strict=True):
        if mark**2 >= marks[-1]:
            later.append((mark, max(errors)))
    if not all(0 < error < math.inf for _, error in later):
        return None
    return statistics.exponent(*zip(*later, strict=True))


def _trend(power: Estimate | None) -> str:
    if power is None:
        return fmt.MISSING
    if power.low > _FLAT:
        return "grows"
    if power.high < -_FLAT:
        return "is forgotten"
    return "stays" if abs(power.value) <= _FLAT else "unclear"


# --- what to do


def advice(report: Report) -> VerdictLine | None:
    """The smallest pool that keeps every head of the most tokens, and what other formats lose."""
    for cases in by_size(report).values():
        if not (formats := by_format(cases)):
            continue
        errors = {name: _last_error(layers) for name, layers in formats.items()}
        pools = {name: _pool_bytes(layers) or math.inf for name, layers in formats.items()}
        losers = [name for name, layers in formats.items() if any(each.lost for each in layers)]
        kept = [name for name in formats if name not in losers]
        words = [f"no format keeps every head of {cases[0].size}"]
        if kept:
            best = min(kept, key=lambda name: (pools[name], errors[name]))
            out_error = fmt.small(max(layer.out_errors[-1] for layer in formats[best]))
            words = [
                f"keep states in {best} or better, which keeps every head of {cases[0].size}, at "
                f"an output error of {out_error}"
            ]
            trend = _trend(_power(formats[best]))
            if trend in _MAY_GROW:
                words.append(f"its error {_MAY_GROW[trend]}, so try a longer --seq")
        losers.sort(key=errors.__getitem__)
        words += [_loss(name, formats[name]) for name in losers[:_DETAILED]]
        words += [f"{name} loses heads, too" for name in losers[_DETAILED:]]
        return VerdictLine("; ".join(words), bool(kept))
    return None


def _loss(name: str, layers: Sequence[HeadStates]) -> str:
    """ "bf16 loses 3 of 32 heads of layer 7 after 512 tokens", of the layer that loses the most."""
    most = max(layers, key=lambda layer: len(layer.lost))
    where = most.case.where.rpartition(", ")[0]
    heads = f"{len(most.lost):,} of {fmt.plural(len(most.heads), 'head')} of {where}"
    return f"{name} loses {heads} after {fmt.plural(min(most.lost), 'token')}"
