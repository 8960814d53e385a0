"""The caveats that a reader needs to trust the numbers."""

from report.make import EXACT_FP16, in_calls, make_checkpoint, make_clocks, make_prompt, make_report, served

from ssdprof.report.caveats import caveats
from ssdprof.schema import EXACT_FP32, Serving


def test_caveats_are_throttling_and_the_notes_of_the_run():
    report = make_report(clocks=make_clocks(throttle_reasons=("SwPowerCap",)), notes=("The weights are random.",))
    throttled, note = caveats(report)
    assert "SwPowerCap" in throttled
    assert note == "The weights are random."
    assert caveats(make_report()) == ()


def test_a_prompt_of_one_chunk_does_not_test_the_states():
    (caveat,) = caveats(make_report(gpu=False, seqlens=(256, 257)))
    assert caveat.startswith("256 tokens are no more than one chunk of 256: no state is passed on")


def test_a_chunked_prefill_in_a_single_chunk_does_not_test_the_states():
    """It has no state from an earlier chunk."""
    (caveat,) = caveats(in_calls(make_report(seqlens=(256,)), count=1))
    assert caveat.startswith("A sequence of at most 256 tokens is no more than one chunk of 256: no state is passed on")
    assert caveats(in_calls(make_report(seqlens=(256,)), count=2)) == ()


def test_packed_sequences_of_one_chunk_each_do_not_test_the_states():
    """Their total length exceeds a chunk."""
    prompt = make_prompt(600, serving=Serving(packed=(200, 256, 144)))
    report = make_report(
        gpu=False, seqlens=(600,), prompts=(prompt,), change=lambda case: served(case, "packed", 600, sequences=3)
    )
    (caveat,) = caveats(report)
    assert caveat.startswith("A sequence of at most 256 tokens is no more than one chunk of 256: no state is passed on")


def test_the_demo_is_no_measure_of_speed():
    demo = make_checkpoint(source="demo")
    (caveat,) = caveats(make_report(checkpoint=demo))
    assert "demo model is too small to fill a GPU" in caveat
    assert caveats(make_report(checkpoint=demo, gpu=False)) == ()


def test_precisions_that_are_another_one_are_named():
    def of_gdn(case):
        reason = "" if case.precision == EXACT_FP32 else "; the same as exact with fp32 states"
        return case.model_copy(update={"plan": f"two launches{reason}"}) if case.implementation == "fused" else case

    (caveat,) = [one for one in caveats(make_report(change=of_gdn)) if "the same" in one]
    assert caveat.startswith("fused computes every precision as exact with fp32 states")
    assert "and so is the time" in caveat
    (untimed,) = [one for one in caveats(make_report(gpu=False, change=of_gdn)) if "the same" in one]
    assert untimed == "fused computes every precision as exact with fp32 states: results are bitwise the same."

    def partly(case):
        return of_gdn(case) if case.precision == EXACT_FP16 else case

    (caveat,) = [one for one in caveats(make_report(change=partly)) if "the same" in one]
    assert caveat.startswith("fused computes exact with fp16 states as exact with fp32 states")
