"""A prompt through a model, in one piece or in segments that carry the cache."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import torch

from ssdprof.capture.attention import lower_right_attention


def split_prompt(seqlen: int, segment_length: int) -> list[tuple[int, int]]:
    """Start and stop of each segment.

    A last segment of a single token joins the one before it: for one token, models call another function than their
    operator.
    """
    starts = list(range(0, seqlen, segment_length))
    if len(starts) > 1 and seqlen - starts[-1] == 1:
        starts.pop()
    return list(zip(starts, [*starts[1:], seqlen], strict=True))


def prefill(model: Any, ids: torch.Tensor, segment_length: int, *, keeps_cache: bool = False) -> torch.Tensor:
    """Run `model` (a transformers model in eval mode) on ids (b, l) without padding; returns the last hidden state
    of the last segment, or, of a model with a language-model head, the logits of its last position.

    keeps_cache: also in one piece the cache is filled, as it is where tokens are generated afterwards.

    Positions are passed explicitly, because some models start every segment at 0 otherwise.  No attention mask is
    passed: an all-ones mask costs a synchronisation and says nothing.
    """
    from ssdprof.capture.counting_cache import CountingCache, counting_cache  # brings transformers

    segments = split_prompt(ids.shape[1], segment_length)
    accepted = inspect.signature(model.forward).parameters
    cache_name = "cache_params" if "cache_params" in accepted else "past_key_values"
    use_cache = keeps_cache or len(segments) > 1
    cache = counting_cache(model) if use_cache and cache_name == "past_key_values" else None
    with torch.no_grad(), lower_right_attention(model) if len(segments) > 1 else nullcontext():
        for start, stop in segments:
            arguments: dict[str, Any] = {"use_cache": use_cache, cache_name: cache}
            if "logits_to_keep" in accepted:
                arguments["logits_to_keep"] = 1
            if "position_ids" in accepted:
                arguments["position_ids"] = torch.arange(start, stop, device=ids.device).expand(ids.shape[0], -1)
            output = model(ids[:, start:stop], **arguments)
            cache = output.get(cache_name)
            if isinstance(cache, CountingCache):
                cache.seen = stop
    last: torch.Tensor = output[0]
    return last
