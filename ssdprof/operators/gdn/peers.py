"""Other libraries' GDN kernels."""

from __future__ import annotations

from pathlib import Path

from ssdprof.kernels.gdn.adapters import fla, flash_qla, flashinfer
from ssdprof.operators.drawing import InputDType, Peer, PeerSource
from ssdprof.schema import PrecisionRecord

_FP32_STATES = PrecisionRecord(intermediates="exact", state_dtype="fp32")


def _fla(_checkout: Path | None) -> Peer:
    return Peer(implementation=fla.load(), version=fla.version(), precisions=_states_as_inputs)


def _fla_recurrent(_checkout: Path | None) -> Peer:
    return Peer(implementation=fla.load_recurrent(), version=fla.version(), precisions=_fp32_states)


def _flash_qla(_checkout: Path | None) -> Peer:
    return Peer(implementation=flash_qla.load(), version=flash_qla.version(), precisions=_fp32_states)


def _flashinfer(_checkout: Path | None) -> Peer:
    return Peer(implementation=flashinfer.load(), version=flashinfer.version(), precisions=_fp32_states)


def _states_as_inputs(dtype: InputDType) -> tuple[PrecisionRecord, ...]:
    return (PrecisionRecord(intermediates="exact", state_dtype=dtype),)


def _fp32_states(_dtype: InputDType) -> tuple[PrecisionRecord, ...]:
    return (_FP32_STATES,)


_FLA_HINT = "pip install flash-linear-attention, or leave it out of --against."
PEERS = {
    "fla": PeerSource(load=_fla, hint=_FLA_HINT),
    "fla_recurrent": PeerSource(load=_fla_recurrent, hint=_FLA_HINT),
    "flash_qla": PeerSource(load=_flash_qla, hint="pip install flash-qla, or leave it out of --against."),
    "flashinfer": PeerSource(load=_flashinfer, hint="pip install flashinfer-python, or leave it out of --against."),
}
