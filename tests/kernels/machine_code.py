"""Records the machine code of the shipped kernels, after an intended change; about ten minutes.

    python tests/kernels/machine_code.py

Compiles every launch of the TABLES of `compile_cases.py` for sm_90, without a GPU.  Writes the
resources and a hash of the instructions of each kernel to `data/compiled.json`, which tests marked
`compiler` compare, and a hash for each operator to `ssdprof/kernels/machine_code.json`, which
results name; with a later Triton, only the resources of the shipped configurations, to
`data/compiled-VERSION.json`.  A launch's label and index identify a kernel, so that it may be
renamed.
"""

import hashlib
import json
from pathlib import Path

CAPABILITY = 90
HASHES = Path(__file__).parents[2] / "ssdprof" / "kernels" / "machine_code.json"


def operators_hashes(recorded: dict[str, str]) -> dict[str, str]:
    """Operator -> hash of the machine code of all its kernels: of the set of the kernels'
    hashes.
    """
    codes: dict[str, set[str]] = {"ssd": set(), "gdn": set(), "kda": set()}
    for name, text in recorded.items():
        codes.get(name[:3].lower(), codes["ssd"]).add(text.rpartition(" ")[2])
    return {
        name: hashlib.sha256(" ".join(sorted(found)).encode()).hexdigest()
        for name, found in codes.items()
    }


def main() -> None:
    import triton
    from compile_cases import TABLES
    from compile_target import CAPABILITIES, OLDEST, RECORDED, recorded_form

    recorded = {
        str(capability): recorded_form("SHIPPED", capability) for capability in CAPABILITIES
    }
    for table in TABLES if triton.__version__ == OLDEST else ():
        recorded[str(CAPABILITY)] |= recorded_form(table, CAPABILITY)
    RECORDED.write_text(json.dumps(recorded, indent=0) + "\n")
    if triton.__version__ == OLDEST:
        HASHES.write_text(json.dumps(operators_hashes(recorded[str(CAPABILITY)]), indent=1) + "\n")


if __name__ == "__main__":
    main()
