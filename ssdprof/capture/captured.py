"""One layer's operator inputs: the output of the capture stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ssdprof.core.subject import CallRef, LayerRef


@dataclass(frozen=True, kw_only=True)
class CapturedLayer:
    """The inputs of one call of a layer's operator.

    call: which one; None: the one for a whole prompt
    inputs: token-major, on the model's device; the values and dtypes are the model's
    model_strides: of each tensor as the model passed it; from the first segment if the prompt went through in several
    remark: one sentence if the inputs differ from the model's call or its config, such as heads that were repeated
    """

    layer: LayerRef
    inputs: Any
    model_strides: dict[str, tuple[int, ...]]
    remark: str = ""
    call: CallRef | None = None


OnLayer = Callable[[CapturedLayer], None]
