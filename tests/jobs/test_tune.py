"""`ssdprof tune`: candidates, searches, the stored configurations, and the command."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, product, repeat
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Answer, ending, passing
from fakes import needs_interpreter
from generated_inputs import cell_of, generated
from targets import slow
from tuning_fakes import (
    COMMITTED_SEGMENT,
    GPU,
    FakeTimer,
    environment,
    kept,
    ssd_inputs,
    ssd_problem,
)

from ssdprof.core.base import EXACT_FP32, states_of
from ssdprof.core.case import Case
from ssdprof.core.report import Report
from ssdprof.core.tuned import TunedConfig, TunedConfigs
from ssdprof.errors import BadInputError, MissingCapabilityError
from ssdprof.jobs import tune as job
from ssdprof.jobs.tune import DECIDING, Problem, difference, search
from ssdprof.kernels import device, registry
from ssdprof.kernels.choice import FusedCall
from ssdprof.kernels.gdn import fused as gdn_fused
from ssdprof.kernels.gdn.config import GDNPortableConfig, call_key
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.kda import fused as kda_fused
from ssdprof.kernels.kda.hopper.launch import KDAHopperConfig
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd import fused as ssd_fused
from ssdprof.kernels.ssd.config import SSDPortableConfig
from ssdprof.kernels.ssd.hopper import config as hopper_config
from ssdprof.kernels.ssd.hopper.config import (
    LONGEST_RECOMPUTED,
    SSDHopperConfig,
    as_exact_as_unfused,
)
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.measure.first_run import Call
from ssdprof.measure.sampling import FIRST_LOOK
from ssdprof.operators.gdn_tuning import TUNING as GDN
from ssdprof.operators.kda_tuning import TUNING as KDA
from ssdprof.operators.ssd import OPERATOR
from ssdprof.operators.ssd_tuning import TUNING as SSD
from ssdprof.stalls import ncu
from ssdprof.store import tuned as store

CPU = torch.device("cpu")
SMALL_GDN = "1/2x16x16"
EXACT = Precision()


@pytest.fixture(autouse=True)
def cache(request, monkeypatch, tmp_path) -> Iterator[Path]:
    """The folder of stored configurations; without a real GPU, this machine has the GPU `GPU`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr("ssdprof.environment.machine.gpu", lambda: GPU)
    yield tmp_path / "cache" / "ssdprof" / "tuned"
    for operator in ("ssd", "gdn", "kda"):
        registry.use_overrides(operator, {})


gdn_inputs = partial(generated, "gdn", SMALL_GDN, layout="contiguous")


# --- candidates


def options(tuning, committed, inputs) -> list[Any]:
    return [option for axis in tuning.axes(committed) for option in axis(committed, inputs)]


def test_hopper_candidates_cut_the_whole_sequence_and_are_as_exact_as_unfused():
    """The short cut that is checked also covers its sequence, and has several segments if the whole
    cut does.
    """
    problem = ssd_problem("hopper", 1280)
    configs = options(SSD, problem.committed, problem.inputs[-1])
    assert {20, 10, 7, 5, 4, 3, 2, 1} <= {config.segment for config in configs} <= set(range(1, 21))
    assert difference(replace(problem.committed, reason=""), problem.committed) == ""
    assert difference(SSDHopperConfig(segment=4, ring=2), problem.committed) == "segment 4, ring 2"
    assert any(config.long_count for config in configs)
    assert any(config.recompute for config in configs)
    for config in configs:
        assert as_exact_as_unfused(config, 20)
        assert sum(config.lengths(20)) == 20
        assert min(config.lengths(20)) > 0
        short = SSD.for_short(config, problem.inputs[-1])
        assert isinstance(short, SSDHopperConfig)
        assert (short.count(16) > 1) == (config.count(20) > 1)
        assert (short.recompute, bool(short.long_count)) == (
            config.recompute,
            bool(config.long_count),
        )


LONG_GDN = "1/1x128x128"
KDA_HOPPER = KDAHopperConfig(slab=16)
TOO_LONG = LONGEST_RECOMPUTED + 1


