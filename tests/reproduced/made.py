"""A small published document, and the recorded bench with its values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import reproduce
from reproducing import measuring
from reproducing.published import Published

RECORDED = Path(reproduce.HERE) / "results" / "bench-ssd-h200-published-mamba2-2.7b.json"
H200 = "NVIDIA H200"
DOCUMENT: dict[str, Any] = {
    "title": "A test",
    "source": "A source.",
    "gpu": "H200",
    "choices": ["One."],
    "measure": [{"name": "kernels", "reads": "bench", "commands": ["ssdprof bench ssd --out {out} --budget {budget}"]}],
    "value": [
        {"name": "speedup", "measure": "kernels", "kind": "time", "of": "fused", "over": "published relaxed fp16"},
        {"name": "least", "measure": "kernels", "kind": "time", "of": "fused", "over": "unfused", "pick": "least"},
    ],
    "numbers": [{"words": "Numbers", "value": "speedup", "quoted": {"1 x 1,024": 1.0, "1 x 999": 2.0}}],
    "figure": {"values": ["speedup"], "axis": "times as fast"},
    "claim": [
        {"words": "It is faster", "quoted": "1x", "holds": "least > 0", "note": "It says so."},
        {"words": "Another", "quoted": "2x", "why": "nobody can"},
    ],
}


def document(**changes: Any) -> Published:
    return Published.model_validate(DOCUMENT | changes)


def means(folder: Path, *, seconds: float = 60, published: Path | None = None) -> measuring.Means:
    return measuring.Means(seconds=seconds, published=published, folder=folder, recorded={})
