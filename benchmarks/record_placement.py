"""Record that a model with more weights than the GPU's memory gives the same captures, and the cost
of each placement.

    python benchmarks/record_placement.py FILE [--layers N] [--seq N] [--folder DIR]

Makes a checkpoint with granite-4.0-h-small's dimensions and random weights (1.6 GB a layer), and
captures its layers on a random prompt, in segments of a quarter of it: twice on one GPU with all of
its memory, then with a cap on the memory that this process may take of a GPU, under which the model
does not fit on one: with every offload and, if there are several GPUs, on all of them.  Compares
every captured tensor with the first run's, bit by bit.

FILE, in JSON, has seconds, measured and predicted peaks of the GPUs, caps, and where the weights
were.  It is written again after every run, so that an interruption loses nothing.  Exit code 1 if
there are failures: a bit differs, a run raised an error, a peak is not within 15 % of the predicted
one, or a cap let the model fit on one GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from make_random_checkpoint import write_checkpoint

from ssdprof.capture.layers import CapturedLayer
from ssdprof.core.base import PlacementKind
from ssdprof.environment import machine
from ssdprof.jobs import limits
from ssdprof.jobs import plan as placement
from ssdprof.jobs.options import ServedModelOptions
from ssdprof.jobs.plan import load
from ssdprof.jobs.target import Target, find
from ssdprof.progress import Watcher

MODEL = "granite-4.0-h-small"
LAYER_BYTES = 1_610_000_000
HELD_LAYERS = 2.5  # decoder layers that fit under an offload's cap, including the streamed one
WITHIN = 0.15  # of the predicted peak
Captures = list[dict[str, torch.Tensor]]
Row = dict[str, Any]


def request_of(folder: Path, seqlen: int, kind: PlacementKind) -> ServedModelOptions:
    return ServedModelOptions(
        model=str(folder),
        prompt="random",
        seqlens=(seqlen,),
        segment_length=seqlen // 4,
        placement=kind,
    )


def cap_bytes(target: Target, held_layers: float) -> int:
    """Memory for the model's computation, its embedding and some decoder layers."""
    beside = placement.Chooser(target).least_bytes_beside_weights()
    layer = target.located.weight_bytes(1) - target.located.weight_bytes(0)
    outside = target.located.weight_bytes(0) - layer
    return beside + outside + int(held_layers * layer)


@contextmanager
def capped(size: int) -> Iterator[None]:
    """This process may allocate `size` bytes of each GPU."""
    for device in gpus():
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(size / total, device)
    try:
        yield
    finally:
        for device in gpus():
            torch.cuda.set_per_process_memory_fraction(1.0, device)


def gpus() -> range:
    return range(torch.cuda.device_count())


def free_unused() -> None:
    """Collects reference cycles that hooks create.  Until then, a deleted model's memory counts as
    allocated.
    """
    gc.collect()
    torch.cuda.empty_cache()


def seconds() -> float:
    """The time after all GPUs have finished their work."""
    for device in gpus():
        torch.cuda.synchronize(device)
    return time.monotonic()


def measure(target: Target, captures: Captures) -> Row:
    """One run: its cost, and the tensors that differ from `captures`, which it fills if they are
    empty.
    """
    free_unused()
    before = [torch.cuda.memory_allocated(device) for device in gpus()]
    fills, expected = not captures, iter(tuple(captures))
    differing: list[str] = []
    compared = 0

    def on_layer(layer: CapturedLayer) -> None:
        nonlocal compared
        found = {name: tensor.cpu() for name, tensor in layer.inputs.tensors.items()}
        if fills:
            captures.append(found)
            return
        theirs = next(expected, {})
        names = [
            name
            for name in found.keys() | theirs.keys()
            if not same(found.get(name), theirs.get(name))
        ]
        differing.extend(f"{layer.layer.name} {name}" for name in sorted(names))
        compared += 1

    began = seconds()
    loaded = load(target, Watcher())
    loaded_at = seconds()
    for device in gpus():
        torch.cuda.reset_peak_memory_stats(device)
    loaded.run(on_layer)
    ended = seconds()
    differing.extend("a layer that is missing" for _ in expected)
    record = loaded.placement
    peaks = [
        torch.cuda.max_memory_allocated(device) - taken
        for device, taken in zip(gpus(), before, strict=True)
    ]
    predicted = record.predicted_peak_bytes
    return {
        "placement": record.model_dump(mode="json"),
        "load_s": round(loaded_at - began, 2),
        "capture_s": round(ended - loaded_at, 2),
        "peak_bytes": peaks,
        "peak_by_predicted": round(peaks[0] / predicted, 3) if peaks and predicted else None,
        "seconds_per_layer": record.seconds_per_layer,
        "layers_compared": compared,
        "differing": differing,
    }


