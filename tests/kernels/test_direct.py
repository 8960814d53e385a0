"""Launches by the CUDA driver itself: what it is handed, and when Triton's launcher is to do it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ssdprof.kernels import _direct
from ssdprof.kernels._direct import DirectLaunch, direct_launch
from ssdprof.kernels._launch import Launcher
from ssdprof.kernels._tiles import Rows

FUNCTION, STREAM = 1234, 77
SIGNATURE = {
    "rows": "tensordesc<bf16[8, 64],layout>", "x": "*bf16", "absent": "constexpr", "y": "*fp32",
    "strides": ("i32", "constexpr", "i64"), "scale": "fp32", "SIZE": "constexpr",
}  # fmt: skip
SIZES = [128, 4, 4, 8, 8, 8, 8, 4, 8, 4, 8, 8]  # the last two: Triton's scratch memory
META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [8, 64], "fp4_padded": False}
CONSTANTS = ((7, 1, 1 << 40), 0.5, 64)


@dataclass
class FakeDriver:
    """Has a status for each function, and keeps what it is called with."""

    sizes: list[int] = field(default_factory=lambda: list(SIZES))
    launch_status: int = 0
    address_status: int = 0
    launches: list[tuple[Any, ...]] = field(default_factory=list)
    encoded: list[tuple[Any, ...]] = field(default_factory=list)

    def parameter(self, _function: int, index: int, offset: Any, size: Any) -> int:
        if index >= len(self.sizes):
            return 1
        offset._obj.value, size._obj.value = 0, self.sizes[index]
        return 0

    def encode(self, where: int, *arguments: Any) -> int:
        assert where % 64 == 0
        self.encoded.append(tuple(list(one) if isinstance(one, ctypes.Array) else one for one in arguments))
        _direct.Map.from_address(where).words[0] = arguments[2]
        return 0

    def replace_address(self, where: int, address: int) -> int:
        if not self.address_status:
            _direct.Map.from_address(where).words[0] = address
        return self.address_status

    def launch(self, *arguments: Any) -> int:
        *numbers, parameters, extra = arguments
        assert extra is None
        kinds = {4: ctypes.c_int32, 8: ctypes.c_int64, 128: ctypes.c_int64}
        values = [kinds[size].from_address(where).value for size, where in zip(self.sizes, parameters, strict=True)]
        self.launches.append((*numbers, values))
        return self.launch_status


class Compiled:
    """In the place of Triton's compiled kernel."""

    function = FUNCTION

    def __init__(self, **metadata: Any) -> None:
        plain = dict(
            num_warps=4, shared=1000, num_ctas=1, launch_cooperative_grid=False, launch_pdl=False,
            global_scratch_size=0, profile_scratch_size=0, tensordesc_meta=[META],
        )  # fmt: skip
        self.metadata = SimpleNamespace(**plain | metadata)
        self.src = SimpleNamespace(signature=SIGNATURE)
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments: self.launched.append((grid, *arguments))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(_direct, "cuda_driver", lambda: fake)
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _device: STREAM)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    return fake


def tensors() -> tuple[TensorDescriptor, torch.Tensor, None, torch.Tensor]:
    x = torch.zeros(16, 64, dtype=torch.bfloat16)
    return Rows(x.dtype, 16, block=(8, 64)).of(x), x, None, torch.zeros(3)


def prepared(first: tuple[Any, ...]) -> DirectLaunch:
    """After Triton's launch of these tensors, which are kept: or others might have their addresses."""
    launch = direct_launch(Compiled(), first, CONSTANTS)
    assert launch is not None
    return launch


def test_a_launch_has_the_addresses_of_its_own_tensors(driver: FakeDriver) -> None:
    first = tensors()
    launch = prepared(first)
    for programs in (5, 6):
        ours = rows, x, _, y = tensors()
        assert launch(programs, ours)
        scale = int.from_bytes(torch.tensor(0.5).numpy().tobytes(), "little")
        values = [rows.base.data_ptr(), 16, 64, 64, 1, x.data_ptr(), y.data_ptr(), 7, 1 << 40, scale, 0, 0]
        assert driver.launches.pop() == (FUNCTION, programs, 1, 1, 128, 1, 1, 1000, STREAM, values)


