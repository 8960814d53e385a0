"""Damaged files of every kind through the command line: no false success, no internal error, no
hang.

    PYTHONPATH=.:tests python tests/fuzz.py SECONDS SEED [KIND ...]

Prints what does not end well, with its seed, and in the end, also when SIGINT or SIGTERM stops it,
how many inputs of each kind were tried.  A false success is an exit code 0 or 1 of
a run whose file its library refuses, or of a dry run where the run has another exit code; with a
number that cannot be, or a failure, in a report; and one that differs between formats.
"""

import json
import math
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import cache
from io import BytesIO
from pathlib import Path
from threading import Event
from typing import Any

import cases
import tiny_models
import torch
import typer
import typer.main
import typer.testing
from capture import recordings
from capture.recordings import Tensors
from checkpoint.conftest import save_tokenizer
from checkpoint.folders import original_state, write_original
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from ssdprof.checkpoint.config import PICKLE
from ssdprof.checkpoint.load import fetch, load_model
from ssdprof.checkpoint.model import open_model
from ssdprof.cli import app
from ssdprof.errors import SsdprofError
from ssdprof.store.reports import dump

HANGS_S = 240.0  # also where a busy machine takes ten times as long
VALUES = (
    None, True, False, 0, 1, -1, 3, 255, 10**6, 2**31, 2**64, 10**40, -(10**30), 0.5, -0.5, 5e-324,
    1e300, math.nan, math.inf, "", "0", "1e-3", "x", "swish_7", "\x00", "\ud800",
    "x\x1b[2J\nverdict=1", "=1+1", "::error::x", "nan", "a" * 5000, "../..", [], [[]], [None],
    [1, 2], ["x"], {}, {"x": 1}, {"__float__": "Infinity"},
)  # fmt: skip
KEYS = (
    "quantization_config", "rope_parameters", "dtype", "architectures", "auto_map",
    "layers_block_type", "text_config", "time_step_limit", "vision_config", "tokenizer_class",
    "added_tokens_decoder", "chat_template", "eos_token", "complete", "reason", "later_fault",
    "nonfinite", "samples", "summary", "call", "serving", "gates", "fail-if",
)  # fmt: skip
SIZES = (
    "seqlen",
    "batch",
    "chunk",
    "decode",
    "count",
    "ranks",
    "elements",
    "segment_length",
    "num_hidden_layers",
)
FORMATS = ("markdown", "html", "junit", "csv", "github")
STORED = ("--dtypes", "exact", "--impl", "reference", "--baseline", "reference")
FIRST_LAYER = ("--seq", "8", "--layers", "0", *STORED)
RUN = ("--seq", "8", "--layers", "2", *STORED)  # needs all weights
SETTINGS = """gates = ["speedup:1.5", "rms:2", "match:99%", "match@0:10%"]
[prefill]
gates = ["speedup:1.1"]
[compare]
fail-if = ["rms:base+50%", "time:base+3%"]
"""


class Hang(BaseException): ...


# --- damage


