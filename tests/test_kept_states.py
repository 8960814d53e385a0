"""`--verify`: a few drafted tokens with the state after each.  The faults that servers had are
found.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from cases import accuracies
from command_line import DEMOS, ending, passing
from fakes import RAN, needs_interpreter, note_runs, pretend_gpu
from generated_inputs import generated
from measure.test_probes import probed
from targets import OPERATORS, slow
from torch import Tensor

from ssdprof import kernels
from ssdprof.kernels import registry
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation
from ssdprof.measure.accuracy import Candidate, compare
from ssdprof.measure.first_run import Call
from ssdprof.operators.serving import gathered
from ssdprof.store.reports import load

pytestmark = [needs_interpreter, pytest.mark.usefixtures("in_empty_folder", "small_guards")]
NAMES = {"single steps", "accepted tokens"}
# square states: exchanged axes have their shape
SHAPES = {"gdn": "1/2x16x16", "kda": "2/2x16x16", "ssd": "2x16x16x1"}
Output = tuple[Tensor, Tensor]
Planted = Callable[[Any, Callable[[Any], Output]], Output]  # (inputs, a right kernel)


def states(change: Callable[[Tensor], Tensor]) -> Planted:
    """A kernel whose kept states, (sequences, tokens, heads, ., .), are changed."""

    def kernel(inputs, right: Callable[[Any], Output]) -> Output:
        out, kept = right(inputs)
        of_sequences = kept.unflatten(0, (inputs.sequences, inputs.length))
        return out, change(of_sequences).flatten(0, 1).contiguous()

    return kernel


def reads(change: Callable[[Tensor], Tensor]) -> Planted:
    """A kernel that reads other initial states."""
    return lambda inputs, right: right(inputs.after(change(inputs.initial)))


def slots(change: Callable[[Any], Tensor]) -> Planted:
    """A kernel that reads other slots of a pool."""
    return lambda inputs, right: right(inputs.after(getattr(inputs, inputs.STATES)[change(inputs)]))


def never_written(kept: Tensor) -> Tensor:
    return torch.cat([kept[:, :-1], kept[:, -2:-1]], 1)


PLANTED = {
    "wrong_slot_read": reads(lambda initial: initial.roll(1, 0)),
    "wrong_slot_written": states(lambda kept: kept.roll(1, 0)),
    "wrong_column": states(lambda kept: kept.roll(1, 1)),
    "values_first_read": reads(lambda initial: initial.mT.contiguous()),
    "values_first_written": states(lambda kept: kept.mT),
    "snapshot_never_written": states(never_written),
    "snapshots_rounded": states(lambda kept: kept.bfloat16().float()),
}


SLOTS = 7  # of a pool
POOLED = {
    name: PLANTED[name] for name in ("wrong_column", "values_first_read", "snapshot_never_written")
} | {
    "row_instead_of_slot": slots(lambda inputs: torch.arange(inputs.sequences)),
    "next_slot": slots(lambda inputs: (inputs.state_indices.long() + 1) % SLOTS),
    "slots_of_others": slots(lambda inputs: inputs.state_indices.long().roll(1)),
}


def wrong_column_in_place(reference: Implementation, inputs, precision: Precision) -> Output:
    written = inputs.write_indices.roll(1, 1)
    return gathered(reference, replace(inputs, write_indices=written), precision)


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_kept_states_are_compared_with_runs_that_are_cut_there(operator, pool, monkeypatch):
    pretend_gpu(monkeypatch)
    reference = kernels.get(operator, "reference")
    planted_kernels = POOLED if pool else PLANTED
    for name, kernel in planted_kernels.items():

        def run(inputs, precision: Precision, name: str = name, kernel=kernel) -> Output:
            RAN.append((name, 100.0))
            return kernel(
                inputs, lambda inputs: reference.run(inputs.after(inputs.initial), precision)
            )

        one = replace(reference, name=name, run=run, pools=pool)
        monkeypatch.setitem(registry._implementations, (operator, name), one)
    if pool:
        name = "wrong_column_in_place"
        one = replace(reference, name=name, in_place=partial(wrong_column_in_place, reference))
        monkeypatch.setitem(registry._implementations, (operator, name), one)
        planted_kernels = {**planted_kernels, name: one}
    note_runs(monkeypatch, operator, real=True, recurrent=50.0)
    if operator != "ssd":
        note_runs(monkeypatch, operator, real=True, fused=50.0)
    compared = f"--batch 3 --impl fused,{','.join(planted_kernels)}"
    slots = f"--pool {SLOTS}" if pool else ""
    shape = SHAPES[operator]
    ending(1, f"bench {operator} --shape {shape} --verify 4 {compared} {slots} --out kept")
    report = load("kept")[1]
    of_slots = ", pool of 7" * pool
    assert {case.size for case in report.cases} == {f"3 x 4, every state{of_slots}"}
    for case in report.cases:
        planted = case.implementation in planted_kernels
        assert case.result in (("inaccurate", "nonfinite") if planted else ("passed",)), (
            case.name,
            case.why,
        )
        if case.implementation == "fused":
            each = f"{case.seqlen} calls, one for each state, and copies that join the states; "
            assert case.plan.startswith("in place on a pool" if pool else each)
        if planted:
            assert not case.samples
            assert "states" in case.why or "not finite" in case.why, case.why
        assert f" --verify {case.seqlen} --batch 3" in " ".join(report.again(case))


@pytest.mark.parametrize("operator", OPERATORS)
def test_states_on_the_way_are_those_of_runs_that_are_cut_there(operator, monkeypatch):
    pretend_gpu(monkeypatch, real=True)
    note_runs(monkeypatch, operator, real=True, unfused=50.0, fused=50.0)
    words = f"bench {operator} --shape {SHAPES[operator]} --seq 70 --state-every 64 --batch 2"
    sizes = "--chunk-size 64" if operator == "ssd" else ""
    passing(words, sizes, "--out kept")
    report = load("kept")[1]
    assert {case.size for case in report.cases} == {"2 x 70, state every 64"}
    for case in report.cases:
        assert case.result == "passed", (case.name, case.why)
        own = (case.implementation, operator) == ("unfused", "ssd")
        assert case.plan.startswith("2 calls") != own, case.name


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("operator", [*slow("gdn"), "ssd"])
def test_suffixes_of_mixed_lengths_begin_with_their_cached_states(operator, pool):
    """`bench --packed 5x1-9`: what runs is judged by the states that were given."""
    reference = kernels.get(operator, "reference")
    tokens = dict(sequences=5, shortest=1, pool=10 * pool)
    inputs = generated(operator, SHAPES[operator], 9, **tokens)
    planted: dict[str, Callable[[Any], Any]] = {
        "wrong_prefix": lambda inputs: inputs.after(inputs.initial.roll(1, 0)),
        "no_prefix": lambda inputs: inputs.after(torch.zeros(inputs.states_shape)),
    }
    several = [kernels.get(operator, name) for name in ("unfused", "fused", "recurrent")]
    for name, change in planted.items():

        def run(inputs, precision, change=change):
            return reference.run(change(inputs), precision)

        several.append(replace(reference, name=name, run=run, pools=True))
    for one in several:
        call = Call(implementation=one, inputs=inputs, precision=Precision(), label=one.name)
        output, fields = call.first_run()
        assert output is not None, fields
        accuracies = compare(
            inputs, {"": Candidate(output=output, precision=Precision(), cuts=False)}
        )[""]
        assert any(part.reason for part in accuracies) == (one.name in planted), one.name
        assert fields["plan"].startswith("copies of states out of the pool; ") == (
            pool and not one.pools
        )


@pytest.mark.slow
@pytest.mark.parametrize("model", DEMOS)
def test_the_last_tokens_of_prompts_are_replayed_as_drafted_ones(model):
    words = "--verify 4 --layers first:1"
    answer = passing(f"run {model} --seq 24 --batch 2", words, "--save-captures --out a --full")
    report = load("a")[1]
    assert [case.implementation for case in report.cases] == ["fused", "recurrent"]
    for case in report.cases:
        assert case.size == "2 x 4 tokens, drafted at the end of 2 x 24 tokens"
    assert "drafted at the end of 2 x 24 tokens" in answer.shown
    passing("run a/captures", words, "--out b")
    assert accuracies(load("b")[1]) == accuracies(report)


def right(inputs) -> Output:
    out, kept = kernels.get(inputs.operator, "reference").run(inputs, Precision())
    return out, kept


def changed_alone(inputs) -> Output:
    """Wrong for single tokens."""
    out, kept = right(inputs)
    return out, kept if inputs.length > 1 else kept * 1.01


def changed_in_the_middle(inputs) -> Output:
    """Wrong for two tokens, which are left where two of four were accepted."""
    out, kept = right(inputs)
    return out, kept if inputs.length != 2 else kept.roll(1, 0)


@pytest.mark.parametrize(
    ("kernel", "broken"),
    [
        (right, set()),
        (changed_alone, {"single steps", "accepted tokens"}),
        (changed_in_the_middle, {"accepted tokens"}),
    ],
)
def test_laws(kernel, broken):
    kernel.keeps_states = True
    inputs = generated("gdn", SHAPES["gdn"], 4, sequences=2, state_every=1)
    found = {name: probe for name, probe in probed(kernel, inputs).items() if name in NAMES}
    assert set(found) == NAMES
    assert {name for name, probe in found.items() if probe.holds == "no"} == broken
    assert {probe.holds for probe in found.values()} <= {"yes", "no"}
