"""A call is prepared once for each signature; later calls launch the compiled kernels with the
right arguments.
"""

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from kernel_cases import EXACT, RELAXED, SSDCase
from torchrun import python

from ssdprof.kernels import launch as launching
from ssdprof.kernels.launch import Constants, Launcher, kept, launch
from ssdprof.kernels.ssd import fused
from ssdprof.kernels.ssd.config import SSDPortableConfig

CASE = SSDCase(seqlen=20, gate=True, initial_states=True)


class Kernel:
    """Records its launches: through Triton, which returns the compiled kernel, or of the compiled
    kernel.
    """

    def __init__(self, *, compiles: bool = True, fails: bool = False):
        self.launches: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []
        self.collecting: list[bool] = []  # whether garbage is collected while Triton compiles
        self._compiles = compiles
        self._fails = fails

    @staticmethod
    def fn(a, b, stride, size, BLOCK, DEEP):
        """Has the names of its arguments."""

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.launches.append(("triton", grid, arguments, options))
            self.collecting.append(gc.isenabled())
            if self._fails:
                raise RuntimeError
            return Compiled(self) if self._compiles else None

        return run


class Compiled:
    def __init__(self, kernel: Kernel):
        self._kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self._kernel.launches.append(("compiled", grid, arguments, {}))


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(launching, "_kept", {})
    monkeypatch.setattr(fused.FUSED, "launches", {})


# --- importing kernels


IMPORTED = """
import torch
from triton.runtime.cache import triton_key

def start():
    raise AssertionError("the driver was started")

torch.cuda._is_compiled = lambda: True
torch._C._cuda_getDeviceCount = torch._C._cuda_init = start
torch.cuda._device_count_nvml = lambda: 1
from ssdprof.kernels import device, launch, ssd_fused
print(device.INTERPRETED)
launch.wait_for_hash()
print(triton_key.cache_info().currsize)
"""


def test_importing_kernels_for_a_gpu_starts_a_hash_of_triton_and_no_driver(monkeypatch):
    """The hash is made beside what comes before the first call; processes that are forked
    afterwards start the driver.
    """
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    ran = python("-c", IMPORTED)
    assert ran.stdout == "False\n1\n", f"NVML was not asked, or {ran.stderr}"


# --- one kernel


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_first_launch_waits_for_the_hash_and_collects_no_garbage(monkeypatch, enabled, fails):
    kernel = Kernel(fails=fails)
    waited = []
    before = gc.isenabled()
    monkeypatch.setattr(launching, "wait_for_hash", lambda: waited.append(len(kernel.launches)))
    launcher = Launcher(kernel, (3, 5), {"BLOCK": 16})
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(RuntimeError) if fails else nullcontext():
            launcher(7, "a", "b")
            launcher(7, "a", "b")
        assert (kernel.collecting, waited, gc.isenabled()) == ([False], [0], enabled)
    finally:
        (gc.enable if before else gc.disable)()


def test_a_second_launch_hands_over_every_argument_in_the_kernels_order():
    kernel = Kernel()
    launcher = Launcher(kernel, ((4, 1), 7), {"DEEP": True, "num_warps": 8, "BLOCK": 64})
    launcher(5, "a", None)
    launcher(6, "b", None)
    options = {
        "DEEP": True,
        "num_warps": 8,
        "BLOCK": 64,
        "enable_fp_fusion": True,
        "sanitize_overflow": False,
    }
    assert kernel.launches == [
        ("triton", (5, 1, 1), ("a", None, (4, 1), 7), options),
        ("compiled", (6, 1, 1), ("b", None, (4, 1), 7, 64, True), {}),
    ]


def test_constants_are_equal_by_name_and_value():
    assert Constants(A=1, B=True) == Constants(A=1, B=True) != Constants(A=2, B=True)
    assert len({Constants(A=1, B=2), Constants(A=1, B=2), Constants(A=2, B=1)}) == 2
    assert repr(Constants(A=1, B="x")) == "Constants(A=1, B='x')", (
        "Triton's key of a compiled kernel"
    )


