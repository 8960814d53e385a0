"""The cells that the options of the command line select."""

import pytest

from ssdprof.errors import BadInputError
from ssdprof.jobs.reading import (
    expand,
    lengths,
    parse_chunk_sizes,
    parse_dtypes,
    parse_shapes,
    parse_tokens,
)
from ssdprof.operators.generate import Shape, Tokens
from ssdprof.operators.ssd_inputs import GENERATOR


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("1k,16k", (1024, 16384)),
        ("1k,...,8k", (1024, 2048, 4096, 8192)),
        ("1k,...,3k,7", (1024, 2048, 3072, 7)),
        ("64,64", (64,)),
    ],
)
def test_lengths(words, expected):
    assert lengths(words) == expected


def test_pairs_beyond_the_limit_are_left_out_and_asked_for_ones_are_not():
    wanted, left_out = parse_tokens("1k,4k", "1,8", "8x4k,32x4k", "4x16-32", max_tokens=8192)
    assert [str(tokens) for tokens in wanted] == [
        "1 x 1,024",
        "1 x 4,096",
        "8 x 1,024",
        "8 x 4,096",
        "32 x 4,096",
        "4 packed x 16-32",
    ]
    assert left_out == ()
    _, left_out = parse_tokens("1k,4k", "1,8,8", "", "", max_tokens=8192)
    assert left_out == (Tokens(sequences=8, seqlen=4096),)
    with pytest.raises(BadInputError, match="16 tokens or less"):
        parse_tokens("1k", "1", "", "", max_tokens=16)


@pytest.mark.parametrize(
    "given",
    [
        *((words, "", "") for words in ("...,4k", "1k,...", "4k,...,1k", "1q", "")),
        *(("1k", words, "") for words in ("8", "0x4", "x4k", "8x")),
        *(("1k", "", words) for words in ("8x4k", "8x4k-1k", "8x0-4")),
    ],
)
def test_lengths_cells_and_packs_that_are_none(given: tuple[str, str, str]):
    with pytest.raises(BadInputError):
        parse_tokens(given[0], "1", *given[1:], max_tokens=1 << 20)


def test_shapes_by_model_and_by_sizes():
    assert parse_shapes(GENERATOR, "mamba2-2.7b, 24x32x64x2") == (
        Shape(
            "mamba2-2.7b",
            "80x64, N 128, G 1",
            {"nheads": 80, "headdim": 64, "dstate": 128, "ngroups": 1},
        ),
        Shape(
            "24x32x64x2",
            "24x32, N 64, G 2",
            {"nheads": 24, "headdim": 32, "dstate": 64, "ngroups": 2},
        ),
    )
    assert [shape.name for shape in parse_shapes(GENERATOR, "all")] == list(GENERATOR.models)


@pytest.mark.parametrize("words", ["mamba3", "80x64x128", "80x64x128x3", "0x64x128x1", ""])
def test_shapes_that_are_none(words):
    with pytest.raises(BadInputError):
        parse_shapes(GENERATOR, words)


def test_dtypes_and_chunk_sizes():
    assert parse_dtypes("bf16,fp16,bf16") == ("bf16", "fp16")
    with pytest.raises(BadInputError, match="int8"):
        parse_dtypes("int8")
    assert parse_chunk_sizes("best") == ()
    assert parse_chunk_sizes("64,128,64,256") == (64, 128, 256)
    for words in ("8", "100", "512", "x", "", "0128"):
        with pytest.raises(BadInputError, match="--chunk-size does not know"):
            parse_chunk_sizes(words)


def test_the_grid_is_the_product():
    shapes = parse_shapes(GENERATOR, "mamba2-2.7b,nemotron-3-nano")
    tokens, _ = parse_tokens("1k,2k", "1", "", "", max_tokens=1 << 20)
    cells = expand(shapes, ("bf16", "fp16"), tokens, "contiguous")
    assert len(cells) == len(set(cells)) == 8
    assert [cell.shape.name for cell in cells[:4]] == ["mamba2-2.7b"] * 4
