"""Write a checkpoint with a real model's dimensions and random weights, in hub layout.

    python benchmarks/make_random_checkpoint.py granite-4.0-h-1b FOLDER [--layers N] [--seed S] [--device cuda]

A kernel's time depends on shapes, not on what the weights have learnt, so such a checkpoint is good for speed where
the real one cannot be had.  It says little about accuracy: weights are drawn so that the operator's inputs have a
trained model's scales (decay rates A in -16..-1, time steps of 1e-3..1e-1, x, B and C of about unit size), but
without its structure.  A report of a run on it says so.  The tokenizer is byte-level: one token per byte of UTF-8.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

Weights = Iterator[tuple[str, torch.Tensor]]
SHARD_BYTES = 1_000_000_000


class Draw:
    """Random tensors in bf16, reproducible for one seed and one kind of device."""

    def __init__(self, seed: int, device: str) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device = device

    def normal(self, *shape: int, std: float) -> torch.Tensor:
        values = torch.empty(shape, device=self.device, dtype=torch.bfloat16)
        return values.normal_(0.0, std, generator=self.generator).cpu()

    def uniform(self, size: int, low: float, high: float) -> torch.Tensor:
        values = torch.empty(size, device=self.device)
        return values.uniform_(low, high, generator=self.generator).cpu()

    def linear(self, outputs: int, inputs: int, scale: float = 1.0) -> torch.Tensor:
        """(outputs, inputs); maps a vector of unit elements to elements of size `scale`."""
        return self.normal(outputs, inputs, std=scale / math.sqrt(inputs))


@dataclass(frozen=True)
class Mixer:
    """One Mamba-2 mixer."""

    hidden: int
    nheads: int
    headdim: int = 64
    dstate: int = 128
    conv_kernel: int = 4

    def weights(self, prefix: str, draw: Draw, depth: int) -> Weights:
        inner = self.nheads * self.headdim
        conv = inner + 2 * self.dstate
        dt = torch.exp(draw.uniform(self.nheads, math.log(1e-3), math.log(1e-1)))
        yield f"{prefix}.in_proj.weight", draw.linear(inner + conv + self.nheads, self.hidden)  # z, x B C, dt
        yield f"{prefix}.conv1d.weight", draw.normal(conv, 1, self.conv_kernel, std=1 / math.sqrt(self.conv_kernel))
        yield f"{prefix}.conv1d.bias", draw.normal(conv, std=0.1)
        yield f"{prefix}.dt_bias", (dt + torch.log(-torch.expm1(-dt))).bfloat16()  # softplus of it is dt
        yield f"{prefix}.A_log", torch.log(draw.uniform(self.nheads, 1.0, 16.0)).bfloat16()
        yield f"{prefix}.D", ones(self.nheads)
        yield f"{prefix}.norm.weight", ones(inner)
        yield f"{prefix}.out_proj.weight", draw.linear(self.hidden, inner, 1 / math.sqrt(2 * depth))


class Granite1B:
    """ibm-granite/granite-4.0-h-1b: 36 Mamba-2 and 4 attention layers, a dense gated MLP after each."""

    depth, hidden, vocabulary, mlp, heads, kv_heads = 40, 1536, 100352, 4096, 12, 4
    attention_layers = (5, 15, 25, 35)
    embedding_multiplier = 12
    mixer = Mixer(hidden, nheads=48)

    def config(self, layers: int) -> dict[str, object]:
        return {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "model_type": "granitemoehybrid",
            "num_hidden_layers": layers,
            "layer_types": ["attention" if layer in self.attention_layers else "mamba" for layer in range(layers)],
            "hidden_size": self.hidden,
            "vocab_size": self.vocabulary,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "shared_intermediate_size": self.mlp,
            "intermediate_size": self.mlp,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": self.mixer.nheads,
            "mamba_d_head": self.mixer.headdim,
            "mamba_d_state": self.mixer.dstate,
            "mamba_d_conv": self.mixer.conv_kernel,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 256,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "attention_multiplier": 1 / (self.hidden // self.heads),
            "embedding_multiplier": self.embedding_multiplier,
            "logits_scaling": 6,
            "residual_multiplier": 0.22,
            "position_embedding_type": "nope",
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        }

    def weights(self, layers: int, draw: Draw) -> Weights:
        head = self.hidden // self.heads
        yield (
            "model.embed_tokens.weight",
            draw.normal(self.vocabulary, self.hidden, std=1 / self.embedding_multiplier),
        )
        for layer in range(layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", ones(self.hidden)
            if layer in self.attention_layers:
                for name, outputs in (
                    ("q", self.heads * head),
                    ("k", self.kv_heads * head),
                    ("v", self.kv_heads * head),
                ):
                    yield f"{prefix}.self_attn.{name}_proj.weight", draw.linear(outputs, self.hidden)
                yield f"{prefix}.self_attn.o_proj.weight", draw.linear(self.hidden, self.heads * head)
            else:
                yield from self.mixer.weights(f"{prefix}.mamba", draw, self.depth)
            yield f"{prefix}.post_attention_layernorm.weight", ones(self.hidden)
            yield f"{prefix}.shared_mlp.input_linear.weight", draw.linear(2 * self.mlp, self.hidden)
            yield f"{prefix}.shared_mlp.output_linear.weight", draw.linear(self.hidden, self.mlp)
        yield "model.norm.weight", ones(self.hidden)


class Mamba2_2B:
    """state-spaces/mamba2-2.7b, in the layout of transformers."""

    depth, hidden, vocabulary = 64, 2560, 50288
    mixer = Mixer(hidden, nheads=80)

    def config(self, layers: int) -> dict[str, object]:
        return {
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            "num_hidden_layers": layers,
            "hidden_size": self.hidden,
            "vocab_size": self.vocabulary,
            "num_heads": self.mixer.nheads,
            "head_dim": self.mixer.headdim,
            "state_size": self.mixer.dstate,
            "conv_kernel": self.mixer.conv_kernel,
            "n_groups": 1,
            "chunk_size": 256,
            "expand": 2,
            "layer_norm_epsilon": 1e-5,
            "residual_in_fp32": True,
            "tie_word_embeddings": True,
        }

    def weights(self, layers: int, draw: Draw) -> Weights:
        yield "backbone.embeddings.weight", draw.normal(self.vocabulary, self.hidden, std=1.0)
        for layer in range(layers):
            yield f"backbone.layers.{layer}.norm.weight", ones(self.hidden)
            yield from self.mixer.weights(f"backbone.layers.{layer}.mixer", draw, self.depth)
        yield "backbone.norm_f.weight", ones(self.hidden)


MODELS: dict[str, Granite1B | Mamba2_2B] = {"granite-4.0-h-1b": Granite1B(), "mamba2-2.7b": Mamba2_2B()}


def ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16)


def write_weights(folder: Path, weights: Weights) -> int:
    """Shards of about a gigabyte, each written before the next is drawn, and their index.  Returns the bytes."""
    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    total = 0

    def flush() -> None:
        save_file(held, folder / f"shard-{len(shards):05}.safetensors", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, tensor in weights:
        held[name] = tensor
        total += tensor.nbytes
        if sum(part.nbytes for part in held.values()) >= SHARD_BYTES:
            flush()
    if held:
        flush()
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for number, file in enumerate(files):
        (folder / f"shard-{number:05}.safetensors").rename(folder / file)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return total


def write_tokenizer(folder: Path) -> None:
    """One token per byte: BPE over the 256 byte symbols, without a merge."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: token for token, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("folder", type=Path, help="where to write; must not exist, or be empty")
    parser.add_argument("--layers", type=int, help="only the first N layers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="where to draw; the same seed gives other values elsewhere")
    arguments = parser.parse_args()
    model, folder = MODELS[arguments.model], arguments.folder
    layers = model.depth if arguments.layers is None else arguments.layers
    if not 1 <= layers <= model.depth:
        parser.error(f"--layers must be from 1 to {model.depth}, not {layers}")
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"{folder} is not empty")

    folder.mkdir(parents=True, exist_ok=True)
    total = write_weights(folder, model.weights(layers, Draw(arguments.seed, arguments.device)))
    write_tokenizer(folder)
    config = model.config(layers) | {"dtype": "bfloat16", "ssdprof_random_weights": True}  # a run's report says so
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "README.md").write_text(
        f"Random weights with the dimensions of {arguments.model}, {layers} of {model.depth} layers, "
        f"seed {arguments.seed} on {arguments.device}.  Nothing here was trained.\n"
    )
    print(f"{folder}: {layers} layers, {total / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
