"""Applies the finds of this GPU in a command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ssdprof import operators
from ssdprof.environment.machine import gpu as current_gpu
from ssdprof.tuning import store
from ssdprof.tuning.records import Finds

AGAIN = "'ssdprof tune' finds new ones, 'ssdprof tune --clear' forgets them."


def use_saved(say: Callable[[str], None]) -> Path | None:
    """From now on, kernels in this process use the finds for the current GPU.  Returns their file.

    Prints their number, or the reason if they are ignored; prints nothing if there are none.
    """
    gpu = current_gpu()
    if gpu is None:
        return None
    finds, why = store.load(gpu)
    if why:
        say(f"The configurations tuned on this GPU are ignored: {why}.  {AGAIN}")
    if finds is None or not finds.finds:
        return None
    _use(finds)
    number = len(finds.finds)
    say(
        f"{number} {'configuration' if number == 1 else 'configurations'} tuned on this GPU will be used where they "
        "fit; --no-tuned takes the committed ones."
    )
    return store.file_of(gpu)


def use_file(file: Path) -> None:
    """The same in another process, with the file that `use_saved` returned."""
    _use(Finds.model_validate_json(file.read_text(encoding="utf-8")))


def _use(finds: Finds) -> None:
    assert finds.environment.gpu is not None
    name = finds.environment.gpu.name
    for operator in dict.fromkeys(find.calls.operator for find in finds.finds):
        own = [find.for_kernels(name) for find in finds.finds if find.calls.operator == operator]
        operators.get(operator).tunable.use(own)
