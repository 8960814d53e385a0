"""Seeded damage to a checkpoint's small files, and the errors that such a checkpoint causes.

`PYTHONPATH=.:tests python tests/mutations.py 500 [family ...]` tries 500 mutations of each tiny model, or of the demo
model, and prints those with an unexpected error.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssdprof.checkpoint.names import DEMO_FOLDERS
from ssdprof.errors import SsdprofError

SMALL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
TOKENS = 8
WRONG_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 7, 255, 10**6, 2**31, 2**64, 10**40, 0.5, -0.5, 1e300, float("nan"), float("inf"),
    "", "0", "x", "swish_7", "\u0000", "\ud800", "a" * 5000, [], [[]], [None], [1, 2], ["x"], {}, {"x": 1},
    {"__float__": "Infinity"},
)  # fmt: skip
WRONG_KEYS = (
    "quantization_config", "rope_scaling", "rope_parameters", "dtype", "torch_dtype", "architectures", "auto_map",
    "attn_implementation", "_attn_implementation", "layers_block_type", "time_step_limit", "pruned_heads", "id2label",
    "num_labels", "problem_type", "return_dict", "output_attentions", "use_cache", "is_encoder_decoder", "ssm_cfg",
    "text_config", "vision_config", "attn_layer_indices", "sliding_window", "transformers_version", "name_or_path",
    "tokenizer_class", "added_tokens_decoder", "chat_template", "extra_special_tokens", "decoder", "model",
    "normalizer", "pre_tokenizer", "post_processor", "added_tokens", "padding", "truncation", "model_max_length",
    "clean_up_tokenization_spaces", "eos_token", "bos_token", "unk_token",
)  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """`content` replaces the file `file`; `what` describes the damage."""

    what: str
    file: str
    content: bytes


def mutations(folder: Path, count: int, seed: int = 0) -> Iterator[Mutation]:
    """`count` damaged small files of the checkpoint in `folder`, two thirds of them configs."""
    draw = random.Random(seed)
    for _ in range(count):
        file = draw.choice((SMALL_FILES[0], SMALL_FILES[0], *SMALL_FILES))
        original = (folder / file).read_bytes()
        if draw.random() < 0.1:
            yield Mutation(*_damaged_bytes(draw, file, original))
            continue
        content = json.loads(original)
        what = [_damage(draw, content) for _ in range(draw.choice((1, 1, 1, 2, 3)))]
        yield Mutation(f"{file}: {'; '.join(what)}", file, json.dumps(content).encode())


def _damaged_bytes(draw: random.Random, file: str, original: bytes) -> tuple[str, str, bytes]:
    way = draw.choice(("cut", "flip", "nested", "empty", "list", "deep value"))
    at = draw.randrange(len(original))
    content = {
        "cut": original[:at],
        "flip": original[:at] + bytes([original[at] ^ 1 << draw.randrange(8)]) + original[at + 1 :],
        "nested": b"[" * 10**5,
        "empty": b"",
        "list": b"[]",
        "deep value": original.rstrip()[:-1] + b',"x":' + b"[" * 300 + b"]" * 300 + b"}",
    }[way]
    return f"{file}: {way} at {at}", file, content


def _damage(draw: random.Random, content: dict[str, Any]) -> str:
    """Change one place in `content`, and describe the change."""
    inner, path = content, ""
    while True:  # choose a dict at any depth
        deeper = [key for key, value in inner.items() if isinstance(value, dict) and value]
        if not deeper or draw.random() < 0.4:
            break
        key = draw.choice(deeper)
        inner, path = inner[key], f"{path}{key}."
    known = sorted(inner)
    key = draw.choice(known) if known and draw.random() < 0.8 else draw.choice(WRONG_KEYS)
    way = draw.random()
    if way < 0.1:
        inner.pop(key, None)
        return f"no {path}{key}"
    value = inner.get(key)
    if way < 0.25 and isinstance(value, (int, float)) and not isinstance(value, bool):
        inner[key] = draw.choice((-value, value * 2, value + 1, float(value), str(value), [value], value * 10**9))
    elif way < 0.35 and isinstance(value, list) and value:
        value[draw.randrange(len(value))] = draw.choice(WRONG_VALUES)
    else:
        inner[key] = draw.choice(WRONG_VALUES)
    return f"{path}{key} = {str(inner[key])[:60]!r}"


@contextmanager
def damaged(folder: Path, mutation: Mutation) -> Iterator[Path]:
    """A copy of the checkpoint in `folder` with the mutation's file."""
    with tempfile.TemporaryDirectory(prefix="ssdprof-mutated-") as temporary:
        copy = Path(temporary) / "model"
        shutil.copytree(folder, copy, symlinks=True)
        (copy / mutation.file).write_bytes(mutation.content)
        yield copy


def outcome(folder: Path) -> SsdprofError | None:
    """Process `folder` up to its first operator's inputs, and return the error that a user would see, if any."""
    import torch

    from ssdprof.capture.layers import capture_layers
    from ssdprof.capture.tokenizer import build_prompt
    from ssdprof.checkpoint.load import fetch, fetch_tokenizer, load_model
    from ssdprof.checkpoint.model import open_model

    try:
        with warnings.catch_warnings(action="ignore"), torch.random.fork_rng(devices=[]):
            located = open_model(str(folder))
            layers = located.ref.layers[:1]
            tokenizer = fetch_tokenizer(located)
            ids, _ = build_prompt(tokenizer and tokenizer.folder, TOKENS)
            local = fetch(located, deepest_layer=layers[0].index)
            model = load_model(local, device="cpu")
            capture_layers(model, ids, layers, ref=located.ref, segment_length=TOKENS, on_layer=lambda _: None)
    except SsdprofError as error:
        return error
    return None


def try_all(folder: Path, count: int, *, seed: int = 0) -> dict[str, str]:
    """Mutation -> unexpected error, which is a defect of ssdprof."""
    defects = {}
    for mutation in mutations(folder, count, seed):
        with damaged(folder, mutation) as copy:
            try:
                error = outcome(copy)
            except Exception as unexpected:
                defects[mutation.what] = "".join(traceback.format_exception(unexpected, limit=-3))
                continue
        if error is not None and error.exit_code not in (2, 4):
            defects[mutation.what] = repr(vars(error))
    return defects


def main() -> None:
    count, families = int(sys.argv[1]), sys.argv[2:]
    resource.setrlimit(resource.RLIMIT_AS, (12 * 2**30,) * 2)  # a config may require any amount of memory
    for folder in [saved_family(family) for family in families] or [DEMO_FOLDERS["demo"]]:
        defects = try_all(folder, count)
        for what, why in defects.items():
            print(what, why, sep="\n")
        print(f"{folder.name}: {len(defects)} of {count} mutations do not end well", flush=True)


def saved_family(name: str) -> Path:
    """A tiny model of a family, with a tokenizer, in a new folder."""
    import tiny_models
    from checkpoint.conftest import save_tokenizer

    folder = Path(tempfile.mkdtemp()) / name
    tiny_models.shared(name).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


if __name__ == "__main__":
    main()
