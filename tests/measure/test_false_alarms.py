"""Correct outputs pass, even if they round at other points and sum in another order than `lo`."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from generated_inputs import generated
from kernel_cases import DTYPES, EXACT, PRECISIONS, SSDCase
from measure.conftest import random_inputs
from torch import Tensor
from verdict import assert_passes

from ssdprof import operators
from ssdprof.kernels.oracle import spans_of
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.measure.accuracy import Candidate, compare

pytestmark = pytest.mark.slow

SHAPES = {
    "one short chunk": {"seqlen": 5, "chunk_size": 16, "headdim": 16},
    "small chunks": {"seqlen": 70, "chunk_size": 16, "headdim": 16, "groups": 1},
    "a chunk of 256": {"seqlen": 300, "chunk_size": 256, "dstate": 32, "groups": 1},
}

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def other_evaluation(inputs: SSDInputs, precision: Precision) -> SSDOutput:
    """Another valid evaluation of the chunked form, for one sequence, chunk after chunk and head
    after head.

    Exponents are summed as a tree.  Weights are rounded once, and multiply B instead of x.  The
    state is rounded only when it is read.
    """
    _, length, h, p = inputs.x.shape
    g, n = inputs.B.shape[2:]
    q = inputs.chunk_size
    dtype = precision.intermediate_dtype(inputs.x.dtype)

    def relaxed(tensor: Tensor) -> Tensor:
        return tensor.to(dtype).float()

    def operand(tensor: Tensor) -> Tensor:
        return tensor.to(inputs.x.dtype).float()

    dt = torch.nn.functional.softplus(inputs.dt[0].float() + inputs.dt_bias)
    out = torch.empty(length, h, p)
    states = torch.zeros(h, p, n)
    for start in range(0, length, q):
        chunk = slice(start, min(start + q, length))
        for head in range(h):
            B, C = (tensor[0, chunk, head * g // h].float() for tensor in (inputs.B, inputs.C))
            x = inputs.x[0, chunk, head].float()
            dt_head = dt[chunk, head]
            a = tree_cumsum(dt_head * inputs.A[head])
            decay = (a[:, None] - a[None, :]).clamp(max=0).exp()
            scores = operand(relaxed(C @ B.T) * relaxed(decay * dt_head)).tril()
            entering = operand(states[head].to(precision.state_dtype).float())
            y = scores @ x + relaxed(a.exp())[:, None] * (C @ entering.T)
            out[chunk, head] = y + inputs.D[head] * x
            weights = relaxed((a[-1] - a).exp() * dt_head)
            states[head] = states[head] * a[-1].exp() + x.T @ operand(B * weights[:, None])
    return SSDOutput(out[None].to(inputs.x.dtype), states[None])


def tree_cumsum(steps: Tensor) -> Tensor:
    distance = 1
    while distance < len(steps):
        steps = steps + torch.cat([steps.new_zeros(distance), steps[:-distance]])
        distance *= 2
    return steps


def failures(inputs: SSDInputs, run: Callable[[SSDInputs, Precision], SSDOutput]) -> dict[str, str]:
    """Precision -> reason, for precisions that do not pass."""
    candidates = {
        str(precision): Candidate(output=run(inputs, precision), precision=precision)
        for precision in PRECISIONS
    }
    comparisons = compare(inputs, candidates)
    reasons = {
        name: "; ".join(tensor.reason for tensor in found if tensor.reason)
        for name, found in comparisons.items()
    }
    return {name: why for name, why in reasons.items() if why}


@dtypes
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_another_evaluation_passes(dtype: torch.dtype, shape, seed):
    inputs = random_inputs(dtype=dtype, heads=8, seed=seed, **SHAPES[shape])
    assert failures(inputs, other_evaluation) == {}


@pytest.mark.parametrize(("name", "step"), [("kda", 5e-5), ("kda", 2e-4)])
@pytest.mark.parametrize("chunk", [16, 64])
def test_roundings_that_restore_a_number_after_a_slow_decay_are_no_gain(name, step, chunk):
    """A decay that is nearer to 1 than half a unit in the last place leaves a rounded number as it
    was, at every position: such errors do not average out, and depend on the kernel's chunks.
    """
    operator = operators.get(name)
    given = generated(name, "1/1x128x128", 4096)
    inputs = replace(given, g=-2 * step * torch.rand_like(given.g))
    relaxed = Precision(intermediates="relaxed", state_dtype=torch.bfloat16)
    (span,) = spans_of(inputs)
    gate = operator.oracle.gate(inputs, span, chunk)
    out, state = operator.oracle.rounded(inputs, relaxed).advance(inputs, span, gate)
    assert_passes((out[None], state[None]), inputs, relaxed)


@pytest.mark.parametrize(
    ("dtype", "off"), [(torch.float32, 1e-4), (torch.float16, 0.02), (torch.bfloat16, 0.1)], ids=str
)
def test_a_wrong_decay_does_not_pass(dtype, off):
    """The tolerance for exponents covers only their rounding in fp32."""
    shape = SHAPES["a chunk of 256"]
    inputs, wrong = (
        random_inputs(dtype=dtype, A=-torch.linspace(1, 16, 4) * factor, **shape)
        for factor in (1, 1 + off)
    )
    candidate = Candidate(output=other_evaluation(wrong, EXACT), precision=EXACT)
    found = compare(inputs, {"wrong": candidate})["wrong"]
    assert any(tensor.reason for tensor in found)


def test_a_single_fp32_position_whose_sum_over_n_cancels():
    """Against a single `lo`, whose error may be small by chance, 40 of 150 such outputs failed."""
    for seed in range(150):
        inputs = SSDCase(seqlen=1, dstate=32, skip="", seed=seed).inputs()
        dt = torch.nn.functional.softplus(inputs.dt.float() + inputs.dt_bias)[:, 0]
        x, B, C = (one[:, 0].float() for one in (inputs.x, inputs.B, inputs.C))
        states = (dt[..., None] * x)[..., None] * B[:, :, None]
        assert_passes(SSDOutput((states * C[:, :, None]).sum(-1)[:, None], states), inputs, EXACT)
