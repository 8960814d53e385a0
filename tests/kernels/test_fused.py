"""The fused kernel, in the interpreter, against the fp64 oracle, and its other guarantees."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from ssd_cases import DTYPES, EXACT, PRECISIONS, Case, assert_close, cut, in_fp64, sequences

from ssdprof.kernels import Precision, get
from ssdprof.kernels.ssd.config import SSDPortableConfig
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.portable import buffer_sizes, find_segment, ssd_fused_portable
from ssdprof.kernels.ssd.reference import ssd_recurrence
from ssdprof.measure.accuracy import assert_passes

# segments of at most 32 positions, and slices of 16 of P: 75 positions are enough to pass states on twice
TINY = SSDPortableConfig(chunk=16, max_segments=3, min_chunks=1, max_chunks=2, block_p=16)
FP32_ROUNDING = 2e-6

CASES = [
    Case(batch=2, heads=4, groups=2),
    Case(seqlen=70, headdim=20, groups=2, skip="(h, p)", gate=True, initial_states=True),
    Case(seqlen=1, skip="", initial_states=True),
    Case(seqlen=17, headdim=32, gate=True),
    Case(batch=2, seqlen=64, dstate=32, dt_limit=(0.05, 0.1)),
    Case(lengths=(0, 1, 33, 0, 64, 5, 0), gate=True, initial_states=True),
    Case(lengths=(16, 40), skip="(h, p)"),
]


def fused(inputs: SSDInputs, precision: Precision = EXACT, config: SSDPortableConfig | None = None) -> SSDOutput:
    if config is None:
        output: SSDOutput = get("ssd", "fused").run(inputs, precision)
        return output
    return ssd_fused_portable(inputs, precision, config=config)


def assert_bitwise(ours: SSDOutput, theirs: SSDOutput) -> None:
    for name, a, b in zip(SSDOutput._fields, ours, theirs, strict=True):
        assert torch.isfinite(a).all(), f"{name} is not finite"
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(None, id="chosen"),
        pytest.param(TINY, id="tiny"),
        pytest.param(replace(TINY, p_rows=False), id="tiny, n rows", marks=pytest.mark.slow),  # see the next test
    ],
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_recurrence(case: Case, config: SSDPortableConfig | None) -> None:
    inputs = case.inputs()
    assert_close(fused(inputs, EXACT, config), ssd_recurrence(inputs), FP32_ROUNDING)


@pytest.mark.parametrize("p_rows", [True, False], ids=["p rows", "n rows"])
@pytest.mark.parametrize("block_n", [16, 32])
def test_a_state_in_blocks_of_n(block_n: int, p_rows: bool) -> None:
    case = Case(lengths=(16, 0, 75), dstate=64, groups=2, gate=True, initial_states=True)
    inputs = case.inputs()
    config = replace(TINY, block_n=block_n, p_rows=p_rows)
    assert_close(fused(inputs, EXACT, config), ssd_recurrence(inputs), FP32_ROUNDING)


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        # the default tier: every precision for bf16 inputs; for other inputs, states of the inputs' dtype
        pytest.param(
            dtype, precision, marks=() if dtype in (torch.bfloat16, precision.state_dtype) else pytest.mark.slow
        )
        for dtype in DTYPES
        for precision in PRECISIONS
    ],
    ids=str,
)
def test_precisions(dtype: torch.dtype, precision: Precision) -> None:
    inputs = Case(dtype=dtype, gate=True, initial_states=True).inputs()
    assert_passes(fused(inputs, precision, TINY), inputs, precision)


@pytest.mark.parametrize("name", ["unfused", "fused"])
def test_all_but_x_B_C_and_z_may_be_fp64(name: str) -> None:
    inputs = in_fp64(Case(gate=True, initial_states=True).inputs(), "dt", "A", "D", "dt_bias", "initial_states")
    assert_passes(get("ssd", name).run(inputs, EXACT), inputs, EXACT)


@pytest.mark.parametrize(
    ("headdim", "dstate", "heads", "groups"),
    [(32, 128, 2, 1), (64, 16, 2, 2), (64, 256, 1, 1), (80, 64, 2, 1), (96, 128, 1, 1), (128, 128, 2, 2)],
)
def test_sizes_of_models(headdim: int, dstate: int, heads: int, groups: int) -> None:
    case = Case(seqlen=20, headdim=headdim, dstate=dstate, heads=heads, groups=groups, dtype=torch.bfloat16)
    inputs = case.inputs()
    assert_passes(fused(inputs), inputs, EXACT)


def test_states_are_handed_over_in_their_dtype() -> None:
    inputs = Case(seqlen=64, dt_limit=(0.01, 0.01)).inputs()
    outputs = [fused(inputs, Precision(state_dtype=dtype), TINY) for dtype in DTYPES]
    exact = ssd_recurrence(inputs).final_states
    errors = [(output.final_states - exact).square().mean().sqrt().item() for output in outputs]
    assert errors[0] < errors[1] / 20 < errors[2] / 40  # fp32, fp16, bf16


# --- a sequence and its neighbours


def test_rows_of_a_batch_do_not_meet() -> None:
    case = Case(batch=3, seqlen=40, dtype=torch.bfloat16, gate=True, initial_states=True)
    inputs, spoilt = case.inputs(), case.inputs()
    for tensor in (spoilt.x, spoilt.dt, spoilt.B, spoilt.C, spoilt.z, spoilt.initial_states):
        assert tensor is not None
        tensor[0] = torch.nan
        tensor[2] = torch.inf
    ours, theirs = fused(inputs, EXACT, TINY), fused(spoilt, EXACT, TINY)
    assert_bitwise(SSDOutput(*(tensor[1:2] for tensor in theirs)), SSDOutput(*(tensor[1:2] for tensor in ours)))
    assert not torch.isfinite(theirs.out[0]).any()


def test_packed_sequences_do_not_meet() -> None:
    case = Case(lengths=(21, 40, 3), gate=True, initial_states=True)
    inputs, spoilt = case.inputs(), case.inputs()
    for tensor in (spoilt.x, spoilt.dt, spoilt.B, spoilt.C, spoilt.z):
        assert tensor is not None
        tensor[:, :21] = torch.nan
        tensor[:, 61:] = torch.inf
    assert spoilt.initial_states is not None
    spoilt.initial_states[0] = torch.nan
    ours, theirs = fused(inputs, EXACT, TINY), fused(spoilt, EXACT, TINY)
    assert_bitwise(
        SSDOutput(theirs.out[:, 21:61], theirs.final_states[1]), SSDOutput(ours.out[:, 21:61], ours.final_states[1])
    )


@pytest.mark.parametrize("config", [None, TINY], ids=["chosen", "tiny"])
def test_a_sequence_is_the_same_in_any_batch(config: SSDPortableConfig | None) -> None:
    inputs = Case(batch=3, seqlen=70, gate=True, initial_states=True).inputs()
    whole = fused(inputs, EXACT, config)
    order = torch.tensor([2, 0, 1])
    names = ("x", "dt", "B", "C", "z", "initial_states")
    permuted = fused(replace(inputs, **{name: getattr(inputs, name)[order] for name in names}), EXACT, config)
    assert_bitwise(permuted, SSDOutput(*(tensor[order] for tensor in whole)))
    alone = fused(replace(inputs, **{name: getattr(inputs, name)[1:2] for name in names}), EXACT, config)
    assert_bitwise(alone, SSDOutput(*(tensor[1:2] for tensor in whole)))


def test_a_sequence_is_the_same_in_any_pack() -> None:
    inputs = Case(lengths=(21, 70, 3, 33), initial_states=True).inputs()
    assert inputs.cu_seqlens is not None
    whole, bounds = fused(inputs, EXACT, TINY), inputs.cu_seqlens.tolist()
    for i, sequence in enumerate(sequences(inputs)):
        alone = fused(replace(sequence, cu_seqlens=torch.tensor([0, bounds[i + 1] - bounds[i]])), EXACT, TINY)
        expected = SSDOutput(whole.out[:, bounds[i] : bounds[i + 1]], whole.final_states[i : i + 1])
        assert_bitwise(alone, expected)


def test_two_calls_with_a_carried_state_are_one() -> None:
    inputs = Case(seqlen=100, initial_states=True).inputs()
    first = fused(cut(inputs, 0, 41), EXACT, TINY)
    second = fused(cut(inputs, 41, 100, initial_states=first.final_states), EXACT, TINY)
    together = SSDOutput(torch.cat([first.out, second.out], 1), second.final_states)
    assert_close(together, fused(inputs, EXACT, TINY), FP32_ROUNDING)


# --- extreme decays


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step", [0.0, 1e-30, 50.0, 1e4, 1e30], ids=str)
def test_steps_of_any_size(step: float, dtype: torch.dtype) -> None:
    inputs = Case(seqlen=50, dt_limit=(step, step), dtype=dtype, initial_states=True).inputs()
    assert_passes(fused(inputs, EXACT, TINY), inputs, EXACT)


def test_one_huge_step_costs_the_later_ones_no_digits() -> None:
    inputs = Case(seqlen=64).inputs()
    dt = torch.full_like(inputs.dt, 0.02)
    dt[:, ::9] = 1e9
    inputs = replace(inputs, dt=dt, dt_bias=None, dt_softplus=False)
    assert_close(fused(inputs, EXACT, TINY), ssd_recurrence(inputs), 1e-4)


def test_linear_attention() -> None:
    inputs = replace(Case(initial_states=True).inputs(), A=torch.zeros(2))
    assert_close(fused(inputs, EXACT, TINY), ssd_recurrence(inputs), FP32_ROUNDING)


def test_raw_steps_without_bias_or_softplus() -> None:
    inputs = Case().inputs()
    inputs = replace(inputs, dt=inputs.dt.abs() / 20, dt_bias=None, dt_softplus=False)
    assert_close(fused(inputs, EXACT, TINY), ssd_recurrence(inputs), FP32_ROUNDING)


@pytest.mark.parametrize("raw", [-80.0, -20.0, 0.0, 20.0, 90.0])
def test_softplus_keeps_its_digits(raw: float) -> None:
    """Without decay and with B = C = 1, the state is the sum of the steps."""
    inputs = Case(seqlen=16, heads=1, skip="").inputs()
    ones = torch.ones_like
    inputs = replace(
        inputs, x=ones(inputs.x), B=ones(inputs.B), A=torch.zeros(1), dt=torch.full_like(inputs.dt, raw), dt_bias=None
    )
    states = fused(inputs, EXACT, TINY).final_states
    torch.testing.assert_close(states.double(), ssd_recurrence(inputs).final_states, rtol=1e-5, atol=0)


def test_the_first_pass_stops_where_nothing_is_felt() -> None:
    """The segments hold 32 positions.  After 16 steps of 2^-16 each, the effect of the chunk before is negligible.

    The first pass therefore never reads a NaN in that chunk, and the segments after it contain none.
    """
    inputs = Case(seqlen=96, heads=1, dt_limit=(0.7, 0.7)).inputs()
    inputs = replace(inputs, A=torch.full((1,), -16.0), x=inputs.x.contiguous())
    expected = fused(inputs, EXACT, TINY)
    inputs.x[0, 5] = torch.nan
    output = fused(inputs, EXACT, TINY)
    assert not torch.isfinite(output.out[:, 5:16]).any()
    assert_bitwise(SSDOutput(output.out[:, 32:], output.final_states), SSDOutput(expected.out[:, 32:], expected[1]))


@pytest.mark.parametrize("name", ["x", "dt", "B", "C", "A", "initial_states"])
def test_nan_is_not_swallowed(name: str) -> None:
    inputs = Case(seqlen=40, initial_states=True, dt_limit=(0.0, 0.1)).inputs()
    getattr(inputs, name)[-1:] = torch.nan
    assert not torch.isfinite(fused(inputs, EXACT, TINY).out).all()


# --- strides


@pytest.mark.parametrize(
    "order",
    [(3, 2, 1, 0), (0, 3, 2, 1), *(pytest.param(one, marks=pytest.mark.slow) for one in ((0, 1, 2, 3), (0, 2, 1, 3)))],
    ids=str,
)
def test_any_strides(order: tuple[int, ...]) -> None:
    """Tensors whose memory order differs from their dimensions, and every second element of a larger tensor."""

    def scattered(tensor: torch.Tensor) -> torch.Tensor:
        dims = order if tensor.ndim == 4 else tuple(reversed(range(tensor.ndim)))
        wide = torch.zeros(*(2 * tensor.shape[dim] for dim in dims), dtype=tensor.dtype)
        view = wide[(slice(None, None, 2),) * tensor.ndim].permute(*(dims.index(dim) for dim in range(tensor.ndim)))
        return view.copy_(tensor)

    inputs = Case(batch=2, seqlen=40, groups=2, skip="(h, p)", gate=True, initial_states=True).inputs()
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")
    strided = replace(inputs, **{name: scattered(getattr(inputs, name)) for name in names})
    assert_bitwise(fused(strided, EXACT, TINY), fused(inputs, EXACT, TINY))


def test_a_broadcast_input() -> None:
    inputs = Case(batch=2).inputs()
    inputs = replace(inputs, B=inputs.B[:1].expand(2, -1, -1, -1), dt=inputs.dt[:1].expand(2, -1, -1))
    assert_close(fused(inputs, EXACT, TINY), ssd_recurrence(inputs), FP32_ROUNDING)


# --- assignment of work to programs


@given(
    lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=12).filter(any),
    max_segments=st.integers(1, 9),
    min_chunks=st.integers(1, 8),
    more_chunks=st.integers(0, 8),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_grid_is_large_enough(lengths: list[int], max_segments: int, min_chunks: int, more_chunks: int) -> None:
    config = SSDPortableConfig(
        chunk=16, max_segments=max_segments, min_chunks=min_chunks, max_chunks=min_chunks + more_chunks
    )
    chunks = [triton.cdiv(length, 16) for length in lengths]
    needed = sum(max(1, triton.cdiv(count, config.segment_chunks(count))) for count in chunks)
    x = torch.zeros(1, 1, 1, 1).expand(1, sum(lengths), 1, 1)
    inputs = SSDInputs(
        x=x, dt=x[..., 0], A=torch.zeros(1), B=x, C=x, cu_seqlens=torch.zeros(len(lengths) + 1, dtype=torch.int32)
    )
    assert needed <= config.segments(inputs)
    if any(count > config.segment_chunks(count) for count in chunks):
        assert config.handover(inputs)


@triton.jit
def _segments_kernel(
    cu_seqlens_ptr, table_ptr, sequences, EVERY: tl.constexpr, CHUNK: tl.constexpr, RULE: tl.constexpr
):
    row = tl.program_id(0)
    sequence, segment, begin, length = find_segment(row * EVERY, cu_seqlens_ptr, 1, sequences, CHUNK, RULE)
    tl.store(table_ptr + 4 * row, sequence)
    tl.store(table_ptr + 4 * row + 1, segment)
    tl.store(table_ptr + 4 * row + 2, begin.to(tl.int32))
    tl.store(table_ptr + 4 * row + 3, length)


@pytest.mark.parametrize(("sequences", "every"), [(6, 1), (200, 29)])
def test_segments_of_packed_sequences(sequences: int, every: int) -> None:
    """200 sequences: more than one iteration reads.  Some are empty."""
    lengths = [(7 * i * i) % 61 for i in range(sequences)]
    begins = torch.tensor([0, *lengths]).cumsum(0)
    expected = []
    for i, length in enumerate(lengths):
        count = triton.cdiv(length, 16)
        for segment in range(max(1, triton.cdiv(count, TINY.segment_chunks(count)))):
            expected.append([i, segment, int(begins[i]), length])
    rows = -(-len(expected) // every)
    table = torch.full((rows + 1, 4), -7, dtype=torch.int32)
    rule = (TINY.max_segments, TINY.min_chunks, TINY.max_chunks)
    _segments_kernel[(rows + 1,)](begins, table, sequences, EVERY=every, CHUNK=16, RULE=rule)
    assert table[:-1].tolist() == expected[::every]
    assert table[-1, 0] == -1


# --- plans and checks of a call


def test_plan_says_what_is_allocated() -> None:
    inputs = Case(seqlen=600, headdim=8).inputs()
    precision = Precision(state_dtype=torch.float16)
    plan = get("ssd", "fused").plan(inputs, precision)
    gates, states, sync = (2 * 2 * 600 + 32) * 4, 2 * 8 * 16 * 2, (32 + 8 * 2) * 4
    assert (plan.variant, plan.launches, plan.workspace_bytes) == ("interpreter", 2, gates + states + sync)
    config = SSDPortableConfig.choose(inputs, (9, 0))
    buffers = buffer_sizes(inputs, precision, config).allocate(inputs)
    out, final_states, *workspace = buffers
    assert (out.nbytes, final_states.nbytes) == (inputs.x.nbytes, 2 * 8 * 16 * 4)
    assert sum(tensor.nbytes for tensor in workspace if tensor is not None) == plan.workspace_bytes
    short = get("ssd", "fused").plan(Case(seqlen=200).inputs(), EXACT)
    assert (short.launches, short.workspace_bytes) == (1, (2 * 2 * 200 + 32) * 4)
