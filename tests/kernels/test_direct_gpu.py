"""Every launch of a kernel after its first goes through the driver, and writes the same bits as Triton's launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gdn_hopper_cases import GDNCase
from sanitizer_target import on_the_gpu
from ssd_cases import Case

from ssdprof.kernels import get
from ssdprof.kernels import launch as launching
from ssdprof.kernels.launch import Launcher
from ssdprof.kernels.precision import Precision

pytestmark = pytest.mark.gpu

GDN = {
    "long": GDNCase(key_heads=2, heads=4, seqlen=16384, gate=-1e-4),
    "normalised, initial state": GDNCase(key_heads=2, heads=4, seqlen=1000, normalise=True, initial_state=True),
    "batch": GDNCase(key_heads=16, heads=32, batch=8, seqlen=300),
    "packed": GDNCase(key_heads=2, heads=4, lengths=(70, 0, 900), initial_state=True),
    "olmo": GDNCase(key_heads=2, heads=2, key_dim=96, value_dim=192, seqlen=500),
    "60": GDNCase(key_heads=2, heads=4, key_dim=60, value_dim=60, seqlen=500),
    "step": GDNCase(key_heads=2, heads=4, batch=3, seqlen=1, initial_state=True),
}
SSD = {
    "mamba2": dict(heads=80, headdim=64, dstate=128, seqlen=1024),
    "n 256": dict(heads=8, headdim=128, dstate=256, seqlen=1024),
    "packed": dict(heads=4, headdim=64, dstate=128, lengths=(70, 0, 900)),
    "step": dict(heads=4, headdim=64, dstate=128, batch=3, seqlen=1, initial_states=True),
}
CALLS: dict[str, Callable[[], Any]] = {
    **{f"gdn, {name}": lambda case=case: on_the_gpu(case.inputs()) for name, case in GDN.items()},
    **{
        f"ssd, {name}": lambda case=case: Case(device="cuda", dtype=torch.bfloat16, **case).inputs()
        for name, case in SSD.items()
    },
}


@pytest.mark.parametrize("kernel", ["fused", "unfused"])
@pytest.mark.parametrize("name", CALLS)
def test_the_drivers_launches_write_what_tritons_do(name: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = CALLS[name]()
    operator = name.split(",")[0]
    call = get(operator, kernel).run
    left: list[str] = []
    launch = Launcher.__call__

    def watched(self: Launcher, programs: int, *tensors: Any) -> None:
        launch(self, programs, *tensors)
        if self._direct is None:
            left.append(self.kernel.fn.__name__)

    monkeypatch.setattr(Launcher, "__call__", watched)
    with monkeypatch.context() as tritons:
        tritons.setattr(launching.DirectLaunch, "__call__", lambda *_: False)
        expected = [call(inputs, Precision()) for _ in range(2)][1]
    found = [call(inputs, Precision()) for _ in range(3)]  # each at other addresses
    assert all(all(map(torch.equal, output, expected)) for output in found)
    assert not left, f"only Triton launches {left}"
