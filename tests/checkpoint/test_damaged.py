"""Damaged configs and tokenizers give an error that names the file; `tests/fuzz.py` damages them at
random.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint.folders import edit_json

from ssdprof.capture.forward import PromptRun
from ssdprof.capture.layers import capture_layers
from ssdprof.capture.prompt import build_prompt
from ssdprof.checkpoint.load import fetch, fetch_tokenizer, load_model
from ssdprof.checkpoint.model import open_model
from ssdprof.checkpoint.names import DEMO_FOLDERS
from ssdprof.errors import BadInputError

Save = Callable[[str], Path]


def error_of(folder: Path) -> BadInputError:
    """What a user sees, up to the first operator's inputs."""
    with pytest.raises(BadInputError) as caught:
        located = open_model(str(folder))
        layers = located.ref.layers[:1]
        tokenizer = fetch_tokenizer(located)
        ids, _ = build_prompt(tokenizer and tokenizer.folder, 8)
        model = load_model(fetch(located, deepest_layer=layers[0].index), device="cpu")
        capture_layers(PromptRun(model, ids, 8, located.model_type, layers), lambda _: None)
    return caught.value


@pytest.fixture
def demo(tmp_path) -> Path:
    return Path(shutil.copytree(DEMO_FOLDERS["demo"], tmp_path / "demo"))


def refused(folder: Path, file: str, **changes) -> BadInputError:
    """The error for a model with some keys of a file changed."""
    edit_json(folder / file, **changes)
    return error_of(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rms_norm_eps": 1}, "Field 'rms_norm_eps' expected float, got int (value: 1)."),
        ({"hidden_act": "swish_7"}, "KeyError: 'swish_7'."),
        (
            {"mamba_d_conv": 3},
            "'model.layers.0.mamba.conv1d.weight' is (512, 1, 4) in the file and (512, 1, 3)",
        ),
        ({"layer_types": ["mamba"]}, "must be equal to the number of `layer_types` (1)"),
        ({"mamba_d_head": None}, "the config of demo: unsupported operand type(s) for *"),
        (
            {"layer_types": ["mamba"] * 4 + ["x"]},
            "the config of demo: The `layer_types` entries must be in the known ones but got [",
        ),
        ({"dtype": 7}, "'int' object has no attribute"),
        ({"model_type": "unheard"}, "of type 'unheard'"),
        ({"model_type": []}, "of type []"),
    ],
)
def test_a_config_that_transformers_cannot_use(demo: Path, change, words):
    error = refused(demo, "config.json", **change)
    assert words in error.message
    assert "..." not in error.message


@pytest.mark.parametrize("change", [{"hidden_act": "swish_7"}, {"dtype": 7}])
def test_the_refused_field_is_named_where_transformers_does_not(demo: Path, monkeypatch, change):
    monkeypatch.setattr(
        "ssdprof.checkpoint.load.check_space", lambda *_, **__: pytest.fail("downloads")
    )
    ((field, value),) = change.items()
    assert (
        f"It accepts the config without {field} = {value!r}."
        in refused(demo, "config.json", **change).hint
    )


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        (
            "tokenizer.json",
            {"decoder": {"type": "Unheard"}},
            "did not match any variant of untagged enum",
        ),
        ("tokenizer.json", {"added_tokens": None}, "cannot use the tokenizer"),
        ("tokenizer.json", {"model": {"type": "BPE"}}, "cannot use the tokenizer"),
        ("tokenizer_config.json", {"tokenizer_class": 1.5}, "cannot use the tokenizer"),
        (
            "tokenizer_config.json",
            {"eos_token": [1]},
            "Special token eos_token has to be either str or AddedToken",
        ),
    ],
)
def test_a_tokenizer_that_transformers_cannot_use(demo: Path, file, change, words):
    error = refused(demo, file, **change)
    assert words in error.message
    assert "--tokenizer" in error.hint


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[" * 10**5, b"\xff", b"[]"])
def test_what_is_no_json_object(demo: Path, file, content):
    (demo / file).write_bytes(content)
    assert file.removesuffix("_config.json").removesuffix(".json") in error_of(demo).message


def test_a_config_may_not_ask_for_any_amount_of_memory(copied: Save):
    """Frequencies of rotary positions are computed, not loaded."""
    folder = copied("qwen3_next")
    parameters = json.loads((folder / "config.json").read_text())["rope_parameters"]
    error = refused(
        folder, "config.json", rope_parameters={**parameters, "partial_rotary_factor": 2.5e8}
    )
    assert "describes tables of 4000000000 elements" in error.message
