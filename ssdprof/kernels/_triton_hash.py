"""Starts Triton's hash of itself in a thread.

Triton needs the hash to compile a kernel for a GPU, or to find a compiled one.  It reads 400 MB, which takes 0.4 s,
once per process.  The thread starts when kernels are imported, and runs while the caller prepares the first call:
hashing does not hold Python's global lock.
"""

from __future__ import annotations

from threading import Thread

import triton
from triton.runtime.cache import triton_key

from ssdprof.kernels import _gpu

_hashing = Thread(target=triton_key, name="Triton's hash of itself", daemon=True)  # `triton_key` caches its result
if _gpu.is_there_one() and not triton.knobs.runtime.interpret:
    _hashing.start()


def wait_for_hash() -> None:
    """Wait until the hash is complete, otherwise Triton would start a second one."""
    if _hashing.ident is not None:
        _hashing.join()
