"""A machine with a GPU and missing tools: errors name what Triton or the driver lacks, with a
remedy.
"""

import os
import pwd
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_nvml import FakeNvml
from triton import knobs

from ssdprof.environment import machine, toolchain
from ssdprof.environment.toolchain import (
    Check,
    needs,
    others_on_gpu,
    require_gpu,
    require_toolchain,
    unusable_gpu,
)
from ssdprof.errors import MissingCapabilityError
from ssdprof.jobs import doctor, limits
from ssdprof.jobs.options import ServedModelOptions
from ssdprof.jobs.run import capture
from ssdprof.jobs.target import find
from ssdprof.progress import Watcher


def driver(monkeypatch, **options: int):
    monkeypatch.setattr(machine, "pynvml", FakeNvml(**options))


@pytest.fixture
def furnished(tmp_path, monkeypatch) -> Path:
    """A machine with all tools, in a folder: bin/gcc, bin/apt-get, include/Python.h,
    lib/libcuda.so.1.
    """
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
    for name in (
        "CC",
        "TRITON_CACHE_DIR",
        "TRITON_HOME",
        "TRITON_LIBCUDA_PATH",
        "CUDA_VISIBLE_DEVICES",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(toolchain, "_LDCONFIG", str(tmp_path / "bin" / "ldconfig"))
    monkeypatch.setattr(sysconfig, "get_paths", lambda **_: {"include": str(tmp_path / "include")})
    return tmp_path


def need(name: str) -> Check:
    return next(need for need in needs() if need.name == name)


def lacking() -> list[str]:
    return [one.name for one in needs() if one.status == "missing"]


@pytest.mark.usefixtures("furnished")
def test_nothing_is_lacking(monkeypatch):
    assert lacking() == []
    require_toolchain()
    # the cache is in the working directory: a container's user ID may be no user's
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda _: {}[0])
    require_toolchain()


LINKED = "#!/bin/sh\necho '\tlibcuda.so.1 (libc6,x86-64) => {0}/libcuda.so.1'\n"
LOADED = "7f00-7f01 r-xp 00000000 00:4d 12    /usr/local/nvidia/lib64/libcuda.so.580.95\n"
NO_HEADERS = "#!/bin/sh\ngrep -q dlfcn && exit 1\n"
APT = "apt-get update && apt-get install -y"
TOLD = "export TRITON_LIBCUDA_PATH="
CACHE = "export TRITON_CACHE_DIR=/tmp/triton"
NO_DRIVER, LIBRARY, FAILS = (
    r"does not find libcuda\.so\.1",
    "lib/libcuda.so.1",
    "#!/bin/sh\nexit 1\n",
)


@pytest.mark.parametrize(
    ("files", "variables", "name", "words", "command"),
    [
        ({"bin/gcc": None}, {}, "C compiler", "there is no C compiler", f"{APT} gcc"),
        (
            {"include/Python.h": None, "bin/apt-get": None, "bin/pacman": ""},
            {},
            "Python headers",
            "Python's headers are not installed",
            "pacman -Syu python",
        ),
        ({}, {"CC": "icx"}, "C compiler", "CC=icx is not a program", "unset CC"),
        # Triton starts the program "" too
        ({}, {"CC": ""}, "C compiler", "CC= is not a program", "unset CC"),
        ({"bin/gcc": NO_HEADERS}, {}, "C library", r"gcc finds no dlfcn\.h", f"{APT} libc6-dev"),
        (
            {"include/Python.h": None},
            {},
            "Python headers",
            "Python's headers are not installed",
            "-dev",
        ),
        ({LIBRARY: None}, {}, "driver library", NO_DRIVER, "ldconfig"),
        (
            {LIBRARY: None, "maps": LOADED},
            {},
            "driver library",
            NO_DRIVER,
            f"{TOLD}/usr/local/nvidia/lib64",
        ),
        # Triton calls ldconfig before it reads LD_LIBRARY_PATH
        *(
            ({"bin/ldconfig": one}, {}, "driver library", NO_DRIVER, f"{TOLD}{{0}}/lib")
            for one in (None, FAILS)
        ),
        (
            {},
            {"TRITON_LIBCUDA_PATH": "/nowhere"},
            "driver library",
            "PATH=/nowhere does not hold",
            f"{TOLD}{{0}}/lib",
        ),
        (
            {},
            {"TRITON_LIBCUDA_PATH": "/nowhere", "LD_LIBRARY_PATH": ""},
            "driver library",
            "=/nowhere does not hold",
            "unset TRITON_LIBCUDA_PATH",
        ),
        ({}, {"TRITON_CACHE_DIR": "{0}/maps"}, "Triton's cache", "maps cannot be written", CACHE),
    ],
)
def test_what_is_lacking_is_named_with_one_command(
    furnished: Path, monkeypatch, files: dict[str, str | None], variables, name, words, command
):
    for file, content in files.items():
        if content is None:
            (furnished / file).unlink()
        else:
            (furnished / file).write_text(content.format(furnished))
            (furnished / file).chmod(0o755)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value.format(furnished))
    with pytest.raises(MissingCapabilityError, match=words) as caught:
        require_toolchain()
    assert lacking() == [name]
    assert caught.value.exit_code == 3
    assert caught.value.hint.startswith("Run: ")
    assert caught.value.hint.endswith(command.format(furnished))


