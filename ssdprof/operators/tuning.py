"""What `ssdprof tune` asks of an operator: which configurations a kernel may be given, and how one is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ssdprof.kernels.precision import Precision
from ssdprof.schema import Intermediates, Record

I = TypeVar("I", contravariant=True)
Config = Any  # a frozen dataclass with a field `reason`; hashable
Value = int | float | bool | str


class Calls(Record):
    """Which calls a find is for: those of `kernel` that have these sizes, by the operator's own names."""

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
    """A configuration for some calls on GPUs of one name.  reason: what a report shows where it is used."""

    gpu: str
    calls: Calls
    settings: Settings
    reason: str


class Tuning(Protocol[I]):
    """The kernels that can be tuned, and their configurations.

    A find may depend on what the committed rule for its kernel depends on, and on nothing else.
    """

    def kernel(self, inputs: I) -> str:
        """Which kernel runs these inputs."""

    def shares_find(self, kernel: str) -> bool:
        """Whether one find serves every length of a layer."""

    def calls(self, inputs: I, intermediates: Intermediates, kernel: str) -> Calls:
        """The calls that a find on these inputs is for."""

    def committed(self, inputs: I, kernel: str) -> Config:
        """What the kernel takes without a find."""

    def axes(self, config: Config) -> Sequence[Callable[[Config, I], Iterable[Config]]]:
        """What is varied, in the order of the search: each axis begins with the best of the one before."""

    def run(self, inputs: I, precision: Precision, config: Config) -> Any:
        """The operator's output with this configuration."""

    def settings(self, config: Config) -> Settings:
        """As it is stored."""

    def check(self, settings: Settings) -> None:
        """Raises ValueError for settings that the kernel does not take."""

    def short(self, inputs: Any) -> Any:
        """The beginning of the inputs, on which a candidate is judged first; what is compiled is the same."""

    def for_short(self, config: Config, inputs: I) -> Config:
        """The configuration as the `short` inputs are run with it."""

    def also_judged(self, config: Config, inputs: Any) -> Sequence[Any]:
        """Other inputs that a find for this configuration would serve."""

    def use(self, finds: Iterable[Use]) -> None:
        """Let the kernels of this process take these from now on, and no others."""
