"""The configurations of the fused GDN kernels that `ssdprof tune` may vary."""

from ssdprof.operators.gdn_tuning.tuning import TUNING

__all__ = ["TUNING"]
