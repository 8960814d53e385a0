"""The models of make_random_checkpoint.py: their dimensions and weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from random_weights import Draw, Weights, ones
from transformers import AutoConfig, AutoModelForCausalLM


@dataclass(frozen=True)
class Mamba2:
    """One Mamba-2 mixer."""

    hidden: int
    nheads: int
    headdim: int = 64
    dstate: int = 128
    conv_kernel: int = 4

    def weights(self, prefix: str, draw: Draw, depth: int) -> Weights:
        inner = self.nheads * self.headdim
        conv = inner + 2 * self.dstate
        dt_bias = draw.dt_bias(self.nheads)
        # z, x B C, dt
        yield f"{prefix}.in_proj.weight", draw.linear(inner + conv + self.nheads, self.hidden)
        yield (
            f"{prefix}.conv1d.weight",
            draw.normal(conv, 1, self.conv_kernel, std=1 / math.sqrt(self.conv_kernel)),
        )
        yield f"{prefix}.conv1d.bias", draw.normal(conv, std=0.1)
        yield f"{prefix}.dt_bias", dt_bias
        yield f"{prefix}.A_log", draw.a_log(self.nheads)
        yield f"{prefix}.D", ones(self.nheads)
        yield f"{prefix}.norm.weight", ones(inner)
        yield f"{prefix}.out_proj.weight", draw.linear(self.hidden, inner, 1 / math.sqrt(2 * depth))


@dataclass(frozen=True, kw_only=True)
class Granite:
    """A hybrid of ibm-granite: 36 Mamba-2 and 4 attention layers, a gated MLP after each.

    mlp: width of the dense MLP, shared if there are experts.  experts, chosen, expert: the number
    of experts, the number per token, and their width; 0 in a dense model.
    """

    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    mixer: Mamba2
    experts: int = 0
    chosen: int = 0
    expert: int = 0
    logits_scaling: int
    depth: int = 40
    fewest_layers: int = 1
    vocabulary: int = 100352
    attention_layers: tuple[int, ...] = (5, 15, 25, 35)
    embedding_multiplier: int = 12

    def config(self, layers: int) -> dict[str, object]:
        return {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "model_type": "granitemoehybrid",
            "num_hidden_layers": layers,
            "layer_types": [
                "attention" if layer in self.attention_layers else "mamba"
                for layer in range(layers)
            ],
            "hidden_size": self.hidden,
            "vocab_size": self.vocabulary,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "shared_intermediate_size": self.mlp,
            "intermediate_size": self.expert or self.mlp,
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "mamba_n_heads": self.mixer.nheads,
            "mamba_d_head": self.mixer.headdim,
            "mamba_d_state": self.mixer.dstate,
            "mamba_d_conv": self.mixer.conv_kernel,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 256,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "attention_multiplier": 1 / (self.hidden // self.heads),
            "embedding_multiplier": self.embedding_multiplier,
            "logits_scaling": self.logits_scaling,
            "residual_multiplier": 0.22,
            "position_embedding_type": "nope",
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        }

    def weights(self, layers: int, draw: Draw) -> Weights:
        head = self.hidden // self.heads
        yield (
            "model.embed_tokens.weight",
            draw.normal(self.vocabulary, self.hidden, std=1 / self.embedding_multiplier),
        )
        for layer in range(layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", ones(self.hidden)
            if layer in self.attention_layers:
                for name, outputs in (
                    ("q", self.heads * head),
                    ("k", self.kv_heads * head),
                    ("v", self.kv_heads * head),
                ):
                    yield (
                        f"{prefix}.self_attn.{name}_proj.weight",
                        draw.linear(outputs, self.hidden),
                    )
                yield (
                    f"{prefix}.self_attn.o_proj.weight",
                    draw.linear(self.hidden, self.heads * head),
                )
            else:
                yield from self.mixer.weights(f"{prefix}.mamba", draw, self.depth)
            yield f"{prefix}.post_attention_layernorm.weight", ones(self.hidden)
            yield f"{prefix}.shared_mlp.input_linear.weight", draw.linear(2 * self.mlp, self.hidden)
            yield f"{prefix}.shared_mlp.output_linear.weight", draw.linear(self.hidden, self.mlp)
            if self.experts:
                yield from self._experts(f"{prefix}.block_sparse_moe", draw)
        yield "model.norm.weight", ones(self.hidden)

    def _experts(self, prefix: str, draw: Draw) -> Weights:
        """The experts' weights, stored together as in the checkpoints."""
        into, out = 1 / math.sqrt(self.hidden), 1 / math.sqrt(self.expert)
        yield f"{prefix}.router.layer.weight", draw.linear(self.experts, self.hidden)
        yield (
            f"{prefix}.input_linear.weight",
            draw.normal(self.experts, 2 * self.expert, self.hidden, std=into),
        )
        yield (
            f"{prefix}.output_linear.weight",
            draw.normal(self.experts, self.hidden, self.expert, std=out),
        )


