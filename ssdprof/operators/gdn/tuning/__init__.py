"""What `ssdprof tune` may vary of the fused GDN kernels."""

from ssdprof.operators.gdn.tuning.tuning import TUNING

__all__ = ["TUNING"]
