"""Takes single samples of calls: `Bench` is the interface, `CudaBench` the implementation for a GPU.

call:   from an idle GPU to the end of the work, through Python, launch overhead included.
device: the same work replayed from a CUDA graph: the time on the GPU alone.

Both start with a cold L2.  A third, `warm`, is the mean of several calls back to back, as many papers time.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ssdprof.measure.call import Run
from ssdprof.measure.events import cuda_event
from ssdprof.measure.faults import first_line, refuse_if_interrupted
from ssdprof.operators.operator import Output

WARM_CALLS = 10  # back to back, of one sample
_PAGE = 2 << 20  # bytes, CUDA's unit of allocation
_MOST_PADDING = 32  # pages


class CaptureError(Exception):
    """A call cannot be captured as a CUDA graph; the message is CUDA's or the kernel's."""


@dataclass(frozen=True)
class Recording:
    """A captured call; every replay writes to `output`."""

    graph: Any
    output: Output


class Bench(Protocol):
    @property
    def device(self) -> torch.device: ...

    def relocate(self, generator: np.random.Generator) -> None:
        """Place later recordings and calls elsewhere in memory.  No earlier recording may be alive."""

    def record(self, run: Run) -> Recording:
        """Capture a call.  Raises CaptureError."""

    def call_us(self, run: Run) -> float:
        """One call, cold."""

    def device_us(self, recording: Recording) -> float:
        """One replay, cold."""

    def warm_us(self, run: Run) -> float:
        """Mean of WARM_CALLS calls back to back, after one warm-up call."""


class CudaBench:
    """Times calls on the current stream of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        # four times the L2: replaces every line, and keeps the GPU busy while the host enqueues the timed work
        self._evictor = torch.zeros(max(256 << 20, 4 * l2_bytes) // 4, device=device)
        self._sink = torch.zeros((), device=device)
        self._start, self._stop = cuda_event(), cuda_event()
        self._pool = torch.cuda.graph_pool_handle()
        self._padding: torch.Tensor | None = None

    def relocate(self, generator: np.random.Generator) -> None:
        """Create a new memory pool, and hold a block of random size, so that most new memory has other addresses."""
        self._padding = None
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()  # otherwise the blocks of the last recordings would be reused
        size = int(generator.integers(1, _MOST_PADDING + 1)) * _PAGE
        with suppress(torch.OutOfMemoryError):  # if this little memory is missing, recording raises
            self._padding = torch.empty(size, dtype=torch.uint8, device=self.device)

    def record(self, run: Run) -> Recording:
        """Capture after one call on another stream, as CUDA graphs need.

        Recordings share their workspace until `relocate` is called.
        """
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        try:
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                run()
            torch.cuda.current_stream(self.device).wait_stream(stream)
            with torch.cuda.graph(graph, pool=self._pool):
                output = run()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # CUDA's, or the kernel's own, of any kind
            refuse_if_interrupted(error)
            torch.cuda.synchronize(self.device)
            self._pool = torch.cuda.graph_pool_handle()  # the old pool still waits for the end of the capture
            raise CaptureError(first_line(error)) from error
        return Recording(graph, output)

    def call_us(self, run: Run) -> float:
        """The GPU is idle when the call begins, so the launch time is not hidden."""
        self._evict_l2()
        torch.cuda.synchronize(self.device)
        self._start.record()
        run()
        self._stop.record()
        return self._elapsed_us()

    def device_us(self, recording: Recording) -> float:
        """The eviction still runs while the graph is enqueued, so it hides the launch time."""
        self._evict_l2()
        self._start.record()
        recording.graph.replay()
        self._stop.record()
        return self._elapsed_us()

    def warm_us(self, run: Run) -> float:
        """No eviction and no waits: the host launches ahead of the GPU, if it can."""
        run()
        torch.cuda.synchronize(self.device)
        self._start.record()
        for _ in range(WARM_CALLS):
            run()
        self._stop.record()
        return self._elapsed_us() / WARM_CALLS

    def _evict_l2(self) -> None:
        """Evict by reading: written lines would be stored during the timed region."""
        torch.amax(self._evictor, dim=0, out=self._sink)

    def _elapsed_us(self) -> float:
        self._stop.synchronize()
        return 1e3 * self._start.elapsed_time(self._stop)
