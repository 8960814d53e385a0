"""The output of every command in every format is what `tests/goldens/` holds: exit code, stdout,
stderr, files.

A golden is a transcript: its lines `$ ssdprof ...` are the cases.  The goldens of a folder run in
the order of their names in one working directory.  After a change on purpose, `python
tests/test_goldens.py --write [GROUP ...]` writes what follows each command anew, and the diff is
the review.  It needs PYTHONPATH=tests and OMP_NUM_THREADS=1.
"""

import difflib
import hashlib
import json
import lzma
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cases
import pytest
import tiny_models
import torch
import typer
from jobs import tuning_fakes
from typer.testing import CliRunner

from ssdprof.cli import app
from ssdprof.commands.stored import SCHEMAS, schema
from ssdprof.core.report import LeftOut, Report
from ssdprof.store import reports

ROOT = Path(__file__).parents[1]
GOLDENS = Path(__file__).with_name("goldens")
LINES_SHOWN = 60  # of a diff
GROUPS = sorted(
    folder.name for folder in GOLDENS.iterdir() if folder.is_dir() and folder.name != "reports"
)
STALLS = ROOT / "tests" / "stalls" / "data" / "demo"
# Measured on an H200, in part with the times of an earlier form of the reports, which kept medians
# and intervals: the samples were made to have these.
REPORTS = {"run": "run-gdn", "bench": "bench-ssd", "prefill": "prefill"}
MASKS = (  # in this order
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?([+]00:00| UTC)?", "DATE"),
    (r"\b\d{8}-\d{6}\b", "TIME"),
    (r"[0-9a-f]{64}", "SHA256"),
    (r"(CPython|Python) 3[.\d]+", r"\1 VERSION"),
    (r"\b\d+\.\d+\.\d+(\.\w+)*(\+\w+)?", "VERSION"),
    (r"(?m)^( *versions  +)(.*\n)(  +\S.*\n)*", r"\1VERSIONS\n"),
    (r"(?m)^(\| versions +\| ).*", r"\1VERSIONS"),
    (r'("packages": ){[^}]*}', r"\1VERSIONS"),
    (r"(<td.*>ssdprof VERSION), .*", r"\1, VERSIONS</td>"),
    (r"(<td.*>).*, Linux x86_<wbr>64", r"\1MACHINE"),
    (r"(segments of [\d,]+, )[\d.]+ s\b", r"\1SECONDS"),
    (r"(?m)^(\W*noise: .*(?:fp32|fp16|bf16)).*", r"\1 NUMBERS"),
    (r'("(?:cpu|platform|python)": )".*"', r'\1"MACHINE"'),
    (r"(?m)^(\|? *CPU +\|? *)\S.*", r"\1MACHINE"),
    (r"(?m)^(\|? *duration +\|? *)[\d.]+ s\b *", r"\1SECONDS"),
    (r"(?m)^((?:ok|warn|missing) +\S+( \S+)?).*\n(  +.*\n)*", r"\1\n"),  # doctor
    (
        r'("status": )"(?:ok|warn|missing)",\n( *"detail": ).*\n( *"hint": ).*',
        r"\1STATUS\n\2DETAIL\n\3HINT",
    ),
    (r"[\d.]+ [KMGT]iB (are free|free)", r"SIZE \1"),
    (r"[\d.]+ [KMG]?i?B  config.json", "SIZE  config.json"),  # transformers writes it
    (r'("config.json",\n *"size_bytes": )\d+', r"\1NUMBER"),
    (r'(<td class="left")(?: data-key="[^"]*")?>\d+\ss(</td>)', r"\1>SECONDS\2"),
    (r'("(?:free_bytes|seconds)": |"first_call": \{\s*"seconds": )[\d.]+', r"\1NUMBER"),
    (
        r"(?s)<svg.*?</svg>",
        lambda found: "<svg>" + " ".join(re.findall(r"<!-- (.*?) -->", found[0])) + "</svg>",
    ),
    # of rounding in fp64, which depends on the processor
    (r"\d\.\d+e-(0?[89]|[1-9]\d)\b", r"SMALL"),
    (r"\d+\.\d{11,}(e-\d+)?|\d\.\d{9,}e-\d+", lambda found: f"{float(found[0]):.5g}"),
    (r'("process": )"[0-9a-f]{8}"', r'\1"ID"'),
    (r"[ \t]+(?=\n|$)", ""),
)
# What the rounding of another processor changes in the groups whose numbers are computed here, with
# the widths of their
# columns: models compute in bf16, so that every digit of an error may differ.
COMPUTED = (
    (r'("(?:worst_)?(?:position|head|place|period)": )(\[[^\]]*\]|\d+)', r"\1PLACE"),
    (r"\(\d+(, \d+)+\)(\s*(?:\|\s*)?)\d+\b", r"PLACE\2HEAD"),
    (r"\bhead \d+|\(\d+(, \d+)+\)", "PLACE"),
    (r"\b(?!100\.000)\d+\.\d+(e[-+]?\d+)?\b|\b\d+e-\d+\b|\bSMALL\b", "NUMBER"),
    (r'"value": -', '"value": '),
    (r"PLACE +\|", "PLACE |"),
)
# counts of other tokens
ANSWERS = (r"(?m)^(\|? *(?:un)?fused +\|? *relaxed, bf16  ).*", r"\1 NUMBERS")
WIDTHS = ((r"─+", "─"), (r"(?<=[|:])-+", "-"), (r"(?<=\S) {2,}", "  "))


