"""Each Python process of a program that `ssdprof record` started runs this file before the
program's own code, because its folder is the first one in PYTHONPATH.  Processes that ignore
PYTHONPATH (`python -I`) do not.  The file hides the `sitecustomize.py` of the installation, and
runs it afterwards.
"""

import os
import sys


def _start() -> None:
    """Begin to wait for modules with places."""
    try:
        from ssdprof.record.hook import install
    except ImportError:
        print(
            f"ssdprof: nothing is recorded in {sys.executable}, where ssdprof is not "
            "installed.  Install it there.",
            file=sys.stderr,
        )
        return
    install()


def _run_hidden() -> None:
    """Import the `sitecustomize` of the installation, if it has one, under the same name.

    The import of this file goes on afterwards.  It fails unless there is a module of this name.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or os.curdir) != here]
    this = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", this)


try:
    _start()
finally:  # an old Python cannot run `hook.py`, and prints why
    _run_hidden()
