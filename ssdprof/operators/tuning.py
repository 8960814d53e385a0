"""The interface of `ssdprof tune` to an operator: the possible configurations of its kernels, and
how to run a kernel with one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from pydantic import create_model

from ssdprof import kernels, operators
from ssdprof.core.base import Intermediates, Record
from ssdprof.core.tuned import Setting, TunedCalls, TunedConfig
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import CallKey, key_of_calls, use_overrides
from ssdprof.operators.operator import I
from ssdprof.operators.tensors import dtype_name, dtype_named

if TYPE_CHECKING:
    from ssdprof.kernels.inputs import Inputs

# Positions of the beginning of a sequence on which a candidate is verified first, to which `short`
# adds the remainder of the whole length by LARGEST_CHUNK.  That is the largest chunk of any
# candidate, in positions; the others divide it.
CHECKED_POSITIONS = 1024
LARGEST_CHUNK = 128
PowerOfTwo = Literal[16, 32, 64, 128, 256]
Warps = Literal[1, 2, 4, 8, 16]
Config = Any  # a frozen dataclass with a field `reason`; hashable
# (configuration, inputs) -> configurations that differ from it in one respect, perhaps with itself
Axis = Callable[[Config, Any], Iterable[Config]]


def stored_form(kind: type[Config], **fields: Any) -> tuple[type[Config], type[Record]]:
    """The type of a kernel's configurations, and a record type that checks their stored values.

    fields: name of a field of the configuration -> the type of its stored value.
    """
    types: dict[str, Any] = {name: (annotation, ...) for name, annotation in fields.items()}
    return kind, create_model(f"{kind.__name__}Settings", __base__=Record, **types)


def varied(
    fits: Callable[[Config, Any], bool] = lambda _config, _inputs: True, **values: Iterable[Any]
) -> Axis:
    """The axis that sets fields of a configuration to every combination of `values`.

    fits: (configuration, inputs) -> whether to keep this configuration.
    values: name of a field -> its values.
    """
    combinations = [
        dict(zip(values, options, strict=True)) for options in product(*values.values())
    ]

    def axis(config: Config, inputs: Inputs) -> Iterator[Config]:
        for fields in combinations:
            candidate = replace(config, **fields)
            if fits(candidate, inputs):
                yield candidate

    return axis


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The kernels of an operator that can be tuned, and their configurations.

    A tuned configuration may depend only on values on which the committed rule of its kernel
    depends.

    operator: name of the operator.
    configs: kernel -> its `stored_form`.
    kernel: (inputs) -> the kernel that runs them.
    key: (inputs, precision, kernel) -> the calls to which a configuration that was tuned on these
        inputs applies.
    committed: (inputs, precision, kernel) -> the configuration that the kernel has without tuning.
    axes: (configuration) -> its axes in search order; each starts from the best candidate of the
        previous one.
    run: (inputs, precision, configuration) -> the operator's output.
    for_short: (configuration, inputs) -> the configuration for `short(inputs)`, which cuts these
        into several segments if `configuration` cuts `inputs`.
    shares_config: (kernel) -> whether one tuned configuration applies to every length of a layer.
    also_checked: (configuration, inputs) -> other inputs to which the configuration would apply,
        and on which it is verified too.
    check: (configuration); raises ValueError for one that the kernel does not take.
    """

    operator: str
    configs: Mapping[str, tuple[type[Config], type[Record]]]
    kernel: Callable[[Any], str]
    key: Callable[[Any, Precision, str], CallKey]
    committed: Callable[[Any, Precision, str], Config]
    axes: Callable[[Config], Sequence[Axis]]
    run: Callable[[Any, Precision, Config], kernels.Output]
    for_short: Callable[[Config, Any], Config]
    shares_config: Callable[[str], bool] = lambda _: False
    also_checked: Callable[[Config, Any], Sequence[Any]] = lambda _config, _inputs: ()
    check: Callable[[Config], None] = lambda _: None

    def short(self, inputs: I) -> I:
        """The beginning of each sequence of a batch, on which a candidate is verified first.  The
        same compiled kernels run it: its last chunk is incomplete if that of the whole sequence is.
        Inputs of at most that length stay whole.  They must not be packed.
        """
        positional = operators.get(self.operator).binding.positional(inputs)
        length = inputs.length
        short = min(length, CHECKED_POSITIONS + length % LARGEST_CHUNK)
        return replace(inputs, **{name: tensor[:, :short] for name, tensor in positional.items()})

    def calls(self, inputs: Inputs, intermediates: Intermediates, kernel: str) -> TunedCalls:
        """The stored form of `key`, without the GPU: a file of tuned configurations is of one GPU.
        "intermediates" takes the place of "exact".
        """
        key = dict(self.key(inputs, Precision(intermediates=intermediates), kernel))
        for name in ("gpu", "exact"):
            del key[name]
        return key | {"intermediates": intermediates, "dtype": dtype_name(key["dtype"])}

    def settings(self, config: Config) -> dict[str, Setting]:
        """The stored form of a configuration."""
        record = next(record for kind, record in self.configs.values() if isinstance(config, kind))
        return {name: getattr(config, name) for name in record.model_fields}

    def config(self, kernel: str, settings: Mapping[str, Setting], reason: str = "") -> Config:
        """The configuration of a kernel with stored settings: the inverse of `settings`.

        Raises ValueError (pydantic.ValidationError is one) for settings that the kernel does not
        take, and for an unknown kernel.
        """
        if kernel not in self.configs:
            raise ValueError(f"no settings of a {kernel!r} kernel of {self.operator} are known")
        kind, record = self.configs[kernel]
        config = kind(**record.model_validate(settings).model_dump(), reason=reason)
        self.check(config)
        return config

    def use(self, gpu: str, configs: Iterable[TunedConfig]) -> None:
        """From now on, this operator's kernels in this process take these configurations on GPUs of
        this name.  They replace all those of earlier calls, also for other GPUs.  Raises ValueError
        as `config` does.
        """
        overrides = {}
        for tuned in configs:
            kernel = str(tuned.calls["kernel"])
            config = self.config(kernel, tuned.settings, tuned.reason)
            overrides[key_of(gpu, tuned.calls)] = config
        use_overrides(self.operator, overrides)


def key_of(gpu: str, calls: TunedCalls) -> CallKey:
    """The inverse of `Tuning.calls`, for a GPU of this name: the key of these calls."""
    sizes: dict[str, Any] = dict(calls)
    sizes |= {"dtype": dtype_named(sizes["dtype"]), "exact": sizes.pop("intermediates") == "exact"}
    return key_of_calls(gpu=gpu, **sizes)