def masked(text: str, computed: bool) -> str:
    """Without times, paths, versions, and what else depends on the machine.  text: its first line
    is the command.
    """
    command, _, text = text.partition("\n")
    answers = (ANSWERS,) if "answers" in command else ()
    for pattern, put in (*MASKS, *((*answers, *COMPUTED, *WIDTHS) if computed else ())):
        text = re.sub(pattern, put, text)
    return f"{command}\n{text}"


def prepare(folder: Path, patch: pytest.MonkeyPatch):
    """A folder for a group of commands, as the current one."""
    patch.chdir(folder)
    for name in [name for name in os.environ if name.startswith("SSDPROF_")]:
        patch.delenv(name)
    for name, value in {
        "NO_COLOR": "1",
        "COLUMNS": "100",
        "XDG_CACHE_HOME": str(folder / ".cache"),
    }.items():
        patch.setenv(name, value)
    patch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    patch.setenv("GITHUB_OUTPUT", "output.txt")
    # its bf16 products depend on the processor
    patch.setattr("torch.backends.mkldnn.enabled", False)
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / ".cache"))
    Path("reports").symlink_to(GOLDENS / "reports")
    Path("file").write_text("no report")
    Path("damaged").mkdir()
    Path("damaged/manifest.json").write_text("{")


def stored(kind: str) -> Report:
    return reports.load(f"reports/{REPORTS[kind]}.json", kind)[1]


def prepare_stored(_patch: pytest.MonkeyPatch):
    """A report of ncu, a run with stalls, and reports in which all times are 5 % longer."""
    Path("fused.ncu-rep").write_bytes(lzma.decompress((STALLS / "fused.ncu-rep.xz").read_bytes()))
    Path("with-stalls/stalls").mkdir(parents=True)
    shutil.copy("reports/answers.json", "with-stalls/run.json")
    shutil.copy(STALLS / "stalls.json", "with-stalls/stalls")
    for kind in REPORTS:
        report = stored(kind)
        longer = tuple(map(cases.slowed(1.05), report.cases))
        Path(f"slower-{kind}.json").write_text(reports.dump(report.changed(cases=longer)))


