"""From shapes and stored captures to problems."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
import torch
from tuning_fakes import inputs_of

from ssdprof.bench.shapes import parse_shapes
from ssdprof.capture.captured import CapturedLayer
from ssdprof.capture.store import CaptureWriter
from ssdprof.errors import BadInputError
from ssdprof.kernels import device
from ssdprof.kernels.ssd.config import SSDPortableConfig
from ssdprof.kernels.ssd.hopper import config as hopper_config
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig
from ssdprof.operators.drawing import Cell, Tokens
from ssdprof.operators.ssd.operator import OPERATOR as SSD
from ssdprof.operators.tensors import tensors
from ssdprof.schema import LayerRef, Prompt, Serving
from ssdprof.tuning import problems
from ssdprof.tuning.problems import Workload, captured, drawn

CPU = torch.device("cpu")
CELLS = tuple(
    Cell(
        shape=parse_shapes(SSD.drawing, "2x16x16x1")[0],
        dtype="bf16",
        layout="contiguous",
        tokens=Tokens(sequences=batch, seqlen=seqlen),
    )
    for batch, seqlen in ((1, 100), (2, 40))
)


def made(sources: tuple[Workload, ...]) -> list[problems.Problem]:
    return list(problems.problems(SSD, sources, "exact"))


def test_the_portable_kernel_has_one_problem_for_all_lengths() -> None:
    (problem,) = made(drawn(SSD, CELLS, CPU))
    assert isinstance(problem.committed, SSDPortableConfig)
    assert [inputs.x.shape[:2] for inputs in problem.inputs] == [(2, 40), (1, 100)]
    assert "nchunks" not in problem.calls.sizes
    assert problem.calls.sizes["nheads"] == 2


def test_the_hopper_kernel_has_one_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_config, "unsupported", lambda _: "")
    monkeypatch.setattr(device, "sm_count", lambda _: 132)
    found = made(drawn(SSD, CELLS, CPU))
    assert [(one.calls.sizes["sequences"], one.calls.sizes["nchunks"]) for one in found] == [(1, 2), (2, 1)]
    assert all(isinstance(one.committed, SSDHopperConfig) for one in found)


def test_states_are_those_of_a_bench() -> None:
    (problem,) = problems.problems(SSD, drawn(SSD, CELLS, CPU), "relaxed")
    assert problem.precision.state_dtype == torch.bfloat16
    assert made(drawn(SSD, CELLS, CPU))[0].precision.state_dtype == torch.float32


@pytest.fixture
def captures(tmp_path: Path) -> Path:
    """Three layers at 20 tokens, the same at 40, and a decode step."""
    prompts = [
        Prompt(kind="random", source="ids", tokenizer="none", seqlen=seqlen, token_sha256="0" * 64)
        for seqlen in (20, 40)
    ]
    ref = tiny_models.checkpoint_ref("mamba2")
    with CaptureWriter(tmp_path / "captures", checkpoint=ref, prompts=prompts, segment_length=40) as writer:
        for seqlen in (20, 40):
            for index in range(3):
                layer = LayerRef(index=index, name=f"layers.{index}", operator="ssd")
                inputs = inputs_of(seqlen)
                strides = {name: tensor.stride() for name, tensor in tensors(inputs).items()}
                writer.add(CapturedLayer(layer=layer, inputs=inputs, model_strides=strides))
        (step,) = Serving(decode=1).calls(40)[1:]
        inputs = inputs_of(1)
        strides = {name: tensor.stride() for name, tensor in tensors(inputs).items()}
        writer.add(CapturedLayer(layer=layer, inputs=inputs, model_strides=strides, call=step))
    return tmp_path / "captures"


def test_captures_give_their_middle_layer_at_every_length_but_no_decode_steps(captures: Path) -> None:
    (problem,) = made(captured(SSD, str(captures), None, CPU))
    assert problem.shape.endswith("layer 1")
    assert problem.tokens == "20 tokens; 40 tokens"
    torch.testing.assert_close(problem.inputs[1].x, inputs_of(40).x)
    (problem,) = made(captured(SSD, str(captures), (40, 80), CPU))
    assert [inputs.x.shape[1] for inputs in problem.inputs] == [40]


def test_captures_of_other_lengths_are_refused(captures: Path) -> None:
    with pytest.raises(BadInputError, match="no Mamba-2 layer of these lengths") as refused:
        captured(SSD, str(captures), (80,), CPU)
    assert "20, 40" in refused.value.hint


def test_what_is_neither_a_run_nor_captures_is_refused() -> None:
    with pytest.raises(BadInputError, match="nowhere is not a run"):
        captured(SSD, "nowhere", None, CPU)
