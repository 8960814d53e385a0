# memory that a kernel should have written holds NaN
from kernels.conftest import poisoned_memory  # noqa: F401
