"""Record prefill times of whole models with random weights, on the GPU here.

    python benchmarks/record_prefill.py FOLDER [--budget SECONDS] [--only NAME ...] [--scratch DIR]

Makes the checkpoints of `RUNS` in DIR, all at once (27 GB, removed again), runs `ssdprof prefill` on each against every
library that is installed, one after the other, and writes <run>.json and <run>.md into FOLDER.  The runs share the
budget, the most important ones first; results name the runs that did not fit.  A run that hangs is stopped, and
its results so far are kept.  The results of mamba2-2.7b also have the claims of the authors of the fused SSD
kernel.  No network is needed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from within import run_within

from ssdprof.report import markdown, prefill_document
from ssdprof.schema.prefill import PrefillCase, PrefillLength, PrefillReport

HERE = Path(__file__).parent
TO_START_S = 12  # for a run's imports; its own budget begins after them
TO_STOP_S = 20  # from a run's limit to its interrupt, and from that to the kill
LEAST_S = 30  # a run with less time does not begin
BASELINE = "unfused"


@dataclass(frozen=True, kw_only=True)
class Run:
    """limit_s: seconds of wall clock that are reserved for this run.  seconds: seconds of sampling for each length and
    surroundings."""

    name: str
    seq: str
    peers: tuple[str, ...]
    surroundings: str
    seconds: float = 4
    limit_s: float


SSD_PEERS, GDN_PEERS = ("mamba_ssm",), ("fla", "flash_qla", "flashinfer")
RUNS = (
    Run(name="mamba2-2.7b", seq="1k,16k,128k", peers=SSD_PEERS, surroundings="both", limit_s=130),
    Run(name="granite-4.0-h-1b", seq="1k,16k,128k", peers=SSD_PEERS, surroundings="both", limit_s=90),
    # a prefill of 128K tokens takes about six seconds: only the bundled surroundings
    Run(name="qwen3.5-9b", seq="16k,128k", peers=GDN_PEERS, surroundings="bundled", limit_s=150),
)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published claim about the end-to-end speedup of a fused over the unfused SSD, with its original words."""

    seqlen: int
    words: str


# https://pytorch.org/blog/accelerating-mamba2-with-kernel-fusion/, for mamba2-2.7b at batch 1 on A100 and H100
CLAIMS = {
    "mamba2-2.7b": (
        Claim(seqlen=131_072, words="roughly a 8-13% end-to-end speedup"),
        Claim(seqlen=1_024, words="the end-to-end speedup can reach ~20%"),
    )
}


def make_checkpoints(names: Sequence[str], scratch: Path) -> list[str]:
    """Make all checkpoints in parallel.  Returns the names of those that succeeded."""
    script = HERE / "make_random_checkpoint.py"
    making = {
        name: subprocess.Popen([sys.executable, script, name, scratch / name, "--device", "cuda"]) for name in names
    }
    return [name for name, process in making.items() if process.wait() == 0]


def allowance(run: Run, later: Sequence[Run], left_s: float) -> float:
    """Seconds for the run: its limit plus the time that later runs do not need, at most the remaining time."""
    return min(left_s, max(run.limit_s, left_s - sum(one.limit_s for one in later)))


def command(run: Run, checkpoint: Path, file: Path, allowed_s: float) -> list[str]:
    peers = ",".join(name for name in run.peers if find_spec(name) is not None)
    words = [
        sys.executable, "-m", "ssdprof", "prefill", checkpoint, "--seq", run.seq, "--batch", "1",
        "--surroundings", run.surroundings, "--seconds", f"{run.seconds:g}",
        "--budget", f"{allowed_s - TO_START_S:.0f}", "--out", file, "--force", "--no-tuned",
        *(["--against", peers] if peers else []),
    ]  # fmt: skip
    return list(map(str, words))


def write_markdown(name: str, file: Path) -> None:
    """Write the Markdown of a complete or partial run next to its JSON."""
    report = PrefillReport.model_validate_json(file.read_text(encoding="utf-8"))
    text = markdown.render_document(prefill_document.compose(report))
    claims = beside_claims(report.prefill.lengths, CLAIMS[name]) if name in CLAIMS else ""
    file.with_suffix(".md").write_text(text + claims, encoding="utf-8")


def beside_claims(lengths: Sequence[PrefillLength], claims: tuple[Claim, ...]) -> str:
    """A Markdown table of published and measured values."""
    rows = [
        f"| {claim.seqlen:,} | {claim.words} | {case.surroundings} "
        f"| {f'{baseline.implementation} {baseline.version}'.rstrip()} "
        f"| {100 * (baseline.call.median_us / case.call.median_us - 1):+.1f}% | {_interval(case, baseline)} |"
        for claim in claims
        for length in lengths
        if length.seqlen == claim.seqlen
        for case, baseline in _pairs(length)
        if case.call and baseline.call
    ]
    return "\n".join(
        [
            "\n### Beside what is published\n",
            "The authors of the fused SSD kernel state, for Mamba-2 2.7B at batch 1 on A100 and H100 GPUs:\n",
            "| tokens | published | surroundings | fused here, over | end to end | 95 % interval |",
            "|---:|:---|:---|:---|---:|---:|",
            *rows,
            "",
        ]
    )


def _pairs(length: PrefillLength) -> list[tuple[PrefillCase, PrefillCase]]:
    """Each fused case with every other case of the same surroundings."""
    return [
        (fused, other)
        for fused in length.cases
        if fused.implementation == "fused"
        for other in length.cases
        if other.surroundings == fused.surroundings and other is not fused
    ]


def _interval(case: PrefillCase, baseline: PrefillCase) -> str:
    """The interval of the speedup over the report's baseline.  The record has no interval over another library."""
    if case.speedup is None or baseline.implementation != BASELINE:
        return ""
    low, high = case.speedup.interval.low, case.speedup.interval.high
    return f"{100 * (low - 1):+.1f}% to {100 * (high - 1):+.1f}%"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the results")
    parser.add_argument("--budget", type=float, default=400, help="seconds of wall clock for everything [400]")
    parser.add_argument("--only", nargs="+", choices=[run.name for run in RUNS], help="these runs alone")
    parser.add_argument("--scratch", type=Path, help="where to make checkpoints; a temporary folder by default")
    arguments = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", flush=True)

    arguments.folder.mkdir(parents=True, exist_ok=True)
    runs = [run for run in RUNS if arguments.only is None or run.name in arguments.only]
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        made = make_checkpoints([run.name for run in runs], Path(scratch))
        say(f"checkpoints made: {', '.join(made)}")
        runs = [run for run in runs if run.name in made]
        for number, run in enumerate(runs):
            allowed_s = allowance(run, runs[number + 1 :], arguments.budget - (time.monotonic() - began))
            if allowed_s < LEAST_S:
                say(f"{run.name}: left out, {allowed_s:.0f} s were left")
                continue
            say(f"{run.name}: begins, {allowed_s:.0f} s allowed")
            file = arguments.folder / f"{run.name}.json"
            file.unlink(missing_ok=True)
            code = run_within(command(run, Path(scratch) / run.name, file, allowed_s), allowed_s, to_stop_s=TO_STOP_S)
            say(f"{run.name}: exit code {code}")
            if file.exists():
                write_markdown(run.name, file)


if __name__ == "__main__":
    main()
