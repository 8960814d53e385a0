"""A machine with a GPU and missing tools: errors name what Triton or the driver lacks, with a remedy."""

from __future__ import annotations

import os
import pwd
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_nvml import FakeNvml
from triton import knobs

from ssdprof.environment import doctor, machine, toolchain
from ssdprof.environment.toolchain import Need, needs, others_on_gpu, require_toolchain, unusable_gpu
from ssdprof.errors import MissingCapabilityError
from ssdprof.jobs import limits
from ssdprof.jobs.request import CaptureRequest
from ssdprof.jobs.run import capture
from ssdprof.jobs.subject import find
from ssdprof.progress import Unwatched


def driver(monkeypatch: pytest.MonkeyPatch, **options: int) -> None:
    monkeypatch.setattr(machine, "pynvml", FakeNvml(**options))


@pytest.fixture
def furnished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with all tools, in a folder: bin/gcc, bin/apt-get, include/Python.h, lib/libcuda.so.1."""
    for name in ("bin/gcc", "bin/apt-get", "bin/ldconfig", "include/Python.h", "lib/libcuda.so.1"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch(mode=0o755)
    for name in ("gcc", "ldconfig"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "maps").touch()
    monkeypatch.setattr(toolchain, "_MAPS", str(tmp_path / "maps"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "lib"))
    for name in ("CC", "TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_LIBCUDA_PATH", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(toolchain, "_LDCONFIG", str(tmp_path / "bin" / "ldconfig"))
    monkeypatch.setattr(sysconfig, "get_paths", lambda **_: {"include": str(tmp_path / "include")})
    return tmp_path


def need(name: str) -> Need:
    return next(need for need in needs() if need.name == name)


@pytest.mark.usefixtures("furnished")
def test_nothing_is_lacking() -> None:
    assert all(need.found for need in needs()), list(needs())
    require_toolchain()


@pytest.mark.parametrize(
    ("gone", "words", "command"),
    [
        ("bin/gcc", "there is no C compiler", "apt-get install -y gcc"),
        ("include/Python.h", "Python's headers are not installed", "-dev"),
        ("lib/libcuda.so.1", r"does not find libcuda\.so\.1", "ldconfig"),
    ],
)
def test_what_is_lacking_is_named_with_one_command(furnished: Path, gone: str, words: str, command: str) -> None:
    (furnished / gone).unlink()
    with pytest.raises(MissingCapabilityError, match=words) as caught:
        require_toolchain()
    assert caught.value.exit_code == 3
    assert caught.value.hint.startswith("Run: ")
    assert caught.value.hint.endswith(command)
    assert sum(not need.found for need in needs()) == 1


def test_a_compiler_without_the_c_librarys_headers(furnished: Path) -> None:
    (furnished / "bin" / "gcc").write_text("#!/bin/sh\ngrep -q dlfcn && exit 1\n")
    with pytest.raises(MissingCapabilityError, match=r"bin/gcc finds no dlfcn\.h of the C library") as caught:
        require_toolchain()
    assert caught.value.hint == "Run: apt-get update && apt-get install -y libc6-dev"
    assert [need.name for need in needs() if not need.found] == ["C library"]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_a_real_compiler_finds_the_c_library() -> None:
    assert next(need for need in needs() if need.name == "C library").found == "dlfcn.h"


def test_the_folder_of_a_loaded_driver_is_named(furnished: Path) -> None:
    (furnished / "lib" / "libcuda.so.1").unlink()
    (furnished / "maps").write_text("7f00-7f01 r-xp 00000000 00:4d 12    /usr/local/nvidia/lib64/libcuda.so.580.95\n")
    with pytest.raises(MissingCapabilityError) as caught:
        require_toolchain()
    assert caught.value.hint == "Run: export TRITON_LIBCUDA_PATH=/usr/local/nvidia/lib64"


def test_commands_are_those_of_the_machines_package_manager(furnished: Path) -> None:
    (furnished / "bin" / "apt-get").rename(furnished / "bin" / "apk")
    (furnished / "bin" / "gcc").unlink()
    assert next(iter(needs())).command == "apk add gcc"


def test_the_compiler_that_cc_names_is_the_one(furnished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "icx")
    with pytest.raises(MissingCapabilityError, match="CC=icx is not a program") as caught:
        require_toolchain()
    assert caught.value.hint == "Run: unset CC"
    (furnished / "bin" / "gcc").rename(furnished / "bin" / "icx")
    require_toolchain()
    (furnished / "bin" / "icx").rename(furnished / "bin" / "gcc")
    monkeypatch.setenv("CC", "")  # Triton also starts the program with this name
    assert (need("C compiler").found, need("C compiler").command) == ("", "unset CC")


def test_the_linkers_cache_comes_before_the_environment(furnished: Path) -> None:
    elsewhere = furnished / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "libcuda.so.1").touch()
    ldconfig = furnished / "bin" / "ldconfig"
    ldconfig.write_text(f"#!/bin/sh\necho '\tlibcuda.so.1 (libc6,x86-64) => {elsewhere}/libcuda.so.1'\n")
    assert need("driver library").found == str(elsewhere)


def test_without_a_linkers_cache_triton_must_be_told_the_folder(furnished: Path) -> None:
    """Triton calls ldconfig before it reads LD_LIBRARY_PATH."""
    (furnished / "bin" / "ldconfig").unlink()
    with pytest.raises(MissingCapabilityError, match=r"does not find libcuda\.so\.1") as caught:
        require_toolchain()
    assert caught.value.hint == f"Run: export TRITON_LIBCUDA_PATH={furnished}/lib"


def test_a_folder_that_triton_is_told_must_hold_the_library(furnished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", "/nowhere")
    with pytest.raises(MissingCapabilityError, match=r"TRITON_LIBCUDA_PATH=/nowhere does not hold libcuda") as caught:
        require_toolchain()
    assert caught.value.hint == f"Run: export TRITON_LIBCUDA_PATH={furnished}/lib"
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    assert need("driver library").command == "unset TRITON_LIBCUDA_PATH"
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(furnished / "lib"))
    require_toolchain()


def test_who_may_not_install_is_told_who_may(furnished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (furnished / "bin" / "gcc").unlink()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert need("C compiler").hint == "Run as root: apt-get update && apt-get install -y gcc"
    monkeypatch.setenv("CC", "icx")
    assert need("C compiler").hint == "Run: unset CC"


@pytest.mark.usefixtures("furnished")
def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, _mode: "bin" in str(path))
    with pytest.raises(MissingCapabilityError, match=r"cache .* cannot be written") as caught:
        require_toolchain()
    assert "TRITON_CACHE_DIR" in caught.value.hint


def test_a_cache_from_which_nothing_can_be_loaded(furnished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(furnished / "maps"))
    with pytest.raises(MissingCapabilityError, match="maps cannot be written"):  # a file
        require_toolchain()
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NODEV))
    with pytest.raises(MissingCapabilityError, match="is mounted noexec") as caught:
        require_toolchain()
    assert "TRITON_CACHE_DIR" in caught.value.hint


def test_folders_that_may_not_be_searched_are_lacking(furnished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that runs with its own user ID often has root's home."""
    stat = os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{furnished}/root/"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    (furnished / "root").mkdir()
    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) != furnished / "root")
    monkeypatch.setenv("HOME", f"{furnished}/root")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{furnished}/root/lib:{furnished}/lib")
    assert [one.name for one in needs() if not one.found] == ["Triton's cache"]
    monkeypatch.setattr(sysconfig, "get_paths", lambda **_: {"include": f"{furnished}/root/include"})
    assert need("Python headers").found == ""


