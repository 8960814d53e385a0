"""Shows that a change of the kernels' source did not change their machine code.

    python tests/kernels/machine_code.py FOLDER [WORD]      # before and after the change, into two folders
    python tests/kernels/machine_code.py --compare FOLDER FOLDER

Compiles every launch of the modules in MODULES for sm_90, without a GPU, and writes each kernel's instructions to a
file of its own, without names of functions and without line numbers; with WORD, only launches with WORD in their
module's name or label.  `--compare` names every kernel whose instructions
differ, and exits with 1 if there is one.  A launch's label and index identify a kernel, so that it may be renamed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

MODULES = (
    "test_shipped_compile", "test_ssd_compile", "test_fused_compile", "test_fused_hopper_compile",
    "test_gdn_unfused_compile", "test_gdn_fused_compile", "test_gdn_hopper_compile",
)  # fmt: skip
CAPABILITY = 90


def instructions(cubin: bytes) -> str:
    """SASS, one instruction a line, with its address and its encoding."""
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass = subprocess.run([cuobjdump, "--dump-sass", file.name], capture_output=True, text=True, check=True).stdout
    return "\n".join(line.strip() for line in sass.splitlines() if re.match(r"\s*/\*", line)) + "\n"


def record(folder: Path, word: str) -> None:
    """One file for each kernel of each launch: its resources, then its instructions."""
    os.environ["TRITON_INTERPRET"] = "0"  # if it is not set, kernels are interpreted where there is no GPU
    import compile_target

    def with_code(kernel: Any, _metadata: object) -> str:
        about = kernel.metadata
        header = f"{about.shared} bytes of shared memory, {about.num_warps} warps\n"
        return header + instructions(kernel.asm["cubin"])

    compile_target._resources = with_code  # type: ignore[assignment]
    folder.mkdir(parents=True, exist_ok=True)
    launches = {
        f"{module} {table} {label}": run
        for module in MODULES
        for table in ("LAUNCHES", "ONE_LAUNCH")
        for label, run in getattr(import_module(module), table, {}).items()
    }
    chosen = {label: run for label, run in launches.items() if word in label}
    for label, kernels in compile_target._compile_all(chosen, CAPABILITY).items():
        for index, code in enumerate(kernels):
            name = re.sub(r"\W+", "_", f"{label} {index}")
            (folder / f"{name}.sass").write_text(str(code))


def compare(before: Path, after: Path) -> int:
    """1 if a kernel differs or is missing on one side, else 0."""
    names = sorted({file.name for folder in (before, after) for file in folder.glob("*.sass")})
    different = 0
    for name in names:
        sides = [(folder / name).read_text() if (folder / name).exists() else "" for folder in (before, after)]
        if sides[0] != sides[1]:
            different += 1
            lengths = " -> ".join(str(side.count("\n")) for side in sides)
            print(f"differs: {name} ({lengths} lines)")
    print(f"{len(names) - different} of {len(names)} kernels are equal")
    return int(different > 0 or not names)


if __name__ == "__main__":
    if sys.argv[1] == "--compare":
        sys.exit(compare(*map(Path, sys.argv[2:4])))
    record(Path(sys.argv[1]), *(sys.argv[2:] or [""]))
