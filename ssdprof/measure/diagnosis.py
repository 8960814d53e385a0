"""Describes the error of a wrong output: where it begins, and which rounding has such an error; or
why the exact output is not finite.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ssdprof import operators
from ssdprof.core import words as fmt
from ssdprof.core.accuracy import Accuracy, BudgetUse
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.oracle import joined, spans_of
from ssdprof.kernels.precision import Precision
from ssdprof.measure.accuracy import Candidate, block_length, oracle_output
from ssdprof.measure.sequences import alone, longest_of, output_of, rows_of_states
from ssdprof.operators.operator import OutputPair
from ssdprof.operators.rounding import unit_roundoff
from ssdprof.operators.tensors import dtype_name

BORDERS = (16, 32, 64, 128, 256)  # sizes of chunks and tiles, at whose multiples errors may begin
MOST_POSITIONS = 2048  # the most positions on which roundings are compared
ALIKE_RATIO = 1.5  # errors count as equally large up to this ratio
FAR_ABOVE = 16  # a row is wrong if its relative error exceeds so many unit roundoffs
COARSE = (torch.bfloat16, torch.float16)  # dtypes to which something may have been rounded


def diagnosed(
    inputs: Inputs, candidate: Candidate, accuracies: Sequence[Accuracy]
) -> tuple[Accuracy, ...]:
    """The accuracies, with a remark on each tensor that does not pass and is finite, and on the
    first tensor whose exact value is not finite.
    """
    with_remarks: list[Accuracy] = []
    exact_is_finite = True
    for accuracy in accuracies:
        if exact_is_finite and accuracy.floor.nonfinite:
            exact_is_finite = False
            accuracy = accuracy.changed(remark=_nonfinite_inputs(inputs))
        elif accuracy.reason and not accuracy.vs_oracle.nonfinite:
            accuracy = accuracy.changed(remark=_remark(inputs, candidate, accuracy))
        with_remarks.append(accuracy)
    return tuple(with_remarks)


def _remark(inputs: Inputs, candidate: Candidate, accuracy: Accuracy) -> str:
    """Where the error of a tensor begins, and a rounding that is as large.  Empty if neither is
    known, or if the tensor is within its budget and fails by another test.
    """
    exceeded = [use for use in accuracy.budget if use.error > use.budget]
    if not exceeded:
        return ""
    is_out = accuracy.tensor == "out"
    beginning = _beginning(inputs, candidate.output, is_out, exceeded[0])
    return "; ".join(filter(None, (beginning, _known_rounding(inputs, candidate, is_out))))


# --- why the exact output is not finite


def _nonfinite_inputs(inputs: Inputs) -> str:
    """The inputs that hold NaN, or else infinity, and the first place: "k and v hold NaN, first at
    position 3 of sequence 0".  If there are none, that the answer overflows.
    """
    if inputs.state_indices is not None:  # other slots of the pool do not count
        inputs = inputs.after(inputs.initial)
    for word, is_faulty in (("NaN", torch.isnan), ("infinity", torch.isinf)):
        faulty = {name: is_faulty(tensor) for name, tensor in inputs.tensors.items()}
        faulty = {name: mask for name, mask in faulty.items() if bool(mask.any())}
        if faulty:
            verb = "holds" if len(faulty) == 1 else "hold"
            return f"{fmt.words(faulty)} {verb} {word}{_first_place(inputs, faulty)}"
    return "all inputs are finite, so the exact answer overflows"


def _first_place(inputs: Inputs, faulty: dict[str, Tensor]) -> str:
    """The first sequence with a faulty element, and where in it: ", first at position 3 of sequence
    0".  Empty if no tensor with sequences is faulty.

    faulty: name of an input -> whether each of its elements is faulty.
    """
    of_positions = operators.get(inputs.operator).binding.positional(inputs)
    masks = [mask.flatten(2).any(-1) for name, mask in faulty.items() if name in of_positions]
    for span in spans_of(inputs):
        if inputs.STATES in faulty and bool(faulty[inputs.STATES][span.sequence].any()):
            return f", first in the initial state of sequence {span.sequence}"
        positions = [int(span.of(mask).byte().argmax()) for mask in masks if span.of(mask).any()]
        if positions:
            return f", first at position {min(positions)} of sequence {span.sequence}"
    return ""


# --- where an error begins


def _beginning(inputs: Inputs, output: OutputPair, is_out: bool, use: BudgetUse) -> str:
    """The first sequence in which the head of `use` is outside its budget, and where in it the
    error of `out` begins: "from position 128 of sequence 0 (300 tokens) on, a multiple of 128, all
    is wrong".  Empty if each row of all sequences is within the budget of the head.

    is_out: whether `out` is wrong; else `final_states` is.
    """
    expected = oracle_output(inputs)
    for span in spans_of(inputs):
        actual = _rows_of_head(output_of(inputs, output, span), is_out, use.head)
        exact = _rows_of_head(output_of(inputs, expected, span), is_out, use.head)
        error = actual - exact
        errors = error.abs().amax(1) if use.norm == "max" else error.square().mean(1).sqrt()
        outside = errors > use.budget
        if not bool(outside.any()):
            continue
        name = f"sequence {span.sequence} ({span.length:,} tokens)"
        if not is_out:
            return f"the first wrong state is that of {name}"
        limit = FAR_ABOVE * unit_roundoff(output[0].dtype) * exact
        is_wrong = error.square().mean(1) > limit.square().mean(1)
        first = int(outside.byte().argmax())
        return _beginning_in(name, first, _border(is_wrong.double(), first))
    return ""


def _rows_of_head(output: OutputPair, is_out: bool, head: int) -> Tensor:
    """A head of the output of one sequence, (rows, width), fp64: a row for each position of `out`,
    or for each state, flattened.
    """
    out, states = output
    return (out[0, :, head] if is_out else states[:, head].flatten(1)).double()


def _beginning_in(name: str, first: int, border: int | None) -> str:
    """A phrase that says where in a sequence the error begins.

    name: names the sequence.  first: its first position outside of the budget.  border: see
    `_border`.
    """
    if border is None:
        return f"the first position outside is {first} of {name}"
    if border == 0:
        return f"all of {name} is wrong, from its start on"
    multiple = ""
    for size in BORDERS:  # ends with the largest
        if border % size == 0:
            multiple = f", a multiple of {size},"
    return f"from position {border} of {name} on{multiple} all is wrong"


def _border(wrong: Tensor, first: int) -> int | None:
    """The position that separates right positions of a sequence from wrong ones best: at least nine
    of ten before it are right, and nine of ten from it on are wrong.  None if none does so.

    wrong: (l), 1 for a wrong position, else 0.
    first: the first position outside of the budget.  The error has begun there, or before it.
    """
    count = torch.arange(len(wrong), device=wrong.device)  # positions before each position
    wrong_before = wrong.cumsum(0) - wrong
    share_before = wrong_before / count.clamp(min=1)
    share_after = (wrong.sum() - wrong_before) / (len(wrong) - count)
    border = int((share_after - share_before)[: first + 1].argmax())
    return border if share_after[border] >= 0.9 and share_before[border] <= 0.1 else None


# --- which rounding is as large


def _known_rounding(inputs: Inputs, candidate: Candidate, is_out: bool) -> str:
    """A phrase such as "the error is as large as if states were kept in bf16"; empty if no rounding
    causes an error of this size in most heads.

    The RMS errors of heads are compared, at the beginning of the longest sequence.  For
    `final_states` it is empty if that sequence has more than `MOST_POSITIONS`.
    """
    oracle = operators.get(inputs.operator).oracle
    span = longest_of(inputs)
    index = 0 if is_out else 1  # of the tensor in an output
    heads_dim = 2 if is_out else 1
    start = replace(span, stop=min(span.stop, span.start + MOST_POSITIONS))
    if not is_out and start != span:
        return ""  # the state after the first positions is not known
    part = alone(inputs, start)
    out, states = candidate.output
    output = (
        out[span.batch, start.start : start.stop][None],
        states[rows_of_states(inputs, span)][-1:],
    )
    blocks = oracle.blocks(part, block=block_length(oracle, part))
    exact = joined(part, blocks, torch.float64, torch.float64)[index][-1:]

    def errors(rounded: OutputPair) -> Tensor:
        """The RMS error of each head, (h)."""
        heads_first = (rounded[index].double() - exact).movedim(heads_dim, 0)
        return heads_first.flatten(1).square().mean(1).sqrt()

    actual = errors(output)
    for words, form in _coarser(part, candidate.precision, exact, output[index].dtype):
        ratio = actual / errors(form)
        alike = (ratio < ALIKE_RATIO) & (ratio > 1 / ALIKE_RATIO)
        if float(alike.double().mean()) > 0.75:
            return f"the error is as large as if {words}"
    return ""


def _coarser(
    part: Inputs, precision: Precision, exact: Tensor, dtype: torch.dtype
) -> Iterator[tuple[str, OutputPair]]:
    """Roundings that the precision does not allow, in words, and outputs with them.

    part: one sequence.
    exact: its exact tensor under test, `out` or `final_states`, in fp64.
    dtype: the dtype of that tensor.
    """
    others: dict[str, Precision] = {}  # by words
    for coarse in COARSE:
        if torch.finfo(coarse).eps > torch.finfo(precision.state_dtype).eps:
            words = f"states were kept in {dtype_name(coarse)}"
            others[words] = replace(precision, state_dtype=coarse)
    if precision.exact:
        words = "intermediates were rounded to 16 bits"
        others[words] = replace(precision, intermediates="relaxed")
    for words, other in others.items():
        for form in _forms(part, other):
            yield words, form
    for coarse in COARSE:
        if torch.finfo(coarse).eps > torch.finfo(dtype).eps:
            rounded = exact.to(coarse)  # in both places: the caller reads that of its tensor
            yield f"the tensor were rounded to {dtype_name(coarse)}", (rounded, rounded)


def _forms(part: Inputs, precision: Precision) -> Iterator[OutputPair]:
    """The outputs of one sequence with the roundings of a precision: one for each chunk length,
    (1, l, h, ...) and (1, h, ...).
    """
    oracle = operators.get(part.operator).oracle
    (span,) = spans_of(part)
    for chunk in (oracle.chunk_size(part), *oracle.shorter_chunks(part)):
        form = oracle.rounded(part, precision)
        out, _ = form.advance(part, span, oracle.gate(part, span, chunk))
        yield out[None], form.state[None]
