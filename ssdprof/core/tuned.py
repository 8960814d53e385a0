"""The records that `ssdprof tune` stores: configurations of kernels that a search found."""

from typing import Final, Literal

from ssdprof.core.base import Record, Text
from ssdprof.core.case import Interval
from ssdprof.core.target import Environment

TUNED_VERSION: Final = 4
Setting = int | float | bool | Text
# What the calls of a search have in common.  The keys: "operator", "kernel", "intermediates", and
# sizes by the operator's names.
TunedCalls = dict[Text, Setting]


class TunedConfig(Record):
    """A configuration of a kernel that passed its tests and was faster than the committed one.

    calls: the calls for which it was searched, and to which it applies.
    settings: the fields of the configuration, without its reason.
    device_ratio: the device time with the committed configuration over that with this one; for
        several lengths their geometric mean.
    device_interval: its 95 % interval.
    created: ISO 8601, UTC.
    """

    calls: TunedCalls
    settings: dict[Text, Setting]
    device_ratio: float
    device_interval: Interval
    created: Text

    @property
    def operator(self) -> str:
        return str(self.calls["operator"])

    @property
    def reason(self) -> str:
        """The reason for the configuration, as reports that use it show it."""
        return f"tuned on this GPU, {self.created[:10]}"


class TunedConfigs(Record):
    """The cached configurations for one model of GPU.

    kernels: operator -> the hash of its kernels.  The configurations are valid only for kernels of
        this hash.
    environment: the machine on which the last search ran.
    """

    version: Literal[4] = TUNED_VERSION
    kind: Literal["ssdprof tuned"] = "ssdprof tuned"
    ssdprof_version: Text
    kernels: dict[Text, Text]
    environment: Environment
    configs: tuple[TunedConfig, ...]
