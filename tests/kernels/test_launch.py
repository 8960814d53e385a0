"""A call is prepared once for each signature; later calls launch the compiled kernels with the right arguments."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import EXACT, RELAXED, SSDCase
from triton.runtime.jit import JITFunction

from ssdprof.kernels import SSDInputs, UnsupportedError, ssd_fused
from ssdprof.kernels import launch as launching
from ssdprof.kernels.launch import Constants, LaunchCache, Launcher, launch
from ssdprof.kernels.ssd import fused
from ssdprof.kernels.ssd.config import SSDPortableConfig
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig
from ssdprof.kernels.ssd.hopper.launch import hopper_launch
from ssdprof.kernels.ssd.launch import SSDLaunch

CASE = SSDCase(seqlen=20, gate=True, initial_states=True)


class Kernel:
    """Records its launches: through Triton, which returns the compiled kernel, or of the compiled kernel."""

    def __init__(self, *, interpreted: bool = False) -> None:
        self.launches: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []
        self._compiled = None if interpreted else Compiled(self)

    @staticmethod
    def fn(a: Any, b: Any, stride: Any, size: Any, BLOCK: Any, DEEP: Any) -> None:
        """Has the names of its arguments."""

    def __getitem__(self, grid: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            self.launches.append(("triton", grid, arguments, options))
            return self._compiled

        return run


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: self._kernel.launches.append(("compiled", grid, arguments, {}))


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_kept", {})
    monkeypatch.setattr(fused, "_launches", LaunchCache())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hopper", "portable", "unfused"])
def test_kept_launches_are_those_that_triton_would_make(name: str) -> None:
    """1,500 calls with unusual strides, alignments, dtypes and sizes; most of them repeat earlier ones."""
    target = Path(__file__).with_name("launch_target.py")
    environ = os.environ | {"TRITON_INTERPRET": "0"}
    result = subprocess.run(
        [sys.executable, target, name], env=environ, capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr
    counts = json.loads(result.stdout)
    assert counts["wrong"] == 0
    assert counts["first"] > 200, "no variety"
    assert counts["repeated"] > 1000


# --- one kernel


@pytest.mark.parametrize(
    ("gpu", "interpret", "hashes"),
    [
        (True, "0", 1),
        pytest.param(True, "1", 0, marks=pytest.mark.slow),
        pytest.param(False, "0", 0, marks=pytest.mark.slow),
    ],
)
def test_triton_hashes_itself_beside_what_comes_before_the_first_call(gpu: bool, interpret: str, hashes: int) -> None:
    """In a process that only imports kernels, if they are for a GPU."""
    code = f"import torch; torch.cuda.device_count = lambda: {int(gpu)}"
    code += "; from ssdprof.kernels import launch, ssd_fused; launch.wait_for_hash()"
    code += "; from triton.runtime.cache import triton_key; print(triton_key.cache_info().currsize)"
    environ = os.environ | {"TRITON_INTERPRET": interpret}
    result = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert int(result.stdout) == hashes


DRIVER_REFUSED = """
import torch

def start():
    raise AssertionError("the driver was started")

