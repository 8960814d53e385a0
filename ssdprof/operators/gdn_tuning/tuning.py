"""The fused GDN kernels as `ssdprof tune` sees them: see `operators.tuning.Tuning`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ssdprof.core.base import Intermediates
from ssdprof.core.tuned import KernelSettings, TunedCalls, TunedUse, Value
from ssdprof.errors import BadInputError
from ssdprof.kernels._launch import LaunchCache
from ssdprof.kernels.gdn import tuned, variants
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.gdn.portable.config import PortableConfig
from ssdprof.kernels.gdn.portable.launch import PortableLaunch
from ssdprof.kernels.precision import Precision
from ssdprof.operators.dtypes import dtype_name, dtype_named
from ssdprof.operators.gdn_tuning.candidates import Axis, axes
from ssdprof.operators.gdn_tuning.settings import KERNEL, config_of, settings_of

CHECKED_POSITIONS = 1024  # of a sequence, on which a candidate is first verified

_launches: LaunchCache[PortableLaunch] = LaunchCache()


class GDNTuning:
    """Tunes the portable kernel; each find is for one length and one number of sequences."""

    def kernel(self, inputs: GDNInputs) -> str:
        name = variants.choose(variants.Call(inputs=inputs, precision=Precision())).name
        if name != KERNEL:
            raise BadInputError(
                f"The {name} kernel runs these inputs, and tuning does not vary its configuration.",
                f"For GDN, ssdprof tunes only the {KERNEL} kernel.",
            )
        return name

    def shares_find(self, kernel: str) -> bool:  # noqa: ARG002
        return False

    def calls(self, inputs: GDNInputs, intermediates: Intermediates, kernel: str) -> TunedCalls:
        own = tuned.Calls.of(inputs, Precision(intermediates=intermediates))
        sizes: dict[str, Value] = {**vars(own), "dtype": dtype_name(own.dtype)}
        del sizes["exact"]  # it is in `intermediates`
        return TunedCalls(operator="gdn", kernel=kernel, intermediates=intermediates, sizes=sizes)

    def committed(self, inputs: GDNInputs, kernel: str) -> PortableConfig:  # noqa: ARG002
        return variants.committed_portable(inputs)

    def axes(self, config: PortableConfig) -> tuple[Axis, ...]:  # noqa: ARG002
        return axes()

    def run(self, inputs: GDNInputs, precision: Precision, config: PortableConfig) -> GDNOutput:
        key = (inputs.signature, precision.intermediates, precision.state_dtype, config)
        launch = _launches.get(key, lambda: PortableLaunch(inputs, precision, config, state_v_first=False))
        return launch(inputs)

    def settings(self, config: PortableConfig) -> KernelSettings:
        return settings_of(config)

    def check(self, settings: KernelSettings) -> None:
        config_of(settings, "")

    def short(self, inputs: GDNInputs) -> GDNInputs:
        """The beginning of each sequence; whole chunks if theirs are."""
        length = inputs.length
        short = min(length, CHECKED_POSITIONS + length % tuned.CHUNK)
        return replace(inputs, **{name: getattr(inputs, name)[:, :short] for name in ("q", "k", "v", "g", "beta")})

    def for_short(self, config: PortableConfig, inputs: GDNInputs) -> PortableConfig:
        """The configuration for `short`: cut into segments if the whole sequence is."""
        chunks = -(-self.short(inputs).length // config.chunk)
        return replace(config, segment=min(config.segment, max(1, chunks // 2)))

    def also_judged(self, config: PortableConfig, inputs: GDNInputs) -> Sequence[GDNInputs]:  # noqa: ARG002
        """None: a find applies to inputs of one size only."""
        return ()

    def use(self, finds: Iterable[TunedUse]) -> None:
        tuned.use(_find(find) for find in finds)


def _find(find: TunedUse) -> tuned.Find:
    sizes: dict[str, Any] = dict(find.calls.sizes)
    calls = tuned.Calls(**(sizes | {"dtype": dtype_named(sizes["dtype"])}), exact=find.calls.intermediates == "exact")
    return tuned.Find(gpu=find.gpu, calls=calls, config=config_of(find.settings, find.reason))


TUNING = GDNTuning()
