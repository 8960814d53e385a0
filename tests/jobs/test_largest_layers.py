"""The largest mixtures of experts: the memory of one layer, and the error if it does not fit."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from ssdprof.core.base import PlacementKind
from ssdprof.core.words import size_words
from ssdprof.errors import MissingCapabilityError
from ssdprof.jobs import limits
from ssdprof.jobs import plan as placement
from ssdprof.jobs.options import ServedModelOptions
from ssdprof.jobs.plan import choose
from ssdprof.jobs.target import find

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "large-models.md"
LAYERS = 4
STORED = {torch.bfloat16: "BF16", torch.float32: "F32"}
_LINEAR = {
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "Granite-4.0-h-small": lambda: tf.GraniteMoeHybridConfig(
        vocab_size=100352,
        hidden_size=4096,
        num_hidden_layers=LAYERS,
        layer_types=["mamba"] * LAYERS,
        num_attention_heads=32,
        num_key_value_heads=8,
        mamba_n_heads=128,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        intermediate_size=768,
        shared_intermediate_size=1536,
        num_local_experts=72,
        num_experts_per_tok=10,
        tie_word_embeddings=True,
    ),
    "Qwen3-Next-80B-A3B": lambda: tf.Qwen3NextConfig(
        **_LINEAR,
        vocab_size=151936,
        hidden_size=2048,
        num_attention_heads=16,
        linear_num_value_heads=32,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "Nemotron-3-Super-120B-A12B": lambda: tf.NemotronHConfig(
        vocab_size=131072,
        hidden_size=4096,
        layers_block_type=["mamba", "moe", "moe", "mamba"],
        num_attention_heads=32,
        num_key_value_heads=2,
        head_dim=128,
        mamba_num_heads=128,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_groups=8,
        chunk_size=128,
        n_routed_experts=512,
        num_experts_per_tok=22,
        moe_intermediate_size=2688,
        moe_latent_size=1024,
        moe_shared_expert_intermediate_size=5376,
        n_shared_experts=1,
    ),
    "Qwen3.5-397B-A17B": lambda: tf.Qwen3_5MoeTextConfig(
        **_LINEAR,
        vocab_size=248320,
        hidden_size=4096,
        num_attention_heads=32,
        linear_num_value_heads=64,
        moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024,
    ),
}


@cache
def without_values(name: str):
    config = CONFIGS[name]()
    config.dtype = "bfloat16"
    with torch.device("meta"):
        return tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def write_without_values(name: str, folder: Path):
    """A checkpoint whose weights are a hole in a sparse file, and its model without values."""
    model = without_values(name)
    model.config.save_pretrained(folder)
    header = {}
    size = 0
    for name, tensor in model.state_dict().items():
        span = [size, size + tensor.nbytes]
        header[name] = {
            "dtype": STORED[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": span,
        }
        size += tensor.nbytes
    words = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(words)) + words)
        file.truncate(8 + len(words) + size)
    return model


def gpu_with(monkeypatch, free: int, *, host: int = 0):
    monkeypatch.setattr(limits, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(limits, "free_bytes", lambda: free)
    monkeypatch.setattr(placement, "host_memory", lambda: host)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_of_the_largest_models_fits_where_the_page_says(name, tmp_path, monkeypatch):
    """One layer is in memory at a time, so the number of layers does not matter."""
    model = write_without_values(name, tmp_path)
    request = ServedModelOptions(model=str(tmp_path), prompt="random", seqlens=(16384,))
    target = find(request)
    gpu_with(monkeypatch, 0)
    layer = max(
        sum(weight.nbytes for weight in one.parameters()) for one in model.base_model.layers
    )
    embedding = model.get_input_embeddings().weight.nbytes
    computed = placement.Chooser(target).least_bytes_beside_weights()
    least = layer + embedding + computed
    assert f"| {name} | {size_words(layer)} | {size_words(least)} |" in PAGE.read_text()

    gpu_with(monkeypatch, least + 2**20)  # for the layers' buffers
    assert choose(target).record.kind == "disk-offload"
    gpu_with(monkeypatch, least - 1, host=target.weight_bytes * 2)
    kinds: tuple[PlacementKind | None, ...] = (None, "cpu-offload", "disk-offload")
    for kind in kinds if name == "Granite-4.0-h-small" else kinds[:1]:
        with pytest.raises(
            MissingCapabilityError, match="does not fit on cuda:0 layer by layer"
        ) as caught:
            choose(replace(target, request=replace(request, placement=kind)))
        for words in (
            f"largest layer has {size_words(layer)}",
            f"embedding {size_words(embedding)}",
            f"takes {size_words(computed)}",
        ):
            assert words in caught.value.message
        assert caught.value.hint.startswith("What fits: --seq 8192")


def test_a_smaller_model_of_the_family_is_advised(tmp_path, monkeypatch):
    write_without_values("Granite-4.0-h-small", tmp_path)
    target = find(
        ServedModelOptions(
            model=str(tmp_path), prompt="random", seqlens=(4096,), placement="one-gpu"
        )
    )
    ref = target.ref.model_copy(update={"repo_id": "ibm-granite/granite-4.0-h-small"})
    monkeypatch.setattr(type(target), "ref", ref)
    gpu_with(monkeypatch, 0)
    gpu_with(
        monkeypatch,
        target.located.weight_bytes(2) + placement.Chooser(target).least_bytes_beside_weights(),
    )
    with pytest.raises(
        MissingCapabilityError, match=r"does not fit on cuda:0: its weights take 6\.73 GiB"
    ) as caught:
        choose(target)
    assert caught.value.hint.startswith(
        "What fits: --layers first:3 or ibm-granite/granite-4.0-h-1b"
    )


@pytest.mark.parametrize(
    ("name", "free", "hint"),
    [
        ("Qwen3.5-397B-A17B", 14, "Not one layer of it fits: take a smaller model."),
        ("Qwen3.5-397B-A17B", 15.5, "What fits: --seq 4096."),
        ("Nemotron-3-Super-120B-A12B", 6.4, "What fits: --layers first:1."),
        ("Nemotron-3-Super-120B-A12B", 8, "What fits: --seq 8192 or --layers first:1."),
    ],
)
def test_what_would_fit_is_advised(name, free, hint, tmp_path, monkeypatch):
    """In addition to the memory for the computation."""
    write_without_values(name, tmp_path)
    request = ServedModelOptions(model=str(tmp_path), prompt="random", seqlens=(16384,))
    gpu_with(monkeypatch, int(free * 2**30))
    with pytest.raises(MissingCapabilityError, match="layer by layer") as caught:
        choose(find(request))
    assert caught.value.hint == hint
