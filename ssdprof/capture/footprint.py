"""The memory that a model needs in addition to its weights while its operator inputs are captured.

An estimate from the widths of the loaded modules.  Against exact tracking of live tensors in one decoder layer at
131,072 tokens (mamba2-130m to Codestral-7B, Nemotron Nano, Qwen3-Next), the mixer's part is within 6 % for SSD and 0 to
25 % too high for GDN.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ssdprof import operators
from ssdprof.capture.sites import Site, find_sites, is_attention

# Peak of replaying a layer, in units of its inputs: the outputs of two implementations, and the unfused
# one's states of every chunk.
_REPLAY_PER_CAPTURE = 6
# Positions per block of the streamed fp32 operators, and how many fp32 tensors of a block live at once.
_BLOCK = 2048
_BLOCK_TENSORS = 10
_OUTPUT_PROJECTIONS = ("out_proj", "o_proj")


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes per token of the prompt, for a batch of one."""

    activations: int  # live in the widest decoder layer
    attention_cache: int  # keys and values of every attention layer
    capture: int  # inputs of the widest wanted operator
    fixed_bytes: int

    def one_shot(self, seqlen: int) -> int:
        """Peak bytes when the whole prompt is one forward call and layers are replayed during it."""
        per_token = self.activations + self.capture * (1 + _REPLAY_PER_CAPTURE)
        return seqlen * per_token + self.fixed_bytes

    def segmented(self, seqlen: int, segment_length: int) -> int:
        """Peak bytes when the prompt is processed in segments and layers are replayed afterwards."""
        prefill = segment_length * self.activations + seqlen * self.attention_cache
        return max(prefill, seqlen * self.capture * (1 + _REPLAY_PER_CAPTURE)) + self.fixed_bytes

    def chunked(self, seqlen: int, chunk: int) -> int:
        """Peak bytes when the prompt is processed in chunks and each chunk is replayed immediately."""
        return self.one_shot(chunk) + seqlen * self.attention_cache

    def least(self, seqlen: int, segment_lengths: Iterable[int]) -> int:
        """The smallest of the peaks that these segment lengths give."""
        return min(
            self.one_shot(seqlen) if length >= seqlen else self.segmented(seqlen, length) for length in segment_lengths
        )


def footprint(model: Any, wanted: set[int], *, depth: int) -> Footprint:
    """The memory for decoder layers 0 to `depth` while the operators of the decoder layers `wanted` are captured."""
    sites = [site for site in find_sites(model) if site.layer_index <= depth]
    item = next(model.parameters()).element_size()
    hidden = model.get_input_embeddings().embedding_dim
    kv = [_kv_width(module) * item for module in _attention_layers(model, depth)]
    widest = max(
        [_mixer_bytes(site, hidden, item) for site in sites] + [_block_bytes(model, sites, hidden, item, depth)]
    )
    return Footprint(
        activations=widest,
        # A cache grows by concatenation: for a moment, the largest layer is there twice.
        attention_cache=sum(kv) + max(kv, default=0),
        capture=max(capture_bytes_per_token(site) for site in sites if site.layer_index in wanted),
        fixed_bytes=max(_streaming_bytes(site) for site in sites),
    )


def capture_bytes_per_token(site: Site) -> int:
    """Bytes of the operator's inputs for one position."""
    item = next(site.mixer.parameters()).element_size()
    heads = site.mixer.A_log.numel()  # type: ignore[operator]
    per_head = operators.get(site.operator).binding.gate_bytes(item)
    return item * _conv_width(site.mixer) + per_head * heads


def decoder_layer_bytes(model: nn.Module) -> dict[int, int]:
    """Bytes of the parameters of each decoder layer."""
    sizes: dict[int, int] = {}
    for name, parameter in model.named_parameters():
        index = _decoder_layer(name)
        if index is not None:
            sizes[index] = sizes.get(index, 0) + parameter.numel() * parameter.element_size()
    return sizes


def _mixer_bytes(site: Site, hidden: int, item: int) -> int:
    """Bytes at the gated norm after the operator, which is the peak of a mixer.

    Live tensors are the residual, the layer's input, the input projection (its gate and dt are views), the output of
    the convolution (x, B, C or q, k, v are views), the operator's output, and three fp32 tensors of the norm.
    """
    inner = _inner_width(site.mixer)
    projected = sum(
        module.out_features
        for name, module in site.mixer.named_children()
        if isinstance(module, nn.Linear) and name not in _OUTPUT_PROJECTIONS
    )
    return item * (2 * hidden + projected + _conv_width(site.mixer) + inner) + 3 * 4 * inner


def _streaming_bytes(site: Site) -> int:
    """Bytes of our fp32 operator in plain torch, which holds a few blocks of inputs, keys and chunk-wide decays."""
    heads = site.mixer.A_log.numel()  # type: ignore[operator]
    return _BLOCK_TENSORS * _BLOCK * 4 * (3 * _inner_width(site.mixer) + 64 * heads)


def _block_bytes(model: Any, sites: list[Site], hidden: int, item: int, depth: int) -> int:
    """Bytes at the widest MLP, expert block or attention: gate, up and product, for the experts of one token."""
    mixers = tuple(f"{site.name}." for site in sites)
    chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 1
    widest = 0
    for name, parameter in model.named_parameters():
        index = _decoder_layer(name)
        if index is None or index > depth or name.startswith(mixers):
            continue
        if parameter.ndim == 2:
            widest = max(widest, 3 * max(parameter.shape))
        elif parameter.ndim == 3:  # (experts, out, in)
            widest = max(widest, 2 * chosen * sum(parameter.shape[1:]))
    return item * (2 * hidden + widest)


def _attention_layers(model: nn.Module, depth: int) -> list[nn.Module]:
    return [
        module
        for name, module in model.named_modules()
        if is_attention(module) and (_decoder_layer(f"{name}.") or 0) <= depth
    ]


def _kv_width(attention: nn.Module) -> int:
    return sum(
        module.out_features
        for name, module in attention.named_children()
        if isinstance(module, nn.Linear) and name in ("k_proj", "v_proj")
    )


def _inner_width(mixer: nn.Module) -> int:
    """Channels of the operator's output, which the mixer projects back to the hidden size."""
    return next(
        module.in_features
        for name, module in mixer.named_children()
        if isinstance(module, nn.Linear) and name in _OUTPUT_PROJECTIONS
    )


def _conv_width(mixer: nn.Module) -> int:
    return sum(module.in_channels for module in mixer.children() if isinstance(module, nn.Conv1d))


def _decoder_layer(name: str) -> int | None:
    found = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return int(found[1]) if found else None
