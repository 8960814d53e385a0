"""Triton's launch hook, called by hand around a kernel that is compiled without a GPU."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import LazyDict

from ssdprof.measure.first_run import describe, recorded_launches

BLOCKS = (128, 256, 512)


def _copy_kernel(source_ptr, target_ptr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + o, tl.load(source_ptr + o).to(DTYPE))


def compiled(block: int, handle: int):
    """A compiled kernel as after loading, when Triton has set three attributes from the driver."""
    source = ASTSource(
        fn=triton.JITFunction(_copy_kernel),
        signature={
            "source_ptr": "*fp32",
            "target_ptr": "*fp32",
            "BLOCK": "constexpr",
            "DTYPE": "constexpr",
        },
        constexprs={"BLOCK": block, "DTYPE": tl.float32},
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 2})
    kernel.function = handle
    kernel.n_regs = 24
    kernel.n_spills = 0
    return kernel


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory) -> Iterator[None]:
    """A cache filled by another process, because this one cannot compile after a test has
    interpreted a kernel.
    """
    folder = str(tmp_path_factory.mktemp("triton"))
    environment = os.environ | {"TRITON_CACHE_DIR": folder, "TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, __file__], env=environment, check=True)
    with pytest.MonkeyPatch.context() as patch:
        # monkeypatching an attribute of knobs would leave it assigned
        patch.setenv("TRITON_CACHE_DIR", folder)
        yield


def launch(handle: int):
    triton.knobs.runtime.launch_enter_hook(
        LazyDict({"name": "_copy_kernel", "function": handle, "stream": 0})
    )


def test_a_kernel_is_described_by_its_configuration_and_resources():
    record = describe(compiled(BLOCKS[0], 1))
    assert record.kernel == "_copy_kernel"
    assert record.config["BLOCK"] == 128
    assert record.config["DTYPE"] == "fp32"
    assert (record.config["num_warps"], record.registers, record.spills) == (2, 24, 0)
    assert "source_ptr" not in record.config


def test_kernels_are_listed_once_in_the_order_of_their_first_launch():
    kernels = [
        compiled(block, handle) for block, handle in zip(BLOCKS, (0xA1, 0xA2, 0xA3), strict=True)
    ]
    with recorded_launches() as launches:
        for handle in (0xA2, 0xA1, 0xA2):
            launch(handle)
    launch(0xA3)
    assert [record.config["BLOCK"] for record in launches] == [256, 128]
    assert len(kernels) == 3


def test_the_hook_is_taken_off_after_an_error():
    before = list(triton.knobs.runtime.launch_enter_hook.calls)
    with pytest.raises(RuntimeError, match="out of resources"), recorded_launches():
        raise RuntimeError("out of resources")
    assert triton.knobs.runtime.launch_enter_hook.calls == before


@pytest.mark.gpu
def test_a_real_launch_is_recorded():
    source = torch.arange(256.0, device="cuda")
    target = torch.zeros(256, device="cuda")
    kernel = triton.jit(_copy_kernel)
    with recorded_launches() as launches:
        kernel[(2,)](source, target, BLOCK=128, DTYPE=tl.float32)
    assert torch.equal(source, target)
    (record,) = launches
    assert (record.config["BLOCK"], record.config["DTYPE"], record.spills) == (128, "fp32", 0)
    assert record.registers > 0


if __name__ == "__main__":
    for one in BLOCKS:
        compiled(one, 0)
