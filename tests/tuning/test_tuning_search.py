"""The search finds faster configurations, names wrong ones, and keeps the committed choice in doubt."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from ssdprof.measure.bench import Recording
from ssdprof.operators.ssd.tuning.settings import config_of
from tuning_fakes import COMMITTED_SEGMENT, Fake, hopper_problem, portable_problem

from ssdprof.errors import MissingCapabilityError
from ssdprof.kernels.ssd.config import SSDPortableConfig
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig
from ssdprof.measure import faults
from ssdprof.tuning.records import Outcome, Trial
from ssdprof.tuning.search import DECIDING, SCREENING, Problem, search


def found(problem: Problem, fake: Fake) -> Outcome:
    return search(problem, fake, fake.run)


def trials(outcome: Outcome, verdict: str) -> list[Trial]:
    return [trial for trial in outcome.trials if trial.verdict == verdict]


def by_segment(config: SSDHopperConfig, _tokens: int) -> float:
    """Equal segments of 4 chunks and rings of two are best."""
    return 100 + abs(config.segment - 4) + config.long_count + 2 * config.ring + config.score_ring


def test_it_goes_to_the_fastest_axis_by_axis() -> None:
    outcome = found(hopper_problem(), Fake(by_segment))
    assert outcome.find is not None
    assert outcome.find.settings.kernel == "hopper"
    assert tuple(map(outcome.find.settings.values.get, ("segment", "ring"))) == (4, 2)
    assert outcome.find.device_ratio == pytest.approx(by_segment(SSDHopperConfig(segment=10), 0) / 106, rel=0.01)
    assert outcome.find.device_interval.low > 1.01
    assert outcome.why == ""
    committed = trials(outcome, "committed")
    assert [trial.settings.values["segment"] for trial in committed] == [COMMITTED_SEGMENT]
    assert outcome.committed == committed[0].settings


def test_a_find_has_the_settings_that_were_run() -> None:
    """A configuration is written to the file and read back unchanged."""
    outcome = found(hopper_problem(), Fake(by_segment))
    assert outcome.find is not None
    kept = config_of(outcome.find.settings, outcome.find.reason)
    assert kept == SSDHopperConfig(segment=4, ring=2, reason=outcome.find.reason)
    assert kept.reason.startswith("tuned on this GPU, 20")


def test_the_committed_choice_stays_unless_beaten_by_more_than_one_percent() -> None:
    def cost(config: SSDHopperConfig, _tokens: int) -> float:
        return 99.2 if config.segment == 4 else 100.0

    outcome = found(hopper_problem(), Fake(cost))
    assert outcome.find is None
    assert "not 1% faster with 95 % confidence" in outcome.why
    assert trials(outcome, "faster") == []
    ratios = {trial.settings.values["segment"]: trial.device_ratio for trial in trials(outcome, "no difference")}
    assert ratios[4] == pytest.approx(100 / 99.2, rel=0.003)


def test_noise_is_no_find() -> None:
    for seed in range(5):
        draw = random.Random(seed)
        fake = Fake(lambda _config, _tokens: 100.0, noise=iter(lambda: draw.gauss(1, 0.05), None))  # noqa: B023
        assert found(hopper_problem(), fake).find is None


class Placed(Fake):
    """Within a recording a time does not vary; a graph's place in memory changes it by up to 4 %."""

    generator: np.random.Generator
    recordings = 0
    factors: dict[object, float]

    def relocate(self, generator: np.random.Generator) -> None:
        self.generator, self.factors = generator, {}
        self.recordings += 1

    def device_us(self, recording: Recording) -> float:
        return self.cost(*recording.graph) * self.factors.setdefault(
            recording.graph[0], float(self.generator.uniform(0.96, 1.04))
        )


def test_a_lucky_place_in_memory_is_no_find() -> None:
    """The decision uses several recordings with fresh memory, as verdicts of `run` and `bench` do."""
    fake = Placed(lambda _config, _tokens: 100.0)
    assert found(hopper_problem(), fake).find is None
    assert fake.recordings >= SCREENING.min_recordings + DECIDING.min_recordings >= 8

    faster = Placed(lambda config, _tokens: 70.0 if config.segment == 4 else 100.0)
    assert found(hopper_problem(), faster).find is not None


