"""The sizes of a stored call, from its record alone."""

from __future__ import annotations

import torch

from ssdprof import operators
from ssdprof.core.subject import Dims, LayerCapture
from ssdprof.errors import BadInputError, library_message
from ssdprof.operators.dtypes import stored_dtype_named


def stored_dims(capture: LayerCapture) -> Dims:
    """The sizes from the operator's cost, on meta tensors.  BadInputError for an invalid record."""
    operator = operators.get(capture.layer.operator)
    try:
        tensors = {
            name: torch.empty(record.shape, dtype=stored_dtype_named(record.dtype), device="meta")
            for name, record in capture.tensors.items()
        }
        inputs = operator.inputs(**tensors, **operator.door.arguments(capture.scalars))
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInputError(
            f"The stored {capture.layer.name} cannot be replayed: {library_message(error)}.", "Capture again."
        ) from error
    return operator.costed.dims(inputs)
