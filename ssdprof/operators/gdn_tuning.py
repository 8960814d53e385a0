"""The configurations of the fused GDN kernels that `ssdprof tune` may vary: see `operators.tuning.Tuning`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Annotated, Literal

import torch
import triton
from pydantic import Field

from ssdprof.core.base import Intermediates, Record
from ssdprof.core.tuned import KernelSettings, TunedCalls, TunedUse
from ssdprof.errors import BadInputError
from ssdprof.kernels.gdn import fused
from ssdprof.kernels.gdn.config import CALL_CHUNK, GDNPortableConfig, call_key
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.gdn.portable.scan import GDNPortableLaunch
from ssdprof.kernels.launch import LaunchCache
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import use_overrides
from ssdprof.operators.tuning import Axis, key_of, tuned_calls

KERNEL = "portable"
CHECKED_POSITIONS = 1024  # of a sequence, on which a candidate is first verified
_CUTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # segments of a sequence
_SHORTEST = 4  # chunks of a segment
_LARGEST_STATE = 256 * 128  # numbers that a program holds in registers; more are spilled


def _slices(config: GDNPortableConfig, inputs: GDNInputs) -> Iterator[GDNPortableConfig]:
    """How much of V a program holds, and in which orientation."""
    key_dim, widest = inputs.q.shape[3], _block(inputs.v.shape[3])
    for block_v, v_rows in product((16, 32, 64, 128), (True, False)):
        if block_v <= widest and block_v * _block(key_dim) <= _LARGEST_STATE:
            yield replace(config, block_v=block_v, v_rows=v_rows)


def _segments(config: GDNPortableConfig, inputs: GDNInputs) -> Iterator[GDNPortableConfig]:
    """A sequence cut into 1 to 32 segments."""
    chunks = triton.cdiv(inputs.length, config.chunk)
    for cuts in _CUTS:
        segment = triton.cdiv(chunks, cuts)
        if cuts == 1 or segment >= _SHORTEST:
            yield replace(config, segment=0 if cuts == 1 else segment)


def _warps(config: GDNPortableConfig, _: GDNInputs) -> Iterator[GDNPortableConfig]:
    for num_warps in (2, 4, 8):
        yield replace(config, num_warps=num_warps)


def _stages(config: GDNPortableConfig, _: GDNInputs) -> Iterator[GDNPortableConfig]:
    for scan_stages in (1, 2, 3, 4):
        yield replace(config, scan_stages=scan_stages)


def _blocks_of_k(config: GDNPortableConfig, inputs: GDNInputs) -> Iterator[GDNPortableConfig]:
    for block_k in (32, 64, 128):
        if block_k <= _block(inputs.q.shape[3]):
            yield replace(config, block_k=block_k)


def _chunks(config: GDNPortableConfig, inputs: GDNInputs) -> Iterator[GDNPortableConfig]:
    """Segments keep their lengths in positions."""
    for chunk in (16, 32) if inputs.q.dtype == torch.float32 else (32, 64, 128):
        yield replace(config, chunk=chunk, segment=triton.cdiv(config.segment * config.chunk, chunk))


def _factors(config: GDNPortableConfig, _: GDNInputs) -> Iterator[GDNPortableConfig]:
    """Warps and registers of the first launch."""
    for warps, registers in product((2, 4, 8), (0, 128, 168)):
        yield replace(config, factors_warps=warps, factors_registers=registers)


def _block(size: int) -> int:
    """The smallest power of two that holds it, at least 16."""
    return max(16, int(triton.next_power_of_2(size)))


# --- the stored form, checked when it is read

_NotNegative = Annotated[int, Field(ge=0)]


class GDNPortableSettings(Record):
    """See `GDNPortableConfig`."""

    chunk: Literal[16, 32, 64, 128]
    segment: _NotNegative
    block_k: Literal[16, 32, 64, 128, 256]
    block_v: Literal[16, 32, 64, 128, 256]
    v_rows: bool
    num_warps: Literal[1, 2, 4, 8, 16]
    scan_stages: Annotated[int, Field(gt=0)]
    factors_warps: Literal[1, 2, 4, 8, 16]
    factors_registers: _NotNegative


def settings_of(config: GDNPortableConfig) -> KernelSettings:
    """The stored form of a configuration."""
    values = {name: getattr(config, name) for name in GDNPortableSettings.model_fields}
    return KernelSettings(kernel=KERNEL, values=values)


def config_of(settings: KernelSettings, reason: str) -> GDNPortableConfig:
    """The inverse of `settings_of`.  pydantic's ValidationError for invalid values, ValueError for another kernel."""
    if settings.kernel != KERNEL:
        raise ValueError(f"no settings of a {settings.kernel!r} kernel of gdn are known")
    return GDNPortableConfig(**GDNPortableSettings.model_validate(settings.values).model_dump(), reason=reason)


# --- the interface of the search

_launches: LaunchCache[GDNPortableLaunch] = LaunchCache()


class GDNTuning:
    """Tunes the portable kernel; each find is for one length and one number of sequences."""

    def kernel(self, inputs: GDNInputs) -> str:
        name = fused.choose(fused.VariantCall(inputs=inputs, precision=Precision())).name
        if name != KERNEL:
            raise BadInputError(
                f"The {name} kernel runs these inputs, and tuning does not vary its configuration.",
                f"For GDN, ssdprof tunes only the {KERNEL} kernel.",
            )
        return name

    def shares_find(self, kernel: str) -> bool:  # noqa: ARG002
        return False

    def calls(self, inputs: GDNInputs, intermediates: Intermediates, kernel: str) -> TunedCalls:  # noqa: ARG002
        return tuned_calls(call_key(inputs, Precision(intermediates=intermediates)), intermediates)

    def committed(self, inputs: GDNInputs, kernel: str) -> GDNPortableConfig:  # noqa: ARG002
        return fused.committed_portable(inputs)

    def axes(self, config: GDNPortableConfig) -> tuple[Axis, ...]:  # noqa: ARG002
        return (_slices, _segments, _warps, _stages, _blocks_of_k, _chunks, _factors)

    def run(self, inputs: GDNInputs, precision: Precision, config: GDNPortableConfig) -> GDNOutput:
        key = (inputs.signature, precision.intermediates, precision.state_dtype, config)
        launch = _launches.get(key, lambda: GDNPortableLaunch(inputs, precision, config, state_v_first=False))
        return launch(inputs)

    def settings(self, config: GDNPortableConfig) -> KernelSettings:
        return settings_of(config)

    def check(self, settings: KernelSettings) -> None:
        config_of(settings, "")

    def short(self, inputs: GDNInputs) -> GDNInputs:
        """The beginning of each sequence; whole chunks if theirs are."""
        length = inputs.length
        short = min(length, CHECKED_POSITIONS + length % CALL_CHUNK)
        return replace(inputs, **{name: getattr(inputs, name)[:, :short] for name in ("q", "k", "v", "g", "beta")})

    def for_short(self, config: GDNPortableConfig, inputs: GDNInputs) -> GDNPortableConfig:
        """The configuration for `short`: cut into segments if the whole sequence is."""
        chunks = -(-self.short(inputs).length // config.chunk)
        return replace(config, segment=min(config.segment, max(1, chunks // 2)))

    def also_judged(self, config: GDNPortableConfig, inputs: GDNInputs) -> Sequence[GDNInputs]:  # noqa: ARG002
        """None: a find applies to inputs of one size only."""
        return ()

    def use(self, finds: Iterable[TunedUse]) -> None:
        use_overrides("gdn", {key_of(find): config_of(find.settings, find.reason) for find in finds})


TUNING = GDNTuning()