def places(document) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) at any depth."""
    for key in document if isinstance(document, dict) else range(len(document)):
        yield document, key
        if isinstance(document[key], dict | list):
            yield from places(document[key])


def in_json(draw: random.Random, text: bytes) -> bytes:
    document = json.loads(text)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        if not (entries := list(places(document))):
            return b"[]"
        inside, key = draw.choice(entries)
        value = inside[key]
        way = draw.random()
        if way < 0.1 and len(entries) > 9:
            del inside[key]
        elif way < 0.2 and isinstance(inside, list):
            inside.append(json.loads(json.dumps(value)))
        elif way < 0.3 and isinstance(inside, dict):
            inside[draw.choice(KEYS)] = json.loads(json.dumps(draw.choice(VALUES)))
        elif way < 0.45 and type(value) in (int, float):
            inside[key] = draw.choice(
                (-value, value * 2, value + 1, float(value), str(value), [value], value * 10**9)
            )
        elif way < 0.55:
            other, name = draw.choice(entries)
            inside[key] = json.loads(
                json.dumps(other.get(name) if isinstance(other, dict) else other)
            )
        else:
            inside[key] = json.loads(json.dumps(draw.choice(VALUES)))
    return json.dumps(document).encode()


def in_sizes(draw: random.Random, text: bytes) -> bytes:
    """A size or a count that is impossible, or far too large, in a JSON document."""
    document = json.loads(text)
    integers = [(inside, key) for inside, key in places(document) if type(inside[key]) is int]
    sizes = [(inside, key) for inside, key in integers if key in SIZES]
    chosen = draw.sample(sizes, min(len(sizes), draw.choice((1, 1, 2))))
    for inside, key in chosen or [draw.choice(integers)]:
        inside[key] = draw.choice((0, -1, -inside[key], int(10 ** draw.uniform(5, 20))))
    return json.dumps(document).encode()


def in_bytes(draw: random.Random, data: bytes) -> bytes:
    at = draw.randrange(len(data))
    flipped = data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
    nested = data.rstrip()[:-1] + b',"x":' + b"[" * 300 + b"]" * 300 + b"}"
    return draw.choice(
        (data[:at], flipped, data[:at] + data[at + 1 :], b"[" * 10**5, b"", b"[]", nested)
    )


def in_lines(draw: random.Random, data: bytes) -> bytes:
    """One line of a stored run: damaged, twice, missing, or where another was."""
    lines = data.splitlines()
    at = draw.randrange(len(lines))
    way = draw.choice((in_json, in_json, in_bytes))
    lines[at : at + 1] = draw.choice(
        ([way(draw, lines[at])], [way(draw, lines[at])], [lines[at]] * 2, [])
    )
    if draw.random() < 0.1:
        draw.shuffle(lines)
    return b"".join(line + b"\n" for line in lines)


def in_header(draw: random.Random, data: bytes) -> bytes:
    """In the header of a safetensors file."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = draw.choice((in_json, in_json, in_bytes))(draw, data[8:end])
    length = (
        len(header)
        if draw.random() < 0.9
        else draw.choice((0, 1, len(header) + 1, 2**40, 2**64 - 1))
    )
    return length.to_bytes(8, "little") + header + data[end:]


