"""The memory that a model needs in addition to its weights while its operators' inputs are captured
and replayed.

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

# Peak of replaying a layer, in units of its inputs: the outputs of two implementations, and the
# unfused one's states of every chunk.
REPLAY_PER_CAPTURE = 6
# What must be free on a GPU, in units of the largest sum of live tensors, because torch's allocator
# has gaps between them: 1.26 was measured with a mixture of experts.
FRAGMENTED = 1.3
SEGMENT_LENGTHS = (16384, 8192, 4096, 2048, 1024)  # of a prompt that does not fit as a whole


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch is typed in part
    """Counts the bytes of the tensors that operations make on a device inside the context.

    now: those alive.  peak: the most that were alive at once.
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
        """Runs the operation and counts those of its outputs whose storage is new.  The two
        operations that a model without weights cannot run get a result of the right shape.
        """
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1  # the answer to models that check whether masks are trivial
        if func is torch.ops.aten._grouped_mm.default and args[0].is_meta:
            # torch's own knows bf16 only
            return self._count(args[0].new_empty(args[0].shape[0], args[1].shape[-1]))
        arguments = {_storage(tensor) for tensor in _tensors((args, kwargs or {}))}
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            if _storage(tensor) not in arguments:
                self._count(tensor)
        return out

    def _count(self, tensor: Tensor) -> Tensor:
        """Count a tensor's storage, if it is new, until it is freed."""
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
    """Peak bytes without the weights of `model`, on the meta device, while the decoder layers
    `wanted` are captured.

    The first number is without replaying them.  The second is what must be free: with replaying and
    gaps, without what main memory collects.

    seqlen: tokens of the prompt, or of all packed sequences.  on_gpu: kernels compute operators and
    attention without memory besides their outputs.  Decode steps, which are single tokens, are not
    included.
    """
    longest = max(serving.packed, default=seqlen)
    # tokens in the cache when the last segment runs, which takes most
    before = longest - max(stop - start for start, stop in split_prompt(longest, segment_length))
    on_the_way = serving.chunk is not None or not (before or serving.packed)
    mixers = find_mixers(model)
    with _without_values(model, mixers), LiveBytes("meta") as live:
        feed = feeding(model, cached=before > 0 or serving.decode > 0)
        ids = torch.empty(batch, longest, dtype=torch.int64, device="meta")
        if before:
            with intercept(mixers, _outputs):
                feed(ids[:, :before])
            live.peak = live.now
        handler = _Handler(live, wanted if on_the_way else set(), on_gpu=on_gpu)
        with intercept(mixers, handler):
            feed(ids[:, before:])
    peak, replaying = live.peak, handler.replaying
    needed = FRAGMENTED if on_gpu else 1
    if on_the_way:
        return peak, int(needed * max(peak, replaying))
    layers = [
        batch * seqlen * capture_bytes_per_token(mixer)
        for mixer in mixers
        if mixer.layer_index in wanted
    ]
    # collected in main memory, and copied back after the prompt
    capturing = max(peak, *layers) if on_gpu else peak + sum(layers)
    return capturing, int(needed * max(peak, (1 + REPLAY_PER_CAPTURE) * max(layers)))


@contextmanager
def _without_values(model: PreTrainedModel, mixers: Sequence[Mixer]) -> Iterator[None]:
    """While the context is open, `model` computes its convolutions and attention by functions that
    run on the meta device, as a package's kernel does not.
    """
    with ExitStack() as restore:
        for namespace in namespaces(mixers):
            if CONVOLUTION in namespace:
                unwrapped = inspect.unwrap(namespace[CONVOLUTION])
                restore.enter_context(replaced(namespace, CONVOLUTION, unwrapped))
        restore.enter_context(attention(model, "ssdprof_memory", _attend))
        yield


class _Handler:
    """Answers the operators' calls, and counts what they take.

    replayed: decoder layers that are replayed while the model runs.  replaying: live bytes then, at
    most.
    """

    def __init__(self, live: LiveBytes, replayed: set[int], *, on_gpu: bool) -> None:
        self._live = live
        self._replayed = replayed
        self._on_gpu = on_gpu
        self._intermediates: dict[Hashable, int] = {}  # bytes, by form of the call
        self.replaying = 0

    def __call__(self, call: OperatorCall) -> Result:
        if call.mixer.layer_index in self._replayed:
            copies = token_major(call.inputs).tensors.values()
            size = sum(tensor.nbytes for tensor in copies)
            del copies  # like a captured layer that was passed on
            live_bytes = self._live.now + (1 + REPLAY_PER_CAPTURE) * size
            self.replaying = max(self.replaying, live_bytes)
        return _outputs(call) if self._on_gpu else self._computed(call)

    def _computed(self, call: OperatorCall) -> Result:
        """Computes each form of call once, because a long one takes seconds even without values."""
        live = self._live
        form = call.inputs.form
        if form in self._intermediates:
            live.peak = max(live.peak, live.now + self._intermediates[form])
            return _outputs(call)
        peak = live.peak
        start = live.now
        live.peak = start  # from here on the peak of this call alone
        result = call.replacement()
        self._intermediates[form] = live.peak - start
        live.peak = max(peak, live.peak)
        return result


def _outputs(call: OperatorCall) -> Result:
    """The outputs of the operator's kernels, without values."""
    device = call.inputs.device
    forms = call.operator.oracle.forms(call.inputs)
    out, final_state = (torch.empty(form.shape, dtype=form.dtype, device=device) for form in forms)
    return out, final_state


def _attend(
    _module: object, query: Tensor, _key: object, value: Tensor, *_: object, **__: object
) -> tuple[Tensor, None]:
    """query (b, heads, q, d) -> (b, q, heads, d): only the output needs memory, as in flash
    attention.
    """
    batch, heads, length = query.shape[:3]
    return query.new_empty(batch, length, heads, value.shape[-1]), None


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
