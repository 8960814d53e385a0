"""Every option reaches the request, and what does not go together is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import gates

from ssdprof.core.base import DType, precisions_for
from ssdprof.errors import BadInputError
from ssdprof.jobs import target
from ssdprof.jobs.options import (
    COMPARED,
    AnswersOptions,
    BenchOptions,
    PrefillOptions,
    RunOptions,
    StallsOptions,
    TuneOptions,
)
from ssdprof.jobs.reading import parse_states

pytestmark = pytest.mark.usefixtures("in_empty_folder")


@pytest.mark.parametrize(
    ("kind", "typed", "read"),
    [
        (
            RunOptions,
            {
                "seqlens": "1k,2k",
                "segment_length": "1k",
                "states": "bf16",
                "implementations": "fused,fla",
                "smallest_difference": "3%",
            },
            {
                "seqlens": (1024, 2048),
                "segment_length": 1024,
                "states": ("bf16",),
                "implementations": ("fused", "fla"),
                "smallest_difference": 0.03,
            },
        ),
        (RunOptions, {"chunk": "8k"}, {"chunk": 8192}),
        (
            AnswersOptions,
            {"states": "all", "implementations": "fused"},
            {"states": ("fp32", "fp16", "bf16"), "implementations": ("fused",)},
        ),
        (PrefillOptions, {"seqlens": "1k"}, {"seqlens": (1024,), "implementations": COMPARED}),
        (StallsOptions, {"seqlen": "2k", "model": None}, {"seqlen": 2048}),
    ],
)
def test_words_are_read(kind: Callable[..., Any], typed, read):
    given = {
        name: value for name, value in ({"model": "demo"} | typed).items() if value is not None
    }
    found = target.read(kind(**given))
    assert {name: getattr(found, name) for name in read} == read
    options = RunOptions(model="demo", packed="64x1k-4k")  # type: ignore[arg-type]
    packed = target.read(options).packed
    assert (packed.sequences, packed.shortest, packed.seqlen) == (64, 1024, 4096)


@pytest.mark.parametrize(
    ("dtype", "intermediates", "states", "compared"),
    [
        ("bf16", "all", None, ["exact, fp32 states", "relaxed, bf16 states"]),
        ("fp16", "all", None, ["exact, fp32 states", "relaxed, fp16 states"]),
        ("fp32", "all", None, ["exact, fp32 states", "relaxed, fp32 states"]),
        ("bf16", "relaxed", None, ["relaxed, bf16 states"]),
        (
            "bf16",
            "exact",
            parse_states("all"),
            ["exact, fp32 states", "exact, fp16 states", "exact, bf16 states"],
        ),
        ("bf16", "all", ("fp16",), ["exact, fp16 states", "relaxed, fp16 states"]),
    ],
)
def test_two_precisions_unless_more_are_asked_for(
    dtype: DType, intermediates, states: tuple[DType, ...] | None, compared
):
    assert list(map(str, precisions_for(dtype, intermediates, states))) == compared


def test_the_conditions_of_every_command():
    asked, _, _ = target.run(RunOptions(model="demo", gate=["speedup:2", "rms:5"]))
    assert asked.conditions == gates("speedup:2", "rms:5")
    compared, found = target.answers(AnswersOptions(model="demo", gate=["kl:0.1", "top1:90%"]))
    assert compared.conditions == gates("kl:0.1", "top1:90%")
    assert found.whole


def test_the_cells_and_names_of_a_bench():
    # --verify is in place of --seq
    assert target.tokens_of_bench(BenchOptions(operator="gdn", verify="4", batch="512"))[0]
    request, names, too_large, _ = target.bench(
        BenchOptions(
            operator="ssd",
            shape="4x16x16x1",
            seq="1k,4k",
            batch="1,128",
            cells="2x8",
            max_tokens="256k",
            dtype="fp32",
            layout="views",
            implementations="unfused,fused,recurrent_in_place",
            against="mamba_ssm,published=mamba",
            chunk_size="64",
            states=("bf16",),
            gate=["rms:2"],
        )
    )
    assert [str(cell.tokens) for cell in request.measured] == [
        "1 x 1,024",
        "1 x 4,096",
        "128 x 1,024",
        "2 x 8",
    ]
    assert {(cell.dtype, cell.layout) for cell in request.measured} == {("fp32", "views")}
    assert [str(one) for one in too_large] == ["128 x 4,096"]
    assert (request.baseline, request.match_with) == ("mamba_ssm", None)
    assert names == ("mamba_ssm", "published=mamba", "unfused", "fused", "recurrent_in_place")
    assert (request.chunk_sizes, request.intermediates, request.states) == (
        (64,),
        "exact",
        ("bf16",),
    )
    assert request.conditions == gates("rms:2")


def test_a_gate_of_the_command_line_replaces_that_of_the_file(tmp_path):
    file = tmp_path / "ssdprof.toml"
    file.write_text(
        'gates = ["speedup:1.5", "rms:3", "match@0:50%"]\n[prefill]\ngates = ["speedup:1.1"]\n'
    )
    bench = BenchOptions(operator="ssd", gate=["speedup:2", "match:99%"], config=file)
    assert target.bench(bench)[0].conditions == gates(
        "speedup:2", "match:99%", "rms:3", "match@0:50%"
    )
    prefill = PrefillOptions(model="demo", config=file)
    assert target.prefill(prefill).conditions == gates("speedup:1.1")
    assert target.prefill(replace(prefill, gate=["speedup:1.2"])).conditions == gates("speedup:1.2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(
            ({name: True, "dtype": "fp16"}, f"--dtype and --{name} cannot be combined")
            for name in ("answers", "prefill", "stalls")
        ),
        (
            {"stalls": True, "tensor_parallel": 2},
            "--stalls and --tensor-parallel cannot be combined",
        ),
        ({"prefill": True, "tensor_parallel": 2}, "--prefill runs one whole sequence"),
        ({"answers": True, "batch": 2}, "--answers runs one whole sequence"),
        ({"prefill": True, "chunk": "8k"}, "--prefill runs one whole sequence"),
        ({"trace": Path(__file__)}, "test_requests.py exists"),
        ({"gate": ["speed:2"]}, "The gate 'speed:2' is of an unknown metric"),
    ],
)
def test_what_does_not_go_together(options, words):
    with pytest.raises(BadInputError, match=words):
        target.run(RunOptions(model="demo", **options))
    assert target.run(RunOptions(model="demo", stalls=True, batch=2))[1].batch == 2


def test_tune_searches_for_three_lengths_of_one_shape():
    _, cells = target.tune(TuneOptions(operator="gdn"))
    assert [cell.tokens.seqlen for cell in cells] == [1024, 8192, 65536]
