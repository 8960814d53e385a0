"""Small calls of one GDN kernel under compute-sanitizer, each compared with the recurrence in fp64.

    python gdn_sanitizer_target.py "hopper, parts" batch packed

All cases of a kernel run if none is named.  Inputs are made and outputs are judged on the CPU, so that the sanitizer
watches few other kernels.  Prints "right" last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from gdn_hopper_cases import GDNCase, errors

from ssdprof.kernels.gdn.config import GDNPortableConfig
from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig, unsupported, unsupported_otherwise
from ssdprof.kernels.gdn.hopper.launch import GDNHopperLaunch
from ssdprof.kernels.gdn.hopper.slices import SlicedLaunch
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.gdn.portable.scan import GDNPortableLaunch
from ssdprof.kernels.gdn.recurrent import gdn_recurrent
from ssdprof.kernels.gdn.unfused.pipeline import run as run_unfused
from ssdprof.kernels.precision import Precision

LARGEST_ERROR = 6e-3  # of bf16, relative to the RMS
SMALL = GDNCase(key_heads=1, heads=2, gate=-1e-3)
# whole and partial chunks, one position, empty sequences; no sequence forgets its past before its last chunks
CASES = {
    "batch": replace(SMALL, batch=3, seqlen=320),
    "ragged": replace(SMALL, seqlen=437, initial_state=True),
    "packed": replace(SMALL, lengths=(1, 0, 290, 64, 0, 333), initial_state=True),
}
OTHER_DIMS = {
    "olmo": replace(SMALL, key_heads=2, key_dim=96, value_dim=192, seqlen=200, initial_state=True),
    "60": replace(SMALL, key_dim=60, value_dim=60, seqlen=200),
}


def portable(inputs: GDNInputs) -> GDNOutput:
    config = GDNPortableConfig(chunk=32, segment=3, block_k=32, block_v=32)
    return GDNPortableLaunch(inputs, Precision(), config, state_v_first=False)(inputs)


def hopper(inputs: GDNInputs, *, config: GDNHopperConfig) -> GDNOutput:
    assert unsupported(inputs) == ""
    return GDNHopperLaunch(inputs, config)(inputs)


def slices(inputs: GDNInputs) -> GDNOutput:
    assert unsupported_otherwise(inputs) == ""
    return SlicedLaunch(inputs, GDNHopperConfig(segment=2))(inputs)


PARTS = GDNHopperConfig(segment=2, transition_parts=2, longest_first_pass=1, transition_programs=4)
# the registers with which `choose` makes one launch
ONE_LAUNCH = GDNHopperConfig(segment=16, fused_inverse=True, key_ring=3, state_registers=176, other_registers=64)
KERNELS: dict[str, Callable[[GDNInputs], GDNOutput]] = {
    "portable": portable,
    "unfused": run_unfused,
    "recurrent": gdn_recurrent,
    "hopper, first passes": partial(hopper, config=GDNHopperConfig(segment=2)),
    "hopper, leading": partial(hopper, config=GDNHopperConfig(segment=2, first_segment_extra=True)),
    "hopper, parts": partial(hopper, config=PARTS),
    "hopper, one launch": partial(hopper, config=ONE_LAUNCH),
    "hopper, slices": slices,
}


def cases_of(kernel: str) -> dict[str, GDNCase]:
    """The cases that a kernel supports.  Packed sequences exclude a longer first segment."""
    if kernel == "hopper, slices":
        return {"olmo": OTHER_DIMS["olmo"]}
    if not kernel.startswith("hopper"):
        return CASES | OTHER_DIMS
    return {name: case for name, case in CASES.items() if not (case.lengths and kernel == "hopper, leading")}


def on_the_gpu(inputs: GDNInputs) -> GDNInputs:
    tensors = {name: value.cuda() for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    return replace(inputs, **tensors)


def main(kernel: str, *names: str) -> None:
    cases = cases_of(kernel)
    for name in names or cases:
        inputs = cases[name].inputs()
        output = KERNELS[kernel](on_the_gpu(inputs))
        found = errors(GDNOutput(*(tensor.cpu() for tensor in output)), inputs)
        assert max(found) < LARGEST_ERROR, f"{kernel}, {name}: {found}"
    print("right")


if __name__ == "__main__":
    main(*sys.argv[1:])
