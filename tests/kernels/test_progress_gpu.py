"""No call needs two of its programs to run at once: every cut ends, even on a GPU that other work fills."""

from typing import Any

import pytest
import torch
from fused_kernels import FINE, Kernel
from ssd_cases import EXACT, Case
from test_fused import assert_bitwise
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssdprof.measure.accuracy import assert_passes

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
MAMBA2 = dict(heads=80, headdim=64, dstate=128, dtype=BF16, device="cuda")
LEFT_KB = 24  # free shared memory of a multiprocessor: too little for any of our programs
PATIENCE_NS = 5_000_000_000


@pytest.mark.parametrize("kernel", FINE)
def test_many_more_programs_than_fit(kernel: Kernel) -> None:
    """1,024 segments of 80 heads; each waits for another."""
    inputs = Case(seqlen=65536, **MAMBA2).inputs()
    assert_passes(kernel(inputs), inputs, EXACT)


@pytest.mark.parametrize("kernel", FINE)
def test_beside_another_stream_that_fills_the_gpu(kernel: Kernel) -> None:
    inputs = Case(seqlen=16384, **MAMBA2).inputs()
    alone = kernel(inputs)
    matrix = torch.randn(8192, 8192, dtype=BF16, device="cuda")
    ours, theirs = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(theirs):
        for _ in range(100):
            matrix @ matrix
    with torch.cuda.stream(ours):
        outputs = [kernel(inputs) for _ in range(10)]
    torch.cuda.synchronize()
    for output in outputs:
        assert_bitwise(output, alone)


@pytest.mark.parametrize("kernel", FINE)
def test_calls_in_several_streams_at_once(kernel: Kernel) -> None:
    inputs = Case(seqlen=16384, **MAMBA2).inputs()
    alone = kernel(inputs)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    outputs = []
    for stream in streams * 3:
        with torch.cuda.stream(stream):
            outputs.append(kernel(inputs))
    torch.cuda.synchronize()
    for output in outputs:
        assert_bitwise(output, alone)


@gluon.jit
def _nanoseconds():
    return gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit
def _occupy(started_ptr, stop_ptr, told_ptr, KB: gl.constexpr, PATIENCE: gl.constexpr):
    """Holds shared memory until a flag stops it, or for a given number of nanoseconds."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    room = gl.allocate_shared_memory(gl.int8, [KB, 1024], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in range(KB):
        room.index(i).store(gl.zeros([1024], gl.int8, layout))
    gl.atomic_add(started_ptr, 1)
    end = _nanoseconds() + PATIENCE
    stop = 0
    while (stop == 0) & (_nanoseconds() < end):
        stop = gl.atomic_add(stop_ptr, 0)
    gl.atomic_add(told_ptr, stop)


@pytest.mark.parametrize("kernel", FINE)
def test_on_one_multiprocessor(kernel: Kernel) -> None:
    """Other programs occupy the other multiprocessors until the call has ended."""
    inputs = Case(seqlen=4096, **MAMBA2 | dict(heads=16)).inputs()
    alone = kernel(inputs)
    gpu: Any = torch.cuda.get_device_properties(0)
    others, occupied_kb = gpu.multi_processor_count - 1, (gpu.shared_memory_per_block_optin >> 10) - LEFT_KB
    started, stop, told = torch.zeros(3, 32, dtype=torch.int32, device="cuda")
    ours, theirs, watching = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(ours):  # allocates memory and loads modules before the GPU is full
        for _ in range(2):
            kernel(inputs)
        stop.fill_(0)
    torch.cuda.synchronize()
    with torch.cuda.stream(theirs):
        _occupy[(others,)](started, stop, told, occupied_kb, PATIENCE_NS)
    with torch.cuda.stream(watching):
        while int(started[0]) < others:
            pass
    with torch.cuda.stream(ours):
        output = kernel(inputs)
        stop.fill_(1)
    torch.cuda.synchronize()
    assert int(told[0]) == others, "the call did not end before the others gave up"
    assert_bitwise(output, alone)
