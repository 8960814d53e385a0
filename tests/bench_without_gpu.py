"""The command line of `ssdprof` with the simulated GPU of `fakes`, for tests that start processes.

python bench_without_gpu.py bench ssd ...
"""

import pytest
from fakes import pretend_gpu

from ssdprof.__main__ import main

if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as monkeypatch:
        pretend_gpu(monkeypatch)
        main()
