"""What every kernel promises: laws, for the kernels of both operators, in the interpreter, the
emulator and on a GPU.

Memory that no kernel has written holds NaN (`conftest.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import (
    BF16,
    DTYPES,
    EXACT,
    FP16,
    FP32,
    PRECISIONS,
    RELAXED_FP32,
    GDNCase,
    KDACase,
    SSDCase,
    assert_bitwise,
    assert_close,
    changed,
    cut,
    rows,
    sequences,
    spoilt,
    tensors_of,
    with_state,
    with_steps,
)
from targets import KDA_HOPPER, SSD_CHOSEN, SSD_EVERY, TARGETS, Target, slow, targets
from torch import Tensor
from verdict import assert_passes

from ssdprof.kernels import UnsupportedError, get
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.inputs import SSDInputs

# --- dtypes

TOKENS = ("dt", "g", "beta")
TWO_HEADS: dict[str, dict[str, int]] = dict(ssd=dict(heads=2), gdn=dict(key_heads=2))
TWO_HEADS["kda"] = TWO_HEADS["gdn"]
WIDE = dict(ssd=("dt", "A", "D", "dt_bias", "initial_states"), gdn=("g", "beta", "initial_state"))
WIDE["kda"] = WIDE["gdn"]


@pytest.mark.parametrize("dtype", [torch.float64, FP16, BF16, FP32], ids=str)
@targets(
    "ssd fused",
    "gdn unfused",
    "kda unfused",
    slow=("ssd unfused", "gdn fused", "kda fused"),
    emulated=["ssd hopper, short"],
    emulated_slow=("gdn first passes", "kda whole"),
    gpu=("ssd hopper, short", "gdn first passes", "kda fused", *KDA_HOPPER),
)
def test_dtypes_of_steps_gates_and_states(kernel: Target, dtype):
    inputs = kernel.case(initial_states=True).inputs()
    names = WIDE[kernel.operator]
    # steps and gates in 64 bits go to another kernel
    if kernel.only_hopper and dtype == torch.float64:
        inputs = changed(inputs, Tensor.float, *(name for name in names if name in TOKENS))
        names = tuple(name for name in names if name not in TOKENS)
        assert_bitwise(kernel(changed(inputs, Tensor.double, *names)), kernel(inputs))
    wide = changed(inputs, lambda tensor: tensor.to(dtype), *names)
    kernel.assert_right(kernel(wide), wide)


def test_state_dtype_is_where_states_are_rounded():
    """Between chunks and segments, for any dtype of the inputs, and not within the first chunk."""
    for kernel, inputs in (
        (TARGETS["ssd unfused"], SSDCase().inputs()),
        (TARGETS["ssd tiny"], SSDCase(seqlen=64, dt_limit=(0.01, 0.01)).inputs()),
    ):
        outputs = [kernel(inputs, Precision(state_dtype=dtype)) for dtype in (FP32, FP16, BF16)]
        exact = TARGETS["ssd reference"](inputs).final_states
        errors = [(output.final_states - exact).square().mean().sqrt().item() for output in outputs]
        assert errors[0] < errors[1] / 20 < errors[2] / 40 or kernel is TARGETS["ssd unfused"]
        assert torch.equal(outputs[0].out[:, :32], outputs[2].out[:, :32])
        assert not torch.equal(outputs[0].out, outputs[2].out)


# --- a sequence and its neighbours

NEIGHBOURS = dict(
    slow=(
        "ssd recurrent",
        "ssd unfused",
        "gdn fused",
        "gdn recurrent",
        "gdn tiny",
        "gdn tiny, cut",
        "kda unfused",
    ),
    emulated_slow=(
        "ssd hopper, short",
        "ssd hopper, short, n 256",
        "ssd hopper, fine",
        *KDA_HOPPER,
    ),
    gpu=(
        "ssd fused",
        "ssd unfused",
        "ssd hopper, short",
        "ssd hopper, short, n 256",
        "gdn unfused",
        "gdn parts",
        *KDA_HOPPER,
    ),
)


@targets("ssd tiny", "gdn unfused", "kda tiny", **NEIGHBOURS)
def test_sequences_of_a_batch_or_a_pack_do_not_meet(kernel: Target):
    """Nor do NaN and infinity in the others and in their states reach one."""
    lengths = (21, 40, 3)
    for case in (
        kernel.case(batch=3, seqlen=21, initial_states=True),
        kernel.case(lengths=lengths, initial_states=True),
    ):
        inputs = case.inputs()
        second = (
            (slice(None), slice(*inputs.cu_seqlens.tolist()[1:3])) if case.lengths else slice(1, 2)
        )
        before = (slice(None), slice(second[1].start)) if case.lengths else 0
        after = (slice(None), slice(second[1].stop, None)) if case.lengths else 2
        state = inputs.initial.clone()
        state[0], state[2] = torch.nan, torch.inf
        bad = with_state(spoilt(spoilt(inputs, torch.nan, before), torch.inf, after), state)
        alone = kernel(inputs)
        beside_bad = kernel(bad)
        assert_bitwise(
            (beside_bad.out[second], beside_bad.final_states[1]),
            (alone.out[second], alone.final_states[1]),
        )
        assert beside_bad.out[before].isnan().all()


@targets(
    "ssd unfused",
    "gdn reference",
    "kda wide",
    slow=(
        "ssd tiny",
        "gdn unfused",
        "gdn recurrent",
        "gdn fused",
        "gdn tiny, cut",
        "kda reference",
        "kda recurrent",
        "kda unfused",
    ),
    emulated_slow=("gdn first passes", "gdn parts", "kda whole"),
    gpu=("gdn parts", "gdn first passes", "gdn unfused", *KDA_HOPPER),
)
def test_a_nan_stays_in_its_heads_and_sequence(kernel: Target):
    heads = TWO_HEADS[kernel.operator] if kernel.device == "cpu" else {}
    inputs = kernel.case(lengths=(5, 75 if kernel.device == "cpu" else 18), **heads).inputs()
    start = int(inputs.cu_seqlens[1])
    clean = kernel(inputs)
    for name in ("x", "dt") if kernel.operator == "ssd" else ("q", "k", "v", "g", "beta"):
        output = kernel(spoilt(inputs, torch.nan, (0, start + 70, 0), name))
        # value heads of another key head
        others = slice(inputs.v.shape[2] // inputs.q.shape[2] if name in ("q", "k") else 1, None)
        assert output.out[0, start + 70, 0].isnan().all()
        assert torch.equal(output.out[:, :, others], clean.out[:, :, others]), name
        assert torch.equal(output.final_states[:, others], clean.final_states[:, others]), name
        assert torch.equal(output.out[:, : start + 64], clean.out[:, : start + 64]), name
        assert torch.equal(output.final_states[0], clean.final_states[0]), name


@targets(
    "ssd reference",
    "ssd fused",
    "gdn unfused",
    "kda wide",
    slow=("ssd tiny", "ssd unfused", "gdn recurrent", "gdn tiny", "kda unfused"),
    gpu=(
        "ssd unfused",
        "ssd invariant",
        "gdn unfused",
        "gdn invariant",
        "kda unfused",
        "kda invariant",
    ),
)
@pytest.mark.parametrize("dtype", [FP32, *slow(BF16, FP16)], ids=str)
def test_a_sequence_is_the_same_in_any_batch(kernel: Target, dtype):
    inputs = kernel.case(batch=3, seqlen=40, initial_states=True, dtype=dtype).inputs()
    whole = kernel(inputs)
    order = [2, 0, 1]
    assert_bitwise(kernel(rows(inputs, order)), [tensor[order] for tensor in whole])
    assert_bitwise(kernel(rows(inputs, slice(1, 2))), [tensor[1:2] for tensor in whole])


@targets(
    "ssd invariant",
    "ssd tiny",
    "gdn reference",
    "gdn invariant",
    slow=("ssd unfused", "gdn recurrent", "gdn tiny", "gdn unfused"),
    gpu=(*SSD_EVERY, "ssd unfused", "gdn unfused", "gdn invariant", "kda invariant", *KDA_HOPPER),
)
@pytest.mark.parametrize("lengths", [(21, 0, 40, 3, 0), (1, 20), (0, 1)], ids=str)
def test_a_pack_is_its_sequences_alone(kernel: Target, lengths):
    inputs = kernel.case(lengths=lengths, initial_states=True).inputs()
    whole = kernel(inputs)
    ends = inputs.cu_seqlens.tolist()
    state = inputs.initial
    for i, alone in sequences(inputs, packed=True).items():
        expected = whole.out[:, ends[i] : ends[i + 1]], whole.final_states[i : i + 1]
        assert_bitwise(kernel(alone), expected)
        if kernel.run in [TARGETS[name].run for name in ("ssd unfused", "gdn unfused", "gdn tiny")]:
            # nor does it matter that it is packed
            assert_bitwise(kernel(replace(alone, cu_seqlens=None)), expected)
    empty = [i for i, length in enumerate(lengths) if not length]
    assert torch.equal(whole.final_states[empty], state[empty])
    assert not kernel(with_state(inputs, None)).final_states[empty].any()


@pytest.mark.parametrize("where", [1, 41, *slow(64)])
@targets(
    "ssd reference",
    "ssd tiny",
    "gdn reference",
    "gdn unfused",
    "kda tiny",
    slow=(
        "ssd unfused",
        "gdn fused",
        "gdn tiny",
        "gdn tiny, cut",
        "gdn tiny, v rows",
        "gdn cut",
        "kda unfused",
    ),
    gpu=("ssd unfused", "gdn unfused", *KDA_HOPPER),
)
def test_two_calls_with_a_carried_state_are_one(kernel: Target, where):
    inputs = kernel.case(seqlen=70, initial_states=True).inputs()
    first = kernel(cut(inputs, 0, where))
    second = kernel(with_state(cut(inputs, where, None), first.final_states))
    kernel.assert_right(second._replace(out=torch.cat([first.out, second.out], 1)), inputs)


@targets("ssd recurrent", "gdn recurrent", "kda recurrent")
def test_steps_are_a_sequence(kernel: Target):
    """Decoding one position at a time, with the state carried over, has the bits of one call over
    all positions.
    """
    inputs = kernel.case(seqlen=4, initial_states=True).inputs()
    whole = kernel(inputs)
    state = inputs.initial
    for t in range(4):
        out, state = kernel(with_state(cut(inputs, t, t + 1), state))
        assert torch.equal(out[:, 0], whole.out[:, t])
    assert torch.equal(state, whole.final_states)


def test_int64_bounds_and_strided_bounds():
    kernel = TARGETS["ssd unfused"]
    inputs = kernel.case(lengths=(20, 30)).inputs()
    for cu_seqlens in (
        torch.tensor([0, 20, 50]),
        torch.tensor([0, 9, 20, 9, 50, 9], dtype=torch.int32)[::2],
    ):
        assert_bitwise(kernel(replace(inputs, cu_seqlens=cu_seqlens)), kernel(inputs))


# --- numbers of any size


@targets(
    "ssd unfused",
    "gdn tiny",
    "kda tiny",
    slow=("ssd tiny", "gdn unfused", "kda unfused"),
    emulated=("ssd hopper, fine", "ssd hopper, alone"),
    emulated_slow=("ssd hopper, short", "ssd hopper, uneven"),
    gpu=(*SSD_EVERY, "ssd unfused", "gdn unfused", "gdn tiny", *KDA_HOPPER),
)
def test_nan_is_not_swallowed(kernel: Target):
    """A GPU's minimum and maximum drop NaN by default; the interpreter's never do.  Also in a state
    that the product of decays has made vanish.
    """
    options = (
        dict(dt_limit=(0.0, 0.1), gate="hopper" not in str(kernel.run))
        if kernel.operator == "ssd"
        else {}
    )
    if kernel.only_hopper:
        options["gate"] = False
    case = kernel.case(seqlen=40 if kernel.device == "cpu" else 12, initial_states=True, **options)
    names = ["initial_states"] if kernel.device == "emulator" else tensors_of(case.inputs())
    for name in names:
        inputs = case.inputs()
        getattr(inputs, name).fill_(torch.nan)
        assert not torch.isfinite(kernel(inputs).out).any(), name


# of a step, and the rate A: no decay, full decay, or exp underflows, since cumulative sums may be
# 0, tiny or 1e31
STEPS = [
    (0.0, -1.0),
    (1e-39, -1.0),
    (1e-30, -2.0),
    (1e-6, -16.0),
    (50.0, -1.0),
    (1e4, -16.0),
    (1e30, -16.0),
]
STEPS += [(0.5, 0.0), (0.01, -1e-39), (1e-38, -1e-38)]


def steps_of_any_size(kernel: Target, **sizes) -> SSDInputs:
    """A head of each kind."""
    inputs = kernel.case(seqlen=60, heads=len(STEPS), initial_states=True, **sizes).inputs()
    step, A = torch.tensor(STEPS, device=inputs.x.device).T
    inputs.x.mul_(torch.where(step > 1e10, 1e-30, 1.0)[:, None])
    return replace(with_steps(inputs, step.to(inputs.dt.dtype).expand_as(inputs.dt)), A=A)


@targets("ssd reference", "ssd tiny", "ssd unfused", gpu=(*SSD_EVERY, "ssd unfused"))
def test_steps_of_any_size(kernel: Target):
    inputs = steps_of_any_size(kernel)
    output = kernel(inputs)
    kernel.assert_right(output, inputs)
    assert torch.equal(
        output.final_states[:, 0], inputs.initial_states[:, 0].to(output.final_states.dtype)
    )


@pytest.mark.parametrize("precision", [*slow(EXACT), RELAXED_FP32], ids=str)
@targets("ssd tiny", "ssd unfused", gpu=[*SSD_CHOSEN, "ssd unfused"])
def test_steps_of_any_size_in_bf16(kernel: Target, precision: Precision):
    inputs = steps_of_any_size(kernel, dtype=BF16)
    assert_passes(kernel(inputs, precision), inputs, precision)


@pytest.mark.parametrize(
    ("step", "scale"), [(1e-6, 100.0), *slow((1e-6, 10.0), (1e-5, 10.0), (1e-5, 100.0))]
)
@targets(emulated_slow=["ssd hopper, alone"], emulated=["ssd hopper, short"], gpu=SSD_EVERY)
def test_small_steps_of_large_numbers_in_fp16(kernel: Target, step, scale):
    """Weights below 2^-14, which are subnormal in fp16, and products that are not."""
    sizes = dict(seqlen=82, dstate=64) if kernel.device == "emulator" else dict(seqlen=13)
    inputs = with_steps(kernel.case(**sizes, skip="", dtype=FP16).inputs(), step)
    inputs.x.mul_(scale)
    assert_passes(kernel(inputs), inputs, EXACT)


@targets("ssd reference", "ssd tiny", "ssd unfused", gpu=(*SSD_EVERY, "ssd unfused"))
def test_huge_steps_reset_the_state_and_cost_the_later_ones_no_digits(kernel: Target):
    places: Any
    for places, step in (([20], 1000.0), ([7], 1e20), (slice(None, None, 9), 1e9)):
        inputs = kernel.case(seqlen=28, skip="").inputs()
        dt = torch.full_like(inputs.dt, 0.01, dtype=FP32)
        dt[:, places] = step
        inputs = with_steps(inputs, dt)
        if kernel.run is TARGETS["ssd reference"].run:
            kernel.assert_right(kernel(inputs), inputs)
        elif step == 1000.0:
            assert_passes(kernel(inputs), inputs, EXACT)
        elif kernel.device == "cpu" and kernel.run is not TARGETS["ssd unfused"].run:
            assert_close(kernel(inputs), TARGETS["ssd reference"](inputs), 1e-4)


@pytest.mark.parametrize("A", [0.0, *slow(-1e-6)])
@pytest.mark.parametrize("precision", [EXACT, *slow(*PRECISIONS[1:])], ids=str)
@targets("ssd tiny", gpu=SSD_CHOSEN)
def test_no_decay_is_linear_attention(kernel: Target, A, precision: Precision):
    inputs = with_steps(kernel.case(seqlen=75, initial_states=True).inputs(), 0.01, A)
    kernel.assert_right(kernel(inputs, precision), inputs, precision)


@targets("ssd tiny", "ssd unfused")
def test_softplus_keeps_its_digits(kernel: Target):
    """Without decay and with B = C = 1, the state of a head is the sum of its steps."""
    raw = torch.tensor([-80.0, -30.0, -17.0, -8.0, 0.0, 8.0, 19.99, 20.01, 90.0])
    inputs = changed(
        SSDCase(seqlen=16, heads=len(raw), skip="").inputs(), torch.ones_like, "x", "B"
    )
    inputs = replace(inputs, A=torch.zeros(len(raw)), dt=raw.expand_as(inputs.dt), dt_bias=None)
    expected = TARGETS["ssd reference"](inputs).final_states
    torch.testing.assert_close(kernel(inputs).final_states.double(), expected, rtol=1e-5, atol=0)


@targets(
    "gdn unfused",
    "kda tiny",
    slow=(
        "gdn reference",
        "gdn recurrent",
        "gdn fused",
        "gdn tiny, cut",
        "kda reference",
        "kda unfused",
        "kda recurrent",
    ),
)
def test_gates_from_none_to_all(kernel: Target):
    """A head of each kind."""
    gates = torch.tensor([0.0, 1e-3, 50.0, 1e30, torch.inf])
    inputs = kernel.case(seqlen=70, initial_states=True, values_per_key=len(gates)).inputs()
    inputs = replace(inputs, g=-gates.view(-1, *[1] * (inputs.g.ndim - 3)).expand_as(inputs.g))
    kernel.assert_right(kernel(inputs), inputs)


@targets(
    "gdn reference",
    "gdn fused",
    "gdn tiny",
    "kda reference",
    "kda tiny",
    slow=("gdn unfused", "gdn tiny, cut", "kda unfused", "kda recurrent"),
    emulated_slow=("gdn first passes", "kda whole"),
    gpu=("gdn fused", "gdn unfused", "gdn first passes", *KDA_HOPPER),
)
def test_a_gate_above_0_counts_as_0_and_minus_infinity_forgets(kernel: Target):
    inputs = kernel.case(seqlen=70, initial_states=True).inputs()
    inputs.g[:, 5], inputs.g[:, 11], inputs.g[:, 20:30], inputs.g[:, 40], inputs.g[:, 50] = (
        0.5,
        100,
        0.5,
        -torch.inf,
        -1e30,
    )
    kernel.assert_right(kernel(inputs), inputs)
    assert_bitwise(kernel(inputs), kernel(replace(inputs, g=inputs.g.clamp(max=0))))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("collinear", "largest_beta"), [(0.99, 2.0), *slow((0.9, 1.0), (0.9, 2.0), (0.99, 1.0))]
)
@targets("gdn unfused", "kda wide", slow=["kda unfused"])
def test_collinear_keys(kernel: Target, dtype, collinear, largest_beta):
    sizes = dict(seqlen=100, key_dim=32, gate=0.0, collinear=collinear, largest_beta=largest_beta)
    inputs = kernel.case(**sizes, dtype=dtype).inputs()
    assert_passes(kernel(inputs), inputs, EXACT)


@targets(
    "gdn unfused",
    "gdn recurrent",
    "kda unfused",
    "kda recurrent",
    slow=("gdn fused", "kda fused"),
    gpu=KDA_HOPPER,
)
def test_vectors_that_are_zero_or_almost_are_normalised(kernel: Target):
    """The norm has an epsilon of 1e-6."""
    inputs = kernel.case(seqlen=40, l2norm=True).inputs()
    inputs.q[:, 7], inputs.k[:, 9] = 0, 0
    inputs.q[:, 11:13] *= 1e-3
    inputs.k[:, 12:14] *= 1e-3
    kernel.assert_right(kernel(inputs), inputs)


# --- memory


def scattered(tensor: Tensor) -> Tensor:
    """Every second element of a larger tensor of NaN, with the dimensions in reverse order in
    memory.
    """
    room = [2 * size for size in reversed(tensor.shape)]
    wide = torch.full(
        room,
        torch.nan if tensor.is_floating_point() else -1,
        dtype=tensor.dtype,
        device=tensor.device,
    )
    return (
        wide[(slice(None, None, 2),) * tensor.ndim]
        .permute(*reversed(range(tensor.ndim)))
        .copy_(tensor)
    )


def positions_innermost(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, -1).contiguous().transpose(1, -1)


def heads_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def one_head(tensor: Tensor) -> Tensor:
    return tensor[:, :, :1].expand_as(tensor)


def one_row(tensor: Tensor) -> Tensor:
    return tensor[:1].expand_as(tensor)


def beside_others(tensor: Tensor) -> Tensor:
    """Columns of a projection in a buffer for longer sequences: NaN lies between them and between
    sequences.
    """
    rows = tensor.shape[1]
    columns = tensor.shape[-1]
    room = (tensor.shape[0], 2 * rows, *tensor.shape[2:-1], 2 * columns + 8)
    wide = torch.full(room, torch.nan, dtype=tensor.dtype, device=tensor.device)
    return wide[:, 8 : 8 + rows, ..., 8 : 8 + columns].copy_(tensor)


LAYOUTS = [scattered, beside_others]
LAYOUTS += slow(positions_innermost, one_row, heads_first, one_head)


@pytest.mark.parametrize("layout", LAYOUTS)
@targets(
    "ssd unfused",
    "gdn unfused",
    "kda tiny",
    slow=(
        "ssd fused",
        "ssd tiny",
        "gdn fused",
        "gdn tiny",
        "gdn tiny, v rows",
        "gdn tiny, cut",
        "kda fused",
        "kda recurrent",
        "kda unfused",
    ),
    gpu=("ssd fused", "gdn unfused", "gdn fused", "kda fused"),
)
def test_any_layout(kernel: Target, layout: Callable[[Tensor], Tensor]):
    """On a GPU, bits may differ: the compiler chooses other products for such tiles."""
    ssd = dict(gate=True, groups=2, heads=2, skip="(h, p)", dstate=24)
    sizes = (
        ssd
        if kernel.operator == "ssd"
        else dict(key_dim=20, value_dim=24, **TWO_HEADS[kernel.operator])
    )
    case = kernel.case(
        batch=2, seqlen=20, initial_states=True, **sizes if kernel.device == "cpu" else {}
    )
    inputs = case.inputs()
    turned = changed(inputs, layout, *(tensors_of(inputs) if layout is scattered else ()))
    kernel.assert_right(kernel(turned), turned)
    if kernel.device == "cpu" and layout not in (one_head, one_row):
        assert_bitwise(kernel(turned), kernel(inputs))


@targets(
    emulated=["ssd hopper, short"],
    emulated_slow=("gdn parts", "kda whole"),
    gpu=("ssd hopper, short", "gdn parts", *KDA_HOPPER),
)
def test_columns_of_a_buffer_on_hopper(kernel: Target):
    inputs = kernel.case(batch=3, seqlen=20).inputs()
    assert_bitwise(kernel(changed(inputs, beside_others)), kernel(inputs))


# --- refusals


@targets(
    "ssd unfused",
    "ssd fused",
    "ssd recurrent",
    "ssd step",
    "gdn unfused",
    "gdn fused",
    "gdn recurrent",
    "gdn step",
    "kda unfused",
    "kda fused",
)
def test_refuses_to_drop_a_gradient(kernel: Target):
    """Also of a call whose launch is kept."""
    inputs = {"ssd": SSDCase, "gdn": GDNCase, "kda": KDACase}[kernel.operator](
        seqlen=1, batch=2
    ).inputs()
    kernel(inputs)
    for name in ("D", "x") if kernel.operator == "ssd" else ("v", "k"):
        wanting = changed(inputs, lambda tensor: tensor.clone().requires_grad_(), name)
        with pytest.raises(UnsupportedError, match="forward only"):
            kernel(wanting)
        with torch.no_grad():
            kernel(wanting)


REFUSED: list[tuple[str, str, Any, str]] = [
    ("ssd", "unfused", SSDCase(headdim=129), "headdim is at most 128, not 129"),
    *(
        ("ssd", name, SSDCase(dstate=257), "dstate is at most 256, not 257")
        for name in ("unfused", "fused", "recurrent")
    ),
    ("gdn", "unfused", GDNCase(chunk_size=128), "chunk_size is at most 64"),
    ("kda", "unfused", KDACase(chunk_size=128), "chunk_size is at most 64"),
    *(
        ("ssd", "unfused_step", case, "one token of each sequence")
        for case in (SSDCase(seqlen=2), SSDCase(lengths=(1,)))
    ),
    *(
        ("gdn", "unfused_step", case, "one token of each sequence")
        for case in (GDNCase(seqlen=2), GDNCase(lengths=(1,)))
    ),
]


@pytest.mark.parametrize(("operator", "name", "case", "words"), REFUSED)
def test_what_it_does_not_do_it_refuses_by_name(operator, name, case, words):
    implementation = get(operator, name)
    for call in (implementation.run, implementation.plan):
        with pytest.raises(UnsupportedError, match=f"^{name}: {words}"):
            call(case.inputs(), EXACT)
