"""Inputs as a bench generates them."""

from typing import Any

import torch

from ssdprof import operators
from ssdprof.core.base import DType
from ssdprof.operators.generate import Cell, Layout, Tokens


def cell_of(
    operator: str,
    sizes: str,
    seqlen: int,
    *,
    dtype: DType = "bf16",
    layout: Layout = "views",
    ways: tuple[str, ...] = (),
    sequences: int = 1,
    **tokens: Any,
) -> Cell:
    """sizes: a model's name, or as the command line takes them.  tokens: fields of `Tokens`."""
    known = operators.get(operator).generated
    shape = known.shapes.get(sizes) or known.parse(sizes)
    assert shape is not None
    several = Tokens(sequences=sequences, seqlen=seqlen, **tokens)
    return Cell(shape=shape, dtype=dtype, layout=layout, tokens=several, ways=ways)


def generated(operator: str, sizes: str, seqlen: int, *, device: str = "cpu", **fields: Any) -> Any:
    """fields: of the cell, see `cell_of`."""
    cell = cell_of(operator, sizes, seqlen, **fields)
    return operators.get(operator).generated.draw(cell, torch.device(device))
