"""The times of the study's source, next to times measured in the same way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from study_result import judging, published, table

from selective_scan.contenders import tile

WITHIN = 0.1
_CLOCKS = {"warm_us": "calls back to back", "kernel_us": "kernels, by torch's profiler", "wall_us": "one call"}


def quoted(document: published.Published, rows: Sequence[Mapping[str, Any]], gpu: str) -> str:
    """Markdown.  inside: within 10 % of the quoted time, on the quoted GPU."""
    of = {(r["pass"], r["seqlen"], r["contender"]): r for r in rows}
    lines = []
    for stated in document.quoted:
        for contender, seqlen, us in _times(stated):
            measured = of.get((stated["pass"], seqlen, contender), {}).get(stated["clock"])
            verdict = (
                judging.NOT_MEASURED
                if measured is None
                else _verdict(measured / us, not judging.is_other(document.gpu, gpu))
            )
            ratio = "" if measured is None else f"{measured / us:.2f}x"
            place = (stated["pass"], contender, f"{seqlen:,}", _CLOCKS[stated["clock"]])
            lines.append((*place, measured, us, ratio, verdict))
    head = ("pass", "contender", "positions", "clock", "measured us", "quoted us", "measured by quoted", "verdict")
    return table(head, lines)


def _times(stated: Mapping[str, Any]) -> Iterator[tuple[str, int, float]]:
    """(contender, positions, microseconds)"""
    for contender, by_length in stated["us"].items():
        name = tile(stated["tiles"]) if contender == "parallel" else contender
        for seqlen, us in by_length.items():
            yield name, int(seqlen), float(us)


def _verdict(ratio: float, same_gpu: bool) -> str:
    if not same_gpu:
        return judging.OTHER_GPU
    return "inside" if 1 - WITHIN <= ratio <= 1 + WITHIN else "outside"
