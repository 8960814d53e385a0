"""Damaged configs and tokenizers give an error that names the file, never an internal error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mutations import Mutation, damaged, outcome, try_all

from ssdprof.checkpoint.names import DEMO_FOLDERS
from ssdprof.errors import BadInputError, SsdprofError

Save = Callable[[str], Path]


@pytest.mark.parametrize("seed", range(3))
def test_no_damage_ends_in_an_internal_error(seed: int) -> None:
    assert try_all(DEMO_FOLDERS["demo"], 25, seed=100 + seed) == {}


def refused(file: str, **changes: Any) -> SsdprofError:
    """The error for the demo model with some keys of a file changed."""
    content = json.loads((DEMO_FOLDERS["demo"] / file).read_text())
    with damaged(DEMO_FOLDERS["demo"], Mutation("", file, json.dumps(content | changes).encode())) as folder:
        error = outcome(folder)
    assert isinstance(error, BadInputError), changes
    return error


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rms_norm_eps": 1}, "Field 'rms_norm_eps' expected float, got int (value: 1)."),
        ({"hidden_act": "swish_7"}, "KeyError: 'swish_7'."),
        ({"mamba_d_conv": 3}, "'layers.0.mamba.conv1d.weight' is (512, 1, 4) in the file and (512, 1, 3)"),
        ({"layer_types": ["mamba"]}, "1 entries in layer_types, but num_hidden_layers = 5"),
        ({"mamba_d_head": None}, "Class validation error for validator 'validate_architecture'"),
        ({"dtype": 7}, "'int' object has no attribute"),
        ({"model_type": "unheard"}, "of type 'unheard'"),
        ({"model_type": []}, "of type []"),
    ],
)
def test_a_config_that_transformers_cannot_use(change: dict[str, Any], words: str) -> None:
    error = refused("config.json", **change)
    assert words in error.message
    assert "..." not in error.message


@pytest.mark.parametrize("change", [{"hidden_act": "swish_7"}, {"dtype": 7}, {"_attn_implementation": 1.5}])
def test_the_refused_field_is_named_where_transformers_does_not(change: dict[str, Any]) -> None:
    ((field, value),) = change.items()
    assert f"It accepts the config without {field} = {value!r}." in refused("config.json", **change).hint


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("tokenizer.json", {"decoder": {"type": "Unheard"}}, "did not match any variant of untagged enum"),
        ("tokenizer.json", {"added_tokens": None}, "cannot use the tokenizer"),
        ("tokenizer.json", {"model": {"type": "BPE"}}, "cannot use the tokenizer"),
        ("tokenizer_config.json", {"tokenizer_class": 1.5}, "tokenizer_config.json has tokenizer_class = 1.5"),
        ("tokenizer_config.json", {"eos_token": [1]}, "Special token eos_token has to be either str or AddedToken"),
    ],
)
def test_a_tokenizer_that_transformers_cannot_use(file: str, change: dict[str, Any], words: str) -> None:
    error = refused(file, **change)
    assert words in error.message
    assert "--tokenizer" in error.hint


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[" * 10**5, b"\xff", b"[]"])
def test_what_is_no_json_object(file: str, content: bytes) -> None:
    with damaged(DEMO_FOLDERS["demo"], Mutation("", file, content)) as folder:
        error = outcome(folder)
    assert isinstance(error, BadInputError)
    assert file.removesuffix("_config.json").removesuffix(".json") in error.message


def test_a_config_may_not_ask_for_any_amount_of_memory(copied: Save) -> None:
    """Frequencies of rotary positions are computed, not loaded."""
    folder = copied("qwen3_next")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["partial_rotary_factor"] = 2.5e8
    (folder / "config.json").write_text(json.dumps(config))
    error = outcome(folder)
    assert isinstance(error, BadInputError)
    assert "describes tables of 4000000000 elements" in error.message


def test_a_config_that_cannot_be_used_costs_no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssdprof.checkpoint.load.check_space", lambda *_, **__: pytest.fail("downloads"))
    assert "hidden_act" in refused("config.json", hidden_act="swish_7").hint