def in_pickle(draw: random.Random, data: bytes) -> bytes:
    """In the pickled part of torch's zip file, whose checksums are right then."""
    damaged = BytesIO()
    with zipfile.ZipFile(BytesIO(data)) as source, zipfile.ZipFile(damaged, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            for _ in range(draw.choice((1, 1, 2, 4)) * name.endswith("data.pkl")):
                at = draw.randrange(len(content))
                ways = (
                    bytes([draw.randrange(256)]),
                    b"",
                    content[at : at + 1] * 2,
                    b"0",
                    b"}",
                    b".",
                    b"R",
                )
                content = content[:at] + draw.choice(ways) + content[at + 1 :]
            target.writestr(name, content)
    return damaged.getvalue()


def in_words(draw: random.Random, data: bytes) -> bytes:
    """A number or a word of a TOML file."""
    parts = data.split(b" ")
    parts[draw.randrange(len(parts))] = json.dumps(draw.choice(VALUES)).encode()
    return b" ".join(parts)


def replaced(draw: random.Random, file: Path):
    """What is not a regular file, where a file was."""
    file.unlink()
    way = draw.choice(("pipe", "pipe", "linked pipe", "folder", "no target", "itself", "device"))
    if "pipe" in way:
        os.mkfifo("pipe" if way != "pipe" else file)
    if way == "folder":
        file.mkdir()
    elif way != "pipe":
        file.symlink_to(
            {"no target": "none", "itself": file.name, "device": "/dev/null"}.get(
                way, Path("pipe").resolve()
            )
        )


def restored(file: Path, data: bytes):
    for path in (file, Path("pipe")):
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
    file.write_bytes(data)


# --- what tries a damaged file: each function returns what is wrong


def invoked(*words: str) -> tuple[int, str]:
    """Exit code and output.  Raises Hang, and what would be an internal error."""
    signal.setitimer(signal.ITIMER_REAL, HANGS_S)
    try:
        result = CliRunner().invoke(app, words, prog_name="ssdprof")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def of_report(draw: random.Random, file: Path) -> str:
    """A document, or a file of a stored run."""
    path = str(file if file.parent == Path() else file.parent)
    code, shown = invoked("export", path, "--format", "json")
    listed = invoked("runs")[0] if file.parent != Path() else 0
    if code > 1 or listed:
        return f"exit {listed} of the list of runs" if listed else ""
    Path("outputs").unlink(missing_ok=True)
    other = draw.choice((*FORMATS, "accuracy", "compare"))
    of_others = {"accuracy": ("accuracy", path), "compare": ("compare", path, path)}
    second, output = invoked(*of_others.get(other, ("export", path, "--format", other)))
    if "\x1b" in output:
        return f"an escape sequence in {other}"
    if other == "github" and any(
        "=" not in line for line in Path("outputs").read_text().splitlines()
    ):
        return "an output without a name"
    if other in FORMATS and second != code:
        return f"exit {code} of json, {second} of {other}"
    return impossible(json.loads(shown[shown.index("{") : shown.rindex("}") + 1]), code)


def impossible(document, code: int) -> str:
    """What a report that may be printed cannot have."""
    datetime.fromisoformat(document["created"])
    if code == 0 and not all(process.get("complete") for process in document["processes"]):
        return "passed, and not complete"
    for case in document.get("cases", ()):
        uses = [use for accuracy in case.get("accuracy", ()) for use in accuracy["budget"]]
        outside = case["implementation"] == "fused" and any(
            use["error"] > use["budget"] for use in uses
        )
        if code == 0 and (outside or case["status"] == "failed"):
            return "passed, and failed"
    for inside, key in places(document):
        value = inside[key]
        if (isinstance(value, float) and not math.isfinite(value)) or (
            key == "match_pct" and not 0 <= value <= 100
        ):
            return f"{key} is {value}"
        if key == "us" and any(us <= 0 for row in value for us in row):
            return "a time that is not positive"
        if key == "nonfinite" and code == 0 and value and "against" in inside:
            return "passed, and not finite"
    return ""


def of_settings(_draw: random.Random, file: Path) -> str:
    code, _ = invoked("accuracy", "good.json", "--config", str(file))
    gates = tomllib.loads(file.read_text()).get("gates", []) if code < 2 and file.is_file() else []
    wrong = [gate for gate in gates if not re.fullmatch(r"[a-z0-9-]+(@[^:]+)?:[0-9.e+-]+%?", gate)]
    return f"taken: {wrong}" if wrong else ""


def of_prompt(_draw: random.Random, file: Path) -> str:
    planned, ran = (
        invoked("run", "mamba2", "--prompt-file", str(file), *FIRST_LAYER, *more)[0]
        for more in (("--dry-run",), ("--out", "out"))
    )
    shutil.rmtree("out", ignore_errors=True)
    return f"exit {planned} of the dry run, {ran} of the run" if planned < 2 <= ran else ""


def of_folder(draw: random.Random, file: Path) -> str:
    """A model or captures."""
    options: tuple[str, ...] = (*RUN, "--prompt", "random")
    if file.parent.name == "captures":
        options = STORED
    elif file.name.startswith("tokenizer"):
        options = FIRST_LAYER
    words = ("run", str(file.parent), *options)
    planned, _ = invoked(*words, "--dry-run")
    if planned > 1 and draw.random() < 0.7:  # most often the run is refused for the same reason
        return ""
    ran, _ = invoked(*words, "--out", "out")
    shutil.rmtree("out", ignore_errors=True)
    if planned < 2 <= ran:
        return f"exit {planned} of the dry run, {ran} of the run"
    try:
        if ran > 1 or not file.is_file():
            return ""
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                return "" if opened.keys() else "no tensors"
        _ = (
            torch.load(file, "cpu", weights_only=True)
            if file.suffix == ".bin"
            else json.loads(file.read_text())
        )
    except Exception as error:
        return f"exit {ran} with a file that its library refuses: {error}"
    return ""


Weights = dict[str, Tensor]


def differences(folder: Path, expected: Weights) -> str:
    """What is wrong with the weights that are loaded from a folder.  Raises SsdprofError."""
    model = load_model(fetch(open_model(str(folder))), device="cpu")
    weights = {f"backbone.{name}": weight for name, weight in model.state_dict().items()}
    wrong = [key for key, weight in weights.items() if not torch.equal(weight, expected[key])]
    return f"wrong values: {wrong}" if wrong else ""


HEAD = "lm_head.weight"  # which layers do not need
WRAPPERS = ("_orig_mod.", "module.", "_fsdp_wrapped_module._orig_mod.", "inner.", "base.model.")


def of_keys(draw: random.Random, file: Path) -> str:
    """Names that wrappers put into keys, and a lost weight: the right values, or a message that
    names a stored key or the lost weight.
    """
    weights = load_file(file)
    place = draw.choice(("", "layers.0.", "mixer.", "in_proj."))
    wrapper = draw.choice(WRAPPERS)
    keys = {key: key.replace(place, place + wrapper, 1) for key in weights}
    lost = draw.sample(sorted(keys.keys() - {HEAD}), draw.choice((0, 0, 1)))
    for key in lost:
        del keys[key]
    save_file({stored: weights[key] for key, stored in keys.items()}, file, {"format": "pt"})
    try:
        wrong = differences(file.parent, weights)
        return f"read without {lost}" if lost else wrong
    except SsdprofError as error:
        named = (*(key[:50] for key in keys.values()), *(key.partition(".")[2] for key in lost))
        return "" if any(key in error.message for key in named) else f"no key: {error.message}"


OUTSIDE: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "g": (torch.exp, torch.neg, torch.zeros_like, lambda g: g + 2),
    "beta": (lambda beta: beta * 5, torch.neg, torch.ones_like, lambda beta: beta * 1e30),
    "k": (lambda k: k * 1e3, lambda k: k * 1e18, torch.ones_like, torch.zeros_like),
    "v": (torch.zeros_like, torch.ones_like),
    "q": (torch.zeros_like, torch.ones_like),
    "x": (torch.zeros_like, torch.ones_like),
    "dt": (torch.neg, torch.zeros_like, torch.ones_like),
    "A": (torch.neg, torch.zeros_like),
    "B": (torch.zeros_like, torch.ones_like),
}


