"""The sizes of a layer's operator, from the config of each model type.

Keys and defaults are those of the model definitions in transformers >= 5.18.
"""

from __future__ import annotations

from dataclasses import dataclass

from ssdprof.checkpoint.sizes import Sizes
from ssdprof.checkpoint.sizes_of_layers import GDNSizes, SSDSizes  # TODO


@dataclass(frozen=True, kw_only=True)
class SSDLayerDims(SSDSizes):
    """The sizes of an SSD layer, with the chunk size of its config."""

    chunk_size: int

    def __str__(self) -> str:
        return f"{super().__str__()}, chunk {self.chunk_size}"


LayerDims = SSDLayerDims | GDNSizes


def _ssd(
    sizes: Sizes,
    *,
    nheads: tuple[str, int],
    headdim: int,
    dstate: tuple[str, int],
    ngroups: tuple[str, int],
    chunk: int,
) -> SSDLayerDims:
    """`nheads`, `dstate`, `ngroups` are (key, default); `headdim` and `chunk` are values."""
    heads, groups = sizes.get(*nheads), sizes.get(*ngroups)
    if heads % groups:
        raise sizes.refuse(f"has {nheads[0]} = {heads}, which {ngroups[0]} = {groups} does not divide")
    return SSDLayerDims(nheads=heads, headdim=headdim, dstate=sizes.get(*dstate), ngroups=groups, chunk_size=chunk)


def _split_inner(sizes: Sizes, heads_key: str, heads_default: int, inner: int, inner_words: str) -> int:
    """Head dimension of `inner` channels in equal heads."""
    heads = sizes.get(heads_key, heads_default)
    if inner % heads:
        raise sizes.refuse(f"has {inner_words} = {inner}, which {heads_key} = {heads} does not divide")
    return inner // heads


def _granite_like(sizes: Sizes, inner: int, inner_words: str) -> SSDLayerDims:
    """The mamba_* keys that granitemoehybrid, bamba and falcon_h1 share."""
    computed = _split_inner(sizes, "mamba_n_heads", 128, inner, inner_words)
    headdim = sizes.get_auto("mamba_d_head", computed)
    if headdim != computed:
        raise sizes.refuse(f"has mamba_d_head = {headdim}, but {inner_words} / mamba_n_heads = {computed}")
    return _ssd(
        sizes,
        nheads=("mamba_n_heads", 128),
        headdim=headdim,
        dstate=("mamba_d_state", 256),
        ngroups=("mamba_n_groups", 1),
        chunk=sizes.get("mamba_chunk_size", 256),
    )


def expanded_dims(sizes: Sizes) -> LayerDims:
    inner = sizes.get("mamba_expand", 2) * sizes.get("hidden_size", 4096)
    return _granite_like(sizes, inner, "mamba_expand * hidden_size")


def falcon_h1_dims(sizes: Sizes) -> LayerDims:
    if "mamba_d_ssm" in sizes.config and sizes.config["mamba_d_ssm"] is None:
        return expanded_dims(sizes)
    return _granite_like(sizes, sizes.get("mamba_d_ssm", 1024), "mamba_d_ssm")


def mamba2_dims(sizes: Sizes) -> LayerDims:
    inner = sizes.get("expand", 2) * sizes.get("hidden_size", 4096)
    headdim, computed = sizes.get("head_dim", 64), _split_inner(sizes, "num_heads", 128, inner, "expand * hidden_size")
    if headdim != computed:
        raise sizes.refuse(f"has head_dim = {headdim}, but expand * hidden_size / num_heads = {computed}")
    return _ssd(
        sizes,
        nheads=("num_heads", 128),
        headdim=headdim,
        dstate=("state_size", 128),
        ngroups=("n_groups", 8),
        chunk=sizes.get("chunk_size", 256),
    )


def nemotron_dims(sizes: Sizes) -> LayerDims:
    # If a config has both keys, the older one wins, as in the model definition.
    chunk_key = "mamba_chunk_size" if "mamba_chunk_size" in sizes.config else "chunk_size"
    return _ssd(
        sizes,
        nheads=("mamba_num_heads", 128),
        headdim=sizes.get("mamba_head_dim", 64),
        dstate=("ssm_state_size", 128),
        ngroups=("mamba_n_groups" if "mamba_n_groups" in sizes.config else "n_groups", 8),
        chunk=sizes.get(chunk_key, 128),
    )


def zamba2_dims(sizes: Sizes) -> LayerDims:
    inner = sizes.get("mamba_expand", 2) * sizes.get("hidden_size", 2560)
    return _ssd(
        sizes,
        nheads=("n_mamba_heads", 8),
        headdim=_split_inner(sizes, "n_mamba_heads", 8, inner, "mamba_expand * hidden_size"),
        dstate=("mamba_d_state", 64),
        ngroups=("mamba_ngroups", 1),
        chunk=sizes.get("chunk_size", 256),
    )


def _gdn(sizes: Sizes, *, key_heads: int, value_heads: int, key_dim: int, value_dim: int | None) -> GDNSizes:
    """Arguments are the defaults; a `value_dim` of None means twice the key dimension."""
    hk, hv = sizes.get("linear_num_key_heads", key_heads), sizes.get("linear_num_value_heads", value_heads)
    if hv % hk:
        raise sizes.refuse(f"has linear_num_value_heads = {hv}, which linear_num_key_heads = {hk} does not divide")
    k = sizes.get("linear_key_head_dim", key_dim)
    v = sizes.get("linear_value_head_dim", 2 * k if value_dim is None else value_dim)
    return GDNSizes(key_heads=hk, value_heads=hv, key_dim=k, value_dim=v)


def qwen_dims(sizes: Sizes) -> LayerDims:
    return _gdn(sizes, key_heads=16, value_heads=32, key_dim=128, value_dim=128)


def olmo_dims(sizes: Sizes) -> LayerDims:
    heads = sizes.get("num_attention_heads", 30)
    key_heads = sizes.get("linear_num_key_heads", heads)
    key_dim = sizes.get("hidden_size", 3840) * 3 // (4 * key_heads)
    return _gdn(sizes, key_heads=key_heads, value_heads=heads, key_dim=key_dim, value_dim=None)
