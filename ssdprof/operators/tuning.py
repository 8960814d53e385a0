"""The interface of `ssdprof tune` to an operator: the possible configurations of a kernel, and how to run one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ssdprof.core.base import Intermediates, Record
from ssdprof.kernels.precision import Precision

I = TypeVar("I", contravariant=True)
Config = Any  # a frozen dataclass with a field `reason`; hashable
Value = int | float | bool | str


class Calls(Record):
    """The calls to which a find applies: those of `kernel` with these sizes, by the operator's own names."""

    operator: str
    kernel: str
    intermediates: Intermediates
    sizes: dict[str, Value]


class Settings(Record):
    """A configuration of a kernel, field by field, without its reason."""

    kernel: str
    values: dict[str, Value]


@dataclass(frozen=True, kw_only=True)
class Use:
    """A configuration for some calls on GPUs of one name.  reason: shown in reports where it is used."""

    gpu: str
    calls: Calls
    settings: Settings
    reason: str


class Tuning(Protocol[I]):
    """The kernels that can be tuned, and their configurations.

    A find may depend only on values on which the committed rule of its kernel depends.
    """

    def kernel(self, inputs: I) -> str:
        """The kernel that runs these inputs."""

    def shares_find(self, kernel: str) -> bool:
        """Whether one find applies to every length of a layer."""

    def calls(self, inputs: I, intermediates: Intermediates, kernel: str) -> Calls:
        """The calls to which a find on these inputs applies."""

    def committed(self, inputs: I, kernel: str) -> Config:
        """The kernel's configuration without a find."""

    def axes(self, config: Config) -> Sequence[Callable[[Config, I], Iterable[Config]]]:
        """The axes in search order: each starts from the best candidate of the previous one."""

    def run(self, inputs: I, precision: Precision, config: Config) -> Any:
        """The operator's output with this configuration."""

    def settings(self, config: Config) -> Settings:
        """The stored form of a configuration."""

    def check(self, settings: Settings) -> None:
        """Raises ValueError for settings that the kernel does not take."""

    def short(self, inputs: Any) -> Any:
        """The beginning of the inputs, on which a candidate is verified first, with the same compiled kernels."""

    def for_short(self, config: Config, inputs: I) -> Config:
        """The configuration for the `short` inputs."""

    def also_judged(self, config: Config, inputs: Any) -> Sequence[Any]:
        """Other inputs to which a find with this configuration would apply."""

    def use(self, finds: Iterable[Use]) -> None:
        """From now on, kernels of this process take these finds and no others."""
