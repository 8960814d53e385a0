"""Launches through the CUDA driver: their arguments, and when Triton's launcher is used instead."""

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ssdprof.kernels import launch as launching
from ssdprof.kernels.launch import Launcher, direct_launch
from ssdprof.kernels.tensors import rows

FUNCTION = 1234
STREAM = 77
SIGNATURE = {
    "rows": "tensordesc<bf16[8, 64],layout>",
    "x": "*bf16",
    "absent": "constexpr",
    "y": "*fp32",
    "strides": ("i32", "constexpr", "i64"),
    "scale": "fp32",
    "SIZE": "constexpr",
}
SIZES = (128, 4, 4, 8, 8, 8, 8, 4, 8, 4, 8, 8)  # the last two: Triton's scratch memory
META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [8, 64], "fp4_padded": False}
CONSTANTS = ((7, 1, 1 << 40), 0.5, 64)


@dataclass
class FakeDriver:
    """Returns a fixed status for launches, and records their arguments."""

    status: int = 0
    sizes: tuple[int, ...] = SIZES  # of the kernel's parameters
    launches: list[tuple[Any, ...]] = field(default_factory=list)
    encoded: list[int] = field(default_factory=list)

    def cuTensorMapEncodeTiled(self, where: int, *arguments) -> int:
        """Encodes a map that begins with the address."""
        assert where % 64 == 0, "the driver requires it"
        kind, rank, address, sizes, strides, block, steps, *choices = arguments
        assert (kind, rank, [*sizes], [*block], [*steps]) == (9, 2, [64, 16], [64, 8], [1, 1])
        assert ([*strides][:1], choices) == ([128], [0, META["swizzle"], 2, 0])
        self.encoded.append(address)
        ctypes.c_int64.from_address(where).value = address
        return 0

    def cuLaunchKernel(self, *arguments) -> int:
        *numbers, parameters, extra = arguments
        assert extra is None
        kinds = {4: ctypes.c_int32, 8: ctypes.c_int64, 128: ctypes.c_int64}
        values = [
            kinds[size].from_address(where).value
            for size, where in zip(self.sizes, parameters, strict=True)
        ]
        self.launches.append((*numbers, values))
        return self.status


class Compiled:
    """Replaces Triton's compiled kernel."""

    function = FUNCTION

    def __init__(self, parameters: int = len(SIZES), signature=SIGNATURE, **metadata):
        plain = dict(
            num_warps=4,
            shared=1000,
            num_ctas=1,
            launch_cooperative_grid=False,
            launch_pdl=False,
            global_scratch_size=0,
            profile_scratch_size=0,
            tensordesc_meta=[META],
        )
        self.metadata = SimpleNamespace(**plain | metadata)
        self.src = SimpleNamespace(signature=signature)
        listed = ",\n".join(
            f"\t.param .u64 .ptr .global .align 1 kernel_param_{i}" for i in range(parameters)
        )
        self.asm = {
            "ptx": (
                f".visible .entry kernel(\n{listed}\n)\n.reqntid 128\n{{\n\tld.param.b64 "
                f"%rd1, [param];\n}}"
            )
        }
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]):
        return lambda *arguments: self.launched.append((grid, *arguments))


@pytest.fixture
def driver(monkeypatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(launching, "cuda_driver", lambda: fake)
    active = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda _device: STREAM
    )
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    return fake


def tensors() -> tuple[TensorDescriptor, torch.Tensor, None, torch.Tensor]:
    x = torch.zeros(16, 64, dtype=torch.bfloat16)
    return rows(x.dtype, 16, block=(8, 64))(x), x, None, torch.zeros(3)


GROUPED = {"rows": SIGNATURE["rows"], "tensors": ("*bf16", "constexpr", "*fp32")}
GROUPED |= {name: SIGNATURE[name] for name in ("strides", "scale", "SIZE")}