@pytest.mark.parametrize(
    ("tuning", "committed", "inputs", "fields", "tried"),
    [
        (SSD, SSDHopperConfig(segment=TOO_LONG), ssd_inputs(TOO_LONG * 64), "recompute", {False}),
        # longer sums over N would be less accurate: benchmarks/log/ssd.md#row-60
        (
            SSD,
            SSDPortableConfig(block_n=256),
            ssd_inputs(1024, "2x64x256x1"),
            "block_n",
            {64, 128, 256},
        ),
        (SSD, SSDPortableConfig(chunk=32, block_p=16), ssd_inputs(1024), "block_p", {16}),
        (
            GDN,
            None,
            generated("gdn", LONG_GDN, 8192),
            "block_v v_rows",
            set(product((16, 32, 64, 128), (True, False))),
        ),
        (KDA, None, generated("kda", SMALL_GDN, 64), "block_v block_k", {(16, 16)}),
        (KDA, KDA_HOPPER, generated("kda", LONG_GDN, 8192), "slab", {4, 8, 16, 32, 64}),
    ],
)
def test_what_the_candidates_vary(tuning, committed, inputs, fields, tried: set[object]):
    """A kernel takes all of them: they are read back as they are stored."""
    configs = options(tuning, committed or tuning.committed(inputs, EXACT, "portable"), inputs)
    assert set(map(attrgetter(*fields.split()), configs)) == tried
    hopper = isinstance(committed, SSDHopperConfig | KDAHopperConfig)
    for config in configs:
        settings = tuning.settings(config)
        assert tuning.config("hopper" if hopper else "portable", settings, config.reason) == config


def test_a_committed_cut_is_also_tried_with_segments_that_are_a_little_longer():
    nearby = options(
        SSD, SSDHopperConfig(segment=10, long_count=2, long_segment=100), ssd_inputs(240 * 64)
    )
    assert {92, 96, 104, 108} <= {config.long_segment for config in nearby}
    inputs = generated("gdn", LONG_GDN, 4096)
    committed = replace(gdn_fused.committed_portable(inputs), segment=16)
    chunks = next(axis for axis in GDN.axes(committed) if axis.__name__ == "_chunks")
    assert {one.segment * one.chunk for one in chunks(committed, inputs)} == {1024}, "in positions"


@pytest.mark.parametrize(
    ("headdim", "dtype", "committed"),
    [
        (64, torch.bfloat16, SSDPortableConfig(chunk=128)),
        (16, torch.float32, SSDPortableConfig(chunk=16, block_p=16)),
    ],
)
def test_no_portable_candidate_has_rows_whose_addresses_ptxas_loses(
    headdim, dtype, committed: SSDPortableConfig
):
    """benchmarks/log/ssd.md#row-57.  Neither longer chunks nor a smaller slice of P may lead to
    such rows.
    """
    x = torch.zeros(1, 1024, 2, headdim, dtype=dtype)
    configs = options(SSD, committed, SSDInputs.unchecked(**vars(ssd_inputs(1024)) | {"x": x}))
    assert len(configs) > 10
    assert all(config.chunk < 64 or config.block_p * dtype.itemsize >= 128 for config in configs)


def test_a_gdn_candidate_that_cuts_is_first_judged_on_a_cut_sequence():
    inputs = gdn_inputs(4164)
    short = GDN.short(inputs)
    assert short.length == 1024 + 4164 % 128
    cut = replace(gdn_fused.committed_portable(inputs), chunk=64, segment=32)
    assert 0 < GDN.for_short(cut, inputs).segment < short.length / 64
    assert GDN.for_short(replace(cut, segment=0), inputs).segment == 0
    with pytest.raises(BadInputError, match="The recurrent kernel runs these inputs"):
        GDN.kernel(gdn_inputs(1))


# --- from shapes and stored captures to problems


def made(intermediates="exact", dtype="bf16") -> list[Problem]:
    cell = partial(cell_of, "ssd", "2x16x16x1", dtype=dtype)
    cells = (cell(100), cell(9, sequences=2))
    return list(job.problems(OPERATOR, cells, intermediates, CPU))


def test_the_portable_kernel_has_one_problem_for_all_lengths_and_the_hopper_kernel_one_for_each(
    monkeypatch,
):
    (problem,) = made()
    assert isinstance(problem.committed, SSDPortableConfig)
    assert problem.committed.chunk == 32  # of the longest
    assert [inputs.values.shape[:2] for inputs in problem.inputs] == [(2, 9), (1, 100)]
    assert "nchunks" not in problem.calls
    assert problem.calls["nheads"] == 2
    assert problem.cases[0].precision == EXACT_FP32
    assert states_of(made("relaxed")[0].cases[0].precision) == "bf16", "as in a bench"
    assert made("relaxed", "fp32")[0].committed.chunk == 32  # with exact intermediates 16
    monkeypatch.setattr(hopper_config, "unsupported", lambda _: "")
    monkeypatch.setattr(device, "sm_count", lambda _: 132)
    found = made()
    assert [(one.calls["sequences"], one.calls["nchunks"]) for one in found] == [(1, 2), (2, 1)]
    assert all(isinstance(one.committed, SSDHopperConfig) for one in found)


