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

from ssdprof.capture.intercept import CallCount, OperatorCall, Result, forward_replaced, intercept
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

# arguments of attention that mean more than a causal mask
_NOT_CAUSAL_ALONE = ("sliding_window", "softcap", "s_aux", "position_bias")


@contextmanager
def attention(model: PreTrainedModel, name: str, attend: Callable[..., Any]) -> Iterator[None]:
    """While the context is open, `model` (a transformers model) computes attention with `attend`,
    and builds no mask.

    name: the name under which transformers registers the function, and keeps it afterwards.
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
    """Causal attention of a segment: query (b, heads, q, d), key (b, key heads, k, d), value (b,
    key heads, k, width) -> (b, q, heads, width), and no attention weights.  Only for prompts
    without padding.  Raises BadInputError for attention that is more than causal.

    With a cache, the queries are the last positions of the keys.  transformers' sdpa path builds
    this mask as a tensor, queries x keys, which rules out flash attention and takes 2 GiB at 16K x
    128K.  torch has the mask by name, so that a CUDA device needs no tensor.
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


# the first since transformers 5.24, the second before it, the third with some models
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def counting_cache(model: PreTrainedModel, seen: Sequence[int]) -> Any | None:
    """A cache for a model without an attention layer; None for other models, which make their own.

    transformers asks a cache for the number of tokens in it, and its own cache raises without an
    attention layer.  This cache answers with `seen[0]`, the tokens fed so far.  The number only
    determines the shape of a mask, which no layer of such a model reads.
    """
    cache = transformers.DynamicCache(config=model.config)
    if any(isinstance(layer, transformers.cache_utils.CacheLayerMixin) for layer in cache.layers):
        return None

    # both functions have the signatures of transformers
    def mask_sizes(query_length: int, layer_idx: int = 0) -> tuple[int, int]:  # noqa: ARG001
        return seen[0] + query_length, 0

    cache.get_seq_length = lambda layer_idx=0: seen[0]  # noqa: ARG005
    cache.get_mask_sizes = mask_sizes
    return cache


def cache_name(model: PreTrainedModel) -> str:
    """The name of the cache among the arguments of the model's `forward`, and in its output."""
    accepted = inspect.signature(model.forward).parameters
    return next(name for name in _CACHE_NAMES if name in accepted)


# --- feeding tokens


# ids of the next tokens (b, t) -> last hidden states (b, t, hidden), or, from a model with a
# language-model head, logits (b, n, vocabulary): of the last token (n = 1), or of all t if the
# model has no option `logits_to_keep`
Feed = Callable[[Tensor], Tensor]


def feeding(model: PreTrainedModel, *, cached: bool) -> Feed:
    """A function that runs the model on the next tokens and returns its first output.

    Positions are passed explicitly, because some models otherwise start every segment at 0.  No
    attention mask is passed, because an all-ones mask costs a synchronisation and has no effect.

    cached: whether each call continues the previous one; otherwise there is only one call.
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
        """The model's first output for ids (b, t), which follow the tokens fed before."""
        nonlocal cache
        stop = seen[0] + ids.shape[1]
        arguments = {**fixed, name: cache}
        if "position_ids" in accepted:
            position_ids = torch.arange(seen[0], stop, device=ids.device)
            arguments["position_ids"] = position_ids.expand(ids.shape[0], -1)
        output = model(ids, **arguments)
        cache = output.get(name)
        seen[0] = stop
        first_output: Tensor = output[0]
        return first_output

    return feed


def prefill(model: PreTrainedModel, ids: Tensor, segment_length: int) -> Tensor:
    """Run `model` (a transformers model in eval mode) on ids (b, l) without padding.

    Returns what `Feed` returns for the last segment.  Fills the cache, as if tokens were generated
    afterwards.  Raises BadInputError if several segments need another than causal attention.
    """
    last, _ = prefilled(model, ids, segment_length, goes_on=True)
    return last


