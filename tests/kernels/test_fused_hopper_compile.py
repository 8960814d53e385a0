"""The Hopper kernel compiles without a GPU, and stays within the limits of registers and shared memory."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from compile_target import SHARED_BYTES, compiled, on_meta
from ssd_cases import EXACT, RELAXED, Case

from ssdprof.kernels.hopper.schedule import Cut
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig, n_split
from ssdprof.kernels.ssd.hopper.launch import ssd_fused_hopper

pytestmark = pytest.mark.compiler

CUT = Cut(segment=4)
ALONE = Cut(segment=3, long_count=1, long_segment=9, recompute=True)
WHOLE = Cut(segment=16)
SHARES = Cut(segment=16, shares=4)

FOUR = Case(seqlen=1024, heads=4, headdim=64, dstate=128, dtype=torch.bfloat16)
PACKED = Case(lengths=(600, 9), initial_states=True, heads=4, headdim=80, dstate=128, dtype=torch.bfloat16)
BATCH = replace(FOUR, batch=3)
WIDE = dict(heads=3, dstate=256)

# Bytes of one thread's stack: 8 or 16 with Triton 3.6, up to 40 if sequences are packed and N is 256, and up to 56
# with shares, for which roles process several segments in a row.
CASES: dict[str, tuple[Case, Precision, Cut, int]] = {
    "mamba2 bf16 exact": (FOUR, EXACT, CUT, 16),
    "mamba2 bf16 exact, alone": (FOUR, EXACT, ALONE, 16),
    "mamba2 fp16 exact": (replace(FOUR, dtype=torch.float16), EXACT, CUT, 16),
    "mamba2 fp16 relaxed": (replace(FOUR, dtype=torch.float16), RELAXED, CUT, 16),
    "mamba2 bf16 exact, one segment": (FOUR, EXACT, WHOLE, 16),
    "mamba2 bf16 exact, shares": (BATCH, EXACT, SHARES, 16),
    "mamba2 fp16 relaxed, shares": (replace(BATCH, dtype=torch.float16), RELAXED, SHARES, 16),
    "packed bf16 exact": (replace(PACKED, headdim=64, initial_states=False), EXACT, CUT, 16),
    "packed p 80 bf16": (PACKED, EXACT, CUT, 16),
    "p 80 bf16, shares": (replace(BATCH, headdim=80, initial_states=True), EXACT, SHARES, 56),
    "p 128 n 64 bf16": (replace(FOUR, heads=2, headdim=128, dstate=64), EXACT, CUT, 16),
    "n 256 bf16, one segment": (replace(FOUR, **WIDE), EXACT, WHOLE, 16),
    "n 256 bf16, shares": (replace(BATCH, **WIDE), EXACT, SHARES, 16),
    "n 256 fp16 relaxed, shares": (replace(BATCH, dtype=torch.float16, **WIDE), RELAXED, SHARES, 56),
    "p 128 n 256 bf16": (replace(FOUR, headdim=128, **WIDE), EXACT, CUT, 16),
    "n 256 fp16 relaxed": (replace(FOUR, dtype=torch.float16, **WIDE), RELAXED, CUT, 16),
    "packed p 80 n 256 bf16": (replace(PACKED, **WIDE), EXACT, CUT, 40),
}


def launch(case: Case, precision: Precision, segments: Cut) -> None:
    inputs = on_meta(case.inputs())
    config = SSDHopperConfig.choose(inputs, sm_count=132, batch_invariant=False)
    ssd_fused_hopper(inputs, precision, config=replace(config, **asdict(segments)))


def has_first_pass(label: str) -> bool:
    return CASES[label][2] in (CUT, ALONE)


LAUNCHES: dict[str, Callable[[], None]] = {label: partial(launch, *case[:3]) for label, case in CASES.items()}


@pytest.mark.parametrize("label", CASES)
def test_compiles_within_the_limits(label: str) -> None:
    (kernel,) = compiled("test_fused_hopper_compile", 90)[label]
    assert kernel.kernel == "_fused_hopper_kernel"
    assert kernel.spilled_bytes <= CASES[label][3], kernel
    assert kernel.registers == 128, kernel  # at entry: equal for 512 threads; roles redistribute later
    assert kernel.shared_bytes <= SHARED_BYTES[90], kernel
    assert kernel.idle_barriers == 0, kernel


@pytest.mark.parametrize("label", CASES)
def test_what_is_loaded_ahead_is_taken_up_a_turn_later(label: str) -> None:
    """Loads of dt: two positions per thread, from one chunk; in the first pass more threads load two chunks."""
    (kernel,) = compiled("test_fused_hopper_compile", 90)[label]
    assert kernel.loads_ahead == 2 + 2 * has_first_pass(label)


@pytest.mark.parametrize("label", CASES)
def test_no_product_waits_for_one_that_it_does_not_need(label: str) -> None:
    """One wait in the role of scores.  In the role of states, one for each chunk of a turn of the first pass, if there
    is one, and two in the second pass.  ptxas adds waits if it assumes, or if its register allocation causes, that a
    product's operands change while the product runs."""
    (kernel,) = compiled("test_fused_hopper_compile", 90)[label]
    turn = n_split(CASES[label][0].dstate)
    assert kernel.product_waits == 1 + turn * has_first_pass(label) + 2


@pytest.mark.parametrize("label", CASES)
def test_lanes_do_not_meet_where_one_may_go_on_longer(label: str) -> None:
    """Each lane polls its own flags, and sums until its own decays are zero."""
    (kernel,) = compiled("test_fused_hopper_compile", 90)[label]
    assert bool(kernel.polls) == (CASES[label][2] in (CUT, SHARES))
    assert kernel.meetings_while_polling == 0


@pytest.mark.parametrize("label", CASES)
def test_lanes_meet_once_a_chunk_or_twice_where_they_exchange_parts(label: str) -> None:
    """Triton adds barriers for all threads of a role to protect shared memory.  Five per chunk made exact slower."""
    (kernel,) = compiled("test_fused_hopper_compile", 90)[label]
    assert kernel.meetings == n_split(CASES[label][0].dstate)
