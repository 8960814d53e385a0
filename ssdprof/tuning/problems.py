"""What is searched for: from shapes or stored captures to problems, with their inputs on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ssdprof import runs, schema
from ssdprof.bench.contenders import precisions_for
from ssdprof.bench.grid import Cell, InputDType
from ssdprof.bench.inputs import draw
from ssdprof.capture import store
from ssdprof.errors import BadInputError
from ssdprof.kernels import _gpu
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.hopper import config as hopper_config
from ssdprof.kernels.ssd.hopper.config import HopperConfig
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.kernels.ssd.portable.config import PortableConfig
from ssdprof.measure.dtypes import dtype_name, dtype_named
from ssdprof.tuning.records import Calls, Kernel
from ssdprof.tuning.search import Problem


@dataclass(frozen=True, kw_only=True)
class Source:
    """Inputs that are not made yet.  layer: equal for those of one layer, which may share a find."""

    shape: str
    tokens: str
    layer: str
    load: Callable[[], SSDInputs]

    def __str__(self) -> str:
        return f"{self.shape}, {self.tokens}"


def drawn(cells: Sequence[Cell], device: torch.device) -> tuple[Source, ...]:
    """Inputs of any shape, as `ssdprof bench` draws them."""
    return tuple(
        Source(
            shape=cell.shape.name,
            tokens=f"{cell.tokens}, {cell.dtype}",
            layer=f"{cell.shape} {cell.dtype}",
            load=partial(draw, cell, device, chunk_size=128),
        )
        for cell in cells
    )


def captured(where: str, seqlens: Sequence[int] | None, device: torch.device) -> tuple[Source, ...]:
    """The middle SSD layer of a folder of captures, or of a run that has kept its captures, at each length.

    seqlens: those wanted; None for all that there are.  Raises BadInputError if there is no such layer.
    """
    folder = Path(where).expanduser()
    if not store.is_capture(folder):
        folder = runs.read(where)[0] / runs.CAPTURES
        if not store.is_capture(folder):
            raise BadInputError(
                f"The run {where} has kept no captures.", "Run it with --save-captures, or name a --shape."
            )
    manifest, read = store.load(folder)
    layers = [stored for stored in manifest.layers if stored.layer.operator == "ssd"]
    lengths = sorted({stored.seqlen for stored in layers} & set(seqlens or [stored.seqlen for stored in layers]))
    if not lengths:
        raise BadInputError(
            f"{folder} holds no SSD layer of these lengths.",
            f"It holds {', '.join(map(str, sorted({stored.seqlen for stored in layers}))) or 'none'}.",
        )

    def inputs_of(stored: schema.LayerCapture) -> SSDInputs:
        inputs = read(stored, device).inputs
        assert isinstance(inputs, SSDInputs)
        return inputs

    sources = []
    for length in lengths:
        of_length = [stored for stored in layers if stored.seqlen == length]
        stored = of_length[len(of_length) // 2]
        sources.append(
            Source(
                shape=f"{manifest.checkpoint.repo_id} layer {stored.layer.index}",
                tokens=f"{length:,} tokens",
                layer=manifest.checkpoint.repo_id,
                load=partial(inputs_of, stored),
            )
        )
    return tuple(sources)


def problems(sources: Sequence[Source], intermediates: schema.Intermediates) -> Iterator[Problem]:
    """Of the sources of one layer: of the Hopper kernel one for each, of the portable kernel one for all."""
    waiting: list[tuple[Source, SSDInputs]] = []
    for source in sources:
        inputs = source.load()
        if hopper_config.unsupported(inputs):
            waiting.append((source, inputs))
        else:
            yield _problem([(source, inputs)], "hopper", intermediates)
        del inputs
    if waiting:
        yield _problem(waiting, "portable", intermediates)


def _problem(
    loaded: Sequence[tuple[Source, SSDInputs]], kernel: Kernel, intermediates: schema.Intermediates
) -> Problem:
    loaded = sorted(loaded, key=lambda one: one[1].x.shape[1])
    longest = loaded[-1][1]
    return Problem(
        shape=loaded[0][0].shape,
        tokens="; ".join(source.tokens for source, _ in loaded),
        calls=Calls.of(longest, intermediates, kernel),
        inputs=tuple(inputs for _, inputs in loaded),
        precision=_precision(longest, intermediates),
        committed=_committed(longest, kernel),
    )


def _precision(inputs: SSDInputs, intermediates: schema.Intermediates) -> Precision:
    """fp32 states with exact intermediates, the inputs' dtype with relaxed ones, as in a bench."""
    name = dtype_name(inputs.x.dtype)
    dtypes: dict[str, InputDType] = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
    (wanted,) = precisions_for(dtypes[name], intermediates, None)
    return Precision(intermediates=intermediates, state_dtype=dtype_named(wanted.state_dtype))


def _committed(inputs: SSDInputs, kernel: Kernel) -> HopperConfig | PortableConfig:
    if kernel == "hopper":
        return HopperConfig.choose(inputs, _gpu.sm_count(inputs.x), batch_invariant=False)
    return PortableConfig.choose(inputs, _gpu.capability(inputs.x) if inputs.x.is_cuda else (9, 0))
