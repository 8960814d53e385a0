"""Every launch of a kernel after its first goes through the driver, and writes the same bits as Triton's launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import BF16, GDNCase, SSDCase
from subjects import GDN_ON_HOPPER, OLMO

from ssdprof.kernels import get
from ssdprof.kernels import launch as launching
from ssdprof.kernels.launch import Launcher
from ssdprof.kernels.precision import Precision

pytestmark = pytest.mark.gpu

LAB = GDNCase(**GDN_ON_HOPPER | dict(key_heads=2), device="cuda")
MAMBA2 = SSDCase(heads=4, headdim=64, dstate=128, dtype=BF16, device="cuda")
CALLS: dict[str, Any] = {
    "gdn, long": LAB.but(seqlen=16384, gate=1e-4),
    "gdn, normalised, initial state": LAB.but(seqlen=1000, l2norm=True, initial_states=True),
    "gdn, batch": LAB.but(key_heads=16, batch=8, seqlen=300),
    "gdn, packed": LAB.but(lengths=(70, 0, 900), initial_states=True), "gdn, olmo": LAB.but(**OLMO, seqlen=500),
    "gdn, 60": LAB.but(key_dim=60, value_dim=60, seqlen=500),
    "gdn, step": LAB.but(batch=3, seqlen=1, initial_states=True), "ssd, mamba2": MAMBA2.but(heads=80, seqlen=1024),
    "ssd, n 256": MAMBA2.but(heads=8, headdim=128, dstate=256, seqlen=1024),
    "ssd, packed": MAMBA2.but(lengths=(70, 0, 900)), "ssd, step": MAMBA2.but(batch=3, seqlen=1, initial_states=True),
}  # fmt: skip


@pytest.mark.parametrize("kernel", ["fused", "unfused"])
@pytest.mark.parametrize("name", CALLS)
def test_the_drivers_launches_write_what_tritons_do(name: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = CALLS[name].inputs()
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
