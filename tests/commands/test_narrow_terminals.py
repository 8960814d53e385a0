"""Nothing is cut in a terminal of 80 columns: words of the help, and counters of the progress."""

import io
import re
from contextlib import ExitStack

import pytest
import typer
from rich.console import Console
from test_documents import COMMANDS

from ssdprof.cli import app
from ssdprof.commands.output import TerminalWatcher

GROUP = typer.main.get_command(app)


def shown_at(command: str, width: int) -> str:
    """The help of a command in a terminal of this width; hyphenated words as one."""
    declared = COMMANDS.get(command, GROUP)
    text = declared.get_help(declared.context_class(declared, terminal_width=width))
    return re.sub(r"-\s+", "-", text)


@pytest.mark.parametrize("command", ["", *sorted(COMMANDS)])
def test_help_breaks_no_word(command):
    words = shown_at(command, 400).split()
    assert words[0] == "Usage:"
    assert words == shown_at(command, 80).split() == shown_at(command, 60).split()
    assert not re.findall(r"[a-z](?:\.\.\.|…)", " ".join(words))


@pytest.mark.parametrize("width", [80, 60])
def test_counters_of_progress_are_whole(width):
    steps = [
        ("Replaying", 1200, "calls"),
        ("Layer 38, 131,072 tokens, published=~/mamba, relaxed, bf16 states", 1024, "cases"),
        ("model-00001-of-00012.safetensors", 12_345_678, "bytes"),
    ]
    watcher = TerminalWatcher()
    screen = io.StringIO()
    watcher._console = Console(file=screen, width=width, force_terminal=True, color_system=None)
    with ExitStack() as stack:
        begun = [
            (stack.enter_context(watcher.step(what, total, unit=unit)), total)
            for what, total, unit in steps
        ]
        for advance, total in begun:
            advance(total)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    for _, total, unit in steps:
        assert re.search(rf"\b{total}/{total} +{unit} +0:00:0\d ETA 0:00:00", shown), shown
