"""A call is prepared once for each signature; later calls launch the compiled kernels with the
right arguments.
"""

import gc
import os
import subprocess
import sys
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from kernel_cases import EXACT, RELAXED, SSDCase

from ssdprof.kernels import launch as launching
from ssdprof.kernels.launch import Constants, Launcher, kept, launch
from ssdprof.kernels.ssd import fused
from ssdprof.kernels.ssd.config import SSDPortableConfig

CASE = SSDCase(seqlen=20, gate=True, initial_states=True)


class Kernel:
    """Records its launches: through Triton, which returns the compiled kernel, or of the compiled
    kernel.
    """

    def __init__(self, *, compiles: bool = True, fails: bool = False) -> None:
        self.launches: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []
        self.collecting: list[bool] = []  # whether garbage is collected while Triton compiles
        self._compiles = compiles
        self._fails = fails

    @staticmethod
    def fn(a: Any, b: Any, stride: Any, size: Any, BLOCK: Any, DEEP: Any) -> None:
        """Has the names of its arguments."""

    def __getitem__(self, grid: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            self.launches.append(("triton", grid, arguments, options))
            self.collecting.append(gc.isenabled())
            if self._fails:
                raise RuntimeError
            return Compiled(self) if self._compiles else None

        return run


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: self._kernel.launches.append(("compiled", grid, arguments, {}))


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_kept", {})
    monkeypatch.setattr(fused.FUSED, "launches", {})


def python(*arguments: str, **environment: str) -> str:
    """The output of another process."""
    environ = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    } | environment
    ran = subprocess.run(
        [sys.executable, *arguments], env=environ, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


# --- importing kernels


def test_triton_hashes_itself_beside_what_comes_before_the_first_call():
    """In a process that only imports kernels, if they are for a GPU."""
    code = "import torch; torch.cuda.device_count = lambda: 1"
    code += "; from ssdprof.kernels import launch, ssd_fused; launch.wait_for_hash()"
    code += "; from triton.runtime.cache import triton_key; print(triton_key.cache_info().currsize)"
    assert int(python("-c", code, TRITON_INTERPRET="0")) == 1


DRIVER_REFUSED = """
import torch

def start():
    raise AssertionError("the driver was started")

torch.cuda._is_compiled = lambda: True
torch._C._cuda_getDeviceCount = torch._C._cuda_init = start
torch.cuda._device_count_nvml = lambda: 1
from ssdprof.kernels import device, ssd_fused
print(device.INTERPRETED)
"""


def test_importing_kernels_leaves_the_driver_to_processes_forked_afterwards():
    assert python("-c", DRIVER_REFUSED) == "False\n", "NVML was not asked"


# --- one kernel


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_first_launch_waits_for_the_hash_and_collects_no_garbage(
    monkeypatch: pytest.MonkeyPatch, enabled: bool, fails: bool
):
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
def test_what_triton_would_tell_apart_is_told_apart(other: Any):
    assert kinds(USUAL, other, USUAL, other) == ["triton", "triton", "compiled", "compiled"]


def test_not_everything_is_kept_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launching, "MOST_KEPT", 3)
    launches = {}
    assert [kept(launches, key, lambda: 5) for key in range(8)] == [5] * 8
    assert 0 < len(launches) <= 3


# --- a whole call


def test_a_call_is_prepared_once_and_again_after_forgetting(monkeypatch: pytest.MonkeyPatch):
    chosen = []
    choose = SSDPortableConfig.choose

    def noted(*arguments: Any) -> SSDPortableConfig:
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
