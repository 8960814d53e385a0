"""Train one of the demo models that ship with ssdprof, on one CPU core.

    python benchmarks/train_demo.py {demo,demo-gdn,demo-kda} [--out FOLDER] [--steps N] [--judge]

All are byte-level hybrids: `demo` has four Mamba-2 layers and one attention layer in the
granitemoehybrid format, `demo-gdn` three gated-delta-rule layers and one attention layer in the
qwen3_next format, `demo-kda` three layers of Kimi Delta Attention and one attention layer in the
kimi_linear format.  They are trained on `training_text()` of `ssdprof.capture.prompt` and judged by
bits per byte on `held_out_text()`, compared with a byte bigram model that was fitted on the same
training text.  The seed is fixed, but another machine's arithmetic differs in the last bits, so the
weights will differ and the numbers only nearly agree.  Writes config.json, generation_config.json,
model.safetensors, tokenizer.json and tokenizer_config.json; the model card, README.md, is written
by hand.
"""

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from bits_per_byte import best_bigram_bits_per_byte, model_bits_per_byte
from demo_models import CONFIGS, SEED, new_model, save
from transformers import AutoModelForCausalLM

from ssdprof.capture import prompt
from ssdprof.kernels.kda.reference import decayed_scores

# share of the steps, sequences per step, bytes per sequence
STAGES = ((0.75, 8, 512), (0.25, 2, 2048))
WARMUP_STEPS = 50
MATRIX_RATE = 4e-3
OTHER_RATE = 4e-3
WEIGHT_DECAY = 0.1
TRAINING_CHUNK = 64  # the operator's result does not depend on it
SAVE_EVERY = 100  # steps: an interrupted run keeps its newest weights


def ssd(x, dt, A, B, C, *, D, dt_bias, **_):  # type: ignore[no-untyped-def]
    """out_t = C_t h_t + D x_t with h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T, chunk by chunk.

    Differentiable; the model's fallback needs several times the memory.

    x: (b, l, h, p)    dt: (b, l, h), raw    A, D, dt_bias: (h)    B, C: (b, l, 1, n)    l a
                       multiple of the chunk
    """
    b, l, h, p = x.shape
    q = TRAINING_CHUNK
    dt = F.softplus(dt + dt_bias)
    cumulative = (dt * A).view(b, -1, q, h).permute(0, 1, 3, 2).cumsum(-1)  # (b, c, h, q)
    values = (x * dt[..., None]).view(b, -1, q, h, p).permute(0, 1, 3, 2, 4)  # (b, c, h, q, p)
    B, C = B.view(b, -1, 1, q, B.shape[-1]), C.view(b, -1, 1, q, C.shape[-1])  # (b, c, 1, q, n)
    future = torch.ones(q, q, dtype=torch.bool).triu(1)
    decay = (
        (cumulative[..., :, None] - cumulative[..., None, :]).masked_fill(future, -math.inf).exp()
    )
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


def kda(q, k, v, g, beta, **_):  # type: ignore[no-untyped-def]
    """Kimi Delta Attention of normalised q and k, chunk by chunk (docs/kda-mathematics.md, equation
    4).

    q, k, g: (b, l, h, K)    v: (b, l, h, V)    beta: (b, l, h)    l a multiple of the chunk.
                             Returns out and None
    """
    (b, l, h, _), size = q.shape, TRAINING_CHUNK // 4
    q, k = (F.normalize(x.float(), dim=-1) for x in (q, k))
    q, k, v, g, beta = (
        x.float().view(b, l // size, size, h, -1).transpose(2, 3)
        for x in (q * q.shape[-1] ** -0.5, k, v, g, beta)
    )
    sums = g.cumsum(-2)
    scores, system = decayed_scores(q, k, sums)
    writes = torch.cat((beta * v, beta * k * sums.exp()), -1)
    u, w = torch.linalg.solve_triangular(
        beta * system, writes, upper=False, unitriangular=True
    ).split((v.shape[-1], k.shape[-1]), -1)
    queries, keys, decay = (
        q * sums.exp(),
        (k * (sums[..., -1:, :] - sums).exp()).mT,
        sums[..., -1, :, None].exp(),
    )
    state, out = torch.zeros_like(keys[:, 0] @ v[:, 0]), []
    for c in range(l // size):
        written = u[:, c] - w[:, c] @ state
        out.append(queries[:, c] @ state + scores[:, c] @ written)
        state = decay[:, c] * state + keys[:, c] @ written
    return torch.stack(out, 1).transpose(2, 3).reshape(b, l, h, -1), None


def lean_operator(name: str) -> AbstractContextManager[object]:
    """Inside this context, `demo` trains on `ssd` and `demo-kda` on `kda`.

    The gated delta rule of transformers needs little enough memory.
    """
    models = "transformers.models"
    contexts: dict[str, AbstractContextManager[object]] = {
        "demo": patch(
            f"{models}.granitemoehybrid.modeling_granitemoehybrid.mamba2_chunk_scan", ssd
        ),
        "demo-gdn": nullcontext(),
        "demo-kda": patch(
            f"{models}.kimi_linear.modeling_kimi_linear.chunk_kimi_delta_attention", kda
        ),
    }
    return contexts[name]


def optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for everything else; no decay on A, dt, D, norms and
    biases.
    """
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "layers" in name]
    kernels = [p for name, p in named if p.ndim != 1 and not (p.ndim == 2 and "layers" in name)]
    vectors = [p for _, p in named if p.ndim == 1]
    return [
        torch.optim.Muon(
            matrices,
            lr=MATRIX_RATE,
            weight_decay=WEIGHT_DECAY,
            adjust_lr_fn="match_rms_adamw",
            momentum=0.95,
        ),
        torch.optim.AdamW(
            [
                {"params": kernels, "weight_decay": WEIGHT_DECAY},
                {"params": vectors, "weight_decay": 0.0},
            ],
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
    """Linear warm-up, then linear decay to zero.  Yields the number of each finished step."""
    model.train()
    opts = optimizers(model)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            o, lambda step: min((step + 1) / WARMUP_STEPS, 1 - step / steps)
        )
        for o in opts
    ]
    began = time.monotonic()
    recent = []
    for step, batch in enumerate(batches(prompt.training_text(), steps), 1):
        logits = model(batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(opts, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad()
        recent.append(loss.item() / math.log(2))
        if step % 50 == 0:
            print(
                (
                    f"step {step}: {np.mean(recent):.3f} bits per byte, "
                    f"{time.monotonic() - began:.0f} s"
                ),
                flush=True,
            )
            recent.clear()
        yield step
    model.eval()


def judge(name: str, folder: Path) -> None:
    """Print the bits per byte of the weights in `folder` and of the bigram model on the held-out
    text.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    print(
        f"held-out text, {name}: {model_bits_per_byte(model, prompt.held_out_text()):.3f} bits per "
        "byte"
    )
    print(
        "held-out text, bigram: "
        f"{best_bigram_bits_per_byte(prompt.training_text(), prompt.held_out_text()):.3f} bits per "
        "byte"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    package = Path(__file__).parent.parent / "ssdprof" / "checkpoint"
    parser.add_argument("name", choices=CONFIGS, help="which demo model")
    parser.add_argument("--out", type=Path, help="the model's folder (default: in the package)")
    parser.add_argument(
        "--steps", type=int, default=1200, help="optimizer steps of 4096 bytes (default: 1200)"
    )
    parser.add_argument(
        "--judge", action="store_true", help="train nothing: only measure what the folder holds"
    )
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
