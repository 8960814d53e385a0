"""Triton's hash of itself, without which it neither compiles a kernel for a GPU nor finds a compiled one.

400 MB are read for it, 0.4 s, once in a process.  It is begun in a thread when kernels are imported, beside what a
caller does before the first call: hashing does not hold Python's lock.
"""

from __future__ import annotations

from threading import Thread

import triton
from triton.runtime.cache import triton_key

from ssdprof.kernels import _gpu

_hashing = Thread(target=triton_key, name="Triton's hash of itself", daemon=True)  # which keeps the result
if _gpu.is_there_one() and not triton.knobs.runtime.interpret:
    _hashing.start()


def wait_for_hash() -> None:
    """Or Triton would begin another one."""
    if _hashing.ident is not None:
        _hashing.join()
