"""What follows from a request before anything large is downloaded."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ssdprof import operators
from ssdprof.core.subject import CheckpointRef, Dims, LayerCapture, LayerRef
from ssdprof.core.words import words
from ssdprof.errors import BadInputError, library_message
from ssdprof.operators.dtypes import dtype_named


def stored_dims(capture: LayerCapture) -> Dims:
    """The sizes from the operator's cost, on meta tensors.  BadInputError for an invalid record."""
    operator = operators.get(capture.layer.operator)
    try:
        tensors = {
            name: torch.empty(record.shape, dtype=dtype_named(record.dtype), device="meta")
            for name, record in capture.tensors.items()
        }
        inputs = operator.inputs(**tensors, **operator.binding.arguments(capture.scalars))
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInputError(
            f"The stored {capture.layer.name} cannot be replayed: {library_message(error)}.", "Capture again."
        ) from error
    return operator.judged.dims(inputs)


def refuse_sharding(ref: CheckpointRef, layer: LayerRef, sizes: Mapping[str, int], ranks: int) -> None:
    """BadInputError for a layer of these sizes whose heads a server could not divide among `ranks`."""
    if ranks == 1:
        return
    refusal = operators.get(layer.operator).refusal
    fitting: list[int] = []
    if refusal is None:
        why = f"{operators.get(layer.operator).layers} layers cannot be divided here"
    elif why := refusal(sizes, ranks):
        fitting = [number for number in range(2, max(sizes.values()) + 1) if not refusal(sizes, number)]
    if why:
        raise BadInputError(
            f"--tensor-parallel {ranks} does not fit {ref.repo_id}: {why}.",
            f"Give {words(map(str, fitting), 'or')}." if fitting else "Leave out --tensor-parallel.",
        )
