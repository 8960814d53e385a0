"""The most likely continuation of a prompt, token by token."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def greedy(model: Any, ids: torch.Tensor, count: int) -> list[int]:
    """`count` tokens after ids (1, l), each the most likely one, with the model's own cache and decoding functions.

    model: a causal language model in eval mode.  The prompt goes through in one piece; a token that ends a text does not
    end this one.
    """
    accepted = inspect.signature(model.forward).parameters
    cache_name = "cache_params" if "cache_params" in accepted else "past_key_values"
    tokens: list[int] = []
    cache, current, seen = None, ids, 0
    with torch.no_grad():
        while len(tokens) < count:
            arguments: dict[str, Any] = {"use_cache": True, cache_name: cache, "logits_to_keep": 1}
            if "position_ids" in accepted:
                arguments["position_ids"] = torch.arange(seen, seen + current.shape[1], device=ids.device)[None]
            output = model(current, **arguments)
            seen += current.shape[1]
            cache = output.get(cache_name)
            current = output.logits[:, -1:].argmax(-1)
            tokens.append(int(current))
    return tokens
