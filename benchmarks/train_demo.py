"""Train one of the demo models that ship with ssdprof, on one CPU core.

    python benchmarks/train_demo.py {demo,demo-gdn} [--out FOLDER] [--steps N] [--judge]

Both are byte-level hybrids: `demo` has four Mamba-2 layers and one attention layer in the granitemoehybrid format,
`demo-gdn` three gated-delta-rule layers and one attention layer in the qwen3_next format.  They are trained on
`ssdprof.capture.text.training()` and judged by bits per byte on `held_out()`, beside a byte bigram model fitted on the
same training text.  The seed is fixed, but another machine's arithmetic differs in the last bits, so the weights will
differ and the numbers only nearly agree.  Writes config.json, generation_config.json, model.safetensors,
tokenizer.json and tokenizer_config.json; the model card, README.md, is written by hand.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from ssdprof.capture import text

COMMON = {
    "vocab_size": 256,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "initializer_range": 0.05,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": "bfloat16",
}
CONFIGS = {
    "demo": COMMON
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 5,
        "layer_types": ["mamba", "mamba", "attention", "mamba", "mamba"],
        "mamba_n_heads": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "attention_multiplier": 32**-0.5,
        "position_embedding_type": None,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 256,
        "rms_norm_eps": 1e-5,
    },
    "demo-gdn": COMMON
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "intermediate_size": 256,
        "rms_norm_eps": 1e-6,
    },
}
SEED = 0
STAGES = ((0.75, 8, 512), (0.25, 2, 2048))  # share of the steps, sequences per step, bytes per sequence
WARMUP_STEPS = 50
MATRIX_RATE = 4e-3
OTHER_RATE = 4e-3
WEIGHT_DECAY = 0.1
TRAINING_CHUNK = 64  # what the operator computes does not depend on it
EVALUATION_WINDOW = 4096
SAVE_EVERY = 100  # steps: a run that is broken off leaves its newest weights


# --- the operator, differentiable and lean: the model's own fallback needs several times the memory


def ssd(x, dt, A, B, C, *, D, dt_bias, **_):  # type: ignore[no-untyped-def]
    """out_t = C_t h_t + D x_t with h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T, chunk by chunk.

    x: (b, l, h, p)    dt: (b, l, h), raw    A, D, dt_bias: (h)    B, C: (b, l, 1, n)    l a multiple of the chunk
    """
    b, l, h, p = x.shape
    q = TRAINING_CHUNK
    dt = F.softplus(dt + dt_bias)
    cumulative = (dt * A).view(b, -1, q, h).permute(0, 1, 3, 2).cumsum(-1)  # (b, c, h, q)
    values = (x * dt[..., None]).view(b, -1, q, h, p).permute(0, 1, 3, 2, 4)  # (b, c, h, q, p)
    B, C = B.view(b, -1, 1, q, B.shape[-1]), C.view(b, -1, 1, q, C.shape[-1])  # (b, c, 1, q, n)
    future = torch.ones(q, q, dtype=torch.bool).triu(1)
    decay = (cumulative[..., :, None] - cumulative[..., None, :]).masked_fill(future, -math.inf).exp()
    out = (C @ B.mT * decay) @ values
    to_end = (cumulative[..., -1:] - cumulative).exp()  # (b, c, h, q)
    states = (values * to_end[..., None]).mT @ B  # (b, c, h, p, n)
    carried = torch.zeros_like(states[:, 0])
    entering = []
    for chunk in range(states.shape[1]):
        entering.append(carried)
        carried = carried * cumulative[:, chunk, :, -1].exp()[..., None, None] + states[:, chunk]
    out = out + (C @ torch.stack(entering, 1).mT) * cumulative.exp()[..., None]
    return out.permute(0, 1, 3, 2, 4).reshape(b, l, h, p) + D[:, None] * x


def lean_operator(name: str) -> AbstractContextManager[object]:
    """While it is open, `demo` trains on `ssd`; transformers' own gated delta rule is lean enough as it is."""
    if name == "demo-gdn":
        return nullcontext()
    return patch("transformers.models.granitemoehybrid.modeling_granitemoehybrid.mamba2_chunk_scan", ssd)


# --- what it is judged by


def bigram_bits_per_byte(training: bytes, held_out: bytes, prior: float) -> float:
    """Bits per byte of p(next | byte) = (count + prior * p(next)) / (total + prior), all but the first byte scored.

    p(next) is the add-one unigram model; `prior` is the strength of the Dirichlet prior that it forms.
    """
    train = np.frombuffer(training, np.uint8).astype(np.int64)
    test = np.frombuffer(held_out, np.uint8)
    unigram = np.bincount(train, minlength=256) + 1.0
    counts = np.bincount(train[:-1] * 256 + train[1:], minlength=65536).reshape(256, 256)
    probability = (counts + prior * unigram / unigram.sum()) / (counts.sum(1, keepdims=True) + prior)
    return float(-np.log2(probability[test[:-1], test[1:]]).mean())