@pytest.mark.parametrize("grouped", [False, True], ids=["apart", "tensors in one argument"])
def test_a_launch_has_the_addresses_of_its_own_tensors(driver: FakeDriver, grouped):
    first = tensors()
    given = (first[0], first[1:]) if grouped else first
    signature = GROUPED if grouped else SIGNATURE
    # `first` lives on, or other tensors may get its addresses
    launch: Any = direct_launch(Compiled(signature=signature), given, CONSTANTS)
    for programs in (5, 6):
        ours = rows, x, _, y = tensors()
        assert launch(programs, ours)
        values = [
            rows.base.data_ptr(),
            16,
            64,
            64,
            1,
            x.data_ptr(),
            y.data_ptr(),
            7,
            1 << 40,
            0x3F000000,  # 0.5
            0,
            0,
        ]
        assert driver.launches.pop() == (FUNCTION, programs, 1, 1, 128, 1, 1, 1000, STREAM, values)


def test_a_descriptor_is_encoded_once_for_each_address(driver: FakeDriver, monkeypatch):
    """Unless too many are kept; but a launch drops none of its own."""
    driver.sizes = SIZES[:5] * 2
    kinds = dict.fromkeys("ab", SIGNATURE["rows"])
    *kept, other = ([tensors()[0] for _ in kinds] for _ in range(3))
    addresses = [[one.base.data_ptr() for one in pair] for pair in (*kept, other)]
    launch: Any = direct_launch(Compiled(10, kinds, tensordesc_meta=[META] * 2), (*kept[0],), ())
    for _ in range(2):
        assert all(launch(1, pair) for pair in kept)
    monkeypatch.setattr(launching, "_MOST_ENCODED", 5)
    assert all(launch(1, pair) for pair in (other, other, kept[0]))
    assert driver.encoded == [*addresses[0], *addresses[1], *addresses[2], *addresses[0]]
    launched = [[values[0], values[5]] for *_, values in driver.launches]
    assert launched == [addresses[i] for i in (0, 1, 0, 1, 2, 2, 0)]


def test_triton_launches_while_a_launch_hook_is_set(driver: FakeDriver):
    launch: Any = direct_launch(Compiled(), tensors(), CONSTANTS)
    hook = lambda _metadata: None  # noqa: E731
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(hook)
    try:
        assert not launch(1, tensors())
    finally:
        hooks.remove(hook)
    assert not driver.launches
    assert launch(1, tensors())


UNUSUAL = [
    dict(num_ctas=2),
    dict(launch_cooperative_grid=True),
    dict(launch_pdl=True),
    dict(global_scratch_size=8),
    dict(profile_scratch_size=8),
    dict(tensordesc_meta=None),
    dict(parameters=len(SIZES) - 3),
    dict(parameters=len(SIZES) + 1),
    *(dict(signature=SIGNATURE | {"scale": kind}) for kind in ("i1", "fp64", SIGNATURE["rows"])),
]


@pytest.mark.parametrize("compiled", UNUSUAL, ids=str)
def test_only_triton_launches_what_is_unusual(driver: FakeDriver, compiled):
    """Options that this package does not use, arguments of other kinds, other parameters."""
    assert direct_launch(Compiled(**compiled), tensors(), CONSTANTS) is None
    assert not driver.launches


def test_without_a_driver_triton_launches(monkeypatch):
    monkeypatch.setattr(launching, "cuda_driver", lambda: None)
    assert direct_launch(Compiled(), tensors(), CONSTANTS) is None


class Kernel:
    """Replaces a kernel that Triton compiles at its first launch."""

    def __init__(self):
        self.compiled = Compiled()

    @staticmethod
    def fn(rows, x, absent, y, strides, scale, SIZE): ...  # type: ignore[no-untyped-def]

    def __getitem__(self, _grid):
        return lambda *_arguments, **_options: self.compiled


def test_a_launcher_leaves_the_first_launch_and_refused_ones_to_triton(driver: FakeDriver):
    """Triton then reports the error."""
    kernel = Kernel()
    launcher = Launcher(kernel, CONSTANTS[:2], {"SIZE": 64})
    launcher(3, *tensors())
    assert not driver.launches
    launcher(4, *tensors())
    assert [numbers[1] for numbers in driver.launches] == [4]
    assert not kernel.compiled.launched
    driver.status = 700
    ours = tensors()
    launcher(5, *ours)
    assert kernel.compiled.launched == [((5, 1, 1), *ours, *CONSTANTS)]
    driver.status = 0
    launcher(6, *ours)
    assert len(kernel.compiled.launched) == 1
