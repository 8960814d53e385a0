"""`run --cast`: captured inputs in another dtype than the model computed them in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ssdprof import operators
from ssdprof.capture.store import token_major
from ssdprof.operators.dtypes import dtype_named
from ssdprof.operators.tensors import tensors
from ssdprof.schema import DType


def cast(inputs: Any, to: DType | None) -> tuple[Any, str]:
    """The inputs with the model's activations in dtype `to`, in the layout that a model of that dtype would give them.

    Activations are the tensors with a position that the model computed in its own dtype.  Tensors of the
    whole call (A, D, dt_bias, initial states), and those that every model computes in fp32, are not changed.
    The second value is a sentence for the report on elements that `to` cannot represent; empty if there are none.
    to: None changes nothing.
    """
    if to is None:
        return inputs, ""
    door, given, dtype = operators.of(inputs).door, tensors(inputs), dtype_named(to)
    own = given[door.views[0]].dtype
    names = [name for name in (*door.views, *door.per_position) if name in given and name not in door.always_fp32]
    changed = {name: given[name].to(dtype) for name in names if given[name].dtype == own}
    lost = [words for name, tensor in changed.items() for words in _lost(name, given[name], tensor)]
    remark = f"The cast to {to} changed some elements: {'; '.join(lost)}." if lost else ""
    return token_major(replace(inputs, **changed)), remark


def _lost(name: str, before: torch.Tensor, after: torch.Tensor) -> Iterator[str]:
    """A phrase on numbers that became infinite or 0."""
    infinite = int((before.isfinite() & ~after.isfinite()).sum())
    zero = int(((before != 0) & (after == 0)).sum())
    if infinite:
        yield f"{infinite:,} of {name} became infinite"
    if zero:
        yield f"{zero:,} of {name} became 0"
