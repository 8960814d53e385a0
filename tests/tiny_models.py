"""Tiny random models of every supported family, for tests of capture and checkpoint.

Each has several operator layers, and the hybrids at least one attention layer.  Weights are
generated so that the operator
does real work: decays spread over several decades, dt neither 0 nor saturated, projections that are
not almost 0.
"""

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
import transformers as tf

from ssdprof.core.target import CheckpointRef, LayerRef

VOCAB = 128
CHUNK = 32

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": CHUNK,
    "intermediate_size": 96,
}
_LINEAR = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 16,
    "num_hidden_layers": 4,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


_ROPE = {
    "rope_type": "default",
    "rope_theta": 1e6,
    "mrope_section": [1, 1, 0],
    "mrope_interleaved": True,
    "partial_rotary_factor": 0.25,
}
_FALCON = (
    _COMMON | _MAMBA | dict(num_hidden_layers=3, mamba_d_ssm=128, mamba_norm_before_gate=False)
)
_LATENT = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "num_experts_per_tok": 2, "pad_token_id": 0,
    "eos_token_id": 1, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}  # fmt: skip
_THREE_OF_FOUR = ["linear_attention"] * 3 + ["full_attention"]


def _glm(lower_bound: float | None) -> dict[str, Any]:
    text = dict(
        **_LATENT,
        q_lora_rank=16,
        n_routed_experts=4,
        linear_head_dim=16,
        linear_num_heads=4,
        index_topk=512,
        index_head_dim=16,
        index_n_heads=2,
        index_kpool=1,
        linear_lower_bound=lower_bound,
    )
    vision = dict(
        depth=1,
        hidden_size=32,
        num_heads=2,
        intermediate_size=32,
        out_hidden_size=64,
        image_size=28,
    )
    return dict(text_config=text, vision_config=vision)


Sizes = tuple[Any, dict[str, Any]]  # of a class of transformers
SSD: dict[str, Sizes] = {
    "mamba2": (
        tf.Mamba2ForCausalLM,
        dict(
            num_heads=8,
            head_dim=16,
            hidden_size=64,
            state_size=16,
            num_hidden_layers=3,
            expand=2,
            n_groups=2,
            chunk_size=CHUNK,
            vocab_size=VOCAB,
        ),
    ),
    "granitemoehybrid": (
        tf.GraniteMoeHybridForCausalLM,
        _COMMON
        | _MAMBA
        | dict(
            num_hidden_layers=4,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=64,
            layer_types=["mamba", "mamba", "attention", "mamba"],
        ),
    ),
    "bamba": (
        tf.BambaForCausalLM,
        _COMMON | _MAMBA | dict(num_hidden_layers=4, attn_layer_indices=[2]),
    ),
    "nemotron_h": (
        tf.NemotronHForCausalLM,
        _COMMON
        | dict(
            hybrid_override_pattern="M-M*ME",
            head_dim=16,
            intermediate_size=96,
            ssm_state_size=16,
            mamba_num_heads=8,
            mamba_head_dim=16,
            n_groups=2,
            chunk_size=CHUNK,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=32,
        ),
    ),
    "falcon_h1": (tf.FalconH1ForCausalLM, _FALCON | dict(mamba_rms_norm=False)),
    "falcon_h1_rms": (tf.FalconH1ForCausalLM, _FALCON | dict(mamba_rms_norm=True)),
    "zamba2": (
        tf.Zamba2ForCausalLM,
        dict(
            vocab_size=VOCAB,
            hidden_size=64,
            num_hidden_layers=6,
            num_attention_heads=4,
            n_mamba_heads=8,
            mamba_d_state=16,
            mamba_ngroups=2,
            chunk_size=CHUNK,
            intermediate_size=96,
            num_mem_blocks=2,
            use_shared_attention_adapter=True,
            adapter_rank=4,
            layers_block_type=["mamba", "mamba", "hybrid", "mamba", "hybrid", "mamba"],
        ),
    ),
}
GDN: dict[str, Sizes] = {
    "qwen3_next": (
        tf.Qwen3NextForCausalLM,
        _COMMON | _LINEAR | _EXPERTS | dict(intermediate_size=96),
    ),
    "qwen3_5_text": (
        tf.Qwen3_5ForCausalLM,
        _COMMON | _LINEAR | dict(intermediate_size=96, rope_parameters=_ROPE),
    ),
    "qwen3_5_moe_text": (
        tf.Qwen3_5MoeForCausalLM,
        _COMMON | _LINEAR | _EXPERTS | dict(rope_parameters=_ROPE),
    ),
    "olmo_hybrid": (
        tf.OlmoHybridForCausalLM,
        dict(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=4,
            pad_token_id=0,
            eos_token_id=1,
        ),
    ),
}
KDA: dict[str, Sizes] = {
    "kimi_linear": (
        tf.KimiLinearForCausalLM,
        _LATENT
        | dict(
            qk_rope_head_dim=8,
            num_local_experts=4,
            linear_head_dim=16,
            linear_num_heads=4,
            layer_types=_THREE_OF_FOUR,
        ),
    ),
    "bailing_hybrid": (
        tf.BailingHybridForCausalLM,
        _LATENT
        | dict(
            qk_rope_head_dim=8,
            num_local_experts=4,
            n_group=2,
            topk_group=1,
            head_dim=16,
            layer_types=_THREE_OF_FOUR,
        ),
    ),
}
MODELS = SSD | GDN | KDA
IN_MEMORY: dict[str, Sizes] = {  # of KDA; not cut to its text model yet
    "glm5_next": (tf.Glm5NextForConditionalGeneration, _glm(-5.0)),
    "glm5_next_softplus": (tf.Glm5NextForConditionalGeneration, _glm(None)),
}


