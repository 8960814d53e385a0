"""Laws that every correct kernel obeys, tested on inputs that show more faults than a model's own.
docs/measuring.md describes them.

A law calls one implementation on inputs that are made from a captured call.  It raises `Broken`,
which says what is wrong and where, or `Skipped` with the reason.  Outputs that must be equal are
compared element by element (`first_difference`).  Others are compared with the oracle, by
`accuracy.compare`, as the output of the captured call is (`Trial.outside` says with which room), or
with outputs that are known in closed form.  Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from math import inf, log2
from typing import TypeVar

import torch
from torch import Tensor

from ssdprof.core import words
from ssdprof.core.accuracy import Accuracy
from ssdprof.core.base import REPEATS, Holds, Probe
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
from ssdprof.operators.operator import Operator, OutputPair
from ssdprof.operators.rounding import unit_roundoff

Watched = Callable[[Inputs], AbstractContextManager[object]]
Form = TypeVar("Form")  # the type of one form of inputs; a kernel may refuse some forms
# the most positions of a sequence; longer ones are cut to their beginning; by type of device
LONGEST = {"cuda": 2048, "cpu": 512}
LONGEST_INTERPRETED = 320  # the same in Triton's interpreter
REPEATED_CALLS = 4  # repeated calls that must agree for a kernel to count as repeating its bits
REPLACED_FROM = 257  # a position that is one past a border of chunks of 16 to 256
# the largest factor of a history; that of an implementation that neglects a share of it is smaller
AMPLIFICATION = 2.0**40
HISTORY_DIVISOR = 32  # the first 1/32 of a sequence is its amplified history
# a neglected share of an amplified history, relative to the later numbers, is at most this share of
# a unit roundoff
NEGLIGIBLE_SHARE = 2.0**-6
EDGE_INPUTS = "edge inputs"
AMPLIFIED_HISTORY = "amplified history"
TURNING_KEYS = "turning keys"
DROPPED = 0.08  # relative RMS error above which known outputs are wrong; roundings cause up to 0.03
# The factor of the budget for a library whose output for the captured call exceeds the budget and
# is tolerated.  A choice below 6: the RMS error tolerated there, 1 % (`CLOSE`), is six times that
# of rounding to bf16.
TOLERATED_ROOM = 4.0
TOO_SLOW = "too slow in Triton's interpreter; --laws all tests it"  # why a law is not tested


class Broken(Exception):
    """A law does not hold.  The message says what is wrong, and where."""


class Skipped(Exception):
    """A law cannot be tested with this call.  The message is the reason.

    holds: "not applicable" if the law says nothing about the call, or if the implementation
        declares that it does not support the law's calls; "not tested" for any other reason.
    """

    def __init__(self, reason: str, holds: Holds = "not applicable") -> None:
        super().__init__(reason)
        self.holds = holds


def tested(name: str, law: Callable[[], str | None]) -> Probe:
    """Test a law, and return the result.

    law: tests it, and returns the limits within which it holds; None or empty: it holds in general.

    `Broken`, `Skipped` and a lack of GPU memory become results; other errors are raised, such as
    MissingCapabilityError if a fault made the GPU unusable.
    """
    child.tell(f"law {name}")
    try:
        return Probe(name=name, holds="yes", detail=law() or "")
    except Broken as error:
        return Probe(name=name, holds="no", detail=str(error))
    except Skipped as skipped:
        return Probe(name=name, holds=skipped.holds, detail=str(skipped))
    except torch.OutOfMemoryError:
        return Probe(name=name, holds="not tested", detail="out of memory")
    finally:
        child.tell("law")


def untested(name: str, reason: str = TOO_SLOW) -> Probe:
    """The result of a law that is not tested."""
    return Probe(name=name, holds="not tested", detail=reason)


# --- calls, and the comparison of their outputs


@dataclass(frozen=True)
class Trial:
    """Makes the calls of one implementation for the laws, and judges their outputs.

    inputs: the captured call, or the beginnings of some of its sequences.
    whole: the captured call.
    isolated: makes first calls of users' kernels and named libraries in another process.
    long_heads: numbers of heads in histories that are longer than the call; empty: histories have
        the call's form alone.
    watched: (inputs of a call) -> the context in which the call is made.
    latest: the inputs of the latest call, and its output, None if it has none: a list of one pair,
        or empty before the first call.  It is stored if it broke a law.  If several calls are
        judged as one longer call, it is that of the longer one.
    """

    operator: Operator
    implementation: Implementation
    inputs: Inputs
    precision: Precision
    isolated: IsolatedFirstCall
    whole: Inputs
    long_heads: Sequence[int]
    watched: Watched = nullcontext
    latest: list[tuple[Inputs, OutputPair | None]] = field(default_factory=list)

    def run(self, inputs: Inputs) -> OutputPair:
        """The output of a call.

        Raises Broken if the call does what no call may do, such as a write out of bounds, and
        Skipped with the reason if it has no output for another reason.
        """
        call = Call(
            implementation=self.implementation,
            inputs=inputs,
            precision=self.precision,
            label=self.implementation.name,
        )
        if self.implementation.isolated:
            call = self.isolated.guarded(call, GuardedInputs(inputs))
        self.latest[:] = [(inputs, None)]
        with self.watched(inputs):
            output, fields = call.first_run(launches=False)
        if output is not None:
            if self.implementation.pools:  # states may be slots of a pool that a later call writes
                output = output[0], output[1].clone()
            self.latest[:] = [(inputs, output)]
            return output
        reason: str = fields["reason"]
        # Phrases on forbidden effects begin with "it" or "its"; the reason of an exception begins
        # with the name of its class.
        if fields["status"] == "failed" and reason.startswith(("it ", "its ")):
            raise Broken(reason)
        raise Skipped(reason, "not applicable" if fields["status"] == "refused" else "not tested")

    @cached_property
    def base(self) -> OutputPair:
        """The output for `inputs`, with which the outputs for changed inputs are compared."""
        return self.run(self.inputs)

    def judge(self, inputs: Inputs, output: OutputPair, context: str = "") -> None:
        """Raises Broken unless the output is within its budget.  context: begins the message.

        Then `latest` is the judged call, unless that is a part of the latest one.
        """
        if wrong := self.outside(inputs, output, self.room):
            latest_inputs, _ = self.latest[0]
            # larger: several calls are judged as one, or a whole that was called before its part
            if inputs.values.numel() > latest_inputs.values.numel():
                self.latest[:] = [(inputs, output)]
            accuracies = diagnosed(inputs, self._candidate(output), wrong)
            raise Broken(context + "; ".join(accuracy.reason for accuracy in accuracies))

    def _candidate(self, output: OutputPair) -> Candidate:
        """An output of the implementation, to be compared with the oracle's."""
        return Candidate(
            output=output, precision=self.precision, cuts=self.implementation.cuts_operands
        )

    def outside(self, inputs: Inputs, output: OutputPair, room: float) -> list[Accuracy]:
        """The accuracies of the tensors that exceed `room` times their budget, with the limits so
        enlarged, or that are wrong in another way.  For outputs in fp32 the room is larger.
        """
        out, _ = output
        if out.dtype == torch.float32:
            # Sums in another order are no fault: their roundings add up as a random walk over the
            # positions does.
            room *= out.shape[1] ** 0.5
        wrong: list[Accuracy] = []
        for accuracy in compare(inputs, {"": self._candidate(output)})[""]:
            scaled = accuracy.changed(
                budget=tuple(use.changed(budget=room * use.budget) for use in accuracy.budget),
                checks=tuple(test.changed(limit=room * test.limit) for test in accuracy.checks),
            )
            if scaled.reason:
                wrong.append(scaled)
        return wrong

    @cached_property
    def room(self) -> float:
        """How many times its budget an output may use: 1, or `TOLERATED_ROOM` for a library whose
        output for `inputs` is outside of it.
        """
        with self._latest_kept():
            if self.implementation.kind == "library" and self.outside(self.inputs, self.base, 1.0):
                return TOLERATED_ROOM
        return 1.0

    def passes(self, inputs: Inputs) -> bool:
        """Whether the call has an output that is within its budget."""
        with self._latest_kept():
            try:
                return not self.outside(inputs, self.run(inputs), self.room)
            except (Broken, Skipped):
                return False

    def accepts(self, inputs: Inputs) -> bool:
        """Whether a call is made with these inputs: not if the implementation refuses them or
        raises an error.  A call that does what no call may do has been made.
        """
        with self._latest_kept():
            try:
                with suppress(Broken):
                    self.run(inputs)
            except Skipped:
                return False
        return True

    @contextmanager
    def _latest_kept(self) -> Iterator[None]:
        """Calls in the block do not change `latest`, because no law is judged by them.  After an
        exception, `latest` is that of the call that raised it.
        """
        latest = self.latest[:]
        yield
        self.latest[:] = latest

    # --- forms of the captured call

    @property
    def has_fp16(self) -> bool:
        """Whether values or states are in fp16, in which large numbers would overflow."""
        return torch.float16 in (self.inputs.values.dtype, self.precision.state_dtype)

    @property
    def leak_factor(self) -> float:
        """The factor of values that must not affect other sequences or earlier positions.

        It is large enough to show a leak of 0.001 of them, or a mask that is wrong in one row.
        """
        return 2.0**4 if self.has_fp16 else 2.0**20

    @property
    def amplification(self) -> float:
        """The factor of a history.

        If the implementation declares that it neglects a share of a state, the factor is so small
        that this share of the history stays negligible.
        """
        share = self.implementation.neglects
        if not share:
            return AMPLIFICATION
        return min(
            AMPLIFICATION, NEGLIGIBLE_SHARE * unit_roundoff(self.inputs.values.dtype) / share
        )

    @cached_property
    def several_sequences(self) -> Inputs:
        """Inputs with several sequences: those of the call, or its only one as a pack of three
        parts, each with the initial state of the whole.

        Raises Skipped if it is too short, or if a pack cannot express it.
        """
        first, *others = spans_of(self.inputs)
        if others:
            return self.inputs
        packs = "cu_seqlens" in self.inputs.__dataclass_fields__ and self.inputs.state_every <= 1
        if not packs or first.length < 4:
            raise Skipped("there is one sequence, which cannot be divided")
        bounds = [0, first.length // 4, 2 * first.length // 3, first.length]
        parts = [replace(first, start=start, stop=stop) for start, stop in pairwise(bounds)]
        return joined(self.inputs, parts, packed=True)

    @cached_property
    def several_outputs(self) -> OutputPair:
        """The output for `several_sequences`."""
        return self.run(self.several_sequences)

    @cached_property
    def longest(self) -> Inputs:
        """The longest sequence alone, not packed."""
        return alone(self.inputs, longest_of(self.inputs))

    @cached_property
    def halves(self) -> tuple[Inputs, Inputs]:
        """The longest sequence, cut at the largest power of two that is shorter than it.  The
        initial state of the second part is zeros.

        Raises Skipped if there is none, or if the operator has no initial states.
        """
        (whole,) = spans_of(self.longest)
        middle = (1 << (whole.length - 1).bit_length()) // 2
        if not (middle and self.longest.STATES):
            raise Skipped("the sequences are too short, or have no initial state")
        zeros = torch.zeros(self.longest.states_shape, device=self.longest.device)
        first = alone(self.longest, replace(whole, stop=middle))
        second = alone(self.longest, replace(whole, start=middle))
        return first, second.after(zeros)

    def finer(self) -> Iterator[Inputs]:
        """The inputs with the model's activations in a finer dtype: fp32, then fp16 for bf16.  None
        if they are in fp32.

        fp32 is left out if the implementation declares that it cuts operands to tf32.  A dtype in
        which numbers would overflow is left out.
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
        """The inputs with random initial states: as several sequences, if they can be divided, then
        as they are.  None if the operator has no initial states.
        """
        if not self.inputs.STATES:
            return
        forms = [self.inputs]
        with suppress(Skipped):
            forms.insert(0, self.several_sequences)
        for inputs in forms:
            yield inputs.after(generate.states(*inputs.states_shape, device=inputs.device))

    @property
    def edges(self) -> Sequence[Sequence[EdgeInputs[Inputs]]]:
        """The edge inputs of each kind.

        A library that the user did not name is called in this process, and might not return from
        some inputs: it gets only the first kind.
        """
        kinds = self.operator.generated.edges(self.inputs)
        is_unnamed_library = self.implementation.kind == "library" and not self.implementation.named
        return kinds[:1] if is_unnamed_library else kinds

    @property
    def histories(self) -> list[Iterator[History[Inputs]]]:
        """For each kind of history, an iterator over its inputs, with their known outputs.  Empty
        if the operator has none.
        """
        histories = self.operator.generated.histories
        return [] if histories is None else list(histories(self.whole, self.long_heads))


def judge_first(forms: Iterable[Form], otherwise: str, judge: Callable[[Form], None]) -> None:
    """Judge the first form that the kernel accepts.

    Raises Skipped if it accepts none: with `otherwise`, and with its refusals.  Raises it also if a
    form before the accepted one failed with another error, which is no refusal.
    """
    reasons = [otherwise]
    errors: list[Skipped] = []
    for form in forms:
        try:
            judge(form)
        except Skipped as refusal:
            reasons.append(str(refusal))
            if refusal.holds == "not tested":
                errors.append(refusal)
            continue
        if errors:
            raise errors[0]
        return
    raise Skipped(": ".join(dict.fromkeys(reasons)), "not tested" if errors else "not applicable")


def judge_kinds(
    kinds: Sequence[Iterable[Form]], otherwise: str, judge: Callable[[Form], None]
) -> None:
    """Call `judge_first` for every kind of forms.

    The law is tested if at least one kind is accepted and none could not be tested.

    Raises Skipped, after all kinds were tried:
        with `otherwise`, if there is no kind;
        with the first reason "not tested", if a kind has one, even if others passed;
        with the first refusal, if all kinds are refused.
    """
    if not kinds:
        raise Skipped(otherwise)
    refusals: list[Skipped] = []
    for forms in kinds:
        try:
            judge_first(forms, otherwise, judge)
        except Skipped as refusal:
            refusals.append(refusal)
    untested = [refusal for refusal in refusals if refusal.holds == "not tested"]
    if untested:
        raise untested[0]
    if len(refusals) == len(kinds):
        raise refusals[0]


def first_difference(outputs: Sequence[Tensor], others: Sequence[Tensor]) -> str | None:
    """A phrase on the first element that differs between two outputs; None if all are equal.

    outputs, others: `out`, or `out` and `final_states`.

    Two NaN count as equal.  So do numbers below 2^-100, because a GPU may flush them to zero.
    """
    for name, tensor, other in zip(("out", "final_states"), outputs, others, strict=False):
        differs = (
            (tensor != other)
            & ~(tensor.isnan() & other.isnan())
            & ~(torch.maximum(tensor.abs(), other.abs()) < 2.0**-100)
        )
        if bool(differs.any()):
            index = int(differs.flatten().to(torch.uint8).argmax())
            position = unravel(index, tuple(tensor.shape))
            return (
                f"{name} at {position} is {float(tensor[position]):.9g} and "
                f"{float(other[position]):.9g}"
            )
    return None


# --- the laws


def repeats_bitwise(trial: Trial) -> None:
    """The same call gives the same output again."""
    if difference := first_difference(trial.base, trial.run(trial.inputs)):
        raise Broken(difference)


def inputs_unchanged(trial: Trial) -> None:
    """A call writes to none of its inputs."""
    before = fingerprints(trial.inputs.tensors)
    trial.run(trial.inputs)
    if fault := changes(before, trial.inputs.tensors):
        raise Broken(fault)


def other_sequences(trial: Trial) -> None:
    """If every second sequence is reversed in time, and its values are amplified, the outputs of
    the others stay, or stay within their budget.
    """
    inputs = trial.several_sequences
    spans = spans_of(inputs)
    original = trial.several_outputs
    changed = trial.run(amplified(inputs, spans[::2], trial.leak_factor))
    for span in spans[1::2]:
        output = output_of(inputs, changed, span)
        if difference := first_difference(output_of(inputs, original, span), output):
            context = f"a sequence depends on others: {difference}; "
            trial.judge(alone(inputs, span), output, context)


def sequence_alone(trial: Trial) -> None:
    """The last sequence has the same output among others and alone.

    If they differ, both must be within their budget: roundings may differ, because the tiles of a
    kernel may depend on the shape of the call.
    """
    inputs = trial.several_sequences
    last = spans_of(inputs)[-1]
    inputs_alone = alone(inputs, last)
    together = trial.several_outputs
    output = trial.run(inputs_alone)
    if difference := first_difference(output_of(inputs, together, last), output):
        context = f"a sequence alone is not as among others: {difference}; "
        trial.judge(inputs_alone, output, context)
        trial.judge(inputs, together, context)


def causality(trial: Trial) -> None:
    """Later inputs do not change earlier outputs.

    Inputs are replaced from one past a border of chunks on, then from the border on, unless that is
    the start.  In a pack, borders are counted from the start of the pack.  If earlier outputs
    differ, they must be within their budget.
    """
    length = trial.inputs.values.shape[1]
    if length < 2:
        raise Skipped("the call has a single position")
    past_border = REPLACED_FROM
    if length <= REPLACED_FROM:
        past_border = (length - 2) // 16 * 16 + 1  # one past the last border of 16 positions
    _replace_later(trial, past_border)
    if past_border > 1:
        _replace_later(trial, past_border - 1)


def _replace_later(trial: Trial, start: int) -> None:
    """Reverse in time the inputs of each sequence from position `start` on, and amplify their
    values.

    Raises Broken if outputs before it differ, and are outside of their budget.
    """
    inputs = trial.inputs
    spans = spans_of(inputs)
    later = [replace(span, start=max(span.start, start)) for span in spans if span.stop > start]
    original_out, _ = trial.base
    changed_out, _ = trial.run(amplified(inputs, later, trial.leak_factor))
    early_out = changed_out[:, :start]
    if difference := first_difference([original_out[:, :start]], [early_out]):
        parts = [replace(span, stop=min(span.stop, start)) for span in spans if span.start < start]
        early = joined(inputs, parts, packed=is_packed(inputs))
        _, exact_states = oracle_output(early)  # the kernel's states are after the later inputs
        context = f"inputs from position {start} on change earlier outputs: {difference}; "
        trial.judge(early, (early_out, exact_states), context)


def linearity(trial: Trial) -> None:
    """`Inputs.linear` times 2 give outputs times 2: exactly if the kernel repeats its bits, else
    within the budget.

    Raises Skipped if values or states are in fp16, and bits differ.
    """
    doubled = {name: tensor * 2 for name, tensor in trial.inputs.linear.items()}
    inputs = replace(trial.inputs, **doubled)
    output = trial.run(inputs)
    difference = first_difference([tensor * 2 for tensor in trial.base], output)
    if difference is None:
        return
    if trial.has_fp16:
        raise Skipped("small fp16 numbers have fewer bits, so that doubling is not exact")
    context = "inputs times 2 do not give outputs times 2: "
    if _repeats(trial, trial.inputs, trial.base) and _repeats(trial, inputs, output):
        raise Broken(f"{context}{difference}")
    trial.judge(inputs, output, context)


def _repeats(trial: Trial, inputs: Inputs, output: OutputPair) -> bool:
    """Whether several more calls give the same bits as `output`."""
    return all(first_difference(output, trial.run(inputs)) is None for _ in range(REPEATED_CALLS))


def cut_in_two(trial: Trial) -> None:
    """A sequence in two calls, the second with the state that the first one left, has the output of
    one call.
    """
    first_half, second_half = trial.halves
    first_out, middle_states = trial.run(first_half)
    second_out, states = trial.run(second_half.after(middle_states))
    trial.judge(trial.longest, (torch.cat([first_out, second_out], 1), states))


def single_steps(trial: Trial) -> None:
    """A sequence in calls of one token, each with the state that the one before left, has the
    output of one call.
    """
    inputs = trial.longest
    (whole,) = spans_of(inputs)
    outs: list[Tensor] = []
    states: list[Tensor] = []
    state = inputs.initial
    for start in range(whole.length):
        step = alone(inputs, replace(whole, start=start, stop=start + 1))
        out, state = trial.run(step.after(state))
        outs.append(out)
        states.append(state)
    trial.judge(inputs, (torch.cat(outs, 1), torch.cat(states)))


def accepted_tokens(trial: Trial) -> None:
    """A call on drafted tokens returns the state after each.  If a second call begins with any of
    them but the last, and has the tokens after it, the two have the output of one call.
    """
    inputs = trial.longest
    (whole,) = spans_of(inputs)
    if whole.length < 2:
        raise Skipped("the call has a single position")
    out, states = trial.run(inputs)
    for accepted in range(1, whole.length):
        later = alone(inputs, replace(whole, start=accepted))
        later_out, later_states = trial.run(later.after(states[accepted - 1 : accepted]))
        output = (
            torch.cat([out[:, :accepted], later_out], 1),
            torch.cat([states[:accepted], later_states]),
        )
        trial.judge(inputs, output, f"after {accepted} accepted tokens: ")


def edge_inputs(trial: Trial) -> None:
    """The output for edge inputs is within the budget.

    A message names the sizes of the inputs; that on a wrong output also the trait that causes it.
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

    kinds = [_accepted_forms(trial, forms) for forms in trial.edges]
    judge_kinds(kinds, "no edge inputs could be tried", judge)


def _accepted_forms(
    trial: Trial, forms: Iterable[EdgeInputs[Inputs]]
) -> Iterator[EdgeInputs[Inputs]]:
    """The forms, for `judge_first`, which goes on to the next one if the kernel refuses a form.

    After a form with traits, that form comes with those traits alone that the kernel accepts, so
    that one trait outside of its domain does not hide a fault of another.
    """
    for form in forms:
        yield form
        if form.traits:
            yield form.restricted(trial.accepts)


def _cause(trial: Trial, edge: EdgeInputs[Inputs]) -> str:
    """The first trait without which the kernel passes, with its rule.  If there is none, all
    traits; for inputs without traits "random numbers".
    """
    for trait in edge.traits:
        if trial.passes(edge.make(left_out=trait)):
            return f"{trait.name} ({trait.rule})" if trait.rule else trait.name
    return words.words(trait.name for trait in edge.traits) if edge.traits else "random numbers"


def amplified_history(trial: Trial) -> str:
    """The output is right even if a sequence begins with numbers that are much larger than all
    later ones, whose effect must fade as the decays say.

    The call itself is tested and, if other forms may be called, one with initial states.  Returns
    the limits within which the law holds: the factor, if the implementation neglects a share of a
    state; else it is empty.
    """
    if trial.has_fp16:
        raise Skipped("fp16 numbers would overflow")
    if longest_of(trial.inputs).length < 2 * HISTORY_DIVISOR:
        reason = f"it needs a sequence of {2 * HISTORY_DIVISOR} positions"
        raise Skipped(reason, "not tested")
    if trial.amplification <= 1:
        raise Skipped("it neglects too much of a state for a history to be amplified")
    kinds: list[Iterable[Inputs]] = [[trial.inputs]]
    if trial.long_heads:
        kinds.append(trial.with_states())
    judge_kinds(kinds, "no such inputs could be tried", partial(_judge_amplified, trial))
    share = trial.implementation.neglects
    if not share:
        return ""
    return f"times 2^{log2(trial.amplification):g}: it neglects 2^{log2(share):g} of a state"


def _judge_amplified(trial: Trial, inputs: Inputs) -> None:
    """Amplify the initial states, and the values in the first 1/`HISTORY_DIVISOR` of the judged
    positions of each sequence, and judge the output.

    The first `LONGEST` positions of a sequence are judged.  If only the call's form is tried, the
    longest sequence alone is judged.
    """
    longest = LONGEST[inputs.device.type]
    values = inputs.values.clone()
    for span in spans_of(inputs):
        stop = span.start + min(span.length, longest) // HISTORY_DIVISOR
        values[span.batch, span.start : stop] *= trial.amplification
    changes = {inputs.VALUES: values}
    if inputs.STATES in inputs.tensors:
        changes[inputs.STATES] = inputs.tensors[inputs.STATES] * trial.amplification
    inputs = replace(inputs, **changes)
    out, states = trial.run(inputs)
    spans = [longest_of(inputs)]
    if trial.long_heads:
        spans = [span for span in spans_of(inputs) if span.length]
    for span in spans:
        judged = replace(span, stop=min(span.stop, span.start + longest))
        part = alone(inputs, judged)
        if judged == span:
            final_states = states[rows_of_states(inputs, span)]
        else:  # the call returned no states after the judged positions
            _, final_states = oracle_output(part)
        trial.judge(part, (judged.of(out)[None], final_states))


def turning_keys(trial: Trial) -> None:
    """Outputs are right that consist of what tokens far before them wrote; see
    `InputGenerator.histories`.
    """
    judge_kinds(trial.histories, "no such inputs could be tried", partial(_judge_history, trial))


def _judge_history(trial: Trial, history: History[Inputs]) -> None:
    """Raises Broken if the relative RMS error of known outputs is above `DROPPED` at any position.

    The message is on the kind of known outputs with the largest error.
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
    # Without initial states, the first known outputs have no history that could have been dropped.
    without_history = bool(bad[0]) and inputs.initial is None
    fault = "outputs are wrong" if without_history else "history that matters is dropped"
    raise Broken(
        f"{fault}, with {batch} x {length:,} tokens and {heads} heads: "
        f"{float(relative[worst]):.3g} RMS error at position {int(known.positions[worst])} "
        f"of row {known.batch}, and above {DROPPED:g} in {int(bad.sum())} of {len(bad)} "
        f"{known.kind}; rounding explains 0.03"
    )


def _errors_of(known: KnownOutputs, out: Tensor) -> Tensor:
    """The relative RMS error over heads and values at each of the n known positions, (n), fp64;
    infinity where an output is NaN.
    """
    actual = out[known.batch, known.positions][:, known.heads].double()
    error = (actual - known.expected).square().sum((1, 2)).sqrt()
    return (error / known.expected.square().sum((1, 2)).sqrt()).nan_to_num(nan=inf)


def finer_inputs(trial: Trial) -> None:
    """The output for inputs in a finer dtype is within its budget, which is smaller.

    One dtype is tested: the first that the kernel accepts.
    """
    judge_first(
        trial.finer(),
        "a fault below the rounding of 16-bit inputs could not be seen",
        lambda inputs: trial.judge(inputs, trial.run(inputs)),
    )


Law = Callable[[Trial], str | None]  # returns the limits within which it holds
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
    EDGE_INPUTS: edge_inputs,
    AMPLIFIED_HISTORY: amplified_history,
    TURNING_KEYS: turning_keys,
    "finer inputs": finer_inputs,
}
# laws whose calls need no other compiled kernels than the captured call does, if `Trial.long_heads`
# is empty
SAME_FORM_LAWS = frozenset(
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
    """The laws that these inputs can test, by name.

    The law of a cut is left out if the call returns states on the way: after the cut they would be
    at other positions.  Single steps and accepted tokens need the state after every token, and
    turning keys an operator that has histories.
    """
    left_out = {"cut in two"} if trial.inputs.state_every else set[str]()
    if trial.inputs.state_every != 1:
        left_out |= {"single steps", "accepted tokens"}
    if not trial.histories:
        left_out.add(TURNING_KEYS)
    return {name: law for name, law in LAWS.items() if name not in left_out}
