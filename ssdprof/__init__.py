"""What a fused kernel would do to your Mamba-2, Gated-DeltaNet or Kimi Delta Attention model on
your GPU.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssdprof.api import Results as Results
    from ssdprof.api import answers as answers
    from ssdprof.api import bench as bench
    from ssdprof.api import compare as compare
    from ssdprof.api import load as load
    from ssdprof.api import load_call as load_call
    from ssdprof.api import prefill as prefill
    from ssdprof.api import run as run

__version__ = "0.2.0"
__all__ = ["Results", "answers", "bench", "compare", "load", "load_call", "prefill", "run"]


def __getattr__(name: str) -> Any:
    """A name of `__all__`, from `ssdprof.api`, which is imported when it is first used: its import
    of torch takes seconds.  Raises AttributeError for another name.
    """
    if name not in __all__:
        raise AttributeError(f"module 'ssdprof' has no attribute {name!r}")
    return getattr(import_module("ssdprof.api"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
