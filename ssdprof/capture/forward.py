"""Runs a model on a prompt, in one piece or in segments that carry the cache, and computes
logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ssdprof.capture.intercept import CallCount, OperatorCall, Result, intercept
from ssdprof.checkpoint import transformers
from ssdprof.checkpoint.mixers import Mixer, find_mixers
from ssdprof.core.target import CallRef, LayerRef, Serving, split_prompt
from ssdprof.errors import BadInputError, MissingCapabilityError, SsdprofError, library_message
from ssdprof.operators.late import lazy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
bias = lazy("torch.nn.attention.bias")  # imports torch's compiler, which takes seconds
Head = Callable[[Tensor], Tensor]  # (b, n, hidden) -> (b, n, vocabulary): logits


# --- attention and cache

_NOT_CAUSAL_ALONE = ("sliding_window", "softcap", "s_aux", "position_bias")


@contextmanager
def attention(model: PreTrainedModel, name: str, attend: Callable[..., Any]) -> Iterator[None]:
    """While the context is open, `model` (a transformers model) attends by `attend`, with no mask
    built for it.
    """
    transformers.AttentionInterface.register(name, attend)
    transformers.AttentionMaskInterface.register(name, lambda *_, **__: None)
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    scaling: float | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Causal from the lower right: query (b, heads, q, d), key and value (b, key heads, k, d) ->
    (b, q, heads, d).

    With a cache, queries are the last positions of the keys.  transformers' own sdpa path builds
    that mask as a tensor, queries x keys, which rules out flash attention and costs 2 GiB at 16K x
    128K.  torch knows the mask by name, so a CUDA device needs no tensor.  Only for prompts without
    padding.
    """
    for name in _NOT_CAUSAL_ALONE:
        if extra.get(name) is not None:
            raise BadInputError(
                f"{type(module).__name__} attends with {name}: such a model takes its prompt in "
                "one piece only.",
                "Use a shorter --seq.",
            )
    out = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=bias.causal_lower_right(query.shape[2], key.shape[2]),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


# since transformers 5.24; before it, and with some models
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def counting_cache(model: PreTrainedModel, seen: Sequence[int]) -> Any | None:
    """An empty cache for `model` with `seen[0]` tokens, or None when it has an attention layer and
    makes a fitting one.

    transformers' own cache raises without an attention layer.  The number of tokens determines the
    shape of a mask, which no layer of such a model reads.
    """
    cache = transformers.DynamicCache(config=model.config)
    if any(isinstance(layer, transformers.cache_utils.CacheLayerMixin) for layer in cache.layers):
        return None

    # the library's signatures
    def mask_sizes(query_length: int, layer_idx: int = 0) -> tuple[int, int]:  # noqa: ARG001
        return seen[0] + query_length, 0

    cache.get_seq_length = lambda layer_idx=0: seen[0]  # noqa: ARG005
    cache.get_mask_sizes = mask_sizes
    return cache


def cache_name(model: PreTrainedModel) -> str:
    """The name of `model`'s cache: of its argument of `forward`, and of the field of its output."""
    accepted = inspect.signature(model.forward).parameters
    return next(name for name in _CACHE_NAMES if name in accepted)


# --- feeding tokens


# the next tokens (b, l) -> the last hidden state, or logits
Feed = Callable[[Tensor], Tensor]


def feeding(model: PreTrainedModel, *, cached: bool) -> Feed:
    """Feeds tokens to a model, and returns its first output.  cached: each call continues the
    previous one.

    Positions are passed explicitly, because some models start every segment at 0 otherwise.  No
    attention mask is passed: an all-ones mask costs a synchronisation and has no effect.
    """
    accepted = inspect.signature(model.forward).parameters
    name = cache_name(model)
    fixed: dict[str, Any] = {"use_cache": cached}
    if "logits_to_keep" in accepted:
        fixed["logits_to_keep"] = 1
    seen = [0]  # tokens fed; a list, because the cache of `counting_cache` reads the newest number
    cache = counting_cache(model, seen) if cached else None

    @torch.no_grad()
    def feed(ids: Tensor) -> Tensor:
        """The model's first output for the next tokens, ids (b, t), after those already fed."""
        nonlocal cache
        stop = seen[0] + ids.shape[1]
        arguments = {**fixed, name: cache}
        if "position_ids" in accepted:
            arguments["position_ids"] = torch.arange(seen[0], stop, device=ids.device).expand(
                ids.shape[0], -1
            )
        output = model(ids, **arguments)
        cache = output.get(name)
        seen[0] = stop
        last: Tensor = output[0]
        return last

    return feed