def of_recording(draw: random.Random, file: Path) -> str:
    """Inputs outside the operator's domain: the report must name the suspicion."""
    tensors = load_file(file)
    for name in draw.sample(sorted(OUTSIDE.keys() & tensors.keys()), draw.choice((1, 1, 2, 4))):
        tensors[name] = draw.choice(OUTSIDE[name])(tensors[name]).contiguous()
    save_file(tensors, file)
    folder = str(file.parent)
    code, shown = invoked("capture", "--from", "safetensors", folder, "--out", "taken")
    if code == 0:
        code, shown = invoked("run", "taken", *STORED, "--out", "out")
    for name in ("out", "taken"):
        shutil.rmtree(name, ignore_errors=True)
    is_suspected = "no model has" in shown
    return f"exit {code}, and no suspicion" if code < 2 and not is_suspected else ""


# kind: what tries its files, the files, and their damage
Damage = Callable[[random.Random, bytes], bytes]
JSON = (in_json, in_json, in_json, in_bytes)
KINDS: dict[str, tuple[Callable[[random.Random, Path], str], str, tuple[Damage, ...]]] = {
    "report": (of_report, "report-*.json", JSON),
    "stored": (of_report, "runs/stored/*.json", JSON),
    "lines": (of_report, "runs/stored/*.jsonl", (in_lines, in_lines, in_bytes)),
    "settings": (of_settings, "settings.toml", (in_words, in_words, in_bytes)),
    "prompt": (of_prompt, "prompt.txt", (in_bytes,)),
    "config": (of_folder, "mamba2/config.json", JSON),
    "tokenizer": (of_folder, "mamba2/tokenizer*.json", JSON),
    "weights": (of_folder, "whole/*.safetensors", (in_header, in_header, in_bytes)),
    "index": (of_folder, "mamba2/*.index.json", JSON),
    "pickle": (of_folder, "pickle/*.bin", (in_pickle, in_pickle, in_bytes)),
    "manifest": (of_folder, "captures/manifest.json", JSON),
    "keys": (of_keys, "whole/*.safetensors", ()),
    "recording": (of_recording, "recorded-*/*.safetensors", ()),
    "captured": (of_folder, "captures/*.safetensors", (in_header, in_bytes)),
}


# damage to files of several kinds: a size that cannot be; a pipe, folder or link in the place of a
# file
SEVERAL = {
    "sizes": [kind for kind, (*_, ways) in KINDS.items() if ways is JSON],
    "special": [kind for kind, (*_, ways) in KINDS.items() if ways],
}


def reports():
    small = cases.report(layers=(0,), precisions=(cases.EXACT_FP32,), seqlens=(64,))
    others = (cases.bench(), cases.prefill(), cases.answers(), cases.in_calls(small))
    for number, report in enumerate((small, *others)):
        Path(f"report-{number}.json").write_text(dump(report))
    Path("good.json").write_text(dump(small))


