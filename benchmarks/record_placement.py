"""Record that a model with more weights than the GPU's memory gives the same captures, and what each placement costs.

    python benchmarks/record_placement.py FILE [--layers N] [--seq N] [--folder DIR]

Makes a checkpoint with granite-4.0-h-small's dimensions and random weights (1.6 GB a layer), and captures its layers on
a random prompt, in segments of a quarter of it: first on one GPU with all of its memory, then with a cap on the memory
that this process may take of a GPU, under which the model does not fit on one: with every offload and, if there are
several GPUs, on all of them.  Compares every captured tensor with the first run's, bit by bit, and writes FILE, JSON:
seconds, peaks of the GPUs, predicted peaks, caps, and where the weights were.  Exits with 1 if a bit differs, or if the
model did fit on one GPU under a cap.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from make_random_checkpoint import write_checkpoint

from ssdprof import environment
from ssdprof.capture.captured import CapturedLayer
from ssdprof.operators.tensors import tensors
from ssdprof.pipeline import placement
from ssdprof.pipeline.model import load, run_model
from ssdprof.pipeline.request import CaptureRequest, ModelRequest, PromptRequest
from ssdprof.pipeline.subject import Subject, find
from ssdprof.progress import Unwatched
from ssdprof.schema.placement import PlacementKind

MODEL = "granite-4.0-h-small"
HELD_LAYERS = 2.5  # decoder layers for which an offload's cap leaves room, the streamed one included
Captures = list[dict[str, torch.Tensor]]


def request_of(folder: Path, seqlen: int, kind: PlacementKind) -> CaptureRequest:
    return CaptureRequest(
        model=ModelRequest(model=str(folder)),
        prompt=PromptRequest(text="random", seqlens=(seqlen,)),
        segment_length=seqlen // 4,
        placement=kind,
    )


def cap_bytes(request: CaptureRequest, subject: Subject, held_layers: float) -> int:
    """Room for what the model computes, for its embedding and for some decoder layers."""
    beside = placement.bytes_beside_weights(request, subject)
    layer = subject.located.weight_bytes(1) - subject.located.weight_bytes(0)
    outside = subject.located.weight_bytes(0) - layer
    return beside + outside + int(held_layers * layer)


@contextmanager
def capped(size: int | None) -> Iterator[None]:
    """This process may allocate `size` bytes of each GPU; None: all."""
    devices = range(torch.cuda.device_count())
    for device in devices:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if size is None else size / total, device)
    try:
        yield
    finally:
        for device in devices:
            torch.cuda.set_per_process_memory_fraction(1.0, device)


def measure(request: CaptureRequest, subject: Subject, expected: Captures | None) -> tuple[dict[str, Any], Captures]:
    """One run: what it took, and its captures in main memory, or none where they were only compared.

    expected: captures to compare with, layer by layer.
    """
    devices = range(torch.cuda.device_count())
    gc.collect()
    torch.cuda.empty_cache()
    kept: Captures = []
    differing: list[str] = []
    layers = 0

    def on_layer(layer: CapturedLayer) -> None:
        nonlocal layers
        found = tensors(layer.inputs)
        if expected is None:
            kept.append({name: tensor.cpu() for name, tensor in found.items()})
        else:
            theirs = expected[layers]
            same = found.keys() == theirs.keys() and all(torch.equal(found[name].cpu(), theirs[name]) for name in found)
            differing.extend([] if same else [layer.layer.name])
        layers += 1

    began = time.monotonic()
    loaded = load(request, subject, Unwatched())
    for device in devices:
        torch.cuda.synchronize(device)
    loaded_at = time.monotonic()
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    run_model(subject, loaded, on_layer)
    for device in devices:
        torch.cuda.synchronize(device)
    ended = time.monotonic()
    record = loaded.placement
    measured = {
        "placement": record.model_dump(mode="json"),
        "load_s": round(loaded_at - began, 2),
        "capture_s": round(ended - loaded_at, 2),
        "peak_bytes": [torch.cuda.max_memory_allocated(device) for device in devices],
        "seconds_per_layer": record.seconds_per_layer,
        "layers_compared": 0 if expected is None else layers,
        "differing_layers": differing,
    }
    return measured, kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, default=8, help="decoder layers of the checkpoint, 1.6 GB each")
    parser.add_argument("--seq", type=int, default=32768, help="tokens of the prompt")
    parser.add_argument("--folder", type=Path, help="for the checkpoint, on a disk with room for it; a temporary one")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        total = write_checkpoint(MODEL, folder, arguments.layers, 0, "cuda")
        print(f"{total / 1e9:.1f} GB of weights written in {time.monotonic() - began:.0f} s", flush=True)
        one = request_of(folder, arguments.seq, "one-gpu")
        subject = find(one)
        rows = {}
        rows["one-gpu"], captures = measure(one, subject, None)
        print(json.dumps({"one-gpu": rows["one-gpu"]}), flush=True)
        held: dict[PlacementKind, float] = {"cpu-offload": HELD_LAYERS, "disk-offload": HELD_LAYERS}
        if (gpus := torch.cuda.device_count()) > 1:
            held["all-gpus"] = arguments.layers / gpus + 2  # accelerate leaves one layer's room free
        for kind, layers in held.items():
            cap = cap_bytes(one, subject, layers)
            with capped(cap):
                chosen = placement.choose(replace(one, placement=None), subject).record.kind
                row, _ = measure(request_of(folder, arguments.seq, kind), subject, captures)
            rows[kind] = {"cap_bytes": cap, "chosen_by_itself": chosen, **row}
            print(json.dumps({kind: rows[kind]}), flush=True)
    found = environment.collect().model_dump(mode="json")
    document = {
        "command": ["python", *sys.argv],
        "environment": found,
        "gpus": torch.cuda.device_count(),
        "model": MODEL,
        "layers": arguments.layers,
        "seqlen": arguments.seq,
        "weight_bytes": total,
        "runs": rows,
        "seconds": round(time.monotonic() - began, 1),
    }
    arguments.file.write_text(json.dumps(document, indent=1) + "\n")
    fits = any(row.get("chosen_by_itself") == "one-gpu" for row in rows.values())
    sys.exit(1 if fits or any(row["differing_layers"] for row in rows.values()) else 0)


if __name__ == "__main__":
    main()