# --- the search: it finds faster configurations, names wrong ones, and keeps the committed one in
#   doubt


Found = tuple[tuple[Case, ...], TunedConfig | str]


def found(fake: FakeTimer, problem: Problem | None = None, run=None) -> Found:
    problem = problem or ssd_problem("hopper", 1280)

    class Faked(Problem):
        def run(self, inputs, config):
            return (run or fake.run)(inputs, config)

    return search(Faked(**vars(problem)), fake)


def value(outcome: Found, name: str):
    _, find = outcome
    assert isinstance(find, TunedConfig), find
    return find.settings[name]


def of_result(outcome: Found, result: str) -> dict[str, str]:
    """The candidates with this result, and why."""
    return {
        case.implementation: case.why
        for case in outcome[0]
        if case.result == result and not case.samples
    }


def by_segment(config: SSDHopperConfig, _tokens: int) -> float:
    """Equal segments of 4 chunks and rings of two are best."""
    return 100 + abs(config.segment - 4) + config.long_count + 2 * config.ring + config.score_ring


def of(cases: Sequence[Case], name: str) -> Case:
    return next(case for case in cases if case.implementation == name)


@pytest.mark.parametrize(("fitting", "turns"), [(100, 5), *slow((12, 9))])
def test_it_goes_to_the_fastest_axis_by_axis(fitting, turns, monkeypatch):
    """A configuration is written to the file and read back unchanged.  fitting: whose outputs are
    kept by graphs.
    """
    monkeypatch.setattr(Call, "outputs_that_fit", fitting)
    fake = FakeTimer(cost=by_segment)
    cases, find = found(fake)
    assert isinstance(find, TunedConfig), find
    assert find.device_ratio == pytest.approx(
        by_segment(SSDHopperConfig(segment=10), 0) / 106, rel=0.01
    )
    assert find.device_interval[0] > 1.01
    committed = of(cases, "committed")
    best = of(cases, "segment 4, ring 2")
    assert committed.plan.startswith(f"segment {COMMITTED_SEGMENT}, ")
    assert (len(committed.samples), {one.process for one in best.samples}) == (
        2 * turns,
        {str(turns)},
    )
    assert best.over(committed) == (find.device_ratio, *find.device_interval)
    config = SSD.config("hopper", find.settings, find.reason)
    assert config == SSDHopperConfig(segment=4, ring=2, reason=find.reason)
    assert config.reason.startswith("tuned on this GPU, 20")
    checked = {config.segment for config, tokens in fake.ran if tokens == 1024}
    assert checked == {1, 2, 3, 4, 5, 16}, "with and without a carry"


class PlacedTimer(FakeTimer):
    """Within a recording a time does not vary; a graph's place in memory changes it by up to 4
    %.
    """

    generator: np.random.Generator
    recordings = 0
    factors: dict[object, float]

    def reallocate(self, generator: np.random.Generator):
        self.generator = generator
        self.factors = {}
        self.recordings += 1

    def device_us(self, graph) -> float:
        factor = self.factors.setdefault(graph[0], float(self.generator.uniform(0.96, 1.04)))
        return super().device_us(graph) * factor


def by_warps(better_at: tuple[int, ...]) -> FakeTimer:
    """8 warps are 20 % faster at some lengths, and 5 % slower at others."""
    return FakeTimer(
        cost=lambda config, tokens: (
            tokens * (1.0 if config.num_warps < 8 else 0.8 if tokens in better_at else 1.05)
        )
    )


def wrong_if_packed(fake: FakeTimer) -> Callable[[Any, Any], Any]:
    def run(inputs, config):
        output = fake.run(inputs, config)
        return output._replace(out=-output.out) if inputs.cu_seqlens is not None else output

    return run


