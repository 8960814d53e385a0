"""The configurations of GDN's portable kernel that `ssdprof tune` may vary: see
`operators.tuning.Tuning`.
"""

from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import triton

from ssdprof.core.base import Count, Size
from ssdprof.errors import BadInputError
from ssdprof.kernels.choice import Fused, FusedCall
from ssdprof.kernels.gdn.config import GDNPortableConfig, call_key
from ssdprof.kernels.gdn.fused import FUSED, committed_portable
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.gdn.portable import portable_launch
from ssdprof.kernels.inputs import PreparedLaunch
from ssdprof.kernels.launch import kept
from ssdprof.kernels.precision import Precision
from ssdprof.operators.tuning import Axis, PowerOfTwo, Tuning, Warps, stored_form, varied

KERNEL = "portable"
_SEGMENT_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # of a sequence
_SHORTEST_SEGMENT = 4  # chunks, if there are several segments
_LARGEST_STATE = 256 * 128  # numbers that a program can hold in registers; more would be spilled


def block_of(size: int) -> int:
    """The width of a block that holds `size` numbers: a power of two, at least 16."""
    return max(16, int(triton.next_power_of_2(size)))


def slice_fits(config: Any, inputs: GDNInputs) -> bool:
    """Whether a slice of `config.block_v` columns of a state is no wider than V, rounded up to a
    power of two, and small enough for a program's registers.
    """
    block_v: int = config.block_v
    if block_v > block_of(inputs.v.shape[3]):
        return False
    return block_v * block_of(inputs.q.shape[3]) <= _LARGEST_STATE


def _segments(config: GDNPortableConfig, inputs: GDNInputs) -> Iterator[GDNPortableConfig]:
    """Configurations that cut a sequence into 1 to 32 segments, as far as these have at least
    `_SHORTEST_SEGMENT` chunks.  A `segment` of 0 chunks stands for the whole sequence.
    """
    chunks = triton.cdiv(inputs.length, config.chunk)
    for count in _SEGMENT_COUNTS:
        segment = triton.cdiv(chunks, count)
        if count == 1:
            yield replace(config, segment=0)
        elif segment >= _SHORTEST_SEGMENT:
            yield replace(config, segment=segment)


def _chunks(config: GDNPortableConfig, inputs: GDNInputs) -> Iterator[GDNPortableConfig]:
    """Configurations with each chunk size that the dtype of the inputs allows.  Segments keep their
    lengths in positions, rounded up to whole chunks.
    """
    sizes = [32, 64, 128]
    if inputs.q.dtype == torch.float32:
        sizes = [16, 32]
    positions = config.segment * config.chunk
    for chunk in sizes:
        yield replace(config, chunk=chunk, segment=triton.cdiv(positions, chunk))


_AXES: tuple[Axis, ...] = (
    varied(slice_fits, block_v=(16, 32, 64, 128), v_rows=(True, False)),
    _segments,
    varied(num_warps=(2, 4, 8)),
    varied(scan_stages=range(1, 5)),
    varied(
        lambda config, inputs: config.block_k <= block_of(inputs.q.shape[3]), block_k=(32, 64, 128)
    ),
    _chunks,
    varied(factors_warps=(2, 4, 8), factors_registers=(0, 128, 168)),
)


def kernel_of(fused: Fused, tuned: Collection[str], inputs: GDNInputs) -> str:
    """The name of the kernel that runs the inputs with exact intermediates and fp32 states.  Raises
    BadInputError if it is not one of `tuned`.
    """
    variant, *_ = fused.variant_for(FusedCall(inputs=inputs, precision=Precision()))
    name: str = variant.name
    if name not in tuned:
        raise BadInputError(
            f"The {name} kernel runs these inputs, and tuning does not vary its configuration.",
            f"ssdprof tunes: {', '.join(tuned)}.",
        )
    return name


def runner(prepare: Callable[..., PreparedLaunch]) -> Callable[[Any, Precision, Any], GDNOutput]:
    """`Tuning.run`: runs inputs with a configuration, and prepares each launch once.

    prepare: (inputs, precision, configuration, state_v_first=False) -> the launch.
    """
    launches: dict[Hashable, PreparedLaunch] = {}
    prepare = partial(prepare, state_v_first=False)

    def run(inputs: GDNInputs, precision: Precision, config: Any) -> GDNOutput:
        key = (inputs.signature, precision.intermediates, precision.state_dtype, config)
        return kept(launches, key, prepare, inputs, precision, config)(inputs)

    return run


def _for_short(config: GDNPortableConfig, inputs: GDNInputs) -> GDNPortableConfig:
    """`Tuning.for_short`: segments are at most half of the short inputs, except that a `segment` of
    0 stays one for the whole sequence.
    """
    chunks = triton.cdiv(TUNING.short(inputs).length, config.chunk)
    return replace(config, segment=min(config.segment, max(1, chunks // 2)))


# A tuned configuration of the portable kernel is for one length and one number of sequences.
TUNING: Tuning = Tuning(
    operator="gdn",
    configs={
        KERNEL: stored_form(
            GDNPortableConfig,
            chunk=Literal[16, 32, 64, 128],
            segment=Count,
            block_k=PowerOfTwo,
            block_v=PowerOfTwo,
            v_rows=bool,
            num_warps=Warps,
            scan_stages=Size,
            factors_warps=Warps,
            factors_registers=Count,
        )
    },
    kernel=partial(kernel_of, FUSED, (KERNEL,)),
    key=lambda inputs, precision, _: call_key(inputs, precision),
    committed=lambda inputs, _precision, _kernel: committed_portable(inputs),
    axes=lambda _: _AXES,
    run=runner(portable_launch),
    for_short=_for_short,
)
