"""The memory that a model needs in addition to its weights while its operators' inputs are captured.

`estimate_memory` uses the widths of the modules.  Against exact tracking of live tensors in one decoder layer at
131,072 tokens (mamba2-130m to Codestral-7B, Nemotron Nano, Qwen3-Next), the mixer's part is within 6 % for SSD, and 0
to 25 % too high for GDN.  `predict_memory` runs the model's own code on the meta device, where tensors have shapes and
dtypes but no memory, and counts the bytes of live tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ssdprof import operators
from ssdprof.capture.forward import Feed, attention
from ssdprof.capture.intercept import OperatorCall, Result, intercept
from ssdprof.capture.layers import PromptBuffer, capture_bytes_per_token, conv_width, gates, token_major
from ssdprof.checkpoint.meta import Mixer, find_mixers, is_attention
from ssdprof.checkpoint.weights import layer_index
from ssdprof.core.subject import LayerRef, Serving, split_prompt
from ssdprof.core.words import size_words
from ssdprof.environment.machine import free_memory
from ssdprof.errors import MissingCapabilityError
from ssdprof.operators import tensors

# Peak of replaying a layer, in units of its inputs: the outputs of two implementations, and the unfused
# one's states of every chunk.
_REPLAY_PER_CAPTURE = 6
# Positions per block of the streamed fp32 operators, and how many fp32 tensors of a block live at once.
_BLOCK = 2048
_BLOCK_TENSORS = 10
_OUTPUT_PROJECTIONS = ("out_proj", "o_proj")
SEGMENT_LENGTHS = (16384, 8192, 4096, 2048, 1024)


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
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

    def shortest(self, seqlen: int) -> int:
        """The smallest of the peaks that all allowed lengths give."""
        return self.least(seqlen, (seqlen, *(length for length in SEGMENT_LENGTHS if length < seqlen)))


def estimate_memory(model: Any, wanted: set[int], *, depth: int) -> MemoryEstimate:
    """The memory for decoder layers 0 to `depth` while the operators of the decoder layers `wanted` are captured."""
    mixers = [mixer for mixer in find_mixers(model) if mixer.layer_index <= depth]
    item = next(model.parameters()).element_size()
    hidden = model.get_input_embeddings().embedding_dim
    kv = [
        item * sum(linear.out_features for key, linear in _linears(module).items() if key in ("k_proj", "v_proj"))
        for name, module in model.named_modules()
        if is_attention(module) and (layer_index(f"{name}.") or 0) <= depth
    ]
    widest = max(
        [_mixer_bytes(mixer, hidden, item) for mixer in mixers] + [_block_bytes(model, mixers, hidden, item, depth)]
    )
    return MemoryEstimate(
        activations=widest,
        # A cache grows by concatenation: for a moment, the largest layer is there twice.
        attention_cache=sum(kv) + max(kv, default=0),
        capture=max(capture_bytes_per_token(mixer) for mixer in mixers if mixer.layer_index in wanted),
        fixed_bytes=max(_streaming_bytes(mixer) for mixer in mixers),
    )


def decoder_layer_bytes(model: nn.Module) -> dict[int, int]:
    """Bytes of the parameters of each decoder layer."""
    sizes: dict[int, int] = {}
    for name, parameter in model.named_parameters():
        index = layer_index(name)
        if index is not None:
            sizes[index] = sizes.get(index, 0) + parameter.numel() * parameter.element_size()
    return sizes


def _mixer_bytes(mixer: Mixer, hidden: int, item: int) -> int:
    """Bytes at the gated norm after the operator, the peak of a mixer: its tensors, and three fp32 ones of the norm."""
    inner = _inner_width(mixer.module)
    linears = _linears(mixer.module).items()
    projected = sum(linear.out_features for name, linear in linears if name not in _OUTPUT_PROJECTIONS)
    return item * (2 * hidden + projected + conv_width(mixer.module) + inner) + 3 * 4 * inner


def _streaming_bytes(mixer: Mixer) -> int:
    """Bytes of our fp32 operator in plain torch, which holds a few blocks of inputs, keys and chunk-wide decays."""
    return _BLOCK_TENSORS * _BLOCK * 4 * (3 * _inner_width(mixer.module) + 64 * gates(mixer.module))


def _block_bytes(model: Any, mixers: list[Mixer], hidden: int, item: int, depth: int) -> int:
    """Bytes at the widest MLP, expert block or attention: gate, up and product, for the experts of one token."""
    inside = tuple(f"{mixer.name}." for mixer in mixers)
    chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 1
    widest = 0
    for name, parameter in model.named_parameters():
        index = layer_index(name)
        if index is None or index > depth or name.startswith(inside):
            continue
        if parameter.ndim == 2:
            widest = max(widest, 3 * max(parameter.shape))
        elif parameter.ndim == 3:  # (experts, out, in)
            widest = max(widest, 2 * chosen * sum(parameter.shape[1:]))
    return item * (2 * hidden + widest)


def _linears(module: nn.Module) -> dict[str, nn.Linear]:
    return {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}


def _inner_width(mixer: nn.Module) -> int:
    """Channels of the operator's output, which the mixer projects back to the hidden size."""
    return next(linear.in_features for name, linear in _linears(mixer).items() if name in _OUTPUT_PROJECTIONS)


