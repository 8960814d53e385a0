"""The configurations of the fused SSD kernels that `ssdprof tune` may vary."""

from ssdprof.operators.ssd_tuning.tuning import TUNING

__all__ = ["TUNING"]
