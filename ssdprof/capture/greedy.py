"""The most likely continuation of a prompt, token by token."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import torch

from ssdprof.capture.attention import lower_right_attention
from ssdprof.capture.prefill import split_prompt


def greedy(model: Any, ids: torch.Tensor, count: int, segment_length: int) -> list[int]:
    """`count` tokens after ids (1, l), each the most likely one, with the model's own cache and decoding functions.

    model: a causal language model in eval mode, with all its layers.  The prompt goes through in segments of
    `segment_length` tokens.  An end-of-text token does not stop it.
    """
    from ssdprof.capture.cache import cache_name  # brings transformers

    accepted, name = inspect.signature(model.forward).parameters, cache_name(model)
    segments = split_prompt(ids.shape[1], segment_length)
    cache, seen = None, 0

    def following(piece: torch.Tensor) -> torch.Tensor:
        nonlocal cache, seen
        arguments: dict[str, Any] = {"use_cache": True, name: cache, "logits_to_keep": 1}
        if "position_ids" in accepted:
            arguments["position_ids"] = torch.arange(seen, seen + piece.shape[1], device=ids.device)[None]
        output = model(piece, **arguments)
        seen += piece.shape[1]
        cache = output.get(name)
        token: torch.Tensor = output.logits[:, -1:].argmax(-1)
        return token

    tokens: list[int] = []
    with torch.no_grad():
        with lower_right_attention(model) if len(segments) > 1 else nullcontext():
            for start, stop in segments:
                token = following(ids[:, start:stop])
        tokens.append(int(token))
        while len(tokens) < count:
            token = following(token)
            tokens.append(int(token))
    return tokens