# --- the length of segments


def choose_segment_length(
    model: Any, seqlen: int, layers: Sequence[LayerRef], *, batch: int = 1, free_bytes: int | None = None
) -> int:
    """Tokens per forward call: the whole prompt if it fits in the memory that the model leaves, else 16K, 8K, ... 1K.

    layers: those to capture.  free_bytes: memory on the model's device; None: read from the device.
    Raises MissingCapabilityError, with the bytes needed and with what would fit.
    """
    free = free_memory(model.device) if free_bytes is None else free_bytes
    need = estimate_memory(model, {layer.index for layer in layers}, depth=max(layer.index for layer in layers))
    for length in (seqlen, *SEGMENT_LENGTHS):
        if length <= seqlen and batch * need.least(seqlen, (length,)) <= free:
            return length
    raise _too_small(model, seqlen, need, batch=batch, free_bytes=free)


def _too_small(model: Any, seqlen: int, need: MemoryEstimate, *, batch: int, free_bytes: int) -> MissingCapabilityError:
    """The error for a prompt that does not fit at any segment length."""
    fits = []
    shorter = 1 << (seqlen - 1).bit_length() - 1  # powers of two of at least 1024
    while shorter >= SEGMENT_LENGTHS[-1] and batch * need.shortest(shorter) > free_bytes:
        shorter //= 2
    if shorter >= SEGMENT_LENGTHS[-1]:
        fits.append(f"--seq {shorter}")
    if layers := _most_layers(model, seqlen, batch, free_bytes):
        fits.append(f"--layers first:{layers}")
    needed, free = (f"{size_words(size)} ({size:,} bytes)" for size in (batch * need.shortest(seqlen), free_bytes))
    return MissingCapabilityError(
        f"A prompt of {seqlen:,} tokens needs {needed} besides the model's weights on {model.device}; {free} are free.",
        f"What fits: {' or '.join(fits)}." if fits else "No --seq or --layers fits: take a smaller model.",
    )


def _most_layers(model: Any, seqlen: int, batch: int, free_bytes: int) -> int | None:
    """The number of operator layers, from the first, that would fit without the weights of later decoder layers."""
    indices = [mixer.layer_index for mixer in find_mixers(model)]
    weights = decoder_layer_bytes(model)
    for count in range(len(indices) - 1, 0, -1):
        wanted = set(indices[:count])
        saved = sum(size for index, size in weights.items() if index > max(wanted))
        need = estimate_memory(model, wanted, depth=max(wanted))
        if batch * need.shortest(seqlen) <= free_bytes + saved:
            return count
    return None


