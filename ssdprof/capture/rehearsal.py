"""Predicts the memory of a model, without its weights, while its operators' inputs are captured, on the meta device.

Tensors there have shapes and dtypes but no memory.  The model's own code runs on them, as it will on the device, and
the bytes of live tensors are counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ssdprof import operators
from ssdprof.capture.footprint import capture_bytes_per_token
from ssdprof.capture.intercept import OperatorCall, Result, intercept
from ssdprof.capture.layout import PromptBuffer, token_major
from ssdprof.capture.prefill import Feed
from ssdprof.capture.sites import find_sites
from ssdprof.core.subject import Serving, split_prompt
from ssdprof.operators import tensors

_ATTENTION = "ssdprof_rehearsal"


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


def rehearse(
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
        index = call.site.layer_index
        if index in wanted and on_the_way:
            token_major(call.inputs)  # freed again, like a captured layer that was passed on
        elif index in wanted and not on_gpu and index not in collected:
            collected[index] = PromptBuffer(call.inputs, seqlen, tensors.device(call.inputs))
        return _outputs(call) if on_gpu else compute(call)

    before = model.config._attn_implementation
    _register()
    try:
        model.set_attn_implementation(_ATTENTION)
        sites = find_sites(model)
        with torch.no_grad(), LiveBytes("meta") as counted, intercept(sites, handler):
            feed = Feed(model, cached=several or serving.decode > 0)
            ids = torch.empty(batch, segments[-1][1], dtype=torch.int64, device="meta")
            for start, stop in segments:
                feed(ids[:, start:stop])
    finally:
        model.set_attn_implementation(before)
    peak: int = counted.peak
    if on_the_way or not on_gpu:
        return peak
    layer = max(capture_bytes_per_token(site) for site in sites if site.layer_index in wanted)
    return max(peak, batch * seqlen * layer)  # collected in main memory, and copied back after the prompt


def _outputs(call: OperatorCall) -> Result:
    """The outputs of the operator's kernels, without values."""
    device = tensors.device(call.inputs)
    forms = operators.of(call.inputs).judged.forms(call.inputs)
    out, final_state = (torch.empty(form.shape, dtype=form.dtype, device=device) for form in forms)
    return out, final_state


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_ATTENTION, _attend)
    AttentionMaskInterface.register(_ATTENTION, _no_mask)


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


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _tensors(tree: Any) -> list[torch.Tensor]:
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
