"""The configurations that `ssdprof tune` found, in the user's cache: one file for each GPU
model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ssdprof import __version__, files, operators
from ssdprof.core.base import grouped
from ssdprof.core.target import Environment, Gpu
from ssdprof.core.tuned import TUNED_VERSION, TunedCalls, TunedConfig, TunedConfigs
from ssdprof.core.words import plural
from ssdprof.environment import machine
from ssdprof.environment.machine import installed_version, kernels_hash
from ssdprof.errors import SsdprofError

_AGAIN = "'ssdprof tune' finds new ones, 'ssdprof tune --clear' forgets them."


def folder() -> Path:
    """$XDG_CACHE_HOME/ssdprof/tuned, else under ~/.cache.  The XDG rules ignore a relative path."""
    wanted = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = wanted if wanted.is_absolute() else Path.home() / ".cache"
    return base / "ssdprof" / "tuned"


def file_of(gpu: Gpu) -> Path:
    return folder() / f"{files.safe_name(gpu.name)}.json"


def load(gpu: Gpu) -> tuple[TunedConfigs | None, str]:
    """The configurations for GPUs of this name.  (None, "") if there are none; (None, why) if they
    are no longer valid.
    """
    file = file_of(gpu)
    if not file.is_file():
        return None, ""
    try:
        saved = files.read_stored(file, _checked, TUNED_VERSION, _AGAIN)
    except SsdprofError as error:
        return None, error.message.rstrip(".")
    why = _why_stale(saved, gpu)
    return (None, why) if why else (saved, "")


def _checked(document: object) -> TunedConfigs:
    """Raises ValueError unless each configuration is one of its kernel."""
    saved = TunedConfigs.model_validate(document)
    for config in saved.configs:
        operators.get(config.operator).tunable.config(str(config.calls["kernel"]), config.settings)
    return saved


def keep(found_on: Environment, calls: TunedCalls, tuned: TunedConfig | None) -> Path:
    """Store what a search found for these calls, and delete earlier configurations for them and
    invalid ones.

    Raises MissingCapabilityError if the file cannot be written.
    """
    assert found_on.gpu is not None
    before, _ = load(found_on.gpu)
    kept = [config for config in before.configs if config.calls != calls] if before else []
    configs = (*kept, tuned) if tuned else tuple(kept)
    saved = TunedConfigs(
        ssdprof_version=__version__,
        kernels={
            name: kernels_hash(name)
            for name in dict.fromkeys(config.operator for config in configs)
        },
        environment=found_on,
        configs=configs,
    )
    file = file_of(found_on.gpu)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise files.unwritable(file.parent, error) from error
    files.write_text(file, saved.model_dump_json(indent=1) + "\n")
    return file


def clear() -> tuple[Path, ...]:
    """Delete the configurations of all GPUs.  Returns the deleted files."""
    gone = tuple(sorted(folder().glob("*.json")))
    for file in gone:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise files.unwritable(file, error) from error
    return gone


def _why_stale(saved: TunedConfigs, gpu: Gpu) -> str:
    there, triton = saved.environment, installed_version("triton")
    if there.gpu is None or there.gpu.name != gpu.name:
        return f"they are of {there.gpu.name if there.gpu else 'no GPU'}, this is {gpu.name}"
    if any(digest != kernels_hash(name) for name, digest in saved.kernels.items()):
        return (
            f"the kernels have changed since (then ssdprof {saved.ssdprof_version}, now "
            f"{__version__})"
        )
    if there.packages.get("triton") != triton:
        return f"they were compiled by Triton {there.packages.get('triton')}, this is {triton}"
    return ""


# --- in use


def use_saved(say: Callable[[str], None]) -> Path | None:
    """From now on, kernels in this process use the configurations for the current GPU.  Returns
    their file.

    Prints their number, or the reason if they are ignored; prints nothing if there are none.
    """
    gpu = machine.gpu()
    if gpu is None:
        return None
    saved, why = load(gpu)
    if why:
        say(f"The configurations tuned on this GPU are ignored: {why}.  {_AGAIN}")
    if saved is None or not saved.configs:
        return None
    _use(saved)
    count = plural(len(saved.configs), "configuration")
    say(
        f"{count} tuned on this GPU will be used where they fit; --no-tuned takes the committed "
        "ones."
    )
    return file_of(gpu)


def use_file(file: Path) -> None:
    """The same in another process, with the file that `use_saved` returned."""
    _use(TunedConfigs.model_validate_json(file.read_text(encoding="utf-8")))


def _use(saved: TunedConfigs) -> None:
    assert saved.environment.gpu is not None
    for operator, configs in grouped(saved.configs, lambda config: config.operator).items():
        operators.get(operator).tunable.use(saved.environment.gpu.name, configs)
