"""The language model's head: what the base model's last hidden state says of the next token.

A capture runs the base model alone.  Only decode steps need the head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ssdprof.checkpoint.located import Located
from ssdprof.errors import BadInputError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def stored_head(located: Located) -> tuple[str, str, int] | None:
    """Name, file and bytes of the head's weight; None where the embeddings serve as the head."""
    if located.description.config.get("tie_word_embeddings") is True:
        return None
    return located.weights.head()


def load_head(located: Located, model: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """(b, hidden) -> (b, vocabulary): scores of the next token, in the order of the model's own.

    Models scale these scores and bend them, which changes no order.  Downloads the head's file where it is not here.
    BadInputError for a head in codes that only its quantisation decodes.
    """
    import torch
    from safetensors import safe_open

    found = stored_head(located)
    if found is None:
        weight: torch.Tensor = model.get_input_embeddings().weight
    else:
        name, file, _ = found
        with safe_open(located.source.path(file), framework="pt") as opened:
            weight = opened.get_tensor(name)
        if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise BadInputError(
                f"The head of {located.ref.repo_id} is quantised to {weight.dtype}, and decode steps need it.",
                "Leave out --decode, or take the unquantised checkpoint.",
            )
        weight = weight.to(model.device, model.dtype)

    def head(hidden: torch.Tensor) -> torch.Tensor:
        return hidden.to(weight.dtype) @ weight.T

    return head
