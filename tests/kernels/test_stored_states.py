"""States that are rounded between steps as a pool keeps them, against plain loops in torch."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from kernel_cases import (
    BF16,
    FP16,
    FP32,
    GDNCase,
    KDACase,
    SSDCase,
    cut,
    rows,
    sequences,
    with_state,
    with_steps,
)
from targets import OPERATORS, slow
from torch import Tensor

from ssdprof.errors import BadInputError
from ssdprof.kernels import Precision, get
from ssdprof.kernels.gdn.recurrent import blocks_of
from ssdprof.kernels.stored_states import Stepping
from ssdprof.operators.decode_states import parse_state_format, stepped_states

CASES: dict[str, Any] = {
    "gdn": GDNCase(batch=2, seqlen=9, values_per_key=2, key_dim=20, value_dim=24),
    "kda": KDACase(batch=2, seqlen=9, key_dim=20, value_dim=24, dtype=BF16),
    "ssd": SSDCase(batch=2, seqlen=9, headdim=20, dstate=12, gate=True),
}
PACK = dict(lengths=(3, 0, 6), initial_states=True)
EACH = pytest.mark.parametrize(
    ("operator", "changes"),
    [*slow(*product(("gdn", "kda"), ({}, PACK))), ("ssd", {}), ("ssd", PACK)],
)
SIXTEEN = {"bf16": BF16, "fp16": FP16}
ROW_AXIS = {"gdn": -2, "kda": -2, "ssd": -1}


def rounds_nothing(states: Tensor) -> Tensor:
    return states


def int16(states: Tensor) -> Tensor:
    """One scale for each row of a state (P, N)."""
    unit = states.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 32767
    return (states / unit).round() * unit


def pool_states(inputs, name: str, *steps) -> torch.Tensor:
    """What the pool holds after the marked steps.  steps: of `stepped_states`."""
    _, states = stepped_states(inputs, parse_state_format(name), *steps)
    return states


# --- plain torch


def hashed(bits: Tensor) -> Tensor:
    bits = (bits ^ bits >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    bits = (bits ^ bits >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return bits ^ bits >> 16


def random_bits(shape: torch.Size, seed: int, sequence: int, step: int) -> Tensor:
    bits = torch.tensor(seed)
    heads = torch.arange(shape[0])[:, None, None]
    elements = torch.arange(shape[1] * shape[2]).view(shape[1:])
    for index in (sequence, heads, step, elements):
        bits = hashed(bits) + index & 0xFFFFFFFF
    return hashed(bits)


def rounded(states: Tensor, name: str, axis: int, random: Tensor) -> Tensor:
    """(heads, K, V) in a format."""
    number, _, rounding = name.partition(":")[0].partition("-")
    if rounding == "stochastic":
        dropped, mantissa, least = (16, 7, -126) if number == "bf16" else (13, 10, -14)
        offset = torch.where(states.abs() < 2.0**-14, 2.0**-14, 0.0) if number == "fp16" else 0.0
        magnitude = (states.abs() + offset - offset).double()
        unit = 2.0 ** (torch.frexp(magnitude)[1] - 1).clamp_min(least).sub(mantissa).double()
        up = (random >> (32 - dropped)) / 2.0**dropped
        return (states.sign() * (magnitude / unit + up).floor() * unit).to(SIXTEEN[number]).float()
    if number in ("bf16", "fp16"):
        return states.to(SIXTEEN[number]).float()
    axes = (-2, -1) if name.endswith(":head") else axis
    largest = 4.0 + 0 * states if "=4" in name else states.abs().amax(axes, keepdim=True)
    scale = largest / (448 if number == "fp8" else 127)
    per_unit = torch.where(scale > 0, 1 / scale, 0)
    value = states * per_unit
    if number == "fp8":
        return value.clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    value = value.round().clamp(-127, 127) * scale
    if rounding == "carried":
        error = (states - value) * (254 * per_unit)
        value += error.round().clamp(-127, 127) * (scale / 254)
    return value


FORMATS = (
    "bf16", "fp16", "bf16-stochastic", "fp16-stochastic", "fp8", "int8", "int8-carried",
    "int8:head", "fp8:fixed=4", "int8-carried:fixed=4",
)  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("operator", [*slow("gdn"), "ssd"])
def test_a_state_as_it_is_first_stored(operator, name):
    """Numbers of all magnitudes, rows of zeros."""
    inputs = CASES[operator].but(**PACK).inputs()
    states = inputs.initial * 2.0 ** torch.randint(-24, 8, inputs.initial.shape)
    states[0, :, 3], states[1, :, :, 3] = 0, 0
    stored = pool_states(with_state(inputs, states), name, 1, [0], 5)
    for i, state in enumerate(states):
        random = random_bits(state.shape, 5, i, 0)
        assert torch.equal(stored[0, i], rounded(state, name, ROW_AXIS[operator], random)), i


def loop(inputs, name: str, step: int, sequence: int) -> tuple[Tensor, Tensor]:
    """Out, and the states after every step, of one sequence."""
    reference = get(inputs.operator, "reference").run
    axis = ROW_AXIS[inputs.operator]
    state = torch.zeros(inputs.states_shape[1:]) if inputs.initial is None else inputs.initial[0]
    outs = []
    states = []
    for number, start in enumerate(range(-step, inputs.length, step)):
        if start >= 0:
            piece = with_state(cut(inputs, start, start + step), state[None])
            out, after = reference(piece, Precision())
            outs.append(out.float())
            state = after[0].float()
        state = rounded(state, name, axis, random_bits(state.shape, 5, sequence, number))
        states.append(state)
    return torch.cat(outs, 1), torch.stack(states)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("step", "changes"), [(4, PACK), *slow((1, {}), (1, PACK), (4, {}))])
def test_a_plain_loop(operator, name, step, changes):
    """A number that an fp32 sum leaves on the other side of a tie differs by a unit of the format:
    up to one in a hundred.
    """
    inputs = CASES[operator].but(dtype=FP32, **changes).inputs()
    marks = range(10)
    out, states = stepped_states(inputs, parse_state_format(name), step, marks, 5)
    exact_out, exact = stepped_states(inputs, parse_state_format("fp32"), step, marks)
    alone = sequences(inputs) if changes else {i: rows(inputs, [i]) for i in range(2)}
    loops = {i: loop(one, name, step, i) for i, one in alone.items()}
    expected = torch.cat([plain for plain, _ in loops.values()], 1 if changes else 0)
    pairs = [(out, expected, exact_out)] + [
        (states[: len(plain), i], plain, exact[: len(plain), i]) for i, (_, plain) in loops.items()
    ]
    for ours, plain, unrounded in pairs:
        assert (ours - plain).norm() <= 0.25 * (plain - unrounded).norm()
    for i, (_, plain) in loops.items():
        assert torch.equal(states[-1, i], states[len(plain) - 1, i]), "a sequence keeps its last"


@EACH
@pytest.mark.parametrize("name", ["fp32", "test_stored_states:rounds_nothing"])
def test_fp32_and_a_function_that_rounds_nothing_are_recurrent(
    operator: str, changes: dict[str, Any], name
):
    inputs = CASES[operator].but(**changes).inputs()
    recurrent = get(operator, "recurrent").run
    every = recurrent(replace(inputs, state_every=1), Precision()).final_states
    out, states = stepped_states(inputs, parse_state_format(name), 2, (0, 1, 100))
    assert torch.equal(out.to(inputs.values.dtype), recurrent(inputs, Precision()).out)
    assert torch.equal(states[0], inputs.initial if changes else torch.zeros_like(states[0]))
    whole = [0, 2] if changes else [0, 1]
    assert torch.equal(states[1, whole], every[[1, 4] if changes else [1, 10]])
    assert torch.equal(states[2, whole], every[[2, 8] if changes else [8, 17]])


# of the sizes of models
MODELS: dict[str, Any] = {
    "gdn": GDNCase(
        seqlen=64, key_heads=16, values_per_key=2, key_dim=128, value_dim=128, dtype=BF16
    ),
    "kda": KDACase(seqlen=64, key_heads=32, key_dim=128, value_dim=128, dtype=BF16),
    "ssd": SSDCase(seqlen=64, heads=80, headdim=64, dstate=128, groups=1, dtype=BF16),
}
NORMS = [dict(l2norm=True), dict(l2norm=False)]
RESIDUALS = [dict(skip="(h)"), dict(skip=""), dict(gate=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [{}, dict(initial_states=True), dict(seqlen=1), PACK])
@pytest.mark.parametrize(
    ("operator", "changes"),
    [("gdn", one) for one in NORMS]
    + [("kda", one) for one in NORMS]
    + [("ssd", one) for one in RESIDUALS],
)
def test_fp32_is_recurrent_on_a_gpu(operator: str, changes: dict[str, Any], sizes: dict[str, Any]):
    """The two are compiled apart: in one layout, with the same fused products."""
    inputs = MODELS[operator].but(**changes, **sizes, device="cuda").inputs()
    out, states = stepped_states(inputs, parse_state_format("fp32"), 1, [inputs.length])
    recurrent, final_states = get(operator, "recurrent").run(inputs, Precision())
    assert torch.equal(out.to(recurrent.dtype), recurrent)
    assert torch.equal(states[0], final_states)


# --- what a format does to sums


def sums(addend: float, decay: float, seqlen: int, state: float = 0.0):
    """state = decay * state + addend, in all 512 elements."""
    inputs = SSDCase(seqlen=seqlen, heads=1, headdim=32, initial_states=True).inputs()
    inputs = replace(inputs, x=torch.full_like(inputs.x, addend), B=torch.ones_like(inputs.B))
    inputs = with_steps(inputs, 1.0, A=float(torch.tensor(decay).log()))
    return with_state(inputs, torch.full_like(inputs.initial, state))


def random_sums(decay: float, seqlen: int):
    inputs = sums(1.0, decay, seqlen)
    return replace(inputs, x=torch.randn(inputs.x.shape), B=torch.randn(inputs.B.shape))


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_stochastic_rounding_keeps_the_mean(name):
    """Below half a unit, where rounding to nearest adds nothing."""
    inputs = sums(0.1, 1.0, 40, state=256.0)
    exact = 260.0
    assert (pool_states(inputs, name, 1, [40]) == 256).all()
    stochastic = f"{name}-stochastic"
    ends = torch.stack([pool_states(inputs, stochastic, 1, [40], seed) for seed in (1, 2)])
    assert not torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], pool_states(inputs, stochastic, 1, [40], 1))
    assert abs(ends.mean() - exact) <= 3 * ends.std() / ends.numel() ** 0.5


@pytest.mark.parametrize(
    ("name", "half_units"),
    [("int8", 2 * 127), ("int8-carried", 2 * 127 * 254), ("test_stored_states:int16", 2 * 32767)],
)
def test_a_step_adds_half_a_unit_at_most(name: str, half_units: int):
    """In a row whose largest number is M, int8 has a unit of M / 127.  What it leaves is at most
    half of that: int8-carried keeps it in units of M / 127 / 254, and has 32,767 / 32,258 = 1.016
    times int16's largest error.  It is reached; earlier errors decay as the state does.

    fp32 adds 2**-24 M for each product and sum of both runs, and for that of the two numbers.
    """
    decay = 0.999
    inputs = random_sums(decay, 60)
    stored, exact = (pool_states(inputs, form, 1, range(61)) for form in (name, "fp32"))
    errors = stored - exact
    added = errors[1:] - decay * errors[:-1]
    largest = (added.abs() / stored[1:].abs().amax(-1, keepdim=True)).max()
    assert 0.99 / half_units <= largest <= 1 / half_units + 5 * 2**-24


# --- what results do not depend on


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name", ["fp16-stochastic", "int8-carried:head"])
def test_other_sequences_and_slices_change_nothing(operator, name, monkeypatch):
    inputs = CASES[operator].inputs()
    state_format = parse_state_format(name)
    out, states = stepped_states(inputs, state_format, 2, (0, 3, 5), 5)
    alone = stepped_states(rows(inputs, [0]), state_format, 2, (0, 3, 5), 5)
    assert torch.equal(out[:1], alone[0])
    assert torch.equal(states[:, :1], alone[1])
    module = f"ssdprof.kernels.{operator.replace('kda', 'gdn')}.recurrent"
    launches: dict[Any, Any] = {}
    monkeypatch.setattr("ssdprof.kernels.stored_states._launches", launches)
    if not name.endswith(":head"):
        slices = dict(block_v=4, block_t=2, block_p=4, num_warps=1)
        monkeypatch.setattr(f"{module}.blocks_of", lambda *_, **__: slices)
    sliced = pool_states(inputs, name, 2, (0, 3, 5), 5)
    torch.testing.assert_close(sliced, states, rtol=0, atol=0)


def test_a_program_of_a_whole_state_has_no_more_warps_than_a_gpu_allows():
    inputs = GDNCase(seqlen=1, key_dim=256, value_dim=256).inputs()
    stepping = Stepping(parse_state_format("int8:head"))
    assert blocks_of(inputs, stepping=stepping)["num_warps"] == 32


# --- what a format cannot hold, and what is no format


OVERFLOWS = pytest.mark.filterwarnings("ignore:(invalid|overflow):RuntimeWarning")  # numpy's


@OVERFLOWS
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("name", "spoilt"), [("int8", 12), ("fp8:head", 240), ("int8-carried:fixed=4", 1), ("fp16", 1)]
)
def test_nan_and_infinity_stay_visible(name, spoilt, value):
    """In all that shares their scale."""
    inputs = CASES["ssd"].but(initial_states=True).inputs()
    inputs.initial[0, 1, 2, 3] = value
    states = pool_states(inputs, name, 1, [0])[0]
    assert (~states[0, 1].isfinite()).sum() == spoilt
    assert states[0, 0].isfinite().all()
    assert states[1].isfinite().all()


@OVERFLOWS
def test_too_large_for_fp16_is_infinite_and_too_small_for_a_scale_is_zero():
    inputs = CASES["ssd"].but(initial_states=True).inputs()
    for name, factor, expected in (("fp16-stochastic", 1e9, torch.inf), ("int8", 1e-33, 0.0)):
        states = with_state(inputs, factor * inputs.initial.sign())
        stored = pool_states(states, name, 1, [0])
        assert (stored.abs() == expected).all()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("int9", "no format 'int9'"), ("bf16:head", "have no scale"), ("int8:fixed=0", "no scale"),
        ("int8:fixed=inf", "no scale"), ("fp8:column", "no scale"), ("int8:fixed=x", "no scale"),
        ("no_such_module:function", "cannot be imported"),
    ],
)  # fmt: skip
def test_what_is_no_format(text, complaint):
    with pytest.raises(BadInputError, match=complaint):
        parse_state_format(text)


@pytest.mark.parametrize("given", [dict(step=0), dict(marks=[2, -1]), dict(seed=1 << 31)])
def test_steps_and_seeds_out_of_range(given):
    with pytest.raises(ValueError, match="out of range"):
        stepped_states(
            CASES["ssd"].inputs(), parse_state_format("fp8"), **dict(step=1, marks=[0]) | given
        )


def test_a_function_that_returns_no_states():
    for function in (torch.sum, str):
        state_format = replace(parse_state_format("test_stored_states:int16"), function=function)
        with pytest.raises(BadInputError, match="must return a tensor"):
            stepped_states(CASES["ssd"].inputs(), state_format, 1, [1])


@pytest.mark.parametrize(
    ("name", "bytes_"),
    [("fp32", 65536), ("fp8", 16896), ("int8:head", 16388), ("int8-carried:fixed=2", 32768)],
)
def test_bytes_of_a_state(name, bytes_):
    assert parse_state_format(name).state_bytes(128, 128) == bytes_
