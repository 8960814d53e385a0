"""Laws that every correct kernel obeys, and inputs that show more than a model's own:
docs/measuring.md.

Each probe calls one implementation again, on inputs made from a captured call, and says yes, no
with the first place that breaks the law, or not applicable.  What must be bitwise equal is compared
by its bits; the rest is judged as the captured call is, by `accuracy.compare`.  Nothing is timed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, islice, pairwise
from math import inf, log2
from typing import Any, TypeVar

import torch

from ssdprof import operators
from ssdprof.core import words as fmt
from ssdprof.core.base import REPEATS, Holds, Probe
from ssdprof.environment import child
from ssdprof.kernels.device import INTERPRETED
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation
from ssdprof.measure import pools
from ssdprof.measure.accuracy import Candidate, compare, fingerprint, oracle_output, unravel
from ssdprof.measure.first_run import Call
from ssdprof.measure.isolate import GuardedInputs, IsolatedFirstCall
from ssdprof.operators import generate
from ssdprof.operators.generate import History
from ssdprof.operators.operator import Operator, Output
from ssdprof.operators.rounding import Span, unit_roundoff

T = TypeVar("T", Inputs, History[Any])
LONGEST = {"cuda": 2048, "cpu": 512}  # positions of a sequence
MOST_WHOLE_BYTES = 2 << 30  # of inputs that are not cut
MOST_SEQUENCES = 3
CALLS = 4  # of which any may differ, if a kernel does not repeat its bits
REPLACED_FROM = 257  # one past a border of chunks of 16 to 256
LOUD_FACTOR, LOUD_SHARE = 2.0**40, 32
NEGLIGIBLE = 2.0**-6  # of a rounding
LOUD_PAST = "loud past"
TURNING_KEYS = "turning keys"
LONG_HEADS = (1, 4)  # of histories that are longer than the call
DROPPED = 0.08  # RMS error of known outputs; roundings cause up to 0.03
# of the budget in laws, for a library that needs more than the budget anyway and is tolerated: its
# RMS error of at most 1 % is about four times that of rounding to bf16
TOLERATED_ROOM = 4.0
OF_THE_SAME_FORM = (
    REPEATS,
    "inputs unchanged",
    "causality",
    "doubling",
    LOUD_PAST,
    TURNING_KEYS,
    "single steps",
    "accepted tokens",
)


class _NotApplicable(Exception):
    """The message is the reason.  Or "no": a call did what no call may do."""

    def __init__(self, reason: str, holds: Holds = "not applicable") -> None:
        super().__init__(reason)
        self.holds = holds


class Prober:
    """Probes implementations, each once for a kind of layer: operator, sizes and dtype.  In later
    layers of a kind it tests the loud past alone, and not of bundled kernels: how slowly heads
    forget differs from layer to layer.  Turning keys it tests once for each shape of a call, since
    kernels cut long calls alone.

    thorough: in every call, and bundled kernels by every law.  Else these are probed by the laws
        that call what was compiled for the captured call, at its length, since compiling takes
        longer than the run; in Triton's interpreter not at all.
    kinds: of the implementations that are probed.
    only: the law that is tested; empty: all.
    """

    def __init__(
        self, isolated: IsolatedFirstCall, *, thorough: bool = False, only: str = ""
    ) -> None:
        self._isolated, self._thorough, self._only = isolated, thorough, only
        self._done: set[Hashable] = set()
        self._latest: dict[str, weakref.ref[Any]] = {}  # inputs by implementation
        self.kinds: set[str] = (
            {"own", "library"} if INTERPRETED and not thorough else {"own", "library", "bundled"}
        )

    def probe(
        self,
        implementation: Implementation,
        inputs: Inputs,
        precision: Precision,
        interpreted: bool = False,
    ) -> tuple[Probe, ...]:
        """Empty if nothing was to be done.

        inputs: of a call that the implementation computed correctly.  interpreted: slowly, by
        Triton's interpreter.  Raises MissingCapabilityError if a fault in the implementation made
        the GPU unusable.
        """
        kind, shape = self._keys(implementation, inputs)
        new_kind, new_shape = (self._thorough or one not in self._done for one in (kind, shape))
        same = (latest := self._latest.get(implementation.name)) is not None and latest() is inputs
        self.probed(implementation, inputs)
        every = self._thorough or implementation.kind != "bundled"
        skipped = interpreted and not self._thorough
        names = {TURNING_KEYS} if new_shape and not skipped else set()
        if every and not same and not skipped:
            names.add(LOUD_PAST)
        if self._only:
            names &= {self._only}
        if not names and (self._only or not new_kind):
            return ()
        between: tuple[Probe, ...] = ()
        if new_kind and not self._only and pools.applies(implementation, inputs):
            between = tuple(pools.try_laws(implementation, inputs, precision, quick=skipped))
        given = inputs
        if every or sum(tensor.nbytes for tensor in inputs.tensors.values()) > MOST_WHOLE_BYTES:
            longest = LONGEST[inputs.device.type]
            spans = [
                replace(one, stop=min(one.stop, one.start + longest))
                for one in _spans(inputs)
                if one.length
            ]
            given = _joined(inputs, spans[:MOST_SEQUENCES], packed=_packed(inputs))
        long_heads: Sequence[int] = LONG_HEADS if every else ()
        if interpreted:
            long_heads = long_heads[:1]
        operator = operators.get(inputs.operator)
        laws = _Laws(operator, implementation, given, precision, self._isolated, inputs, long_heads)
        if new_kind and skipped and not self._only:
            why = "Triton's interpreter runs it; --thorough tests it"
            untested = (Probe(name=name, holds="not applicable", detail=why) for name in laws.tests)
            return (*untested, *between)
        if new_kind and not self._only:
            names = set(laws.tests if every else OF_THE_SAME_FORM)
            if implementation.isolated:
                self._isolated.prepare(implementation, list(laws.forms()), precision)
        return (*(laws.tested(name) for name in laws.tests if name in names), *between)

    def probed(self, implementation: Implementation, inputs: Inputs) -> None:
        """Take this call as probed."""
        self._done.update(self._keys(implementation, inputs))
        self._latest[implementation.name] = weakref.ref(inputs)

    def _keys(self, implementation: Implementation, inputs: Inputs) -> tuple[Hashable, Hashable]:
        """Keys of the kind of layer, and of the shape of the call."""
        dims = operators.get(inputs.operator).judged.dims(inputs)
        kind = (
            implementation.name,
            dims.operator,
            *dims.sizes.items(),
            dims.dtype,
            dims.seqlen == 1,
            _packed(inputs),
            inputs.state_every,
        )
        return kind, (kind, dims.batch, dims.seqlen, inputs.sequences)


@dataclass(frozen=True)
class _Laws:
    """inputs: a captured call, or at most `MOST_SEQUENCES` of its sequences, each cut to `LONGEST`
    positions.  whole: the call.  long_heads: numbers of heads of histories that are longer.
    """

    operator: Operator
    implementation: Implementation
    inputs: Inputs
    precision: Precision
    isolated: IsolatedFirstCall
    whole: Inputs
    long_heads: Sequence[int]

    @property
    def tests(self) -> dict[str, Callable[[], str]]:
        """Name -> the first place that breaks the law; empty if none does."""
        cuts = {"cut in two": self._cut_in_two}
        if self.inputs.state_every == 1:
            cuts = {"single steps": self._single_steps, "accepted tokens": self._accepted}
        turning = {TURNING_KEYS: self._turning_keys} if self._histories() else {}
        return {
            REPEATS: lambda: _different(self._base, self._run(self.inputs)),
            "inputs unchanged": self._unchanged,
            "other sequences": self._others,
            "sequence alone": self._alone,
            "causality": self._causality,
            "doubling": self._doubling,
            **cuts,
            "edge inputs": self._edges,
            LOUD_PAST: self._loud_past,
            **turning,
            "finer inputs": lambda: self._first_judged(
                self._finer(),
                "a fault below the rounding of 16-bit inputs could not be seen",
                self._passes,
            ),
        }

    def tested(self, name: str) -> Probe:
        child.alive()
        try:
            if detail := self.tests[name]():
                return Probe(name=name, holds="no", detail=detail)
            return Probe(name=name, holds="yes", detail=self._limit if name == LOUD_PAST else "")
        except _NotApplicable as error:
            return Probe(name=name, holds=error.holds, detail=str(error))
        except torch.OutOfMemoryError:
            return Probe(name=name, holds="not applicable", detail="out of memory")

    def forms(self) -> Iterator[Any]:
        """Inputs of every form that is certain to be called."""
        yield self.inputs
        with suppress(_NotApplicable):
            yield self._several
        with suppress(_NotApplicable):
            yield from self._halves
        for kind in (*self.operator.generated.edges(self.inputs), self._finer()):
            yield from islice(kind, 1)
        yield from islice(self._with_states(), 1)
        for histories in self._histories():
            yield from (history.inputs for history in islice(histories, 1))

    # --- calls

    def _run(self, inputs: Inputs) -> Output:
        """Raises _NotApplicable with the reason if there is no output."""
        one = self.implementation
        call = Call(
            operator=self.operator,
            implementation=one,
            inputs=inputs,
            precision=self.precision,
            label=one.name,
        )
        if one.isolated:
            call = self.isolated.guarded(call, GuardedInputs(inputs))
        output, fields = call.first_run(launches=False)
        if output is not None:
            return output
        reason: str = fields["reason"]
        # no exception of its own
        harmful = fields["status"] == "failed" and reason.startswith(("it ", "its "))
        raise _NotApplicable(reason, "no" if harmful else "not applicable")

    @cached_property
    def _base(self) -> Output:
        return self._run(self.inputs)

    def _judged(self, inputs: Inputs, output: Output) -> str:
        """The reason why the output does not pass; empty if it does."""
        return self._outside(inputs, output, self._room)

    def _outside(self, inputs: Inputs, output: Output, room: float) -> str:
        """The reason why the output needs more than this many times its budget."""
        cuts, (out, _) = self.implementation.cuts_operands, output
        candidate = Candidate(output=output, precision=self.precision, cuts=cuts)
        if out.dtype == torch.float32:
            # sums in another order are no fault: their roundings add up as a random walk does
            room *= out.shape[1] ** 0.5
        reasons = [
            one.changed(
                budget=tuple(use.changed(budget=room * use.budget) for use in one.budget),
                checks=tuple(test.changed(limit=room * test.limit) for test in one.checks),
            ).reason
            for one in compare(inputs, {"": candidate})[""]
        ]
        return "; ".join(filter(None, reasons))

    @cached_property
    def _room(self) -> float:
        """1, unless it is a library whose output for the captured call was tolerated outside the
        budget.
        """
        tolerated = self.implementation.kind == "library" and self._outside(
            self.inputs, self._base, 1.0
        )
        return TOLERATED_ROOM if tolerated else 1.0

    def _passes(self, inputs: Inputs) -> str:
        return self._judged(inputs, self._run(inputs))

    def _first_judged(self, several: Iterator[T], otherwise: str, judge: Callable[[T], str]) -> str:
        """What is wrong with the output of the first inputs that the kernel takes."""
        refusals = [otherwise]
        for inputs in several:
            try:
                return judge(inputs)
            except _NotApplicable as error:
                if error.holds == "no":
                    tried = inputs.inputs if isinstance(inputs, History) else inputs
                    lengths = fmt.words((f"{one.length:,}" for one in _spans(tried)), "and")
                    reason = f"{error}, with sequences of {lengths} tokens"
                    raise _NotApplicable(reason, "no") from None
                refusals.append(str(error))
        raise _NotApplicable(": ".join(dict.fromkeys(refusals)))

    def _every_kind(
        self, kinds: Sequence[Iterator[T]], otherwise: str, judge: Callable[[T], str]
    ) -> str:
        """`_first_judged` of every kind, up to a wrong one; not applicable if all are refused."""
        refused: list[_NotApplicable] = []
        for kind in kinds:
            try:
                if wrong := self._first_judged(kind, otherwise, judge):
                    return wrong
            except _NotApplicable as error:
                if error.holds == "no":
                    raise
                refused.append(error)
        if len(refused) == len(kinds):
            raise refused[0]
        return ""

    # --- inputs

    @property
    def _fp16(self) -> bool:
        """Whether large numbers would overflow."""
        return torch.float16 in (self.inputs.values.dtype, self.precision.state_dtype)

    @property
    def _leak_factor(self) -> float:
        """It shows a leak of 0.001, and a mask that is wrong in one row."""
        return 2.0**4 if self._fp16 else 2.0**20

    @cached_property
    def _several(self) -> Any:
        """The call's sequences, or the only one as a pack of three parts."""
        first, *others = _spans(self.inputs)
        if others:
            return self.inputs
        if not hasattr(self.inputs, "cu_seqlens") or first.length < 4:
            raise _NotApplicable("there is one sequence, which cannot be divided")
        bounds = [0, first.length // 4, 2 * first.length // 3, first.length]
        return _joined(
            self.inputs, [replace(first, start=a, stop=b) for a, b in pairwise(bounds)], packed=True
        )

    @cached_property
    def _one(self) -> Any:
        """The longest sequence, not packed."""
        return _joined(
            self.inputs, [max(_spans(self.inputs), key=lambda one: one.length)], packed=False
        )

    @cached_property
    def _halves(self) -> tuple[Any, Any]:
        """The longest sequence before and after the largest power of two; the second part begins
        with zeros.
        """
        (whole,) = _spans(self._one)
        middle = 1 << (whole.length - 1).bit_length() >> 1
        if not middle or len(self._one.LINEAR) == 1:
            raise _NotApplicable("the sequences are too short, or have no initial state")
        zeros = torch.zeros(self._one.states_shape, device=self._one.device)
        before, after = replace(whole, stop=middle), replace(whole, start=middle)
        first, second = (_joined(self._one, [part], packed=False) for part in (before, after))
        return first, second.after(zeros)

    def _finer(self) -> Iterator[Any]:
        """With the model's activations in fp32, or, if that is refused or declared to be cut to
        tf32, in fp16.
        """
        given = self.operator.binding.activations(self.inputs)
        own = next(iter(given.values())).dtype
        finer = [] if self.implementation.cuts_operands else [torch.float32]
        for dtype in [] if own == torch.float32 else [*finer, torch.float16]:
            cast = {name: tensor.to(dtype) for name, tensor in given.items()}
            if dtype != own and all(bool(tensor.isfinite().all()) for tensor in cast.values()):
                yield replace(self.inputs, **cast)

    # --- laws

    def _edges(self) -> str:
        kinds = list(operators.get(self.inputs.operator).generated.edges(self.inputs))
        # is called here, not in a process of its own, and may not return
        if self.implementation.kind == "library" and not self.implementation.named:
            del kinds[1:]
        return self._every_kind(kinds, "no edge inputs could be tried", self._passes)

    def _histories(self) -> list[Iterator[History[Any]]]:
        histories = operators.get(self.inputs.operator).generated.histories
        return list(histories(self.whole, self.long_heads)) if histories else []

    def _turning_keys(self) -> str:
        return self._every_kind(self._histories(), "no such inputs could be tried", self._recalls)

    def _recalls(self, history: History[Any]) -> str:
        """Where the output is not the known one: the largest RMS error of a kind of heads."""
        out, _ = self._run(history.inputs)
        worst, wrong = DROPPED, ""
        for known in history.known:
            ours = out[known.batch, known.positions][:, known.heads].double()
            squares = ((ours - known.expected).square(), known.expected.square())
            error, size = (each.sum((1, 2)).sqrt() for each in squares)
            relative = (error / size).nan_to_num(nan=inf)
            bad = relative > DROPPED
            if not bool(bad.any()) or float(relative.max()) <= worst:
                continue
            worst, index = float(relative.max()), int(relative.argmax())
            batch, length, heads = out.shape[:3]
            # before the first window, such a call has no history that could be dropped
            without_history = bool(bad[0]) and history.inputs.initial is None
            fault = "outputs are wrong" if without_history else "history that matters is dropped"
            wrong = (
                f"{fault}, with {batch} x {length:,} tokens and {heads} heads: {worst:.3g} RMS "
                f"error at position {int(known.positions[index])} of row {known.batch}, "
                f"and above {DROPPED:g} in {int(bad.sum())} of {len(bad)} {known.kind}; "
                "rounding explains 0.03"
            )
        return wrong

    def _unchanged(self) -> str:
        before = {name: fingerprint(tensor) for name, tensor in self.inputs.tensors.items()}
        self._run(self.inputs)
        changed = [
            name for name, now in self.inputs.tensors.items() if fingerprint(now) != before[name]
        ]
        return f"it changes its inputs: {', '.join(changed)}" if changed else ""

    def _others(self) -> str:
        spans = _spans(self._several)
        ours = self._run(self._several)
        other = self._run(_louder(self._several, spans[::2], self._leak_factor))
        for one in spans[1::2]:
            rows, several = _rows(self._several, one), (ours, other)
            before, after = (
                (out[one.batch, one.start : one.stop][None], states[rows])
                for out, states in several
            )
            alone = _joined(self._several, [one], packed=False)
            if (words := _different(before, after)) and (wrong := self._judged(alone, after)):
                return f"a sequence depends on others: {words}; {wrong}"
        return ""

    def _alone(self) -> str:
        last = _spans(self._several)[-1]
        one = _joined(self._several, [last], packed=False)
        together, alone = self._run(self._several), self._run(one)
        same = (
            together[0][last.batch, last.start : last.stop][None],
            together[1][_rows(self._several, last)],
        )
        if not (words := _different(same, alone)):
            return ""
        # tiles may depend on the shape
        wrong = self._judged(one, alone) or self._judged(self._several, together)
        return wrong and f"a sequence alone is not as among others: {words}; {wrong}"

    def _causality(self) -> str:
        length = self.inputs.values.shape[1]
        if length < 2:
            raise _NotApplicable("the call has a single position")
        last = REPLACED_FROM if length > REPLACED_FROM else (length - 2) // 16 * 16 + 1
        return next(filter(None, (self._later(start) for start in (last, last - 1) if start)), "")

    def _later(self, start: int) -> str:
        spans = _spans(self.inputs)
        later = [replace(one, start=max(one.start, start)) for one in spans if one.stop > start]
        other = self._run(_louder(self.inputs, later, self._leak_factor))
        if not (words := _different([self._base[0][:, :start]], [other[0][:, :start]])):
            return ""
        parts = [replace(one, stop=min(one.stop, start)) for one in spans if one.start < start]
        early = _joined(self.inputs, parts, packed=_packed(self.inputs))
        wrong = self._judged(early, (other[0][:, :start], oracle_output(early)[1]))
        return wrong and f"inputs from position {start} on change earlier outputs: {words}; {wrong}"

    def _doubling(self) -> str:
        linear = {
            name: one for name, one in self.inputs.tensors.items() if name in self.inputs.LINEAR
        }
        inputs = replace(self.inputs, **{name: one * 2 for name, one in linear.items()})
        words = _different([one * 2 for one in self._base], doubled := self._run(inputs))
        if words and self._fp16:
            raise _NotApplicable(
                "small fp16 numbers have fewer bits, so that doubling is not exact"
            )
        known = ((self._base, self.inputs), (doubled, inputs))
        calls = ((output, self._run(given)) for _ in range(CALLS) for output, given in known)
        wrong = words and (
            self._judged(inputs, doubled) if any(_different(*pair) for pair in calls) else words
        )
        return wrong and f"inputs times 2 do not give outputs times 2: {wrong}"

    def _cut_in_two(self) -> str:
        first = self._run(self._halves[0])
        second = self._run(self._halves[1].after(first[1]))
        return self._judged(self._one, (torch.cat([first[0], second[0]], 1), second[1]))

    def _single_steps(self) -> str:
        (whole,) = _spans(self._one)
        out: list[torch.Tensor] = []
        states: list[torch.Tensor] = []
        state = self._one.initial
        for start in range(whole.length):
            step = _joined(self._one, [replace(whole, start=start, stop=start + 1)], packed=False)
            for one, found in zip((out, states), self._run(step.after(state)), strict=True):
                one.append(found)
            state = states[-1]
        return self._judged(self._one, (torch.cat(out, 1), torch.cat(states)))

    def _accepted(self) -> str:
        """The next tokens begin with the state that was kept after any of the drafted ones."""
        (whole,), (out, states) = _spans(self._one), self._run(self._one)
        for kept in range(1, whole.length):
            rest = _joined(self._one, [replace(whole, start=kept)], packed=False)
            more = self._run(rest.after(states[kept - 1 : kept]))
            joined = torch.cat([out[:, :kept], more[0]], 1), torch.cat([states[:kept], more[1]])
            if why := self._judged(self._one, joined):
                return f"after {kept} accepted tokens: {why}"
        return ""

    @property
    def _limit(self) -> str:
        share = self.implementation.neglects
        return (
            f"times 2^{log2(self._loud_factor):g}: it neglects 2^{log2(share):g} of a state"
            if share
            else ""
        )

    @property
    def _loud_factor(self) -> float:
        """What an implementation declares to neglect of a loud past stays negligible."""
        share = self.implementation.neglects
        return (
            min(LOUD_FACTOR, NEGLIGIBLE * unit_roundoff(self._one.values.dtype) / share)
            if share
            else LOUD_FACTOR
        )

    def _loud_past(self) -> str:
        """In the call; where other forms are called, also in a pack with initial states."""
        if self._fp16:
            raise _NotApplicable("fp16 numbers would overflow")
        if max(one.length for one in _spans(self.inputs)) < 2 * LOUD_SHARE:
            raise _NotApplicable(f"the sequences have fewer than {2 * LOUD_SHARE} positions")
        if self._loud_factor <= 1:
            raise _NotApplicable("what it neglects of a state is as small as a rounding")
        kinds = [iter([self.inputs])]
        if self.long_heads:
            kinds.append(self._with_states())
        return self._every_kind(kinds, "no such inputs could be tried", self._recalls_loud)

    def _with_states(self) -> Iterator[Any]:
        """The call as a pack, or as it is, with random initial states."""
        several = [self.inputs]
        with suppress(_NotApplicable):
            several.insert(0, self._several)
        for inputs in several if self.inputs.LINEAR[1:] else ():
            yield inputs.after(generate.states(*inputs.states_shape, device=inputs.device))

    def _recalls_loud(self, inputs: Inputs) -> str:
        loud, spans = inputs.values.clone(), _spans(inputs)
        longest = LONGEST[loud.device.type]
        for one in spans:
            stop = one.start + min(one.length, longest) // LOUD_SHARE
            loud[one.batch, one.start : stop] *= self._loud_factor
        louder = {
            name: inputs.tensors[name] * self._loud_factor
            for name in self.inputs.LINEAR[1:]
            if name in inputs.tensors
        }
        inputs = replace(inputs, **{inputs.LINEAR[0]: loud}, **louder)
        out, states = self._run(inputs)
        spans = spans if self.long_heads else [max(spans, key=lambda one: one.length)]
        for one in spans:
            judged = replace(one, stop=min(one.stop, one.start + longest))
            given = _joined(inputs, [judged], packed=False)
            # the states after these positions are not known
            after = states[_rows(inputs, one)] if judged == one else oracle_output(given)[1]
            rows = out[one.batch, judged.start : judged.stop][None]
            if one.length and (wrong := self._judged(given, (rows, after))):
                return wrong
        return ""


# --- inputs of any operator


def _packed(inputs: Inputs) -> bool:
    return getattr(inputs, "cu_seqlens", None) is not None


def _spans(inputs: Inputs) -> list[Span]:
    """The positions of every sequence."""
    batch, length = inputs.values.shape[:2]
    rows = [(row, 0, length) for row in range(batch)]
    bounds = getattr(inputs, "cu_seqlens", None)
    if bounds is not None:
        rows = [(0, start, stop) for start, stop in pairwise(bounds.tolist())]
    return [
        Span(sequence=i, batch=row, start=start, stop=stop)
        for i, (row, start, stop) in enumerate(rows)
    ]


def _rows(inputs: Inputs, span: Span) -> slice:
    """The rows of a sequence in the final states."""
    every, length = inputs.state_every, inputs.values.shape[1]
    if not every:
        return slice(span.sequence, span.sequence + 1)
    first = span.batch * -(-length // every)
    return slice(first + span.start // every, first - -span.stop // every)


def _joined(inputs: Inputs, spans: Sequence[Span], *, packed: bool) -> Inputs:
    """These spans with the initial states of their sequences: as a pack, or as rows, which have
    equal lengths.
    """
    binding, given = operators.get(inputs.operator).binding, inputs.tensors
    joined: dict[str, torch.Tensor | None] = {}
    for name, tensor in binding.positional(inputs).items():
        parts = [tensor[one.batch, one.start : one.stop] for one in spans]
        joined[name] = torch.cat(parts)[None] if packed else torch.stack(parts)
    for name in ("state_indices",) if "state_indices" in given else inputs.LINEAR[1:]:
        joined[name] = given[name][[one.sequence for one in spans]] if name in given else None
    if packed:
        bounds = [0, *accumulate(one.length for one in spans)]
        joined["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=inputs.device)
    elif _packed(inputs):
        joined["cu_seqlens"] = None
    return replace(inputs, **joined)


def _louder(inputs: Inputs, spans: Sequence[Span], factor: float) -> Inputs:
    """With inputs reversed in time and values times a factor in these spans."""
    binding = operators.get(inputs.operator).binding
    changed = {name: tensor.clone() for name, tensor in binding.positional(inputs).items()}
    for one in spans:
        for tensor in changed.values():
            part = tensor[one.batch, one.start : one.stop]
            part.copy_(part.flip(0))
        changed[inputs.LINEAR[0]][one.batch, one.start : one.stop] *= factor
    return replace(inputs, **changed)


def _different(ours: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> str:
    """The first element of an output that differs, except numbers that a GPU may flush to zero;
    empty if none does.
    """
    for name, one, two in zip(("out", "final_states"), ours, other, strict=False):
        differs = (
            (one != two)
            & ~(one.isnan() & two.isnan())
            & ~(torch.maximum(one.abs(), two.abs()) < 2.0**-100)
        )
        if bool(differs.any()):
            place = unravel(int(differs.flatten().to(torch.uint8).argmax()), tuple(one.shape))
            return f"{name} at {place} is {float(one[place]):.9g} and {float(two[place]):.9g}"
    return ""
