"""What only the recurrent kernels of both operators promise, in the interpreter."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import (
    BF16,
    FP16,
    FP32,
    TOKENS,
    GDNCase,
    KDACase,
    SSDCase,
    assert_close,
    with_state,
)

from ssdprof.kernels import Precision, gdn_recurrent, get, names, ssd_recurrent
from ssdprof.kernels.gdn.reference import gdn_recurrence
from ssdprof.kernels.registry import UnsupportedError
from ssdprof.kernels.ssd.reference import ssd_recurrence
from ssdprof.operators import generate

BATCH = dict(batch=2, seqlen=6)
OPERATORS = pytest.mark.parametrize("operator", ["ssd", "gdn"])
RECURRENT: dict[str, Any] = dict(ssd=ssd_recurrent, gdn=gdn_recurrent)
ORACLE: dict[str, Any] = dict(ssd=ssd_recurrence, gdn=gdn_recurrence)


GATED = GDNCase(
    seqlen=100, values_per_key=4, largest_beta=0.1, gate=1.0, initial_states=True
).inputs()
GATES = torch.tensor([0.0, 1e-4, 3e-3, 3.0])  # a head of each; the last one forgets at once
EXP2 = {
    "ssd": SSDCase(seqlen=100, heads=3, initial_states=True).inputs(
        A=torch.tensor([-1e-3, -0.1, -100.0])
    ),
    "gdn": replace(GATED, g=GATED.g * GATES),
}


@OPERATORS
def test_an_exp2_that_is_off_by_a_bit(operator: str, monkeypatch):
    """As on a GPU, always in one direction: the error does not add up over 100 positions."""
    inputs = EXP2[operator]
    exp2 = np.exp2
    monkeypatch.setattr(
        np, "exp2", lambda v: np.nextafter(exp2(v), np.float32(0), dtype=np.float32)
    )
    assert_close(RECURRENT[operator](inputs), ORACLE[operator](inputs), 1e-6)


@OPERATORS
def test_what_is_left_of_a_state_that_mostly_decays(operator: str):
    """A rounding error of the state before a position would be larger than the state after its
    decay.
    """
    inputs: Any = SSDCase(seqlen=1, initial_states=True, dt_limit=(0.1, 0.1)).inputs(
        A=torch.tensor([-60.0, -90.0])
    )
    if operator == "gdn":
        inputs = GDNCase(seqlen=1, initial_states=True).inputs(g=torch.full((1, 1, 1), -8.0))
    inputs = with_state(inputs, 1e4 * inputs.initial)
    assert_close(RECURRENT[operator](inputs), ORACLE[operator](inputs), 1e-6)


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_16_bit_rounds_only_the_output(dtype):
    inputs = GDNCase(seqlen=4, dtype=dtype, initial_states=True).inputs()
    ours = gdn_recurrent(inputs)
    expected = gdn_recurrence(inputs)
    assert_close(ours._replace(out=expected.out), expected, 1e-6)
    torch.testing.assert_close(
        ours.out.double(), expected.out, rtol=torch.finfo(dtype).eps, atol=1e-6
    )


@OPERATORS
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("turned", [False, True])
def test_in_place(operator: str, turned, dtype):
    """The state keeps its memory, dtype and layout."""
    inputs = POOLED[operator].but(seqlen=1).inputs()
    run = RECURRENT[operator]
    state = inputs.initial.to(dtype)
    state = state.mT.contiguous().mT if turned else state
    expected = run(with_state(inputs, state))
    out, final_states = run(with_state(inputs, state), in_place=True)
    assert final_states is state
    assert torch.equal(out, expected.out)
    assert torch.equal(state, expected.final_states.to(dtype))
    with pytest.raises(ValueError, match="initial_state"):
        run(with_state(inputs, None), in_place=True)
    with pytest.raises(ValueError, match=r"cannot write to (an )?expanded initial_state"):
        run(with_state(inputs, state[:1].expand(state.shape)), in_place=True)


def pooled(inputs, dtype: torch.dtype):
    """Its states in slots of a pool with V before K; the others are NaN."""
    pool, slots = generate.pool(inputs.initial.to(dtype).mT, 2 * inputs.sequences)
    return replace(inputs, **{inputs.STATES: pool.mT}, state_indices=slots)


OF_DELTA_RULE = dict(
    batch=3, seqlen=2, values_per_key=2, key_dim=16, value_dim=20, initial_states=True
)
POOLED: dict[str, Any] = {
    "ssd": SSDCase(
        batch=3, seqlen=1, heads=4, groups=2, headdim=16, dstate=16, initial_states=True
    ),
    "gdn": GDNCase(**OF_DELTA_RULE),
    "kda": KDACase(**OF_DELTA_RULE),
}


@pytest.mark.parametrize("operator", POOLED)
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_a_servers_pool_in_place(operator, dtype, index):
    """A call writes the slots of its sequences, in the pool's dtype and layout, and no other."""
    inputs = pooled(POOLED[operator].inputs(), dtype)
    pool = getattr(inputs, inputs.STATES)
    slots = inputs.state_indices.long()
    before = pool.clone()
    others = torch.ones(len(pool), dtype=torch.bool)
    others[slots] = False
    out, states = get(operator, "reference").run(inputs.after(before[slots]), Precision())
    run = ssd_recurrent if operator == "ssd" else gdn_recurrent
    with pytest.raises(ValueError, match="in place"):
        run(replace(inputs, write_indices=slots))
    found = run(replace(inputs, state_indices=inputs.state_indices.to(index)), in_place=True)
    assert found.final_states is pool
    torch.testing.assert_close(found.out.float(), out, rtol=1e-5, atol=1e-6)
    rtol = 1e-6 if dtype == FP32 else torch.finfo(dtype).eps
    torch.testing.assert_close(pool[slots].float(), states, rtol=rtol, atol=1e-6)
    torch.testing.assert_close(pool[others], before[others], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("operator", POOLED)
def test_a_pool_is_only_read_by_calls_that_are_not_in_place(operator):
    """Packed sequences too, and with the state after every token; new states have the pool's
    layout.
    """
    for own in (dict(), dict(lengths=(0, 3, 0, 6))):
        inputs = POOLED[operator].but(**own).inputs()
        run = get(operator, "recurrent").run
        read = pooled(inputs, FP32)
        before = getattr(read, read.STATES).clone()
        for every in (0, 1):
            found = run(replace(read, state_every=every), Precision())
            expected = run(replace(inputs, state_every=every), Precision())
            for ours, other in zip(found, expected, strict=True):
                assert torch.equal(ours, other)
            assert operator == "ssd" or found.final_states.mT.is_contiguous()
        torch.testing.assert_close(
            getattr(read, read.STATES), before, rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("operator", POOLED)
def test_what_reads_no_pool_and_keeps_no_states_refuses_by_name(operator):
    inputs = POOLED[operator].inputs()
    for name in names(operator):
        one = get(operator, name)
        kept = replace(inputs, state_every=2)
        assert one.pools == (name == "recurrent")
        if not one.pools:
            with pytest.raises(UnsupportedError, match=f"{name}: .*state_indices"):
                one.run(pooled(inputs, FP32), Precision())
        if not one.keeps(kept):
            with pytest.raises(UnsupportedError, match=f"{name}: .*state"):
                one.run(kept, Precision())


@pytest.mark.parametrize("operator", POOLED)
@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (
            dict(state_indices=torch.zeros(2, dtype=torch.int32)),
            r"\(3,\), int32 or int64, not \(2,\)",
        ),
        (dict(state_indices=torch.zeros(3)), "not .* torch.float32"),
        (dict(write_indices=torch.zeros(3, 0).int()), "a column for each"),
        *(
            (dict(initial=states), "state_indices needs initial_state")
            for states in (None, torch.zeros(0, 4, 16, 16))
        ),
        (dict(initial=torch.zeros(6, 4, 16)), "must have shape"),
    ],
)
def test_pools_that_do_not_fit(operator, given, complaint):
    inputs = pooled(POOLED[operator].inputs(), FP32)
    changed = {inputs.STATES if name == "initial" else name: value for name, value in given.items()}
    with pytest.raises(ValueError, match=complaint):
        replace(inputs, **changed)


