"""Triton's hash of itself, without which it neither compiles a kernel nor finds a compiled one.

400 MB are read for it, 0.4 s, once in a process.  It is begun in a thread when kernels are imported, beside what a
caller does before the first call: hashing does not hold Python's lock.
"""

from __future__ import annotations

from threading import Thread

from triton.runtime.cache import triton_key

from ssdprof.kernels._triton import INTERPRETED

_hashing = Thread(target=triton_key, name="Triton's hash of itself", daemon=True)  # which keeps the result
if not INTERPRETED:
    _hashing.start()


def wait_for_hash() -> None:
    """Or Triton would begin another one."""
    if not INTERPRETED:
        _hashing.join()