@pytest.mark.usefixtures("furnished")
def test_the_cache_is_where_triton_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TRITON_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
        found = need("Triton's cache").found
        assert found.startswith(str(tmp_path / name))
        assert found == knobs.cache.dir


@pytest.mark.usefixtures("furnished")
def test_a_user_without_a_home_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is in the working directory.  A container may run with a user ID that no user has."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda _: {}[0])
    require_toolchain()


def capture_demo(folder: Path) -> None:
    request = CaptureRequest(model="demo")
    capture(find(request), folder / "captures", overwrite=False, watcher=Unwatched())


def test_a_run_asks_before_anything_is_downloaded(furnished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (furnished / "bin" / "gcc").unlink()
    limits.check_replay((16,))  # the interpreter compiles nothing
    limits.check_capture()
    monkeypatch.setattr(limits, "INTERPRETED", False)
    monkeypatch.setattr(limits, "device", lambda: torch.device("cuda", 0))
    for check in (lambda: limits.check_replay((16,)), limits.check_capture, lambda: capture_demo(furnished)):
        with pytest.raises(MissingCapabilityError, match="no C compiler"):
            check()
    driver(monkeypatch, cuda=11080)
    monkeypatch.setattr(limits, "device", lambda: torch.device("cpu"))
    with pytest.raises(MissingCapabilityError, match="torch cannot use one"):
        limits.check_replay((16,))


# --- the driver


def test_no_driver_and_no_gpu_are_nothing_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, cuda in ((-1, 12040), (0, 12040), (1, 0)):  # the last driver is too old to report its CUDA version
        driver(monkeypatch, gpus=gpus, cuda=cuda)
        assert unusable_gpu() == ""


@pytest.mark.parametrize(
    ("built", "cuda", "hidden", "words"),
    [
        ("13.0", 12040, None, "built for CUDA 13.0.  Update NVIDIA's driver, or run: pip install uv && uv pip install"),
        ("12.8", 12040, None, "torch cannot start one.  Run: python -c"),
        (None, 12040, None, "this torch is built without CUDA.  Run: pip install uv && uv pip install"),
        ("12.8", 12080, "", "CUDA_VISIBLE_DEVICES='' hides 2 NVIDIA GPUs from torch.  Run: unset CUDA_VISIBLE_DEVICES"),
        ("12.8", 12080, "2", "CUDA_VISIBLE_DEVICES='2' hides"),
        ("12.8", 12080, "-1", "CUDA_VISIBLE_DEVICES='-1' hides"),
        ("12.8", 12080, "none", "CUDA_VISIBLE_DEVICES='none' hides"),
        ("12.8", 12080, "²", "CUDA_VISIBLE_DEVICES='²' hides"),
        ("12.8", 12080, "GPU-gone", "CUDA_VISIBLE_DEVICES='GPU-gone' hides"),
        ("12.8", 12080, "MIG-gone,0", "CUDA_VISIBLE_DEVICES='MIG-gone,0' hides"),
        # The variable is set, but is not the cause.
        ("12.8", 12080, "GPU-1234", "torch cannot start one.  Run: python -c"),
        ("12.8", 12080, "GPU-1", "torch cannot start one.  Run: python -c"),
        ("12.8", 12080, "MIG-1234", "torch cannot start one.  Run: python -c"),
        ("12.8", 12080, "1,7", "torch cannot start one.  Run: python -c"),
        ("13.0", 12040, "0", "and this torch is built for CUDA 13.0"),
        (None, 12040, "0", "this torch is built without CUDA"),
    ],
)
def test_why_torch_uses_no_gpu(
    monkeypatch: pytest.MonkeyPatch, built: str | None, cuda: int, hidden: str | None, words: str
) -> None:
    driver(monkeypatch, gpus=2, cuda=cuda)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if hidden is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert words in unusable_gpu()
    found = next(one for one in doctor.doctor() if one.name == "gpu")
    assert (found.status, found.hint) == ("missing", unusable_gpu())


def test_other_processes_on_the_gpu_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for running, others in ((0, 0), (1, 0), (3, 2)):
        driver(monkeypatch, processes=running)
        assert others_on_gpu("GPU-1") == others
    driver(monkeypatch, gpus=-1)
    assert others_on_gpu("GPU-1") is None


def test_the_doctor_names_slices_company_and_needs(furnished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (furnished / "include" / "Python.h").unlink()
    found = doctor_of_a_slice(monkeypatch)
    assert (found["gpu slice"].status, found["gpu sharing"].status) == ("warn", "warn")
    assert "nvidia-smi -mig 0" in found["gpu slice"].hint
    assert found["gpu sharing"].detail == "2 other processes on it"
    assert found["C compiler"].status == "ok"
    assert found["Python headers"].status == "missing"
    assert found["Python headers"].hint.startswith("Run: apt-get update && apt-get install -y python3.")
    assert all((one.hint == "") == (one.status == "ok") for one in found.values())


@pytest.mark.usefixtures("furnished")
def test_a_gpu_that_cuda_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example because another process uses it in exclusive mode, or because its memory is full."""

    def refuse(_: object) -> tuple[int, int]:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later.")

    found = doctor_of_a_slice(monkeypatch, refuse)
    assert found["gpu memory"].status == "missing"
    assert found["gpu memory"].detail == "CUDA cannot start the GPU: CUDA error: out of memory"
    assert found["C compiler"].status == "ok"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(MissingCapabilityError, match=r"cannot start the GPU: CUDA error: out of memory\.") as caught:
        require_toolchain()
    assert caught.value.hint.endswith("nvidia-smi")


def doctor_of_a_slice(
    monkeypatch: pytest.MonkeyPatch, memory: Callable[[object], tuple[int, int]] = lambda _: (1 << 30, 2 << 30)
) -> dict[str, doctor.Check]:
    """The doctor's output for a slice of a shared H200.  memory: free and total."""
    driver(monkeypatch, processes=3)
    gpu: Any = SimpleNamespace(name="NVIDIA H200 MIG 1g.18gb", compute_capability="9.0", driver="570", cuda="12.8")
    monkeypatch.setattr(doctor, "gpu", lambda: gpu)
    monkeypatch.setattr(doctor, "read_clocks", lambda: None)
    monkeypatch.setattr(doctor, "current_uuid", lambda: "GPU-1")
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return {one.name: one for one in doctor._gpu()}
