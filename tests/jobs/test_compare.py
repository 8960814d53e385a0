"""Entries are verified, then timed.  The comparator is real, the timer is fake."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from fakes import RAN, FakeTimer, compared, entries, inputs, noisy

from ssdprof.core.target import Ceilings
from ssdprof.jobs import compare as module
from ssdprof.jobs.bench import matched_with
from ssdprof.jobs.compare import Comparer, Entry
from ssdprof.jobs.replay import planned
from ssdprof.kernels import Precision, UnsupportedError, get
from ssdprof.kernels.ssd.inputs import SSDOutput
from ssdprof.measure.first_run import Call, TimeIsUp

RELAXED = Precision.named("relaxed, fp32 states")
HALF_STATES = Precision.named("exact, bf16 states")
RELAXED_FP16 = Precision.named("relaxed, fp16 states")
Spoil = Callable[[SSDOutput], SSDOutput]


def raising(error: BaseException) -> Spoil:
    def spoil(_output: SSDOutput) -> SSDOutput:
        raise error

    return spoil


def after_the_first(change: Spoil) -> Spoil:
    seen = []

    def spoil(output: SSDOutput) -> SSDOutput:
        seen.append(None)
        return output if len(seen) == 1 else change(output)

    return spoil


def one_bit(output: SSDOutput) -> SSDOutput:
    out = output.out.clone()
    out.view(torch.int16)[0, 0, 0, 0] ^= 1
    return SSDOutput(out, output.final_states)


def nan(output: SSDOutput) -> SSDOutput:
    output.out[0, 5, 1, 2] = torch.nan
    return output


# --- what happened


def test_what_goes_wrong_is_a_status_with_a_reason():
    RAN.clear()
    bad: dict[str, Spoil] = {
        "wrong": noisy(0.5),
        "nan": nan,
        "refusing": raising(UnsupportedError("refusing: z is not supported")),
        "large": raising(torch.OutOfMemoryError("tried to allocate 80 GiB\nand more")),
        "broken": raising(RuntimeError("illegal memory access")),
        "transposed": lambda output: SSDOutput(output.out.transpose(1, 2), output.final_states),
    }
    several = (entries(name, spoil=spoil) for name, spoil in bad.items())
    verdicts = compared(
        entries("good"), entries("rejected", precheck=lambda: ("failed", "it hangs")), *several
    )
    assert {name: case.result for name, case in verdicts.items()} == {
        "good": "passed",
        "rejected": "failed",
        "wrong": "inaccurate",
        "nan": "nonfinite",
        "refusing": "refused",
        "large": "out of memory",
        "broken": "failed",
        "transposed": "failed",
    }
    assert "rejected" not in {name for name, _ in RAN}
    assert verdicts["rejected"].why == "it hangs"
    assert verdicts["wrong"].why.startswith("out, head ")
    assert "(0, 5, 1, 2)" in verdicts["nan"].why
    assert verdicts["refusing"].why == "refusing: z is not supported"
    assert verdicts["large"].why == "tried to allocate 80 GiB"
    assert verdicts["broken"].why.startswith("RuntimeError: illegal memory access (fakes.py:")
    assert "out must be torch.bfloat16 of shape" in verdicts["transposed"].why
    good = verdicts["good"]
    assert [tensor.tensor for tensor in good.accuracy] == ["out", "final_states"]
    assert (good.variant, good.samples, good.workspace_bytes, good.reason) == ("good", (), None, "")
    assert [launch.kernel for launch in good.launches] == ["good"]


def test_laws_are_told_whether_the_interpreter_ran_the_call():
    def interpreted(output: SSDOutput) -> SSDOutput:
        get("ssd", "unfused").run(inputs(), Precision())
        return output

    told = {}

    def note(name: str, was_interpreted: bool) -> tuple[()]:
        told[name] = was_interpreted
        return ()

    several = entries("plain"), entries("triton", spoil=interpreted), entries("plain again")
    for (entry,) in several:
        entry.probes = partial(note, entry.case.implementation)
    compared(*several)
    assert told == {"plain": False, "triton": True, "plain again": False}


def test_an_oracle_without_memory_is_said_of_every_case(monkeypatch):
    def no_memory(*_args, **_kwargs):
        raise torch.OutOfMemoryError("tried to allocate 4 GiB")

    monkeypatch.setattr(module, "compare_with_oracle", no_memory)
    verdicts = compared(entries("a"), entries("b"), timer=FakeTimer())
    assert {(case.result, case.why) for case in verdicts.values()} == {
        ("out of memory", "while compared with the oracle: tried to allocate 4 GiB")
    }
    with pytest.raises(torch.OutOfMemoryError):
        compared(entries("a"), timer=FakeTimer(), oracle_must_fit=True)


def test_a_call_that_changes_its_inputs_has_no_output_and_no_time():
    looks = []

    def changed_when_timed() -> str:
        looks.append(None)
        return "it changes its inputs: x" if len(looks) > 1 else ""

    verdicts = compared(
        entries("at_once", out_of_bounds=lambda: "it changes its inputs: B"),
        entries("later", out_of_bounds=changed_when_timed),
        timer=FakeTimer(),
    )
    assert (verdicts["at_once"].result, verdicts["at_once"].why) == (
        "failed",
        "it changes its inputs: B",
    )
    assert verdicts["later"].result == "inaccurate"
    assert verdicts["later"].why == "after it was timed: it changes its inputs: x"
    assert not any(case.samples for case in verdicts.values())


# --- errors against the baseline, and batches


def groups() -> list[Entry]:
    """Two implementations at four precisions, each with its baseline."""
    made = []
    for states in ("fp32", "bf16"):
        exact = Precision.named(f"exact, {states} states")
        (base,) = entries("base", 200.0, precision=exact, turns=states)
        made.append(base)
        for precision in (exact, replace(exact, intermediates="relaxed")):
            for name in ("a", "b"):
                made += entries(
                    name,
                    precision=precision,
                    baseline=base,
                    spoil=noisy(0.3) if name == "b" else lambda output: output,
                )
    return made


@pytest.mark.parametrize("capacity", [1, 2, 3, 4, 5, 8, 100])
def test_little_memory_changes_nothing_but_the_number_of_passes(monkeypatch, capacity):
    roomy = compared(groups())
    passes = []
    whole = module.compare_with_oracle

    def counted(inputs, candidates, **rest):
        passes.append(len(candidates))
        return whole(inputs, candidates, **rest)

    monkeypatch.setattr(module, "compare_with_oracle", counted)
    monkeypatch.setattr(Call, "outputs_that_fit", capacity)
    seen = []
    tight = compared(groups(), seen=seen)
    assert max(passes) <= capacity
    assert len(seen) == len(tight) == 10
    if capacity > 1:
        assert tight == roomy
    else:  # nothing is compared with a baseline
        assert all(
            tensor.vs_baseline is None for case in tight.values() for tensor in case.accuracy
        )
        assert [case.result for case in tight.values()] == [case.result for case in roomy.values()]
    assert len(passes) == {1: 10, 2: 8, 3: 4, 4: 4, 5: 2, 8: 2, 100: 1}[capacity]


def test_a_baseline_that_fails_when_run_again_keeps_its_first_result(monkeypatch):
    monkeypatch.setattr(Call, "outputs_that_fit", 2)
    (base,) = entries("once", spoil=after_the_first(raising(torch.OutOfMemoryError("later"))))
    verdicts = compared([base], entries("a", baseline=base), entries("b", baseline=base))
    assert [case.result for case in verdicts.values()] == ["passed"] * 3
    assert verdicts["a"].accuracy[0].vs_baseline is not None
    assert verdicts["b"].accuracy[0].vs_baseline is None
    (base,) = entries("refusing", spoil=raising(UnsupportedError("no")))
    verdicts = compared([base], entries("a", baseline=base))
    assert (verdicts["refusing"].result, verdicts["a"].result) == ("refused", "passed")
    assert verdicts["a"].accuracy[0].vs_baseline is None


# --- times


def test_only_entries_of_one_group_are_timed_together():
    timer = FakeTimer()
    compared(entries("a", turns=1), entries("b", turns=2), entries("c", turns=1), timer=timer)
    assert [set(timer.recorded[place : place + 2]) for place in (0, 2)] == [{"a", "c"}] * 2
    assert timer.recorded[4:] == ["b", "b"]


def test_the_fastest_chunk_size_is_taken():
    timer = FakeTimer()
    choosy = entries(
        "choosy", lambda size: {128: 90.0, 256: 70.0}[size or 0], chunk_sizes=(128, 256)
    )
    verdicts = compared(entries("slow", 300.0), choosy, timer=timer)
    case = verdicts["choosy"]
    assert case.chunk_size == 256
    assert case.trials == {128: 90.0, 256: 70.0}
    assert case.device_us == (70,) * 3
    assert (verdicts["slow"].chunk_size, verdicts["slow"].trials) == (None, {})
    # twice: the choice of the chunk size, then the two in turns
    assert len(timer.recorded) == 2 * (2 + 2)


def test_a_chunk_size_that_is_wrong_is_not_taken_however_fast():
    choosy = entries(
        "choosy", lambda size: float(size or 0), chunk_sizes=(128, 256), wrong_chunk=128
    )
    (case,) = compared(choosy, timer=FakeTimer()).values()
    assert case.trials == {128: None, 256: None}
    assert (case.chunk_size, case.device_us) == (256, (256,) * 3)
    (alone,) = compared(entries("alone", chunk_sizes=(128,)), timer=FakeTimer()).values()
    assert alone.trials == {128: None}
    assert alone.samples
    (wrong,) = compared(
        entries("w", chunk_sizes=(128, 256), spoil=noisy(0.5)), timer=FakeTimer()
    ).values()
    assert (wrong.chunk_size, wrong.result, len(wrong.trials)) == (128, "inaccurate", 2)


def test_a_baseline_outside_its_budget_is_timed_and_one_that_is_not_finite_is_not():
    for spoil, result in ((noisy(0.05), "inaccurate"), (nan, "nonfinite")):
        (base,) = entries("base", 200.0, spoil=spoil)
        verdicts = compared([base], entries("fast", baseline=base), timer=FakeTimer())
        assert (verdicts["base"].result, verdicts["fast"].result) == (result, "passed")
        over = verdicts["fast"].over(verdicts["base"])
        assert (over.value if over else None) == (2 if result == "inaccurate" else None)


def test_another_library_is_judged_by_its_second_call_because_it_tunes_itself_in_the_first():
    calls = []

    def untuned(output: SSDOutput) -> SSDOutput:
        calls.append(1)
        return noisy(0.5)(output) if len(calls) == 1 else output

    assert compared(entries("library", kind="library", spoil=untuned))["library"].result == "passed"
    half = entries(
        "half",
        kind="library",
        precision=HALF_STATES,
        spoil=lambda output: SSDOutput(output.out, output.final_states.bfloat16()),
    )
    (case,) = compared(half).values()
    assert case.result == "passed", "its states are widened to be judged"
    assert half[0].call.run()[1].dtype == torch.bfloat16, "and not to be timed"


def test_nothing_is_faster_than_the_roof():
    """10 MB take 2.5 us at 4,000 GB/s."""
    ceilings = Ceilings(copy_gb_per_s=4000.0, matmul_tflops=800.0)
    (fast,) = entries("fast", 1.0)
    (good,) = entries("good", 3.0)
    for entry in (fast, good):
        entry.case = entry.case.changed(bytes_moved=10_000_000, flops=0)
    verdicts = compared([fast], [good], timer=FakeTimer(), ceilings=ceilings)
    assert (verdicts["good"].result, bool(verdicts["good"].samples)) == ("passed", True)
    assert (verdicts["fast"].result, verdicts["fast"].samples) == ("failed", ())
    assert verdicts["fast"].why.startswith(
        "the measurement failed: 1 us of device time would be 250% of the roofline"
    )


def test_what_goes_wrong_while_it_is_timed():
    def zero(name: str, output: SSDOutput):
        if name == "racy":
            output.out[0, 9, 1].zero_()

    calls = []  # the first one, then two recordings of three calls each

    def last(output: SSDOutput) -> SSDOutput:
        calls.append(1)
        if len(calls) > 3:
            raise ValueError("no more calls")
        return output

    verdicts = compared(
        entries("good"),
        entries("uncapturable"),
        entries("racy"),
        entries("bits", spoil=after_the_first(one_bit)),
        entries("drifting", spoil=after_the_first(noisy(0.5))),
        entries("raising", spoil=last),
        timer=FakeTimer(spoil=zero, uncapturable=frozenset({"uncapturable"})),
    )
    assert {name: (case.result, bool(case.samples)) for name, case in verdicts.items()} == {
        "good": ("passed", True),
        "uncapturable": ("passed", False),
        "racy": ("inaccurate", False),
        "bits": ("passed", True),
        "drifting": ("inaccurate", False),
        "raising": ("failed", False),
    }
    assert "it synchronises" in verdicts["uncapturable"].reason
    assert verdicts["racy"].why.startswith("after it was timed: out, head 1")
    assert verdicts["bits"].reason == "repeated calls differ in their bits, within the budget"
    assert verdicts["drifting"].why.startswith("after it was timed: out, head")
    assert verdicts["raising"].why.startswith(
        "a later call raised ValueError: no more calls (fakes.py:"
    )


@pytest.mark.parametrize(
    ("precision", "factor", "largest"), [(RELAXED, 2.0, 256), (RELAXED_FP16, 0.5, 1)]
)
def test_numbers_change_from_sample_to_sample_and_fp16_cannot_overflow(
    monkeypatch, precision: Precision, factor, largest
):
    scales = []
    changeable = module._changeable

    @contextmanager
    def noted(calls) -> Iterator[Callable[[float], None]]:
        with changeable(calls) as scale:
            assert scale

            def note(number: float):
                scales.append(number)
                scale(number)

            yield note

    monkeypatch.setattr(module, "_changeable", noted)
    compared(entries("a", precision=precision), timer=FakeTimer())
    *sampled, end, first, _, second, last = scales
    assert len(sampled) == len(set(sampled)) == 2 * 2 * 3  # recordings, clocks, rounds
    assert max(sampled) <= largest
    assert (end, first, second, last) == (1.0, factor, factor, 1.0)


# --- verdicts from shorter inputs


def test_verdicts_of_other_inputs_do_not_cover_what_is_not_finite():
    made = [
        *entries("good"),
        *entries("wrong", spoil=noisy(0.5)),
        *entries("bad", spoil=nan),
        *entries("refusing", spoil=raising(UnsupportedError("too long"))),
    ]
    right_ones = {one.key: compared(entries(one.case.implementation)).popitem()[1] for one in made}
    verdicts = right_ones | {made[1].key: compared([made[1]])["wrong"]}
    cases = {case.name.split(", ")[2]: case for case in Comparer().compare(made, "x", verdicts)}
    assert {name: case.result for name, case in cases.items()} == {
        "good": "passed",
        "wrong": "inaccurate",
        "bad": "nonfinite",
        "refusing": "refused",
    }
    assert cases["good"].accuracy == right_ones[made[0].key].accuracy


def test_of_the_first_calls_on_both_inputs_the_slower_one_is_told():
    (entry,) = entries("a")
    verdict = compared([entry])["a"].changed(first_call={"seconds": 3, "compiled": {"kernel": 2.5}})
    (case,) = Comparer().compare([entry], "x", {entry.key: verdict})
    assert case.first_call == verdict.first_call
    first, second = entries("c", chunk_sizes=(16, 32))
    tried = verdict.changed(chunk_size=16)
    again = tried.changed(first_call={"seconds": 3, "compiled": {"kernel": 1}})
    _, case = Comparer()._fastest({first: tried, second: again}, FakeTimer())
    assert case.first_call == verdict.first_call


# --- first calls


def sleepy(_output: SSDOutput) -> SSDOutput:
    """Takes many short steps, as a compiler does."""
    while True:
        time.sleep(0.01)


def ringing(output: SSDOutput) -> SSDOutput:
    """As if the time of its first call were over, however busy the machine is."""
    signal.raise_signal(signal.SIGALRM)
    return output


def test_a_first_call_that_takes_too_long_fails_alone():
    verdicts = compared(entries("slow", spoil=ringing), entries("fast"), first_call_s=600)
    assert (verdicts["slow"].result, verdicts["slow"].why) == (
        "failed",
        "its first call was stopped after 600 s",
    )
    assert verdicts["fast"].result == "passed"


def test_the_end_of_the_bench_is_the_end_of_a_first_call():
    with pytest.raises(TimeIsUp, match="in the first call of slow exact, fp32 states"):
        compared(entries("slow", spoil=sleepy), until=time.monotonic() + 0.05)


# --- interruption


def test_an_interruption_of_timing_keeps_the_errors_and_the_times_before():
    seen = []
    with pytest.raises(KeyboardInterrupt):
        compared(
            entries("a", turns=1), entries("b", turns=2), timer=FakeTimer(stop_at=8), seen=seen
        )
    untimed = "interrupted before it was timed"
    assert [
        (case.implementation, bool(case.accuracy), bool(case.samples), case.reason) for case in seen
    ] == [("a", True, False, untimed), ("b", True, False, untimed), ("a", True, True, "")]
    compared(
        entries("c", chunk_sizes=(16, 32)),
        entries("wrong", spoil=noisy(0.5)),
        timer=FakeTimer(),
        seen=seen,
    )
    assert [(case.implementation, case.reason) for case in seen[3:]] == [
        ("wrong", ""),
        ("c", untimed),
        ("c", ""),
    ]


# --- who is compared with whom


FP32, FP16, BF16 = (Precision.named(f"exact, {one} states") for one in ("fp32", "fp16", "bf16"))


@pytest.mark.parametrize(
    ("wanted", "baseline", "fixed", "pairs"),
    [
        ([RELAXED_FP16], "unfused", {}, [("unfused", FP16, FP16), ("fused", RELAXED_FP16, FP16)]),
        (
            [FP32, RELAXED_FP16],
            "them",
            {"them": (FP16, FP32)},
            [
                ("them", FP32, FP32),
                ("fused", FP32, FP32),
                ("them", FP16, FP16),
                ("fused", RELAXED_FP16, FP16),
            ],
        ),
        (
            [FP32, RELAXED_FP16],
            "them",
            {"them": (BF16,)},
            [("them", BF16, BF16), ("fused", FP32, BF16), ("fused", RELAXED_FP16, BF16)],
        ),
    ],
    ids=["it was not requested", "equal states", "a library that lacks the states"],
)
def test_the_baseline_runs_at_equal_states_if_it_has_them(wanted, baseline, fixed, pairs):
    fused = get("ssd", "fused")
    first = replace(
        get("ssd", "unfused"),
        name=baseline,
        precisions=(lambda _: fixed[baseline]) if fixed else None,
    )
    assert [(one.name, *rest) for one, *rest in planned([fused], first, wanted, "fp32")] == pairs


def test_every_output_of_a_bench_is_matched_with_the_entry_that_is_most_like_it():
    sizes = (16, 32)
    made = [
        *entries("library", chunk_sizes=sizes),
        *entries("library", chunk_sizes=sizes, precision=HALF_STATES),
        *entries("library", chunk_sizes=sizes, precision=RELAXED),
        *entries("ours", chunk_sizes=sizes, precision=HALF_STATES),
        *entries("fast"),
    ]
    verdicts = [matched_with(entry, made, "library") for entry in made]
    assert [one and one.call.label for one in verdicts] == [
        *(None, None, None, None),
        *("library exact, fp32 states, chunk 16", "library exact, fp32 states, chunk 32"),
        *("library exact, bf16 states, chunk 16", "library exact, bf16 states, chunk 32"),
        "library exact, fp32 states, chunk 16",
    ]
    assert [matched_with(entry, made, "nobody") for entry in made] == [None] * len(made)


def test_a_time_is_kept_where_no_memory_is_left_to_change_the_inputs(monkeypatch):
    monkeypatch.setattr(module, "_changeable", lambda _: nullcontext(None))
    (case,) = compared(entries("a"), timer=FakeTimer()).values()
    assert (case.result, bool(case.samples)) == ("passed", True)
    assert case.reason == "not tried with other numbers at the inputs' addresses: out of memory"