def kinds(
    *calls: tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]], compiles: bool = True
) -> list[str]:
    """The kind of each of these launches of one kernel, in order."""
    kernel = Kernel(compiles=compiles)
    for tensors, scalars, options in calls:
        launch(kernel, 1, tensors, scalars, **options)
    return [kind for kind, *_ in kernel.launches]


WORDS = torch.zeros(64, dtype=torch.int32)
USUAL = ((WORDS, None), (1, 2.0), {"BLOCK": 64, "num_warps": 4})


def test_another_place_or_content_is_the_same_launch():
    elsewhere = ((torch.ones(99, dtype=torch.int32)[4:], None), *USUAL[1:])
    assert kinds(USUAL, USUAL, compiles=False) == ["triton", "triton"], "as in the interpreter"
    launching._kept.clear()
    assert kinds(USUAL, elsewhere, USUAL) == ["triton", "compiled", "compiled"]


@pytest.mark.parametrize(
    "other",
    [
        ((WORDS[1:], None), *USUAL[1:]),
        ((WORDS.view(torch.float32), None), *USUAL[1:]),
        ((None, WORDS), *USUAL[1:]),
        ((torch.zeros(64, dtype=torch.int32, device="meta")[1:], None), *USUAL[1:]),
        (USUAL[0], (1, 3.0), USUAL[2]),
        (USUAL[0], (1, 2), USUAL[2]),
        (USUAL[0], (True, 2.0), USUAL[2]),
        (*USUAL[:2], {"BLOCK": 32, "num_warps": 4}),
        (*USUAL[:2], {"BLOCK": 64, "num_warps": 8}),
        (*USUAL[:2], {"BLOCK": 64}),
    ],
    ids=[
        "alignment",
        "dtype",
        "None",
        "address",
        "value",
        "int",
        "bool",
        "constant",
        "warps",
        "no warps",
    ],
)
def test_what_triton_would_tell_apart_is_told_apart(other):
    assert kinds(USUAL, other, USUAL, other) == ["triton", "triton", "compiled", "compiled"]


def test_not_everything_is_kept_for_ever(monkeypatch):
    monkeypatch.setattr(launching, "MOST_KEPT", 3)
    launches = {}
    assert [kept(launches, key, lambda: 5) for key in range(8)] == [5] * 8
    assert 0 < len(launches) <= 3


# --- a whole call


def test_a_call_is_prepared_once_and_again_after_forgetting(monkeypatch):
    chosen = []
    choose = SSDPortableConfig.choose

    def noted(*arguments) -> SSDPortableConfig:
        chosen.append(choose(*arguments))
        return chosen[-1]

    monkeypatch.setattr(SSDPortableConfig, "choose", noted)
    for seed in range(3):
        inputs = CASE.but(seed=seed).inputs()
        ours = fused.run(inputs, EXACT)
        fresh = fused.FUSED.prepare(inputs, EXACT)(inputs)
        assert all(map(torch.equal, ours, fresh))
        chosen.pop()
    assert len(chosen) == 1
    for prepared, options in (
        (2, dict(precision=RELAXED)),
        (3, dict(batch_invariant=True)),
        (3, {}),
    ):
        fused.run(inputs, **options)
        assert len(chosen) == prepared
    fused.FUSED.launches.clear()
    fused.run(inputs)
    assert len(chosen) == 4


def test_tensors_of_a_call_are_not_kept_alive():
    inputs = CASE.inputs()
    output = fused.run(inputs)
    fused.run(inputs)
    alive = [
        weakref.ref(tensor) for tensor in (inputs.x, inputs.initial_states, inputs.dt_bias, *output)
    ]
    del inputs, output
    gc.collect()
    assert [ref() for ref in alive] == [None] * 5
