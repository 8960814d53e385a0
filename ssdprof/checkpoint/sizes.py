"""Reads sizes from a config.json, and refuses impossible ones before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssdprof.errors import BadInputError

LIMIT = 1 << 24  # no single size of a language model is larger; a vocabulary is at most a few 10^5
LAYER_LIMIT = 4096


class Sizes:
    """The integers of one config, checked as they are read.  `where` names the config in messages."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config = config
        self.where = where

    def get(self, key: str, default: int | None = None, *, limit: int = LIMIT, least: int = 1) -> int:
        """The integer at `key`; `default` (the model definition's own) where the config leaves it out.

        Raises BadInputError if it is not an integer, or outside of [least, limit].
        """
        value = self.config.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.refuse(f"has no {key}")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(f"has {key} = {shown(value)}, which is not an integer")
        if not least <= value <= limit:
            raise self.refuse(f"has {key} = {shown(value)}; it must be between {least} and {limit}")
        return value

    def get_auto(self, key: str, computed: int) -> int:
        """As `get`; `computed` if the value is "auto" or missing."""
        return computed if self.config.get(key) in (None, "auto") else self.get(key)

    def check_common(self) -> None:
        """Check every known size in the config, also unused ones, because the model is built from all of them."""
        for key in _AT_LEAST_ONE:
            if self.config.get(key) is not None:
                self.get(key)
        for key in _MAY_BE_ZERO:
            if self.config.get(key) is not None:
                self.get(key, least=0)

    def refuse(self, what: str) -> BadInputError:
        """The error for this config: "<where> <what>."."""
        return BadInputError(f"{self.where} {what}.", "The checkpoint's config is damaged, or not of this model type.")


_AT_LEAST_ONE = (
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
_MAY_BE_ZERO = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "moe_latent_size",
    "moe_shared_expert_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "adapter_rank",
    "num_mem_blocks",
    "max_position_embeddings",
)


def shown(value: object) -> str:
    """`value` as text for a message, shortened, because a config may hold any text."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
