"""The share of the first rank of a tensor-parallel server: its heads of every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssdprof import operators
from ssdprof.capture.store import token_major
from ssdprof.errors import BadInputError
from ssdprof.report.format import words
from ssdprof.schema import CheckpointRef, LayerRef


def refuse(ref: CheckpointRef, layer: LayerRef, sizes: Mapping[str, int], ranks: int) -> None:
    """BadInputError for a layer of these sizes whose heads a server could not divide among `ranks`."""
    if ranks == 1:
        return
    sharding = operators.get(layer.operator).sharding
    fitting: list[int] = []
    if sharding is None:
        why = f"{operators.outline(layer.operator).layers} layers cannot be divided here"
    elif why := sharding.refusal(sizes, ranks):
        fitting = [number for number in range(2, max(sizes.values()) + 1) if not sharding.refusal(sizes, number)]
    if why:
        raise BadInputError(
            f"--tensor-parallel {ranks} does not fit {ref.repo_id}: {why}.",
            f"Give {words(map(str, fitting), 'or')}." if fitting else "Leave out --tensor-parallel.",
        )


def first_rank(inputs: Any, ranks: int) -> Any:
    """The first rank's share of an operator's inputs, in the layout of the rank's own projection."""
    if ranks == 1:
        return inputs
    sharding = operators.of(inputs).sharding
    assert sharding is not None, "refused before anything was loaded"
    return token_major(sharding.first_rank(inputs, ranks))
