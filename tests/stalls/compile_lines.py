"""Compile our kernels for sm_90 without a GPU, as the profiled process does, and list the
instructions' source lines.

    python compile_lines.py          JSON on stdout: kernel -> ptx, plain, inlined, called

ptx:      Triton's PTX, with the calls that led to each .loc in remarks
plain:    (instruction, file, line) of that PTX's machine code
inlined:  (instruction, line of the PTX) of the same machine code
called:   (instruction, file, line) of the machine code that Triton compiled with `target` installed
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from compile_target import _AbsentGpu, on_meta
from kernel_cases import EXACT, GDNCase, SSDCase
from triton.runtime.jit import JITFunction

from ssdprof.kernels.gdn.config import GDNPortableConfig
from ssdprof.kernels.gdn.portable import portable_launch as gdn_portable_launch
from ssdprof.kernels.gdn.recurrent import blocks_of, recurrent_launch
from ssdprof.kernels.gdn.unfused.pipeline import six_stages
from ssdprof.kernels.ssd.config import SSDPortableConfig
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig
from ssdprof.kernels.ssd.hopper.launch import hopper_launch
from ssdprof.kernels.ssd.portable import portable_launch
from ssdprof.kernels.ssd.unfused import five_stages
from ssdprof.stalls import profiled

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def assembled(ptx: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "a.ptx"
        cubin = Path(folder) / "a.cubin"
        source.write_text(ptx)
        command = [BINARIES / "ptxas", "-lineinfo", "--gpu-name=sm_90a", source, "-o", cubin]
        subprocess.run(command, check=True, capture_output=True)
        return cubin.read_bytes()


def listing(cubin: bytes, lines: str) -> list[tuple[str, str, int]]:
    """(instruction, file, line); lines: nvdisasm's option that selects the kind of line."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [BINARIES / "nvdisasm", lines, "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = []
    place = ("", 0)
    for row in text.splitlines():
        if named := re.match(r'\s*//## File "([^"]+)", line (\d+)', row):
            place = (named[1], int(named[2]))
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", row):
            found.append((instruction[1], *place))
    return found


def main():
    triton.runtime.driver.set_active(_AbsentGpu(90))
    profiled.install()
    rename = profiled.name_call_sites
    run = JITFunction.run
    made = []
    found = {}

    def remember(ptx: str) -> str:
        made.append(ptx)
        return rename(ptx)

    def compile_only(self, *args, grid, warmup: bool, **kwargs):
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        plain = assembled(made[-1])
        found[self.__name__] = {
            "ptx": made[-1],
            "plain": listing(plain, "-g"),
            "inlined": [(instruction, line) for instruction, _, line in listing(plain, "-gp")],
            "called": listing(compiled.asm["cubin"], "-g"),
        }

    profiled.name_call_sites = remember
    JITFunction.run = compile_only
    case = SSDCase(seqlen=1024, heads=4, headdim=64, dstate=128, dtype=torch.bfloat16)
    gated = on_meta(
        SSDCase(
            seqlen=1024, heads=4, headdim=64, dstate=128, dtype=torch.bfloat16, gate=True
        ).inputs()
    )
    five_stages(gated, EXACT)
    portable_launch(gated, EXACT, SSDPortableConfig.choose(gated, (9, 0), EXACT))(gated)
    ungated = on_meta(case.inputs())
    hopper_launch(ungated, EXACT, SSDHopperConfig(segment=4))(ungated)
    long = GDNCase(
        seqlen=4096, key_heads=2, values_per_key=2, key_dim=128, value_dim=128, dtype=torch.bfloat16
    )
    delta = on_meta(long.inputs())
    six_stages(delta, EXACT)
    config = GDNPortableConfig.choose(delta, (9, 0), 132)
    assert config.segment, "a sequence that is cut has a warm-up"
    gdn_portable_launch(delta, EXACT, config, state_v_first=False)(delta)
    recurrent_launch(delta, blocks_of(delta))(delta)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
