"""Small calls of one SSD kernel under compute-sanitizer, each compared with the oracle.

    python ssd_sanitizer_target.py "hopper, shared" batch "n 256"

All cases of a kernel run if none is named.  Inputs are made and outputs are judged on the CPU, so that the sanitizer
watches few other kernels.  Prints "right" last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

import torch
from fused_kernels import passing
from ssd_cases import EXACT, RELAXED, Case

from ssdprof.kernels.hopper.schedule import Cut
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.config import SSDPortableConfig
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig, program_count, unsupported
from ssdprof.kernels.ssd.hopper.launch import ssd_fused_hopper
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.portable import ssd_fused_portable
from ssdprof.kernels.ssd.unfused import run as run_unfused
from ssdprof.measure.accuracy import assert_passes

SMALL = Case(heads=2, headdim=64, dstate=64, chunk_size=32, dtype=torch.bfloat16)
# several segments; whole and partial chunks, one position, empty sequences; with N = 256 halves that exchange parts
CASES = {
    "batch": (replace(SMALL, batch=3, seqlen=192), RELAXED),
    "ragged": (replace(SMALL, seqlen=300, initial_states=True), EXACT),
    "packed": (replace(SMALL, lengths=(1, 0, 170, 64, 0), skip="(h, p)", initial_states=True), EXACT),
    "n 128": (replace(SMALL, batch=3, seqlen=130, dstate=128), EXACT),
    "n 256": (replace(SMALL, batch=3, seqlen=130, heads=1, dstate=256, initial_states=True), EXACT),
}


def portable(inputs: SSDInputs, precision: Precision) -> SSDOutput:
    config = SSDPortableConfig(chunk=32, max_segments=3, min_chunks=1, max_chunks=2, block_p=32)
    return ssd_fused_portable(inputs, precision, config=config)


def hopper(inputs: SSDInputs, precision: Precision, *, segments: Cut, way: str) -> SSDOutput:
    """way: how states are passed on, if sequences are not packed."""
    assert unsupported(inputs) == ""
    chosen = SSDHopperConfig.choose(inputs, sm_count=132, batch_invariant=False)
    config = replace(chosen, **asdict(segments))
    assert passing(inputs, config) == way or inputs.cu_seqlens is not None
    return ssd_fused_hopper(inputs, precision, config=config)


def hopper_shared(inputs: SSDInputs, precision: Precision) -> SSDOutput:
    """One program less than there are pairs of heads."""
    shares = inputs.sequences * program_count(inputs) - 1
    return hopper(inputs, precision, segments=Cut(segment=5, shares=shares), way="hand on" if shares else "none")


UNEVEN = Cut(long_count=1, long_segment=2, segment=1)
KERNELS: dict[str, Callable[[SSDInputs, Precision], SSDOutput]] = {
    "portable": portable,
    "hopper": partial(hopper, segments=Cut(segment=2), way="look back"),
    "hopper, uneven": partial(hopper, segments=UNEVEN, way="look back"),
    "hopper, alone": partial(hopper, segments=replace(UNEVEN, recompute=True), way="recompute"),
    "hopper, shared": hopper_shared,
    "unfused": run_unfused,
}


def taken_by(kernel: str) -> list[str]:
    """With packed sequences, no segment recomputes the chunks before it."""
    return [name for name, (case, _) in CASES.items() if not (case.lengths and kernel == "hopper, alone")]


def on_the_gpu(inputs: SSDInputs) -> SSDInputs:
    tensors = {name: value.cuda() for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    return replace(inputs, **tensors)


def main(kernel: str, *names: str) -> None:
    for name in names or taken_by(kernel):
        case, precision = CASES[name]
        inputs = case.inputs()
        output = KERNELS[kernel](on_the_gpu(inputs), precision)
        assert_passes(SSDOutput(*(tensor.cpu() for tensor in output)), inputs, precision)
    print("right")


if __name__ == "__main__":
    main(*sys.argv[1:])
