"""Record prefill times of whole models with random weights, on the GPU here.

    python benchmarks/record_prefill.py FOLDER [--only NAME] [--scratch DIR]

Makes each checkpoint of `RUNS` in DIR (up to 20 GB, removed again), runs `ssdprof prefill` on it against every library
that is installed, and writes <run>.json and <run>.md into FOLDER.  A run that takes longer than its time limit is
broken off; the lengths that it finished are kept.  Beside the results of mamba2-2.7b stands what the authors of the
fused SSD kernel state.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ssdprof.schema.prefill import PrefillCase, PrefillLength, PrefillReport

HERE = Path(__file__).parent
TO_STOP_S = 20  # that a run has to write what it has


@dataclass(frozen=True, kw_only=True)
class Run:
    """limit_s: of wall clock.  seconds: of sampling for each length."""

    name: str
    model: str
    seq: str
    peers: tuple[str, ...]
    surroundings: str = "both"
    seconds: float = 6
    limit_s: float


SSD_PEERS, GDN_PEERS = ("mamba_ssm",), ("fla", "flash_qla", "flashinfer")
RUNS = (
    Run(name="mamba2-2.7b", model="mamba2-2.7b", seq="1k,16k,128k", peers=SSD_PEERS, limit_s=150),
    Run(name="granite-4.0-h-1b", model="granite-4.0-h-1b", seq="1k,16k,128k", peers=SSD_PEERS, limit_s=100),
    Run(name="qwen3.5-9b-16k", model="qwen3.5-9b", seq="16k", peers=GDN_PEERS, limit_s=100),
    # a prefill of several seconds, a dozen of them for each implementation: the bundled surroundings alone
    Run(name="qwen3.5-9b-128k", model="qwen3.5-9b", seq="128k", peers=GDN_PEERS, surroundings="bundled", limit_s=200),
)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published claim about the end-to-end speedup of a fused over the unfused SSD, as published."""

    seqlen: int
    words: str


# https://pytorch.org/blog/accelerating-mamba2-with-kernel-fusion/, for mamba2-2.7b at batch 1 on A100 and H100
CLAIMS = {
    "mamba2-2.7b": (
        Claim(seqlen=131_072, words="roughly a 8-13% end-to-end speedup"),
        Claim(seqlen=1_024, words="the end-to-end speedup can reach ~20%"),
    )
}


def make_checkpoint(model: str, scratch: Path) -> Path:
    folder = scratch / model
    if not folder.exists():
        began = time.monotonic()
        script = HERE / "make_random_checkpoint.py"
        subprocess.run([sys.executable, script, model, folder, "--device", "cuda"], check=True)
        print(f"{model}: made in {time.monotonic() - began:.0f} s", flush=True)
    return folder


def record(run: Run, checkpoint: Path, folder: Path) -> None:
    peers = ",".join(name for name in run.peers if find_spec(name) is not None)
    file, markdown = folder / f"{run.name}.json", folder / f"{run.name}.md"
    command = [
        sys.executable, "-m", "ssdprof", "prefill", checkpoint, "--seq", run.seq, "--batch", "1",
        "--surroundings", run.surroundings, "--seconds", str(run.seconds), "--budget", str(run.limit_s),
        "--out", file, "--markdown", markdown, "--force", "--no-tuned", *(["--against", peers] if peers else []),
    ]  # fmt: skip
    began = time.monotonic()
    process = subprocess.Popen(list(map(str, command)))
    try:
        code = process.wait(run.limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # it keeps the lengths that it has
        try:
            code = process.wait(TO_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    print(f"{run.name}: {time.monotonic() - began:.0f} s, exit code {code}", flush=True)
    if run.model in CLAIMS and file.exists() and markdown.exists():
        report = PrefillReport.model_validate_json(file.read_text(encoding="utf-8"))
        with markdown.open("a", encoding="utf-8") as text:
            text.write(beside_claims(report, CLAIMS[run.model]))


def beside_claims(report: PrefillReport, claims: tuple[Claim, ...]) -> str:
    """A Markdown table: what is published, and what was measured."""
    rows = [
        f"| {claim.seqlen:,} | {claim.words} | {case.surroundings} | {baseline.implementation} {baseline.version} "
        f"| {100 * (baseline.call.median_us / case.call.median_us - 1):+.1f}% |"
        for claim in claims
        for length in report.prefill.lengths
        if length.seqlen == claim.seqlen
        for case, baseline in _pairs(length)
        if case.call and baseline.call
    ]
    return "\n".join(
        [
            "\n### Beside what is published\n",
            "The authors of the fused SSD kernel state, for Mamba-2 2.7B at batch 1 on A100 and H100 GPUs:\n",
            "| tokens | published | surroundings | fused here, over | end to end |",
            "|---:|:---|:---|:---|---:|",
            *rows,
            "",
        ]
    )


def _pairs(length: PrefillLength) -> list[tuple[PrefillCase, PrefillCase]]:
    """Each fused case with every other one of the same surroundings."""
    return [
        (fused, other)
        for fused in length.cases
        if fused.implementation == "fused"
        for other in length.cases
        if other.surroundings == fused.surroundings and other is not fused
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the results")
    parser.add_argument("--only", choices=[run.name for run in RUNS], help="this run alone")
    parser.add_argument("--scratch", type=Path, help="where to make checkpoints; a temporary folder by default")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    runs = [run for run in RUNS if arguments.only in (None, run.name)]
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        for number, run in enumerate(runs):
            checkpoint = make_checkpoint(run.model, Path(scratch))
            record(run, checkpoint, arguments.folder)
            if all(later.model != run.model for later in runs[number + 1 :]):
                shutil.rmtree(checkpoint)


if __name__ == "__main__":
    main()
