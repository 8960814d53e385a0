"""mamba_ssm's decoding kernel, with a stand-in that computes a step by its conventions."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ssdprof import operators
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, UnsupportedError
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.kernels.ssd.reference import ssd_recurrence
from ssdprof.operators.implementations import resolve

SSD = operators.get("ssd")


def inputs(length: int = 1, **fields: Any) -> SSDInputs:
    torch.manual_seed(0)
    B, C = torch.randn(2, 2, length, 2, 16)
    made: dict[str, Any] = {
        "x": torch.randn(2, length, 4, 8),
        "dt": torch.randn(2, length, 4),
        "A": -torch.rand(4),
        "B": B,
        "C": C,
        "D": torch.randn(4),
        "dt_bias": torch.randn(4),
        "dt_softplus": True,
        "initial_states": torch.randn(2, 4, 8, 16),
        "chunk_size": 16,
    }
    return SSDInputs(**(made | fields))


def step(
    state: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any = None, z: Any = None, dt_bias: Any = None,
    dt_softplus: bool = False,
) -> Any:  # fmt: skip
    """state (b, h, p, n), overwritten; x, dt, z (b, h, p); A (h, p, n); B, C (b, g, n); D, dt_bias (h, p)."""
    assert A.stride()[1:] == (0, 0), "one number a head, which the kernel's fast path wants to see"
    dt = F.softplus(dt + dt_bias) if dt_softplus else dt + dt_bias
    B, C = (one.repeat_interleave(x.shape[1] // one.shape[1], 1) for one in (B, C))
    state.mul_(torch.exp(dt[..., None] * A)).add_((dt * x)[..., None] * B[:, :, None])
    out = (state * C[:, :, None]).sum(-1) + D * x
    return out if z is None else out * F.silu(z)


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Implementation:
    package, module = ModuleType("mamba_ssm"), ModuleType("mamba_ssm.ops.triton.selective_state_update")
    package.__version__ = "9.9"  # type: ignore[attr-defined]
    module.selective_state_update = step  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mamba_ssm", package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    loaded = resolve(SSD, "selective_state_update")
    assert [str(precision) for precision in loaded.precisions("bf16", ())] == ["exact, fp32 states"]
    return loaded.present


def test_it_takes_a_step_and_leaves_the_state_as_it_was(peer: Implementation) -> None:
    given = inputs(z=torch.randn(2, 1, 4, 8))
    assert given.initial_states is not None
    before = given.initial_states.clone()
    for _ in range(2):
        out, states = peer.run(given, Precision())
        expected = ssd_recurrence(given)
        torch.testing.assert_close(out.double(), expected.out.double(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states.double(), expected.final_states.double(), rtol=1e-5, atol=1e-5)
    assert torch.equal(given.initial_states, before)


def test_a_sequence_may_begin_without_a_state(peer: Implementation) -> None:
    given = inputs(initial_states=None)
    expected = ssd_recurrence(given).out.double()
    torch.testing.assert_close(peer.run(given, Precision())[0].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "precision", "words"),
    [
        (inputs(2), Precision(), "one token of each sequence"),
        (inputs(), Precision(state_dtype=torch.float16), "fp32 states only"),
        (inputs(dt_limit=(0.0, 1.0)), Precision(), "no dt_limit"),
    ],
)
def test_what_it_does_not_do(peer: Implementation, given: SSDInputs, precision: Precision, words: str) -> None:
    for call in (peer.run, peer.plan):
        with pytest.raises(UnsupportedError, match=words):
            call(given, precision)
