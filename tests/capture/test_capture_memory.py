"""The memory of captured inputs, and what is free on the host."""

import os
from pathlib import Path

import pytest
import tiny_models
import torch
from capture.exact import capture

from ssdprof.capture.layers import capture_bytes_per_token
from ssdprof.checkpoint.mixers import find_mixers
from ssdprof.environment import machine
from ssdprof.environment.machine import free_memory, host_memory


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_capture_bytes_are_those_of_the_captured_tensors(name: str):
    model = tiny_models.shared(name).base_model
    captured, _ = capture(name, tiny_models.prompt(50), model=model)
    sizes = [
        sum(t.numel() * t.element_size() for t in layer.inputs.tensors.values() if t.ndim > 2) // 50
        for layer in captured
    ]
    assert sizes == [capture_bytes_per_token(mixer) for mixer in find_mixers(model)]


def test_free_memory_of_the_host():
    assert 0 < host_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_ranks_share_the_hosts_memory(monkeypatch: pytest.MonkeyPatch):
    """Otherwise each rank would use half of it for captured inputs, and all of it for a model
    without a GPU.
    """
    monkeypatch.setattr(machine, "_available", lambda: 8000)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert host_memory() == free_memory(torch.device("cpu")) == 1000


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_limits_what_is_free_and_files_in_its_cache_do_not_count(
    version: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The parent group has a lower limit.  A downloaded checkpoint fills the cache up to the
    limit.
    """
    controller, prefix, limit, taken = (
        ("memory", "total_", "memory.limit_in_bytes", "memory.usage_in_bytes")
        if version == 1
        else ("", "", "memory.max", "memory.current")
    )

    def group(path: str, allowed: str, used: int, cached: int) -> None:
        folder = tmp_path / controller / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit).write_text(f"{allowed}\n")
        (folder / taken).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(
            f"{prefix}inactive_file {cached // 2}\n{prefix}active_file "
            f"{cached // 2}\n{prefix}anon 1\n"
        )

    (tmp_path / "meminfo").write_text(
        "MemFree:  1 kB\nMemAvailable:     100 kB\nHugePages_Total:  0\n"
    )
    (tmp_path / "own").write_text(f"3:cpuset:/\n0:{controller}:/jobs/mine\n")
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(machine, "_GROUPS", tmp_path)
    assert host_memory() == 100 * 1024
    group("jobs/mine", "90000" if version == 1 else "max", 60000, 0)
    assert host_memory() == (30000 if version == 1 else 100 * 1024)
    group("jobs", "80000", 79000, 28000)
    assert host_memory() == 29000
    # as in a container without its own view
    (tmp_path / "own").write_text(f"0:{controller}:/jobs/of/another/tree\n")
    assert host_memory() == 29000
    (tmp_path / "own").unlink()
    assert host_memory() == 100 * 1024
