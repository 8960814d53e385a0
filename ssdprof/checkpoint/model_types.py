"""The supported model types, and the reasons for which others are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ssdprof.checkpoint import layer_dims as dims
from ssdprof.checkpoint import layer_kinds as kinds
from ssdprof.checkpoint.layer_dims import LayerDims
from ssdprof.checkpoint.sizes import Sizes


@dataclass(frozen=True, kw_only=True)
class ModelType:
    """How to read one `model_type`.

    kinds: the kind of every decoder layer ("linear_attention", "full_attention", "hybrid", "mlp", "moe").
    paths: the operator's module path in the full model, by the kind of layers that have one.
    text_type: `model_type` of the language model inside a vision-language config; None where the config is flat.
    needs_attention: the model definition refuses a config without an attention layer.
    """

    name: str
    operator: str
    kinds: Callable[[Sizes], list[str]]
    dims: Callable[[Sizes], LayerDims]
    paths: Mapping[str, str]
    text_type: str | None = None
    needs_attention: bool = False


_MAMBA = {"linear_attention": "model.layers.{}.mamba"}
_LINEAR_ATTN = {"linear_attention": "model.layers.{}.linear_attn"}
_NESTED_LINEAR_ATTN = {"linear_attention": "model.language_model.layers.{}.linear_attn"}

_TYPES = (
    ModelType(
        name="mamba2",
        operator="ssd",
        kinds=kinds.every_layer("linear_attention", 64),
        dims=dims.mamba2_dims,
        paths={"linear_attention": "backbone.layers.{}.mixer"},
    ),
    ModelType(
        name="granitemoehybrid", operator="ssd", kinds=kinds.granite_kinds, dims=dims.expanded_dims, paths=_MAMBA
    ),
    ModelType(name="bamba", operator="ssd", kinds=kinds.bamba_kinds, dims=dims.expanded_dims, paths=_MAMBA),
    ModelType(
        name="nemotron_h",
        operator="ssd",
        kinds=kinds.nemotron_kinds,
        dims=dims.nemotron_dims,
        paths={"linear_attention": "model.layers.{}.mixer"},
    ),
    ModelType(
        name="falcon_h1",
        operator="ssd",
        kinds=kinds.every_layer("hybrid", 32),
        dims=dims.falcon_h1_dims,
        paths={"hybrid": "model.layers.{}.mamba"},
    ),
    ModelType(
        name="zamba2",
        operator="ssd",
        kinds=kinds.zamba2_kinds,
        dims=dims.zamba2_dims,
        paths={**_MAMBA, "hybrid": "model.layers.{}.mamba_decoder.mamba"},
    ),
    ModelType(
        name="qwen3_next", operator="gdn", kinds=kinds.interval_kinds(48), dims=dims.qwen_dims, paths=_LINEAR_ATTN
    ),
    ModelType(
        name="qwen3_5_text", operator="gdn", kinds=kinds.interval_kinds(32), dims=dims.qwen_dims, paths=_LINEAR_ATTN
    ),
    ModelType(
        name="qwen3_5_moe_text", operator="gdn", kinds=kinds.interval_kinds(40), dims=dims.qwen_dims, paths=_LINEAR_ATTN
    ),
    ModelType(
        name="qwen3_5",
        operator="gdn",
        kinds=kinds.interval_kinds(32),
        dims=dims.qwen_dims,
        paths=_NESTED_LINEAR_ATTN,
        text_type="qwen3_5_text",
    ),
    ModelType(
        name="qwen3_5_moe",
        operator="gdn",
        kinds=kinds.interval_kinds(40),
        dims=dims.qwen_dims,
        paths=_NESTED_LINEAR_ATTN,
        text_type="qwen3_5_moe_text",
    ),
    ModelType(
        name="olmo_hybrid",
        operator="gdn",
        kinds=kinds.olmo_kinds,
        dims=dims.olmo_dims,
        paths=_LINEAR_ATTN,
        needs_attention=True,
    ),
)

MODEL_TYPES: Mapping[str, ModelType] = {kind.name: kind for kind in _TYPES}

# Model types whose recurrent layers are another operator, each with the reason, because users try them.
OTHER_SCANS: Mapping[str, str] = {
    "mamba": "its layers are Mamba-1 (selective scan), not Mamba-2",
    "falcon_mamba": "its layers are Mamba-1 (selective scan), not Mamba-2",
    "jamba": "its recurrent layers are Mamba-1 (selective scan), not Mamba-2",
    "zamba": "its recurrent layers are Mamba-1 (selective scan), not Mamba-2",
    "kimi_linear": "its linear layers are Kimi Delta Attention (a gate per channel), not the gated delta rule",
    "bailing_hybrid": "its linear layers have a gate per channel, not the gated delta rule",
    "glm5_next": "its linear layers are Kimi Delta Attention (a gate per channel), not the gated delta rule",
    "rwkv": "its recurrence is RWKV's, neither SSD nor the gated delta rule",
    "recurrent_gemma": "its recurrence is RG-LRU, neither SSD nor the gated delta rule",
    "lfm2": "its short layers are convolutions, neither SSD nor the gated delta rule",
}
