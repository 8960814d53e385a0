"""Causal attention for a prompt that is processed in segments.

With a cache, queries are the last positions of the keys: a mask aligned to the lower right.  transformers' own sdpa
path builds that mask as a tensor, queries x keys, which rules out flash attention and costs 2 GiB at 16K x 128K.  torch
knows the mask by name, so a CUDA device needs no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ssdprof.errors import BadInputError

_NAME = "ssdprof_lower_right"
_NOT_CAUSAL_ALONE = ("sliding_window", "softcap", "s_aux", "position_bias")


@contextmanager
def lower_right_attention(model: Any) -> Iterator[None]:
    """While the context is open, `model` (a transformers model) attends causally from the lower right.

    Only for prompts without padding.  A model that was cut before its first attention layer would build the mask, too.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, _no_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001
    scaling: float | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """query (b, heads, q, d), key and value (b, key heads, k, d) -> (b, q, heads, d), as transformers calls it."""
    from torch.nn.attention.bias import causal_lower_right

    for name in _NOT_CAUSAL_ALONE:
        if extra.get(name) is not None:
            raise BadInputError(
                f"{type(module).__name__} attends with {name}: such a model takes its prompt in one piece only.",
                "Use a shorter --seq.",
            )
    out = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=causal_lower_right(query.shape[2], key.shape[2]),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


def _no_mask(*_: Any, **__: Any) -> None:
    return None