@pytest.mark.parametrize(("operator", "many"), [("gdn", 512), ("gdn", 1), ("kda", 1), ("ssd", 512)])
def test_every_state(operator, many, monkeypatch):
    """Its row for a token is the final state of a call that ends there; packed, each sequence's
    last is final.
    """
    monkeypatch.setattr("ssdprof.kernels.gdn.recurrent.MANY_HEADS", many)
    inputs, packed = (
        POOLED[operator].but(**own).inputs() for own in (BATCH, dict(lengths=(0, 3, 0, 6)))
    )
    run, plan = get(operator, "recurrent").run, get(operator, "recurrent").plan
    every = replace(inputs, state_every=1)
    out, states = run(every, Precision())
    if many == 1:  # programs are wider
        assert plan(every, Precision()).config["block_v"] == 32
    assert torch.equal(out, run(inputs, Precision()).out)
    for end in range(1, 7):
        cut = replace(
            inputs,
            **{
                name: getattr(inputs, name)[:, :end] for name in TOKENS[type(inputs)] if name != "z"
            },
        )
        expected = get(operator, "reference").run(cut, Precision()).final_states
        torch.testing.assert_close(
            states.unflatten(0, (2, 6))[:, end - 1], expected, rtol=1e-6, atol=1e-6
        )
    final_states = run(packed, Precision()).final_states
    assert torch.equal(
        run(replace(packed, state_every=1), Precision()).final_states[[2, 8]], final_states[[1, 3]]
    )
    if operator != "kda":
        with pytest.raises(ValueError, match="state_every"):
            RECURRENT[operator](replace(inputs, state_every=1), in_place=True)


@pytest.mark.parametrize("name", ["unfused", "recurrent"])
def test_long_keys_under_strong_gates_stay_finite(name):
    """Without gates, the inverse of such a chunk overflows in fp16."""
    inputs = GDNCase(seqlen=64, key_dim=64, l2norm=False, gate=8.0, dtype=FP16).inputs()
    inputs = replace(inputs, k=8 * inputs.k)
    for ours, expected in zip(
        get("gdn", name).run(inputs, Precision()), gdn_recurrence(inputs), strict=True
    ):
        torch.testing.assert_close(
            ours.double(), expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item()
        )
