"""Damaged weights and malicious indices are refused before any value is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ssdprof.checkpoint.hub import read_header
from ssdprof.checkpoint.load import fetch
from ssdprof.checkpoint.model import open_model
from ssdprof.checkpoint.weights import INDEX, is_needed, stays_inside
from ssdprof.errors import BadInputError, ExitCode, ModelUnavailableError, SsdprofError


def failure(folder: Path, deepest_layer: int | None = None) -> SsdprofError:
    with pytest.raises(SsdprofError) as caught:
        fetch(open_model(str(folder)), deepest_layer=deepest_layer)
    assert caught.value.hint
    return caught.value


def first_shard(folder: Path) -> Path:
    return min(folder.glob("model-*.safetensors"))


def test_a_header_gives_shapes_and_bytes(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"w": torch.zeros(3, 5, dtype=torch.bfloat16), "s": torch.zeros((), dtype=torch.float32)}, file)
    header = read_header(file, file.name)
    assert (header["w"].dtype, header["w"].shape, header["w"].size_bytes) == ("BF16", (3, 5), 30)
    assert (header["s"].shape, header["s"].size_bytes) == ((), 4)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_shard_cannot_be_had(copied: Callable[[str], Path], keep: int) -> None:
    folder = copied("mamba2")
    shard = first_shard(folder)
    shard.write_bytes(shard.read_bytes()[:keep])
    error = failure(folder)
    assert error.exit_code == ExitCode.MODEL_UNAVAILABLE
    assert shard.name in error.message
    assert "truncated or corrupt" in error.message
    assert "Error while deserializing header: " in error.message
    assert "..." not in error.message


def test_a_shard_that_the_wanted_layers_do_not_need_is_not_read(copied: Callable[[str], Path]) -> None:
    folder = copied("mamba2")
    located = open_model(str(folder))
    unneeded = {info.name for info in located.files(2)} - {info.name for info in located.files(0)}
    assert unneeded
    for name in unneeded:
        (folder / name).write_bytes(b"damaged")
    fetch(located, deepest_layer=0)
    assert failure(folder, deepest_layer=2).exit_code == ExitCode.MODEL_UNAVAILABLE


def test_a_corrupt_header_cannot_be_had(copied: Callable[[str], Path]) -> None:
    folder = copied("mamba2")
    shard = first_shard(folder)
    content = bytearray(shard.read_bytes())
    content[8] ^= 0xFF
    shard.write_bytes(content)
    assert failure(folder).exit_code == ExitCode.MODEL_UNAVAILABLE


def test_a_git_lfs_pointer_is_recognised(copied: Callable[[str], Path]) -> None:
    folder = copied("mamba2")
    first_shard(folder).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    assert "git lfs pull" in failure(folder).hint


def test_a_missing_shard_cannot_be_had(copied: Callable[[str], Path]) -> None:
    folder = copied("mamba2")
    first_shard(folder).unlink()
    error = failure(folder)
    assert error.exit_code == ExitCode.MODEL_UNAVAILABLE
    assert "has no model-" in error.message


def test_a_shard_without_a_weight_that_the_index_places_in_it(copied: Callable[[str], Path]) -> None:
    folder = copied("mamba2")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["backbone.layers.0.mixer.invented"] = first_shard(folder).name
    (folder / INDEX).write_text(json.dumps(index))
    error = failure(folder)
    assert error.exit_code == ExitCode.MODEL_UNAVAILABLE
    assert "invented" in error.message


@pytest.mark.parametrize(
    "place",
    [
        "../secret.safetensors",
        "/etc/secret.safetensors",
        "a/../../b.safetensors",
        "C:\\b.safetensors",
        "..\\b.safetensors",
    ],
)
def test_an_index_that_leaves_its_folder_is_refused(copied: Callable[[str], Path], place: str) -> None:
    folder = copied("mamba2")
    (folder.parent / "secret.safetensors").write_bytes(first_shard(folder).read_bytes())
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["backbone.norm_f.weight"] = place
    (folder / INDEX).write_text(json.dumps(index))
    error = failure(folder)
    assert isinstance(error, BadInputError)
    assert "outside" in error.message


@pytest.mark.parametrize("name", ["", ".", "a\0b"])
def test_names_that_are_no_file_do_not_stay_inside(name: str) -> None:
    assert not stays_inside(name)
    assert stays_inside("model-00001-of-00002.safetensors")


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"{", ModelUnavailableError),
        (b"[]", ModelUnavailableError),
        (b'{"metadata": {}}', ModelUnavailableError),
        (b'{"weight_map": []}', ModelUnavailableError),
        (b'{"weight_map": {}}', BadInputError),
        (b'{"weight_map": {"a": 1}}', BadInputError),
        (b'{"weight_map": {"a": "pytorch_model.bin"}}', BadInputError),
    ],
)
def test_a_damaged_index(copied: Callable[[str], Path], content: bytes, error: type[SsdprofError]) -> None:
    folder = copied("mamba2")
    (folder / INDEX).write_bytes(content)
    assert type(failure(folder)) is error


@pytest.mark.parametrize(
    ("key", "needed"),
    [
        ("model.layers.2.mamba.A_log", True),
        ("model.layers.3.mamba.A_log", False),
        ("layers.12.mamba.A_log", False),
        ("backbone.embeddings.weight", True),
        ("model.language_model.norm.weight", True),
        ("lm_head.weight", False),
        ("mtp.layers.0.mlp.weight", False),
        ("model.visual.blocks.0.attn.qkv.weight", False),
        ("visual.blocks.0.attn.qkv.weight", False),
    ],
)
def test_which_weights_three_layers_need(key: str, needed: bool) -> None:
    assert is_needed(key, depth=3) is needed


def test_a_folder_without_safetensors_is_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("mamba2")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    error = failure(folder)
    assert isinstance(error, BadInputError)
    assert "pytorch_model.bin" in error.message