@pytest.mark.parametrize(
    ("fake", "why"),
    [
        (FakeTimer(noise=map(random.Random(0).gauss, repeat(1), repeat(0.05))), ""),
        *slow(
            (PlacedTimer(), ""),
            (
                FakeTimer(cost=lambda config, _: 99.2 if config.segment == 4 else 100.0),
                "not 1% faster with 95 %",
            ),
        ),
        # the short input has 1,024 of the 1,280 positions
        (
            FakeTimer(
                cost=by_segment, spoilt=lambda config, tokens: tokens == 1280 and config.ring == 2
            ),
            "the fastest was wrong: out, head",
        ),
        (
            FakeTimer(refused=lambda _: True),
            "it cannot be timed: RuntimeError: out of resources: shared memory",
        ),
        (FakeTimer(unrecorded=lambda _: True), "captured as a CUDA graph: it synchronises"),
    ],
    ids=["noise", "a lucky place", "0.8 %", "wrong at length", "refused", "cannot be captured"],
)
def test_the_committed_configuration_stays_in_doubt(fake: FakeTimer, why):
    outcome = found(fake)
    assert isinstance(outcome[1], str)
    assert why in outcome[1]
    if isinstance(fake, PlacedTimer):
        assert fake.recordings >= FIRST_LOOK.min_recordings + DECIDING.min_recordings >= 8
        faster = PlacedTimer(cost=lambda config, _: 70.0 if config.segment == 4 else 100.0)
        assert value(found(faster), "segment") == 4
    if "1%" in why:
        ratio = of(outcome[0], "segment 4").over(of(outcome[0], "committed"))
        assert ratio.verdict(0.01) == "no difference"
    if "wrong" in why:
        assert list(of_result(outcome, "inaccurate")) == ["segment 4, ring 2"]


def test_a_wrong_candidate_is_named_and_never_found():
    def cost(config: SSDHopperConfig, _tokens: int) -> float:
        return 50.0 if config.ring == 2 else 100.0 + config.segment

    outcome = found(FakeTimer(cost=cost, spoilt=lambda config, _tokens: config.ring == 2))
    assert value(outcome, "ring") == 3
    wrong = of_result(outcome, "inaccurate")
    assert wrong
    assert all("ring 2" in name and "budget" in why for name, why in wrong.items())


@pytest.mark.parametrize(
    ("broken", "result", "why"),
    [
        ("refused", "failed", "RuntimeError: out of resources: shared memory"),
        *slow(
            (
                "unrecorded",
                "passed",
                "The candidate segment 4 is not timed: it cannot be captured as a",
            )
        ),
        ("faulty", "", ""),
    ],
)
def test_a_candidate_that_does_not_run_is_named_and_one_that_costs_the_gpu_ends_the_search(
    broken, result, why, monkeypatch
):
    """Otherwise all other candidates would be reported as failing."""

    def fake() -> FakeTimer:
        return FakeTimer(cost=by_segment, **{broken: lambda config: config.segment == 4})

    if result:
        outcome = found(fake())
        assert any(reason.startswith(why) for reason in of_result(outcome, result).values())
        assert value(outcome, "segment") in (3, 5)
    monkeypatch.setattr("ssdprof.measure.first_run._answers", lambda _: False)
    with pytest.raises(
        MissingCapabilityError, match="The candidate segment 4 left the GPU unusable"
    ):
        found(fake())


@pytest.mark.slow
def test_a_find_of_the_portable_kernel_holds_for_every_length_and_for_packed_sequences():
    problem = ssd_problem("portable", 128, 192)
    both = by_warps((128, 192))
    outcome = found(both, problem)
    assert value(outcome, "num_warps") == 8
    assert isinstance(outcome[1], TunedConfig)
    assert (outcome[1].calls["kernel"], outcome[1].device_ratio) == (
        "portable",
        pytest.approx(1.25, rel=0.01),
    )
    assert found(by_warps((128,)), problem)[1] == "the fastest was slower at 192 tokens"
    assert "the fastest was wrong" in str(found(both, problem, wrong_if_packed(both))[1])


# --- stored configurations are used, unless they do not apply


def used() -> list[str]:
    """The message of a command, and the configurations that the kernels then use, as "segment
    N".
    """
    said = []
    store.use_saved(said.append)
    return [
        *said,
        *(f"segment {getattr(one, 'segment', 0)}" for one in registry._overrides.values()),
    ]


