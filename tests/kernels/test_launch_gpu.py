"""Launches on a GPU: kept launches give the results of newly prepared calls, and profilers see
them.  Every launch of a kernel after its first goes through the driver, and writes the same bits as
Triton's launch.
"""

from dataclasses import replace

import pytest
import torch
import triton
from fakes import needs_two_gpus
from kernel_cases import BF16, EXACT, FP16, FP32, RELAXED, GDNCase, KDACase, SSDCase, assert_bitwise
from targets import GDN_ON_HOPPER, OLMO

from ssdprof.kernels import SSDInputs, get
from ssdprof.kernels import launch as launching
from ssdprof.kernels.launch import Launcher
from ssdprof.kernels.ssd import fused
from ssdprof.kernels.ssd.unfused import run as run_unfused

pytestmark = pytest.mark.gpu

SMALL = dict(heads=4, headdim=64, dstate=64, dtype=BF16, device="cuda")
CASES = {
    "as it is": SSDCase(**SMALL, seqlen=900), "batch": SSDCase(**SMALL, seqlen=900, batch=3),
    "shorter": SSDCase(**SMALL, seqlen=899), "one position": SSDCase(**SMALL, seqlen=1),
    "initial states": SSDCase(**SMALL, seqlen=900, initial_states=True),
    "D (h, p)": SSDCase(**SMALL, seqlen=900, skip="(h, p)"),
    "no D": SSDCase(**SMALL, seqlen=900, skip=""),
    "packed": SSDCase(**SMALL, lengths=(700, 0, 200)), "z": SSDCase(**SMALL, seqlen=900, gate=True),
    "fp16": SSDCase(**SMALL | dict(dtype=FP16), seqlen=900),
    "fp32": SSDCase(**SMALL | dict(dtype=FP32), seqlen=300),
}  # fmt: skip
# not aligned to 16 bytes, which the compiled kernel assumes
SHIFTED = ("A", "D", "dt_bias", "dt", "x")


def shifted(inputs: SSDInputs, name: str) -> SSDInputs:
    """The same numbers, with `name` one element further in its memory."""
    tensor = getattr(inputs, name)
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:]
    return replace(inputs, **{name: memory.view(tensor.shape).copy_(tensor)})


def variants(seed: int) -> dict[str, SSDInputs]:
    inputs = {name: replace(case, seed=seed).inputs() for name, case in CASES.items()}
    return inputs | {f"{name} shifted": shifted(inputs["as it is"], name) for name in SHIFTED}


LAB = GDNCase(**GDN_ON_HOPPER | dict(key_heads=2), device="cuda")
KIMI = KDACase(key_heads=2, key_dim=128, value_dim=128, dtype=BF16, device="cuda")
LARGE = SSDCase(heads=4, headdim=64, dstate=128, dtype=BF16, device="cuda")
CALLS = {
    "gdn, long": LAB.but(seqlen=16384, gate=1e-4),
    "gdn, normalised, initial state": LAB.but(seqlen=1000, l2norm=True, initial_states=True),
    "gdn, batch": LAB.but(key_heads=16, batch=8, seqlen=300),
    "gdn, packed": LAB.but(lengths=(70, 0, 900), initial_states=True),
    "gdn, olmo": LAB.but(**OLMO, seqlen=500),
    "gdn, 60": LAB.but(key_dim=60, value_dim=60, seqlen=500),
    "gdn, step": LAB.but(batch=3, seqlen=1, initial_states=True),
    "kda, hopper": KIMI.but(seqlen=1000),
    "kda, hopper, packed": KIMI.but(lengths=(70, 0, 900), initial_states=True),
    "kda, hopper, whole": KIMI.but(key_heads=66, values_per_key=2, seqlen=300),
    "ssd, mamba2": LARGE.but(heads=80, seqlen=1024),
    "ssd, n 256": LARGE.but(heads=8, headdim=128, dstate=256, seqlen=1024),
    "ssd, packed": LARGE.but(lengths=(70, 0, 900)),
    "ssd, step": LARGE.but(batch=3, seqlen=1, initial_states=True),
}  # fmt: skip


@pytest.mark.parametrize("kernel", ["fused", "unfused"])
@pytest.mark.parametrize("name", CALLS)
def test_the_drivers_launches_write_what_tritons_do(name, kernel, monkeypatch):
    inputs = CALLS[name].inputs()
    operator = name.split(",")[0]
    call = get(operator, kernel).run
    if operator == "kda" and kernel == "fused":
        variant = "hopper, whole" if name.endswith("whole") else "hopper"
        assert get(operator, kernel).plan(inputs, EXACT).variant == variant
    left = []
    launch = Launcher.__call__

    def watched(self: Launcher, programs: int, *tensors):
        launch(self, programs, *tensors)
        if self._direct is None:
            left.append(self.kernel.fn.__name__)

    monkeypatch.setattr(Launcher, "__call__", watched)
    with monkeypatch.context() as tritons:
        tritons.setattr(launching.DirectLaunch, "__call__", lambda *_: False)
        expected = [call(inputs, EXACT) for _ in range(2)][1]
    found = [call(inputs, EXACT) for _ in range(3)]  # each at other addresses
    assert all(all(map(torch.equal, output, expected)) for output in found)
    assert not left, f"only Triton launches {left}"


@pytest.mark.parametrize("precision", [EXACT, RELAXED], ids=str)
def test_calls_of_many_signatures_in_turns(precision):
    fused.FUSED.launches.clear()
    prepared = 0
    for seed in range(3):
        for name, inputs in variants(seed).items():
            expected = fused.FUSED.prepare(inputs, precision)(inputs)
            assert_bitwise(fused.run(inputs, precision), expected)
            prepared += seed == 0
            assert len(fused.FUSED.launches) == prepared, name


@pytest.mark.parametrize("name", ["as it is", "z"])
def test_profilers_are_told_of_every_launch(name):
    inputs = CASES[name].inputs()
    told = []

    def note(metadata):
        told.append(dict(metadata.get()))

    triton.knobs.runtime.launch_enter_hook.add(note)
    try:
        for _ in range(3):
            fused.run(inputs)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(note)
    assert len(told) == 3
    assert told[1] == told[0] == told[2]


def test_on_the_stream_that_is_current():
    inputs = CASES["as it is"].inputs()
    expected = fused.run(inputs)
    x = inputs.x.clone()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        inputs.x.copy_(2 * x)  # on another stream, the kernel would not wait for it
        doubled = fused.run(inputs)
    stream.synchronize()
    assert not torch.equal(doubled.out, expected.out)
    assert_bitwise(doubled, fused.FUSED.prepare(inputs, EXACT)(inputs))


@needs_two_gpus
def test_on_the_gpu_of_the_tensors():
    here = CASES["as it is"].inputs()
    there = replace(
        here,
        **{name: t.to("cuda:1") for name, t in vars(here).items() if isinstance(t, torch.Tensor)},
    )
    expected = fused.run(here)
    for run in (fused.run, fused.run, run_unfused, run_unfused):
        output = run(there)
        assert output.out.device == torch.device("cuda", 1)
        assert torch.cuda.current_device() == 0
        again = run(here)
        for ours, theirs in zip(output, again, strict=True):
            assert torch.equal(ours.cpu(), theirs.cpu())
    assert_bitwise(fused.run(here), expected)
