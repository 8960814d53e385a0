"""Small calls of one kernel under compute-sanitizer, each compared with the oracle.

    python sanitizer_target.py ssd "hopper, shared" batch "n 256"

All cases of a kernel run if none is named.  Inputs are made and outputs are judged on the CPU, so that the sanitizer
watches few other kernels.  Prints "right" last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from fused_kernels import passing
from gdn_hopper_cases import GDNCase, errors
from ssd_cases import EXACT, RELAXED, Case

from ssdprof.kernels import get
from ssdprof.kernels.gdn.config import GDNPortableConfig
from ssdprof.kernels.gdn.hopper import config as gdn_hopper
from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig
from ssdprof.kernels.gdn.hopper.launch import GDNHopperLaunch
from ssdprof.kernels.gdn.hopper.slices import SlicedLaunch
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.gdn.portable.scan import GDNPortableLaunch
from ssdprof.kernels.gdn.recurrent import gdn_recurrent
from ssdprof.kernels.hopper.schedule import Cut
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.config import SSDPortableConfig
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig, program_count, unsupported
from ssdprof.kernels.ssd.hopper.launch import ssd_fused_hopper
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.portable import ssd_fused_portable
from ssdprof.measure.accuracy import assert_passes

# --- SSD

SMALL_SSD = Case(heads=2, headdim=64, dstate=64, chunk_size=32, dtype=torch.bfloat16)
# several segments; whole and partial chunks, one position, empty sequences; with N = 256 halves that exchange parts
SSD_CASES = {
    "batch": (replace(SMALL_SSD, batch=3, seqlen=192), RELAXED),
    "ragged": (replace(SMALL_SSD, seqlen=300, initial_states=True), EXACT),
    "packed": (replace(SMALL_SSD, lengths=(1, 0, 170, 64, 0), skip="(h, p)", initial_states=True), EXACT),
    "n 128": (replace(SMALL_SSD, batch=3, seqlen=130, dstate=128), EXACT),
    "n 256": (replace(SMALL_SSD, batch=3, seqlen=130, heads=1, dstate=256, initial_states=True), EXACT),
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
    return hopper(inputs, precision, segments=Cut(segment=5, shares=shares), way="carry" if shares else "none")


UNEVEN = Cut(long_count=1, long_segment=2, segment=1)
SSD_KERNELS: dict[str, Callable[[Any, Precision], Any]] = {
    "portable": portable,
    "hopper": partial(hopper, segments=Cut(segment=2), way="look back"),
    "hopper, uneven": partial(hopper, segments=UNEVEN, way="look back"),
    "hopper, alone": partial(hopper, segments=replace(UNEVEN, recompute=True), way="recompute"),
    "hopper, shared": hopper_shared,
    "unfused": get("ssd", "unfused").run,
}


# --- GDN

LARGEST_ERROR = 6e-3  # of bf16, relative to the RMS
SMALL_GDN = GDNCase(key_heads=1, heads=2, gate=-1e-3)
# whole and partial chunks, one position, empty sequences; no sequence forgets its past before its last chunks
GDN_CASES = {
    "batch": replace(SMALL_GDN, batch=3, seqlen=320),
    "ragged": replace(SMALL_GDN, seqlen=437, initial_state=True),
    "packed": replace(SMALL_GDN, lengths=(1, 0, 290, 64, 0, 333), initial_state=True),
}
OTHER_DIMS = {
    "olmo": replace(SMALL_GDN, key_heads=2, key_dim=96, value_dim=192, seqlen=200, initial_state=True),
    "60": replace(SMALL_GDN, key_dim=60, value_dim=60, seqlen=200),
}


def gdn_portable(inputs: GDNInputs) -> GDNOutput:
    config = GDNPortableConfig(chunk=32, segment=3, block_k=32, block_v=32)
    return GDNPortableLaunch(inputs, Precision(), config, state_v_first=False)(inputs)


def gdn_on_hopper(inputs: GDNInputs, *, config: GDNHopperConfig) -> GDNOutput:
    assert gdn_hopper.unsupported(inputs) == ""
    return GDNHopperLaunch(inputs, config)(inputs)


def slices(inputs: GDNInputs) -> GDNOutput:
    assert gdn_hopper.unsupported_otherwise(inputs) == ""
    return SlicedLaunch(inputs, GDNHopperConfig(segment=2))(inputs)


PARTS = GDNHopperConfig(segment=2, transition_parts=2, longest_first_pass=1, transition_programs=4)
# the registers with which `choose` makes one launch
ONE_LAUNCH = GDNHopperConfig(segment=16, fused_inverse=True, key_ring=3, state_registers=176, other_registers=64)
GDN_KERNELS: dict[str, Callable[[GDNInputs], GDNOutput]] = {
    "portable": gdn_portable,
    "unfused": get("gdn", "unfused").run,
    "recurrent": gdn_recurrent,
    "hopper, first passes": partial(gdn_on_hopper, config=GDNHopperConfig(segment=2)),
    "hopper, leading": partial(gdn_on_hopper, config=GDNHopperConfig(segment=2, first_segment_extra=True)),
    "hopper, parts": partial(gdn_on_hopper, config=PARTS),
    "hopper, one launch": partial(gdn_on_hopper, config=ONE_LAUNCH),
    "hopper, slices": slices,
}


# --- both


def ssd_cases_of(kernel: str) -> dict[str, tuple[Case, Precision]]:
    """With packed sequences, no segment recomputes the chunks before it."""
    return {n: one for n, one in SSD_CASES.items() if not (one[0].lengths and kernel == "hopper, alone")}


def gdn_cases_of(kernel: str) -> dict[str, GDNCase]:
    """The cases that a kernel supports.  Packed sequences exclude a longer first segment."""
    if kernel == "hopper, slices":
        return {"olmo": OTHER_DIMS["olmo"]}
    if not kernel.startswith("hopper"):
        return GDN_CASES | OTHER_DIMS
    return {name: case for name, case in GDN_CASES.items() if not (case.lengths and kernel == "hopper, leading")}


def on_the_gpu(inputs: Any) -> Any:
    tensors = {name: value.cuda() for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    return replace(inputs, **tensors)


def on_the_cpu(output: Any) -> Any:
    return output._make(tensor.cpu() for tensor in output)


def ssd(kernel: str, name: str) -> None:
    case, precision = SSD_CASES[name]
    inputs = case.inputs()
    assert_passes(on_the_cpu(SSD_KERNELS[kernel](on_the_gpu(inputs), precision)), inputs, precision)


def gdn(kernel: str, name: str) -> None:
    inputs = gdn_cases_of(kernel)[name].inputs()
    found = errors(on_the_cpu(GDN_KERNELS[kernel](on_the_gpu(inputs))), inputs)
    assert max(found) < LARGEST_ERROR, f"{kernel}, {name}: {found}"


def main(operator: str, kernel: str, *names: str) -> None:
    call, cases = (ssd, ssd_cases_of(kernel)) if operator == "ssd" else (gdn, gdn_cases_of(kernel))
    for name in names or cases:
        call(kernel, name)
    print("right")


if __name__ == "__main__":
    main(*sys.argv[1:])