def test_a_wrong_candidate_is_named_and_never_found() -> None:
    def cost(config: SSDHopperConfig, _tokens: int) -> float:
        return 50.0 if config.ring == 2 else 100.0 + config.segment

    outcome = found(hopper_problem(), Fake(cost, spoilt=lambda config, _tokens: config.ring == 2))
    assert outcome.find is not None
    assert outcome.find.settings.values["ring"] == 3
    wrong = trials(outcome, "wrong")
    assert {trial.settings.values["ring"] for trial in wrong} == {2}
    assert all("budget" in trial.why and trial.device_us is None for trial in wrong)


def test_what_is_wrong_only_at_length_is_not_kept() -> None:
    """The short input has 1,024 of the 1,280 positions."""
    outcome = found(
        hopper_problem(), Fake(by_segment, spoilt=lambda config, tokens: tokens == 1280 and config.ring == 2)
    )
    assert outcome.find is None
    assert outcome.why.startswith("the fastest was wrong: out, head")
    assert [trial.settings.values["ring"] for trial in trials(outcome, "wrong")] == [2]


def test_a_segment_is_checked_with_and_without_a_hand_over() -> None:
    fake = Fake(by_segment)
    found(hopper_problem(), fake)
    short = {config.segment for config, tokens in fake.ran if tokens == 1024}
    assert short == {1, 2, 3, 4, 5, 16}


def test_what_does_not_run_is_named() -> None:
    outcome = found(hopper_problem(), Fake(by_segment, refused=lambda config: config.ring == 2))
    assert {trial.why for trial in trials(outcome, "does not run")} == {"RuntimeError: out of resources: shared memory"}
    assert outcome.find is not None


@pytest.mark.parametrize("broken", ["refused", "uncapturable", "faulty"])
def test_a_candidate_that_costs_the_gpu_ends_the_search(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """Otherwise all other candidates would be reported as failing."""
    monkeypatch.setattr(faults, "_answers", lambda _: False)
    fake = Fake(by_segment, **{broken: lambda config: config.segment == 4})
    with pytest.raises(MissingCapabilityError, match="The candidate segment 4 left the GPU unusable"):
        found(hopper_problem(), fake)


def test_what_cannot_be_timed_is_named() -> None:
    outcome = found(hopper_problem(), Fake(by_segment, uncapturable=lambda config: config.segment == 4))
    assert {trial.why for trial in trials(outcome, "does not run")} == {"CaptureError: it synchronises"}
    assert outcome.find is not None
    assert outcome.find.settings.values["segment"] in (3, 5)


@pytest.mark.parametrize("broken", ["refused", "uncapturable"])
def test_without_the_committed_choice_there_is_nothing_to_beat(broken: str) -> None:
    outcome = found(hopper_problem(), Fake(by_segment, **{broken: lambda _config: True}))
    assert outcome.find is None
    assert outcome.why.startswith("the committed configuration: ")


def by_warps(better_at: tuple[int, ...]) -> Any:
    def cost(config: SSDPortableConfig, tokens: int) -> float:
        """8 warps are 20 % faster at some lengths, and 5 % slower at others."""
        return tokens * (1.0 if config.num_warps < 8 else 0.8 if tokens in better_at else 1.05)

    return cost


def test_a_find_of_the_portable_kernel_serves_every_length() -> None:
    outcome = found(portable_problem(128, 192), Fake(by_warps((128, 192))))
    assert outcome.find is not None
    assert outcome.find.settings.kernel == "portable"
    assert outcome.find.settings.values["num_warps"] == 8
    assert outcome.find.device_ratio == pytest.approx(1.25, rel=0.01)
    assert "nchunks" not in outcome.calls.sizes


def test_and_is_slower_at_none() -> None:
    outcome = found(portable_problem(128, 192), Fake(by_warps((128,))))
    assert outcome.find is None
    assert outcome.why == "the fastest was slower at 192 tokens"


def test_and_is_right_for_packed_sequences() -> None:
    fake = Fake(by_warps((128, 192)))
    run = fake.run

    def wrong_if_packed(inputs: Any, config: Any) -> Any:
        output = run(inputs, config)
        return output._replace(out=-output.out) if inputs.cu_seqlens is not None else output

    outcome = search(portable_problem(128, 192), fake, wrong_if_packed)
    assert outcome.find is None
    assert outcome.why.startswith("the fastest was wrong")