def test_what_is_stored_is_used_and_said_also_in_another_process(cache: Path, monkeypatch):
    assert used() == []
    file = kept()
    assert file == cache / "NVIDIA-Test.json"
    said, segment = used()
    assert said == (
        "1 configuration tuned on this GPU will be used where they fit; --no-tuned takes the "
        "committed ones."
    )
    assert segment == "segment 4"
    ((key, config),) = registry._overrides.items()
    sizes = {"gpu": "NVIDIA Test", "kernel": "hopper", "nheads": 80, "nchunks": 16, "exact": True}
    assert sizes.items() <= dict(key).items()
    assert config.reason == "tuned on this GPU, 2026-11-20"
    finds = TunedConfigs.model_validate_json(file.read_text())
    assert finds.kernels.keys() == {"ssd"}
    assert (finds.environment.gpu, bool(finds.environment.packages["triton"])) == (GPU, True)
    registry.use_overrides("ssd", {})
    store.use_file(file)
    assert [config.segment for config in registry._overrides.values()] == [4]
    job = ncu.Job(
        folder=Path("captures"),
        cache=Path("cache"),
        layer=1,
        seqlen=512,
        implementation="fused",
        precision=EXACT_FP32,
        tuned=file,
    )
    assert any(str(file) in word for word in ncu.target(job, Path("launched.json")))
    registry.use_overrides("ssd", {})
    monkeypatch.setattr("ssdprof.environment.machine.gpu", lambda: None)
    assert used() == []


def test_later_outcomes_replace_those_for_the_same_calls():
    kept(nchunks=16, segment=4)
    kept(nchunks=32, segment=8)
    kept(nchunks=16, segment=5)
    assert used()[1:] == ["segment 8", "segment 5"]
    kept(nchunks=16, segment=None)
    assert used()[1:] == ["segment 8"], "a search that finds nothing deletes what was found before"


def test_a_find_holds_for_one_version_of_the_kernels_one_gpu_and_one_triton(monkeypatch):
    file = kept(environment(GPU.model_copy(update={"name": "NVIDIA Other"})))
    assert used() == []
    file.rename(file.with_name("NVIDIA-Test.json"))
    assert "ignored: they are of NVIDIA Other, this is NVIDIA Test" in used()[0]
    kept(environment(triton="3.5.0"))
    assert "ignored: they were compiled by Triton 3.5.0, this is" in used()[0]
    kept()
    monkeypatch.setattr(store, "kernels_hash", lambda _operator: "another")
    (said,) = used()
    assert "ignored: the kernels have changed since" in said
    assert "ssdprof tune" in said
    kept(nchunks=99)  # the next find removes it
    assert len(used()) == 2


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("{", "", "is not valid JSON: "),
        ('"segment": 4', '"segment": 0', "is damaged: segment is 0, not "),
        ('"long_count": 0', '"long_count": 1', "is damaged: "),
        ('"version": 4', '"version": 3', "has format version 3; this ssdprof reads version 4."),
    ],
)
def test_what_cannot_be_read_is_said(before, after, why):
    file = kept()
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))
    (said,) = used()
    assert f"NVIDIA-Test.json {why}" in said


def test_a_cache_that_cannot_be_written_is_said(cache: Path, monkeypatch):
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file where a folder should be")
    with pytest.raises(BadInputError, match="cannot be made: a file is in its place"):
        kept()
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert store.folder() == Path.home() / ".cache" / "ssdprof" / "tuned", (
        "a relative folder does not count"
    )


def test_a_find_is_for_its_own_calls_only():
    def chosen(
        inputs: GDNInputs, precision: Precision = EXACT, *, batch_invariant: bool = False
    ) -> GDNPortableConfig:
        call = FusedCall(inputs=inputs, precision=precision, batch_invariant=batch_invariant)
        return gdn_fused.PORTABLE.configure(call)

    inputs = gdn_inputs(200)
    config = replace(chosen(inputs), chunk=16, reason="tuned on this GPU, today")
    assert chosen(inputs) != config
    registry.use_overrides("gdn", {call_key(inputs, EXACT): config})
    assert chosen(inputs) == config
    assert chosen(gdn_inputs(250)) == config, "as many chunks of 64"
    batch = gdn_inputs(200, sequences=2)
    assert chosen(batch) != config
    assert chosen(batch, batch_invariant=True) == config
    for other in (
        gdn_inputs(300),
        generated("gdn", "2/2x16x16", 200),
        gdn_inputs(200, shortest=200),
    ):
        assert chosen(other) != config
    assert chosen(inputs, Precision(intermediates="relaxed")) != config
    assert chosen(replace(inputs, use_qk_l2norm=False)) != config


# --- the command


