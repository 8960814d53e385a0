"""Runs a model on a prompt, in one piece or in segments that carry the cache, and generates the tokens after it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ssdprof.capture.attention import lower_right_attention
from ssdprof.core.subject import split_prompt

Head = Callable[[torch.Tensor], torch.Tensor]  # (b, n, hidden) -> (b, n, vocabulary): logits


class Feed:
    """Feeds tokens to a model.  cached: each call continues the previous one.

    Positions are passed explicitly, because some models start every segment at 0 otherwise.  No attention mask is
    passed: an all-ones mask costs a synchronisation and has no effect.
    """

    def __init__(self, model: Any, *, cached: bool) -> None:
        from ssdprof.capture.cache import cache_name, counting_cache  # imports transformers

        self._model, self._cached = model, cached
        accepted = inspect.signature(model.forward).parameters
        self._positions = "position_ids" in accepted
        self._keeps_logits = "logits_to_keep" in accepted
        self._cache_name = cache_name(model)
        self._cache = counting_cache(model) if cached else None
        self._seen = 0

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """The model's first output, its last hidden state or logits, for the next tokens (b, l)."""
        from ssdprof.capture.cache import CountingCache

        start, stop = self._seen, self._seen + ids.shape[1]
        arguments: dict[str, Any] = {"use_cache": self._cached, self._cache_name: self._cache}
        if self._positions:
            arguments["position_ids"] = torch.arange(start, stop, device=ids.device).expand(ids.shape[0], -1)
        if self._keeps_logits:
            arguments["logits_to_keep"] = 1
        output = self._model(ids, **arguments)
        self._cache, self._seen = output.get(self._cache_name), stop
        if isinstance(self._cache, CountingCache):
            self._cache.seen = stop
        last: torch.Tensor = output[0]
        return last


def prefill(model: Any, ids: torch.Tensor, segment_length: int, *, keeps_cache: bool = False) -> torch.Tensor:
    """Run `model` (a transformers model in eval mode) on ids (b, l) without padding; returns the last hidden state
    of the last segment, or, of a model with a language-model head, the logits of its last position.

    keeps_cache: fill the cache also if the prompt is one piece, as for generating tokens afterwards.
    """
    with prefilled(model, ids, segment_length, goes_on=keeps_cache) as (last, _):
        return last


@contextmanager
def prefilled(
    model: Any, ids: torch.Tensor, segment_length: int, *, goes_on: bool = False
) -> Iterator[tuple[torch.Tensor, Feed]]:
    """The output of `prefill`, and a `Feed` for the tokens after the prompt, valid in the context if it `goes_on`."""
    segments = split_prompt(ids.shape[1], segment_length)
    several = len(segments) > 1
    with torch.no_grad():
        feed = Feed(model, cached=several or goes_on)
        with lower_right_attention(model) if several else nullcontext():
            for start, stop in segments:
                last = feed(ids[:, start:stop])
        yield last, feed


def generate(feed: Feed, last: torch.Tensor, head: Head, count: int) -> torch.Tensor:
    """Feed `count` tokens, each the most probable one after those before it; returns them, (b, count).

    last: the output of `feed` for the prompt.  head: computes logits from it.  An end-of-text token does not stop it.
    """
    tokens = []
    for _ in range(count):
        token = head(last[:, -1:]).argmax(-1)
        tokens.append(token)
        last = feed(token)
    return torch.cat(tokens, 1)


def greedy(model: Any, ids: torch.Tensor, count: int, segment_length: int) -> list[int]:
    """`count` tokens after ids (1, l), each the most probable one.  model: a causal language model in eval mode."""
    with prefilled(model, ids, segment_length, goes_on=True) as (last, feed):
        tokens: list[int] = generate(feed, last, lambda logits: logits, count)[0].tolist()
    return tokens
