"""The sequences of any operator's inputs: where they are, and calls that consist of some."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from ssdprof import operators
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.oracle import Span, spans_of, state_row
from ssdprof.operators.operator import Output


def longest_of(inputs: Inputs) -> Span:
    return max(spans_of(inputs), key=lambda span: span.length)


def is_packed(inputs: Inputs) -> bool:
    return inputs.cu_seqlens is not None


def lengths_in_words(inputs: Inputs) -> str:
    """ "2 x 321 tokens", or "a pack of 1, 17, 0 and 303 tokens"."""
    if not is_packed(inputs):
        return "{} x {:,} tokens".format(*inputs.values.shape[:2])
    *first, last = (f"{span.length:,}" for span in spans_of(inputs))
    return f"a pack of {', '.join(first)} and {last} tokens"


def rows_of_states(inputs: Inputs, span: Span) -> slice:
    """The rows of a sequence in the final states."""
    every = inputs.state_every
    if not every:
        return slice(span.sequence, span.sequence + 1)
    stop = span.stop + every - 1  # the last piece may be shorter
    return slice(state_row(inputs, span.batch, span.start), state_row(inputs, span.batch, stop))


def output_of(inputs: Inputs, output: Output, span: Span) -> Output:
    """The part of an output that belongs to a sequence, as that of a call of it alone."""
    out, states = output
    return span.of(out)[None], states[rows_of_states(inputs, span)]


def joined(inputs: Inputs, spans: Sequence[Span], *, packed: bool) -> Inputs:
    """These spans with the initial states of their sequences: as a pack, or as rows, which have
    equal lengths.
    """
    binding = operators.get(inputs.operator).binding
    tensors = inputs.tensors
    changes: dict[str, torch.Tensor | None] = {}
    for name, tensor in binding.positional(inputs).items():
        parts = [span.of(tensor) for span in spans]
        changes[name] = torch.cat(parts)[None] if packed else torch.stack(parts)
    rows = [span.sequence for span in spans]
    for name in ("state_indices",) if "state_indices" in tensors else inputs.LINEAR[1:]:
        changes[name] = tensors[name][rows] if name in tensors else None
    if packed:
        bounds = [0, *accumulate(span.length for span in spans)]
        changes["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=inputs.device)
    elif is_packed(inputs):
        changes["cu_seqlens"] = None
    return replace(inputs, **changes)


def alone(inputs: Inputs, span: Span) -> Inputs:
    """A sequence, or a part of one, that is not packed."""
    return joined(inputs, [span], packed=False)


def amplified(inputs: Inputs, spans: Sequence[Span], factor: float) -> Inputs:
    """With inputs reversed in time and values times a factor in these spans."""
    binding = operators.get(inputs.operator).binding
    changed = {name: tensor.clone() for name, tensor in binding.positional(inputs).items()}
    for span in spans:
        for tensor in changed.values():
            part = span.of(tensor)
            part.copy_(part.flip(0))
        changed[inputs.LINEAR[0]][span.batch, span.start : span.stop] *= factor
    return replace(inputs, **changed)
