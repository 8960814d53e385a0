"""A model's cache: the name of its argument, and a cache for a model that was cut before its first attention layer."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

NAMES = ("cache", "past_key_values", "cache_params")  # since transformers 5.24; before it, and with some models


class CountingCache(DynamicCache):  # type: ignore[misc]  # transformers is not typed
    """Counts the tokens that it has seen.  transformers' own cache raises without an attention layer.

    The code that feeds the segments sets `seen`.  It determines the shape of a mask, which no layer here reads.
    """

    seen = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002  # the base class's signature
        return self.seen

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:  # noqa: ARG002
        """Length and offset of the keys that a query of `query_length` tokens sees."""
        return self.seen + query_length, 0


def counting_cache(model: Any) -> CountingCache | None:
    """An empty cache for `model`, or None when it has an attention layer and makes a fitting one itself."""
    cache = CountingCache(config=model.config)
    return None if any(isinstance(layer, CacheLayerMixin) for layer in cache.layers) else cache


def cache_name(model: Any) -> str:
    """The argument that takes the cache, and the field of the output that returns it, of a transformers `model`."""
    accepted = inspect.signature(model.forward).parameters
    return next(name for name in NAMES if name in accepted)
