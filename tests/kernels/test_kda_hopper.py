"""The first launch of Kimi Delta Attention on Hopper GPUs: in the emulator, and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gluon_emulator import KDA, emulate
from kernel_cases import BF16, EXACT, FP16, KDACase

from ssdprof.kernels.kda.fused import KDAPortableConfig, hopper_unsupported, portable_launch
from ssdprof.measure.accuracy import assert_passes

CASES: dict[str, dict[str, Any]] = {
    "drawn, a part of a chunk": dict(seqlen=70, key_heads=2, value_dim=32),
    "saturated": dict(gates="saturated"),
    "at the bound": dict(gates="bound", batch=2, seqlen=40),
    "no gates, beta up to 2": dict(gates="none", largest_beta=2.0),
    "gates of -inf, packed, an empty sequence": dict(gates="cuts", lengths=(65, 0, 1, 30), initial_states=True),
    "one channel kept, grouped heads": dict(gates="one channel", values_per_key=2),
    "fp16": dict(dtype=FP16, initial_states=True),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_right_for_every_gate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, seed=2, source=KDA)
    case = dict(seqlen=64, key_dim=128, value_dim=16, dtype=BF16) | CASES[name]
    inputs = KDACase(**case).inputs()
    config = KDAPortableConfig.choose_hopper(inputs, 132)
    assert_passes(portable_launch(inputs, EXACT, config, state_v_first=False)(inputs), inputs, EXACT)


def test_later_tokens_change_no_earlier_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """By bits, also within a chunk: no decay is a quotient of sums that reach further."""
    emulate(monkeypatch, seed=2, source=KDA)
    inputs = KDACase(seqlen=64, key_dim=128, value_dim=16, dtype=BF16).inputs()
    launch = portable_launch(inputs, EXACT, KDAPortableConfig.choose_hopper(inputs, 132), state_v_first=False)
    before = launch(inputs).out.clone()
    for tensor in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta):
        tensor[:, 33:] = tensor[:, 33:].flip(1)
    inputs.g[:, 40:] *= 100
    assert torch.equal(launch(inputs).out[:, :33], before[:, :33])


def test_other_calls_run_the_portable_kernel() -> None:
    assert hopper_unsupported(KDACase(key_dim=64).inputs()) == "anything but a Hopper GPU"
