"""Replaces a model's operators by an implementation while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from ssdprof import operators
from ssdprof.capture.intercept import CallCount, OperatorCall, Result, intercept
from ssdprof.checkpoint.meta import Mixer
from ssdprof.core.base import DType, PrecisionRecord
from ssdprof.operators.dtypes import precision_of
from ssdprof.operators.implementations import own_precisions, required, resolve

Compute = Callable[[OperatorCall], Result]  # out, and final states in fp32, or None if the call does not need them


def implemented(name: str, precision: PrecisionRecord, sites: Sequence[Mixer]) -> Compute:
    """The implementation `name` at `precision`, for the operators that `sites` call.

    Raises what `resolve` and `required` raise.  The result raises UnsupportedError for calls that the
    implementation does not support.
    """
    wanted = precision_of(precision)
    runs = {
        operator: required(resolve(operators.get(operator), name)).run for operator in {site.operator for site in sites}
    }

    def compute(call: OperatorCall) -> Result:
        result: Result = runs[call.mixer.operator](call.inputs, wanted)
        return result

    return compute


def precisions_of(
    name: str, sites: Sequence[Mixer], dtype: DType, wanted: tuple[PrecisionRecord, ...]
) -> tuple[PrecisionRecord, ...]:
    """The precisions of `wanted` that the implementation `name` supports for inputs of `dtype`, or its own."""
    return own_precisions(resolve(operators.get(sites[0].operator), name), dtype, wanted)


@contextmanager
def substituted(
    sites: Sequence[Mixer],
    compute: Compute,
    *,
    layers: Collection[int] | None = None,
    elsewhere: Compute = OperatorCall.run_original,
) -> Iterator[CallCount]:
    """While the context is open, the handler of `by_layer` computes the operators of a model.

    sites: all that the model has, from `find_mixers`.
    The model is restored when the context closes.  What `compute` raises passes through the model's forward.
    """
    with intercept(sites, by_layer(sites, compute, layers=layers, elsewhere=elsewhere)) as count:
        yield count


def by_layer(
    sites: Sequence[Mixer],
    compute: Compute,
    *,
    layers: Collection[int] | None = None,
    elsewhere: Compute = OperatorCall.run_original,
) -> Compute:
    """A handler that calls `compute` in `layers`, and `elsewhere` in the others.

    layers: indices of decoder layers; None: all.  elsewhere: by default the model's own function.
    """
    chosen = {
        site.layer_index: compute if layers is None or site.layer_index in layers else elsewhere for site in sites
    }
    return lambda call: chosen[call.mixer.layer_index](call)