# --- on the meta device


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch is typed in part
    """now, peak: bytes of the tensors that operations have made on a device since the context was entered."""

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self.now = 0
        self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1  # the answer to models that check whether masks are trivial
        if func is torch.ops.aten._grouped_mm.default and args[0].is_meta:
            return self._made(args[0].new_empty(args[0].shape[0], args[1].shape[-1]))  # torch's own knows bf16 only
        given = {_storage(one) for one in _tensors((args, kwargs or {}))}
        out = func(*args, **(kwargs or {}))
        for one in _tensors(out):
            if _storage(one) not in given:
                self._made(one)
        return out

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.device.type == self._device_type and storage not in self._known:
            self._known.add(storage)
            size = storage.nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, size)
        return tensor

    def _free(self, size: int) -> None:
        self.now -= size


def predict_memory(
    model: Any,
    wanted: set[int],
    *,
    seqlen: int,
    segment_length: int,
    batch: int,
    on_gpu: bool,
    serving: Serving = Serving(),  # noqa: B008
) -> int:
    """Peak bytes without the weights of `model`, on the meta device, while the decoder layers `wanted` are captured.

    seqlen: tokens of the prompt, or of all packed sequences.  on_gpu: kernels compute operators and attention
    without memory besides their outputs.  Replaying and decode steps, which are single tokens, are not included.
    """
    segments = split_prompt(max(serving.packed, default=seqlen), segment_length)  # of the longest sequence
    several = len(segments) > 1
    on_the_way = serving.chunk is not None or not (several or serving.packed)
    collected: dict[int, PromptBuffer] = {}
    taken: dict[Hashable, int] = {}  # by form of the call: bytes of intermediate results

    def compute(call: OperatorCall) -> Result:
        """Compute each form of call once, because a long one takes seconds even without values."""
        form = tensors.form(call.inputs)
        if form in taken:
            counted.peak = max(counted.peak, counted.now + taken[form])
            return _outputs(call)
        peak, counted.peak, before = counted.peak, counted.now, counted.now
        result = call.replacement()
        taken[form] = counted.peak - before
        counted.peak = max(peak, counted.peak)
        return result

    def handler(call: OperatorCall) -> Result:
        index = call.mixer.layer_index
        if index in wanted and on_the_way:
            token_major(call.inputs)  # freed again, like a captured layer that was passed on
        elif index in wanted and not on_gpu and index not in collected:
            collected[index] = PromptBuffer(call.inputs, seqlen, call.inputs.device)
        return _outputs(call) if on_gpu else compute(call)

    mixers = find_mixers(model)
    watched = attention(model, "ssdprof_memory", _attend)
    with watched, torch.no_grad(), LiveBytes("meta") as counted, intercept(mixers, handler):
        feed = Feed(model, cached=several or serving.decode > 0)
        ids = torch.empty(batch, segments[-1][1], dtype=torch.int64, device="meta")
        for start, stop in segments:
            feed(ids[:, start:stop])
    peak: int = counted.peak
    if on_the_way or not on_gpu:
        return peak
    layer = max(capture_bytes_per_token(mixer) for mixer in mixers if mixer.layer_index in wanted)
    return max(peak, batch * seqlen * layer)  # collected in main memory, and copied back after the prompt


def _outputs(call: OperatorCall) -> Result:
    """The outputs of the operator's kernels, without values."""
    device = call.inputs.device
    forms = operators.get(call.inputs.operator).judged.forms(call.inputs)
    out, final_state = (torch.empty(form.shape, dtype=form.dtype, device=device) for form in forms)
    return out, final_state


def _attend(
    module: torch.nn.Module,  # noqa: ARG001
    query: torch.Tensor,
    key: torch.Tensor,  # noqa: ARG001
    value: torch.Tensor,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    """query (b, heads, q, d) -> (b, q, heads, d): only the output needs memory, as in flash attention."""
    batch, heads, length = query.shape[:3]
    return query.new_empty(batch, length, heads, value.shape[-1]), None


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