def prepare_gpu(patch: pytest.MonkeyPatch):
    """Replaces what needs a GPU by functions that return stored reports."""
    of = {"task": cases.generated(), "baseline": "committed", "variant": "hopper"}
    broken = cases.failed(cases.case("ring 5", **of), "failed")
    faster = cases.case("ring 2", **of, samples=cases.timed(90.9, 100.0))
    committed = cases.case(
        "committed", **of | {"baseline": "", "plan": "segment 4"}, samples=cases.timed(100.0, 110.0)
    )
    left = LeftOut(
        case_key="4x16x16x1, bf16, 1 x 40, exact", reason="the budget of 150 s was spent"
    )
    found = cases.of_cases(
        "tune",
        (committed, faster, broken),
        target="ssd",
        model=None,
        baseline="committed",
        left_out=(left,),
        clocks=None,
        ceilings=None,
        environment=tuning_fakes.environment(),
    )

    def job(kind: str) -> Callable[..., tuple[Path, Report]]:
        def returns(request, *_) -> tuple[Path, Report]:
            folder = request.out or Path("runs/kept")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "run.json").write_text(reports.dump(stored(kind)))
            return folder, stored(kind)

        return returns

    def tune(*given, **_) -> Report:
        *_, on_search = given
        for segment in (4, None):
            on_search(found, *tuning_fakes.finding(32, segment))
        return found

    patch.setattr("ssdprof.jobs.bench.bench", job("bench"))
    patch.setattr("ssdprof.jobs.prefill.time_prefills", job("prefill"))
    patch.setattr("ssdprof.jobs.tune.tune", tune)
    patch.setattr("ssdprof.jobs.tune.gpu_to_tune", lambda: torch.device("cpu"))
    for module in ("environment.toolchain", "jobs.bench", "jobs.prefill", "commands.measuring"):
        patch.setattr(f"ssdprof.{module}.require_gpu", lambda *_: torch.device("cpu"))
    tuning_fakes.kept()


def prepare_machine(_patch: pytest.MonkeyPatch):
    """A tiny model of each family."""
    for name in tiny_models.MODELS:
        tiny_models.build(name).save_pretrained(name)


PREPARE = {"stored": prepare_stored, "gpu": prepare_gpu, "machine": prepare_machine}


def files() -> dict[Path, str]:
    """The files under the current folder, with their text where a person reads them."""
    shown = (".md", ".txt")
    return {
        file: file.read_text() if file.suffix in shown else ""
        for file in sorted(Path().rglob("*"))
        if file.is_file() and file.parts[0] not in ("reports", ".cache")
    }


def output(command: str, patch: pytest.MonkeyPatch, computed: bool) -> str:
    """What a command does, as a golden shows it.  computed: its numbers are computed here."""
    words = shlex.split(command)
    patch.setattr(sys, "argv", ["ssdprof", *words])
    for name in ("summary.md", "output.txt"):
        Path(name).unlink(missing_ok=True)
    before = files()
    result = CliRunner().invoke(app, words, prog_name="ssdprof", catch_exceptions=False)
    text = (
        f"{f'$ ssdprof {command}'.rstrip()}\nexit code "
        f"{result.exit_code}\n{result.stdout.rstrip()}\n"
    )
    if result.stderr.strip():
        text += f"--- stderr\n{result.stderr.rstrip()}\n"
    for file, content in files().items():
        if (
            before.get(file) != content
            and file.suffix != ".safetensors"
            and ".lock" not in file.name
        ):
            text += f"--- wrote {file}\n{content}"
    return masked(text.replace(str(Path.cwd()), "FOLDER").replace(str(ROOT), "ROOT"), computed)


def outputs(group: str, folder: Path) -> dict[str, str]:
    """Golden -> its text now."""
    texts = {}
    with pytest.MonkeyPatch.context() as patch:
        prepare(folder, patch)
        if group in PREPARE:
            PREPARE[group](patch)
        for golden in sorted((GOLDENS / group).iterdir()):
            commands = re.findall(r"(?m)^\$ ssdprof ?(.*)$", golden.read_text())
            printed = (output(command, patch, group.startswith("demo")) for command in commands)
            texts[f"{group}/{golden.name}"] = "\n".join(printed)
    return texts


