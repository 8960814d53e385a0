"""A model id, a folder or a demo -> local files, a commit, the layers that hold an operator, and the loaded model.

`locate` finds and describes, `fetch` downloads and checks, `load_model` loads.  Importing this package imports none of
huggingface_hub, torch and transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssdprof.checkpoint.families import FAMILIES, siblings_that_fit, supported
    from ssdprof.checkpoint.fetched import LocalCheckpoint, fetch, meta_model
    from ssdprof.checkpoint.layer_dims import LayerDims, SSDLayerDims
    from ssdprof.checkpoint.load import load_model
    from ssdprof.checkpoint.located import Located, locate, weight_bytes
    from ssdprof.checkpoint.source import FileInfo

_HOMES = {
    "FAMILIES": "families",
    "FileInfo": "source",
    "LayerDims": "layer_dims",
    "LocalCheckpoint": "fetched",
    "Located": "located",
    "SSDLayerDims": "layer_dims",
    "fetch": "fetched",
    "load_model": "load",
    "locate": "located",
    "meta_model": "fetched",
    "siblings_that_fit": "families",
    "supported": "families",
    "weight_bytes": "located",
}

__all__ = [
    "FAMILIES",
    "FileInfo",
    "LayerDims",
    "LocalCheckpoint",
    "Located",
    "SSDLayerDims",
    "fetch",
    "load_model",
    "locate",
    "meta_model",
    "siblings_that_fit",
    "supported",
    "weight_bytes",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
