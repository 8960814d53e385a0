"""Bundled kernels, usable without the rest of ssdprof.  Imports nothing of ssdprof outside this package.

Importing this package is cheap.  Each name below is imported with its dependencies at first use.

    from ssdprof.kernels import ssd_fused
    out, final_states = ssd_fused(x, dt, A, B, C, D=D, dt_bias=dt_bias, dt_softplus=True)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ssdprof.kernels import registry
from ssdprof.kernels.registry import Implementation

if TYPE_CHECKING:
    from ssdprof.kernels.gdn.fused import gdn_fused as gdn_fused
    from ssdprof.kernels.gdn.inputs import GDNInputs as GDNInputs
    from ssdprof.kernels.gdn.inputs import GDNOutput as GDNOutput
    from ssdprof.kernels.gdn.recurrent import gdn_recurrent as gdn_recurrent
    from ssdprof.kernels.gdn.reference import gdn_reference as gdn_reference
    from ssdprof.kernels.gdn.unfused.pipeline import gdn_unfused as gdn_unfused
    from ssdprof.kernels.kda.inputs import KDAInputs as KDAInputs
    from ssdprof.kernels.precision import Precision as Precision
    from ssdprof.kernels.registry import UnsupportedError as UnsupportedError
    from ssdprof.kernels.ssd.fused import ssd_fused as ssd_fused
    from ssdprof.kernels.ssd.inputs import SSDInputs as SSDInputs
    from ssdprof.kernels.ssd.inputs import SSDOutput as SSDOutput
    from ssdprof.kernels.ssd.recurrent import ssd_recurrent as ssd_recurrent
    from ssdprof.kernels.ssd.reference import ssd_reference as ssd_reference
    from ssdprof.kernels.ssd.unfused import ssd_unfused as ssd_unfused

_HOME = {
    "GDNInputs": "gdn.inputs", "GDNOutput": "gdn.inputs", "Precision": "precision", "SSDInputs": "ssd.inputs",
    "SSDOutput": "ssd.inputs", "UnsupportedError": "registry", "gdn_fused": "gdn.fused",
    "gdn_recurrent": "gdn.recurrent", "gdn_reference": "gdn.reference", "gdn_unfused": "gdn.unfused.pipeline",
    "KDAInputs": "kda.inputs",
    "ssd_fused": "ssd.fused", "ssd_recurrent": "ssd.recurrent", "ssd_reference": "ssd.reference",
    "ssd_unfused": "ssd.unfused",
}  # fmt: skip
# operator -> name -> the module that registers it, in the order of `names`
_IMPLEMENTATIONS: dict[str, dict[str, str]] = {
    "ssd": {
        "reference": "reference", "unfused": "unfused", "fused": "fused", "recurrent": "recurrent",
        "unfused_step": "recurrent", "recurrent_in_place": "recurrent",
    },
    "gdn": {
        "reference": "reference", "unfused": "unfused.pipeline", "fused": "fused", "recurrent": "recurrent",
        "unfused_step": "recurrent", "fused_portable": "fused",
    },
    "kda": {
        "reference": "reference", "unfused": "unfused", "fused": "fused", "recurrent": "fused", "unfused_step": "fused",
    },
}  # fmt: skip

__all__ = ["get", "names", *_HOME]


def get(operator: str, name: str) -> Implementation:
    """The implementation registered as `name`.  Raises KeyError, whose message lists the registered names."""
    _register_bundled()
    return registry.get(operator, name)


def names(operator: str) -> list[str]:
    """Names of an operator's implementations: the bundled ones, the oracle first, then others by registration.

    Imports no torch.
    """
    bundled = _IMPLEMENTATIONS.get(operator, {})
    return [*bundled, *(name for name in registry.names(operator) if name not in bundled)]


def _register_bundled() -> None:
    for operator, modules in _IMPLEMENTATIONS.items():
        for module in modules.values():
            import_module(f"{__name__}.{operator}.{module}")


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