def test_where_they_are_found(furnished: Path, monkeypatch):
    (furnished / "elsewhere").mkdir()
    (furnished / "elsewhere" / "libcuda.so.1").touch()
    (furnished / "bin" / "ldconfig").write_text(LINKED.format(furnished / "elsewhere"))
    assert need("driver library").detail == str(furnished / "elsewhere")  # before the environment
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", f"{furnished}/lib")
    assert need("driver library").detail == f"{furnished}/lib"
    (furnished / "bin" / "gcc").rename(furnished / "bin" / "icx")
    monkeypatch.setenv("CC", "icx")
    assert need("C compiler").detail.endswith("bin/icx")
    for name in ("TRITON_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(furnished / name))
        assert need("Triton's cache").detail.startswith(str(furnished / name))
        assert need("Triton's cache").detail == knobs.cache.dir


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_a_real_compiler_finds_the_c_library():
    assert need("C library").detail == "dlfcn.h"


def test_who_may_not_install_is_told_who_may(furnished: Path, monkeypatch):
    (furnished / "bin" / "gcc").unlink()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert need("C compiler").hint == "Run as root: apt-get update && apt-get install -y gcc"
    monkeypatch.setenv("CC", "icx")
    assert need("C compiler").hint == "Run: unset CC"


@pytest.mark.usefixtures("furnished")
def test_a_cache_that_cannot_be_used(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, _mode: "bin" in str(path))
        with pytest.raises(MissingCapabilityError, match=r"cache .* cannot be written"):
            require_toolchain()
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NODEV))
    with pytest.raises(MissingCapabilityError, match="is mounted noexec") as caught:
        require_toolchain()
    assert "TRITON_CACHE_DIR" in caught.value.hint


def test_folders_that_may_not_be_searched_are_lacking(furnished: Path, monkeypatch):
    """A container that runs with its own user ID often has root's home."""
    stat = os.stat

    def refuse(path, **options) -> os.stat_result:
        if str(path).startswith(f"{furnished}/root/"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    (furnished / "root").mkdir()
    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) != furnished / "root")
    monkeypatch.setenv("HOME", f"{furnished}/root")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{furnished}/root/lib:{furnished}/lib")
    assert lacking() == ["Triton's cache"]
    monkeypatch.setattr(
        sysconfig, "get_paths", lambda **_: {"include": f"{furnished}/root/include"}
    )
    assert need("Python headers").status == "missing"


def capture_demo(folder: Path):
    request = ServedModelOptions(model="demo")
    capture(find(request), folder / "captures", overwrite=False, watcher=Watcher())


def test_a_run_asks_before_anything_is_downloaded(furnished: Path, monkeypatch):
    (furnished / "bin" / "gcc").unlink()
    limits.check_replay((16,))  # the interpreter compiles nothing
    limits.check_capture()
    monkeypatch.setattr(limits, "INTERPRETED", False)
    monkeypatch.setattr(limits, "device", lambda: torch.device("cuda", 0))
    for check in (
        lambda: limits.check_replay((16,)),
        limits.check_capture,
        lambda: capture_demo(furnished),
    ):
        with pytest.raises(MissingCapabilityError, match="no C compiler"):
            check()
    driver(monkeypatch, cuda=11080)
    monkeypatch.setattr(limits, "device", lambda: torch.device("cpu"))
    with pytest.raises(MissingCapabilityError, match="torch cannot use one"):
        limits.check_replay((16,))


# --- the driver


