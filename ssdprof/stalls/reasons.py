"""Canonical names of ncu's stall reasons."""

from __future__ import annotations

# canonical name -> other names of it: in ncu's averages, in its CSV pages (after "stall_"), on other chips
_OTHER_NAMES = {
    "branch_resolving": ("branch_resolve",),
    "dispatch_stall": ("dispatch",),
    "imc_miss": ("imc",),
    "lg_throttle": ("lg",),
    "long_scoreboard": ("long_sb",),
    "math_pipe_throttle": ("math",),
    "mio_throttle": ("mio",),
    "no_instructions": ("no_instruction", "no_inst"),
    "short_scoreboard": ("short_sb",),
    "sleeping": ("sleep",),
    "tex_throttle": ("tex",),
    "warpgroup_arrive": ("gmma",),
}
_CANONICAL = {other: name for name, others in _OTHER_NAMES.items() for other in others}


def canonical(reason: str) -> str:
    """The canonical name of a reason on any chip, in any version and page.  An unknown one keeps its own."""
    return _CANONICAL.get(reason, reason)
