"""The configurations that `ssdprof tune` found, in the user's cache, with a file for each model of
GPU.
"""

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

_HINT = "'ssdprof tune' finds new ones, 'ssdprof tune --clear' forgets them."


def folder() -> Path:
    """$XDG_CACHE_HOME/ssdprof/tuned, or ~/.cache/ssdprof/tuned.

    A relative XDG_CACHE_HOME is ignored, as the XDG specification requires.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = cache if cache.is_absolute() else Path.home() / ".cache"
    return base / "ssdprof" / "tuned"


def file_of(gpu: Gpu) -> Path:
    """The file for GPUs of this name, which need not exist."""
    return folder() / f"{files.safe_name(gpu.name)}.json"


def load(gpu: Gpu) -> tuple[TunedConfigs | None, str]:
    """The valid configurations for GPUs of this name, and why what is stored is not valid.

    (configurations, "") if they are valid; (None, "") if nothing is stored; (None, reason) if the
    file cannot be read, or its configurations are not valid any more.
    """
    file = file_of(gpu)
    if not file.is_file():
        return None, ""
    try:
        saved = files.read_stored(file, _checked, TUNED_VERSION, _HINT)
    except SsdprofError as error:
        return None, error.message.rstrip(".")
    reason = _why_stale(saved, gpu)
    return (None, reason) if reason else (saved, "")


def _checked(document: object) -> TunedConfigs:
    """The record of a JSON document.  Raises ValueError if a configuration is not valid for its
    kernel.
    """
    saved = TunedConfigs.model_validate(document)
    for config in saved.configs:
        operators.get(config.operator).tunable.config(str(config.calls["kernel"]), config.settings)
    return saved


def keep(found_on: Environment, calls: TunedCalls, tuned: TunedConfig | None) -> Path:
    """Store the result of a search.  Returns the file.

    An earlier configuration for the same calls is deleted; if what is stored is not valid any more,
    all of it is.

    found_on: the machine of the search, with a GPU.
    calls: the calls for which it was.
    tuned: its result; None if no configuration was faster than the committed one.

    Raises the error of `files.unwritable` if the file cannot be written.
    """
    assert found_on.gpu is not None
    before, _ = load(found_on.gpu)
    configs = [config for config in before.configs if config.calls != calls] if before else []
    if tuned:
        configs.append(tuned)
    saved = TunedConfigs(
        ssdprof_version=__version__,
        kernels={
            name: kernels_hash(name)
            for name in dict.fromkeys(config.operator for config in configs)
        },
        environment=found_on,
        configs=tuple(configs),
    )
    file = file_of(found_on.gpu)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise files.unwritable(file.parent, error) from error
    files.write_text(file, saved.model_dump_json(indent=1) + "\n")
    return file


def clear() -> tuple[Path, ...]:
    """Delete the configurations of all GPUs.  Returns the deleted files.

    Raises the error of `files.unwritable` if one cannot be deleted.
    """
    deleted = tuple(sorted(folder().glob("*.json")))
    for file in deleted:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise files.unwritable(file, error) from error
    return deleted


def _why_stale(saved: TunedConfigs, gpu: Gpu) -> str:
    """Why the saved configurations are not valid for this GPU, these kernels and this Triton; empty
    if they are.
    """
    environment = saved.environment
    triton = installed_version("triton")
    tuned_on = environment.gpu.name if environment.gpu else "no GPU"
    if tuned_on != gpu.name:
        return f"they are of {tuned_on}, this is {gpu.name}"
    if any(digest != kernels_hash(name) for name, digest in saved.kernels.items()):
        return (
            f"the kernels have changed since (then ssdprof {saved.ssdprof_version}, now "
            f"{__version__})"
        )
    if environment.packages.get("triton") != triton:
        return (
            f"they were compiled by Triton {environment.packages.get('triton')}, this is {triton}"
        )
    return ""


# --- in use


def use_saved(say: Callable[[str], None]) -> Path | None:
    """Let kernels in this process use the configurations that are stored for the current GPU.

    Returns their file; None if there are no valid ones, or there is no GPU.

    say: prints a line.  It gets a sentence with the number of configurations, or with the reason
        why they are ignored; nothing if none are stored.
    """
    gpu = machine.gpu()
    if gpu is None:
        return None
    saved, reason = load(gpu)
    if reason:
        say(f"The configurations tuned on this GPU are ignored: {reason}.  {_HINT}")
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
    """Let kernels in this process use the configurations in a file that `use_saved` returned in
    another process.
    """
    _use(TunedConfigs.model_validate_json(file.read_text(encoding="utf-8")))


def _use(saved: TunedConfigs) -> None:
    """Let kernels in this process use these configurations, operator by operator."""
    assert saved.environment.gpu is not None
    for operator, configs in grouped(saved.configs, lambda config: config.operator).items():
        operators.get(operator).tunable.use(saved.environment.gpu.name, configs)