def prefilled(
    model: PreTrainedModel, ids: Tensor, segment_length: int, *, goes_on: bool
) -> tuple[Tensor, Feed]:
    """The output of `prefill`, and the `Feed` that made it.

    goes_on: whether the feed will get more tokens after the prompt, so that a prompt of one segment
        needs a cache too.
    """
    segments = split_prompt(ids.shape[1], segment_length)
    several = len(segments) > 1
    feed = feeding(model, cached=several or goes_on)
    with attention(model, "ssdprof_lower_right", _attend) if several else nullcontext():
        for start, stop in segments:
            last = feed(ids[:, start:stop])
    return last, feed


def generate(feed: Feed, last: Tensor, head: Head, count: int) -> Tensor:
    """Generate `count` tokens after a prompt, (b, count), each the most probable one.  An
    end-of-text token does not end the generation.  Every token is fed to the model, also the last
    one, so that there are `count` decode steps.

    last: the output of `feed` for the prompt.  head: computes logits from it.
    count: at least 1.
    """
    tokens = []
    for _ in range(count):
        token = head(last[:, -1:]).argmax(-1)
        tokens.append(token)
        last = feed(token)
    return torch.cat(tokens, 1)


def greedy(model: PreTrainedModel, ids: Tensor, count: int, segment_length: int) -> list[int]:
    """The ids of the `count` tokens that follow ids (1, l), each the most probable one.

    model: a causal language model in eval mode.
    count: at least 1.
    """
    last, feed = prefilled(model, ids, segment_length, goes_on=True)
    tokens: list[int] = generate(feed, last, lambda logits: logits, count)[0].tolist()
    return tokens


# --- the operators of a model replaced by a handler