def prefill(model: PreTrainedModel, ids: Tensor, segment_length: int) -> Tensor:
    """Run `model` (a transformers model in eval mode) on ids (b, l) without padding; returns the
    last hidden state of the last segment, or, of a model with a language-model head, the logits of
    its last position.  Fills the cache, as for generating tokens afterwards.
    """
    last, _ = prefilled(model, ids, segment_length, goes_on=True)
    return last


def prefilled(
    model: PreTrainedModel, ids: Tensor, segment_length: int, *, goes_on: bool
) -> tuple[Tensor, Feed]:
    """The output of `prefill`, and a `Feed` for the tokens after the prompt if it `goes_on`."""
    segments = split_prompt(ids.shape[1], segment_length)
    several = len(segments) > 1
    feed = feeding(model, cached=several or goes_on)
    with attention(model, "ssdprof_lower_right", _attend) if several else nullcontext():
        for start, stop in segments:
            last = feed(ids[:, start:stop])
    return last, feed


def generate(feed: Feed, last: Tensor, head: Head, count: int) -> Tensor:
    """Feed `count` tokens, each the most probable one after those before it; returns them, (b,
    count).

    last: the output of `feed` for the prompt.  head: computes logits from it.  An end-of-text token
    does not stop it.
    """
    tokens = []
    for _ in range(count):
        token = head(last[:, -1:]).argmax(-1)
        tokens.append(token)
        last = feed(token)
    return torch.cat(tokens, 1)


def greedy(model: PreTrainedModel, ids: Tensor, count: int, segment_length: int) -> list[int]:
    """`count` tokens after ids (1, l), each the most probable one.  model: a causal language model
    in eval mode.
    """
    last, feed = prefilled(model, ids, segment_length, goes_on=True)
    tokens: list[int] = generate(feed, last, lambda logits: logits, count)[0].tolist()
    return tokens


# --- the operators of a model replaced by a handler


@dataclass(frozen=True)
class PromptRun:
    """Token ids and the model that they go through.

    model: a transformers model in eval mode.  ids: (b, l), on its device; (1, l) for packed
    sequences.
    segment_length: tokens per forward call.  model_type: for messages.
    layers: of which the operators matter.
    serving: packed sequences go through the model one by one, so that nothing passes from one to
    the next.
    head: logits of hidden states, for decode steps.
    Raises what `check_ids` raises.
    """

    model: PreTrainedModel
    ids: Tensor
    segment_length: int
    model_type: str
    layers: tuple[LayerRef, ...] = ()
    serving: Serving = field(default_factory=Serving)
    head: Head | None = None

    def __post_init__(self) -> None:
        check_ids(self.model.get_input_embeddings().num_embeddings, self.ids)

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """Every mixer of the model, whether its calls are captured or not."""
        return find_mixers(self.model)

    @property
    def wanted(self) -> dict[int, LayerRef]:
        """`layers` by decoder index.  Raises BadInputError for none, and for a layer that no mixer
        has.
        """
        operator_of = {mixer.layer_index: mixer.operator for mixer in self.mixers}
        for layer in self.layers:
            if operator_of.get(layer.index) != layer.operator:
                raise BadInputError(
                    f"Layer {layer.index} of this {self.model_type} model has "
                    f"{operator_of.get(layer.index, 'no operator')}, not {layer.operator}; "
                    f"operators are in {', '.join(map(str, operator_of))}."
                )
        if not self.layers:
            raise BadInputError("No layer was selected.")
        return {layer.index: layer for layer in self.layers}

    @property
    def segments(self) -> int:
        """Forward calls of the model before the first decode step."""
        lengths = self.serving.packed or (self.ids.shape[1],)
        return sum(len(split_prompt(length, self.segment_length)) for length in lengths)

    @property
    def remark(self) -> str:
        """A sentence on differences from a server; empty if there are none."""
        if not self.serving.packed:
            return ""
        return (
            f"The {len(self.serving.packed)} packed sequences went through the model one by one, "
            "and the inputs of its operators were concatenated, so that nothing passes from one to "
            "the next."
        )

    def calls(self, *, decode: bool) -> tuple[CallRef | None, ...]:
        """The captured calls of one layer's operator: decode steps, or the others."""
        calls = self.serving.calls(self.ids.shape[1], self.ids.shape[0])
        return tuple(
            call for call in calls if (call is not None and call.kind == "decode") is decode
        )

    def run(
        self,
        handler: Callable[[OperatorCall], Result],
        on_step: Callable[[OperatorCall], object] | None = None,
    ) -> int:
        """Run the model once with `handler` as its operator.  Returns the number of calls, without
        steps.

        Exceptions of the handler pass through.  Exceptions of the model's code become
        BadInputError, because a config that transformers accepts may still describe a model that
        does not run.
        """
        raised: list[BaseException] = []

        def noting(function: Callable[[OperatorCall], T]) -> Callable[[OperatorCall], T]:
            """A handler that notes an exception: a model may catch it."""

            def noted(call: OperatorCall) -> T:
                try:
                    return function(call)
                except BaseException as error:
                    raised.append(error)
                    raise

            return noted

        try:
            with intercept(self.mixers, noting(handler), on_step and noting(on_step)) as count:
                self._feed()
        except torch.OutOfMemoryError as error:
            raise MissingCapabilityError(
                f"{self.model.device} ran out of memory with segments of {self.segment_length:,} "
                f"tokens: {error}",
                "Use a shorter --seq, or --layers first:N with fewer layers.",
            ) from error
        except Exception as error:
            if error in raised or isinstance(error, SsdprofError):
                raise
            raise BadInputError(
                f"This {self.model_type} model does not run: {library_message(error)}.",
                "Its config is damaged, or the checkpoint is newer than the installed "
                "transformers.",
            ) from error
        self._check(count)
        return count["calls"]

    def _feed(self) -> None:
        """Call the model with the prompt, each packed sequence by itself, and then with the tokens
        that it generates.
        """
        for ids in torch.split(self.ids, list(self.serving.packed) or self.ids.shape[1], 1):
            decode = self.serving.decode
            last, feed = prefilled(self.model, ids, self.segment_length, goes_on=decode > 0)
            if decode:
                assert self.head is not None, "decode steps need a head"
                generate(feed, last, self.head, decode)

    def _check(self, count: CallCount) -> None:
        """BadInputError unless every layer made every call."""
        steps = len(self.mixers) * self.serving.decode
        if count["steps"] > steps:
            raise BadInputError(
                f"With segments of {self.segment_length} this {self.model_type} model got single "
                "tokens, which it computes by another function than its operator.",
                "Use --segment 2 or longer segments.",
            )
        expected = len(self.mixers) * self.segments
        if count["calls"] != expected:
            raise BadInputError(
                f"This {self.model_type} model made {count['calls']} operator calls where "
                f"{len(self.mixers)} layers and {self.segments} segments make {expected}: part of "
                "it bypasses its operator, and a capture would be incomplete.",
                "Load the model without use_kernels, in eval mode.",
            )
        if count["steps"] < steps:
            raise BadInputError(
                f"This {self.model_type} model computed {count['steps']} steps where "
                f"{len(self.mixers)} layers and {self.serving.decode} generated tokens make "
                f"{steps}: it decodes in a way that cannot be captured.",
                "Leave out --decode.",
            )


