"""GDN's Hopper kernels compile without a GPU, and stay within the limits of registers and shared memory."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from compile_target import SHARED_BYTES, Compiled, compiled, on_meta
from gdn_hopper_cases import GDNCase

from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig
from ssdprof.kernels.gdn.hopper.launch import gdn_fused_hopper

pytestmark = pytest.mark.compiler

CUT = GDNHopperConfig(segment=4)
STAYS = GDNHopperConfig(segment=8, persistent_programs=2)
PARTS = GDNHopperConfig(segment=4, transition_parts=2, longest_first_pass=3)
PLAIN = GDNCase(seqlen=512, key_heads=2, heads=4)

CASES: dict[str, tuple[GDNCase, GDNHopperConfig]] = {
    "bf16": (PLAIN, CUT),
    "fp16, normalised": (replace(PLAIN, dtype=torch.float16, normalise=True), CUT),
    "three heads a key head, normalised": (replace(PLAIN, heads=6, normalise=True), CUT),
    "programs that stay, initial state": (replace(PLAIN, batch=3, initial_state=True), STAYS),
    "packed, initial state": (GDNCase(lengths=(300, 9), initial_state=True), CUT),
    "longer first segments": (PLAIN, replace(CUT, first_segment_extra=True)),
    "slow heads": (PLAIN, PARTS),
    "slow heads, 256 rows": (replace(PLAIN, seqlen=2048), replace(PARTS, segment=1, transition_parts=1)),
    "slow heads, 512 rows": (replace(PLAIN, seqlen=8192), replace(PARTS, segment=1, transition_parts=1)),
    "slow heads, packed, normalised, initial state": (
        GDNCase(lengths=(700, 9), initial_state=True, normalise=True),
        PARTS,
    ),
}
# waits for products: X and W in the role of scores; K S, X^T Y and Q S in both lanes of the role of states
SCORES_FIRST, SCORES_SECOND, STATES_FIRST, STATES_SECOND = 2, 4, 2 * 2, 2 * 3
SPILLED = {"_parts_kernel": 8, "_combine_kernel": 168}  # packed, outside the loop of chunks; with an initial state
PARTS_WAITS = 2 * 5  # in both lanes: the first X; K N; X^T Y with K M; X; X^T Z


def launch(case: GDNCase, config: GDNHopperConfig) -> None:
    gdn_fused_hopper(on_meta(case.inputs()), config=config)


LAUNCHES: dict[str, Callable[[], None]] = {label: partial(launch, *case) for label, case in CASES.items()}
INVERTS = replace(STAYS, fused_inverse=True, key_ring=3, state_registers=176, other_registers=64)
ONE_LAUNCH: dict[str, Callable[[], None]] = {
    "programs that stay": partial(launch, replace(PLAIN, batch=3, initial_state=True), INVERTS),
    "packed": partial(launch, GDNCase(lengths=(300, 9)), replace(INVERTS, persistent_programs=0)),
}


def kernel_of(label: str, name: str) -> Compiled:
    (kernel,) = (one for one in compiled("test_gdn_hopper_compile", 90)[label] if one.kernel == name)
    return kernel


@pytest.mark.parametrize("label", CASES)
def test_launches(label: str) -> None:
    """Two more launches for heads that forget slowly."""
    names = [kernel.kernel for kernel in compiled("test_gdn_hopper_compile", 90)[label]]
    slow = ["_parts_kernel", "_combine_kernel"] if CASES[label][1].transition_parts else []
    assert names == ["_prep_kernel", *slow, "_hopper_kernel"]


@pytest.mark.parametrize("label", CASES)
def test_nothing_is_spilled_where_states_are_in_registers(label: str) -> None:
    for kernel in compiled("test_gdn_hopper_compile", 90)[label]:
        assert kernel.shared_bytes <= SHARED_BYTES[90], kernel
        if kernel.kernel in ("_hopper_kernel", "_parts_kernel"):  # at entry, equal for all; roles redistribute later
            assert kernel.registers == (128 if kernel.kernel == "_hopper_kernel" else 168), kernel
        if kernel.kernel != "_prep_kernel":
            assert kernel.spilled_bytes <= SPILLED.get(kernel.kernel, 0), kernel
        assert kernel.lost_addresses == 0, kernel
        assert kernel.idle_barriers == 0, kernel


@pytest.mark.parametrize("label", CASES)
def test_a_direct_launch_counts_the_parameters(label: str) -> None:
    for kernel in compiled("test_gdn_hopper_compile", 90)[label]:
        assert kernel.counted_parameters == kernel.parameters > 0, kernel


@pytest.mark.parametrize("label", ONE_LAUNCH)
def test_one_launch_fits_into_shared_memory(label: str) -> None:
    (kernel,) = compiled("test_gdn_hopper_compile", 90, "ONE_LAUNCH")[label]
    assert kernel.shared_bytes <= SHARED_BYTES[90], kernel
    assert kernel.spilled_bytes <= 64, kernel
    assert kernel.lost_addresses == kernel.idle_barriers == 0, kernel


@pytest.mark.parametrize("label", CASES)
def test_no_product_waits_for_one_that_it_does_not_need(label: str) -> None:
    """ptxas adds waits if it assumes, or its registers cause, that a product's operands change while it runs."""
    first = 0 if CASES[label][1].persistent_programs else SCORES_FIRST + STATES_FIRST  # Triton removes the empty loop
    waits = kernel_of(label, "_hopper_kernel").product_waits
    assert waits == first + SCORES_SECOND + STATES_SECOND
    if CASES[label][1].transition_parts:
        assert kernel_of(label, "_parts_kernel").product_waits == PARTS_WAITS
