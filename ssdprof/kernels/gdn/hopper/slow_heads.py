"""Launches that compute the states entering segments of slow heads: `parts.py` and `combine_kernel.py`."""

from __future__ import annotations

from typing import Any

import torch
from triton import next_power_of_2

from ssdprof.kernels.gdn.hopper.combine_kernel import _combine_kernel
from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig, row_count
from ssdprof.kernels.gdn.hopper.hopper_kernel import _parts_kernel
from ssdprof.kernels.gdn.hopper.parts import LEAST_ROWS, MOST_ROWS
from ssdprof.kernels.gdn.hopper.rings import DIM
from ssdprof.kernels.gdn.hopper.workspace import HopperWorkspace
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.hopper.schedule import ceil_div
from ssdprof.kernels.launch import Launcher
from ssdprof.kernels.tensors import Part, part

BLOCK_V = 16  # rows of a transposed state in one program of `combine_kernel.py`


class LongMemory:
    """Two launches, or none if `config.transition_parts` is 0 or every segment begins its sequence.

    Raises ValueError if `transition_parts` does not divide a segment, or if there are more rows than `MOST_ROWS`.
    """

    def __init__(
        self,
        inputs: GDNInputs,
        config: GDNHopperConfig,
        places: HopperWorkspace,
        scalars: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        self._rows = row_count(inputs, config.segment) if config.transition_parts else 0
        self._places = places
        if not self._rows:
            return
        if self._rows > MOST_ROWS or config.segment % config.transition_parts:
            raise ValueError(
                f"transition_parts = {config.transition_parts} with {self._rows} rows of {config.segment} chunks"
            )
        pairs = inputs.sequences * inputs.v.shape[2]
        boundaries = self._rows // pairs
        tasks = 2 * config.transition_parts * self._rows
        self._programs = min(config.transition_programs, tasks)
        self._combining = pairs * DIM.value // BLOCK_V
        most = ceil_div(tasks, self._programs)
        parts_options = options | {
            "ROWS": max(LEAST_ROWS, next_power_of_2(self._rows)),
            "PARTS": config.transition_parts,
            "MOST": next_power_of_2(most),
        }
        self._make_parts = Launcher(_parts_kernel, (*scalars, self._rows, config.longest_first_pass), parts_options)
        combine_options = {
            "PARTS": config.transition_parts,
            "BOUNDARIES": next_power_of_2(boundaries),
            "DIM": DIM.value,
            "BLOCK_V": BLOCK_V,
            "num_warps": 8,
        }
        self._combine = Launcher(_combine_kernel, (pairs, boundaries), combine_options)

    def __call__(
        self,
        memory: torch.Tensor | None,
        descriptors: tuple[Any, ...],
        inputs: GDNInputs,
        gates: tuple[Part | None, ...],
    ) -> tuple[Part | None, Part | None]:
        """Launch both kernels.  Returns the entering states and backs, which the main kernel reads.

        descriptors: of q, k, v, inverse and out; gates: decays, bounds, norms
        """
        if not self._rows:
            return None, None
        places = self._places
        backs, parts, entering = (part(memory, place) for place in (places.backs, places.parts, places.entering))
        self._make_parts(
            self._programs, *descriptors, inputs.initial_state, inputs.cu_seqlens, parts, backs, *gates
        )  # fmt: skip
        self._combine(self._combining, parts, backs, entering)
        return entering, backs
