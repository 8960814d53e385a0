"""Record ncu reports of the bundled kernels on a small layer: the fixtures of tests/stalls.

    python benchmarks/record_stalls.py FOLDER

Writes FOLDER/{fused_hopper,fused_portable,unfused}.ncu-rep; no_source.ncu-rep, which is
fused_hopper without source counters and stall reasons; and launched.json, the launches of each.
The layer is generated at random, in the sizes of granite-4.0-h-1b: 48 heads of 64, a state of 128,
one group, 16384 tokens of bf16.  With a gate z, the fused implementation takes its portable kernel.
Reports hold the paths of the sources.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from ssdprof.capture.layers import CapturedLayer
from ssdprof.capture.store import CaptureWriter
from ssdprof.core.base import EXACT_FP32
from ssdprof.core.stalls import Launched
from ssdprof.core.target import CheckpointRef, LayerRef
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.stalls import ncu

NO_SOURCE = ("LaunchStats", "Occupancy", "SpeedOfLight")
SEQLEN, HEADS, HEADDIM, DSTATE = 16384, 48, 64, 128


def draw() -> SSDInputs:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    step = torch.exp(torch.rand(HEADS, generator=generator) * math.log(100) + math.log(1e-3))
    return SSDInputs(
        x=normal(1, SEQLEN, HEADS, HEADDIM).bfloat16(),
        dt=normal(1, SEQLEN, HEADS).mul(0.5).bfloat16(),
        A=-torch.linspace(1.0, 16.0, HEADS),
        B=normal(1, SEQLEN, 1, DSTATE).bfloat16(),
        C=normal(1, SEQLEN, 1, DSTATE).bfloat16(),
        D=torch.ones(HEADS),
        dt_bias=step + torch.log(-torch.expm1(-step)),
        dt_softplus=True,
    )


def profile(
    job: ncu.Job,
    launched: Launched,
    program: str,
    report: Path,
    sections: tuple[str, ...] = ncu.SECTIONS,
) -> None:
    start = time.monotonic()
    ncu.profile(job, launched, program, report, sections=sections)
    seconds = time.monotonic() - start
    print(f"{report.name}: {report.stat().st_size:,} bytes, {seconds:.1f} s, {launched.variant}")


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    program, _ = ncu.find()
    plain = draw()
    gated = replace(
        plain, z=torch.randn(plain.x.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    )
    layers = [LayerRef(index=i, name=f"layers.{i}", operator="ssd") for i in range(2)]
    checkpoint = CheckpointRef(
        requested="random",
        source="local",
        repo_id="random",
        revision=None,
        model_type="none",
        layers=tuple(layers),
        layer_count=2,
    )
    launched = {}
    with tempfile.TemporaryDirectory() as folder:
        captures = Path(folder) / "captures"
        with CaptureWriter(
            captures, checkpoint=checkpoint, prompts=(), segment_length=SEQLEN
        ) as writer:
            for layer, inputs in zip(layers, (plain, gated), strict=True):
                writer.add(CapturedLayer(layer=layer, inputs=inputs))
        for name, index, implementation in (
            ("fused_hopper", 0, "fused"),
            ("fused_portable", 1, "fused"),
            ("unfused", 0, "unfused"),
        ):
            job = ncu.Job(
                folder=captures,
                cache=Path(folder) / "cache",
                layer=index,
                seqlen=SEQLEN,
                implementation=implementation,
                precision=EXACT_FP32,
            )
            launched[name] = ncu.launch(job)
            profile(job, launched[name], program, out / f"{name}.ncu-rep")
            if name == "fused_hopper":
                profile(job, launched[name], program, out / "no_source.ncu-rep", NO_SOURCE)
    text = json.dumps(
        {name: found.model_dump(mode="json") for name, found in launched.items()}, indent=1
    )
    (out / "launched.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