torch.cuda._is_compiled = lambda: True
torch._C._cuda_getDeviceCount = torch._C._cuda_init = start
torch.cuda._device_count_nvml = lambda: 1
"""


def test_importing_kernels_leaves_the_driver_to_processes_forked_afterwards() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = DRIVER_REFUSED + "from ssdprof.kernels import device, ssd_fused; print(device.INTERPRETED)"
    result = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "False\n", "NVML was not asked"


@pytest.mark.parametrize("which", ["first", "second"])
def test_only_the_first_launch_waits_for_that_hash(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    kernel, waited = Kernel(), []
    launcher = Launcher(kernel, (3, 5), {"BLOCK": 16})
    if which == "second":
        launcher(7, "a", "b")
    monkeypatch.setattr(launching, "wait_for_hash", lambda: waited.append(len(kernel.launches)))
    launcher(7, "a", "b")
    assert waited == ([0] if which == "first" else [])


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_no_garbage_is_collected_while_a_kernel_is_compiled(enabled: bool, fails: bool) -> None:
    seen = []

    class Compiling(Kernel):
        def __getitem__(self, grid: Any) -> Any:
            def run(*_arguments: Any, **_options: Any) -> None:
                seen.append(gc.isenabled())
                if fails:
                    raise RuntimeError

            return run

    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(RuntimeError) if fails else nullcontext():
            Launcher(Compiling(), (), {})(1)
        assert seen == [False]
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_a_second_launch_hands_over_every_argument_in_the_kernels_order() -> None:
    kernel = Kernel()
    launcher = Launcher(kernel, ((4, 1), 7), {"DEEP": True, "num_warps": 8, "BLOCK": 64})
    launcher(5, "a", None)
    launcher(6, "b", None)
    options = {"DEEP": True, "num_warps": 8, "BLOCK": 64, "enable_fp_fusion": True, "sanitize_overflow": False}
    assert kernel.launches == [
        ("triton", (5, 1, 1), ("a", None, (4, 1), 7), options),
        ("compiled", (6, 1, 1), ("b", None, (4, 1), 7, 64, True), {}),
    ]


def test_tensors_and_constants_are_one_argument_each_where_a_kernel_takes_them_so() -> None:
    class Grouped(Kernel):
        @staticmethod
        def fn(desc: Any, tensors: Any, strides: Any, size: Any, S: Any) -> None:  # type: ignore[override]
            """Has the names of its arguments."""

    kernel = Grouped()
    launcher = Launcher(kernel, (((1,), ()), 7), {"BLOCK": 64, "num_warps": 8})
    launcher(5, "desc", "a", None)
    launcher(6, "desc", "b", None)
    (_, _, first, options), (_, _, second, _) = kernel.launches
    S = options.pop("S")
    assert S.BLOCK == 64
    assert options == {"num_warps": 8, "enable_fp_fusion": True, "sanitize_overflow": False}
    assert first == ("desc", ("a", None), ((1,), ()), 7)
    assert second == ("desc", ("b", None), ((1,), ()), 7, S)


def test_constants_are_equal_by_name_and_value() -> None:
    assert Constants(A=1, B=True) == Constants(A=1, B=True) != Constants(A=2, B=True)
    assert len({Constants(A=1, B=2), Constants(A=1, B=2), Constants(A=2, B=1)}) == 2
    assert repr(Constants(A=1, B="x")) == "Constants(A=1, B='x')", "Triton's key of a compiled kernel"


def test_where_triton_returns_nothing_nothing_is_kept() -> None:
    kernel = Kernel(interpreted=True)
    launcher = Launcher(kernel, (), {})
    launcher(1)
    launcher(1)
    assert [kind for kind, *_ in kernel.launches] == ["triton", "triton"]


def kinds(*calls: tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]) -> list[str]:
    """The kind of each of these launches of one kernel, in order."""
    kernel = Kernel()
    for tensors, scalars, options in calls:
        launch(kernel, 1, tensors, scalars, **options)
    return [kind for kind, *_ in kernel.launches]


WORDS = torch.zeros(64, dtype=torch.int32)
USUAL = ((WORDS, None), (1, 2.0), {"BLOCK": 64, "num_warps": 4})


def test_another_place_or_content_is_the_same_launch() -> None:
    elsewhere = ((torch.ones(99, dtype=torch.int32)[4:], None), (1, 2.0), {"BLOCK": 64, "num_warps": 4})
    assert kinds(USUAL, elsewhere, USUAL) == ["triton", "compiled", "compiled"]


@pytest.mark.parametrize(
    "other",
    [
        ((WORDS[1:], None), *USUAL[1:]), ((WORDS.view(torch.float32), None), *USUAL[1:]), ((None, WORDS), *USUAL[1:]),
        ((torch.zeros(64, dtype=torch.int32, device="meta")[1:], None), *USUAL[1:]), (USUAL[0], (1, 3.0), USUAL[2]),
        (USUAL[0], (1, 2), USUAL[2]), (USUAL[0], (True, 2.0), USUAL[2]), (*USUAL[:2], {"BLOCK": 32, "num_warps": 4}),
        (*USUAL[:2], {"BLOCK": 64, "num_warps": 8}), (*USUAL[:2], {"BLOCK": 64}),
    ],
    ids=["alignment", "dtype", "None", "address", "value", "int", "bool", "constant", "warps", "no warps"],
)  # fmt: skip
def test_what_triton_would_tell_apart_is_told_apart(other: Any) -> None:
    assert kinds(USUAL, other, USUAL, other) == ["triton", "triton", "compiled", "compiled"]


def test_not_everything_is_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_MOST", 3)
    monkeypatch.setattr(fused, "_launches", LaunchCache(most=3))
    kinds(*(((None, None), (size,), {}) for size in range(8)))
    assert 0 < len(launching._kept) <= 3
    for seqlen in range(1, 8):
        fused.run(SSDCase(seqlen=seqlen).inputs())
    assert 0 < len(fused._launches._kept) <= 3


# --- a whole call


def test_a_call_is_prepared_once_and_right_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[SSDInputs] = []
    prepare = fused._prepare

    def counted(inputs: SSDInputs, *rest: Any) -> SSDLaunch:
        prepared.append(inputs)
        return prepare(inputs, *rest)

    monkeypatch.setattr(fused, "_prepare", counted)
    for seed in range(3):
        inputs = SSDCase(seqlen=20, gate=True, initial_states=True, seed=seed).inputs()
        ours, fresh = fused.run(inputs, EXACT), fused._prepare(inputs, EXACT, False)(inputs)
        assert torch.equal(ours.out, fresh.out)
        assert torch.equal(ours.final_states, fresh.final_states)
        prepared.pop()
    assert len(prepared) == 1
    fused.run(inputs, RELAXED)
    fused.run(inputs, EXACT, batch_invariant=True)
    assert len(prepared) == 3


def test_a_changed_choice_is_seen_after_forgetting(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = CASE.inputs()
    fused.run(inputs)
    chosen: list[SSDPortableConfig] = []
    choose = SSDPortableConfig.choose

    def noted(*arguments: Any) -> SSDPortableConfig:
        chosen.append(choose(*arguments))
        return chosen[-1]

    monkeypatch.setattr(SSDPortableConfig, "choose", noted)
    fused.run(inputs)
    assert not chosen
    fused.forget_launches()
    fused.run(inputs)
    assert len(chosen) == 1


def test_tensors_of_a_call_are_not_kept_alive() -> None:
    inputs = CASE.inputs()
    output = fused.run(inputs)
    fused.run(inputs)
    alive = [weakref.ref(tensor) for tensor in (inputs.x, inputs.initial_states, inputs.dt_bias, *output)]
    del inputs, output
    gc.collect()
    assert [ref() for ref in alive] == [None] * 5


@pytest.mark.parametrize("case", [SSDCase(batch=2, seqlen=70), SSDCase(lengths=(70, 0, 9))], ids=["batch", "packed"])
def test_descriptors_of_the_hopper_kernel_are_those_of_tensors(case: SSDCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile can begin at every position of every sequence, and ends at the latest with the sequence."""
    inputs = replace(case, heads=4, headdim=80, dstate=64, groups=2, dtype=torch.bfloat16).inputs()
    arguments: list[tuple[Any, ...]] = []
    monkeypatch.setattr(JITFunction, "run", lambda _, *args, **__: arguments.append(args))
    call = hopper_launch(inputs, EXACT, SSDHopperConfig(segment=1))
    for _ in range(2):
        output = call(inputs)
        tensors = (inputs.x, inputs.B, inputs.C, output.out)
        for described, tensor in zip(arguments.pop()[:4], tensors, strict=True):
            assert getattr(described.base, "tensor", described.base) is tensor
            heads, columns = tensor.shape[2:]
            assert (described.shape[1], described.shape[3]) == (heads, columns)
            for place, row, left in _positions(case):
                assert place[0] < described.shape[0]
                assert described.shape[2] - place[1] == left
                for head, column in product((0, heads - 1), (0, columns - 1)):
                    at = zip((place[0], head, place[1], column), described.strides, strict=True)
                    address = described.base.data_ptr() + tensor.element_size() * sum(i * step for i, step in at)
                    assert address == tensor.flatten(0, 1)[row, head, column].data_ptr()


