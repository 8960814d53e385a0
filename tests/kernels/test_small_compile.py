"""The kernels of one token and those around an operator compile for all GPUs, and spill nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from compile_target import CAPABILITIES, compiled, on_meta
from gdn_cases import Case as GDNCase
from ssd_cases import Case

from ssdprof.kernels.gdn.recurrent import GDNRecurrentConfig, GDNRecurrentLaunch
from ssdprof.kernels.gdn.unfused_step import three_stages
from ssdprof.kernels.mixer import causal_conv1d, gated_rms_norm
from ssdprof.kernels.ssd.recurrent import recurrent_launch, two_stages

pytestmark = pytest.mark.compiler

BF16 = torch.bfloat16
TOKEN = Case(batch=2, seqlen=1, heads=4, headdim=64, dstate=128, dtype=BF16, gate=True, initial_states=True)
SSD = {
    "bf16": TOKEN,
    "fp32, no state": replace(TOKEN, dtype=torch.float32, initial_states=False, gate=False, skip="(h, p)"),
    "packed": replace(TOKEN, batch=1, lengths=(3, 2)),
}
DELTA = GDNCase(batch=2, length=1, key_heads=2, values_per_key=2, key_dim=128, value_dim=128, dtype=BF16)
GDN = {"bf16": DELTA, "fp32": replace(DELTA, dtype=torch.float32), "K 256": replace(DELTA, key_dim=256)}


def ssd_recurrent(case: Case) -> None:
    inputs = on_meta(case.inputs())
    recurrent_launch(inputs)(inputs)


def gdn_recurrent(case: GDNCase) -> None:
    inputs = on_meta(case.inputs())
    GDNRecurrentLaunch(inputs, GDNRecurrentConfig.choose(inputs))(inputs)


def ssd_step(case: Case) -> None:
    two_stages(on_meta(case.inputs()))


def gdn_step(case: GDNCase) -> None:
    three_stages(on_meta(case.inputs()))


def convolution(*, stateful: bool) -> None:
    x, weight = torch.empty(2, 100, 256, dtype=BF16, device="meta"), torch.empty(256, 4, dtype=BF16, device="meta")
    state = torch.empty(2, 256, 3, dtype=BF16, device="meta") if stateful else None
    causal_conv1d(x, weight, weight[:, 0].contiguous(), initial_state=state, wants_final_state=stateful)


def norm(*, norm_first: bool) -> None:
    x, weight = torch.empty(2, 100, 512, dtype=BF16, device="meta"), torch.empty(512, dtype=BF16, device="meta")
    gated_rms_norm(x, x, weight, eps=1e-5, group_size=128 if norm_first else 512, norm_first=norm_first)


LAUNCHES: dict[str, Callable[[], object]] = {
    **{f"recurrent {name}": partial(ssd_recurrent, case) for name, case in SSD.items()},
    **{f"step {name}": partial(ssd_step, SSD[name]) for name in ("bf16", "fp32, no state")},
    **{f"convolution {stateful}": partial(convolution, stateful=stateful) for stateful in (False, True)},
    **{f"norm {first}": partial(norm, norm_first=first) for first in (False, True)},
}
GDN_LAUNCHES: dict[str, Callable[[], object]] = {
    **{f"recurrent {name}": partial(gdn_recurrent, case) for name, case in GDN.items()},
    **{f"step {name}": partial(gdn_step, case) for name, case in GDN.items()},
}


@pytest.mark.parametrize("table", ["LAUNCHES", "GDN_LAUNCHES"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_spills_nothing(table: str, capability: int) -> None:
    for label, kernels in compiled("test_small_compile", capability, table).items():
        for kernel in kernels:
            assert kernel.spilled_bytes == 0, f"{label}: {kernel.kernel}"
