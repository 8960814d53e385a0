"""The configurations of the fused KDA kernels that `ssdprof tune` may vary: see
`operators.tuning.Tuning`.
"""

from functools import partial
from typing import Literal

from ssdprof.core.base import Count, Size
from ssdprof.kernels.gdn.config import call_key
from ssdprof.kernels.kda.fused import FUSED, KDAPortableConfig, portable_launch
from ssdprof.kernels.kda.inputs import KDAInputs
from ssdprof.operators.gdn_tuning import block_of, kernel_of, runner, slice_fits
from ssdprof.operators.tuning import Axis, PowerOfTwo, Tuning, Warps, stored_form, varied


def _committed(inputs: KDAInputs, kernel: str) -> KDAPortableConfig:
    choose = KDAPortableConfig.choose_hopper if kernel == "hopper" else KDAPortableConfig.choose
    return choose(inputs)


def _fits(config: KDAPortableConfig, inputs: KDAInputs) -> bool:
    """(K, V) states are one block."""
    whole = block_of(inputs.q.shape[3])
    block = config.block_k == whole if config.k_first else config.block_k <= whole
    return block and config.prep_block_k <= whole and slice_fits(config, inputs)


# of the second launch of both kernels, then of the portable kernel's first one
_SECOND: tuple[Axis, ...] = (
    varied(_fits, block_v=(16, 32, 64, 128), block_k=(32, 64, 128, 256), k_first=(False, True)),
    varied(num_warps=(2, 4, 8)), varied(scan_stages=range(1, 5)),
)  # fmt: skip
_FIRST: tuple[Axis, ...] = (
    varied(_fits, chunk=(16, 32, 64), prep_block_k=(32, 64, 128)), varied(prep_warps=(2, 4, 8)),
    varied(prep_registers=(0, 128, 168)),
)  # fmt: skip


_SCAN = dict(
    block_k=PowerOfTwo, block_v=PowerOfTwo, k_first=bool, num_warps=Warps, scan_stages=Size
)
TUNING: Tuning = Tuning(
    operator="kda",
    configs={
        "hopper": stored_form(
            KDAPortableConfig,
            **_SCAN,
            chunk=Literal[64],
            prep_block_k=Literal[128],
            prep_warps=Literal[4],
            prep_registers=Literal[0],
            hopper=Literal[True],
        ),
        "portable": stored_form(
            KDAPortableConfig,
            **_SCAN,
            chunk=Literal[16, 32, 64],
            prep_block_k=PowerOfTwo,
            prep_warps=Warps,
            prep_registers=Count,
            hopper=Literal[False],
        ),
    },
    kernel=partial(kernel_of, FUSED, ("hopper", "portable")),
    key=call_key,
    committed=_committed,
    axes=lambda config: _SECOND if config.hopper else (*_SECOND, *_FIRST),
    run=runner(portable_launch),
    for_short=lambda config, _: config,
)