def operator_of(name: str) -> str:
    return "ssd" if name in SSD else "gdn" if name in GDN else "kda"


# Decoder layers that hold an operator.
every_model = pytest.mark.parametrize("name", MODELS)
OPERATOR_LAYERS: dict[str, tuple[int, ...]] = {
    "mamba2": (0, 1, 2), "granitemoehybrid": (0, 1, 3), "bamba": (0, 1, 3), "nemotron_h": (0, 2, 4),
    "falcon_h1": (0, 1, 2), "falcon_h1_rms": (0, 1, 2), "zamba2": (0, 1, 2, 3, 4, 5),
    "qwen3_next": (0, 1, 2), "qwen3_5_text": (0, 1, 2), "qwen3_5_moe_text": (0, 1, 2),
    "olmo_hybrid": (0, 1, 2), **dict.fromkeys(KDA | IN_MEMORY, (0, 1, 2)),
}  # fmt: skip


def config(name: str, **sizes):
    """The config of family `name`, with other sizes."""
    kind, usual = (MODELS | IN_MEMORY)[name]
    return kind.config_class(**deepcopy(usual) | sizes)


def build(name: str, dtype: torch.dtype = torch.float32, **sizes):
    """A causal language model of family `name` in eval mode, on the CPU; always with the same
    weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind, _ = (MODELS | IN_MEMORY)[name]
        model = kind(config(name, **sizes)).eval()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("A_log"):
                    parameter.uniform_(-2, 2)
                elif parameter_name.endswith("dt_bias"):
                    parameter.uniform_(-4, 1)
                elif parameter_name.endswith(".D"):
                    parameter.normal_(1, 0.3)
                elif parameter.ndim >= 2 and (
                    "proj" in parameter_name or "conv1d" in parameter_name
                ):
                    parameter.normal_(0, 0.15)
    return model.to(dtype)


@cache
def shared(name: str):
    """`build(name)` once per process, for tests that do not change the model."""
    return build(name)


def prompt(seqlen: int, batch: int = 1) -> torch.Tensor:
    """Random token ids (batch, seqlen)."""
    return torch.randint(2, VOCAB, (batch, seqlen), generator=torch.Generator().manual_seed(1))


def layer_refs(name: str) -> tuple[LayerRef, ...]:
    """The operator layers as the checkpoint stage lists them."""
    operator = operator_of(name)
    return tuple(
        LayerRef(index=i, name=f"model.layers.{i}.mixer", operator=operator)
        for i in OPERATOR_LAYERS[name]
    )


def checkpoint_ref(name: str) -> CheckpointRef:
    return CheckpointRef(
        requested=f"tiny/{name}",
        source="local",
        repo_id=f"tiny-{name}",
        revision=None,
        model_type=shared(name).config.model_type,
        layers=layer_refs(name),
        layer_count=shared(name).config.get_text_config().num_hidden_layers,
    )
