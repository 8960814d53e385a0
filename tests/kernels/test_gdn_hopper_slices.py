"""K and V other than 128 on GDN's Hopper kernels, on a CPU (`gluon_emulator.py`), against the recurrence."""

from dataclasses import replace

import pytest
import torch
from gdn_hopper_cases import GDNCase, errors
from gluon_emulator import GDN, emulate

from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig
from ssdprof.kernels.gdn.hopper.slices import SlicedLaunch, unsupported
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput

OLMO = GDNCase(seqlen=130, key_heads=2, heads=2, key_dim=96, value_dim=192)
CASES = {
    "olmo": OLMO,
    "olmo, normalised, beta to 2": replace(OLMO, normalise=True, beta=2.0),
    "olmo, batch with states": replace(OLMO, batch=2, initial_state=True),
    "olmo, packed": replace(OLMO, lengths=(3, 0, 64, 70), initial_state=True),
    "one slice, two value heads a key head": GDNCase(key_heads=1, heads=2, key_dim=72, value_dim=120),
    "V 256": GDNCase(key_heads=1, heads=1, value_dim=256, initial_state=True),
}


def run(inputs: GDNInputs, config: GDNHopperConfig = GDNHopperConfig(segment=2), *, v_first: bool = False) -> GDNOutput:  # noqa: B008
    return SlicedLaunch(inputs, config, state_v_first=v_first)(inputs)


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_recurrence(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    emulate(monkeypatch, seed=1, source=GDN)
    inputs = CASES[name].inputs()
    result = run(inputs, GDNHopperConfig(segment=2, truncation_log2=float("-inf")))
    assert (result.out.shape, result.final_states.shape) == (inputs.v.shape, inputs.states_shape)
    assert result.out.is_contiguous()
    assert result.final_states.is_contiguous()
    assert max(errors(result, inputs)) < 4.5e-3


def test_final_states_with_v_before_k(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, seed=2, source=GDN)
    inputs = replace(OLMO, initial_state=True).inputs()
    k_first, v_first = (run(inputs, v_first=flag) for flag in (False, True))
    assert v_first.final_states.mT.is_contiguous()
    assert all(map(torch.equal, k_first, v_first))


def test_nan_stays_in_its_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, seed=3, source=GDN)
    inputs = OLMO.inputs()
    v = inputs.v.clone()
    v[0, 70, 0, 100] = float("nan")
    clean, result = run(inputs), run(replace(inputs, v=v))
    assert result.out[0, 70:, 0].isnan().any()
    assert torch.equal(result.out[..., :96], clean.out[..., :96])
    assert torch.equal(result.out[:, :, 1], clean.out[:, :, 1])


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (replace(OLMO, key_dim=60), "K 60"),
        (replace(OLMO, value_dim=100), ""),
        (replace(OLMO, value_dim=64), "V 64"),
        (replace(OLMO, value_dim=129), "V 129"),
        (OLMO, ""),
    ],
)
def test_sizes_that_it_takes(monkeypatch: pytest.MonkeyPatch, case: GDNCase, reason: str) -> None:
    monkeypatch.setattr("ssdprof.kernels.gdn.hopper.slices.unsupported_otherwise", lambda _inputs: "")
    found = unsupported(case.inputs())
    assert (reason in found) if reason else not found


def test_views_of_one_tensor_are_taken_and_heads_apart_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssdprof.kernels.gdn.hopper.slices.unsupported_otherwise", lambda _inputs: "")
    inputs = OLMO.inputs()
    wide = torch.cat([inputs.v, inputs.v], 3)
    assert "side by side" in unsupported(replace(inputs, v=wide[..., :192]))
    joined = torch.cat([inputs.v, inputs.v], 2)
    assert not unsupported(replace(inputs, v=joined[:, :, :2]))
