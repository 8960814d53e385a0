"""Write a checkpoint with a real model's dimensions and random weights, in hub layout.

    python benchmarks/make_random_checkpoint.py MODEL FOLDER [--layers N] [--seed S] [--device cuda]
        [--dtype float16]

MODEL: granite-4.0-h-1b, granite-4.0-h-small, mamba2-2.7b, qwen3.5-9b or olmo-hybrid-7b;
`random_models.py` holds their dimensions.

A kernel's time depends on shapes and not on trained weights, so such a checkpoint is good for speed
if the real one is not available.  It says little about accuracy: weights are generated so that the
operator's inputs have a trained model's scales (decay rates A in -16..-1, time steps of 1e-3..1e-1,
x, B and C or q, k and v of about unit size), but without its structure.  A report of a run on it
says so.  The tokenizer is byte-level: one token per byte of UTF-8.
"""

import argparse
import json
from pathlib import Path

import torch
from random_models import MODELS
from random_weights import Draw, Weights
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SHARD_BYTES = 1_000_000_000


def write_weights(folder: Path, weights: Weights) -> int:
    """Shards of about a gigabyte, each written before the next is generated, and their index.
    Returns the bytes.
    """
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
    files = [
        f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)
    ]
    for number, file in enumerate(files):
        (folder / f"shard-{number:05}.safetensors").rename(folder / file)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {
            name: file for file, names in zip(files, shards, strict=True) for name in names
        },
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return total


def write_tokenizer(folder: Path) -> None:
    """One token per byte: BPE over the 256 byte symbols, without a merge."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={symbol: token for token, symbol in enumerate(symbols)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def write_checkpoint(
    name: str, folder: Path, layers: int, seed: int, device: str, *, dtype: str = "bfloat16"
) -> int:
    """The first `layers` layers of the model `name`, in `folder`, which may exist.  Returns its
    weights' bytes.

    dtype: that the model computes in; weights are bf16.
    """
    model = MODELS[name]
    folder.mkdir(parents=True, exist_ok=True)
    total = write_weights(folder, model.weights(layers, Draw(seed, device)))
    write_tokenizer(folder)
    # a run's report says so
    config = model.config(layers) | {"dtype": dtype, "ssdprof_random_weights": True}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "README.md").write_text(
        f"Random weights with the dimensions of {name}, {layers} of {model.depth} layers, seed "
        f"{seed} on {device}.  "
        "Nothing here was trained.\n"
    )
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("folder", type=Path, help="where to write; must not exist, or be empty")
    parser.add_argument("--layers", type=int, help="only the first N layers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", default="cpu", help="where to draw; the same seed gives other values elsewhere"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16"),
        default="bfloat16",
        help="that the model computes in; weights are bf16",
    )
    arguments = parser.parse_args()
    model, folder = MODELS[arguments.model], arguments.folder
    layers = model.depth if arguments.layers is None else arguments.layers
    if not model.fewest_layers <= layers <= model.depth:
        parser.error(f"--layers must be from {model.fewest_layers} to {model.depth}, not {layers}")
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"{folder} is not empty")

    total = write_checkpoint(
        arguments.model, folder, layers, arguments.seed, arguments.device, dtype=arguments.dtype
    )
    print(f"{folder}: {layers} layers, {total / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
