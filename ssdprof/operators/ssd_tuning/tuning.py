"""The fused SSD kernels as `ssdprof tune` sees them: see `operators.tuning.Tuning`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ssdprof.core.base import Intermediates
from ssdprof.core.tuned import KernelSettings, TunedCalls, TunedUse, Value
from ssdprof.kernels import device
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import CallKey, use_overrides
from ssdprof.kernels.ssd.config import SSDPortableConfig, call_key
from ssdprof.kernels.ssd.hopper import config as hopper_config
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig
from ssdprof.kernels.ssd.hopper.launch import ssd_fused_hopper
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.portable.portable_kernel import ssd_fused_portable
from ssdprof.operators.dtypes import dtype_name, dtype_named
from ssdprof.operators.ssd_tuning.candidates import Axis, Config, axes, nchunks
from ssdprof.operators.ssd_tuning.settings import config_of, settings_of

CHECKED_CHUNKS = 16  # of 64 positions, on which a candidate is first verified


class SSDTuning:
    """Tunes two kernels: "hopper", whose finds are for one length each, and "portable", whose finds are for a layer."""

    def kernel(self, inputs: SSDInputs) -> str:
        return "portable" if hopper_config.unsupported(inputs) else "hopper"

    def shares_find(self, kernel: str) -> bool:
        return kernel == "portable"

    def calls(self, inputs: SSDInputs, intermediates: Intermediates, kernel: str) -> TunedCalls:
        own = dict(call_key(inputs, Precision(intermediates=intermediates), kernel).sizes)
        del own["exact"]  # it is in `intermediates`
        sizes: dict[str, Value] = own | {"dtype": dtype_name(own["dtype"])}
        return TunedCalls(operator="ssd", kernel=kernel, intermediates=intermediates, sizes=sizes)

    def committed(self, inputs: SSDInputs, kernel: str) -> Config:
        if kernel == "hopper":
            return SSDHopperConfig.choose(inputs, device.sm_count(inputs.x), batch_invariant=False)
        return SSDPortableConfig.choose(inputs, device.capability(inputs.x) if inputs.x.is_cuda else (9, 0))

    def axes(self, config: Config) -> tuple[Axis, ...]:
        return axes(config)

    def run(self, inputs: SSDInputs, precision: Precision, config: Config) -> SSDOutput:
        if isinstance(config, SSDHopperConfig):
            return ssd_fused_hopper(inputs, precision, config=config)
        return ssd_fused_portable(inputs, precision, config=config.fitted(inputs))

    def settings(self, config: Config) -> KernelSettings:
        return settings_of(config)

    def check(self, settings: KernelSettings) -> None:
        config_of(settings, "")

    def short(self, inputs: SSDInputs) -> SSDInputs:
        """The beginning of each sequence; whole chunks if theirs are."""
        length = inputs.x.shape[1]
        short = min(length, 64 * CHECKED_CHUNKS + length % 64)
        cut = {name: getattr(inputs, name)[:, :short] for name in ("x", "dt", "B", "C")}
        return replace(inputs, **cut, z=None if inputs.z is None else inputs.z[:, :short])

    def for_short(self, config: Config, inputs: SSDInputs) -> Config:
        """The configuration for `short`: cut into segments if the whole sequence is."""
        if not isinstance(config, SSDHopperConfig):
            return config
        if config.count(nchunks(inputs)) == 1:
            return replace(config, segment=nchunks(self.short(inputs)), long_count=0, long_segment=0)
        half = CHECKED_CHUNKS // 2
        return replace(
            config,
            segment=min(config.segment, 5),
            long_segment=min(config.long_segment, max(1, half // (config.long_count or 1))),
        )

    def also_judged(self, config: Config, inputs: SSDInputs) -> Sequence[SSDInputs]:
        """A find for the portable kernel also applies to packed sequences, and is verified on a few."""
        return () if isinstance(config, SSDHopperConfig) else (self._packed(inputs),)

    def _packed(self, inputs: SSDInputs) -> SSDInputs:
        """The beginning of the first sequence, cut into three packed sequences."""
        short = self.short(inputs)
        length = short.x.shape[1]
        alone = {name: getattr(short, name)[:1] for name in ("x", "dt", "B", "C")}
        boundaries = torch.tensor([0, length // 5, length // 2, length], dtype=torch.int32, device=short.x.device)
        z = None if short.z is None else short.z[:1]
        return replace(short, **alone, z=z, initial_states=None, cu_seqlens=boundaries)

    def use(self, finds: Iterable[TunedUse]) -> None:
        use_overrides("ssd", dict(map(_override, finds)))


def _override(find: TunedUse) -> tuple[CallKey, Config]:
    sizes: dict[str, Any] = dict(find.calls.sizes)
    sizes |= {"dtype": dtype_named(sizes["dtype"]), "exact": find.calls.intermediates == "exact"}
    return CallKey.of(find.gpu, "ssd", find.calls.kernel, **sizes), config_of(find.settings, find.reason)


TUNING = SSDTuning()
