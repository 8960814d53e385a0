"""The sequences in an operator's inputs, and inputs that consist of some of them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from ssdprof import operators
from ssdprof.core.words import words
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.oracle import Span, spans_of, state_row
from ssdprof.operators.operator import OutputPair


def longest_of(inputs: Inputs) -> Span:
    """The longest sequence."""
    return max(spans_of(inputs), key=lambda span: span.length)


def is_packed(inputs: Inputs) -> bool:
    """Whether the sequences follow each other in one row, with bounds in `cu_seqlens`."""
    return inputs.cu_seqlens is not None


def lengths_in_words(inputs: Inputs) -> str:
    """The lengths of the sequences in words: "2 x 321 tokens", or "a pack of 1, 17, 0 and 303
    tokens".
    """
    if not is_packed(inputs):
        batch, seqlen = inputs.values.shape[:2]
        return f"{batch} x {seqlen:,} tokens"
    return f"a pack of {words(f'{span.length:,}' for span in spans_of(inputs))} tokens"


def rows_of_states(inputs: Inputs, span: Span) -> slice:
    """The rows of `final_states` that belong to a sequence: one, or, with `state_every`, one for
    each piece.
    """
    every = inputs.state_every
    if not every:
        return slice(span.sequence, span.sequence + 1)
    stop = span.stop + every - 1  # rounds up: the last piece may be shorter
    return slice(state_row(inputs, span.batch, span.start), state_row(inputs, span.batch, stop))


def output_of(inputs: Inputs, output: OutputPair, span: Span) -> OutputPair:
    """The part of an output that belongs to a sequence, as a call of that sequence alone would
    return it.
    """
    out, states = output
    return span.of(out)[None], states[rows_of_states(inputs, span)]


def joined(inputs: Inputs, spans: Sequence[Span], *, packed: bool) -> Inputs:
    """Inputs that consist of these spans, with the initial states of their sequences.

    inputs: not those of a call in place with `accepted` or `write_indices`.
    spans: at least one.
    packed: the spans follow each other in one row; else each is a row, and they have equal lengths.
    """
    binding = operators.get(inputs.operator).binding
    tensors = inputs.tensors
    changes: dict[str, torch.Tensor | None] = {}
    for name, tensor in binding.positional(inputs).items():
        parts = [span.of(tensor) for span in spans]
        changes[name] = torch.cat(parts)[None] if packed else torch.stack(parts)
    # the initial states have a row for each sequence, unless they are slots of a pool
    by_sequence = "state_indices" if "state_indices" in tensors else inputs.STATES
    if by_sequence in tensors:
        changes[by_sequence] = tensors[by_sequence][[span.sequence for span in spans]]
    if packed:
        bounds = [0, *accumulate(span.length for span in spans)]
        changes["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=inputs.device)
    elif is_packed(inputs):
        changes["cu_seqlens"] = None
    return replace(inputs, **changes)


def alone(inputs: Inputs, span: Span) -> Inputs:
    """Inputs of one sequence, or of a part of one, that is not packed."""
    return joined(inputs, [span], packed=False)


def amplified(inputs: Inputs, spans: Sequence[Span], factor: float) -> Inputs:
    """The inputs with tensors reversed in time, and values times a factor, in these spans."""
    binding = operators.get(inputs.operator).binding
    changed = {name: tensor.clone() for name, tensor in binding.positional(inputs).items()}
    for span in spans:
        for tensor in changed.values():
            in_span = span.of(tensor)
            in_span.copy_(in_span.flip(0))
        changed[inputs.VALUES][span.batch, span.start : span.stop] *= factor
    return replace(inputs, **changed)
