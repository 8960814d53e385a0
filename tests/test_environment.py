"""The machine's properties and what it lacks, with stand-ins for NVML, ncu and the driver."""

import json
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import torch
from fake_nvml import FakeNvml
from torchrun import MODULE, python

from ssdprof import operators
from ssdprof.core.target import Clocks
from ssdprof.environment import machine, toolchain
from ssdprof.jobs import doctor


def check(name: str) -> doctor.Check:
    return next(found for found in doctor.doctor() if found.name == name)


@pytest.mark.parametrize(("version", "racy"), [("3.6.0", True), ("3.9.0", False)])
def test_doctor_says_whether_the_compiler_makes_a_race_of_mamba_ssms_kernel(
    version, racy, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "INTERPRETED", False)
    monkeypatch.setattr(doctor.triton, "__version__", version)
    found = doctor._kernels()
    assert f"Triton {version} with ptxas" in found.detail
    assert ("operands of matrix products in flight" in found.detail) == racy


# --- collect


def test_collect_names_versions_and_neither_host_nor_user(monkeypatch):
    monkeypatch.setattr("platform.node", lambda: "secret-host")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    found = machine.collect()
    # PyPI names CUDA in the first only
    assert torch.__version__.startswith(found.packages["torch"])
    assert ("ptxas" in found.packages) == torch.cuda.is_available()
    if named := re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M):
        assert found.cpu == named[1].strip()
    text = json.dumps(found.model_dump())
    assert "secret" not in text
    assert str(Path.home()) not in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_there_is_none_and_no_clocks():
    assert machine.collect().gpu is None
    assert machine.read_clocks() is None


def test_each_operators_kernels_have_a_hash_of_their_own():
    assert len({machine.kernels_hash(name) for name in ("ssd", "gdn", "kda")}) == 3
    assert machine.kernels_hash("toy") == "", "one from outside has no bundled kernels"


# --- clocks


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("SwPowerCap", "power cap"),
        ("HwSlowdown", "hardware slowdown"),
        ("SyncBoost", "sync boost"),
        ("SwThermalSlowdown", "temperature, by the driver"),
        ("HwThermalSlowdown", "temperature, by the hardware"),
        ("HwPowerBrakeSlowdown", "power brake"),
        # idling and a set clock are no throttling
        ("GpuIdle", ""),
        ("ApplicationsClocksSetting", ""),
    ],
)
def test_reasons_are_nvmls_bits(monkeypatch, reason, word):
    nvml = FakeNvml(reasons=getattr(pynvml, f"nvmlClocksEventReason{reason}"))
    monkeypatch.setattr(machine, "pynvml", nvml)
    monkeypatch.setattr(machine, "current_uuid", lambda: "GPU-1234")
    clocks = machine.read_clocks()
    assert clocks.throttle_reasons == (word,) * bool(word)


def test_a_driver_that_does_not_tell_its_version(monkeypatch):
    monkeypatch.setattr(machine, "pynvml", FakeNvml())
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    sizes = {"multi_processor_count": 132, "total_memory": 1 << 30, "L2_cache_size": 1 << 20}
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, **sizes)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
    found = machine.gpu()
    assert (found.driver, found.compute_capability) == ("unknown", "9.0")


@pytest.mark.parametrize("broken", [False, True])
def test_nvml_is_asked_for_the_device_that_torch_means(monkeypatch, broken):
    nvml = FakeNvml(broken=broken)
    monkeypatch.setattr(machine, "pynvml", nvml)
    monkeypatch.setattr(machine, "current_uuid", lambda: "GPU-1234")
    expected = Clocks(
        sm_mhz=(1980, 1980),
        memory_mhz=(3201, 3201),
        temperature_c=(41, 41),
        throttle_reasons=("temperature, by the hardware",),
    )
    assert machine.read_clocks() == (None if broken else expected)
    assert nvml.open == 0


# --- doctor


@pytest.mark.parametrize(("fraction", "left"), [(1.0, 50), (0.5, 20)])
def test_free_memory_of_a_gpu_counts_what_torch_caches_and_a_limit(fraction, left, monkeypatch):
    known = dict(mem_get_info=(40, 100), memory_allocated=30, memory_reserved=40)
    for name, value in (known | dict(get_per_process_memory_fraction=fraction)).items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    assert machine.free_memory(torch.device("cuda", 0)) == left


@pytest.mark.parametrize("vendor", ["0x1022", "0x10de"])
def test_a_driver_is_proposed_only_for_a_gpu(vendor, tmp_path, monkeypatch):
    (tmp_path / "0000:00:01.0").mkdir()
    (tmp_path / "0000:00:01.0" / "vendor").write_text(f"{vendor}\n")
    monkeypatch.setattr(doctor, "_PCI", tmp_path)
    monkeypatch.setattr(doctor, "gpu", lambda: None)
    monkeypatch.setattr(doctor, "unusable_gpu", lambda: "")
    monkeypatch.setattr(doctor, "find_ncu", lambda: None)
    monkeypatch.setattr(doctor, "_NVIDIA_PARAMETERS", tmp_path / "params")
    checks = {found.name: found for found in doctor.doctor()}
    hints = " ".join(checks[name].hint for name in ("gpu", "ncu", "hardware counters"))
    proposes = ("nvidia-driver" in hints or "ubuntu-drivers" in hints, "nsight-compute" in hints)
    assert proposes == ((vendor == "0x10de"),) * 2
    assert ("has no NVIDIA GPU" in checks["gpu"].detail) == (vendor != "0x10de")
    assert "torch-backend" not in hints or vendor == "0x10de"