def best_bigram_bits_per_byte(training: bytes, held_out: bytes) -> float:
    """The prior is chosen on the held-out text itself, which favours the bigram model."""
    return min(bigram_bits_per_byte(training, held_out, prior) for prior in (1, 3, 10, 30, 100, 300))


@torch.no_grad()
def model_bits_per_byte(model: torch.nn.Module, held_out: bytes) -> float:
    """Bits per byte, all but the first byte scored; the model starts afresh every EVALUATION_WINDOW bytes."""
    ids = torch.frombuffer(bytearray(held_out), dtype=torch.uint8).long()[None]
    bits = 0.0
    for start in range(0, ids.shape[1] - 1, EVALUATION_WINDOW):
        window = ids[:, start : start + EVALUATION_WINDOW + 1]
        logits = model(window[:, :-1], use_cache=False).logits.float()
        bits += F.cross_entropy(logits[0], window[0, 1:], reduction="sum").item() / math.log(2)
    return bits / (ids.shape[1] - 1)


# --- training


def new_model(name: str) -> torch.nn.Module:
    """Random weights; A and dt start as in Mamba-2: A uniform in 1..16, dt log-uniform in 1e-3..1e-1."""
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[name]), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(1, 16).log_()
            elif name.endswith("dt_bias"):
                dt = torch.empty_like(parameter).uniform_(math.log(1e-3), math.log(1e-1)).exp()
                parameter.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
    return model


def optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for everything else; no decay on A, dt, D, norms and biases."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "layers" in name]
    kernels = [p for name, p in named if p.ndim != 1 and not (p.ndim == 2 and "layers" in name)]
    vectors = [p for _, p in named if p.ndim == 1]
    return [
        torch.optim.Muon(
            matrices, lr=MATRIX_RATE, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw", momentum=0.95
        ),
        torch.optim.AdamW(
            [{"params": kernels, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
            lr=OTHER_RATE,
            betas=(0.9, 0.98),
        ),
    ]


def batches(data: bytes, steps: int) -> Iterator[torch.Tensor]:
    """(sequences, bytes + 1) int64 from random places of `data`, stage by stage."""
    ids = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(SEED)
    for share, sequences, length in STAGES:
        for _ in range(round(share * steps)):
            starts = torch.randint(len(ids) - length, (sequences,), generator=generator)
            yield ids[starts[:, None] + torch.arange(length + 1)]


def train(model: torch.nn.Module, steps: int) -> Iterator[int]:
    """Linear warm-up, then linear decay to zero.  Yields the number of each step that is done."""
    model.train()
    opts = optimizers(model)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: min((step + 1) / WARMUP_STEPS, 1 - step / steps))
        for o in opts
    ]
    began = time.monotonic()
    recent = []
    for step, batch in enumerate(batches(text.training(), steps), 1):
        logits = model(batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in (*opts, *schedules):
            each.step()
        model.zero_grad()
        recent.append(loss.item() / math.log(2))
        if step % 50 == 0:
            print(f"step {step}: {np.mean(recent):.3f} bits per byte, {time.monotonic() - began:.0f} s", flush=True)
            recent.clear()
        yield step
    model.eval()


# --- the folder


def byte_characters() -> dict[str, int]:
    """The character that stands for each byte in byte-level tokenizers: itself if it prints, else one from 256 on."""
    printing = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte if byte in printing else 256 + others.index(byte)): byte for byte in range(256)}


def save(model: torch.nn.Module, name: str, folder: Path) -> None:
    """Write the folder as a hub repository has it: weights in bf16, and a tokenizer whose ids are the bytes."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": byte_characters(), "merges": []},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in (
        ("config.json", CONFIGS[name]),
        ("generation_config.json", {"max_new_tokens": 256}),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", settings),
    ):
        (folder / file).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    weights = {key: tensor.to(torch.bfloat16) for key, tensor in model.state_dict().items() if key != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def judge(name: str, folder: Path) -> None:
    """Print what the weights in `folder` and the bigram model need on the held-out text."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    print(f"held-out text, {name}: {model_bits_per_byte(model, text.held_out()):.3f} bits per byte")
    print(f"held-out text, bigram: {best_bigram_bits_per_byte(text.training(), text.held_out()):.3f} bits per byte")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    package = Path(__file__).parent.parent / "ssdprof" / "checkpoint"
    parser.add_argument("name", choices=CONFIGS, help="which demo model")
    parser.add_argument("--out", type=Path, help="the model's folder (default: in the package)")
    parser.add_argument("--steps", type=int, default=1200, help="optimizer steps of 4096 bytes (default: 1200)")
    parser.add_argument("--judge", action="store_true", help="train nothing: only measure what the folder holds")
    arguments = parser.parse_args()
    name, folder = arguments.name, arguments.out or package / arguments.name
    torch.set_num_threads(1)
    if not arguments.judge:
        model = new_model(name)
        print(f"{sum(p.numel() for p in model.parameters())} parameters")
        with lean_operator(name):
            for step in train(model, arguments.steps):
                if step % SAVE_EVERY == 0:
                    save(model, name, folder)
        save(model, name, folder)
    judge(name, folder)


if __name__ == "__main__":
    main()
