"""Runs a model on a prompt with its operators replaced by a handler, and turns failures into errors for the user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ssdprof.capture.intercept import CallCount, OperatorCall, Result, intercept
from ssdprof.capture.prefill import Head, generate, prefilled
from ssdprof.capture.sites import Site
from ssdprof.core.subject import CallRef, Serving, split_prompt
from ssdprof.errors import BadInputError, MissingCapabilityError, SsdprofError, library_message


@dataclass(frozen=True)
class PromptRun:
    """Token ids and the model that they go through.

    ids: (b, l); (1, l) for packed sequences.  head: logits of hidden states, for decode steps.
    """

    model: Any
    ids: torch.Tensor
    segment_length: int
    sites: tuple[Site, ...]
    model_type: str
    serving: Serving = field(default_factory=Serving)
    head: Head | None = None

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
            f"The {len(self.serving.packed)} packed sequences went through the model one by one, and the inputs of its "
            "operators were concatenated, so that nothing passes from one to the next."
        )

    def calls(self, *, decode: bool) -> tuple[CallRef | None, ...]:
        """The captured calls of one layer's operator: decode steps, or the others."""
        found = self.serving.calls(self.ids.shape[1], self.ids.shape[0])
        return tuple(call for call in found if (call is not None and call.kind == "decode") is decode)

    def run(
        self, handler: Callable[[OperatorCall], Result], on_step: Callable[[OperatorCall], object] | None = None
    ) -> int:
        """Run the model once with `handler` as its operator.  Returns the number of calls, without steps.

        Exceptions of the handler pass through.  Exceptions of the model's code become BadInputError, because a config
        that transformers accepts may still describe a model that does not run.
        """
        raised: list[BaseException] = []

        def watched(call: OperatorCall) -> Result:
            try:
                return handler(call)
            except BaseException as error:
                raised.append(error)
                raise

        def watched_step(call: OperatorCall) -> None:
            assert on_step is not None
            try:
                on_step(call)
            except BaseException as error:
                raised.append(error)
                raise

        try:
            with intercept(self.sites, watched, watched_step if on_step else None) as count:
                self._feed()
        except torch.OutOfMemoryError as error:
            raise MissingCapabilityError(
                f"{self.model.device} ran out of memory with segments of {self.segment_length:,} tokens: {error}",
                "Use a shorter --seq, or --layers first:N with fewer layers.",
            ) from error
        except Exception as error:
            if error in raised or isinstance(error, SsdprofError):
                raise
            raise BadInputError(
                f"This {self.model_type} model does not run: {library_message(error)}.",
                "Its config is damaged, or the checkpoint is newer than the installed transformers.",
            ) from error
        self._check(count)
        return count.calls

    def _feed(self) -> None:
        for ids in torch.split(self.ids, list(self.serving.packed) or self.ids.shape[1], 1):
            decode = self.serving.decode
            with prefilled(self.model, ids, self.segment_length, goes_on=decode > 0) as (last, feed):
                if decode:
                    assert self.head is not None, "decode steps need a head"
                    generate(feed, last, self.head, decode)

    def _check(self, count: CallCount) -> None:
        """BadInputError unless every layer made every call."""
        steps = len(self.sites) * self.serving.decode
        if count.steps > steps:
            raise BadInputError(
                f"With segments of {self.segment_length} this {self.model_type} model got single tokens, which it "
                "computes by another function than its operator.",
                "Use --segment 2 or longer segments.",
            )
        expected = len(self.sites) * self.segments
        if count.calls != expected:
            raise BadInputError(
                f"This {self.model_type} model made {count.calls} operator calls where {len(self.sites)} layers and "
                f"{self.segments} segments make {expected}: part of it bypasses its operator, and a capture would be "
                "incomplete.",
                "Load the model without use_kernels, in eval mode.",
            )
        if count.steps < steps:
            raise BadInputError(
                f"This {self.model_type} model computed {count.steps} steps where {len(self.sites)} layers and "
                f"{self.serving.decode} generated tokens make {steps}: it decodes in a way that cannot be captured.",
                "Leave out --decode.",
            )


def check_ids(vocabulary: int, ids: torch.Tensor) -> None:
    """BadInputError unless ids are (batch, tokens) of int64 within a model's vocabulary of this size."""
    if ids.ndim != 2 or ids.numel() == 0 or ids.dtype != torch.int64:
        raise BadInputError(f"A prompt is (batch, tokens) of int64 ids, not {tuple(ids.shape)} of {ids.dtype}.")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise BadInputError(
            f"The prompt has token id {high if high >= vocabulary else low}; the model's vocabulary has {vocabulary}.",
            "The tokenizer is not this model's: name the right one with --tokenizer.",
        )