@pytest.mark.parametrize(("capability", "count"), [("9.0", 1), ("10.0", 0)])
def test_what_servers_choose_is_known_for_hopper(capability, count, monkeypatch):
    monkeypatch.setattr(doctor, "gpu", lambda: SimpleNamespace(compute_capability=capability))
    kernels = [operator.served for operator in operators.records()] * count
    assert [check.detail for check in doctor._served()] == kernels


def test_every_check_that_is_not_ok_has_a_hint():
    for found in doctor.doctor():
        assert (found.hint == "") == (found.status == "ok"), found


def test_each_requirement_is_checked_against_its_own_bounds(monkeypatch):
    versions = {"torch": "2.13.0", "triton": None, "numpy": "2.4.0"}
    monkeypatch.setattr(
        doctor,
        "requires",
        lambda _: ["torch>=2.11", "triton>=3.6", "numpy<2.4", 'x; extra == "dev"'],
    )
    monkeypatch.setattr(doctor, "installed_version", versions.get)
    statuses = {found.name: found.status for found in doctor._packages()}
    assert statuses == {"torch": "ok", "triton": "missing", "numpy": "warn"}


def test_the_drivers_word_on_counters(tmp_path, monkeypatch):
    parameters = tmp_path / "params"
    assert doctor._counters(parameters).detail == "no NVIDIA driver"
    parameters.write_text("RmMsg: \nRmProfilingAdminOnly: 0\n")
    assert doctor._counters(parameters).status == "ok"
    parameters.write_text("RmMsg: \nRmProfilingAdminOnly: 1\n")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert doctor._counters(parameters).status == "missing"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert doctor._counters(parameters).status == "ok"


def test_ncu_is_found_where_the_toolkit_puts_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(toolchain, "_NCU_FOLDERS", (f"{tmp_path}/cuda*/bin",))
    assert doctor._ncu().status == "missing"
    for toolkit, number in (("cuda-12.8", "2025.1.0"), ("cuda-13.0", "2025.3.1.0")):
        folder = tmp_path / toolkit / "bin"
        folder.mkdir(parents=True)
        (folder / "ncu").write_text(
            f"#!/bin/sh\necho 'NVIDIA (R) Nsight Compute'\necho 'Version {number} (build 1)'\n"
        )
        (folder / "ncu").chmod(0o755)
    found = doctor._ncu()
    assert (found.status, found.detail) == ("ok", "2025.3.1.0")
    (folder / "ncu").write_text("#!/bin/sh\nexit 3\n")
    assert doctor._ncu().detail.startswith("does not run")


@pytest.mark.parametrize(
    ("name", "command"),
    [("HF_HUB_DOWNLOAD_TIMEOUT", "doctor"), ("HF_HUB_ETAG_TIMEOUT", "run demo --dry-run")],
)
def test_a_variable_that_the_hubs_client_cannot_read_is_named(name, command):
    """In a process of its own: the client reads its variables when it is imported."""
    done = python(*MODULE, *command.split(), **{name: "abc"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f"error: {name}='abc' is not a whole number of seconds.",
        f"hint: Give one, or run: unset {name}",
    ]


def test_offline_mode_is_said(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert doctor._hub().status == "warn"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert doctor._hub().status == "ok"


def test_a_full_or_locked_cache_is_said(tmp_path, monkeypatch):
    def with_free(size: int):
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=size))
        return doctor._cache()

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "not" / "yet"))
    assert with_free(100 << 30).status == "ok"
    assert with_free(1 << 30).status == "warn"
    monkeypatch.setattr("os.access", lambda *_: False)
    assert with_free(100 << 30).status == "missing"


def test_a_gpu_that_torch_cannot_use_is_said(monkeypatch):
    """NVML finds the GPU, so kernels are not interpreted.  For example, its driver is too old."""
    monkeypatch.setattr(doctor, "INTERPRETED", False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert check("kernels").status == "missing"
    assert "TRITON_INTERPRET=1" in check("kernels").hint


@pytest.mark.gpu
def test_on_a_gpu_everything_about_it_is_known():
    gpu = machine.collect().gpu
    assert gpu.l2_bytes > 1 << 20
    assert gpu.driver != "unknown"
    clocks = machine.read_clocks()
    assert clocks.sm_mhz[0] > 0
    assert {check("gpu").status, check("gpu memory").status, check("clocks").status} == {"ok"}


def test_without_package_metadata_the_doctor_says_so(monkeypatch):
    """As if the sources ran without an installation."""

    def absent(_: str):
        raise PackageNotFoundError("ssdprof")

    monkeypatch.setattr(doctor, "requires", absent)
    (check,) = doctor._packages()
    assert (check.name, check.status) == ("ssdprof", "warn")
    assert "without package metadata" in check.detail


def test_a_password_in_the_hubs_address_is_masked(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://user:secret@hub")
    assert doctor._hub().detail == "https://...@hub, not contacted by this check"


@pytest.mark.parametrize(
    ("versions", "status"),
    [
        (("2.11.0+cu130", "3.6.0"), "ok"),
        (("2.13.0", "3.9.0"), "ok"),
        (("2.11.0", "3.9.0"), "warn"),
        (("2.14.0", "3.9.1"), "warn"),
        (("2.13.0", "3.10.0"), "warn"),
    ],
)
def test_a_pair_of_torch_and_triton_that_no_test_ran_with_is_told(versions, status):
    found = doctor._pair(*versions)
    assert found.status == status
    assert found.hint == ("" if status == "ok" else "Tested: 2.11 with 3.6; 2.13 with 3.6 or 3.9.")


def test_the_pairs_of_the_makefile_are_those_that_doctor_calls_tested():
    pairs = re.findall(
        r"PAIR = torch==(\S+) triton==(\S+)", (Path(__file__).parents[1] / "Makefile").read_text()
    )
    assert len(pairs) == 2
    assert all(doctor._pair(*pair).status == "ok" for pair in pairs)