def check_ids(vocabulary: int, ids: Tensor) -> None:
    """BadInputError unless ids are (batch, tokens) of int64 within a model's vocabulary of this
    size.
    """
    if ids.ndim != 2 or ids.numel() == 0 or ids.dtype != torch.int64:
        raise BadInputError(
            f"A prompt is (batch, tokens) of int64 ids, not {tuple(ids.shape)} of {ids.dtype}."
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise BadInputError(
            f"The prompt has token id {high if high >= vocabulary else low}; the model's "
            f"vocabulary has {vocabulary}.",
            "The tokenizer is not this model's: name the right one with --tokenizer.",
        )


# --- hidden states and logits


def hidden_states(prompt: PromptRun, handler: Callable[[OperatorCall], Result]) -> Tensor:
    """The last hidden states of `prompt.model`, a base model, with `handler` in place of the
    model's operators.

    131,072 positions of 150,000 logits are 37 GiB in bf16; the hidden states before them are less
    than 1 GiB.

    (b, l, hidden) in the model's dtype, on its device.  Raises what `PromptRun.run` raises.
    """
    pieces: list[Tensor] = []  # one for each segment

    def keep(_module: object, _arguments: object, output: Sequence[Tensor]) -> None:
        pieces.append(output[0])

    hook = prompt.model.register_forward_hook(keep)
    try:
        prompt.run(handler)
    finally:
        hook.remove()
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """The logits (b, n, vocabulary) of `model`, a causal language model, after hidden states (b, n,
    hidden).

    The model's own forward computes them, scaled, capped and cast as its family does; only its
    decoder is left out.
    """
    placeholder = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
    with torch.no_grad(), _decoded(model.base_model, hidden):
        scores: Tensor = model(input_ids=placeholder, use_cache=False).logits
    return scores


class _Output:
    """What a decoder returns, with the hidden states and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        """Caches, attentions and router logits: there are none."""


@contextmanager
def _decoded(base: PreTrainedModel, hidden: Tensor) -> Iterator[None]:
    """While the context is open, the decoder returns `hidden` without computing anything."""
    # of a model whose weights are in several places; else its class has the only one
    replaced = vars(base).get("forward")

    def forward(*_args: object, **_kwargs: object) -> _Output:
        return _Output(hidden)

    base.forward = forward
    try:
        yield
    finally:
        if replaced is None:
            del base.forward
        else:
            base.forward = replaced
