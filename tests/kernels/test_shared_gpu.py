"""Processes that share a GPU: the GPU switches contexts in the middle of launches, at any
instruction.

    python test_shared_gpu.py

is one of them: it repeats calls, requires the same bits each time, and prints "right".
"""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from kernel_cases import BF16, GDNCase, SSDCase
from targets import GDN_ON_HOPPER, ON_HOPPER, TARGETS, gdn_hopper_by

from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig
from ssdprof.kernels.precision import Precision

PROCESSES, PATIENCE_S, ROUNDS = 8, 300, 40


@pytest.mark.gpu
@ON_HOPPER
def test_every_process_has_the_bits_of_its_first_calls():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(PROCESSES)
    ]
    try:
        said = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [words.strip().splitlines()[-1:] for words in said] == PROCESSES * [["right"]], (
        "\n\n".join(said)
    )


def main() -> None:
    slow = GDNCase(
        **GDN_ON_HOPPER | dict(key_heads=16, seqlen=8192, gate=1e-4), device="cuda"
    ).inputs()
    short = GDNCase(
        **GDN_ON_HOPPER | dict(key_heads=16, seqlen=500, gate=1e-4), batch=8, device="cuda"
    ).inputs()
    ssd = SSDCase(heads=80, headdim=64, dstate=128, dtype=BF16, device="cuda", seqlen=8192).inputs()
    configs = [
        GDNHopperConfig(segment=32, transition_parts=2, longest_first_pass=31),
        GDNHopperConfig(segment=32),
        GDNHopperConfig(segment=32, first_segment_extra=True),
    ]
    calls: list[Callable[[], tuple[torch.Tensor, ...]]] = [lambda: TARGETS["ssd hopper, fine"](ssd)]
    for inputs, config in [*((slow, one) for one in configs), (short, GDNHopperConfig(segment=16))]:
        run = gdn_hopper_by(config)
        calls.append(lambda run=run, inputs=inputs: run(inputs, Precision()))  # type: ignore[misc]
    first = [call() for call in calls]
    matrix = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    ours = torch.cuda.Stream()
    theirs = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(ROUNDS):
        with torch.cuda.stream(theirs):
            for _ in range(10):
                matrix @ matrix
        with torch.cuda.stream(ours):
            found = [call() for call in calls]
        torch.cuda.synchronize()
        wrong = [i for i, output in enumerate(found) if not all(map(torch.equal, output, first[i]))]
        assert not wrong, wrong
    print("right")


if __name__ == "__main__":
    main()