def same(mine: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    return mine is not None and theirs is not None and torch.equal(mine, theirs)


def failures(rows: dict[str, Row]) -> list[str]:
    """The recorded runs with an unexpected result."""
    found: list[str] = []
    for kind, row in rows.items():
        if "error" in row:
            found.append(f"{kind}: {row['error']}")
            continue
        if row["differing"]:
            found.append(f"{kind}: differs in {', '.join(row['differing'][:3])}")
        if row["layers_compared"] == 0:
            found.append(f"{kind}: compared nothing")
        if (ratio := row["peak_by_predicted"]) is not None and abs(ratio - 1) > WITHIN:
            found.append(f"{kind}: the peak is {ratio} times the predicted one")
        if row.get("chosen_by_itself") == "one-gpu":
            found.append(f"{kind}: the model fits on one GPU under the cap")
    return found


def runs(folder: Path, seqlen: int, layers: int) -> Iterator[tuple[str, Row]]:
    """Every run by its name.  After an error, the next run still starts."""
    target = find(request_of(folder, seqlen, "one-gpu"))
    captures: Captures = []
    first = measure(target, captures)
    # compiles the kernels, and shows that runs repeat bit for bit
    warm = measure(target, captures)
    yield "one-gpu", warm | {f"first_{name}": first[name] for name in ("load_s", "capture_s")}
    held: dict[PlacementKind, float] = {"cpu-offload": HELD_LAYERS, "disk-offload": HELD_LAYERS}
    if len(gpus()) > 1:
        held["all-gpus"] = layers / len(gpus()) + 2  # accelerate leaves one layer's room free
    for kind, held_layers in held.items():
        row: Row = {"cap_bytes": cap_bytes(target, held_layers)}
        try:
            free_unused()
            with capped(row["cap_bytes"]):
                free = replace(target, request=replace(target.request, placement=None))
                row["chosen_by_itself"] = placement.choose(free).record.kind
                row |= measure(replace(target, request=request_of(folder, seqlen, kind)), captures)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"
        yield kind, row


def record(
    file: Path, *, layers: int, seqlen: int, parent: Path | None, command: Sequence[str]
) -> list[str]:
    """Write `file`, and return the failures."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        total = write_checkpoint(MODEL, folder, layers, 0, limits.device().type)
        print(
            f"{total / 1e9:.1f} GB of weights written in {time.monotonic() - began:.0f} s",
            flush=True,
        )
        document: dict[str, Any] = {
            "command": list(command),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": machine.collect().model_dump(mode="json"),
            "gpus": len(gpus()),
            "model": MODEL,
            "layers": layers,
            "seqlen": seqlen,
            "weight_bytes": total,
            "write_s": round(time.monotonic() - began, 1),
            "runs": {},
        }
        for kind, row in runs(folder, seqlen, layers):
            document["runs"][kind] = row
            document |= {
                "seconds": round(time.monotonic() - began, 1),
                "failures": failures(document["runs"]),
            }
            file.write_text(json.dumps(document, indent=1) + "\n")
            print(json.dumps({kind: row}), flush=True)
    found: list[str] = document["failures"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--layers", type=int, default=8, help="decoder layers of the checkpoint, 1.6 GB each"
    )
    parser.add_argument("--seq", type=int, default=32768, help="tokens of the prompt")
    parser.add_argument(
        "--folder",
        type=Path,
        help="for the checkpoint, on a disk with room for it; a temporary one",
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    free = shutil.disk_usage(arguments.folder or tempfile.gettempdir()).free
    if (arguments.layers + 1) * LAYER_BYTES > free:
        parser.error(
            f"--layers {arguments.layers} need more than the {free / 1e9:.1f} GB that are free "
            "on the disk"
        )
    found = record(
        arguments.file,
        layers=arguments.layers,
        seqlen=arguments.seq,
        parent=arguments.folder,
        command=["python", *sys.argv],
    )
    for failure in found:
        print(failure, file=sys.stderr)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