@dataclass(frozen=True)
class PromptRun:
    """A prompt and the model that runs on it.  Making one raises the errors of `check_ids`.

    model: a transformers model in eval mode.
    ids: token ids (b, l), on the model's device; (1, l) for packed sequences.
    segment_length: tokens per forward call.
    model_type: the model's name in messages.
    layers: the layers whose operator calls are captured.
    serving: how a server would run the prompt.  Packed sequences go through the model one by one,
        so that nothing passes from one to the next.
    head: hidden states -> logits; None if the prompt has no decode steps.
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
        """Decoder index -> the layer, for all of `layers`.

        Raises BadInputError if there are none, or if the model has another operator, or none, in
        one of them.
        """
        if not self.layers:
            raise BadInputError("No layer was selected.")
        operator_of = {mixer.layer_index: mixer.operator for mixer in self.mixers}
        for layer in self.layers:
            if operator_of.get(layer.index) != layer.operator:
                raise BadInputError(
                    f"Layer {layer.index} of this {self.model_type} model has "
                    f"{operator_of.get(layer.index, 'no operator')}, not {layer.operator}; "
                    f"operators are in {', '.join(map(str, operator_of))}."
                )
        return {layer.index: layer for layer in self.layers}

    @property
    def segment_count(self) -> int:
        """The number of forward calls of the model for the prompt, without decode steps."""
        lengths = self.serving.packed or (self.ids.shape[1],)
        return sum(len(split_prompt(length, self.segment_length)) for length in lengths)

    @property
    def remark(self) -> str:
        """A sentence for the report on differences from a server; empty if there are none."""
        if not self.serving.packed:
            return ""
        return (
            f"The {len(self.serving.packed)} packed sequences went through the model one by one, "
            "and the inputs of its operators were concatenated, so that nothing passes from one to "
            "the next."
        )

    def calls(self, *, decode: bool) -> tuple[CallRef | None, ...]:
        """The calls of one layer's operator that are captured.  None stands for a whole prompt.

        decode: only the decode steps, which are the last calls; otherwise only those before them.
        """
        calls = self.serving.calls(self.ids.shape[1], self.ids.shape[0])
        count = len(calls) - self.serving.decode
        return calls[count:] if decode else calls[:count]

    def run(
        self,
        handler: Callable[[OperatorCall], Result],
        on_step: Callable[[OperatorCall], object] | None = None,
    ) -> int:
        """Run the model once with `handler` as its operator.  Returns the number of operator calls,
        without decode steps.

        on_step: gets the decode steps, if the prompt has any (`Serving.decode`).

        Exceptions of `handler` and `on_step`, and SsdprofError, pass through.  Other exceptions of
        the model's code become BadInputError, because a config that transformers accepts may still
        describe a model that does not run.  But torch.OutOfMemoryError becomes
        MissingCapabilityError, whichever of them raises it.  Raises BadInputError, too, if the
        model made another number of calls or steps than its mixers make (`_check`).
        """
        raised_by_handlers: list[BaseException] = []

        def noting_errors(function: Callable[[OperatorCall], T]) -> Callable[[OperatorCall], T]:
            """The function, which also adds its exceptions to `raised_by_handlers`."""

            def call_and_note(call: OperatorCall) -> T:
                try:
                    return function(call)
                except BaseException as error:
                    raised_by_handlers.append(error)
                    raise

            return call_and_note

        handler = noting_errors(handler)
        noting_step = noting_errors(on_step) if on_step and self.serving.decode else None
        try:
            with intercept(self.mixers, handler, noting_step) as count:
                self._feed()
        except torch.OutOfMemoryError as error:
            raise MissingCapabilityError(
                f"{self.model.device} ran out of memory with segments of {self.segment_length:,} "
                f"tokens: {error}",
                "Use a shorter --seq, or --layers first:N with fewer layers.",
            ) from error
        except Exception as error:
            if error in raised_by_handlers or isinstance(error, SsdprofError):
                raise
            raise BadInputError(
                f"This {self.model_type} model does not run: {library_message(error)}.",
                "Its config is damaged, or the checkpoint is newer than the installed "
                "transformers.",
            ) from error
        self._check(count)
        return count["calls"]

    def _feed(self) -> None:
        """Run the model on the prompt, one packed sequence after the other, each followed by the
        tokens that the model generates after it.
        """
        for ids in torch.split(self.ids, list(self.serving.packed) or self.ids.shape[1], 1):
            decode = self.serving.decode
            last, feed = prefilled(self.model, ids, self.segment_length, goes_on=decode > 0)
            if decode:
                assert self.head is not None, "decode steps need a head"
                generate(feed, last, self.head, decode)

    def _check(self, count: CallCount) -> None:
        """Raise BadInputError unless there are as many calls and decode steps as all mixers make.

        count: the calls and steps of all mixers together.
        """
        steps = len(self.mixers) * self.serving.decode
        if count["steps"] > steps:
            raise BadInputError(
                f"With segments of {self.segment_length} this {self.model_type} model got single "
                "tokens, which it computes by another function than its operator.",
                "Use --segment 2 or longer segments.",
            )
        expected = len(self.mixers) * self.segment_count
        if count["calls"] != expected:
            raise BadInputError(
                f"This {self.model_type} model made {count['calls']} operator calls where "
                f"{len(self.mixers)} layers and {self.segment_count} segments make {expected}: "
                "part of it bypasses its operator, and a capture would be incomplete.",
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
    """Raise BadInputError unless ids are (batch, tokens) of int64, at least one, from 0 to
    `vocabulary` - 1.
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
    """The last hidden states of `prompt.model`, a base model without a head, with `handler` in
    place of its operators: (b, l, hidden) in the model's dtype, on its device.  The prompt must
    have no decode steps.

    `logits` takes some of their positions.  All logits would be too large: for 131,072
    positions, 150,000 logits take 37 GiB in bf16, and hidden states of width 4,096 take 1 GiB.

    Raises the errors of `PromptRun.run`.
    """
    segments: list[Tensor] = []

    def collect(_module: object, _arguments: object, output: Sequence[Tensor]) -> None:
        segments.append(output[0])

    hook = prompt.model.register_forward_hook(collect)
    try:
        prompt.run(handler)
    finally:
        hook.remove()
    return segments[0] if len(segments) == 1 else torch.cat(segments, dim=1)


def logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """The logits (b, n, vocabulary) that `model`, a causal language model, computes from last
    hidden states (b, n, hidden).

    The model's own forward runs without its decoder, so that logits are scaled, capped and cast as
    in its family.
    """
    placeholder = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)

    def decoder(*_args: object, **_kwargs: object) -> _Output:
        """Stands for the forward of the decoder.  It computes nothing."""
        return _Output(hidden)

    with torch.no_grad(), forward_replaced(model.base_model, decoder):
        scores: Tensor = model(input_ids=placeholder, use_cache=False).logits
    return scores


class _Output:
    """A decoder's output that has hidden states, and None for everything else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        """None for caches, attentions and router logits."""
