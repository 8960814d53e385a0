"""Every option of a group reaches the group's request."""

from __future__ import annotations

from pathlib import Path

import pytest
from ssdprof.commands.answers import ComparisonOptions
from ssdprof.commands.gate_options import GateOptions
from ssdprof.commands.model_options import ServedModelOptions
from ssdprof.commands.run import ReplayOptions, ResultOptions
from ssdprof.pipeline.answers_request import AnswersRequest
from ssdprof.pipeline.request import CaptureRequest, ModelRequest, PromptRequest, ReplayRequest, ServingRequest
from ssdprof.schema import Gates, PrecisionRecord
from ssdprof.schema.answers import AnswerGate

from ssdprof.commands.options import TimingOptions
from ssdprof.errors import BadInputError


def test_the_request_of_a_model() -> None:
    options = ServedModelOptions(
        model="demo",
        seq="1k,2k",
        layers="first:2",
        prompt_file=Path("prompt.txt"),
        revision="v1",
        tokenizer="other",
        segment="1k",
        placement="cpu-offload",
        batch=3,
        decode=4,
    )
    assert options.request() == CaptureRequest(
        model=ModelRequest(model="demo", revision="v1", tokenizer="other"),
        prompt=PromptRequest(text=Path("prompt.txt"), seqlens=(1024, 2048), serving=ServingRequest(batch=3, decode=4)),
        layers="first:2",
        segment_length=1024,
        placement="cpu-offload",
    )


def test_the_request_of_a_chunked_prefill() -> None:
    request = ServedModelOptions(model="demo", chunked_prefill="8k").request()
    assert request.prompt.serving == ServingRequest(chunk=8192)


def test_the_request_of_a_replay() -> None:
    options = ReplayOptions(
        tensor_parallel=2, dtypes="relaxed", states="bf16", cast="fp16", impl="fused,fla", baseline="fla", first_call=7
    )
    gates = Gates(min_speedup=2)
    assert options.request(TimingOptions(clock="warm", smallest_difference="3%"), gates) == ReplayRequest(
        intermediates="relaxed",
        states=("bf16",),
        implementations=("fused", "fla"),
        baseline="fla",
        first_call_s=7,
        smallest_difference=0.03,
        warm=True,
        cast="fp16",
        tensor_parallel=2,
        gates=gates,
    )


def test_the_request_of_answers() -> None:
    options = ComparisonOptions(
        dtypes="exact",
        states="fp32",
        impl="fused",
        reference="unfused",
        weights="fp32",
        per_layer=True,
        generate=5,
        max_kl=0.1,
        min_top1="90%",
        max_perplexity_increase="2%",
    )
    request = options.request()
    assert request.precisions("bf16") == (PrecisionRecord(intermediates="exact", state_dtype="fp32"),)
    assert request == AnswersRequest(
        precisions=request.precisions,
        implementations=("fused",),
        reference="unfused",
        weights="fp32",
        per_layer=True,
        generate=5,
        gate=AnswerGate(max_kl=0.1, min_top1_pct=90, max_perplexity_increase_pct=2),
    )


def test_gates_of_the_command_line_come_before_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "ssdprof.toml"
    file.write_text("[gates]\nmin-speedup = 1.5\nmax-rms-ratio = 3\n")
    chosen = GateOptions(min_speedup=2, min_match=["1e-3:99"], config=file).chosen()
    assert chosen == Gates(min_speedup=2, min_match={"1e-3": 99}, max_rms_ratio=3)


@pytest.mark.parametrize(
    ("added", "request_", "replay", "words"),
    [
        ("answers", {}, {"cast": "fp16"}, "--cast and --answers cannot be combined"),
        ("stalls", {}, {"tensor_parallel": 2}, "--stalls and --tensor-parallel cannot be combined"),
        ("prefill", {}, {"tensor_parallel": 2}, "--prefill runs one whole sequence"),
        ("answers", {"batch": 2}, {}, "--answers runs one whole sequence"),
        ("prefill", {"chunked_prefill": "8k"}, {}, "--prefill runs one whole sequence"),
    ],
)
def test_what_does_not_go_together(
    added: str, request_: dict[str, object], replay: dict[str, object], words: str
) -> None:
    result = ResultOptions(**{added: True})
    request = ServedModelOptions(model="demo", **request_).request()
    wanted = ReplayRequest(**replay)
    with pytest.raises(BadInputError, match=words):
        result.check(request, wanted)
    result.check(ServedModelOptions(model="demo").request(), ReplayRequest())


def test_stalls_go_with_a_batch() -> None:
    ResultOptions(stalls=True).check(ServedModelOptions(model="demo", batch=2).request(), ReplayRequest())
