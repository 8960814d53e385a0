"""The tables of states of decoded tokens: how much accuracy each format of the states loses.

A model is decoded token by token with its states rounded to a format after each step.  The tables
show the bytes that a format takes and the errors that it causes: in all layers, in the heads that
forget within similar times, and step by step.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from ssdprof.core import statistics
from ssdprof.core import words as fmt
from ssdprof.core.base import MEMORIES, grouped, states_of
from ssdprof.core.case import BUDGET_FACTOR, Case, DecodedStates, StateErrors, worst
from ssdprof.core.report import Report
from ssdprof.core.statistics import Estimate
from ssdprof.report.table import Section, Table, TableRow, VerdictLine, section, strings, table

POOL_SEQUENCES = 256  # sequences in the pools whose sizes are shown
TITLE = "States of decoded tokens"  # of the section
_FLAT = 0.1  # an error that grows as step^p is said to stay the same if |p| is at most this
_MAY_GROW = {"grows": "still grows", "unclear": "may still grow"}  # trend -> words of the advice
_DETAILED = 2  # formats whose losses the advice describes; it only names further ones
_READING = (
    "Errors: rms of the difference from fp64 over rms of fp64, of the worst head: of the state "
    "after the last step, of the output in the steps since the mark before.  Lost: heads whose "
    f"state error exceeds {BUDGET_FACTOR} times that of the format's first rounding, and that of "
    "inputs in bf16, or is half of the state, first after these tokens.  "
    "Trend: the state error of the worst head grows, stays or is forgotten as step^p, fitted from "
    "the square root of the last step on, with its 95 % interval; it is unclear where p is not "
    f"near 0 but could be.  Pool: {POOL_SEQUENCES} sequences, these layers.  "
    "'ssdprof answers --decode-states' shows how the model's answers change."
)


class HeadStates(NamedTuple):
    """Some heads of a layer, with their states in one format.

    case, task: of that layer and format.  heads: the indices of the heads.
    """

    case: Case
    task: DecodedStates
    heads: Sequence[int]

    @property
    def lost(self) -> list[int]:
        """The number of tokens after which each lost head was lost."""
        lost_after = (self.task.lost[head] for head in self.heads)
        return [step for step in lost_after if step is not None]

    def _worst_at_marks(self, errors: StateErrors) -> list[float]:
        """The largest error of the heads at each mark; infinite if an error is None."""
        return [worst(of_mark[head] for head in self.heads) for of_mark in errors]

    @property
    def state_errors(self) -> list[float]:
        """At each mark, the largest error of the state of a head."""
        return self._worst_at_marks(self.task.state_errors)

    @property
    def out_errors(self) -> list[float]:
        """At each mark, the largest error of the output of a head since the mark before."""
        return self._worst_at_marks(self.task.out_errors)


def by_format(cases: Iterable[Case]) -> dict[str, list[HeadStates]]:
    """Format of the states -> all heads of each layer, without the cases that did not run."""
    layers = [
        HeadStates(case, case.task, range(len(case.task.memories)))
        for case in cases
        if isinstance(case.task, DecodedStates) and case.task.state_errors
    ]
    return grouped(layers, lambda layer: states_of(layer.case.precision))


def by_size(report: Report) -> dict[str, list[Case]]:
    """Size and step, such as "4,096 tokens, decoded by 4" -> its cases.  The longest is first.

    In a bench, whose shapes are no layers of one model, each shape and size stands for itself:
    "mamba2-2.7b, bf16, decoded, 1 x 4,096".
    """

    def size(case: Case) -> str:
        # the last part of `where` says by how many tokens the prompt was decoded
        return f"{case.size}, {case.where.rpartition(', ')[2]}" if case.layer else case.case_key

    return grouped(sorted(report.of_states, key=lambda case: -case.seqlen), size)


def by_layer(report: Report) -> dict[str, list[Case]]:
    """Layer and size, such as "layer 3, decoded, 4,096 tokens" -> its cases, one for each format.

    In a bench, the generated inputs stand in place of the layer.
    """
    return grouped(report.of_states, lambda case: case.case_key)


# --- tables


def overviews(report: Report) -> list[Table]:
    """A table for each size, with a row for each format over all layers."""
    tables = []
    for size, cases in by_size(report).items():
        layer_count = len({case.layer for case in cases if case.layer})
        rows = []
        for name, layers in by_format(cases).items():
            pool = _pool_bytes(layers)
            rows.append(
                {"states": name, f"pool\nof {POOL_SEQUENCES}": fmt.size_words(pool), **_row(layers)}
            )
        title = f"States, {size}"
        if layer_count:
            title += f", {fmt.plural(layer_count, 'layer')}"
        tables.append(table(title, rows, ("states", "trend")))
    return tables


def sections(report: Report) -> Iterator[Section]:
    """The sections: all layers together, then each layer with its heads by memory and its errors
    step by step.
    """
    yield section(TITLE, *overviews(report), reading=_READING)
    for layer, cases in by_layer(report).items():
        tables = [_of_memories(cases), steps(cases, "state"), steps(cases, "output")]
        yield section(f"States, {layer}", *tables, folded=True)


def _of_memories(cases: Sequence[Case]) -> Table:
    """A row for each format and each kind of heads: those that forget within the same one of
    `MEMORIES`.

    cases: of one layer, one for each format.
    """
    rows = []
    for name, (layer,) in by_format(cases).items():
        memories = layer.task.memories  # of each head, an index into `MEMORIES`, or their number
        for memory, heads in sorted(grouped(layer.heads, memories.__getitem__).items()):
            within = f"within {MEMORIES[memory]:,}" if memory < len(MEMORIES) else "hardly"
            names = {"states": name, "heads\nforget": within}
            rows.append(names | _row([layer._replace(heads=heads)]))
    text_headings = ("states", "heads\nforget", "trend")
    return table("Heads by the tokens within which they forget", rows, text_headings, keys=2)


def _row(layers: Sequence[HeadStates]) -> TableRow:
    """The cells of a format: the heads that it loses, the errors of the worst head, and how its
    state error grows.

    layers: some heads of each layer.
    """
    lost = list(chain.from_iterable(layer.lost for layer in layers))
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
    """The errors of the worst head of a layer: a row for each mark, a column for each format.

    which: "state" or "output".
    """
    errors = errors_by_step(cases, which)
    columns = [map(fmt.count, marks(cases))]
    columns += [map(fmt.small, of_format) for of_format in errors.values()]
    rows = zip(*columns, strict=True) if errors else ()
    return strings(f"Error of the {which}, worst head", ("tokens", *errors), rows, ())


def marks(cases: Sequence[Case]) -> Sequence[int]:
    """The numbers of tokens after which errors were measured, which are equal in all cases of a
    size.
    """
    return next(case.task.marks for case in cases if isinstance(case.task, DecodedStates))


def errors_by_step(cases: Sequence[Case], which: str) -> dict[str, list[float]]:
    """Format -> the error of the worst head at each mark.  Formats that did not run are left out.

    cases: of one layer.  which: "state" or "output".
    """
    return {
        name: layer.state_errors if which == "state" else layer.out_errors
        for name, (layer,) in by_format(cases).items()
    }


# --- numbers


def lost_head_count(cases: Iterable[Case]) -> int:
    """The number of heads that are lost, summed over formats and layers."""
    layers = chain.from_iterable(by_format(cases).values())
    return sum(len(layer.lost) for layer in layers)


def _last_error(layers: Iterable[HeadStates]) -> float:
    """The largest error of a state after the last step."""
    return max(layer.state_errors[-1] for layer in layers)


def _pool_bytes(layers: Iterable[HeadStates]) -> int | None:
    """The bytes of the states of `POOL_SEQUENCES` sequences in these layers.

    None if they are not known, as for a format of the user.
    """
    sizes = [layer.task.slot_bytes for layer in layers]
    # `filter` removes no None here, but mypy cannot know that
    return None if None in sizes else POOL_SEQUENCES * sum(filter(None, sizes))


def _power(layers: Sequence[HeadStates]) -> Estimate | None:
    """The exponent p if the state error of the worst head grows as step^p.

    It is fitted to the marks from the square root of the last one on.  None if there are too few
    marks, or if an error is 0 or not finite.
    """
    marks = layers[0].task.marks
    errors_of_layers = [layer.state_errors for layer in layers]
    late_marks = []
    late_errors = []
    for number, mark in enumerate(marks):
        if mark**2 >= marks[-1]:
            late_marks.append(mark)
            late_errors.append(max(errors[number] for errors in errors_of_layers))
    if not all(0 < error < math.inf for error in late_errors):
        return None
    return statistics.exponent(late_marks, late_errors)


def _trend(power: Estimate | None) -> str:
    """The word for the growth of an error.  power: the exponent of the step."""
    if power is None:
        return fmt.MISSING
    if power.low > _FLAT:
        return "grows"
    if power.high < -_FLAT:
        return "is forgotten"
    return "stays" if abs(power.value) <= _FLAT else "unclear"


# --- what to do


def advice(report: Report) -> VerdictLine | None:
    """Which format to take at the largest size at which one ran, and what the other formats lose.

    The advised format takes the fewest bytes of those that ran in every layer in which any did, and
    lose no head there.  None if nothing ran.
    """
    for cases in by_size(report).values():
        formats = by_format(cases)
        if formats:
            case = cases[0]
            return _advice(case.prompt if case.layer else case.case_key, formats)
    return None


def _advice(size: str, formats: Mapping[str, Sequence[HeadStates]]) -> VerdictLine:
    """The advice for one size.

    size: the tokens of the prompt, or a bench's inputs, in words.
    formats: format -> all heads of each layer.
    """
    errors = {name: _last_error(layers) for name, layers in formats.items()}
    pools = {name: _pool_bytes(layers) or math.inf for name, layers in formats.items()}
    lossy = [name for name, layers in formats.items() if any(layer.lost for layer in layers)]
    all_layers = {layer.case.case_key for layer in chain.from_iterable(formats.values())}
    lossless = [
        name
        for name, layers in formats.items()
        if name not in lossy and len(layers) == len(all_layers)  # it ran in every layer
    ]
    which = "" if len(lossy) == len(formats) else " that ran in every layer"
    words = [f"no format{which} keeps every head for {size}"]
    if lossless:
        best = min(lossless, key=lambda name: (pools[name], errors[name]))
        out_error = fmt.small(max(layer.out_errors[-1] for layer in formats[best]))
        words = [
            f"keep states in {best} or better, which keeps every head for {size}, at "
            f"an output error of {out_error}"
        ]
        trend = _trend(_power(formats[best]))
        if trend in _MAY_GROW:
            words.append(f"its error {_MAY_GROW[trend]}, so try a longer --seq")
    lossy.sort(key=errors.__getitem__)
    words += [_loss(name, formats[name]) for name in lossy[:_DETAILED]]
    words += [f"{name} loses heads, too" for name in lossy[_DETAILED:]]
    return VerdictLine("; ".join(words), bool(lossless))


def _loss(name: str, layers: Sequence[HeadStates]) -> str:
    """The loss of a format in the layer that loses the most heads: "bf16 loses 3 of 32 heads of
    layer 7, the first after 512 tokens".
    """
    most = max(layers, key=lambda layer: len(layer.lost))
    where = most.case.where.rpartition(", ")[0]  # without the word "decoded"
    heads = f"{len(most.lost):,} of {fmt.plural(len(most.heads), 'head')} of {where}"
    first = "" if len(most.lost) == 1 else ", the first"
    return f"{name} loses {heads}{first} after {fmt.plural(min(most.lost), 'token')}"
