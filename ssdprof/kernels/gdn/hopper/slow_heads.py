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

AHEAD = 3  # parts of which `combine_kernel.py` has loads under way, or uses them
RING = 3  # slots of the rings of `parts.py`
STATE_REGISTERS = 240  # of two matrices
WIDE = 16  # most pairs with 16 rows of V in a program of `combine_kernel.py`; with more, 32 fill the GPU, too


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
        tasks = config.transition_parts * self._rows
        self._programs = min(config.transition_programs, tasks)
        block_v, warps = (16, 8) if pairs <= WIDE else (32, 4)
        self._combining = pairs * DIM.value // block_v
        most = ceil_div(tasks, self._programs)
        parts_options = options | {
            "ROWS": max(LEAST_ROWS, next_power_of_2(self._rows)),
            "PARTS": config.transition_parts,
            "MOST": next_power_of_2(most),
            "KEY_DEPTH": RING,
            "DEPTH": RING,
            "STATE_REGISTERS": STATE_REGISTERS,
        }
        limits = config.longest_first_pass, config.least_first_pass
        self._make_parts = Launcher(_parts_kernel, (*scalars, self._rows, *limits), parts_options)
        combine_options = {
            "HEADS": inputs.v.shape[2],
            "PARTS": config.transition_parts,
            "BOUNDARIES": next_power_of_2(boundaries),
            "DIM": DIM.value,
            "BLOCK_V": block_v,
            "AHEAD": AHEAD,
            "num_warps": warps,
        }
        strides = options["STATE_STRIDES"][:4]
        self._combine = Launcher(_combine_kernel, (strides, pairs, boundaries, config.segment), combine_options)

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
        backs, parts, moves = (part(memory, place) for place in (places.backs, places.parts, places.moves))
        entering = part(memory, places.entering)
        _, k, v, inverse, _ = descriptors
        self._make_parts(self._programs, k, v, inverse, inputs.cu_seqlens, parts, moves, backs, *gates)
        self._combine(self._combining, parts, moves, backs, inputs.initial_state, entering)
        return entering, backs
