"""Other libraries' SSD kernels."""

from __future__ import annotations

from pathlib import Path

from ssdprof.kernels.ssd import adapters
from ssdprof.operators.drawing import InputDType, Peer, PeerSource
from ssdprof.schema import DType, PrecisionRecord, precisions_for


def _mamba_ssm(_checkout: Path | None) -> Peer:
    return Peer(
        implementation=adapters.load_mamba_ssm(),
        version=adapters.mamba_ssm_version(),
        precisions=lambda dtype: _exact(
            *dict.fromkeys((dtype, "fp32")) if adapters.mamba_ssm_passes_any_states() else (dtype,)
        ),
    )


def _selective_state_update(_checkout: Path | None) -> Peer:
    return Peer(
        implementation=adapters.load_selective_state_update(),
        version=adapters.mamba_ssm_version(),
        precisions=lambda _dtype: _exact("fp32"),
    )


def _published(checkout: Path | None) -> Peer:
    assert checkout is not None
    return Peer(
        implementation=adapters.load_published(checkout),
        version=adapters.published_version(checkout),
        precisions=_published_precisions,
    )


def _published_precisions(dtype: InputDType) -> tuple[PrecisionRecord, ...]:
    """Its "high" setting; of fp16 inputs also its "medium" one, and each with the states of the other."""
    if dtype != "fp16":
        return _exact("fp32")
    return precisions_for(dtype, "all", ("fp32", "fp16"))


def _exact(*states: DType) -> tuple[PrecisionRecord, ...]:
    return tuple(PrecisionRecord(intermediates="exact", state_dtype=state) for state in states)


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
