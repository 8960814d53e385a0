"""Makes the demo models before training, and writes their folders."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

COMMON = {
    "vocab_size": 256,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "initializer_range": 0.05,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": "bfloat16",
}
CONFIGS = {
    "demo": COMMON
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 5,
        "layer_types": ["mamba", "mamba", "attention", "mamba", "mamba"],
        "mamba_n_heads": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "attention_multiplier": 32**-0.5,
        "position_embedding_type": None,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 256,
        "rms_norm_eps": 1e-5,
    },
    "demo-gdn": COMMON
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "layer_types": [
            "linear_attention",
            "linear_attention",
            "linear_attention",
            "full_attention",
        ],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "intermediate_size": 256,
        "rms_norm_eps": 1e-6,
    },
    "demo-kda": COMMON
    | {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "num_hidden_layers": 4,
        "layer_types": [
            "linear_attention",
            "linear_attention",
            "linear_attention",
            "full_attention",
        ],
        "mlp_layer_types": ["dense"] * 4,
        "linear_num_heads": 2,
        "linear_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,  # transformers ties none of this type
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "intermediate_size": 256,
        "rms_norm_eps": 1e-5,
    },
}
SEED = 0


def new_model(name: str) -> torch.nn.Module:
    """Random weights; A and dt start as in Mamba-2: A uniform in 1..16, dt log-uniform in
    1e-3..1e-1.
    """
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**CONFIGS[name]), dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(1, 16).log_()
            elif name.endswith("dt_bias"):
                dt = torch.empty_like(parameter).uniform_(math.log(1e-3), math.log(1e-1)).exp()
                parameter.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
    return model


def byte_characters() -> dict[str, int]:
    """The character that stands for each byte in byte-level tokenizers: itself if it prints, else
    one from 256 on.
    """
    printing = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = [byte for byte in range(256) if byte not in printing]
    return {
        chr(byte if byte in printing else 256 + others.index(byte)): byte for byte in range(256)
    }


def save(model: torch.nn.Module, name: str, folder: Path) -> None:
    """Write the folder as a hub repository has it: weights in bf16, and a tokenizer whose ids are
    the bytes.
    """
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": byte_characters(), "merges": []},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in (
        ("config.json", CONFIGS[name]),
        ("generation_config.json", {"max_new_tokens": 256}),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", settings),
    ):
        (folder / file).write_text(
            json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    tied = {"lm_head.weight"} if CONFIGS[name]["tie_word_embeddings"] else {}
    weights = {
        key: tensor.to(torch.bfloat16)
        for key, tensor in model.state_dict().items()
        if key not in tied
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
