"""Compiles kernels for GPUs that this machine does not have, with the arguments that their
launchers pass.

A module names its launches in a dictionary, label -> function without arguments that calls
launchers with tensors on torch's meta device (`on_meta` makes them).  `compiled(module,
capability)` runs all of them in a separate process.  There Triton compiles instead of interpreting,
and a launch ends after the compilation.  Products are not fused with
sums unless a launcher requests it: this will be the default of later Triton versions.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
from operand_races import racy_writes
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

CAPABILITIES = (80, 90, 100)  # A100, H100 and H200, B200
# limit of one program
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One kernel as compiled by ptxas.

    spilled_bytes: stack of one thread
    racy_writes: writes to a register of an operand of an asynchronous matrix product that may still
        read it (`operand_races.py`)
    lost_addresses: operands of such products whose register does not hold an address in shared
    memory
    idle_barriers: mbarriers that are initialised but never used or invalidated; Triton may reuse
    their memory
    fuses: whether the compiler may fuse a product and a sum into one instruction with one rounding
    parameters, counted_parameters: number of parameters in the binary, and as counted by a direct
    launch
    code: hash of the instructions
    """

    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    num_warps: int
    racy_writes: int
    lost_addresses: int
    idle_barriers: int
    fuses: bool
    parameters: int
    counted_parameters: int
    code: str


@cache
def compiled(module: str, capability: int, launches: str = "LAUNCHES") -> dict[str, list[Compiled]]:
    """Label -> its kernels, in the order of the launches, for every entry of `module.launches`."""
    command = [sys.executable, __file__, module, launches, str(capability)]
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "0"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    by_label = json.loads(result.stdout)
    return {
        label: [Compiled(**kernel) for kernel in kernels] for label, kernels in by_label.items()
    }


def on_meta(inputs: Any) -> Any:
    """A dataclass with its tensors moved to the meta device: same strides, no memory, an aligned
    address.
    """
    tensors = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return replace(
        inputs,
        **{
            name: torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            )
            for name, tensor in tensors.items()
            if isinstance(tensor, torch.Tensor)
        },
    )


OLDEST = "3.6.0"  # the Triton of the recorded results and hashes
_OTHER = "" if triton.__version__ == OLDEST else f"-{triton.__version__}"
RECORDED = Path(__file__).parent / "data" / f"compiled{_OTHER}.json"


def recorded_form(table: str, capability: int) -> dict[str, str]:
    """Launch and number of a kernel -> name, registers, stack, shared memory, warps and hash of its
    instructions.
    """
    return {
        f"{table} {label} {index}": f"{one.kernel} {one.registers} {one.spilled_bytes} "
        f"{one.shared_bytes} {one.num_warps} {one.code}"
        for label, kernels in compiled("compile_cases", capability, table).items()
        for index, one in enumerate(kernels)
    }


class _AbsentGpu:
    """Replaces the driver that Triton queries before it compiles."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def _resources(kernel: Any) -> Compiled:
    from ssdprof.kernels.launch import parameter_count

    binaries = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        usage, code, sections = (
            subprocess.run(
                [binaries / "cuobjdump", dump, cubin.name],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for dump in ("--dump-resource-usage", "--dump-sass", "--dump-elf")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return Compiled(
        kernel=kernel.metadata.name,
        registers=int(found[1]),
        spilled_bytes=int(found[2]),
        shared_bytes=kernel.metadata.shared,
        num_warps=kernel.metadata.num_warps,
        racy_writes=len(racy_writes(code)),
        lost_addresses=_lost_addresses(code),
        idle_barriers=_idle_barriers(kernel.asm["ttgir"]),
        fuses=kernel.metadata.enable_fp_fusion,
        parameters=sections.count("EIATTR_KPARAM_INFO"),
        counted_parameters=parameter_count(kernel.asm["ptx"]),
        code=hashlib.sha256(instructions(code).encode()).hexdigest()[:16],
    )


def instructions(sass: str) -> str:
    """One instruction a line, with its address and encoding, without names of functions and line
    numbers.
    """
    return "\n".join(line.strip() for line in sass.splitlines() if re.match(r"\s*/\*", line)) + "\n"


def _lost_addresses(code: str) -> int:
    """Operands of products whose address is not derived from 14 bits of another one by copies, sums
    and bit operations.

    Triton 3.9 uses 15 bits.  ptxas 12.8 reuses some registers that still hold such an address
    (benchmarks/log/ssd.md#row-57).  Spilled addresses are not followed.
    """
    instructions = re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?([^\s;]+)\s*([^;]*);", code)
    written = {}  # register -> the last instruction so far that writes it
    sources = []  # instruction -> the instructions that wrote its operands
    lost = 0

    def from_shared_memory(at: int) -> bool:
        name, operands = instructions[at]
        if name.startswith(("SGXT", "USGXT", "LDL")) or re.search(r"\b0x[37]fff\b", operands):
            return True
        followed = name.startswith(
            (
                "R2UR",
                "MOV",
                "UMOV",
                "IMAD.MOV",
                "IMAD.U32",
                "IADD",
                "UIADD",
                "VIADD",
                "LOP3",
                "ULOP3",
            )
        )
        return followed and any(map(from_shared_memory, sources[at]))

    for at, (name, operands) in enumerate(instructions):
        product = re.search(r"gdesc\[UR(\d+)\]", operands)
        if product and name.startswith("HGMMA"):
            first = int(product[1])
            from_registers = re.match(r"R\d+, R", operands)
            for register in (
                (f"UR{first + 2}",) if from_registers else (f"UR{first}", f"UR{first + 2}")
            ):
                lost += register not in written or not from_shared_memory(written[register])
        words = re.findall(r"\bU?R\d+\b", operands)
        stores = name.startswith(("ST", "BRA", "BAR", "HGMMA", "RED"))
        sources.append([written[word] for word in words[0 if stores else 1 :] if word in written])
        if words and not stores:
            written[words[0]] = at
    return lost


def _idle_barriers(ttgir: str) -> int:
    """Rings of barriers that are initialised and never used (benchmarks/log/gdn.md, row 35)."""
    lines = [line.strip() for line in ttgir.splitlines()]

    def users(name: str) -> set[str]:
        """Operations on a ring and on its elements."""
        found = set()
        for line in lines:
            made, _, operation = line.rpartition(" = ") if line.startswith("%") else ("", "", line)
            if re.search(rf"{name}\b", operation):
                found |= (
                    users(made) if "ttg.memdesc_index" in operation else {operation.split(" ")[0]}
                )
        return found

    rings = re.findall(r"(%\w+) = ttg.local_alloc : \(\) -> !ttg.memdesc<[\dx]*xi64", ttgir)
    return [users(name) for name in rings].count({"ttng.init_barrier"})


def _compile_all(
    launches: dict[str, Callable[[], object]], capability: int
) -> dict[str, list[Compiled]]:
    triton.runtime.driver.set_active(_AbsentGpu(capability))
    kernels = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        kernels.append(_resources(kernel))

    JITFunction.run = compile_only
    result = {}
    for label, launch in launches.items():
        kernels.clear()
        launch()
        result[label] = list(kernels)
    return result


if __name__ == "__main__":
    module, launches, capability = sys.argv[1:]
    result = _compile_all(getattr(import_module(module), launches), int(capability))
    print(
        json.dumps(
            {label: [asdict(kernel) for kernel in kernels] for label, kernels in result.items()}
        )
    )
