"""The kind of each decoder layer, from the config of each model type.

Kinds are transformers' words: "linear_attention" (SSD or gated delta rule), "full_attention", "hybrid" (both), "mlp"
and "moe" (layers of their own).  Defaults are those of the model definitions in transformers >= 5.18.
"""

from __future__ import annotations

from collections.abc import Callable

from ssdprof.checkpoint.sizes import LAYER_LIMIT, Sizes, shown

_LEGACY_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
_PATTERN_KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_KINDS = frozenset({"linear_attention", "full_attention", "hybrid", "mlp", "moe"})


def _layer_count(sizes: Sizes, default: int) -> int:
    return sizes.get("num_hidden_layers", default, limit=LAYER_LIMIT)


def _listed_kinds(sizes: Sizes, *keys: str) -> list[str] | None:
    """The list of layer kinds under the first of `keys` that the config has, in the current names."""
    for key in keys:
        listed = sizes.config.get(key)
        if listed is None:
            continue
        if not isinstance(listed, list) or not listed or len(listed) > LAYER_LIMIT:
            raise sizes.refuse(f"has {key} = {shown(listed)}, which is not a list of 1 to {LAYER_LIMIT} layer kinds")
        kinds: list[str] = []
        for entry in listed:
            kind = _LEGACY_KINDS.get(entry, entry) if isinstance(entry, str) else None
            if kind not in _KINDS:
                raise sizes.refuse(f"names the layer kind {shown(entry)} in {key}, which ssdprof does not know")
            kinds.append(kind)
        return kinds
    return None


def _counted(sizes: Sizes, kinds: list[str], count: int, key: str) -> list[str]:
    if len(kinds) != count:
        raise sizes.refuse(f"has {len(kinds)} entries in {key}, but num_hidden_layers = {count}")
    return kinds


def every_layer(kind: str, default_count: int) -> Callable[[Sizes], list[str]]:
    return lambda sizes: [kind] * _layer_count(sizes, default_count)


def granite_kinds(sizes: Sizes) -> list[str]:
    count = _layer_count(sizes, 32)
    kinds = _listed_kinds(sizes, "layer_types", "layers_block_type")
    return ["linear_attention"] * count if kinds is None else _counted(sizes, kinds, count, "layer_types")


def bamba_kinds(sizes: Sizes) -> list[str]:
    count = _layer_count(sizes, 32)
    indices = sizes.config.get("attn_layer_indices") or []
    if not isinstance(indices, list) or not all(type(i) is int and 0 <= i < count for i in indices):
        raise sizes.refuse(f"has attn_layer_indices = {shown(indices)}, but its layers are 0 to {count - 1}")
    return ["full_attention" if i in indices else "linear_attention" for i in range(count)]


def nemotron_kinds(sizes: Sizes) -> list[str]:
    kinds = _listed_kinds(sizes, "layers_block_type", "layer_types")
    if kinds is not None:
        return kinds
    pattern = sizes.config.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not pattern or len(pattern) > LAYER_LIMIT:
        raise sizes.refuse(f"has hybrid_override_pattern = {shown(pattern)}, which is not a pattern of layers")
    if unknown := set(pattern) - set(_PATTERN_KINDS):
        raise sizes.refuse(f"has {shown(min(unknown))} in hybrid_override_pattern, which is not a kind of layer")
    return [_PATTERN_KINDS[letter] for letter in pattern]


# The pattern of Zamba2-2.7B, the default of the model definition.
ZAMBA2_DEFAULT_KINDS = ["hybrid" if i in (6, 12, 18, 24, 30, 36, 42, 47, 51) else "linear_attention" for i in range(54)]


def zamba2_kinds(sizes: Sizes) -> list[str]:
    count = _layer_count(sizes, 54)
    kinds = _listed_kinds(sizes, "layers_block_type", "layer_types")
    return _counted(sizes, ZAMBA2_DEFAULT_KINDS if kinds is None else kinds, count, "layers_block_type")


def interval_kinds(default_count: int) -> Callable[[Sizes], list[str]]:
    """Listed kinds, else full attention in every `full_attention_interval`-th layer."""

    def kinds_of(sizes: Sizes) -> list[str]:
        count = _layer_count(sizes, default_count)
        kinds = _listed_kinds(sizes, "layer_types")
        if kinds is not None:
            return _counted(sizes, kinds, count, "layer_types")
        interval = sizes.get("full_attention_interval", 4)
        return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)]

    return kinds_of


def olmo_kinds(sizes: Sizes) -> list[str]:
    kinds = interval_kinds(32)(sizes)
    if sizes.config.get("layer_types") is None and "full_attention" not in kinds:
        kinds[-1] = "full_attention"  # the model definition needs one, and does the same
    return kinds