def options() -> Iterator[str]:
    """The help of every command: its arguments and options with types, defaults and texts, one a
    line.
    """
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in sorted(commands.items()):
        text = command.get_help(command.context_class(command, info_name=name, terminal_width=400))
        lines = (" ".join(line.split()) for line in re.sub(r"\n {8,}", " ", text).splitlines())
        yield from filter(None, lines)
        yield ""


def fields(
    schema: dict[str, Any], whole: dict[str, Any], path: str, remarks: str = ""
) -> Iterator[str]:
    """One line for each field of a JSON schema, with what it may be; x[] is an element of x, and
    x{} a value.
    """
    if "$ref" in schema:
        schema = whole["$defs"][schema["$ref"].rpartition("/")[2]] | {
            key: schema[key] for key in schema if key != "$ref"
        }
    below = (
        "properties",
        "items",
        "prefixItems",
        "anyOf",
        "oneOf",
        "additionalProperties",
        "required",
        "$defs",
    )
    if schema.get("enum") == ["NaN", "Infinity", "-Infinity"]:  # of every number
        return
    own = {
        key: schema[key]
        for key in schema
        if key not in (*below, "title", "description", "$schema", "discriminator")
    }
    choices = [one for key in ("anyOf", "oneOf") for one in schema.get(key, ())]
    if own or not choices:
        closed = {"closed": True} if schema.get("additionalProperties") is False else {}
        yield f"{path} {json.dumps(own | closed, sort_keys=True)[1:-1]}{remarks}"
    for choice in choices:
        yield from fields(choice, whole, path, remarks)
    for name, inner in schema.get("properties", {}).items():
        yield from fields(
            inner, whole, f"{path}.{name}", ", required" * (name in schema.get("required", ()))
        )
    for mark, inner in (("[]", schema.get("items")), ("{}", schema.get("additionalProperties"))):
        if isinstance(inner, dict):
            yield from fields(inner, whole, path + mark)
    for inner in schema.get("prefixItems", ()):
        yield from fields(inner, whole, f"{path}[]")


def schemas() -> Iterator[str]:
    """For each document that a command prints as JSON: a hash of its schema, and its fields."""
    for name, (printed_by, _) in SCHEMAS.items():
        text = json.dumps(one := schema(name), sort_keys=True)
        yield f"{name}: {hashlib.sha256(text.encode()).hexdigest()[:16]}, printed by {printed_by}"
        yield from sorted(set(fields(one, one, name)))


def lists() -> dict[str, str]:
    return {"options.txt": "\n".join(options()), "schema.txt": "\n".join(schemas()) + "\n"}


def compare(texts: dict[str, str]):
    """Fails with a diff of each golden that differs."""
    lines = []
    for name, text in texts.items():
        golden = GOLDENS / name
        there = golden.read_text() if golden.is_file() else ""
        lines += difflib.unified_diff(
            there.splitlines(), text.splitlines(), f"goldens/{name}", "now", lineterm="", n=1
        )
    left = len(lines) - LINES_SHOWN
    assert not lines, "\n".join(
        [*lines[:LINES_SHOWN], *([f"and {left} more lines"] if left > 0 else [])]
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="the goldens are of a machine without a GPU")
@pytest.mark.parametrize(
    "group",
    [
        pytest.param(group, marks=[pytest.mark.slow] * group.startswith(("demo", "machine")))
        for group in GROUPS
    ],
)
def test_outputs(group, tmp_path):
    compare(outputs(group, tmp_path))


def test_options_and_schemas():
    compare(lists())


def write(groups: Sequence[str]):
    texts = lists()
    for group in groups:
        with tempfile.TemporaryDirectory() as folder:
            texts |= outputs(group, Path(folder))
    for name, text in texts.items():
        (GOLDENS / name).write_text(text)


if __name__ == "__main__":
    assert sys.argv[1:2] == ["--write"], "usage: python tests/test_goldens.py --write [GROUP ...]"
    assert os.environ.get("OMP_NUM_THREADS") == "1", (
        "sums depend on the number of threads: set OMP_NUM_THREADS=1"
    )
    write(sys.argv[2:] or GROUPS)
