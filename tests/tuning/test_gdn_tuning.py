"""`ssdprof tune gdn`: the candidates, the calls that a find applies to, and its use by kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tuning_fakes import GPU, Fake, environment
from typer.testing import CliRunner

from ssdprof import operators
from ssdprof.cli import app
from ssdprof.errors import BadInputError
from ssdprof.kernels import _gpu
from ssdprof.kernels._triton import INTERPRETED
from ssdprof.kernels.gdn import fused, tuned
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.gdn.portable.config import PortableConfig
from ssdprof.kernels.precision import Precision
from ssdprof.operators.drawing import Cell, Tokens
from ssdprof.operators.gdn.tuning import TUNING
from ssdprof.operators.gdn.tuning.settings import config_of, settings_of
from ssdprof.operators.tuning import Settings
from ssdprof.tuning import run, search, use
from ssdprof.tuning.records import TuneReport

EXACT = Precision()
DRAWING = operators.get("gdn").drawing


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    tuned.none()


def inputs_of(length: int, *, shape: str = "1/2x16x16", sequences: int = 1, packed: bool = False) -> GDNInputs:
    found = DRAWING.parse(shape)
    assert found is not None
    tokens = Tokens(sequences=sequences, seqlen=length, shortest=length if packed else None)
    drawn = DRAWING.draw(Cell(shape=found, dtype="bf16", layout="contiguous", tokens=tokens), torch.device("cpu"))
    assert isinstance(drawn, GDNInputs)
    return drawn


def tried(inputs: GDNInputs) -> list[PortableConfig]:
    committed = TUNING.committed(inputs, "portable")
    return [option for axis in TUNING.axes(committed) for option in axis(committed, inputs)]


def find(inputs: GDNInputs, config: PortableConfig, precision: Precision = EXACT) -> tuned.Find:
    return tuned.Find(gpu=_gpu.name(inputs.q), calls=tuned.Calls.of(inputs, precision), config=config)


def test_candidates_are_ones_that_the_kernel_takes() -> None:
    inputs = inputs_of(8192, shape="1/1x128x128")
    found = tried(inputs)
    assert {one.block_v for one in found} == {16, 32, 64, 128}
    assert {one.segment for one in found} >= {0, 64, 32, 16}
    assert {one.factors_warps for one in found} == {2, 4, 8}
    assert {(one.block_v, one.v_rows) for one in found} == set(product((16, 32, 64, 128), (True, False)))
    assert {one.num_warps for one in found} == {2, 4, 8}
    assert all(one.segment == 0 or one.segment * one.chunk * 32 >= 8192 for one in found)
    narrow = tried(inputs_of(256))
    assert {one.block_v for one in narrow} == {16}, "no slice is wider than V"
    for one in (*found, *narrow):
        assert config_of(settings_of(one), one.reason) == one


def test_a_chunk_of_another_length_leaves_segments_as_long() -> None:
    inputs = inputs_of(4096, shape="1/1x128x128")
    committed = replace(TUNING.committed(inputs, "portable"), segment=16)
    chunks = next(axis for axis in TUNING.axes(committed) if axis.__name__ == "_chunks")
    assert {one.segment * one.chunk for one in chunks(committed, inputs)} == {1024}


def test_a_candidate_that_cuts_is_first_judged_on_a_cut_sequence() -> None:
    inputs = inputs_of(4100)
    short = TUNING.short(inputs)
    assert short.length == 1024 + 4100 % 64
    cut = replace(TUNING.committed(inputs, "portable"), chunk=64, segment=32)
    assert 0 < TUNING.for_short(cut, inputs).segment < short.length / 64
    assert TUNING.for_short(replace(cut, segment=0), inputs).segment == 0


def test_a_find_is_for_its_own_calls_only() -> None:
    inputs = inputs_of(200)
    config = replace(TUNING.committed(inputs, "portable"), chunk=16, reason="tuned on this GPU, today")
    assert tuned.portable(inputs, EXACT) is None
    tuned.use([find(inputs, config)])
    assert tuned.portable(inputs, EXACT) == config
    assert tuned.portable(inputs_of(250), EXACT) == config, "as many chunks of 64"
    batch = inputs_of(200, sequences=2)
    assert tuned.portable(batch, EXACT) is None
    assert tuned.portable(batch, EXACT, batch_invariant=True) == config
    for other in (inputs_of(300), inputs_of(200, shape="2/2x16x16"), inputs_of(200, packed=True)):
        assert tuned.portable(other, EXACT) is None
    assert tuned.portable(inputs, Precision(intermediates="relaxed")) is None
    assert tuned.portable(replace(inputs, use_qk_l2norm=False), EXACT) is None


@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter's kernels run on a CPU")
def test_a_plan_says_that_it_is_tuned_and_its_run_is() -> None:
    """A call that was prepared before `tuned.use` is prepared again."""
    inputs = inputs_of(200)
    before = fused.run(inputs)
    assert "tuned" not in fused.plan(inputs).reason
    committed = TUNING.committed(inputs, "portable")
    tuned.use([find(inputs, replace(committed, chunk=16, reason="tuned on this GPU, today"))])
    assert "; tuned on this GPU, today" in fused.plan(inputs).reason
    assert fused.plan(inputs).config["chunk"] == 16
    assert not torch.equal(before.out, fused.run(inputs).out), "other chunks round otherwise"
    tuned.none()
    assert torch.equal(before.out, fused.run(inputs).out)


def test_inputs_of_another_kernel_have_nothing_to_vary() -> None:
    with pytest.raises(BadInputError, match="The recurrent kernel runs these inputs"):
        TUNING.kernel(inputs_of(1))
    assert TUNING.kernel(inputs_of(64)) == "portable"


@pytest.mark.parametrize(
    "settings",
    [
        Settings(kernel="hopper", values={}),
        Settings(kernel="portable", values={}),
        settings_of(PortableConfig()).model_copy(
            update={"values": settings_of(PortableConfig()).values | {"chunk": 48}}
        ),
    ],
)
def test_settings_that_no_kernel_takes_are_not_read(settings: Settings) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        TUNING.check(settings)


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter's kernels run on a CPU")
def test_from_words_to_kernels_that_take_the_find(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels run in the interpreter and are compared with the oracle; with the fake stopwatch 8 warps are faster."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fake = Fake(lambda config, tokens: tokens * (0.5 if config.num_warps == 8 else 1.0))
    real = search.Problem.run

    def noted(problem: search.Problem, inputs: Any, config: Any) -> Any:
        fake.ran.append((config, inputs.length))
        return real(problem, inputs, config)

    gpu = GPU.model_copy(update={"name": "cpu"})  # the kernels' name for the device of their tensors
    monkeypatch.setattr(run, "gpu_to_tune", lambda: torch.device("cpu"))
    monkeypatch.setattr(run, "CudaBench", lambda _: fake)
    monkeypatch.setattr("ssdprof.environment.machine.collect", lambda: environment(gpu))
    monkeypatch.setattr(search.Problem, "run", noted)
    monkeypatch.setattr(use, "current_gpu", lambda: gpu)
    words = ["tune", "gdn", "--shape", "1/2x16x16", "--seq", "70", "--json"]
    result = CliRunner().invoke(app, words, prog_name="ssdprof", catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    (found,) = TuneReport.model_validate_json(result.stdout).outcomes
    assert {trial.verdict for trial in found.trials} <= {"committed", "faster", "no difference", "slower"}
    assert found.find is not None
    assert found.find.settings.values["num_warps"] == 8
    use.use_saved(lambda _: None)
    assert fused.plan(inputs_of(70)).config["num_warps"] == 8
