"""Other libraries' GDN kernels."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from ssdprof.kernels.adapters import package_version
from ssdprof.kernels.gdn import adapters
from ssdprof.operators.drawing import InputDType, Peer, PeerSource
from ssdprof.schema import EXACT_FP32, PrecisionRecord

_NO_DISPATCH = "FLA_DISABLE_BACKEND_DISPATCH"  # fla reads it when it is imported


def _fla(_checkout: Path | None) -> Peer:
    return Peer(
        implementation=adapters.load_fla(_fla_operator()), version=adapters.fla_version(), precisions=_states_as_inputs
    )


def _fla_recurrent(_checkout: Path | None) -> Peer:
    return Peer(
        implementation=adapters.load_fla_recurrent(_fla_operator()),
        version=adapters.fla_version(),
        precisions=_fp32_states,
    )


def _fla_operator() -> ModuleType:
    """fla's operator, with its calls to other libraries turned off, so that fla's own kernels are timed.

    Raises ImportError if it is not installed, and if it was imported before with these calls on.
    """
    if adapters.FLA in sys.modules and os.environ.get(_NO_DISPATCH) != "1":
        raise ImportError(f"fla was imported before {_NO_DISPATCH}=1 was set, and may call other libraries")
    os.environ[_NO_DISPATCH] = "1"
    return import_module(adapters.FLA)


def _flash_qla(_checkout: Path | None) -> Peer:
    return Peer(implementation=adapters.load_flash_qla(), version=package_version("flash_qla"), precisions=_fp32_states)


def _flashinfer(_checkout: Path | None) -> Peer:
    version = package_version("flashinfer-python")
    return Peer(implementation=adapters.load_flashinfer(), version=version, precisions=_fp32_states)


def _states_as_inputs(dtype: InputDType) -> tuple[PrecisionRecord, ...]:
    return (PrecisionRecord(intermediates="exact", state_dtype=dtype),)


def _fp32_states(_dtype: InputDType) -> tuple[PrecisionRecord, ...]:
    return (EXACT_FP32,)


_FLA_HINT = "pip install flash-linear-attention, or leave it out."
PEERS = {
    "fla": PeerSource(load=_fla, hint=_FLA_HINT),
    "fla_recurrent": PeerSource(load=_fla_recurrent, hint=_FLA_HINT),
    "flash_qla": PeerSource(load=_flash_qla, hint="pip install flash-qla, or leave it out."),
    "flashinfer": PeerSource(load=_flashinfer, hint="pip install flashinfer-python, or leave it out."),
}
