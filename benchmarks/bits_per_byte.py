"""Bits per byte of a byte-level model, and of a byte bigram model, on a text."""

import math

import numpy as np
import torch
import torch.nn.functional as F

EVALUATION_WINDOW = 4096


def bigram_bits_per_byte(training: bytes, held_out: bytes, prior: float) -> float:
    """Bits per byte of p(next | byte) = (count + prior * p(next)) / (total + prior), all but the
    first byte scored.

    p(next) is the add-one unigram model; `prior` is the strength of the Dirichlet prior that it
    forms.
    """
    train = np.frombuffer(training, np.uint8).astype(np.int64)
    test = np.frombuffer(held_out, np.uint8)
    unigram = np.bincount(train, minlength=256) + 1.0
    counts = np.bincount(train[:-1] * 256 + train[1:], minlength=65536).reshape(256, 256)
    probability = (counts + prior * unigram / unigram.sum()) / (
        counts.sum(1, keepdims=True) + prior
    )
    return float(-np.log2(probability[test[:-1], test[1:]]).mean())


def best_bigram_bits_per_byte(training: bytes, held_out: bytes) -> float:
    """Chooses the prior on the held-out text, which favours the bigram model."""
    return min(
        bigram_bits_per_byte(training, held_out, prior) for prior in (1, 3, 10, 30, 100, 300)
    )


@torch.no_grad()
def model_bits_per_byte(model: torch.nn.Module, held_out: bytes) -> float:
    """Bits per byte, all but the first byte scored; the model's state is reset every
    EVALUATION_WINDOW bytes.
    """
    ids = torch.frombuffer(bytearray(held_out), dtype=torch.uint8).long()[None]
    bits = 0.0
    for start in range(0, ids.shape[1] - 1, EVALUATION_WINDOW):
        window = ids[:, start : start + EVALUATION_WINDOW + 1]
        logits = model(window[:, :-1], use_cache=False).logits.float()
        bits += F.cross_entropy(logits[0], window[0, 1:], reduction="sum").item() / math.log(2)
    return bits / (ids.shape[1] - 1)
