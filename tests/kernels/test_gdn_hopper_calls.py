"""Host work of a call of GDN's Hopper kernels, with launches that do nothing: torch operations and
bytes.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from kernel_cases import GDNCase
from targets import GDN_ON_HOPPER, OLMO
from torch.utils._python_dispatch import TorchDispatchMode

from ssdprof.kernels import gdn_fused
from ssdprof.kernels.choice import FusedCall
from ssdprof.kernels.gdn import fused
from ssdprof.kernels.gdn.hopper import launch, slices
from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.tensors import ALIGNMENT, Part, places

ALLOCATING = {"empty", "empty_like", "empty_strided", "clone", "new_zeros"}
POISON = {"detach", "fill_"}  # `conftest.py` fills new memory
OUTPUTS = ["empty_like", "empty_strided"]
GATES = ["as_strided", "clone", "as_strided", "clone"]
INITIAL = ["new_zeros", "as_strided", "as_strided", "copy_"]
FINAL = ["as_strided", "as_strided", "copy_"]
SMALL = GDNCase(**GDN_ON_HOPPER | dict(seqlen=130))
SLICES = SMALL.but(**OLMO)
PARTS = GDNHopperConfig(segment=2, transition_parts=2, longest_first_pass=1)
TWO_LAUNCHES = GDNHopperConfig(segment=2)
# the inputs, the configuration, the launches, and the ordered torch operations of a call with a
# known signature
CASES: dict[str, tuple[GDNCase, GDNHopperConfig, int, list[str]]] = {
    "two launches": (SMALL, TWO_LAUNCHES, 2, ["empty", *OUTPUTS]),
    "normalised inside, initial state": (
        SMALL.but(l2norm=True, initial_states=True),
        TWO_LAUNCHES,
        2,
        ["empty", *OUTPUTS],
    ),
    "packed": (
        SMALL.but(lengths=(70, 0, 9), initial_states=True),
        TWO_LAUNCHES,
        2,
        ["empty", *OUTPUTS],
    ),
    "slow heads": (SMALL.but(seqlen=500), PARTS, 4, ["empty", *OUTPUTS]),
    "slices": (SLICES, TWO_LAUNCHES, 2, [*GATES, "empty", *OUTPUTS, *FINAL]),
    "slices, initial state": (
        SLICES.but(initial_states=True),
        TWO_LAUNCHES,
        2,
        [*GATES, "empty", *INITIAL, *OUTPUTS, *FINAL],
    ),
    "one slice": (SLICES.but(value_dim=120), TWO_LAUNCHES, 2, ["empty", *OUTPUTS, *FINAL]),
}


class Recorder(TorchDispatchMode):
    """Runs torch operations and records them and the bytes that they allocate."""

    def __init__(self):
        super().__init__()
        self.operations: list[str] = []
        self.nbytes = 0

    def __torch_dispatch__(self, operation, _types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        name = operation.overloadpacket.__name__
        if name not in POISON:
            self.operations.append(name)
        if name in ALLOCATING:
            self.nbytes += result.untyped_storage().nbytes()
        return result


@pytest.fixture
def launches(monkeypatch) -> Iterator[list[tuple[Any, ...]]]:
    """The arguments of every launch.  The launches do nothing."""
    made = []

    def launcher(*_prepared) -> Callable[..., None]:
        return lambda _programs, *arguments: made.append(arguments)

    monkeypatch.setattr(launch, "Launcher", launcher)
    hopper = replace(
        fused.HOPPER, configure=lambda call: fused.hopper_cut(call), unsupported=_unlike
    )
    sliced = replace(fused.SLICES, configure=lambda call: fused.hopper_cut(call))
    monkeypatch.setattr(slices, "unsupported_otherwise", lambda _inputs: "")
    monkeypatch.setattr(fused.FUSED, "variants", (hopper, sliced))
    fused.FUSED.launches.clear()
    yield made
    fused.FUSED.launches.clear()


def _unlike(call: FusedCall) -> str:
    return "" if call.inputs.q.shape[3] == call.inputs.v.shape[3] else "no"


def call(inputs: GDNInputs) -> GDNOutput:
    """Through the public function."""
    return gdn_fused(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.g,
        inputs.beta,
        initial_state=inputs.initial_state,
        use_qk_l2norm=inputs.use_qk_l2norm,
        cu_seqlens=inputs.cu_seqlens,
    )


@pytest.mark.parametrize("name", CASES)
def test_a_call_of_a_known_signature_makes_these_operations_and_no_others(
    monkeypatch, launches: list[tuple[Any, ...]], name
):
    case, config, number, operations = CASES[name]
    monkeypatch.setattr(fused, "hopper_cut", lambda _call: config)
    call(case.inputs())
    launches.clear()
    inputs = case.but(seed=1).inputs()
    with Recorder() as recorder:
        output = call(inputs)
    assert recorder.operations == operations
    assert len(launches) == number
    outputs = output.out.nbytes + output.final_states.nbytes
    plan = fused.plan(inputs)
    assert recorder.nbytes - outputs == plan.workspace_bytes
    copies = [one for one in operations if one in ("clone", "new_zeros", "copy_")]
    assert plan.launches == number + len(copies)
    taken = (
        one
        for arguments in launches
        for one in map(_base, arguments)
        if isinstance(one, Part) and one.begin >= 0
    )
    parts = {one.data_ptr(): one for one in taken}
    # parts of the workspace lie apart and aligned
    for (begin, one), (following, _) in pairwise(sorted(parts.items())):
        assert begin + one.tensor().nbytes <= following
        assert (following - begin) % ALIGNMENT == 0


def _base(argument):
    """The tensor of a descriptor."""
    return getattr(argument, "base", argument)


def test_places_are_counted_beyond_32_bits():
    nbytes, found = places(
        {"a": (torch.bfloat16, 1 << 16, 1 << 16, 3), "none": None, "b": (torch.float32, 5)}
    )
    assert found == {
        "a": (0, 3 << 33, torch.bfloat16),
        "none": None,
        "b": (3 << 33, 20, torch.float32),
    }
    assert nbytes == (3 << 33) + ALIGNMENT
    part = Part(torch.empty(nbytes // 4, device="meta"), 3 << 33, 20, torch.float32)
    assert part.data_ptr() == 3 << 33
    assert part.tensor().shape == (5,)
    assert part.strided((5,), (1,)).storage_offset() == 3 << 31
