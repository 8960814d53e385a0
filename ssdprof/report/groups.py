"""Groups cases that can be compared and added up, and describes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ssdprof.report import format as fmt
from ssdprof.schema import CallRef, CaseResult, LayerRef, PrecisionRecord, RunReport
from ssdprof.schema.base import kernel_name
from ssdprof.schema.serving import call_words

_INTERMEDIATES = ("exact", "relaxed")
_STATES = ("fp64", "fp32", "fp16", "bf16")


@dataclass(frozen=True)
class Series:
    """One implementation at one precision, over the layers of a group."""

    implementation: str
    precision: PrecisionRecord
    cases: tuple[CaseResult, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(case.layer.index for case in self.cases)

    @property
    def within_budget(self) -> bool:
        """Whether every case is within the error budget.  False for another library that passed outside of it."""
        return all(case.status == "passed" and all(one.passed for one in case.accuracy) for case in self.cases)

    @property
    def variant(self) -> str:
        """The kernels that ran, by name; several if layers differ."""
        return "/".join(dict.fromkeys(case.variant for case in self.cases if case.variant))

    @property
    def name(self) -> str:
        return kernel_name(self.implementation, self.variant)


@dataclass(frozen=True)
class Group:
    """All cases of one kind of call on one prompt, of one size, which can be compared and added up.

    call: one of these calls; None for calls of a whole prompt.
    """

    seqlen: int
    batch: int
    cases: tuple[CaseResult, ...]
    baseline: str
    call: CallRef | None = None

    @property
    def tokens(self) -> str:
        """ "131,072 tokens", "32 x 1,024 tokens"; of the prompt, if the calls are its chunks or decode steps."""
        if self.call and self.call.kind != "packed":
            return fmt.tokens(self.call.prompt_seqlen, self.batch)
        return fmt.tokens(self.seqlen, self.batch)

    @property
    def where(self) -> str:
        """ "at 131,072 tokens", "in decode steps after 512 tokens"."""
        return call_words(self.call, self.seqlen, self.batch)

    @property
    def size(self) -> str:
        """`where` without its preposition."""
        return self.where.partition(" ")[2]

    @property
    def steps(self) -> bool:
        """Whether the calls are decode steps."""
        return self.call is not None and self.call.kind == "decode"

    @property
    def calls(self) -> int:
        """Number of calls, in all layers."""
        return len({(case.layer.index, case.call) for case in self.cases})

    @property
    def extent(self) -> str:
        """ "layer 3", "3 layers", "4 steps in each of 3 layers"; where a run was broken off "11 steps in 3 layers"."""
        layers = len(self.layers)
        of_layers = f"layer {self.layers[0].index}" if layers == 1 else f"{layers} layers"
        noun = "step" if self.steps else "chunk"
        calls = {self.at_layer(layer).calls for layer in self.layers}
        if len(calls) > 1:
            return f"{fmt.plural(self.calls, noun)} in {of_layers}"
        each = calls.pop()
        if each == 1:
            return of_layers
        return f"{fmt.plural(each, noun)} in {'' if layers == 1 else 'each of '}{of_layers}"

    @property
    def layers(self) -> tuple[LayerRef, ...]:
        by_index = {case.layer.index: case.layer for case in self.cases}
        return tuple(by_index[index] for index in sorted(by_index))

    @property
    def implementations(self) -> tuple[str, ...]:
        """The baseline first, the others in the order in which they ran."""
        names = dict.fromkeys(case.implementation for case in self.cases)
        return tuple(sorted(names, key=lambda name: name != self.baseline))

    @property
    def compared(self) -> tuple[str, ...]:
        """The compared implementations: all except the baseline."""
        return tuple(name for name in self.implementations if name != self.baseline)

    def series(self, implementation: str | None = None) -> tuple[Series, ...]:
        """Every series, or those of one implementation: exact before relaxed, wide states before narrow ones."""
        wanted = self.implementations if implementation is None else (implementation,)
        found = []
        for name in wanted:
            cases = [case for case in self.cases if case.implementation == name]
            for precision in sorted({case.precision for case in cases}, key=precision_order):
                own = (case for case in cases if case.precision == precision)
                found.append(Series(name, precision, tuple(sorted(own, key=lambda case: case.layer.index))))
        return tuple(found)

    def keep(self, wanted: Callable[[CaseResult], bool]) -> Group:
        """The group with only the selected cases."""
        return replace(self, cases=tuple(case for case in self.cases if wanted(case)))

    def at_layer(self, layer: LayerRef) -> Group:
        return self.keep(lambda case: case.layer.index == layer.index)

    def baseline_of(self, series: Series) -> Series | None:
        """The baseline of a series: as its cases name it, else the exact baseline with the same state dtype."""
        named = {one.vs_baseline.against for case in series.cases for one in case.accuracy if one.vs_baseline}
        exact = PrecisionRecord(intermediates="exact", state_dtype=series.precision.state_dtype)
        wanted = named or {f"{self.baseline} {exact}"}
        return next((own for own in self.series(self.baseline) if f"{self.baseline} {own.precision}" in wanted), None)


def groups(report: RunReport) -> tuple[Group, ...]:
    """One group per prompt, kind of call, length and batch: the longest prompt first, decode steps after it."""
    found: dict[tuple[int, bool, int, int], list[CaseResult]] = {}
    for case in report.cases:
        call, size = case.call, (case.dims.seqlen, case.dims.batch)
        prompt = call.prompt_seqlen if call else size[0]
        found.setdefault((prompt, not (call and call.kind == "decode"), *size), []).append(case)
    return tuple(
        Group(seqlen, batch, tuple(cases), baseline=report.baseline_of(cases[0].call), call=cases[0].call)
        for (_, _, seqlen, batch), cases in sorted(found.items(), key=lambda item: item[0], reverse=True)
    )


def baselines(name: str, pairs: Iterable[tuple[PrecisionRecord, str]]) -> str:
    """The baselines of all precisions as text.  pairs: (precision, baseline that it names)."""
    found = list(pairs)
    if not found:
        return name
    if all(against == f"{name} exact, {precision.state_dtype} states" for precision, against in found):
        return f"{name}, exact, with the same state dtype"
    return " or ".join(dict.fromkeys(against for _, against in found))


def tokens(prompts: Iterable[Group]) -> str:
    """ "131,072, 16,384 and 1,024 tokens"; decode steps are named only if there are no prompts."""
    every = list(prompts)
    first, *others = dict.fromkeys(group.tokens for group in [one for one in every if not one.steps] or every)
    if not others:
        return first
    return fmt.words(text.removesuffix("s").removesuffix(" token") for text in (first, *others)) + " tokens"


def places(prompts: Iterable[Group]) -> str:
    """ "at 131,072 and 16,384 tokens", "at 512 tokens and in decode steps after 512 tokens"."""
    every = list(prompts)
    whole = [group for group in every if group.call is None]
    others = [group.where for group in every if group.call is not None]
    return fmt.words([*([f"at {tokens(whole)}"] if whole else []), *others])


def precision_order(precision: PrecisionRecord) -> tuple[int, int]:
    return _INTERMEDIATES.index(precision.intermediates), _STATES.index(precision.state_dtype)
