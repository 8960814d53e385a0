"""The configurations of the fused KDA kernels that `ssdprof tune` may vary: see
`operators.tuning.Tuning`.
"""

from functools import partial
from typing import Literal

from ssdprof.core.base import Count, Size
from ssdprof.kernels.gdn.config import call_key
from ssdprof.kernels.kda.fused import FUSED, KDAPortableConfig, configured_launch
from ssdprof.kernels.kda.hopper.launch import KDAHopperConfig
from ssdprof.kernels.kda.inputs import KDAInputs
from ssdprof.kernels.precision import Precision
from ssdprof.operators.gdn_tuning import block_of, kernel_of, runner, slice_fits
from ssdprof.operators.tuning import Axis, PowerOfTwo, Tuning, Warps, stored_form, varied


def _committed(
    inputs: KDAInputs, _precision: Precision, kernel: str
) -> KDAPortableConfig | KDAHopperConfig:
    """`Tuning.committed`."""
    if kernel == "hopper":
        return KDAHopperConfig.choose(inputs)
    return KDAPortableConfig.choose(inputs)


def _fits(config: KDAPortableConfig, inputs: KDAInputs) -> bool:
    """Whether no block is wider than its dimension, rounded up to a power of two, and a program can
    hold its slice of a state.
    """
    largest_block_k = block_of(inputs.q.shape[3])
    if max(config.block_k, config.prep_block_k) > largest_block_k:
        return False
    return slice_fits(config, inputs)


_HOPPER: tuple[Axis, ...] = (varied(slab=(4, 8, 16, 32, 64)), varied(behind=(1, 2, 4)))
_PORTABLE: tuple[Axis, ...] = (
    varied(_fits, block_v=(16, 32, 64, 128), block_k=(32, 64, 128, 256)),
    varied(num_warps=(2, 4, 8)),
    varied(scan_stages=range(1, 5)),
    varied(_fits, chunk=(16, 32, 64), prep_block_k=(32, 64, 128)),
    varied(prep_warps=(2, 4, 8)),
    varied(prep_registers=(0, 128, 168)),
)
TUNING: Tuning = Tuning(
    operator="kda",
    configs={
        "hopper": stored_form(KDAHopperConfig, slab=Size, behind=Size),
        "portable": stored_form(
            KDAPortableConfig,
            block_k=PowerOfTwo,
            block_v=PowerOfTwo,
            num_warps=Warps,
            scan_stages=Size,
            chunk=Literal[16, 32, 64],
            prep_block_k=PowerOfTwo,
            prep_warps=Warps,
            prep_registers=Count,
        ),
    },
    kernel=partial(kernel_of, FUSED, ("hopper", "portable")),
    key=call_key,
    committed=_committed,
    axes=lambda config: _HOPPER if isinstance(config, KDAHopperConfig) else _PORTABLE,
    run=runner(configured_launch),
    for_short=lambda config, _: config,
)
