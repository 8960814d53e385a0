"""Laws that every correct kernel obeys, on inputs that show more than a model's own:
docs/measuring.md.

A law calls one implementation on inputs made from a captured call, and raises `Broken` with the
first position, or `NotApplicable` with the reason.  What must be bitwise equal is compared by its
bits; the rest is judged as the captured call is, by `accuracy.compare`.  Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise
from math import inf, log2
from typing import TypeVar

import torch
from torch import Tensor

from ssdprof.core import words
from ssdprof.core.accuracy import Accuracy
from ssdprof.core.base import REPEATS, Probe
from ssdprof.environment import child
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.oracle import spans_of
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation
from ssdprof.measure.accuracy import (
    Candidate,
    changes,
    compare,
    fingerprints,
    oracle_output,
    unravel,
)
from ssdprof.measure.diagnosis import diagnosed
from ssdprof.measure.first_run import Call
from ssdprof.measure.isolate import GuardedInputs, IsolatedFirstCall
from ssdprof.measure.sequences import (
    alone,
    amplified,
    is_packed,
    joined,
    lengths_in_words,
    longest_of,
    output_of,
    rows_of_states,
)
from ssdprof.operators import generate
from ssdprof.operators.generate import EdgeInputs, History, KnownOutputs
from ssdprof.operators.operator import Operator, Output
from ssdprof.operators.rounding import unit_roundoff

Form = TypeVar("Form")  # of inputs, of which a kernel may refuse some
LONGEST = {"cuda": 2048, "cpu": 512}  # positions of a sequence
CALLS = 4  # of which any may differ, if a kernel does not repeat its bits
REPLACED_FROM = 257  # one past a border of chunks of 16 to 256
AMPLIFICATION = 2.0**40
AMPLIFIED_SHARE = 32
NEGLIGIBLE = 2.0**-6  # of a rounding
AMPLIFIED_HISTORY = "amplified history"
TURNING_KEYS = "turning keys"
DROPPED = 0.08  # RMS error of known outputs; roundings cause up to 0.03
# of the budget in laws, for a library that needs more than the budget anyway and is tolerated: its
# RMS error of at most 1 % is about four times that of rounding to bf16
TOLERATED_ROOM = 4.0


class Broken(Exception):
    """A law does not hold.  The message is the first position."""


class NotApplicable(Exception):
    """The message is the reason."""


def tested(name: str, law: Callable[[], str | None]) -> Probe:
    """Whether a law holds, with the limits that it returns.  Raises MissingCapabilityError if a
    fault made the GPU unusable.
    """
    child.alive()
    try:
        return Probe(name=name, holds="yes", detail=law() or "")
    except Broken as error:
        return Probe(name=name, holds="no", detail=str(error))
    except NotApplicable as error:
        why = str(error)
    except torch.OutOfMemoryError:
        why = "out of memory"
    return Probe(name=name, holds="not applicable", detail=why)


def untested(_: object) -> None:
    """Stands in place of a law that takes too long."""
    raise NotApplicable("Triton's interpreter runs it; --laws all tests it")


# --- calls and what is judged


@dataclass(frozen=True)
class Trial:
    """Makes and judges the calls of one implementation.

    inputs: a captured call, or some of its sequences, each cut to `LONGEST` positions.  whole: the
    call.  long_heads: numbers of heads of histories that are longer than the call; empty: no form
    but the call's is tried.
    latest: the inputs and the output of the last call; of calls that are judged as one longer call,
    those of the longer one.
    """

    operator: Operator
    implementation: Implementation
    inputs: Inputs
    precision: Precision
    isolated: IsolatedFirstCall
    whole: Inputs
    long_heads: Sequence[int]
    latest: list[tuple[Inputs, Output]] = field(default_factory=list)

    def run(self, inputs: Inputs) -> Output:
        """Raises NotApplicable with the reason if there is no output, and Broken for what no call
        may do.
        """
        call = Call(
            implementation=self.implementation,
            inputs=inputs,
            precision=self.precision,
            label=self.implementation.name,
        )
        if self.implementation.isolated:
            call = self.isolated.guarded(call, GuardedInputs(inputs))
        output, fields = call.first_run(launches=False)
        if output is not None:
            if self.implementation.pools:  # a later call may write the same slots
                output = output[0], output[1].clone()
            self.latest[:] = [(inputs, output)]
            return output
        reason: str = fields["reason"]
        # no exception of its own
        if fields["status"] == "failed" and reason.startswith(("it ", "its ")):
            raise Broken(reason)
        raise NotApplicable(reason)

    @cached_property
    def base(self) -> Output:
        return self.run(self.inputs)

    def judge(self, inputs: Inputs, output: Output, context: str = "") -> None:
        """Raises Broken, with the context first, unless the output is within its budget."""
        if wrong := self.outside(inputs, output, self.room):
            if inputs.length > self.latest[0][0].length:
                self.latest[:] = [(inputs, output)]
            known = diagnosed(inputs, self._candidate(output), wrong)
            raise Broken(context + "; ".join(accuracy.reason for accuracy in known))

    def _candidate(self, output: Output) -> Candidate:
        return Candidate(
            output=output, precision=self.precision, cuts=self.implementation.cuts_operands
        )

    def outside(self, inputs: Inputs, output: Output, room: float) -> list[Accuracy]:
        """The outputs that need more than this many times their budget."""
        if output[0].dtype == torch.float32:
            # sums in another order are no fault: their roundings add up as a random walk does
            room *= output[0].shape[1] ** 0.5
        scaled = (
            accuracy.changed(
                budget=tuple(use.changed(budget=room * use.budget) for use in accuracy.budget),
                checks=tuple(test.changed(limit=room * test.limit) for test in accuracy.checks),
            )
            for accuracy in compare(inputs, {"": self._candidate(output)})[""]
        )
        return [accuracy for accuracy in scaled if accuracy.reason]

    @cached_property
    def room(self) -> float:
        """The share of its budget that an output may use: 1, but more for a library whose output
        for the captured call was tolerated outside of the budget.
        """
        with self._latest_kept():
            if self.implementation.kind == "library" and self.outside(self.inputs, self.base, 1.0):
                return TOLERATED_ROOM
        return 1.0

    def passes(self, inputs: Inputs) -> bool:
        """Whether a call of these inputs is made, and its output is within its budget."""
        with self._latest_kept():
            try:
                return not self.outside(inputs, self.run(inputs), self.room)
            except (Broken, NotApplicable):
                return False

    @contextmanager
    def _latest_kept(self) -> Iterator[None]:
        """A call inside is not `latest`: it is another one that breaks the law."""
        latest = self.latest[:]
        yield
        self.latest[:] = latest

    # --- forms of the captured call

    @property
    def has_fp16(self) -> bool:
        """Whether large numbers would overflow."""
        return torch.float16 in (self.inputs.values.dtype, self.precision.state_dtype)

    @property
    def leak_factor(self) -> float:
        """Other sequences are multiplied by it: large enough to show a leak of 0.001 of them, or a
        mask that is wrong in one row.
        """
        return 2.0**4 if self.has_fp16 else 2.0**20

    @property
    def amplification(self) -> float:
        """The factor of a history, small enough that the share of it that the implementation
        declares to neglect stays negligible.
        """
        share = self.implementation.neglects
        if not share:
            return AMPLIFICATION
        return min(AMPLIFICATION, NEGLIGIBLE * unit_roundoff(self.inputs.values.dtype) / share)

    @cached_property
    def several_sequences(self) -> Inputs:
        """The call's sequences, or the only one as a pack of three parts."""
        first, *others = spans_of(self.inputs)
        if others:
            return self.inputs
        if "cu_seqlens" not in self.inputs.__dataclass_fields__ or first.length < 4:
            raise NotApplicable("there is one sequence, which cannot be divided")
        bounds = [0, first.length // 4, 2 * first.length // 3, first.length]
        parts = [replace(first, start=start, stop=stop) for start, stop in pairwise(bounds)]
        return joined(self.inputs, parts, packed=True)

    @cached_property
    def longest(self) -> Inputs:
        """The longest sequence, not packed."""
        return alone(self.inputs, longest_of(self.inputs))

    @cached_property
    def halves(self) -> tuple[Inputs, Inputs]:
        """The longest sequence before and after the largest power of two; the second part begins
        with zeros.
        """
        (whole,) = spans_of(self.longest)
        middle = 1 << (whole.length - 1).bit_length() >> 1
        if not middle or len(self.longest.LINEAR) == 1:
            raise NotApplicable("the sequences are too short, or have no initial state")
        zeros = torch.zeros(self.longest.states_shape, device=self.longest.device)
        first = alone(self.longest, replace(whole, stop=middle))
        second = alone(self.longest, replace(whole, start=middle))
        return first, second.after(zeros)

    def finer(self) -> Iterator[Inputs]:
        """With the model's activations in fp32, or, if that is refused or declared to be cut to
        tf32, in fp16.
        """
        activations = self.operator.binding.activations(self.inputs)
        dtype = next(iter(activations.values())).dtype
        if dtype == torch.float32:
            return
        finer = [] if self.implementation.cuts_operands else [torch.float32]
        if dtype != torch.float16:
            finer.append(torch.float16)
        for wanted in finer:
            cast = {name: tensor.to(wanted) for name, tensor in activations.items()}
            if all(bool(tensor.isfinite().all()) for tensor in cast.values()):
                yield replace(self.inputs, **cast)

    def with_states(self) -> Iterator[Inputs]:
        """The call as a pack, or as it is, with random initial states."""
        if len(self.inputs.LINEAR) == 1:
            return
        forms = [self.inputs]
        with suppress(NotApplicable):
            forms.insert(0, self.several_sequences)
        for inputs in forms:
            yield inputs.after(generate.states(*inputs.states_shape, device=inputs.device))

    @property
    def edges(self) -> Sequence[Sequence[EdgeInputs[Inputs]]]:
        """The edge inputs of each kind.  A library that was not requested is called in this
        process, and may not return: it gets the first kind alone.
        """
        kinds = self.operator.generated.edges(self.inputs)
        is_unrequested_library = (
            self.implementation.kind == "library" and not self.implementation.named
        )
        return kinds[:1] if is_unrequested_library else kinds

    @property
    def histories(self) -> list[Iterator[History[Inputs]]]:
        """For each kind of history: its inputs, lazily."""
        histories = self.operator.generated.histories
        return [] if histories is None else list(histories(self.whole, self.long_heads))

    def forms(self) -> Iterator[Inputs]:
        """Inputs of every form that is certain to be called."""
        yield self.inputs
        with suppress(NotApplicable):
            yield self.several_sequences
        with suppress(NotApplicable):
            yield from self.halves
        for kind in self.operator.generated.edges(self.inputs):
            yield kind[0].make()
        yield from islice(self.finer(), 1)
        yield from islice(self.with_states(), 1)
        for histories in self.histories:
            for inputs, _ in islice(histories, 1):
                yield inputs


def judge_first(forms: Iterable[Form], otherwise: str, judge: Callable[[Form], None]) -> None:
    """Judge the first form that the kernel takes.  NotApplicable with its refusals if it takes
    none.
    """
    refusals = [otherwise]
    for form in forms:
        try:
            return judge(form)
        except NotApplicable as refusal:
            refusals.append(str(refusal))
    raise NotApplicable(": ".join(dict.fromkeys(refusals)))


def judge_kinds(
    kinds: Sequence[Iterable[Form]], otherwise: str, judge: Callable[[Form], None]
) -> None:
    """`judge_first` of every kind.  NotApplicable if all are refused."""
    refusals: list[NotApplicable] = []
    for forms in kinds:
        try:
            judge_first(forms, otherwise, judge)
        except NotApplicable as refusal:
            refusals.append(refusal)
    if len(refusals) == len(kinds):
        raise refusals[0] if refusals else NotApplicable(otherwise)


def first_difference(outputs: Sequence[Tensor], others: Sequence[Tensor]) -> str | None:
    """The first element that differs, in words; None if none does.

    Numbers below 2^-100 count as equal: a GPU may flush them to zero.
    """
    for name, tensor, other in zip(("out", "final_states"), outputs, others, strict=False):
        differs = (
            (tensor != other)
            & ~(tensor.isnan() & other.isnan())
            & ~(torch.maximum(tensor.abs(), other.abs()) < 2.0**-100)
        )
        if bool(differs.any()):
            position = unravel(int(differs.flatten().to(torch.uint8).argmax()), tuple(tensor.shape))
            return (
                f"{name} at {position} is {float(tensor[position]):.9g} and "
                f"{float(other[position]):.9g}"
            )
    return None


# --- the laws


def repeats_bitwise(trial: Trial) -> None:
    """The same call gives the same bits again."""
    if difference := first_difference(trial.base, trial.run(trial.inputs)):
        raise Broken(difference)


def inputs_unchanged(trial: Trial) -> None:
    """A call writes to none of its inputs."""
    before = fingerprints(trial.inputs.tensors)
    trial.run(trial.inputs)
    if words := changes(before, trial.inputs.tensors):
        raise Broken(words)


def other_sequences(trial: Trial) -> None:
    """The output of a sequence does not change if every second sequence becomes larger."""
    inputs = trial.several_sequences
    spans = spans_of(inputs)
    before = trial.run(inputs)
    after = trial.run(amplified(inputs, spans[::2], trial.leak_factor))
    for span in spans[1::2]:
        output = output_of(inputs, after, span)
        if difference := first_difference(output_of(inputs, before, span), output):
            context = f"a sequence depends on others: {difference}; "
            trial.judge(alone(inputs, span), output, context)


def sequence_alone(trial: Trial) -> None:
    """The last sequence has the same result among others and alone, except for rounding: tiles
    depend on shapes.
    """
    inputs = trial.several_sequences
    last = spans_of(inputs)[-1]
    inputs_alone = alone(inputs, last)
    together = trial.run(inputs)
    output = trial.run(inputs_alone)
    if difference := first_difference(output_of(inputs, together, last), output):
        context = f"a sequence alone is not as among others: {difference}; "
        trial.judge(inputs_alone, output, context)
        trial.judge(inputs, together, context)


def causality(trial: Trial) -> None:
    """Later inputs are reversed and become amplified, from one past a border, and from the
    border.
    """
    length = trial.inputs.values.shape[1]
    if length < 2:
        raise NotApplicable("the call has a single position")
    last = REPLACED_FROM if length > REPLACED_FROM else (length - 2) // 16 * 16 + 1
    for start in (last, last - 1):
        if start:
            _replace_later(trial, start)


def _replace_later(trial: Trial, start: int) -> None:
    """Inputs from position `start` of the tensors on must not change earlier outputs."""
    inputs = trial.inputs
    spans = spans_of(trial.inputs)
    later = [replace(span, start=max(span.start, start)) for span in spans if span.stop > start]
    before = trial.base[0][:, :start]
    after = trial.run(amplified(inputs, later, trial.leak_factor))[0][:, :start]
    if difference := first_difference([before], [after]):
        parts = [replace(span, stop=min(span.stop, start)) for span in spans if span.start < start]
        early = joined(inputs, parts, packed=is_packed(inputs))
        context = f"inputs from position {start} on change earlier outputs: {difference}; "
        trial.judge(early, (after, oracle_output(early)[1]), context)


def linearity(trial: Trial) -> None:
    """Inputs times 2 give outputs times 2, bit by bit if the kernel repeats its bits."""
    tensors = trial.inputs.tensors
    doubled = {name: tensors[name] * 2 for name in trial.inputs.LINEAR if name in tensors}
    inputs = replace(trial.inputs, **doubled)
    output = trial.run(inputs)
    difference = first_difference([tensor * 2 for tensor in trial.base], output)
    if difference is None:
        return
    if trial.has_fp16:
        raise NotApplicable("small fp16 numbers have fewer bits, so that doubling is not exact")
    context = "inputs times 2 do not give outputs times 2: "
    if _repeats(trial, trial.inputs, trial.base) and _repeats(trial, inputs, output):
        raise Broken(f"{context}{difference}")
    trial.judge(inputs, output, context)


def _repeats(trial: Trial, inputs: Inputs, output: Output) -> bool:
    return all(first_difference(output, trial.run(inputs)) is None for _ in range(CALLS))


def cut_in_two(trial: Trial) -> None:
    before, after = trial.halves
    first = trial.run(before)
    second = trial.run(after.after(first[1]))
    trial.judge(trial.longest, (torch.cat([first[0], second[0]], 1), second[1]))


def single_steps(trial: Trial) -> None:
    """Token by token, each call with the state that the one before left, the output is within its
    budget.
    """
    inputs = trial.longest
    (whole,) = spans_of(inputs)
    outputs: list[Output] = []
    state = inputs.initial
    for start in range(whole.length):
        step = alone(inputs, replace(whole, start=start, stop=start + 1))
        outputs.append(trial.run(step.after(state)))
        state = outputs[-1][1]
    outs, states = zip(*outputs, strict=True)
    trial.judge(inputs, (torch.cat(outs, 1), torch.cat(states)))


def accepted_tokens(trial: Trial) -> None:
    """The next tokens begin with the state that was kept after any of the drafted ones."""
    inputs = trial.longest
    (whole,) = spans_of(inputs)
    (out, states) = trial.run(inputs)
    for kept in range(1, whole.length):
        rest = alone(inputs, replace(whole, start=kept))
        more = trial.run(rest.after(states[kept - 1 : kept]))
        output = torch.cat([out[:, :kept], more[0]], 1), torch.cat([states[:kept], more[1]])
        trial.judge(inputs, output, f"after {kept} accepted tokens: ")


def edge_inputs(trial: Trial) -> None:
    """The output for edge inputs is within the budget.  A broken law names the trait that is at
    fault, and the sizes of the inputs.
    """

    def judge(edge: EdgeInputs[Inputs]) -> None:
        inputs = edge.make()
        sizes = trial.operator.oracle.dims(inputs).words
        words_of_inputs = f"{lengths_in_words(inputs)}, {sizes}"
        try:
            output = trial.run(inputs)
        except Broken as error:
            raise Broken(f"{error}, with {words_of_inputs}") from None
        if trial.outside(inputs, output, trial.room):
            trial.judge(inputs, output, f"{_cause(trial, edge)}, in {words_of_inputs}: ")

    judge_kinds(trial.edges, "no edge inputs could be tried", judge)


def _cause(trial: Trial, edge: EdgeInputs[Inputs]) -> str:
    """The trait without which the kernel passes, with its rule; else all traits."""
    for trait in edge.traits:
        if trial.passes(edge.make(left_out=trait)):
            return f"{trait.name} ({trait.rule})" if trait.rule else trait.name
    return words.words(trait.name for trait in edge.traits) if edge.traits else "random numbers"


def amplified_history(trial: Trial) -> str:
    """Test the call and, where other forms are called, a pack with initial states.  Returns the
    limits in which the law holds.
    """
    if trial.has_fp16:
        raise NotApplicable("fp16 numbers would overflow")
    if longest_of(trial.inputs).length < 2 * AMPLIFIED_SHARE:
        raise NotApplicable(f"the sequences have fewer than {2 * AMPLIFIED_SHARE} positions")
    if trial.amplification <= 1:
        raise NotApplicable("what it neglects of a state is as small as a rounding")
    kinds: list[Iterable[Inputs]] = [[trial.inputs]]
    if trial.long_heads:
        kinds.append(trial.with_states())
    judge_kinds(
        kinds, "no such inputs could be tried", lambda inputs: _judge_amplified(trial, inputs)
    )
    share = trial.implementation.neglects
    if not share:
        return ""
    return f"times 2^{log2(trial.amplification):g}: it neglects 2^{log2(share):g} of a state"


def _judge_amplified(trial: Trial, inputs: Inputs) -> None:
    """The first values of each sequence, and its initial state, become larger.  At most `LONGEST`
    positions of a sequence are judged; without other forms, of the longest one alone.
    """
    longest = LONGEST[inputs.device.type]
    linear = {
        name: inputs.tensors[name] * trial.amplification
        for name in inputs.LINEAR[1:]
        if name in inputs.tensors
    }
    linear[inputs.LINEAR[0]] = values = inputs.values.clone()
    for span in spans_of(inputs):
        stop = span.start + min(span.length, longest) // AMPLIFIED_SHARE
        values[span.batch, span.start : stop] *= trial.amplification
    inputs = replace(inputs, **linear)
    out, states = trial.run(inputs)
    for span in spans_of(inputs) if trial.long_heads else [longest_of(inputs)]:
        judged = replace(span, stop=min(span.stop, span.start + longest))
        part = alone(inputs, judged)
        # the states after these positions are known only where the sequence ends there
        ends = judged == span
        after = states[rows_of_states(inputs, span)] if ends else oracle_output(part)[1]
        if span.length:
            trial.judge(part, (out[span.batch, judged.start : judged.stop][None], after))


def turning_keys(trial: Trial) -> None:
    judge_kinds(
        trial.histories,
        "no such inputs could be tried",
        lambda history: _judge_history(trial, history),
    )


def _judge_history(trial: Trial, history: History[Inputs]) -> None:
    """Raise Broken, with the largest RMS error of a kind of heads, if that error is above
    `DROPPED`.
    """
    inputs, outputs = history
    out, _ = trial.run(inputs)
    errors = [(known, _errors_of(known, out)) for known in outputs if len(known.positions)]
    known, relative = max(errors, key=lambda pair: float(pair[1].max()))
    bad = relative > DROPPED
    worst = int(relative.argmax())
    if not bool(bad.any()):
        return
    batch, length, heads = out.shape[:3]
    # before the first window, such a call has no history that could be dropped
    without_history = bool(bad[0]) and inputs.initial is None
    fault = "outputs are wrong" if without_history else "history that matters is dropped"
    raise Broken(
        f"{fault}, with {batch} x {length:,} tokens and {heads} heads: "
        f"{float(relative[worst]):.3g} RMS error at position {int(known.positions[worst])} "
        f"of row {known.batch}, and above {DROPPED:g} in {int(bad.sum())} of {len(bad)} "
        f"{known.kind}; rounding explains 0.03"
    )


def _errors_of(known: KnownOutputs, out: Tensor) -> Tensor:
    """The relative RMS error at each of the known positions."""
    actual = out[known.batch, known.positions][:, known.heads].double()
    error = (actual - known.expected).square().sum((1, 2)).sqrt()
    return (error / known.expected.square().sum((1, 2)).sqrt()).nan_to_num(nan=inf)


def finer_inputs(trial: Trial) -> None:
    judge_first(
        trial.finer(),
        "a fault below the rounding of 16-bit inputs could not be seen",
        lambda inputs: trial.judge(inputs, trial.run(inputs)),
    )


Law = Callable[[Trial], str | None]  # returns the limits in which it holds
LAWS: dict[str, Law] = {
    REPEATS: repeats_bitwise,
    "inputs unchanged": inputs_unchanged,
    "other sequences": other_sequences,
    "sequence alone": sequence_alone,
    "causality": causality,
    "linearity": linearity,
    "cut in two": cut_in_two,
    "single steps": single_steps,
    "accepted tokens": accepted_tokens,
    "edge inputs": edge_inputs,
    AMPLIFIED_HISTORY: amplified_history,
    TURNING_KEYS: turning_keys,
    "finer inputs": finer_inputs,
}
# those that call what was compiled for the captured call
OF_THE_SAME_FORM = frozenset(
    {
        REPEATS,
        "inputs unchanged",
        "causality",
        "linearity",
        AMPLIFIED_HISTORY,
        TURNING_KEYS,
        "single steps",
        "accepted tokens",
    }
)


def laws_of(trial: Trial) -> dict[str, Law]:
    """The laws that these inputs can test."""
    steps = trial.inputs.state_every == 1
    left_out = {"cut in two"} if steps else {"single steps", "accepted tokens"}
    if not trial.histories:
        left_out.add(TURNING_KEYS)
    return {name: law for name, law in LAWS.items() if name not in left_out}