@pytest.mark.usefixtures("furnished")
@pytest.mark.parametrize(
    ("seen", "why"), [(True, "Triton's interpreter is on"), (False, "torch sees none")]
)
def test_kernels_need_a_gpu_and_no_interpreter(monkeypatch, why, *, seen):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen)
    monkeypatch.setattr(toolchain, "INTERPRETED", seen)
    with pytest.raises(MissingCapabilityError, match=f"It needs an NVIDIA GPU, and {why}"):
        require_gpu("It needs", "")


def test_no_driver_and_no_gpu_are_nothing_to_install(monkeypatch):
    # the last driver is too old to report its CUDA version
    for gpus, cuda in ((-1, 12040), (0, 12040), (1, 0)):
        driver(monkeypatch, gpus=gpus, cuda=cuda)
        assert unusable_gpu() == ""


@pytest.mark.parametrize(
    ("built", "cuda", "hidden", "words"),
    [
        (
            "13.0",
            12040,
            None,
            "built for CUDA 13.0.  Update NVIDIA's driver.  Or run: pip install uv && uv pip",
        ),
        ("12.8", 12040, None, "torch cannot start one.  Run: python -c"),
        (
            None,
            12040,
            None,
            "this torch is built without CUDA.  Run: pip install uv && uv pip install",
        ),
        (
            "12.8",
            12080,
            "",
            (
                "CUDA_VISIBLE_DEVICES='' hides 2 NVIDIA GPUs from torch.  Run: unset "
                "CUDA_VISIBLE_DEVICES"
            ),
        ),
        *(
            ("12.8", 12080, one, f"CUDA_VISIBLE_DEVICES='{one}' hides")
            for one in ("2", "-1", "GPU-gone")
        ),
        # The variable is set, but is not the cause.
        *(
            ("12.8", 12080, one, "torch cannot start one.  Run: python -c")
            for one in ("GPU-1", "MIG-1234", "1,7")
        ),
        ("13.0", 12040, "0", "and this torch is built for CUDA 13.0"),
        (None, 12040, "0", "this torch is built without CUDA"),
    ],
)
def test_why_torch_uses_no_gpu(monkeypatch, built, cuda, hidden, words):
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


def test_other_processes_on_the_gpu_are_counted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for running, others in ((0, 0), (1, 0), (3, 2)):
        driver(monkeypatch, processes=running)
        assert others_on_gpu("GPU-1") == others
    driver(monkeypatch, gpus=-1)
    assert others_on_gpu("GPU-1") is None


def test_the_doctor_names_slices_company_and_needs(furnished: Path, monkeypatch):
    (furnished / "include" / "Python.h").unlink()
    found = doctor_of_a_slice(monkeypatch)
    assert (found["gpu slice"].status, found["gpu sharing"].status) == ("warn", "warn")
    assert "nvidia-smi -mig 0" in found["gpu slice"].hint
    assert found["gpu sharing"].detail == "2 other processes on it"
    assert found["C compiler"].status == "ok"
    assert found["Python headers"].status == "missing"
    assert found["Python headers"].hint.startswith(
        "Run: apt-get update && apt-get install -y python3."
    )
    assert all((one.hint == "") == (one.status == "ok") for one in found.values())


@pytest.mark.usefixtures("furnished")
def test_a_gpu_that_cuda_cannot_start_is_named(monkeypatch):
    """For example because another process uses it in exclusive mode, or because its memory is
    full.
    """

    def refuse(_) -> tuple[int, int]:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later.")

    found = doctor_of_a_slice(monkeypatch, refuse)
    assert found["gpu memory"].status == "missing"
    assert found["gpu memory"].detail == "CUDA cannot start the GPU: CUDA error: out of memory"
    assert found["C compiler"].status == "ok"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(
        MissingCapabilityError, match=r"cannot start the GPU: CUDA error: out of memory\."
    ) as caught:
        require_toolchain()
    assert caught.value.hint.endswith("nvidia-smi")


def doctor_of_a_slice(
    monkeypatch, memory: Callable[[object], tuple[int, int]] = lambda _: (1 << 30, 2 << 30)
) -> dict[str, doctor.Check]:
    """The doctor's output for a slice of a shared H200.  memory: free and total."""
    driver(monkeypatch, processes=3)
    gpu = SimpleNamespace(
        name="NVIDIA H200 MIG 1g.18gb", compute_capability="9.0", driver="570", cuda="12.8"
    )
    monkeypatch.setattr(doctor, "gpu", lambda: gpu)
    monkeypatch.setattr(doctor, "read_clocks", lambda: None)
    monkeypatch.setattr(doctor, "current_uuid", lambda: "GPU-1")
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return {one.name: one for one in doctor._gpu()}
