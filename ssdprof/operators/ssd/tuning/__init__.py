"""What `ssdprof tune` may vary of the fused SSD kernels."""

from ssdprof.operators.ssd.tuning.tuning import TUNING

__all__ = ["TUNING"]