def _positions(case: SSDCase) -> Iterator[tuple[tuple[int, int], int, int]]:
    """For each position: its first and third coordinate, its row, and the number of positions left in its sequence."""
    lengths = case.lengths or [case.seqlen] * case.batch
    total, begin = sum(lengths), 0
    for sequence, length in enumerate(lengths):
        for position in range(length):
            place = (begin + length, total - length + position) if case.lengths else (sequence, position)
            yield place, begin + position, length - position
        begin += length


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(dt=lambda i: i.dt[:, 1:]), "dt must have shape"),
        (dict(z=lambda i: i.z.double()), "z must be"),
        (dict(D=lambda i: i.D.to("meta")), "D is on meta"),
        (dict(chunk_size=lambda _: 0), "chunk_size must be a positive integer"),
        (dict(dt_limit=lambda _: (1.0, 0.5)), "dt_limit must be"),
        (dict(dt_limit=lambda _: (0.0, float("nan"))), "dt_limit must be"),
    ],
    ids=["shape", "dtype", "device", "chunk size", "limits", "NaN"],
)
def test_what_does_not_fit_is_refused_every_time(change: dict[str, Any], message: str) -> None:
    inputs = CASE.inputs()
    values = dict(vars(inputs))
    ssd_fused(**values)
    ((name, value),) = change.items()
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            ssd_fused(**values | {name: value(inputs)})


def test_what_no_kernel_does_is_refused_every_time() -> None:
    inputs = SSDCase(dstate=257).inputs()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="dstate is at most 256"):
            fused.run(inputs)


def test_a_signature_says_all_but_place_and_content() -> None:
    inputs = CASE.inputs()
    assert inputs.signature == SSDCase(seqlen=20, gate=True, initial_states=True, seed=5).inputs().signature
    others = [
        SSDCase(seqlen=21, gate=True, initial_states=True).inputs(), CASE.inputs(dt_softplus=False),
        CASE.inputs(dt_limit=(0.0, 1.0)), CASE.inputs(chunk_size=64), CASE.inputs(A=inputs.A.double()),
        CASE.inputs(dt=inputs.dt.contiguous()), CASE.inputs(dt_bias=torch.cat([inputs.dt_bias, inputs.dt_bias])[1:3]),
        CASE.inputs(D=None), CASE.inputs(D=None, dt_bias=None),
    ]  # fmt: skip
    signatures = {inputs.signature, *(other.signature for other in others)}
    assert len(signatures) == 1 + len(others)
