"""Implementations by name, and the public names of `ssdprof.kernels`."""

import pytest
import torch

import ssdprof.kernels
from ssdprof.kernels import Precision, registry
from ssdprof.kernels.registry import Implementation, Plan
from ssdprof.kernels.ssd import unfused


def test_the_oracle_comes_first_then_the_baseline():
    assert ssdprof.kernels.names("ssd")[:2] == ["reference", "unfused"]
    assert ssdprof.kernels.get("ssd", "unfused").plan is unfused.plan


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(KeyError, match=r"no implementation 'fast' of ssd; there are: .*unfused"):
        ssdprof.kernels.get("ssd", "fast")


def test_a_name_is_taken_once(monkeypatch):
    monkeypatch.setattr(registry, "_implementations", {})

    def plan(_inputs, _precision: Precision) -> Plan:
        return Plan(variant="none", launches=0)

    mine = Implementation(
        operator="ssd", name="mine", run=lambda inputs, _precision: inputs, plan=plan
    )
    assert registry.register(mine) is mine
    assert registry.get("ssd", "mine") is mine
    with pytest.raises(ValueError, match="ssd/mine is registered already"):
        registry.register(mine)


def test_exported_names_are_there_and_no_other():
    assert all(callable(getattr(ssdprof.kernels, name)) for name in ssdprof.kernels.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'ssd_fast'"):
        _ = ssdprof.kernels.ssd_fast


def test_intermediate_dtype():
    assert Precision().intermediate_dtype(torch.bfloat16) == torch.float32
    relaxed = Precision(intermediates="relaxed")
    for dtype in (torch.float16, torch.bfloat16):
        assert relaxed.intermediate_dtype(dtype) == dtype
    assert relaxed.intermediate_dtype(torch.float32) == torch.bfloat16


def test_a_precision_that_is_none_is_refused():
    with pytest.raises(ValueError, match="must be 'exact' or 'relaxed', not 'loose'"):
        Precision(intermediates="loose")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="float16 or bfloat16, not"):
        Precision(state_dtype=torch.float64)
