"""Stores the operators' inputs of a model's layers, without replaying them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ssdprof.capture import store
from ssdprof.core.subject import CaptureManifest
from ssdprof.core.words import plural
from ssdprof.environment.toolchain import unusable_gpu
from ssdprof.jobs import limits
from ssdprof.jobs.model import load, run_model, store_in
from ssdprof.jobs.request import CaptureRequest
from ssdprof.jobs.subject import Subject, find
from ssdprof.progress import Watcher


def capture(
    request: CaptureRequest, out: Path | None, *, overwrite: bool, watcher: Watcher, subject: Subject | None = None
) -> tuple[Path, CaptureManifest]:
    """Store the inputs of a model's SSD and GDN layers.  Returns their folder and manifest.

    subject: the result of `find` for the request, if it was called before.
    """
    store.check_folder(out, overwrite=overwrite)
    limits.check_capture()
    if why := unusable_gpu():
        watcher.say(f"This capture uses the CPU.  {why}")
    subject = subject or find(request)
    loaded = load(request, subject, watcher)
    folder = out or store.default_folder(subject.ref, loaded.prompts, subject.layers)
    with (
        limits.memory_errors(),
        _reporting_interrupt(store_in(folder, subject, loaded, overwrite=overwrite), subject.calls) as writer,
        watcher.step("Capturing layers", subject.calls) as advance,
    ):
        run_model(subject, loaded, writer.add, lambda _: advance(1))
    return folder, writer.manifest


@contextmanager
def _reporting_interrupt(writer: store.CaptureWriter, calls: int) -> Iterator[store.CaptureWriter]:
    """The writer's context; an interrupt says what is kept.  calls: to be captured."""
    try:
        with writer:
            yield writer
    except KeyboardInterrupt:
        if not writer.manifest.layers:
            raise
        kept = f"What was captured is kept in {writer.folder}, marked as incomplete"
        raise KeyboardInterrupt(f"{kept}: {len(writer.manifest.layers):,} of {plural(calls, 'call')}.") from None
