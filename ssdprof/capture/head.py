"""Computes a prompt's last hidden states, and from these the logits, a block of positions at a time.

131,072 positions of 150,000 logits are 37 GiB in bf16; the hidden states before them are less than 1 GiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ssdprof.capture.intercept import OperatorCall, Result
from ssdprof.capture.prompt_run import PromptRun


def hidden_states(prompt: PromptRun, handler: Callable[[OperatorCall], Result]) -> torch.Tensor:
    """The last hidden states of `prompt.model`, a base model, with `handler` in place of the model's operators.

    (b, l, hidden) in the model's dtype, on its device.  Raises what `PromptRun.run` raises.
    """
    pieces: list[torch.Tensor] = []  # one for each segment
    hook = prompt.model.register_forward_hook(lambda _module, _args, output: pieces.append(output[0]))
    try:
        prompt.run(handler)
    finally:
        hook.remove()
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The logits (b, n, vocabulary) of `model`, a causal language model, after hidden states (b, n, hidden).

    The model's own forward computes them, scaled, capped and cast as its family does; only its decoder is left out.
    """
    placeholder = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
    with torch.no_grad(), _decoded(model.base_model, hidden):
        found: torch.Tensor = model(input_ids=placeholder, use_cache=False).logits
    return found


class _Output:
    """What a decoder returns, with the hidden states and nothing else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        """Caches, attentions and router logits: there are none."""


@contextmanager
def _decoded(base: Any, hidden: torch.Tensor) -> Iterator[None]:
    """While the context is open, the decoder returns `hidden` without computing anything."""
    own = vars(base).get("forward")  # of a model whose weights are in several places; else its class has the only one
    base.forward = lambda *_args, **_kwargs: _Output(hidden)
    try:
        yield
    finally:
        if own is None:
            del base.forward
        else:
            base.forward = own