def prepare():
    """Undamaged files in the current folder, and a limit for each command."""

    def ring(*_):
        raise Hang

    signal.signal(signal.SIGALRM, ring)
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
        "GITHUB_OUTPUT": "outputs",
        "GITHUB_STEP_SUMMARY": "summary",
    }
    reports()
    Path("settings.toml").write_text(SETTINGS)
    Path("prompt.txt").write_text("A text of more than eight tokens. " * 9)
    model = tiny_models.shared("mamba2")
    model.save_pretrained("mamba2", max_shard_size="100KB")
    model.save_pretrained("whole")
    save_tokenizer(Path("mamba2"))
    shutil.copytree("mamba2", "pickle", ignore=shutil.ignore_patterns("*safetensors*"))
    write_original(Path("pickle"), original_state(), PICKLE)
    record()
    assert invoked("capture", "mamba2", "--prompt", "random", *RUN[:4], "--out", "captures")[0] == 0
    for folder in ("mamba2", "whole", "pickle"):
        assert invoked("run", folder, "--prompt", "random", *RUN, "--dry-run")[0] == 0
    assert invoked("run", "mamba2", "--prompt", "random", *RUN, "--out", "runs/stored")[0] == 0


def record():
    """Two calls of each operator, as a server records them, on heads of 16 and 8."""
    draw = torch.Generator().manual_seed(0)
    recorded: dict[str, list[Tensors]] = {"gdn": [], "kda": [], "ssd": []}
    for _ in range(2):
        wide, keys, narrow = (torch.randn(1, 9, 2, width, generator=draw) for width in (16, 16, 8))
        gate, beta = torch.rand(2, 1, 9, 2, generator=draw)
        keys = torch.nn.functional.normalize(keys, dim=-1)
        delta_rule = {"q": wide, "k": keys, "v": narrow, "beta": beta}
        inputs = {
            "gdn": delta_rule | {"g": -gate},
            "kda": delta_rule | {"g": -gate[..., None] - wide.sigmoid()},
            "ssd": {"x": narrow, "dt": gate, "A": -1 - beta[0, 0], "B": wide, "C": keys},
        }
        for operator, tensors in inputs.items():
            recorded[operator].append(tensors)
    for operator, calls in recorded.items():
        arguments = {"chunk_size": 4, "dt_softplus": False} if operator == "ssd" else {}
        recordings.record(Path(f"recorded-{operator}"), operator, calls, (7,), **arguments)


def tried(kind: str, draw: random.Random) -> str:
    """What is wrong with how one damaged input of a kind ends; empty if nothing is."""
    several = kind in SEVERAL
    fault_of, pattern, ways = KINDS[draw.choice(SEVERAL[kind]) if several else kind]
    file = draw.choice(sorted(Path().glob(pattern)))
    whole = file.read_bytes()
    if kind == "special":
        replaced(draw, file)
    elif ways or several:
        file.write_bytes((in_sizes if several else draw.choice(ways))(draw, whole))
    try:
        wrong = fault_of(draw, file)
    except Hang:
        wrong = f"a hang of {HANGS_S:g} s: {file}"
    except Exception as error:
        wrong = "an internal error: " + "".join(traceback.format_exception(error, limit=-3))
    finally:
        restored(file, whole)
    return wrong


def main():
    seconds = float(sys.argv[1])
    seed = int(sys.argv[2])
    kinds = sys.argv[3:] or (*KINDS, *SEVERAL)
    # a config may ask for any amount of memory
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30,) * 2)
    # Commands are built once, and nothing waits for the disk: neither changes what is tried.
    typer.testing._get_command = cache(typer.main.get_command)  # type: ignore[attr-defined]
    os.fsync = lambda _: None
    stopped = Event()
    counts = Counter[str]()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    ends = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        prepare()
        while time.monotonic() < ends and not stopped.is_set():
            for kind in kinds:
                counts[kind] += 1
                if wrong := tried(kind, random.Random(f"{kind} {seed}")):
                    counts[f"{kind}: {wrong.split(':')[0]}"] += 1
                    print(kind, seed, wrong, flush=True)
            seed += 1
    print(f"{sum(counts[kind] for kind in kinds):7,} inputs, up to seed {seed - 1}")
    print(*(f"{count:7,} {what}" for what, count in sorted(counts.items())), sep="\n")


if __name__ == "__main__":
    main()
