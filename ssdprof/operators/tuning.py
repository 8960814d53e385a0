"""The interface of `ssdprof tune` to an operator: the possible configurations of a kernel, and how to run one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from ssdprof.core.base import Intermediates
from ssdprof.core.tuned import KernelSettings, TunedCalls, TunedUse, Value
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import CallKey
from ssdprof.operators.dtypes import dtype_name, dtype_named

I = TypeVar("I", contravariant=True)
Config = Any  # a frozen dataclass with a field `reason`; hashable
Axis = Callable[[Config, Any], Iterable[Config]]  # (configuration, inputs) -> those that differ in one respect


class Tuning(Protocol[I]):
    """The kernels that can be tuned, and their configurations.

    A find may depend only on values on which the committed rule of its kernel depends.
    """

    def kernel(self, inputs: I) -> str:
        """The kernel that runs these inputs."""

    def shares_find(self, kernel: str) -> bool:
        """Whether one find applies to every length of a layer."""

    def calls(self, inputs: I, intermediates: Intermediates, kernel: str) -> TunedCalls:
        """The calls to which a find on these inputs applies."""

    def committed(self, inputs: I, kernel: str) -> Config:
        """The kernel's configuration without a find."""

    def axes(self, config: Config) -> Sequence[Axis]:
        """The axes in search order: each starts from the best candidate of the previous one."""

    def run(self, inputs: I, precision: Precision, config: Config) -> Any:
        """The operator's output with this configuration."""

    def settings(self, config: Config) -> KernelSettings:
        """The stored form of a configuration."""

    def check(self, settings: KernelSettings) -> None:
        """Raises ValueError for settings that the kernel does not take."""

    def short(self, inputs: Any) -> Any:
        """The beginning of the inputs, on which a candidate is verified first, with the same compiled kernels."""

    def for_short(self, config: Config, inputs: I) -> Config:
        """The configuration for the `short` inputs."""

    def also_judged(self, config: Config, inputs: Any) -> Sequence[Any]:
        """Other inputs to which a find with this configuration would apply."""

    def use(self, finds: Iterable[TunedUse]) -> None:
        """From now on, kernels of this process take these finds and no others."""


def tuned_calls(key: CallKey, intermediates: Intermediates) -> TunedCalls:
    """The stored form of the calls with this key, of any GPU."""
    sizes: dict[str, Value] = {name: value for name, value in key.sizes if name != "exact"}  # it is in `intermediates`
    sizes |= {"dtype": dtype_name(dict(key.sizes)["dtype"])}
    return TunedCalls(operator=key.operator, kernel=key.kernel, intermediates=intermediates, sizes=sizes)


def key_of(find: TunedUse) -> CallKey:
    """The inverse of `tuned_calls`, for the find's GPU."""
    calls = find.calls
    sizes: dict[str, Any] = dict(calls.sizes)
    sizes |= {"dtype": dtype_named(sizes["dtype"]), "exact": calls.intermediates == "exact"}
    return CallKey.of(find.gpu, calls.operator, calls.kernel, **sizes)
