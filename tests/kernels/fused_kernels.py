"""The fused kernels for tests on a GPU: with the segments chosen for the call, and with the shortest segments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ssd_cases import EXACT

from ssdprof.kernels.device import capability, sm_count
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.config import SSDPortableConfig
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig, program_count, unsupported
from ssdprof.kernels.ssd.hopper.launch import _passing, buffer_sizes, share_count, ssd_fused_hopper
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.portable import ssd_fused_portable

Kernel = Callable[..., SSDOutput]  # arguments: inputs, and a precision if not EXACT
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
ON_HOPPER = pytest.mark.skipif(not HOPPER, reason="not a Hopper GPU")


def passing(inputs: SSDInputs, config: SSDHopperConfig) -> str:
    """How the Hopper kernel's segments obtain the states that enter them: "look back", "carry", ..."""
    return _passing(config, share_count(inputs, config), buffer_sizes(inputs, EXACT, config))


def portable(inputs: SSDInputs, precision: Precision = EXACT) -> SSDOutput:
    return ssd_fused_portable(inputs, precision, config=SSDPortableConfig.choose(inputs, capability(inputs.x)))


def portable_fine(inputs: SSDInputs, precision: Precision = EXACT) -> SSDOutput:
    """One chunk per segment: the largest number of programs that wait for another one."""
    return ssd_fused_portable(
        inputs, precision, config=SSDPortableConfig(max_segments=10**6, min_chunks=1, max_chunks=1, block_p=32)
    )


def hopper(inputs: SSDInputs, precision: Precision = EXACT) -> SSDOutput:
    assert unsupported(inputs) == ""
    config = SSDHopperConfig.choose(inputs, sm_count(inputs.x), batch_invariant=True)
    return ssd_fused_hopper(inputs, precision, config=config)


def hopper_by_default(inputs: SSDInputs, precision: Precision = EXACT) -> SSDOutput:
    """Equal shares of all sequences: for batches with more pairs of heads than multiprocessors."""
    assert unsupported(inputs) == ""
    config = SSDHopperConfig.choose(inputs, sm_count(inputs.x), batch_invariant=False)
    assert passing(inputs, config) == "carry"
    return ssd_fused_hopper(inputs, precision, config=config)


def hopper_fine(inputs: SSDInputs, precision: Precision = EXACT) -> SSDOutput:
    assert unsupported(inputs) == ""
    return ssd_fused_hopper(inputs, precision, config=SSDHopperConfig(segment=1))


def hopper_uneven(inputs: SSDInputs, precision: Precision = EXACT) -> SSDOutput:
    """A long segment, then short ones."""
    assert unsupported(inputs) == ""
    return ssd_fused_hopper(inputs, precision, config=SSDHopperConfig(long_count=1, long_segment=5, segment=2))


def hopper_alone(inputs: SSDInputs, precision: Precision = EXACT) -> SSDOutput:
    """No program waits for another: each recomputes everything before its segment, except for packed sequences."""
    assert unsupported(inputs) == ""
    fine = SSDHopperConfig(long_count=1, long_segment=3, segment=1, recompute=True)
    return ssd_fused_hopper(inputs, precision, config=fine if inputs.cu_seqlens is None else SSDHopperConfig(segment=1))


def hopper_shared(inputs: SSDInputs, precision: Precision = EXACT) -> SSDOutput:
    """Fewer programs than pairs of heads, each with an equal share of all sequences."""
    assert unsupported(inputs) == ""
    whole = max(1, -(-inputs.x.shape[1] // 64))
    shares = max(1, inputs.sequences * program_count(inputs) * 5 // 6)
    return ssd_fused_hopper(inputs, precision, config=SSDHopperConfig(segment=whole, shares=shares))


CHOSEN = [pytest.param(portable, id="portable"), pytest.param(hopper, id="hopper", marks=ON_HOPPER)]
FINE = [
    pytest.param(portable_fine, id="portable, fine"),
    pytest.param(hopper_fine, id="hopper, fine", marks=ON_HOPPER),
    pytest.param(hopper_uneven, id="hopper, uneven", marks=ON_HOPPER),
    pytest.param(hopper_alone, id="hopper, alone", marks=ON_HOPPER),
    pytest.param(hopper_shared, id="hopper, shared", marks=ON_HOPPER),
]
EVERY_KERNEL = CHOSEN + FINE
