"""Damaged weights and malicious indices are refused before any value is read."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint.folders import edit_json
from safetensors.torch import save_file

from ssdprof.checkpoint.hub import Source, broken_file
from ssdprof.checkpoint.load import fetch
from ssdprof.checkpoint.model import open_model
from ssdprof.checkpoint.weights import INDEX, SINGLE, Weights, stays_inside
from ssdprof.errors import BadInputError, ExitCode, ModelUnavailableError, SsdprofError

Save = Callable[[str], Path]


def failure(folder: Path, deepest_layer: int | None = None) -> SsdprofError:
    with pytest.raises(SsdprofError) as caught:
        fetch(open_model(str(folder)), deepest_layer=deepest_layer)
    assert caught.value.hint
    return caught.value


def test_a_header_gives_shapes_and_bytes(tmp_path):
    matrix = torch.zeros(3, 5, dtype=torch.bfloat16)
    save_file({"w": matrix, "s": torch.zeros(())}, tmp_path / SINGLE)
    header = Source(tmp_path).header(SINGLE)
    described = [(t.dtype, t.shape, t.parameter_count) for t in (header["w"], header["s"])]
    assert described == [("BF16", [3, 5], 15), ("F32", [], 1)]


def test_a_file_that_cannot_be_opened_is_not_damaged(tmp_path):
    assert "a cannot be read: Is a directory." in str(broken_file(tmp_path, "a", ValueError()))


def corrupt(content: bytes) -> bytes:
    return content[:8] + bytes([content[8] ^ 0xFF]) + content[9:]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        *(
            (lambda content, keep=keep: content[:keep], "truncated or corrupt")
            for keep in (0, 7, 100, -1)
        ),
        (corrupt, "truncated or corrupt"),
        (
            lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
            "a Git LFS pointer",
        ),
        (None, "has no model-"),
    ],
)
def test_a_damaged_shard_cannot_be_had(
    copied: Save, damage: Callable[[bytes], bytes] | None, words
):
    folder = copied("mamba2")
    shard = min(folder.glob("model-*.safetensors"))
    content = shard.read_bytes()
    shard.unlink()
    if damage is not None:
        shard.write_bytes(damage(content))
    error = failure(folder)
    assert error.exit_code == ExitCode.MODEL_UNAVAILABLE
    assert shard.name in error.message
    assert words in error.message
    assert "..." not in error.message
    assert ("git lfs pull" in error.hint) == ("LFS" in words)
    assert ("Error while deserializing header: " in error.message) == ("truncated" in words)


def test_a_shard_that_the_wanted_layers_do_not_need_is_not_read(copied: Save):
    folder = copied("mamba2")
    model = open_model(str(folder))
    unneeded = {info.name for info in model.files(2)} - {info.name for info in model.files(0)}
    assert unneeded
    for name in unneeded:
        (folder / name).write_bytes(b"damaged")
    fetch(model, deepest_layer=0)
    assert failure(folder, deepest_layer=2).exit_code == ExitCode.MODEL_UNAVAILABLE


@pytest.mark.parametrize(
    ("key", "place", "kind", "words"),
    [
        ("backbone.layers.0.mixer.invented", None, ModelUnavailableError, "invented"),
        *(
            ("backbone.norm_f.weight", place, BadInputError, "no safetensors file inside")
            for place in (
                "../secret.safetensors",
                "/etc/secret.safetensors",
                "a/../../b.safetensors",
                "C:\\b.safetensors",
                "..\\b.safetensors",
            )
        ),
    ],
)
def test_an_index_that_is_wrong_or_leaves_its_folder(
    copied: Save, key, place, kind: type[SsdprofError], words
):
    folder = copied("mamba2")
    shard = min(folder.glob("model-*.safetensors"))
    (folder.parent / "secret.safetensors").write_bytes(shard.read_bytes())
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    edit_json(folder / INDEX, weight_map={**places, key: place or shard.name})
    error = failure(folder)
    assert isinstance(error, kind)
    assert words in error.message


def test_names_that_are_no_file_do_not_stay_inside():
    assert not any(map(stays_inside, ("", ".", "a\0b")))


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"{", ModelUnavailableError),
        ([], ModelUnavailableError),
        ({"metadata": {}}, ModelUnavailableError),
        (b"null", ModelUnavailableError),
        ({"weight_map": []}, ModelUnavailableError),
        ({"weight_map": {}}, BadInputError),
        ({"weight_map": {"a": 1}}, BadInputError),
        ({"weight_map": {"a": "pytorch_model.bin"}}, BadInputError),
    ],
)
def test_a_damaged_index(copied: Save, content, error: type[SsdprofError]):
    folder = copied("mamba2")
    (folder / INDEX).write_bytes(
        content if isinstance(content, bytes) else json.dumps(content).encode()
    )
    refused = failure(folder)
    assert type(refused) is error
    assert not any(word in refused.message for word in ("object", "indices", "KeyError"))


def test_which_weights_three_layers_need():
    needed = (
        "model.layers.2.mamba.A_log",
        "backbone.embeddings.weight",
        "model.language_model.norm.weight",
    )
    others = (
        "model.layers.3.mamba.A_log",
        "layers.12.mamba.A_log",
        "lm_head.weight",
        "language_model.lm_head.weight",
        "mtp.layers.0.mlp.weight",
        "model.visual.blocks.0.attn.qkv.weight",
        "visual.blocks.0.attn.qkv.weight",
    )
    source = None
    weights = Weights(source, None, SINGLE, depth=3)
    assert all(map(weights.needs, needed))
    assert not any(map(weights.needs, others))
    assert replace(weights, head=True).needs("lm_head.weight")


def test_a_folder_without_safetensors_is_refused(copied: Save):
    folder = copied("mamba2")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    error = failure(folder)
    assert "index.json, only pytorch_model.bin." in error.message
    assert error.hint.startswith("Copy the missing file")
