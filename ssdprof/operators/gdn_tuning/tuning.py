"""The fused GDN kernels as `ssdprof tune` sees them: see `operators.tuning.Tuning`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ssdprof.core.base import Intermediates
from ssdprof.core.tuned import KernelSettings, TunedCalls, TunedUse, Value
from ssdprof.errors import BadInputError
from ssdprof.kernels.gdn import fused
from ssdprof.kernels.gdn.config import CALL_CHUNK, GDNPortableConfig, call_key
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.gdn.portable.scan import GDNPortableLaunch
from ssdprof.kernels.launch import LaunchCache
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import CallKey, use_overrides
from ssdprof.operators.dtypes import dtype_name, dtype_named
from ssdprof.operators.gdn_tuning.candidates import Axis, axes
from ssdprof.operators.gdn_tuning.settings import KERNEL, config_of, settings_of

CHECKED_POSITIONS = 1024  # of a sequence, on which a candidate is first verified

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

    def calls(self, inputs: GDNInputs, intermediates: Intermediates, kernel: str) -> TunedCalls:
        own = dict(call_key(inputs, Precision(intermediates=intermediates)).sizes)
        del own["exact"]  # it is in `intermediates`
        sizes: dict[str, Value] = own | {"dtype": dtype_name(own["dtype"])}
        return TunedCalls(operator="gdn", kernel=kernel, intermediates=intermediates, sizes=sizes)

    def committed(self, inputs: GDNInputs, kernel: str) -> GDNPortableConfig:  # noqa: ARG002
        return fused.committed_portable(inputs)

    def axes(self, config: GDNPortableConfig) -> tuple[Axis, ...]:  # noqa: ARG002
        return axes()

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
        use_overrides("gdn", dict(map(_override, finds)))


def _override(find: TunedUse) -> tuple[CallKey, GDNPortableConfig]:
    sizes: dict[str, Any] = dict(find.calls.sizes)
    sizes |= {"dtype": dtype_named(sizes["dtype"]), "exact": find.calls.intermediates == "exact"}
    return CallKey.of(find.gpu, "gdn", KERNEL, **sizes), config_of(find.settings, find.reason)


TUNING = GDNTuning()
