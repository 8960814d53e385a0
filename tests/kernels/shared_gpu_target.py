"""One process of `test_shared_gpu.py`: repeats calls, requires the same bits each time, and prints "right"."""

from __future__ import annotations

from collections.abc import Callable

import torch
from kernel_cases import BF16, GDNCase, SSDCase
from subjects import GDN_ON_HOPPER, GDN_ONE, SUBJECTS

from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig
from ssdprof.kernels.gdn.hopper.launch import GDNHopperLaunch

ROUNDS = 40
Tensors = tuple[torch.Tensor, ...]


def of_gdn(case: GDNCase, config: GDNHopperConfig) -> Callable[[], Tensors]:
    inputs = case.inputs()
    launch = GDNHopperLaunch(inputs, config)
    return lambda: tuple(launch(inputs))


def of_ssd() -> Callable[[], Tensors]:
    inputs = SSDCase(heads=80, headdim=64, dstate=128, dtype=BF16, device="cuda", seqlen=8192).inputs()
    return lambda: tuple(SUBJECTS["ssd hopper, fine"](inputs))


def main() -> None:
    slow = GDNCase(**GDN_ON_HOPPER | dict(key_heads=16, seqlen=8192, gate=1e-4), device="cuda")
    calls = {
        "parts": of_gdn(slow, GDNHopperConfig(segment=32, transition_parts=2, longest_first_pass=31)),
        "first passes": of_gdn(slow, GDNHopperConfig(segment=32)),
        "leading": of_gdn(slow, GDNHopperConfig(segment=32, first_segment_extra=True)),
        "one launch": of_gdn(slow.but(batch=8, seqlen=500), GDN_ONE),
        "ssd": of_ssd(),
    }
    first = {name: call() for name, call in calls.items()}
    matrix = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    ours, theirs = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(ROUNDS):
        with torch.cuda.stream(theirs):
            for _ in range(10):
                matrix @ matrix
        with torch.cuda.stream(ours):
            found = {name: call() for name, call in calls.items()}
        torch.cuda.synchronize()
        wrong = [name for name in calls if not all(map(torch.equal, found[name], first[name]))]
        assert not wrong, wrong
    print("right")


if __name__ == "__main__":
    main()