def test_a_descriptor_is_encoded_once_as_triton_does(driver: FakeDriver) -> None:
    """Dimensions from the innermost on; bf16 is 9, and 128 bytes are brought into L2 at once."""
    first = tensors()
    launch = prepared(first)
    launch(1, tensors())
    (encoded,) = driver.encoded
    dtype, rank, _, sizes, strides, block, ones, *rest = encoded
    assert (dtype, rank, sizes, strides[:1], block, ones) == (9, 2, [64, 16], [128], [64, 8], [1, 1])
    assert rest == [0, 3, 2, 0]


def test_triton_launches_what_somebody_watches(driver: FakeDriver) -> None:
    launch, hook = prepared(tensors()), lambda _metadata: None
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(hook)
    try:
        assert not launch(1, tensors())
    finally:
        hooks.remove(hook)
    assert not driver.launches
    assert launch(1, tensors())


@pytest.mark.parametrize("status", ["launch_status", "address_status"])
def test_triton_launches_what_the_driver_refuses(driver: FakeDriver, status: str) -> None:
    """And then says why."""
    first, kept = tensors(), tensors()
    launch = prepared(first)
    setattr(driver, status, 700)
    assert not launch(1, kept)
    setattr(driver, status, 0)
    assert launch(1, kept)
    assert driver.launches[-1][-1][0] == kept[0].base.data_ptr()


@pytest.mark.parametrize(
    "unusual",
    [
        dict(num_ctas=2), dict(launch_cooperative_grid=True), dict(launch_pdl=True), dict(global_scratch_size=8),
        dict(profile_scratch_size=8), dict(tensordesc_meta=None), dict(tensordesc_meta=[META | {"fp4_padded": True}]),
        dict(tensordesc_meta=[{}]),
    ],
    ids=str,
)  # fmt: skip
def test_only_triton_launches_with_what_this_package_does_not_use(driver: FakeDriver, unusual: dict[str, Any]) -> None:
    assert direct_launch(Compiled(**unusual), tensors(), CONSTANTS) is None
    assert not driver.launches


@pytest.mark.parametrize("sizes", [SIZES[:-3], [*SIZES, 4], [64, *SIZES[1:]]], ids=len)
def test_only_triton_launches_a_kernel_with_other_parameters(driver: FakeDriver, sizes: list[int]) -> None:
    driver.sizes = sizes
    assert direct_launch(Compiled(), tensors(), CONSTANTS) is None


@pytest.mark.parametrize("kind", ["i1", "fp64", "tensordesc<bf16[8, 64],layout>"])
def test_only_triton_launches_arguments_of_other_kinds(
    driver: FakeDriver, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert direct_launch(Compiled(), tensors(), CONSTANTS) is not None
    monkeypatch.setitem(SIGNATURE, "scale", kind)
    assert direct_launch(Compiled(), tensors(), CONSTANTS) is None
    assert not driver.launches


def test_without_a_driver_triton_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_direct, "cuda_driver", lambda: None)
    assert direct_launch(Compiled(), tensors(), CONSTANTS) is None


class Kernel:
    """In the place of a kernel that Triton compiles at its first launch."""

    def __init__(self) -> None:
        self.compiled = Compiled()

    @staticmethod
    def fn(rows, x, absent, y, strides, scale, SIZE) -> None: ...  # type: ignore[no-untyped-def]

    def __getitem__(self, _grid: Any) -> Any:
        return lambda *_arguments, **_options: self.compiled


def test_a_launcher_leaves_the_first_launch_and_refused_ones_to_triton(driver: FakeDriver) -> None:
    kernel = Kernel()
    launcher = Launcher(kernel, CONSTANTS[:2], {"SIZE": 64})
    launcher(3, *tensors())
    assert not driver.launches
    launcher(4, *tensors())
    assert [numbers[1] for numbers in driver.launches] == [4]
    assert not kernel.compiled.launched
    driver.launch_status = 1
    ours = tensors()
    launcher(5, *ours)
    assert kernel.compiled.launched == [((5, 1, 1), *ours, *CONSTANTS)]
