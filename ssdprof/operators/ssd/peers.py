"""Other libraries' SSD kernels."""

from __future__ import annotations

from pathlib import Path

from ssdprof.kernels.ssd.adapters import mamba_ssm, published, selective_state_update
from ssdprof.operators.drawing import InputDType, Peer, PeerSource
from ssdprof.schema import PrecisionRecord


def _mamba_ssm(_checkout: Path | None) -> Peer:
    return Peer(
        implementation=mamba_ssm.load(),
        version=mamba_ssm.version(),
        precisions=lambda dtype: (PrecisionRecord(intermediates="exact", state_dtype=dtype),),
    )


def _selective_state_update(_checkout: Path | None) -> Peer:
    return Peer(
        implementation=selective_state_update.load(),
        version=mamba_ssm.version(),
        precisions=lambda _dtype: (PrecisionRecord(intermediates="exact", state_dtype="fp32"),),
    )


def _published(checkout: Path | None) -> Peer:
    assert checkout is not None
    return Peer(
        implementation=published.load(checkout),
        version=published.version(checkout),
        precisions=_published_precisions,
    )


def _published_precisions(dtype: InputDType) -> tuple[PrecisionRecord, ...]:
    high = PrecisionRecord(intermediates="exact", state_dtype="fp32")
    medium = PrecisionRecord(intermediates="relaxed", state_dtype="fp16")
    return (high, medium) if dtype == "fp16" else (high,)


_MAMBA_SSM_HINT = "pip install mamba-ssm, or leave it out."
PEERS = {
    "mamba_ssm": PeerSource(load=_mamba_ssm, hint=_MAMBA_SSM_HINT),
    "selective_state_update": PeerSource(load=_selective_state_update, hint=_MAMBA_SSM_HINT),
    "published": PeerSource(
        load=_published,
        hint="Give a checkout of github.com/RishiAstra/mamba.",
        from_checkout=True,
        where="github.com/RishiAstra/mamba",
    ),
}
