"""The machine code of the shipped kernels, and what a change of their source does to it.

    python tests/kernels/machine_code.py --record           after an intended change, about ten minutes
    python tests/kernels/machine_code.py FOLDER [WORD]      before and after the change, into two folders; then diff -r

Compiles every launch of the TABLES of `compile_cases.py` for sm_90, without a GPU.  `--record` writes the resources and
a hash of the instructions of each kernel to `data/compiled.json`, which tests marked `compiler` compare, and a hash for
each operator to `ssdprof/kernels/machine_code.json`, which results name; with a later Triton, only the resources of the
shipped configurations, to `data/compiled-VERSION.json`.  With FOLDER, the instructions themselves are
written, a file for each kernel; with WORD, only launches with WORD in their table's name or label.  A launch's label
and index identify a kernel, so that it may be renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CAPABILITY = 90
HASHES = Path(__file__).parents[2] / "ssdprof" / "kernels" / "machine_code.json"


def operators_hashes(recorded: dict[str, str]) -> dict[str, str]:
    """Operator -> hash of the machine code of all its kernels: of the set of the kernels' hashes."""
    codes: dict[str, set[str]] = {"ssd": set(), "gdn": set(), "kda": set()}
    for name, text in recorded.items():
        codes.get(name[:3].lower(), codes["ssd"]).add(text.rpartition(" ")[2])
    return {name: hashlib.sha256(" ".join(sorted(found)).encode()).hexdigest() for name, found in codes.items()}


def record_hashes() -> None:
    import triton
    from compile_cases import TABLES
    from compile_target import CAPABILITIES, OLDEST, RECORDED, recorded_form

    recorded = {str(capability): recorded_form("SHIPPED", capability) for capability in CAPABILITIES}
    for table in TABLES if triton.__version__ == OLDEST else ():
        recorded[str(CAPABILITY)] |= recorded_form(table, CAPABILITY)
    RECORDED.write_text(json.dumps(recorded, indent=0) + "\n")
    if triton.__version__ == OLDEST:
        HASHES.write_text(json.dumps(operators_hashes(recorded[str(CAPABILITY)]), indent=1) + "\n")


def instructions(cubin: bytes) -> str:
    import compile_target
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass = subprocess.run([cuobjdump, "--dump-sass", file.name], capture_output=True, text=True, check=True).stdout
    return compile_target.instructions(sass)


def record(folder: Path, word: str) -> None:
    """One file for each kernel of each launch: its resources, then its instructions."""
    os.environ["TRITON_INTERPRET"] = "0"  # if it is not set, kernels are interpreted where there is no GPU
    import compile_cases
    import compile_target

    def with_code(kernel: Any) -> str:
        about = kernel.metadata
        header = f"{about.shared} bytes of shared memory, {about.num_warps} warps\n"
        return header + instructions(kernel.asm["cubin"])

    compile_target._resources = with_code  # type: ignore[assignment]
    folder.mkdir(parents=True, exist_ok=True)
    launches = {
        f"{table} {label}": run
        for table in compile_cases.TABLES
        for label, run in getattr(compile_cases, table).items()
    }
    chosen = {label: run for label, run in launches.items() if word in label}
    for label, kernels in compile_target._compile_all(chosen, CAPABILITY).items():
        for index, code in enumerate(kernels):
            name = re.sub(r"\W+", "_", f"{label} {index}")
            (folder / f"{name}.sass").write_text(str(code))


if __name__ == "__main__":
    if sys.argv[1] == "--record":
        record_hashes()
    else:
        record(Path(sys.argv[1]), *(sys.argv[2:] or [""]))