# ibm-granite/granite-4.0-h-1b, and granite-4.0-h-small with 72 experts a layer.
GRANITE_1B = Granite(
    hidden=1536,
    heads=12,
    kv_heads=4,
    mlp=4096,
    mixer=Mamba2(hidden=1536, nheads=48),
    logits_scaling=6,
)
GRANITE_SMALL = Granite(
    hidden=4096,
    heads=32,
    kv_heads=8,
    mlp=1536,
    mixer=Mamba2(hidden=4096, nheads=128),
    experts=72,
    chosen=10,
    expert=768,
    logits_scaling=16,
)


class Mamba2_2B:
    """state-spaces/mamba2-2.7b, in the layout of transformers."""

    depth, fewest_layers, hidden, vocabulary = 64, 1, 2560, 50288
    mixer = Mamba2(hidden, nheads=80)

    def config(self, layers: int) -> dict[str, object]:
        return {
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            "num_hidden_layers": layers,
            "hidden_size": self.hidden,
            "vocab_size": self.vocabulary,
            "num_heads": self.mixer.nheads,
            "head_dim": self.mixer.headdim,
            "state_size": self.mixer.dstate,
            "conv_kernel": self.mixer.conv_kernel,
            "n_groups": 1,
            "chunk_size": 256,
            "expand": 2,
            "layer_norm_epsilon": 1e-5,
            "residual_in_fp32": True,
            "tie_word_embeddings": True,
        }

    def weights(self, layers: int, draw: Draw) -> Weights:
        yield "backbone.embeddings.weight", draw.normal(self.vocabulary, self.hidden, std=1.0)
        for layer in range(layers):
            yield f"backbone.layers.{layer}.norm.weight", ones(self.hidden)
            yield from self.mixer.weights(f"backbone.layers.{layer}.mixer", draw, self.depth)
        yield "backbone.norm_f.weight", ones(self.hidden)


@dataclass(frozen=True)
class Defined:
    """A model by its config: names and shapes of weights come from transformers' definition.

    norms_at_zero: its norms multiply by 1 + weight, except those after the operator
    """

    depth: int
    fewest_layers: int
    norms_at_zero: bool
    dimensions: dict[str, object]

    def config(self, layers: int) -> dict[str, object]:
        kinds = [
            "full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(layers)
        ]
        return self.dimensions | {
            "num_hidden_layers": layers,
            "layer_types": kinds,
            "tie_word_embeddings": False,
        }

    def weights(self, layers: int, draw: Draw) -> Weights:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.config(layers)))
        for name, parameter in model.named_parameters():
            yield name, self._drawn(name, tuple(parameter.shape), draw)

    def _drawn(self, name: str, shape: tuple[int, ...], draw: Draw) -> torch.Tensor:
        if name.endswith(".A_log"):
            return draw.a_log(*shape)
        if name.endswith(".dt_bias"):
            return draw.dt_bias(*shape)
        if name.endswith("norm.weight"):
            at_zero = self.norms_at_zero and not name.endswith("linear_attn.norm.weight")
            return torch.zeros(shape, dtype=torch.bfloat16) if at_zero else ones(*shape)
        if name.endswith(".conv1d.weight"):
            return draw.normal(*shape, std=1 / math.sqrt(shape[-1]))
        if name.endswith("embed_tokens.weight"):
            return draw.normal(*shape, std=1.0)
        outputs, inputs = shape  # the others are projections; any other shape is an error
        return draw.linear(outputs, inputs)


# The language model of Qwen/Qwen3.5-9B: 24 gated-delta-rule and 8 attention layers, a dense gated
# MLP after each.
QWEN35_9B = Defined(
    depth=32,
    fewest_layers=1,
    norms_at_zero=True,
    dimensions={
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "vocab_size": 248320,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
)

# allenai/Olmo-Hybrid-7B: 24 gated-delta-rule layers with beta up to 2, and 8 attention layers.
OLMO_HYBRID_7B = Defined(
    depth=32,
    fewest_layers=4,  # transformers refuses a model without attention
    norms_at_zero=False,
    dimensions={
        "architectures": ["OlmoHybridForCausalLM"],
        "model_type": "olmo_hybrid",
        "hidden_size": 3840,
        "intermediate_size": 11008,
        "vocab_size": 100352,
        "num_attention_heads": 30,
        "num_key_value_heads": 30,
        "linear_num_key_heads": 30,
        "linear_num_value_heads": 30,
        "linear_key_head_dim": 96,
        "linear_value_head_dim": 192,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6,
        "pad_token_id": 100277,
        "eos_token_id": 100257,
    },
)

MODELS: dict[str, Granite | Mamba2_2B | Defined] = {
    "granite-4.0-h-1b": GRANITE_1B,
    "granite-4.0-h-small": GRANITE_SMALL,
    "mamba2-2.7b": Mamba2_2B(),
    "qwen3.5-9b": QWEN35_9B,
    "olmo-hybrid-7b": OLMO_HYBRID_7B,
}
