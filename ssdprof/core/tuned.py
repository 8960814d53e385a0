"""Records of `ssdprof tune`: configurations of kernels that were searched for and found."""

from __future__ import annotations

from typing import Final, Literal

from ssdprof.core.base import Record, Text
from ssdprof.core.case import Interval
from ssdprof.core.target import Environment

TUNED_VERSION: Final = 4
Setting = int | float | bool | Text
# operator, kernel and intermediates of calls, and their sizes by the operator's names
TunedCalls = dict[Text, Setting]


class TunedConfig(Record):
    """A configuration that passed, and was faster than the committed one on one GPU.

    calls: those to which it applies.  settings: field by field, without the reason.
    device_ratio: the committed one's time over this one's, with its interval; over several lengths
    a geometric mean.
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
        """The reason shown in reports that use it."""
        return f"tuned on this GPU, {self.created[:10]}"


class TunedConfigs(Record):
    """The cached configurations of one GPU.

    kernels: the hash of each operator's machine code; configurations are valid only for it.
    """

    version: Literal[4] = TUNED_VERSION
    kind: Literal["ssdprof tuned"] = "ssdprof tuned"
    ssdprof_version: Text
    kernels: dict[Text, Text]
    environment: Environment
    configs: tuple[TunedConfig, ...]
