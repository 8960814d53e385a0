"""`--verify`: a few drafted tokens with the state after each.  The faults that servers had are
found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from command_line import DEMOS, ending, passing
from fakes import RAN, noting, pretend_gpu
from measure.test_probes import probed

from ssdprof import kernels, operators
from ssdprof.kernels import registry
from ssdprof.kernels.device import INTERPRETED
from ssdprof.kernels.precision import Precision
from ssdprof.measure.accuracy import Candidate, compare
from ssdprof.measure.first_run import Call
from ssdprof.operators.generate import Cell, Tokens
from ssdprof.store.reports import load

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="only the interpreter's kernels run on a CPU"),
    pytest.mark.usefixtures("in_empty_folder", "small_guards"),
]
NAMES = {"single steps", "accepted tokens"}
# square states: exchanged axes have their shape
SHAPES = {"gdn": "1/2x16x16", "kda": "2/2x16x16", "ssd": "2x16x16x1"}
Output = tuple[torch.Tensor, torch.Tensor]


def states(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[Any, Callable[[Any], Output]], Output]:
    """A kernel whose kept states, (sequences, tokens, heads, ., .), are changed."""

    def kernel(inputs: Any, right: Callable[[Any], Output]) -> Output:
        out, kept = right(inputs)
        of_sequences = kept.unflatten(0, (inputs.sequences, inputs.length))
        return out, change(of_sequences).flatten(0, 1).contiguous()

    return kernel


def reads(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[Any, Callable[[Any], Output]], Output]:
    """A kernel that reads other initial states."""
    return lambda inputs, right: right(inputs.after(change(inputs.initial)))


def slots(
    change: Callable[[Any], torch.Tensor],
) -> Callable[[Any, Callable[[Any], Output]], Output]:
    """A kernel that reads other slots of a pool."""
    return lambda inputs, right: right(
        inputs.after(getattr(inputs, inputs.LINEAR[1])[change(inputs)])
    )


def never_written(kept: torch.Tensor) -> torch.Tensor:
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


POOLED = {
    name: PLANTED[name] for name in ("wrong_column", "values_first_read", "snapshot_never_written")
} | {
    "row_instead_of_slot": slots(lambda inputs: torch.arange(inputs.sequences)),
    "next_slot": slots(lambda inputs: (inputs.state_indices.long() + 1) % (2 * inputs.sequences)),
    "slots_of_others": slots(lambda inputs: inputs.state_indices.long().roll(1)),
}


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("operator", SHAPES)
def test_kept_states_are_compared_with_runs_that_are_cut_there(
    operator: str, pool: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch)
    reference, planted_kernels = kernels.get(operator, "reference"), POOLED if pool else PLANTED
    for name, kernel in planted_kernels.items():

        def run(
            inputs: Any, precision: Precision, name: str = name, kernel: Any = kernel
        ) -> Output:
            RAN.append((name, 100.0))
            return kernel(
                inputs, lambda inputs: reference.run(inputs.after(inputs.initial), precision)
            )

        one = replace(reference, name=name, run=run, pools=pool)
        monkeypatch.setitem(registry._implementations, (operator, name), one)
    for name in ("recurrent",) if operator == "ssd" else ("recurrent", "fused"):
        monkeypatch.setitem(
            registry._implementations, (operator, name), noting(name, 50.0, operator, real=True)
        )
    compared = (
        "--batch",
        "3",
        "--impl",
        f"fused,{','.join(planted_kernels)}",
        *("--draw", "pool") * pool,
    )
    words = ("bench", operator, "--shape", SHAPES[operator], "--verify", "2,4", *compared)
    monkeypatch.setattr("sys.argv", ["ssdprof", *words])
    ending(1, *words, "--out", "kept")
    report = load("kept")[1]
    assert {case.size for case in report.cases} == {"3 x 2, every state", "3 x 4, every state"}
    for case in report.cases:
        planted = case.implementation in planted_kernels
        assert case.result in (("inaccurate", "nonfinite") if planted else ("passed",)), (
            case.name,
            case.why,
        )
        if case.implementation == "fused":
            copies = "copies of states out of the pool; " * pool
            each = f"{case.seqlen} calls, one for each state, and copies that join the states; "
            assert case.plan.startswith(copies + each)
        if planted:
            assert not case.samples
            assert "states" in case.why or "not finite" in case.why, case.why
        assert f" --verify {case.seqlen} --batch 3" in " ".join(report.again(case))


@pytest.mark.parametrize("operator", SHAPES)
def test_states_on_the_way_are_those_of_runs_that_are_cut_there(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, real=True)
    for name in ("unfused", "fused"):
        monkeypatch.setitem(
            registry._implementations, (operator, name), noting(name, 50.0, operator, real=True)
        )
    words = (
        "bench",
        operator,
        "--shape",
        SHAPES[operator],
        "--seq",
        "100",
        "--state-every",
        "64",
        "--batch",
        "2",
    )
    sizes = ("--chunk-size", "64") if operator == "ssd" else ()
    passing(*words, *sizes, "--out", "kept")
    report = load("kept")[1]
    assert {case.size for case in report.cases} == {"2 x 100, state every 64"}
    for case in report.cases:
        assert case.result == "passed", (case.name, case.why)
        own = (case.implementation, operator) == ("unfused", "ssd")
        assert case.plan.startswith("2 calls") != own, case.name


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("operator", ["gdn", "ssd"])
def test_suffixes_of_mixed_lengths_begin_with_their_cached_states(
    operator: str, pool: bool
) -> None:
    """`bench --packed 5x1-64`: what runs is judged by the states that were given."""
    found, reference = operators.get(operator), kernels.get(operator, "reference")
    shape, tokens = (
        found.generated.parse(SHAPES[operator]),
        Tokens(sequences=5, seqlen=64, shortest=1),
    )
    assert shape
    cell = Cell(
        shape=shape, dtype="bf16", layout="contiguous", tokens=tokens, ways=("pool",) * pool
    )
    inputs = found.generated.draw(cell, torch.device("cpu"))
    planted: dict[str, Callable[[Any], Any]] = {
        "wrong_prefix": lambda inputs: inputs.after(inputs.initial.roll(1, 0)),
        "no_prefix": lambda inputs: inputs.after(torch.zeros(inputs.states_shape)),
    }
    several = [kernels.get(operator, name) for name in ("unfused", "fused", "recurrent")]
    for name, change in planted.items():

        def run(inputs: Any, precision: Any, change: Any = change) -> Any:
            return reference.run(change(inputs), precision)

        several.append(replace(reference, name=name, run=run, pools=True))
    for one in several:
        call = Call(
            operator=operators.get(inputs.operator),
            implementation=one,
            inputs=inputs,
            precision=Precision(),
            label=one.name,
        )
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
def test_the_last_tokens_of_prompts_are_replayed_as_drafted_ones(model: str) -> None:
    words = ("--verify", "4", "--layers", "first:1")
    answer = passing(
        "run",
        model,
        "--seq",
        "24",
        "--batch",
        "2",
        *words,
        "--save-captures",
        "--out",
        "a",
        "--full",
    )
    report = load("a")[1]
    assert [case.implementation for case in report.cases] == ["fused", "recurrent"]
    for case in report.cases:
        assert case.size == "2 x 4 tokens, drafted at the end of 2 x 24 tokens"
    assert "drafted at the end of 2 x 24 tokens" in answer.shown
    passing("run", "a/captures", *words, "--out", "b")
    assert [case.accuracy for case in load("b")[1].cases] == [
        case.accuracy for case in report.cases
    ]


def changed_alone(inputs: Any) -> Output:
    """Wrong for single tokens."""
    out, kept = kernels.get(inputs.operator, "reference").run(inputs, Precision())
    return out, kept if inputs.length > 1 else kept * 1.01


def changed_in_the_middle(inputs: Any) -> Output:
    """Wrong for two tokens, which are left where two of four were accepted."""
    out, kept = kernels.get(inputs.operator, "reference").run(inputs, Precision())
    return out, kept if inputs.length != 2 else kept.roll(1, 0)


def right(inputs: Any) -> Output:
    out, kept = kernels.get(inputs.operator, "reference").run(inputs, Precision())
    return out, kept


@pytest.mark.parametrize(
    ("kernel", "broken"),
    [
        (right, set()),
        (changed_alone, {"single steps", "accepted tokens"}),
        (changed_in_the_middle, {"accepted tokens"}),
    ],
)
def test_laws(kernel: Any, broken: set[str]) -> None:
    kernel.keeps_states = True
    generated = operators.get("gdn").generated
    shape = generated.parse(SHAPES["gdn"])
    assert shape
    tokens = Tokens(sequences=2, seqlen=4, state_every=1)
    inputs = generated.draw(
        Cell(shape=shape, dtype="bf16", layout="contiguous", tokens=tokens), torch.device("cpu")
    )
    found = {name: probe for name, probe in probed(kernel, inputs).items() if name in NAMES}
    assert set(found) == NAMES
    assert {name for name, probe in found.items() if probe.holds == "no"} == broken
    assert {probe.holds for probe in found.values()} <= {"yes", "no"}
