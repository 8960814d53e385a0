"""Captures of tiny models, the fp64 recurrence on captured inputs, and the tolerance for
results.
"""

from typing import Any

import tiny_models
import torch

from ssdprof.capture.layers import CapturedLayer, capture_layers
from ssdprof.core.target import LayerRef, Serving
from ssdprof.kernels.gdn.reference import gdn_recurrence
from ssdprof.kernels.kda.reference import kda_recurrence
from ssdprof.kernels.ssd.reference import ssd_recurrence

FP32_ROUNDING = 5e-5  # of the largest value: a few hundred roundings through the layers


def capture(
    name: str,
    ids: torch.Tensor,
    serving: Serving = Serving(),  # noqa: B008
    segment_length: int | None = None,
    *,
    model: Any = None,
    layers: tuple[LayerRef, ...] | None = None,
    **options: Any,
) -> tuple[list[CapturedLayer], int]:
    """The captured calls, and how often the operators were called.

    model: with its head; None: the shared one.  layers, segment_length: None: all.
    """
    found: list[CapturedLayer] = []
    model = tiny_models.shared(name) if model is None else model
    layers = tiny_models.layer_refs(name) if layers is None else layers
    options = {
        "on_layer": found.append,
        "head": lambda hidden: hidden @ model.get_output_embeddings().weight.T,
    } | options
    length = segment_length or ids.shape[1]
    ref = tiny_models.checkpoint_ref(name)
    calls = capture_layers(
        model.base_model, ids, layers, ref=ref, segment_length=length, serving=serving, **options
    )
    return found, calls


def oracle(inputs: Any) -> Any:
    recurrence = {"ssd": ssd_recurrence, "gdn": gdn_recurrence, "kda": kda_recurrence}[
        inputs.operator
    ]
    return recurrence(inputs, torch.float64)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest deviation, relative to the largest value."""
    return float((one.double() - other.double()).abs().max() / other.double().abs().max())
