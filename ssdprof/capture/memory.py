"""Predicts the memory that a model needs besides its weights while its operators' inputs are
captured and replayed.

The model's own code runs on the meta device, where tensors have shapes and dtypes but no memory,
and the bytes of live tensors are counted.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ssdprof.capture.conv_and_norm import CONVOLUTION
from ssdprof.capture.forward import attention, feeding
from ssdprof.capture.intercept import OperatorCall, Result, intercept, namespaces, replaced
from ssdprof.capture.layers import capture_bytes_per_token, token_major
from ssdprof.checkpoint.mixers import Mixer, find_mixers
from ssdprof.core.target import Serving, split_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Peak memory of replaying a layer, in units of its inputs: the outputs of two implementations, and
# the states of every chunk of the unfused one.
REPLAY_PER_CAPTURE = 6
# Memory that must be free on a GPU, in units of the largest sum of live tensors, because torch's
# allocator has gaps between tensors: 1.26 was measured with a mixture of experts.
FRAGMENTED = 1.3
SEGMENT_LENGTHS = (16384, 8192, 4096, 2048, 1024)  # tried for a prompt that does not fit as a whole


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch is typed in part
    """The bytes of the tensors that operations create on devices of a type inside the context.

    now: bytes of those of them that are alive.  peak: the largest value of `now` so far.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self.now = 0
        self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Run the operation and count those of its outputs whose storage is new.

        Two operations do not run on the meta device and are replaced here.
        """
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1  # as a bool, true: models read a number only to see if a mask is trivial
        if func is torch.ops.aten._grouped_mm.default and args[0].is_meta:
            # torch has it for bf16 only
            return self._count(args[0].new_empty(args[0].shape[0], args[1].shape[-1]))
        kwargs = kwargs or {}
        storages = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        out = func(*args, **kwargs)
        for tensor in _tensors(out):
            if _storage(tensor) not in storages:
                self._count(tensor)
        return out

    def _count(self, tensor: Tensor) -> Tensor:
        """Count a tensor's storage, if it is new, until it is freed.  Returns the tensor."""
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
    model: PreTrainedModel,
    wanted: set[int],
    *,
    seqlen: int,
    segment_length: int,
    batch: int,
    on_gpu: bool,
    serving: Serving = Serving(),  # noqa: B008
) -> tuple[int, int]:
    """Peak memory of a capture, in bytes and without the weights.

    Returns two numbers: the peak while layers are captured and not replayed, and the memory that
    must be free on the device to capture and replay them, on a GPU with gaps of the allocator, but
    without the inputs that are concatenated in main memory.

    model: a model on the meta device.
    wanted: indices of the decoder layers that are captured, at least one.
    seqlen: tokens of each prompt, or of all packed sequences together.
    segment_length: tokens that the model gets at a time.
    batch: number of prompts.
    on_gpu: whether kernels compute operators and attention, without memory besides their outputs.
    serving: how a server would run the prompt: in chunks, or packed.

    Decode steps are not included, because they have single tokens.
    """
    longest = max(serving.packed, default=seqlen)
    # Tokens in the cache when the last segment runs, which needs the most memory.  The last segment
    # counts as long as the longest one.
    before = longest - max(stop - start for start, stop in split_prompt(longest, segment_length))
    # whether each layer's inputs are passed on, and replayed, while the model runs
    on_the_way = serving.chunk is not None or not (before or serving.packed)
    mixers = find_mixers(model)
    with _without_values(model, mixers), LiveBytes("meta") as live:
        feed = feeding(model, cached=before > 0 or serving.decode > 0)
        ids = torch.empty(batch, longest, dtype=torch.int64, device="meta")
        if before:
            with intercept(mixers, _outputs):
                feed(ids[:, :before])
            live.peak = live.now  # a run feeds these tokens in segments, and here they are one
        handler = _Handler(live, wanted if on_the_way else set(), on_gpu=on_gpu)
        with intercept(mixers, handler):
            feed(ids[:, before:])
    peak, replaying = live.peak, handler.replaying
    fragmented = FRAGMENTED if on_gpu else 1
    if on_the_way:
        return peak, int(fragmented * max(peak, replaying))
    layers = [
        batch * seqlen * capture_bytes_per_token(mixer)
        for mixer in mixers
        if mixer.layer_index in wanted
    ]
    # the inputs are concatenated in main memory, and copied to the device after the prompt
    capturing = max(peak, *layers) if on_gpu else peak + sum(layers)
    return capturing, int(fragmented * max(peak, (1 + REPLAY_PER_CAPTURE) * max(layers)))


@contextmanager
def _without_values(model: PreTrainedModel, mixers: Sequence[Mixer]) -> Iterator[None]:
    """While the context is open, the model computes convolutions and attention by functions that
    run on the meta device.  A package's kernel would not.
    """
    with ExitStack() as restore:
        for namespace in namespaces(mixers):
            if CONVOLUTION in namespace:
                unwrapped = inspect.unwrap(namespace[CONVOLUTION])
                restore.enter_context(replaced(namespace, CONVOLUTION, unwrapped))
        restore.enter_context(attention(model, "ssdprof_memory", _attend))
        yield


class _Handler:
    """A handler of operator calls that counts their memory.

    replayed: indices of the decoder layers that are replayed while the model runs.
    on_gpu: see `predict_memory`.
    replaying: the largest number of live bytes during a replay; 0 if there was none.
    """

    def __init__(self, live: LiveBytes, replayed: set[int], *, on_gpu: bool) -> None:
        self._live = live
        self._replayed = replayed
        self._on_gpu = on_gpu
        # form of a call -> bytes of its intermediates and its output at their peak
        self._intermediates: dict[Hashable, int] = {}
        self.replaying = 0

    def __call__(self, call: OperatorCall) -> Result:
        if call.mixer.layer_index in self._replayed:
            copies = token_major(call.inputs).tensors.values()
            size = sum(tensor.nbytes for tensor in copies)
            del copies  # `size` counts them until the end of the replay
            live_bytes = self._live.now + (1 + REPLAY_PER_CAPTURE) * size
            self.replaying = max(self.replaying, live_bytes)
        return _outputs(call) if self._on_gpu else self._computed(call)

    def _computed(self, call: OperatorCall) -> Result:
        """The result of a call with the memory of its intermediates.

        Each form of call is computed once, because a long one takes seconds even without values.
        """
        live = self._live
        form = call.inputs.form
        if form in self._intermediates:
            live.peak = max(live.peak, live.now + self._intermediates[form])
            return _outputs(call)
        earlier_peak = live.peak
        start = live.now
        live.peak = start  # so that it becomes the peak of this call alone
        result = call.replacement()
        self._intermediates[form] = live.peak - start
        live.peak = max(earlier_peak, live.peak)
        return result


def _outputs(call: OperatorCall) -> Result:
    """Tensors in the shapes and dtypes of the operator's output, on the meta device."""
    return call.operator.oracle.forms(call.inputs)


def _attend(
    _module: object, query: Tensor, _key: object, value: Tensor, *_: object, **__: object
) -> tuple[Tensor, None]:
    """Stands for attention: query (b, heads, q, d), value (b, key heads, k, width) -> (b, q, heads,
    width), and no attention weights.  Only the output needs memory, as in flash attention.
    """
    batch, heads, length = query.shape[:3]
    return query.new_empty(batch, length, heads, value.shape[-1]), None


def _tensors(tree: object) -> list[Tensor]:
    """The tensors among the arguments or results of an operation."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    """Identifies a tensor's storage while that is alive."""
    address: int = tensor.untyped_storage()._cdata
    return address
