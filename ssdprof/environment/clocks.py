"""Reads the GPU's clocks, temperature and throttle reasons from NVML during a measurement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import pynvml

from ssdprof.core.subject import Clocks

# The reasons for which a GPU is slower than it could be.  Idling and a clock limit set by the owner are not among
# them: an idle GPU is not in the timed region, and the clocks themselves show the limit.
_THROTTLE_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "temperature, by the driver",
    0x40: "temperature, by the hardware",
    0x80: "power brake",
}


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """NVML's mask of clock event reasons in words, without those that do not slow the GPU down."""
    return tuple(words for bit, words in _THROTTLE_REASONS.items() if bits & bit)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One reading of the GPU's state."""

    sm_mhz: int
    memory_mhz: int
    temperature_c: int
    reason_bits: int


class ClockWatch:
    """Reads the clocks when entered, at every `poll`, and on the way out if nothing polled.

        with ClockWatch() as watch:
            ...  # time something
            watch.poll()
        watch.clocks

    Poll while the GPU is still warm.  Without NVML or a GPU, `clocks` is None.
    """

    def __init__(self) -> None:
        self._readings: list[Reading] = []

    def __enter__(self) -> ClockWatch:
        self.poll()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if len(self._readings) == 1:
            self.poll()

    def poll(self) -> None:
        """Take a reading."""
        reading = read()
        if reading is not None:
            self._readings.append(reading)

    @property
    def clocks(self) -> Clocks | None:
        """The first and the last reading, and all throttle reasons of any reading."""
        if not self._readings:
            return None
        first, last = self._readings[0], self._readings[-1]
        bits = 0
        for reading in self._readings:
            bits |= reading.reason_bits
        return Clocks(
            sm_mhz=(first.sm_mhz, last.sm_mhz),
            memory_mhz=(first.memory_mhz, last.memory_mhz),
            temperature_c=(first.temperature_c, last.temperature_c),
            throttle_reasons=throttle_reasons(bits),
        )


def read() -> Reading | None:
    """torch's current GPU, now; None without a GPU, without NVML, or if the driver does not report it."""
    uuid = current_uuid()
    if uuid is None:
        return None
    with nvml_open() as nvml:
        if nvml is None:
            return None
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            return Reading(
                sm_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                memory_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
                temperature_c=nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                reason_bits=_reasons(nvml, handle),
            )
        except nvml.NVMLError:
            return None


def _reasons(nvml: Any, handle: Any) -> int:
    """NVML's mask of clock event reasons, which drivers before 535 have under another name."""
    try:
        bits: int = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return bits


def driver_version() -> str | None:
    """The version of the NVIDIA driver; None if NVML cannot report it."""
    with nvml_open() as nvml:
        try:
            return None if nvml is None else str(nvml.nvmlSystemGetDriverVersion())
        except pynvml.NVMLError:
            return None


def current_uuid() -> str | None:
    """The UUID of torch's current GPU, by which NVML finds it whatever CUDA_VISIBLE_DEVICES hides or reorders."""
    import torch

    if not torch.cuda.is_available():
        return None
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


@contextmanager
def nvml_open() -> Iterator[Any]:
    """Initialised NVML; None if its library cannot be loaded or the driver does not run."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()
