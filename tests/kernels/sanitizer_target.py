"""What compute-sanitizer watches: small calls of one kernel, each compared with the oracle.

    python sanitizer_target.py portable|hopper|unfused [batch] [ragged] [packed]

Inputs are made and outputs are judged on the CPU, so that little else is watched.  Prints "right" last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from ssd_cases import EXACT, RELAXED, Case

from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.fused_config import FusedConfig
from ssdprof.kernels.ssd.fused_portable import ssd_fused_portable
from ssdprof.kernels.ssd.hopper_config import HopperConfig, unsupported
from ssdprof.kernels.ssd.hopper_launch import ssd_fused_hopper
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.unfused import ssd_unfused
from ssdprof.measure.accuracy import assert_passes

SMALL = Case(heads=2, headdim=64, dstate=64, chunk_size=32, dtype=torch.bfloat16)
# several segments; whole and broken chunks, one position, empty sequences
CASES = {
    "batch": (replace(SMALL, batch=3, seqlen=192), RELAXED),
    "ragged": (replace(SMALL, seqlen=300, initial_states=True), EXACT),
    "packed": (replace(SMALL, lengths=(1, 0, 170, 64, 0), skip="(h, p)", initial_states=True), EXACT),
}


def portable(inputs: SSDInputs, precision: Precision) -> SSDOutput:
    config = FusedConfig(chunk=32, max_segments=3, min_chunks=1, max_chunks=2, block_p=32)
    return ssd_fused_portable(inputs, precision, config=config)


def hopper(inputs: SSDInputs, precision: Precision) -> SSDOutput:
    assert unsupported(inputs) == ""
    return ssd_fused_hopper(inputs, precision, config=HopperConfig(segment=2))


def hopper_shared(inputs: SSDInputs, precision: Precision) -> SSDOutput:
    """Two programs, where there are three sequences of one pair of heads."""
    return ssd_fused_hopper(inputs, precision, config=HopperConfig(segment=5, shares=2))


KERNELS: dict[str, Callable[[SSDInputs, Precision], SSDOutput]] = {
    "portable": portable,
    "hopper": hopper,
    "hopper, shared": hopper_shared,
    "unfused": ssd_unfused,
}


def on_the_gpu(inputs: SSDInputs) -> SSDInputs:
    tensors = {name: value.cuda() for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    return replace(inputs, **tensors)


def main(kernel: str, *names: str) -> None:
    for name in names or CASES:
        case, precision = CASES[name]
        inputs = case.inputs()
        output = KERNELS[kernel](on_the_gpu(inputs), precision)
        assert_passes(SSDOutput(*(tensor.cpu() for tensor in output)), inputs, precision)
    print("right")


if __name__ == "__main__":
    main(*sys.argv[1:])