def test_clear_needs_no_gpu():
    file = kept()
    assert "Removed" in passing("tune --clear").err
    assert not file.exists()
    assert "There is nothing in" in passing("tune --clear").err


@pytest.fixture
def pretended_gpu(monkeypatch):
    """By its timer 8 warps are twice as fast.  Kernels run in the interpreter, and their outputs
    are right.
    """
    fake = FakeTimer(
        cost=lambda config, tokens: tokens * (0.5 if config.num_warps == 8 else 1.0),
        noise=repeat(1.0),
    )
    run = Problem.run

    def noted(problem: Problem, inputs, config):
        if isinstance(inputs, SSDInputs):
            return fake.run(inputs, config)
        fake.ran.append((config, inputs.length))
        return run(problem, inputs, config)

    # the kernels' name for the device of their tensors
    gpu = GPU.model_copy(update={"name": "cpu"})
    monkeypatch.setattr(job, "gpu_to_tune", lambda: CPU)
    monkeypatch.setattr(job, "CudaTimer", lambda _: fake)
    monkeypatch.setattr(job, "collect", lambda: environment(gpu))
    monkeypatch.setattr(Problem, "run", noted)
    monkeypatch.setattr("ssdprof.environment.machine.gpu", lambda: gpu)


@needs_interpreter
@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize(
    ("words", "places", "plan"),
    [
        (
            "ssd --shape 2x16x16x1 --seq 40,100",
            ("2x16x16x1, bf16, 1 x 40", "2x16x16x1, bf16, 1 x 100"),
            lambda: ssd_fused.plan(ssd_inputs(100)),
        ),
        *slow(
            (
                "kda --shape 1/2x16x16 --seq 70",
                ("1/2x16x16, bf16, 1 x 70",),
                lambda: kda_fused.plan(generated("kda", SMALL_GDN, 70, layout="contiguous")),
            )
        ),
    ],
)
def test_from_words_to_kernels_that_take_the_find(words, places, plan: Callable[[], Any]):
    """The file is real: the next command reads it and says so, and its kernels use the
    configuration.
    """
    answer = passing(f"tune {words} --json")
    report = Report.model_validate_json(answer.out)
    assert {case.case_key for case in report.cases} == set(places)
    assert all(case.samples for case in report.cases)
    assert report.remarks == ()
    assert "What was found is kept in " in answer.err
    assert "1 configuration tuned on this GPU" in used()[0]
    assert "tuned on this GPU" in plan().reason
    assert plan().config["num_warps"] == 8


@needs_interpreter
@pytest.mark.usefixtures("pretended_gpu")
def test_what_ends_early_keeps_what_it_has(monkeypatch, cache: Path):
    words = "tune ssd --shape 2x16x16x1,4x16x16x1 --seq 40"
    with monkeypatch.context() as patch:
        seconds = count(0, 100)
        patch.setattr(job.time, "monotonic", lambda: next(seconds))
        report = Report.model_validate_json(Answer(words, "--budget 150 --json").out)
    assert {case.case_key for case in report.cases} == {"2x16x16x1, bf16, 1 x 40"}
    ((place, _, reason),) = (tuple(dict(one).values()) for one in report.left_out)
    assert (place, reason) == ("4x16x16x1, bf16, 1 x 40, exact", "the budget of 150 s was spent")
    passing("tune --clear")

    def interrupted(problem: Problem, timer):
        if str(problem).startswith("4x16x16x1"):
            raise KeyboardInterrupt
        return search(problem, timer)

    monkeypatch.setattr(job, "search", interrupted)
    ending(130, words)
    (file,) = cache.glob("*.json")
    assert len(TunedConfigs.model_validate_json(file.read_text()).configs) == 1


@pytest.mark.gpu
def test_on_a_gpu_from_words_to_a_run_that_says_so():
    """Two tunings, one for each kernel.  Every find has a right output and is used."""
    shapes = "ssd --shape 16x64x128x1,3x64x64x1 --seq 1k,4k --json"
    tuned = passing(f"tune {shapes}")
    report = Report.model_validate_json(tuned.out)
    assert "portable" in {case.variant for case in report.cases}
    assert all(case.samples for case in report.cases if case.implementation == "committed")
    assert not [case.name for case in report.cases if case.result == "inaccurate"]
    found = "What was found is kept" in tuned.err
    answer = passing(f"bench {shapes} --chunk-size 128")
    assert ("tuned on this GPU" in answer.err, "tuned on this GPU, " in answer.out) == (
        found,
        found,
    )
