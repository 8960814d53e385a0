"""Makes the compiler record, for an inlined instruction, the line that has its stage.

An instruction has one line in a report: that of the innermost function that was inlined there, a helper's or a
library's.  Triton writes the chain of calls into its PTX as a comment, which ptxas drops:

    .loc 3 382 10    // role_scores.py:82:10 @[ role_scores.py:64:17 @[ hopper_kernel.py:161:45 ] ]

So each .loc is replaced, before ptxas reads it, by the innermost line of the chain that has a stage.
Nothing but the line table changes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ssdprof.stalls.raw import base_name
from ssdprof.stalls.sources import Sources
from ssdprof.stalls.stages import UNKNOWN

_KEY = "ssdprof: lines of callers"  # part of the key of such kernels in Triton's cache, if it asks
_FILE = re.compile(r'^\s*\.file\s+(\d+) "([^"]+)"', re.MULTILINE)
_LOC = re.compile(r"^(\s*\.loc\s+)(\d+) (\d+) (\d+)(\s*//\s*)(.+)$", re.MULTILINE)
_FRAME = re.compile(r"([^\s@\[\]:]+):(\d+):(\d+)")


def install() -> None:
    """Install the hook for every kernel that Triton compiles in this process from now on.

    Triton 3.6 does not ask the hook for a part of its cache's key, so TRITON_CACHE_DIR must be a folder without
    compiled kernels.
    """
    import triton

    triton.knobs.runtime.add_stages_inspection_hook = _hook


def _hook(*given: Any) -> tuple[str, str] | None:
    """Triton calls it without arguments for its part of the cache's key, else with a compiler's stages."""
    if not given:
        return _KEY, _KEY
    stages: dict[str, Callable[[Any, Any], Any]] = given[1]
    make = stages.get("ptx")
    if make is not None:
        stages["ptx"] = lambda module, metadata: name_call_sites(make(module, metadata))
    return None


def name_call_sites(ptx: str, sources: Sources | None = None) -> str:
    """The PTX with every .loc at the innermost line that has a stage; unchanged if no line of the chain has one.

    sources: of the files that the PTX names; None reads them.
    """
    files = dict(_FILE.findall(ptx))
    known = sources or Sources({path: text for path in files.values() if (text := _text(path))})
    numbers: dict[str, list[str]] = defaultdict(list)
    for number, path in files.items():
        numbers[base_name(path)].append(number)

    def innermost(found: re.Match[str]) -> str:
        before, _, _, _, remark, chain = found.groups()
        for frame in _FRAME.findall(chain):
            number = _with_a_stage(frame, numbers, files, known)
            if number is not None:
                return f"{before}{number} {frame[1]} {frame[2]}{remark}{chain}"
        return found[0]

    return _LOC.sub(innermost, ptx)


def _with_a_stage(
    frame: Sequence[str], numbers: Mapping[str, Sequence[str]], files: Mapping[str, str], sources: Sources
) -> str | None:
    """The index of the frame's file if its line has a stage; frames name a file without its folder."""
    name, line, _ = frame
    for number in numbers.get(name, ()):
        stage = sources.place(files[number], int(line)).stage
        if stage is not None and stage != UNKNOWN:
            return number
    return None


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""  # then its lines are not changed
