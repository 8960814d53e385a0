"""A cell's contenders are verified, then timed.  The comparator is real, the stopwatch is fake."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from fakes import CELL, FakeBench, contender, measured
from ssdprof.bench.contenders import line_up
from ssdprof.bench.judge import Verdict, judge, reference_of, run_unjudged
from ssdprof.bench.run import sampling_seconds
from ssdprof.operators.drawing import Cell, Tokens
from ssdprof.operators.gdn.shapes import GDNShape
from ssdprof.operators.named import Named, resolve
from ssdprof.operators.ssd.drawing import CHUNK_SIZES, draw
from ssdprof.operators.ssd.operator import OPERATOR as SSD
from ssdprof.schema import EXACT_FP32, precisions_for

from ssdprof import operators, schema
from ssdprof.kernels.ssd.inputs import SSDOutput

SLOW = contender("slow", lambda _: 300.0, ours=False)
FAST = contender("fast", lambda _: 100.0)


def noisy(amount: float):  # type: ignore[no-untyped-def]
    def spoil(output: SSDOutput) -> SSDOutput:
        noise = torch.randn(output.out.shape, generator=torch.Generator().manual_seed(0))
        return SSDOutput((output.out.float() * (1 + amount * noise)).to(output.out.dtype), output.final_states)

    return spoil


def test_the_fastest_chunk_size_is_taken() -> None:
    bench = FakeBench()
    choosy = contender("choosy", lambda chunk: {128: 90.0, 256: 70.0}[chunk or 0], chunk_sizes=CHUNK_SIZES)
    slow, case = measured(SLOW, choosy, bench=bench)
    assert case.chunk_size == 256
    assert [(trial.chunk_size, trial.device_us) for trial in case.trials] == [(128, 90.0), (256, 70.0)]
    assert case.timing is not None
    assert (case.timing.device_median_us, case.timing.call_median_us) == (70, 80)
    assert (slow.chunk_size, slow.trials) == (None, ())
    assert len(bench.recorded) == 2 * (2 + 2)  # twice: the choice of the chunk size, then the two contenders in turns


def test_a_chunk_size_that_is_wrong_is_not_taken_however_fast() -> None:
    choosy = contender("choosy", lambda chunk: float(chunk or 0), chunk_sizes=CHUNK_SIZES, wrong_chunk=128)
    (case,) = measured(choosy)
    assert case.chunk_size == 256
    assert [(trial.status, trial.device_us) for trial in case.trials] == [("inaccurate", None), ("passed", None)]
    assert case.trials[0].reason
    assert case.timing is not None
    assert case.timing.device_median_us == 256


def test_speedups_are_over_the_fastest_of_each_other_implementation() -> None:
    relaxed = schema.PrecisionRecord(intermediates="relaxed", state_dtype="bf16")
    *_, fast = measured(
        SLOW, contender("peer", lambda _: 200.0), contender("peer", lambda _: 150.0, precision=relaxed), FAST
    )
    assert {speedup.baseline: speedup.device_ratio for speedup in fast.speedups} == {"peer": 1.5, "slow": 3.0}
    over = fast.over("slow")
    assert over is not None
    assert over.call_ratio == pytest.approx(310 / 110)
    assert over.verdict == "faster"


def test_a_wrong_case_of_ours_has_no_time() -> None:
    slow, case = measured(SLOW, contender("ours", lambda _: 1.0, spoil=noisy(0.009)))
    assert case.status == "inaccurate"
    assert case.reason
    assert (case.timing, case.speedups) == (None, ())
    assert slow.timing is not None


def test_a_sloppy_peer_is_timed_and_a_wrong_one_is_not() -> None:
    sloppy, wrong = measured(
        contender("sloppy", lambda _: 1.0, ours=False, spoil=noisy(0.009)),
        contender("wrong", lambda _: 1.0, ours=False, spoil=noisy(0.02)),
    )
    assert sloppy.status == "passed"
    assert "budget" in sloppy.sloppy
    assert sloppy.timing is not None
    assert sloppy.error is not None
    assert 0.005 < sloppy.error.out < 0.01
    assert (wrong.status, wrong.timing) == ("inaccurate", None)


def test_states_of_a_peer_are_widened_to_be_judged_and_not_to_be_timed() -> None:
    half = contender(
        "half",
        lambda _: 1.0,
        ours=False,
        precision=schema.PrecisionRecord(intermediates="exact", state_dtype="bf16"),
        spoil=lambda output: SSDOutput(output.out, output.final_states.bfloat16()),
    )
    (case,) = measured(half)
    assert case.status == "passed"
    inputs = draw(CELL, torch.device("cpu"))
    assert half.entries(SSD, inputs)[0].call.run()[1].dtype == torch.bfloat16


def test_what_cannot_be_captured_is_not_timed_and_says_so() -> None:
    slow, fast = measured(SLOW, FAST, bench=FakeBench(uncapturable=frozenset({"slow"})))
    assert "it synchronises" in slow.reason
    assert slow.timing is None
    assert fast.timing is not None
    assert fast.speedups == ()


def test_an_output_that_changed_while_it_was_timed_is_inaccurate() -> None:
    calls = []

    def drift(output: SSDOutput) -> SSDOutput:
        calls.append(1)
        return output if len(calls) == 1 else noisy(0.5)(output)

    (case,) = measured(contender("drifting", lambda _: 1.0, spoil=drift))
    assert case.status == "inaccurate"
    assert case.reason.startswith("after it was timed")
    assert case.timing is None


def test_a_peer_is_judged_by_its_second_call_because_it_tunes_itself_in_the_first() -> None:
    calls = []

    def untuned(output: SSDOutput) -> SSDOutput:
        calls.append(1)
        return noisy(0.5)(output) if len(calls) == 1 else output

    (peer,) = measured(contender("peer", lambda _: 1.0, ours=False, spoil=untuned))
    assert peer.status == "passed"


def test_a_verdict_from_shorter_inputs_does_not_cover_what_is_not_finite() -> None:
    bad = contender("bad", lambda _: 1.0, spoil=lambda output: SSDOutput(output.out / 0, output.final_states))
    inputs = draw(CELL, torch.device("cpu"))
    entries = [*FAST.entries(SSD, inputs), *bad.entries(SSD, inputs)]
    judged = run_unjudged(entries, {entry.key: Verdict(status="passed") for entry in entries})
    assert [one.verdict.status for one in judged] == ["passed", "nonfinite"]


def bundled(operator: str) -> list[Named]:
    return [resolve(operators.get(operator), name) for name in ("unfused", "fused")]


def test_the_bundled_kernels_line_up_and_pass() -> None:
    """In the interpreter, with packed sequences.  A GPU would only be faster."""
    cell = Cell(shape=CELL.shape, dtype="bf16", layout="views", tokens=Tokens(sequences=3, seqlen=24, shortest=8))
    contenders = line_up(SSD, CELL, precisions_for("bf16", "all", None), bundled("ssd"), (16,))
    assert [(one.name, str(one.precision), one.chunk_sizes) for one in contenders] == [
        ("unfused", "exact, fp32 states", (16,)),
        ("unfused", "exact, bf16 states", (16,)),
        ("fused", "exact, fp32 states", ()),
        ("fused", "relaxed, bf16 states", ()),
    ]
    inputs = replace(draw(cell, torch.device("cpu")), chunk_size=16)
    judged = judge([entry for one in contenders for entry in one.entries(SSD, inputs)])
    assert [one.verdict.status for one in judged] == ["passed"] * 4, [one.verdict.reason for one in judged]
    assert judged[2].verified.attempt.variant == "interpreter"


@pytest.mark.parametrize("operator", ["ssd", "gdn"])
def test_where_sequences_are_a_few_tokens_long_the_kernel_that_goes_token_by_token_takes_part(operator: str) -> None:
    record = operators.get(operator)
    shape = {"ssd": CELL.shape, "gdn": GDNShape(name="tiny", key_heads=1, value_heads=2, key_dim=16, value_dim=16)}
    cell = replace(CELL, shape=shape[operator], tokens=Tokens(sequences=3, seqlen=1))
    contenders = line_up(
        record, cell, precisions_for("bf16", "all", None), bundled(operator), record.drawing.chunk_sizes
    )
    assert [(one.name, str(one.precision)) for one in contenders][-1] == ("recurrent", "exact, fp32 states")
    inputs = record.drawing.draw(cell, torch.device("cpu"))
    judged = judge([entry for one in contenders for entry in one.entries(record, inputs)])
    assert {one.verdict.status for one in judged} == {"passed"}, [one.verdict.reason for one in judged]
    states = inputs.initial_states if operator == "ssd" else inputs.initial_state
    assert states.abs().sum() > 0, "a step begins with a state"
    longer = replace(cell, tokens=Tokens(sequences=3, seqlen=33))
    assert "recurrent" not in [one.name for one in line_up(record, longer, (EXACT_FP32,), bundled(operator), ())]


def test_precisions_follow_the_inputs_dtype() -> None:
    assert precisions_for("fp16", "exact", None) == (EXACT_FP32,)
    assert [str(one) for one in precisions_for("fp16", "all", None)] == ["exact, fp32 states", "relaxed, fp16 states"]
    assert len(precisions_for("bf16", "all", ("fp32", "bf16"))) == 4


def test_the_budget_is_shared_by_the_cells_that_are_left() -> None:
    assert sampling_seconds(math.inf, 1) == 1.5
    assert sampling_seconds(300, 100) == pytest.approx(1.0)
    assert sampling_seconds(1, 100) == 0.1
    assert sampling_seconds(300, 1) == 1.5


RELAXED = schema.PrecisionRecord(intermediates="relaxed", state_dtype="fp32")
HALF_STATES = schema.PrecisionRecord(intermediates="exact", state_dtype="bf16")


def test_every_output_is_matched_with_the_entry_that_is_most_like_it() -> None:
    peer = contender("peer", lambda _: 1.0, chunk_sizes=(16, 32), ours=False)
    half = contender("peer", lambda _: 1.0, chunk_sizes=(16, 32), ours=False, precision=HALF_STATES)
    relaxed = contender("peer", lambda _: 1.0, chunk_sizes=(16, 32), ours=False, precision=RELAXED)
    chunked = contender("ours", lambda _: 1.0, chunk_sizes=(16, 32), precision=HALF_STATES)
    inputs = draw(CELL, torch.device("cpu"))
    entries = [entry for one in (peer, half, relaxed, chunked, FAST) for entry in one.entries(SSD, inputs)]
    found = [reference_of(entry, entries, "peer") for entry in entries]
    assert [one and one.call.label for one in found] == [
        *(None, None, None, None),
        *("peer exact, fp32 states, chunk 16", "peer exact, fp32 states, chunk 32"),
        *("peer exact, bf16 states, chunk 16", "peer exact, bf16 states, chunk 32"),
        "peer exact, fp32 states, chunk 16",
    ]
    assert [reference_of(entry, entries, "nobody") for entry in entries] == [None] * len(entries)


@pytest.mark.parametrize("capacity", [100, 2, 1])
def test_matches_are_those_of_the_comparator_however_many_outputs_fit(
    monkeypatch: pytest.MonkeyPatch, capacity: int
) -> None:
    monkeypatch.setattr("ssdprof.bench.judge.outputs_that_fit", lambda _: capacity)
    off = contender("off", lambda _: 1.0, ours=False, spoil=noisy(0.005))
    equal = contender("equal", lambda _: 1.0)
    inputs = draw(CELL, torch.device("cpu"))
    entries = [entry for one in (off, SLOW, equal) for entry in one.entries(SSD, inputs)]
    judged = judge(entries, match_with="slow")
    assert [one.entry.contender.name for one in judged] == ["off", "slow", "equal"]
    against = [one.verdict.accuracy[0].vs_baseline for one in judged]
    if capacity == 1:
        assert against == [None] * 3
        return
    assert against[1] is None
    assert against[0] is not None
    assert against[2] is not None
    assert against[2].against == "slow exact, fp32 states"
    assert [match.match_pct for match in against[2].matches] == [100.0] * 3
    assert [match.tolerance for match in against[0].matches] == [0.0, 1e-3, 1e-2]
    shares = [match.match_pct for match in against[0].matches]
    a, b = (entries[place].call.run()[0].double() for place in (0, 1))
    near = (a - b).abs() <= 1e-2 + 1e-2 * b.abs()
    assert shares[2] == pytest.approx(100 * float(near.double().mean()))
    assert shares[0] < shares[1] < shares[2]


def test_relaxed_intermediates_are_compared_with_exact_ones_at_the_same_states() -> None:
    exact, half, relaxed = measured(
        contender("peer", lambda _: 300.0, ours=False),
        contender("peer", lambda _: 100.0, ours=False, precision=HALF_STATES),
        contender("peer", lambda _: 200.0, ours=False, precision=RELAXED),
    )
    assert (exact.over_exact, half.over_exact) == (None, None)
    assert relaxed.over_exact is not None
    assert (relaxed.over_exact.baseline, relaxed.over_exact.device_ratio) == ("peer exact, fp32 states", 1.5)
    (alone,) = measured(contender("peer", lambda _: 200.0, precision=RELAXED))
    assert alone.over_exact is None
