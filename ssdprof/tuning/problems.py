"""Makes tuning problems from shapes or stored captures, with their inputs on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ssdprof import runs, schema
from ssdprof.bench.grid import parse_dtypes
from ssdprof.capture import store
from ssdprof.capture.manifest import is_capture
from ssdprof.errors import BadInputError
from ssdprof.kernels.precision import Precision
from ssdprof.operators.drawing import Cell
from ssdprof.operators.dtypes import precision_of
from ssdprof.operators.operator import Operator
from ssdprof.tuning.search import Problem


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Inputs that are created later.  layer: equal for inputs of one layer, which may share a find."""

    shape: str
    tokens: str
    layer: str
    load: Callable[[], Any]

    def __str__(self) -> str:
        return f"{self.shape}, {self.tokens}"


def drawn(operator: Operator[Any], cells: Sequence[Cell], device: torch.device) -> tuple[Workload, ...]:
    """Random inputs of any shape, as in `ssdprof bench`."""
    return tuple(
        Workload(
            shape=cell.shape.name,
            tokens=f"{cell.tokens}, {cell.dtype}",
            layer=f"{cell.shape} {cell.dtype}",
            load=partial(operator.drawing.draw, cell, device),
        )
        for cell in cells
    )


def captured(
    operator: Operator[Any], where: str, seqlens: Sequence[int] | None, device: torch.device
) -> tuple[Workload, ...]:
    """The operator's middle layer in a folder of captures, or in a run with stored captures, at each length.

    Decode steps are left out, because the tuned kernels are made for prompts.
    seqlens: lengths; None: all.  Raises BadInputError if there is no such layer.
    """
    folder = Path(where).expanduser()
    if not is_capture(folder):
        folder = runs.read(where)[0] / runs.CAPTURES
        if not is_capture(folder):
            raise BadInputError(
                f"The run {where} has kept no captures.", "Run it with --save-captures, or name a --shape."
            )
    manifest, read = store.load(folder)
    layers = [stored for stored in manifest.layers if stored.layer.operator == operator.name and not stored.is_step]
    lengths = sorted({stored.seqlen for stored in layers} & set(seqlens or [stored.seqlen for stored in layers]))
    if not lengths:
        raise BadInputError(
            f"{folder} holds no {operator.outline.layers} layer of these lengths.",
            f"It holds {', '.join(map(str, sorted({stored.seqlen for stored in layers}))) or 'none'}.",
        )

    def inputs_of(stored: schema.LayerCapture) -> Any:
        return read(stored, device).inputs

    sources = []
    for length in lengths:
        of_length = [stored for stored in layers if stored.seqlen == length]
        stored = of_length[len(of_length) // 2]
        sources.append(
            Workload(
                shape=f"{manifest.checkpoint.repo_id} layer {stored.layer.index}",
                tokens=f"{length:,} tokens",
                layer=manifest.checkpoint.repo_id,
                load=partial(inputs_of, stored),
            )
        )
    return tuple(sources)


def problems(
    operator: Operator[Any], sources: Sequence[Workload], intermediates: schema.Intermediates
) -> Iterator[Problem]:
    """The problems of one layer's sources: one for each, or one for all if they share a find."""
    waiting: dict[str, list[tuple[Workload, Any]]] = {}
    for source in sources:
        inputs = source.load()
        kernel = operator.tunable.kernel(inputs)
        if operator.tunable.shares_find(kernel):
            waiting.setdefault(kernel, []).append((source, inputs))
        else:
            yield _problem(operator, [(source, inputs)], kernel, intermediates)
        del inputs
    for kernel, loaded in waiting.items():
        yield _problem(operator, loaded, kernel, intermediates)


def _problem(
    operator: Operator[Any], loaded: Sequence[tuple[Workload, Any]], kernel: str, intermediates: schema.Intermediates
) -> Problem:
    tuning, dims = operator.tunable, operator.costed.dims
    loaded = sorted(loaded, key=lambda one: dims(one[1]).seqlen)
    longest = loaded[-1][1]
    return Problem(
        operator=operator,
        shape=loaded[0][0].shape,
        tokens="; ".join(source.tokens for source, _ in loaded),
        intermediates=intermediates,
        calls=tuning.calls(longest, intermediates, kernel),
        inputs=tuple(inputs for _, inputs in loaded),
        precision=_precision(dims(longest).dtype, intermediates),
        committed=tuning.committed(longest, kernel),
    )


def _precision(dtype: schema.DType, intermediates: schema.Intermediates) -> Precision:
    """fp32 states with exact intermediates, the inputs' dtype with relaxed ones, as in a bench."""
    (own,) = parse_dtypes(dtype)
    (wanted,) = schema.precisions_for(own, intermediates, None)
    return precision_of(wanted)
