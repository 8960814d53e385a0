"""A checkpoint of random weights says so, and runs report it."""

import subprocess
import sys
from pathlib import Path

from ssdprof.checkpoint import locate
from ssdprof.runs.notes import notes
from ssdprof.schema import Prompt

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "make_random_checkpoint.py"
PROMPT = Prompt(kind="default", source="", tokenizer="", seqlen=16, token_sha256="")


def test_random_weights_are_named_in_the_notes(tmp_path: Path) -> None:
    folder = tmp_path / "random"
    subprocess.run([sys.executable, SCRIPT, "granite-4.0-h-1b", folder, "--layers", "1"], check=True)
    ref = locate(str(folder)).ref
    assert [layer.index for layer in ref.layers] == [0]
    assert any("The weights are random" in note for note in notes(ref, [PROMPT]))


def test_trained_weights_are_not() -> None:
    assert not any("random" in note for note in notes(locate("demo").ref, [PROMPT]))
