"""Every option reaches the request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssdprof.commands import requests
from ssdprof.commands.options import (
    AnswersOptions,
    BenchOptions,
    PrefillOptions,
    RunOptions,
    ServedModelOptions,
    TuneOptions,
)
from ssdprof.core.base import EXACT_FP32
from ssdprof.core.conditions import of_options
from ssdprof.errors import BadInputError
from ssdprof.jobs.request import AnswersRequest, CaptureRequest, ReplayRequest

pytestmark = pytest.mark.usefixtures("in_empty_folder")


def test_the_request_of_a_model() -> None:
    options = ServedModelOptions(
        model="demo", seq="1k,2k", layers="first:2", prompt_file=Path("prompt.txt"), revision="v1",
        tokenizer="other", segment="1k", placement="cpu-offload", batch=3, decode=4,
    )  # fmt: skip
    assert requests.on_model(options) == CaptureRequest(
        model="demo", revision="v1", tokenizer="other", text=Path("prompt.txt"), seqlens=(1024, 2048), batch=3,
        decode=4, layers="first:2", segment_length=1024, placement="cpu-offload",
    )  # fmt: skip
    chunked = requests.on_model(ServedModelOptions(model="demo", chunked_prefill="8k"))
    assert chunked == CaptureRequest(model="demo", chunk=8192)


def test_the_request_of_a_replay() -> None:
    options = RunOptions(
        model="demo", tensor_parallel=2, dtypes="relaxed", states="bf16", cast="fp16", impl="fused,fla",
        baseline="fla", first_call=7, smallest_difference="3%", min_speedup=2,
        gate=["speedup@fla:1.3", "rms:base+5%"],
    )  # fmt: skip
    assert requests.run(options)[0] == ReplayRequest(
        intermediates="relaxed", states=("bf16",), implementations=("fused", "fla"), baseline="fla", first_call_s=7,
        smallest_difference=0.03, cast="fp16", tensor_parallel=2,
        conditions=of_options(min_speedup=2, gates=["speedup@fla:1.3", "rms:base+5%"]),
    )  # fmt: skip


def test_the_request_of_answers() -> None:
    options = AnswersOptions(
        model="demo", dtypes="exact", states="fp32", impl="fused", reference="unfused", weights="fp32",
        per_layer=True, generate=5, max_kl=0.1, min_top1="90%", max_perplexity_increase="2%",
    )  # fmt: skip
    request, subject = requests.answers(options)
    assert request.precisions("bf16") == (EXACT_FP32,)
    assert request == AnswersRequest(
        precisions=request.precisions, implementations=("fused",), reference="unfused", weights="fp32",
        per_layer=True, generate=5, conditions=of_options(max_kl=0.1, min_top1="90%", max_perplexity_increase="2%"),
    )  # fmt: skip
    assert subject.whole


def test_the_cells_and_names_of_a_bench() -> None:
    request, names, too_large = requests.bench(
        BenchOptions(
            operator="ssd", shape="4x16x16x1", seq="1k,4k", batch="1,128", cells="2x8", max_tokens="256k",
            dtype="fp32", layout="views", against="mamba_ssm,published", published=Path("mamba"),
            also="recurrent_in_place", chunk_size="64", states="bf16", max_rms_ratio=2,
        )
    )  # fmt: skip
    assert [str(cell.tokens) for cell in request.cells] == ["1 x 1,024", "1 x 4,096", "128 x 1,024", "2 x 8"]
    assert {(cell.dtype, cell.layout) for cell in request.cells} == {("fp32", "views")}
    assert [str(one) for one in too_large] == ["128 x 4,096"]
    assert (request.baseline, request.match_with) == ("mamba_ssm", "unfused")
    assert names == ("mamba_ssm", "published=mamba", "unfused", "fused", "recurrent_in_place")
    assert request.chunk_sizes == (64,)
    assert [str(one) for one in request.precisions("fp32")] == ["exact, bf16 states"]
    assert request.conditions == of_options(max_rms_ratio=2)


def test_a_gate_of_the_command_line_replaces_that_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "ssdprof.toml"
    file.write_text(
        "[gates]\nmin-speedup = 1.5\nmax-rms-ratio = 3\nmin-match = {0 = 50}\n[prefill]\nmin-speedup = 1.1\n"
    )
    found = requests.bench(BenchOptions(operator="ssd", min_speedup=2, min_match=["1e-3:99"], config=file))[
        0
    ].conditions
    assert found == of_options(min_speedup=2, min_match=["1e-3:99"], max_rms_ratio=3)
    assert requests.prefill(PrefillOptions(model="demo", config=file))[0].conditions == of_options(min_speedup=1.1)
    given = requests.prefill(PrefillOptions(model="demo", config=file, gate=["speedup:1.2"]))[0].conditions
    assert given == of_options(gates=["speedup:1.2"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(({name: True, "cast": "fp16"}, f"--cast and --{name} cannot be combined")
          for name in ("answers", "prefill", "stalls")),
        ({"stalls": True, "tensor_parallel": 2}, "--stalls and --tensor-parallel cannot be combined"),
        ({"prefill": True, "tensor_parallel": 2}, "--prefill runs one whole sequence"),
        ({"answers": True, "batch": 2}, "--answers runs one whole sequence"),
        ({"prefill": True, "chunked_prefill": "8k"}, "--prefill runs one whole sequence"),
        ({"gate": ["speed:2"]}, "--gate does not know 'speed'"),
        ({"gate": ["match@1:99%"]}, "--gate knows no match at 1"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        requests.run(RunOptions(model="demo", **options))
    assert requests.run(RunOptions(model="demo", stalls=True, batch=2))[1].batch == 2


def test_captured_inputs_of_tune_have_their_own_shape() -> None:
    cells, lengths = requests.tune(TuneOptions(operator="gdn"))
    assert [cell.tokens.seqlen for cell in cells] == [1024, 8192, 65536]
    assert lengths is None
    stored = TuneOptions(operator="gdn", where="captures", seq="1k")
    assert requests.tune(stored) == ((), (1024,))
    with pytest.raises(BadInputError, match="have their own shape"):
        requests.tune(replace(stored, batch="2"))
