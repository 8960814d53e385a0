"""Decodes inputs token by token with states in a server's formats, and compares outputs and states
with fp64, head by head.
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

_DIGITS = 4  # of stored errors


def marks_of(length: int, step: int) -> tuple[int, ...]:
    """Tokens after 1, 2, 4, ... steps, and after all of them."""
    powers = (step << power for power in range(length.bit_length()))
    return (*(mark for mark in powers if mark < length), length)


def decode(
    operator: Operator,
    inputs: Inputs,
    of: LayerCall | Generated,
    options: RunOptions | BenchOptions,
    writer: Writer,
    watcher: Watcher,
    prompt_hash: str = "",
) -> None:
    """Write a case for each requested format that an interrupted report does not have.

    of: the call whose inputs these are.
    """
    task = DecodedStates(
        kind="states",
        of=of,
        step=options.decode_step,
        marks=marks_of(of.dims.seqlen, options.decode_step),
        memories=head_memories(operator, inputs),
    )
    exact: list[Output] = []
    formats = options.decode_states or ()
    with watcher.step(f"{of.where}: decoding", len(formats), unit="formats") as advance:
        for state_format in formats:
            case = Case(
                task=task,
                batch=of.dims.batch,
                seqlen=of.dims.seqlen,
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
    """The requested cases of every format on the inputs of a layer or a cell.  where, size: as
    those of a case.
    """
    for state_format in options.decode_states or ():
        case_key = f"{where}, {decoded_words(options.decode_step)}, {size}"
        yield case_key, DECODER, precision_of(state_format)


def precision_of(state_format: StateFormat) -> str:
    """ "exact, int8 states"."""
    return f"exact, {state_format.name} states"


def _decoded(
    inputs: Inputs,
    state_format: StateFormat,
    case: Case,
    task: DecodedStates,
    exact: Sequence[Output],
) -> Case:
    """The case with its errors, or with the reason why the format failed.  exact: up to each
    mark.
    """
    steps = [-(-mark // task.step) for mark in task.marks]
    try:
        out, states = stepped_states(inputs, state_format, task.step, steps)
    except BadInputError as error:  # the user's function returned no states
        return case.changed(status="failed", reason=error.message.removesuffix("."))
    except Exception as error:
        status, reason = status_of(error, inputs.device, state_format.name)
        return case.changed(status=status, reason=reason)
    parts = (out[:, start:stop] for start, stop in pairwise((0, *task.marks)))
    pairs = list(zip(parts, states, exact, strict=True))
    value_dim = inputs.values.shape[-1]
    key_dim = math.prod(inputs.states_shape[2:]) // value_dim
    bytes_of_head = state_format.state_bytes(key_dim, value_dim)
    measured = task.changed(
        out_errors=[errors_of_heads(part, right.out, 2) for part, _, right in pairs],
        state_errors=[errors_of_heads(state, right.final_states, 1) for _, state, right in pairs],
        slot_bytes=bytes_of_head and bytes_of_head * len(task.memories),
    )
    return case.changed(task=measured)


def _exact(operator: Operator, inputs: Inputs, marks: Sequence[int]) -> Iterator[Output]:
    """The output up to each mark from the one before, and the states there, in fp64."""
    given = operator.binding.positional(inputs)
    states = inputs.initial
    block = block_length(operator.oracle, inputs, inputs.device)
    for start, stop in pairwise((0, *marks)):
        part = {name: tensor[:, start:stop] for name, tensor in given.items()}
        piece = replace(inputs, **part).after(states)
        blocks = operator.oracle.blocks(piece, block)
        out, states = joined(piece, blocks, torch.float64, torch.float64)
        yield Output(out, states)


def errors_of_heads(actual: Tensor, exact: Tensor, heads: int) -> tuple[float | None, ...]:
    """RMS of the difference over RMS of `exact`, of each head; None: not finite, or nothing is
    exact.  heads: the dimension.
    """
    others = [dim for dim in range(exact.ndim) if dim != heads]
    squares = (actual.double() - exact).square().sum(others)
    ratios = torch.where(squares == 0, 0.0, squares / exact.square().sum(others)).sqrt()
    return tuple(
        float(f"{ratio:.{_DIGITS}g}") if math.isfinite(ratio) else None for ratio in ratios.tolist()
    )


def head_memories(operator: Operator, inputs: Inputs) -> tuple[int, ...]:
    """Within how many of `MEMORIES` tokens each head's mean decay leaves more than 1/1000 of the
    state.
    """
    spans = [span for span in spans_of(inputs) if span.length]
    decays = torch.stack(
        [operator.oracle.gate(inputs, span).exponents[..., -1].sum(0) for span in spans]
    ).sum(0)
    mean_log = decays / sum(span.length for span in spans)  # of one token's decay, of each head
    lengths = torch.tensor(MEMORIES, device=mean_log.device)
    remembers = mean_log[:, None] * lengths > math.log(1e-3)  # (heads, lengths)
    return tuple(remembers.sum(1).tolist())
