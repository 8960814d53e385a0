"""A stand-in for pynvml, on a machine with some GPUs."""

import pynvml


class FakeNvml:
    """gpus: their number; -1: no driver.  cuda: the driver's version of it; 0: the driver is too
    old to tell.

    processes: on each GPU.  reasons: of throttling, as NVML's bits.  broken: no GPU has the UUID.
    `open`: calls of nvmlInit without nvmlShutdown.
    """

    NVMLError = pynvml.NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(
        self,
        gpus: int = 1,
        cuda: int = 12040,
        processes: int = 1,
        broken: bool = False,
        reasons: int = 0x40,
    ) -> None:
        self._reasons = reasons
        self.gpus = gpus
        self.cuda = cuda
        self.processes = processes
        self.broken = broken
        self.open = 0

    def nvmlInit(self) -> None:
        if self.gpus < 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        if not self.cuda:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"GPU-{index}234"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if self.broken:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: str) -> list[int]:
        return [0] * self.processes

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        assert handle == "GPU-1234"
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetTemperature(self, _handle: str, _sensor: int) -> int:
        return 41

    def nvmlDeviceGetCurrentClocksEventReasons(self, _handle: str) -> int:
        return self._reasons
