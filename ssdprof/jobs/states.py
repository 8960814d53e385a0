"""Decodes inputs token by token with states in a server's formats, and compares the outputs and
states of each head with those of the fp64 oracle.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ssdprof.core.base import MEMORIES
from ssdprof.core.case import DECODER, Case, DecodedStates, Generated, LayerCall, decoded_words
from ssdprof.core.report import Requested
from ssdprof.errors import BadInputError
from ssdprof.jobs.options import BenchOptions, RunOptions
from ssdprof.kernels.inputs import Inputs, Output
from ssdprof.kernels.oracle import joined, spans_of
from ssdprof.kernels.state_formats import StateFormat
from ssdprof.measure.accuracy import block_length
from ssdprof.measure.first_run import status_of
from ssdprof.measure.isolate import while_it_runs
from ssdprof.operators.decode_states import stepped_states
from ssdprof.operators.operator import Operator
from ssdprof.progress import Watcher
from ssdprof.store.reports import Writer

_DIGITS = 4  # significant digits of stored errors


def marks_of(length: int, step: int) -> tuple[int, ...]:
    """The numbers of tokens after which errors are measured: after 1, 2, 4, ... steps, and at the
    end of `length` tokens.

    step: tokens after which states are rounded.
    """
    marks = []
    mark = step
    while mark < length:
        marks.append(mark)
        mark *= 2
    return (*marks, length)


def decode(
    operator: Operator,
    inputs: Inputs,
    call: LayerCall | Generated,
    options: RunOptions | BenchOptions,
    writer: Writer,
    watcher: Watcher,
    prompt_hash: str = "",
) -> None:
    """Decode the inputs, and write a case for each requested format, except those that an
    interrupted run or bench, which goes on now, has written.

    inputs, call: the inputs that are decoded, of sequences that are not packed, and the call that
        they come from.
    prompt_hash: hash of the prompt's tokens; empty: there is no prompt.

    Raises MissingCapabilityError if a format's kernel makes the GPU unusable.
    """
    task = DecodedStates(
        kind="states",
        of=call,
        step=options.decode_step,
        marks=marks_of(call.dims.seqlen, options.decode_step),
        memories=head_memories(operator, inputs),
    )
    exact: list[Output] = []  # of the oracle; computed once, for the first case that needs it
    formats = options.decode_states or ()
    with watcher.step(f"{call.where}: decoding", len(formats), unit="formats") as advance:
        for state_format in formats:
            case = Case(
                task=task,
                batch=call.dims.batch,
                seqlen=call.dims.seqlen,
                inputs=prompt_hash,
                implementation=DECODER,
                precision=precision_of(state_format),
                status="ran",
            )
            if case.name not in writer.earlier:
                exact = exact or list(_exact(operator, inputs, task.marks))
                with while_it_runs(case):
                    writer.case(_decoded(inputs, state_format, case, task, exact))
            advance(1)


def requested(where: str, size: str, options: RunOptions | BenchOptions) -> Iterator[Requested]:
    """The requested cases, one for each format, on the inputs of a layer or a cell.

    where, size: the layer or cell and its size, as they are in the names of cases.
    """
    for state_format in options.decode_states or ():
        case_key = f"{where}, {decoded_words(options.decode_step)}, {size}"
        yield case_key, DECODER, precision_of(state_format)


def precision_of(state_format: StateFormat) -> str:
    """The precision of the cases with states in this format: "exact, int8 states"."""
    return f"exact, {state_format.name} states"


def _decoded(
    inputs: Inputs,
    state_format: StateFormat,
    case: Case,
    task: DecodedStates,
    exact: Sequence[Output],
) -> Case:
    """The case with its errors, or with the reason why the format failed.

    exact: the fp64 output from each mark to the next, and the states at the latter.
    """
    steps = [-(-mark // task.step) for mark in task.marks]  # up to each mark, rounded up
    try:
        out, states = stepped_states(inputs, state_format, task.step, steps)
    except BadInputError as error:  # the user's function returned no states
        return case.changed(status="failed", reason=error.message.removesuffix("."))
    except Exception as error:
        status, reason = status_of(error, inputs.device, state_format.name)
        return case.changed(status=status, reason=reason)
    out_errors = []
    state_errors = []
    ranges = pairwise((0, *task.marks))
    for (start, stop), state, expected in zip(ranges, states, exact, strict=True):
        # heads are dimension 2 of out (b, l, h, p), and 1 of states (sequences, h, ...)
        out_errors.append(errors_of_heads(out[:, start:stop], expected.out, 2))
        state_errors.append(errors_of_heads(state, expected.final_states, 1))
    value_dim = inputs.values.shape[-1]
    key_dim = math.prod(inputs.states_shape[2:]) // value_dim
    head_bytes = state_format.state_bytes(key_dim, value_dim)  # None: not known
    # there is a memory for each head
    slot_bytes = None if head_bytes is None else head_bytes * len(task.memories)
    measured = task.changed(out_errors=out_errors, state_errors=state_errors, slot_bytes=slot_bytes)
    return case.changed(task=measured)


def _exact(operator: Operator, inputs: Inputs, marks: Sequence[int]) -> Iterator[Output]:
    """For each mark, the fp64 output of the tokens since the mark before (the start for the first
    one), and the fp64 states at the mark.
    """
    tensors = operator.binding.positional(inputs)
    states = inputs.initial
    block = block_length(operator.oracle, inputs)  # in positions
    for start, stop in pairwise((0, *marks)):
        tokens = {name: tensor[:, start:stop] for name, tensor in tensors.items()}
        piece = replace(inputs, **tokens).after(states)
        blocks = operator.oracle.blocks(piece, block=block)
        out, states = joined(piece, blocks, torch.float64, torch.float64)
        yield Output(out, states)


def errors_of_heads(actual: Tensor, exact: Tensor, head_dim: int) -> tuple[float | None, ...]:
    """For each head, the RMS of the difference over the RMS of `exact`, to `_DIGITS` digits.

    None for a head whose error is not finite, or whose exact values are all 0 while its actual ones
    are not.  head_dim: the dimension of both tensors along which the heads are.
    """
    other_dims = [dim for dim in range(exact.ndim) if dim != head_dim]
    squares = (actual.double() - exact).square().sum(other_dims)
    ratios = torch.where(squares == 0, 0.0, squares / exact.square().sum(other_dims)).sqrt()
    return tuple(
        float(f"{ratio:.{_DIGITS}g}") if math.isfinite(ratio) else None for ratio in ratios.tolist()
    )


def head_memories(operator: Operator, inputs: Inputs) -> tuple[int, ...]:
    """For each head, the number of `MEMORIES`, lengths in tokens, after which its mean decay leaves
    more than 1/1000 of the state: from 0 to `len(MEMORIES)`.

    A head of KDA has a decay for each channel; its slowest channel counts.
    """
    spans = [span for span in spans_of(inputs) if span.length]
    # In chunks of one position, exponents are the logarithms of single decays: (positions, heads,
    # channels), with one channel except in KDA.  Their sums are of whole sequences.
    log_decays = [operator.oracle.gate(inputs, span, 1).exponents.sum(0) for span in spans]
    tokens = sum(span.length for span in spans)
    mean_log = torch.stack(log_decays).sum(0).amax(-1) / tokens  # of one token, (heads)
    lengths = torch.tensor(MEMORIES, device=mean_log.device)
    remembers = mean_log[:, None] * lengths > math.log(1e-3)  # (heads, lengths)
    return tuple(remembers.sum(1).tolist())
