"""One prefill of a model with a handler in the place of its operators, and what is told if it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ssdprof.capture.intercept import OperatorCall, Result, intercept
from ssdprof.capture.prefill import prefill, split_prompt
from ssdprof.capture.sites import Site
from ssdprof.errors import BadInputError, MissingCapabilityError, SsdprofError, library_message


@dataclass(frozen=True)
class PromptRun:
    """A prompt, and the model that it goes through."""

    model: Any
    ids: torch.Tensor  # (b, l)
    segment_length: int
    sites: tuple[Site, ...]
    model_type: str

    @property
    def segments(self) -> int:
        return len(split_prompt(self.ids.shape[1], self.segment_length))

    def run(self, handler: Callable[[OperatorCall], Result]) -> int:
        """One prefill with `handler` at the operator's door; returns the number of operator calls.

        What the handler raises passes through.  What the model's own code raises is BadInputError: a config that
        transformers accepts may still describe a model that does not run.
        """
        raised: list[BaseException] = []

        def watched(call: OperatorCall) -> Result:
            try:
                return handler(call)
            except BaseException as error:
                raised.append(error)
                raise

        try:
            with intercept(self.sites, watched) as count:
                prefill(self.model, self.ids, self.segment_length)
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
        if count.steps:
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
        return count.calls


def check_ids(model: Any, ids: torch.Tensor) -> None:
    """BadInputError unless ids are (batch, tokens) of int64 within the model's vocabulary."""
    if ids.ndim != 2 or ids.numel() == 0 or ids.dtype != torch.int64:
        raise BadInputError(f"A prompt is (batch, tokens) of int64 ids, not {tuple(ids.shape)} of {ids.dtype}.")
    vocabulary = model.get_input_embeddings().num_embeddings
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise BadInputError(
            f"The prompt has token id {high if high >= vocabulary else low}; the model's vocabulary has {vocabulary}.",
            "The tokenizer is not this model's: name the right one with --tokenizer.",
        )
