"""The bundled kernels, which can be used without the rest of ssdprof.  This package imports nothing
of ssdprof outside of itself.

Importing it is cheap: each name below is imported with its dependencies when it is first used.

    from ssdprof.kernels import ssd_fused
    out, final_states = ssd_fused(x, dt, A, B, C, D=D, dt_bias=dt_bias, dt_softplus=True)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ssdprof.kernels import registry
from ssdprof.kernels.registry import Implementation

if TYPE_CHECKING:
    from ssdprof.kernels.gdn.fused import gdn_fused as gdn_fused
    from ssdprof.kernels.gdn.inputs import GDNInputs as GDNInputs
    from ssdprof.kernels.gdn.inputs import GDNOutput as GDNOutput
    from ssdprof.kernels.gdn.recurrent import gdn_recurrent as gdn_recurrent
    from ssdprof.kernels.gdn.reference import gdn_reference as gdn_reference
    from ssdprof.kernels.gdn.unfused.pipeline import gdn_unfused as gdn_unfused
    from ssdprof.kernels.inputs import Output as Output
    from ssdprof.kernels.kda.fused import kda_fused as kda_fused
    from ssdprof.kernels.kda.inputs import KDAInputs as KDAInputs
    from ssdprof.kernels.kda.unfused import kda_unfused as kda_unfused
    from ssdprof.kernels.precision import Precision as Precision
    from ssdprof.kernels.registry import UnsupportedError as UnsupportedError
    from ssdprof.kernels.ssd.fused import ssd_fused as ssd_fused
    from ssdprof.kernels.ssd.inputs import SSDInputs as SSDInputs
    from ssdprof.kernels.ssd.inputs import SSDOutput as SSDOutput
    from ssdprof.kernels.ssd.recurrent import ssd_recurrent as ssd_recurrent
    from ssdprof.kernels.ssd.reference import ssd_reference as ssd_reference
    from ssdprof.kernels.ssd.unfused import ssd_unfused as ssd_unfused

_HOME = {  # public name -> the module of this package from which it is imported
    "GDNInputs": "gdn.inputs", "GDNOutput": "gdn.inputs", "Output": "inputs",
    "Precision": "precision", "SSDInputs": "ssd.inputs", "SSDOutput": "ssd.inputs",
    "UnsupportedError": "registry",
    "gdn_fused": "gdn.fused", "gdn_recurrent": "gdn.recurrent", "gdn_reference": "gdn.reference",
    "gdn_unfused": "gdn.unfused.pipeline", "KDAInputs": "kda.inputs",
    "kda_fused": "kda.fused", "kda_unfused": "kda.unfused", "ssd_fused": "ssd.fused",
    "ssd_recurrent": "ssd.recurrent", "ssd_reference": "ssd.reference",
    "ssd_unfused": "ssd.unfused",
}  # fmt: skip
_STEPS = ("recurrent", "unfused_step")  # for short sequences, token by token
# operator -> the names of its bundled implementations, in the order in which reports have them
_NAMES = {
    "ssd": ("reference", "unfused", "fused", *_STEPS, "recurrent_in_place"),
    "gdn": ("reference", "unfused", "fused", *_STEPS, "fused_portable"),
    "kda": ("reference", "unfused", "fused", *_STEPS),
}
_MODULES = (  # importing these, and what they import, registers all implementations of `_NAMES`
    "ssd.reference",
    "ssd.unfused",
    "ssd.fused",
    "gdn.reference",
    "gdn.unfused.pipeline",
    "gdn.fused",
    "kda.reference",
    "kda.unfused",
    "kda.fused",
)

__all__ = ["get", "names", *_HOME]


def get(operator: str, name: str) -> Implementation:
    """The implementation registered as `name`, after importing all bundled ones.  Raises KeyError,
    whose message lists the registered names.
    """
    for module in _MODULES:
        import_module(f"{__name__}.{module}")
    return registry.get(operator, name)


def names(operator: str) -> list[str]:
    """Names of an operator's implementations: the bundled ones, of which the oracle is first, then
    others in order of registration; none for an unknown operator.  Imports no torch.
    """
    bundled = _NAMES.get(operator, ())
    return [*bundled, *(name for name in registry.names(operator) if name not in bundled)]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
