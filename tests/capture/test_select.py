"""The grammar of --layers."""

import subprocess
import sys

import pytest

from ssdprof.capture.select import select_layers
from ssdprof.errors import BadInputError
from ssdprof.schema import LayerRef

# A hybrid: attention at 2 and 5.
LAYERS = tuple(LayerRef(index=i, name=f"model.layers.{i}.mamba", operator="ssd") for i in (0, 1, 3, 4, 6, 7))


@pytest.mark.parametrize(
    ("spec", "indices"),
    [
        ("all", [0, 1, 3, 4, 6, 7]),
        ("first:1", [0]),
        ("first:3", [0, 1, 3]),
        ("first:6", [0, 1, 3, 4, 6, 7]),
        ("every:1", [0, 1, 3, 4, 6, 7]),
        ("every:2", [0, 3, 6]),
        ("every:9", [0]),
        ("3", [3]),
        ("7,3", [3, 7]),
        (" 3 , 7, 3 ", [3, 7]),
        ("FIRST:2", [0, 1]),
        ("0-3", [0, 1, 3]),
        ("3-7", [3, 4, 6, 7]),
        (" 0 - 1 , 7 ", [0, 1, 7]),
        ("6-6,0", [0, 6]),
    ],
)
def test_selects(spec: str, indices: list[int]) -> None:
    assert [layer.index for layer in select_layers(spec, LAYERS)] == indices


def test_a_layer_that_is_not_there_is_named_and_the_others_are_listed() -> None:
    with pytest.raises(BadInputError, match=r"Layer 2, 9 .* 6: 0, 1, 3, 4, 6, 7"):
        select_layers("3,9,2", LAYERS)


def test_a_range_without_any_such_layer_is_named() -> None:
    with pytest.raises(BadInputError, match=r"Layer 2-2, 8-9 has no SSD"):
        select_layers("8-9,2-2,3", LAYERS)


def test_a_range_that_runs_backwards() -> None:
    with pytest.raises(BadInputError, match="the range 7-3 is empty"):
        select_layers("7-3", LAYERS)


def test_more_layers_than_there_are() -> None:
    with pytest.raises(BadInputError, match="first:7: the model has 6: 0, 1"):
        select_layers("first:7", LAYERS)


@pytest.mark.parametrize("spec", ["first:0", "every:0"])
def test_selecting_nothing(spec: str) -> None:
    with pytest.raises(BadInputError, match="selects nothing"):
        select_layers(spec, LAYERS)


@pytest.mark.parametrize(
    "spec", ["", "none", "first", "first:", "first:-1", "every:x", "3-", "3-7-9", "3,,7", "3,", "-3", "3.5"]
)
def test_a_spec_that_cannot_be_read(spec: str) -> None:
    with pytest.raises(BadInputError, match="cannot be read") as raised:
        select_layers(spec, LAYERS)
    assert "every:K" in raised.value.hint


def test_selecting_imports_nothing_heavy() -> None:
    code = (
        "import sys, ssdprof.capture.select\n"
        "print([name for name in ('torch', 'triton', 'transformers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
