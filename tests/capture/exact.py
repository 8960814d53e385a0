"""Captures of tiny models, the fp64 recurrence on captured inputs, and the tolerance for
results.
"""

from collections.abc import Callable, Iterable

import tiny_models
import torch
from torch import Tensor

from ssdprof.capture.forward import PromptRun
from ssdprof.capture.layers import CapturedLayer, capture_layers
from ssdprof.core.target import LayerRef, Serving
from ssdprof.kernels.gdn.reference import gdn_recurrence
from ssdprof.kernels.kda.reference import kda_recurrence
from ssdprof.kernels.ssd.reference import ssd_recurrence

FP32_ROUNDING = 5e-5  # of the largest value: a few hundred roundings through the layers


def capture(
    name: str,
    ids: Tensor,
    serving: Serving = Serving(),  # noqa: B008
    segment_length: int | None = None,
    *,
    model=None,
    layers: tuple[LayerRef, ...] | None = None,
    on_layer: Callable[[CapturedLayer], object] | None = None,
    host_budget_bytes: int | None = None,
) -> tuple[list[CapturedLayer], int]:
    """The captured calls, unless on_layer takes them, and how often the operators were called.

    model: with its head; None: the shared one.  layers, segment_length: None: all.
    """
    captured = []
    model = tiny_models.shared(name) if model is None else model
    prompt = PromptRun(
        model.base_model,
        ids.to(model.device),
        serving.chunk or segment_length or ids.shape[1],
        name,
        tiny_models.layer_refs(name) if layers is None else layers,
        serving,
        lambda hidden: hidden @ model.get_output_embeddings().weight.T,
    )
    calls = capture_layers(prompt, on_layer or captured.append, host_budget_bytes=host_budget_bytes)
    return captured, calls


def check_same(actual: Iterable[CapturedLayer], expected: Iterable[CapturedLayer]):
    for layer, other in zip(actual, expected, strict=True):
        assert (layer.layer, layer.call, layer.remark) == (other.layer, other.call, other.remark)
        assert layer.inputs.tensors.keys() == other.inputs.tensors.keys()
        for name, tensor in other.inputs.tensors.items():
            assert torch.equal(layer.inputs.tensors[name], tensor)


def oracle(inputs):
    recurrence = {"ssd": ssd_recurrence, "gdn": gdn_recurrence, "kda": kda_recurrence}[
        inputs.operator
    ]
    return recurrence(inputs, torch.float64)


def difference(actual: Tensor, expected: Tensor) -> float:
    """Largest deviation, relative to the largest value."""
    deviation = (actual.double() - expected.double()).abs().max()
    return float(deviation / expected.double().abs().max())
